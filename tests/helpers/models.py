"""The models that parity is proved on: tiny, deterministic, in train mode, without dropout.

Everything is a function of the model's name, so that a worker process rebuilds exactly what the
test process has. Widths and heads divide by 4, so that every model with tensor-parallel rules
can be cut four ways.
"""

from __future__ import annotations

import functools
import os
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

os.environ.setdefault("HF_HUB_OFFLINE", "1")

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN = 64, 8, 4, 8, 128
VOCAB, SEQ_LEN, LAYERS = 128, 16, 2
IMAGE, CLASSES, FEATURES = 16, 8, 24

SPECIAL_TOKENS: Final[dict[str, Any]] = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


class ConvBlock(nn.Module):
    """Two convolutions beside a shortcut, normalised per sample: batch statistics would differ."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(4, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(4, outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # Not ReLU: its kink turns a rounding error on a zero input into 1e-5 in the weights.
        out = self.norm2(self.conv2(F.silu(self.norm1(self.conv1(x)))))
        return F.silu(out + self.shortcut(x))


class ResNet(nn.Module):
    """A stem, three residual blocks and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 1, 1)
        self.blocks = nn.ModuleList(
            [ConvBlock(16, 16, 1), ConvBlock(16, 32, 2), ConvBlock(32, 32, 1)]
        )
        self.head = nn.Linear(32, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class OddBlock(nn.Module):
    """Holds a parameter beside its submodules, an odd width, and a persistent buffer."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(FEATURES))
        self.up = nn.Linear(FEATURES, 37)
        self.down = nn.Linear(37, FEATURES, bias=False)
        self.shared = shared
        self.register_buffer("shift", torch.linspace(-1, 1, FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(x) + self.gain * self.down(torch.tanh(self.up(x + self.shift)))


class Odd(nn.Module):
    """What real code does and wrappers trip over.

    One submodule under four names and called four times, parameters held by the root and by the
    blocks, a scalar parameter, frozen parameters, a persistent and a non-persistent buffer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh())
        self.twin = self.shared
        self.blocks = nn.ModuleList([OddBlock(self.shared), OddBlock(self.shared)])
        self.frozen = nn.Linear(FEATURES, FEATURES).requires_grad_(False)
        self.bias = nn.Parameter(torch.zeros(FEATURES))
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.head = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("ramp", torch.linspace(0, 1, FEATURES), persistent=False)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        x = self.twin(self.shared(x)) + self.frozen(x) * self.ramp
        for block in self.blocks:
            x = block(x)
        return self.head((x + self.bias) * gate) * self.temperature


def _own_llama() -> nn.Module:
    from meshplan.runtime.demo_model import ByteLlama, ByteLlamaConfig

    config = ByteLlamaConfig(
        dim=HIDDEN,
        num_layers=4,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        ffn_dim=FFN,
    )
    return ByteLlama(config)


def _decoder_config(**more: Any) -> dict[str, Any]:
    return SPECIAL_TOKENS | {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": SEQ_LEN,
        "use_cache": False,
        **more,
    }


def _hf_llama(tied: bool = False) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_decoder_config(tie_word_embeddings=tied)))


def _qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**_decoder_config(tie_word_embeddings=False)))


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=SEQ_LEN,
        n_embd=HIDDEN,
        n_layer=LAYERS,
        n_head=HEADS,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        **SPECIAL_TOKENS,
    )
    return GPT2LMHeadModel(config)


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=SEQ_LEN,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForMaskedLM(config)


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        image_size=IMAGE,
        patch_size=4,
        num_labels=CLASSES,
    )
    return ViTForImageClassification(config)


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCAB,
        d_model=HIDDEN,
        d_kv=HEAD_DIM,
        d_ff=FFN,
        num_layers=LAYERS,
        num_heads=HEADS,
        dropout_rate=0.0,
        use_cache=False,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)


BUILDERS: Final[Mapping[str, Callable[[], nn.Module]]] = {
    "own_llama": _own_llama,
    "hf_llama": _hf_llama,
    "hf_llama_tied": functools.partial(_hf_llama, tied=True),
    "gpt2": _gpt2,
    "qwen3": _qwen3,
    "bert": _bert,
    "vit": _vit,
    "t5": _t5,
    "resnet": ResNet,
    "odd": Odd,
}
NAMES: Final = tuple(BUILDERS)


