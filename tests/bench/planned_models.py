"""Models of known families by the sizes in their published configs, for pages that plan them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

PLANS: Final = Path(__file__).parents[2] / "plans"


def _llama(
    hidden: int, inner: int, layers: int, heads: int, *, tied: bool = False
) -> Mapping[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": 8, "vocab_size": 128256,
        "max_position_embeddings": 131072, "tie_word_embeddings": tied,
    }  # fmt: skip


def _gpt2(hidden: int, layers: int, heads: int) -> Mapping[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 50257,
        "n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": 1024,
        "activation_function": "gelu_new", "resid_pdrop": 0.0, "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }  # fmt: skip


MODELS: Final[Mapping[str, Mapping[str, Any]]] = {
    "GPT-2 124M": _gpt2(768, 12, 12),
    "GPT-2 XL": _gpt2(1600, 48, 25),
    "Llama-3.2-1B": _llama(2048, 8192, 16, 32, tied=True),
    "Llama-3.1-8B": _llama(4096, 14336, 32, 32),
    "Llama-3.1-70B": _llama(8192, 28672, 80, 64),
    "Llama-3.1-405B": _llama(16384, 53248, 126, 128),
    "Mixtral-8x7B": json.loads((PLANS / "models" / "mixtral-8x7b.json").read_text()),
    "DeepSeek-V3": json.loads((PLANS / "models" / "deepseek-v3.json").read_text()),
}
"""By name, a Hugging Face config: the fields that say how large it is."""


LIVE: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "ViT-H/14": ("planned_live:vit_h", {}),
    "T5-11B": ("planned_live:t5_11b", {}),
    "Llama-3.1-8B, live": ("tiers:llama_8b", {}),
    "UNet, 98 blocks": ("planned_live:unet", {"input": {"shape": [1, 4, 64, 64], "dtype": "fp32"}}),
}
"""By name, the function of `tests.bench` that builds it, and what a plan must add."""


def write_plan(folder: Path, model: str, **fields: Any) -> Path:
    """A plan file that leaves everything open, with its model or its builder; gives its path.

    Args:
        fields: Top-level keys of the plan.
    """
    path = folder / "plan.yaml"
    if model in LIVE:
        function, more = LIVE[model]
        source = {"entry": f"tests.bench.{function}"}
        fields = {**more, **fields}
    else:
        (folder / "config.json").write_text(json.dumps(dict(MODELS[model])))
        source = {"config": "config.json"}
    plan = {
        "version": 1, "model": source, "mesh": "auto", "strategy": "auto",
        "precision": "bf16-mixed", "activation_checkpointing": "auto",
    }  # fmt: skip
    path.write_text(json.dumps(plan | fields))
    return path
