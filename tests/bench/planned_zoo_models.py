"""Models of no transcribed family, by name, for plans that are chosen for them and run.

Each has the width of its config's default, some have more blocks. A plan names one as `model:
{entry: tests.bench.planned_zoo_models:NAME}`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from torch import Tensor, nn
from torch.nn import functional

from tests.bench.planned_live import UNet

HF: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "bert": ("BertForMaskedLM", {}),
    "roberta": ("RobertaForMaskedLM", {}),
    "distilbert": ("DistilBertForMaskedLM", {}),
    "albert": ("AlbertForMaskedLM", {"hidden_size": 1024, "num_attention_heads": 16}),
    "electra": ("ElectraForMaskedLM", {}),
    "deberta-v2": ("DebertaV2ForMaskedLM", {"hidden_size": 768, "num_attention_heads": 12,
                                            "intermediate_size": 3072, "vocab_size": 32000}),
    "modernbert": ("ModernBertForMaskedLM", {}),
    "mpnet": ("MPNetForMaskedLM", {}),
    "t5": ("T5ForConditionalGeneration", {}),
    "mt5": ("MT5ForConditionalGeneration", {"vocab_size": 32000}),
    "bart": ("BartForConditionalGeneration", {}),
    "pegasus": ("PegasusForConditionalGeneration", {}),
    "opt": ("OPTForCausalLM", {}),
    "bloom": ("BloomForCausalLM", {"hidden_size": 1024, "n_layer": 24, "n_head": 16,
                                   "vocab_size": 32000}),
    "gpt_neo": ("GPTNeoForCausalLM", {"hidden_size": 1024, "num_layers": 12,
                                      "attention_types": [[["global", "local"], 6]],
                                      "num_heads": 16}),
    "gpt_neox": ("GPTNeoXForCausalLM", {"hidden_size": 1024, "intermediate_size": 4096,
                                        "num_hidden_layers": 16, "num_attention_heads": 16}),
    "gptj": ("GPTJForCausalLM", {"n_embd": 1024, "n_layer": 16, "n_head": 16, "rotary_dim": 32}),
    "codegen": ("CodeGenForCausalLM", {"n_embd": 1024, "n_layer": 20, "n_head": 16,
                                       "rotary_dim": 32}),
    "falcon": ("FalconForCausalLM", {"hidden_size": 1024, "num_hidden_layers": 16,
                                     "num_attention_heads": 16}),
    "mpt": ("MptForCausalLM", {"d_model": 1024, "n_layers": 16, "n_heads": 16}),
    "stablelm": ("StableLmForCausalLM", {"hidden_size": 1024, "intermediate_size": 2752,
                                         "num_hidden_layers": 16, "num_attention_heads": 16,
                                         "num_key_value_heads": 16}),
    "starcoder2": ("Starcoder2ForCausalLM", {"hidden_size": 1024, "intermediate_size": 4096,
                                             "num_hidden_layers": 16, "num_attention_heads": 16}),
    "phi": ("PhiForCausalLM", {"hidden_size": 1024, "intermediate_size": 4096,
                               "num_attention_heads": 16, "num_hidden_layers": 16}),
    "olmo2": ("Olmo2ForCausalLM", {"hidden_size": 1024, "intermediate_size": 2752,
                                   "num_attention_heads": 16, "num_hidden_layers": 16}),
    "cohere": ("CohereForCausalLM", {"hidden_size": 1024, "intermediate_size": 2752,
                                     "num_attention_heads": 16, "num_hidden_layers": 16,
                                     "vocab_size": 32000}),
    "granite": ("GraniteForCausalLM", {"hidden_size": 1024, "intermediate_size": 2752,
                                       "num_attention_heads": 16, "num_hidden_layers": 16}),
    "glm": ("GlmForCausalLM", {"hidden_size": 1024, "intermediate_size": 2752, "head_dim": 64,
                               "num_attention_heads": 16, "num_hidden_layers": 16,
                               "vocab_size": 32000, "pad_token_id": 0}),
    "xglm": ("XGLMForCausalLM", {"vocab_size": 32000, "num_layers": 12}),
    "biogpt": ("BioGptForCausalLM", {"num_hidden_layers": 12}),
    "mamba": ("MambaForCausalLM", {"num_hidden_layers": 16}),
    "rwkv": ("RwkvForCausalLM", {"hidden_size": 1024, "num_hidden_layers": 12}),
    "vit": ("ViTForImageClassification", {}),
    "beit": ("BeitForImageClassification", {}),
    "swin": ("SwinForImageClassification", {}),
    "convnext": ("ConvNextForImageClassification", {}),
    "resnet": ("ResNetForImageClassification", {}),
    "segformer": ("SegformerForImageClassification", {}),
    "dinov2": ("Dinov2ForImageClassification", {}),
    "wav2vec2": ("Wav2Vec2ForCTC", {}),
}  # fmt: skip
"""Classes of transformers, by model type, and what differs from the defaults of their configs."""


_IMAGES: Final = {"input": {"shape": [1, 3, 224, 224], "dtype": "fp32"}}
INPUTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "resnet": _IMAGES, "segformer": _IMAGES,
    "wav2vec2": {"input": {"shape": [1, 16000], "dtype": "fp32"}},
}  # fmt: skip
"""What plans state of inputs that do not follow from a config."""
DEEPER: Final[Mapping[str, int]] = {
    "opt": 2, "roberta": 2, "electra": 2, "mpnet": 2, "deberta-v2": 2, "t5": 4, "distilbert": 4,
    "resnet": 2, "swin": 2, "convnext": 2,
}  # fmt: skip
"""Times as many blocks as the config has; 1 where it is not stated here."""
TOKENS: Final[Mapping[str, int]] = {"mamba": 64, "rwkv": 64}
"""Length of a sequence; 512 where it is not stated here. Without their kernels, these models run a
Python loop over the tokens."""
_DEPTHS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers",
                  "encoder_layers", "decoder_layers", "depths")  # fmt: skip


def _deepened(config: Any, times: int) -> Any:
    """Multiply the number of blocks of a config of transformers, in stages that of the third."""
    for key in _DEPTHS:
        value = getattr(config, key, None) if key in config.to_dict() else None
        if isinstance(value, int):
            setattr(config, key, value * times)
        elif isinstance(value, list | tuple):
            setattr(config, key, [*value[:2], value[2] * times, *value[3:]])
    return config


SMALL: Final[Mapping[str, Callable[[], nn.Module]]] = {
    "hybrid blocks": lambda: HybridModel(96, vocab=512),
    "mlp mixer": lambda: MlpMixer(96),
}
"""Modules of no package that are run at a smaller width than they are planned at."""


class HybridBlock(nn.Module):
    """Convolution along the sequence, attention, and a gated product, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(3)])
        self.conv = nn.Conv1d(width, width, 5, padding=2, groups=width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate, self.up = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.conv(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norms[1](x)).chunk(3, dim=-1)
        q, k, v = (each.view(batch, tokens, self.heads, -1).transpose(1, 2) for each in (q, k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        y = self.norms[2](x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class HybridModel(nn.Module):
    """Tokens through hybrid blocks; every third one is wider inside, so that not all are alike."""

    def __init__(self, width: int = 768, blocks: int = 12, vocab: int = 32000) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList([HybridBlock(width, 12) for _ in range(blocks)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class MlpMixer(nn.Module):
    """Patches mixed by two products per block, along the patches and along the channels."""

    def __init__(self, width: int = 768, patches: int = 196, blocks: int = 48) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 16, stride=16)
        self.tokens = nn.ModuleList(
            [nn.Sequential(nn.Linear(patches, 384), nn.GELU(), nn.Linear(384, patches))
             for _ in range(blocks)]
        )  # fmt: skip
        self.channels = nn.ModuleList(
            [nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(),
                           nn.Linear(4 * width, width)) for _ in range(blocks)]
        )  # fmt: skip
        self.head = nn.Linear(width, 1000)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image).flatten(2)
        for tokens, channels in zip(self.tokens, self.channels, strict=True):
            x = x + tokens(x)
            x = x + channels(x.transpose(1, 2)).transpose(1, 2)
        return self.head(x.mean(dim=2))


OWN: Final[Mapping[str, tuple[Callable[[], nn.Module], Mapping[str, Any]]]] = {
    "hybrid blocks": (HybridModel, {}),
    "mlp mixer": (MlpMixer, {"input": {"shape": [1, 3, 224, 224], "dtype": "fp32"}}),
    "unet": (lambda: UNet(12), {"input": {"shape": [1, 4, 16, 16], "dtype": "fp32"}}),
}
"""Modules of no package, and what their plans state of the input."""

MODELS: Final = (*HF, *OWN)


def __getattr__(name: str) -> Callable[[], nn.Module]:
    """Return the function that builds a model, for `entry: tests.bench.planned_zoo_models:NAME`."""
    key = next((each for each in MODELS if attribute_of(each) == name.removesuffix("_small")), None)
    if key is None:
        raise AttributeError(name)
    if name.endswith("_small"):
        return SMALL[key]
    return OWN[key][0] if key in OWN else partial(_of_transformers, key)


def attribute_of(name: str) -> str:
    """Return the attribute of this module that builds a model."""
    return name.replace(" ", "_").replace("-", "_")


def _of_transformers(name: str) -> nn.Module:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    cls, more = HF[name]
    config = _deepened(CONFIG_MAPPING[name](**more), DEEPER.get(name, 1))
    for key in ("dropout", "attention_dropout", "hidden_dropout_prob", "layerdrop",
                "attention_probs_dropout_prob", "drop_path_rate", "mask_time_prob"):  # fmt: skip
        if hasattr(config, key):
            setattr(config, key, 0.0)
    config.use_cache = False
    return getattr(transformers, cls)(config)