def build(name: str, seed: int = 0) -> nn.Module:
    """The model on CPU, in train mode, with the same numbers for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return (BUILDERS.get(name) or _of_experts(name))().train()


def _of_experts(name: str) -> Callable[[], nn.Module]:
    """Of a mixture of experts, which stand apart: "experts: even"."""
    from tests.helpers import moe

    return moe.BUILDERS[name.removeprefix("experts: ")]


def batch(name: str, step: int, size: int = 8) -> tuple[Any, Tensor]:
    """A global batch: the inputs as the model takes them, and the targets."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))

    def tokens() -> Tensor:
        return torch.randint(3, VOCAB, (size, SEQ_LEN), generator=generator)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(size, *shape, generator=generator)

    def classes() -> Tensor:
        return torch.randint(CLASSES, (size,), generator=generator)

    match name:
        case "own_llama":
            return tokens(), tokens()
        case "bert":
            mask = torch.ones(size, SEQ_LEN, dtype=torch.int64)
            mask[:, SEQ_LEN - 3 :] = torch.randint(2, (size, 3), generator=generator)
            return {"input_ids": tokens(), "attention_mask": mask}, tokens()
        case "t5":
            return {"input_ids": tokens(), "decoder_input_ids": tokens()}, tokens()
        case "vit":
            return {"pixel_values": numbers(3, IMAGE, IMAGE)}, classes()
        case "resnet":
            return numbers(3, IMAGE, IMAGE), classes()
        case "odd":
            return (numbers(FEATURES), numbers(FEATURES)), classes()
        case _:
            return {"input_ids": tokens()}, tokens()


def call(model: nn.Module, inputs: Any) -> Any:
    """The model's output for inputs in any of the three forms."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def loss(output: Any, targets: Tensor) -> Tensor:
    """Mean cross-entropy, in float64 so that it adds no rounding of its own."""
    logits = getattr(output, "logits", output)
    return F.cross_entropy(logits.flatten(0, -2).double(), targets.flatten())


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """SGD: Adam would turn rounding noise on near-zero gradients into whole steps."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trainable, lr=0.1, momentum=0.9)


@functools.cache
def reference(
    name: str, steps: int = 3, batch_size: int = 8, clip: float | None = None
) -> tuple[tuple[float, ...], Mapping[str, Tensor]]:
    """What one process computes: the loss of every step, and the state dict after the last."""
    model = build(name)
    sgd = optimizer(model)
    losses = []
    for step in range(steps):
        inputs, targets = batch(name, step, batch_size)
        value = loss(call(model, inputs), targets)
        value.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        sgd.step()
        sgd.zero_grad()
        losses.append(value.item())
    return tuple(losses), {n: t.detach().clone() for n, t in model.state_dict().items()}


_LLAMA_RULES: Final = {
    "model.layers.*.self_attn.{q_proj,k_proj,v_proj}": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.{gate_proj,up_proj}": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
    "model.embed_tokens": "vocab",
    "lm_head": "vocab",
}
_TP_STYLES: Final[Mapping[str, Mapping[str, str]]] = {
    "own_llama": {
        "layers.*.attn.{wq,wk,wv}": "colwise",
        "layers.*.attn.wo": "rowwise",
        "layers.*.ffn.{w1,w3}": "colwise",
        "layers.*.ffn.w2": "rowwise",
        "embed": "vocab",
        "head": "vocab",
    },
    "hf_llama": _LLAMA_RULES,
    "hf_llama_tied": _LLAMA_RULES,
    "qwen3": _LLAMA_RULES
    | {"model.layers.*.self_attn.{q_norm,k_norm}": "replicated_with_grad_allreduce"},
    "gpt2": {  # the fused QKV of its attention stays whole
        "transformer.h.*.mlp.c_fc": "colwise",
        "transformer.h.*.mlp.c_proj": "rowwise",
    },
    "bert": {
        "bert.encoder.layer.*.attention.self.{query,key,value}": "colwise",
        "bert.encoder.layer.*.attention.output.dense": "rowwise",
        "bert.encoder.layer.*.intermediate.dense": "colwise",
        "bert.encoder.layer.*.output.dense": "rowwise",
    },
    "vit": {
        "vit.layers.*.attention.{q_proj,k_proj,v_proj}": "colwise",
        "vit.layers.*.attention.o_proj": "rowwise",
        "vit.layers.*.mlp.fc1": "colwise",
        "vit.layers.*.mlp.fc2": "rowwise",
    },
    "t5": {  # its cross-attention builds a bias for all heads, so it stays whole
        "**.SelfAttention.{q,k,v}": "colwise",
        "**.SelfAttention.o": "rowwise",
        "**.DenseReluDense.wi": "colwise",
        "**.DenseReluDense.wo": "rowwise",
        "**.relative_attention_bias": "colwise",
    },
}


def tp_rules(name: str) -> list[dict[str, Any]] | None:
    """Tensor parallelism by rule, as plan.yaml would state it; None where it makes no sense."""
    if name not in _TP_STYLES:
        return None
    return [{"match": glob, "place": {"tp": style}} for glob, style in _TP_STYLES[name].items()]
