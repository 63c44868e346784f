"""Models that are run on a GPU: a Llama as torchtitan writes it, and models of transformers.

Each comes in two sizes: `full` for a GPU, `tiny` for a machine without one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F

from tests.bench.llama import Llama, Shape

_LLAMA: Final[Mapping[str, Shape]] = {
    # Llama 3.2 1B with its head untied.
    "full": Shape(layers=16, hidden=2048, heads=32, kv_heads=8, ffn=8192, vocab=128256,
                  seq_len=4096),
    "tiny": Shape(layers=4, hidden=64, heads=8, kv_heads=4, ffn=128, vocab=256, seq_len=32),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Model:
    """A model with its data.

    Args:
        build: Makes the model on torch's default device.
        batch: Maps a number of samples to (inputs, targets) on the default device.
        loss: Maps the model's output and the targets to the loss.
    """

    build: Callable[[], torch.nn.Module]
    batch: Callable[[int], tuple[Any, torch.Tensor]]
    loss: Callable[[Any, torch.Tensor], torch.Tensor]

    def start(self, device: str, samples: int, seed: int = 0) -> tuple[Any, Any, torch.Tensor]:
        """Return (the model with drawn parameters and buffers of zeros, inputs, targets)."""
        torch.manual_seed(seed)
        with torch.device(device):
            model = self.build()
            inputs, targets = self.batch(samples)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.02)
            for buffer in model.buffers():
                if buffer.is_floating_point() or buffer.is_complex():
                    buffer.zero_()
        return model, inputs, targets


def _tokens(samples: int, length: int, vocab: int) -> torch.Tensor:
    # Every index is in the vocabulary of the tiny models too.
    ids = torch.arange(samples * length, dtype=torch.long, device="cpu").view(samples, length)
    return (ids * 7919 % vocab).to(torch.get_default_device())


def cross_entropy(output: Any, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy in fp32 of logits, or of an output of transformers that has logits."""
    logits = output if isinstance(output, torch.Tensor) else output.logits
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


def _llama(size: str) -> Model:
    shape = _LLAMA[size]

    def batch(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = _tokens(samples, shape.seq_len, shape.vocab)
        return tokens, tokens.clone()

    return Model(lambda: Llama(shape), batch, cross_entropy)


def _built(architecture: str, config: Any) -> Callable[[], torch.nn.Module]:
    def build() -> torch.nn.Module:
        import transformers

        return getattr(transformers, architecture)(config).train()  # type: ignore[no-any-return]

    return build


def _language_model(architecture: str, config: Any, length: int) -> Model:
    config.use_cache = False

    def batch(samples: int) -> tuple[Any, torch.Tensor]:
        tokens = _tokens(samples, length, config.vocab_size)
        inputs: Any = {"input_ids": tokens}
        if config.is_encoder_decoder:
            inputs["decoder_input_ids"] = tokens.clone()
        return inputs, tokens.clone()

    return Model(_built(architecture, config), batch, cross_entropy)


def _classifier(architecture: str, config: Any, pixels: int) -> Model:
    def batch(samples: int) -> tuple[Any, torch.Tensor]:
        images = torch.zeros(samples, 3, pixels, pixels)
        return {"pixel_values": images}, torch.zeros(samples, dtype=torch.long)

    return Model(_built(architecture, config), batch, cross_entropy)


def _qwen(size: str) -> Model:
    from transformers import Qwen2Config

    if size == "full":
        config = Qwen2Config(hidden_size=1536, intermediate_size=8960, num_hidden_layers=20,
                             num_attention_heads=12, num_key_value_heads=2, vocab_size=151936,
                             tie_word_embeddings=True)  # fmt: skip
        return _language_model("Qwen2ForCausalLM", config, 2048)
    config = Qwen2Config(hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, vocab_size=128,
                         tie_word_embeddings=True)  # fmt: skip
    return _language_model("Qwen2ForCausalLM", config, 16)


def _gpt2(size: str) -> Model:
    from transformers import GPT2Config

    if size == "full":
        config = GPT2Config(n_embd=1280, n_layer=24, n_head=20)
        return _language_model("GPT2LMHeadModel", config, 1024)
    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=128, n_positions=16)
    return _language_model("GPT2LMHeadModel", config, 16)


def _bert(size: str) -> Model:
    from transformers import BertConfig

    if size == "full":
        config = BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16,
                            intermediate_size=4096)  # fmt: skip
        return _language_model("BertForMaskedLM", config, 512)
    config = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=128,
                        intermediate_size=64, max_position_embeddings=16)  # fmt: skip
    return _language_model("BertForMaskedLM", config, 16)


def _t5(size: str) -> Model:
    from transformers import T5Config

    if size == "full":
        config = T5Config(d_model=1024, d_kv=64, d_ff=4096, num_layers=16, num_heads=16)
        return _language_model("T5ForConditionalGeneration", config, 512)
    config = T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=128)
    return _language_model("T5ForConditionalGeneration", config, 16)


def _vit(size: str) -> Model:
    from transformers import ViTConfig

    if size == "full":
        config = ViTConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16,
                           intermediate_size=4096, num_labels=1000)  # fmt: skip
        return _classifier("ViTForImageClassification", config, 224)
    config = ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                       intermediate_size=64, image_size=32, num_labels=10)  # fmt: skip
    return _classifier("ViTForImageClassification", config, 32)


def _resnet(size: str) -> Model:
    from transformers import ResNetConfig

    if size == "full":
        return _classifier("ResNetForImageClassification", ResNetConfig(num_labels=1000), 224)
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=10)
    return _classifier("ResNetForImageClassification", config, 32)


MODELS: Final[Mapping[str, Callable[[str], Model]]] = {
    "llama": _llama, "qwen2": _qwen, "gpt2": _gpt2, "bert": _bert, "t5": _t5, "vit": _vit,
    "resnet": _resnet,
}  # fmt: skip
"""Each maps a size, `full` or `tiny`, to the model."""
