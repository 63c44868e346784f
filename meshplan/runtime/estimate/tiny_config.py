"""Make a transformers config small, so that the plan still divides the same sizes evenly.

The small config keeps the ratio of query to key heads, the kinds of layers, special tokens inside
the vocabulary, and whether each size is a multiple of tp. The constants list the names under
which configs state sizes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

_LAYERS: Final = (
    "num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers",
    "num_decoder_layers", "depth",
)  # fmt: skip
_HEADS: Final = (
    "num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads",
    "decoder_attention_heads",
)  # fmt: skip
_KV_HEADS: Final = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_HIDDEN: Final = ("hidden_size", "n_embd", "d_model", "dim", "embed_dim")
_FFN: Final = (
    "intermediate_size", "n_inner", "d_ff", "ffn_dim", "hidden_dim", "encoder_ffn_dim",
    "decoder_ffn_dim", "moe_intermediate_size", "shared_expert_intermediate_size",
)  # fmt: skip
_EXPERTS: Final = ("num_local_experts", "num_experts", "n_routed_experts")
_TOP_K: Final = ("num_experts_per_tok", "moe_top_k")
_EMBEDDED: Final = ("word_embed_proj_dim", "embedding_size", "embedding_dim", "d_embed")
"""Widths of embeddings, which models project to the hidden width only if the two differ."""
_HEAD_DIM: Final = ("head_dim", "d_kv")
_POSITIONS: Final = ("max_position_embeddings", "n_positions", "max_sequence_length")
_SPECIAL: Final[Mapping[str, int]] = MappingProxyType(
    {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 0}
)
_AT_MOST: Final[Mapping[str, int]] = MappingProxyType(
    {
        "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "qk_head_dim": 32,
        "q_lora_rank": 32, "kv_lora_rank": 32,
        "n_group": 2, "topk_group": 2, "first_k_dense_replace": 1,
    }
)  # fmt: skip
"""Upper limits of sizes that need not be multiples of anything: those of DeepSeek's latent
attention and expert groups."""
_SMALL_HEAD, _SMALL_VOCAB, _SMALL_POSITIONS = 16, 128, 128
_ODD: Final = 1
"""Number added to a small size if the original is no multiple of tp."""


def shrink_layers(config: Any, layers: int) -> tuple[Any, list[str]]:
    """Return (copy of a config with at most `layers` layers, descriptions of the changes)."""
    small = copy.deepcopy(config)
    notes: list[str] = []
    for each in _parts(small):
        _cut_layers(each, layers, notes)
        _set(each, ("use_cache",), False, notes, adds_notes=False)
    return small, notes


def shrink_sizes(
    config: Any, *, layers: int, tp: int, small_tp: int, ep: int
) -> tuple[Any, list[str]]:
    """Return (copy of a config with few layers and small dims, descriptions of the changes).

    Args:
        config: The config, which is not changed.
        layers: Highest number of layers of the copy.
        tp: The size of tp in the user's plan. Sizes that are multiples of it become multiples of
            `small_tp`; the others become odd.
        small_tp: The size of tp with which the small model runs.
        ep: The size of ep with which the small model runs.
    """
    small, notes = shrink_layers(config, layers)
    for each in _parts(small):
        _shrink_heads(each, tp, small_tp, notes)
        for name in _FFN:
            size = _get(each, name)
            if size:
                _set(each, (name,), _divisible(size, 4 * _SMALL_HEAD, tp), notes)
        vocab = _get(each, "vocab_size")
        if vocab:
            _set(each, ("vocab_size",), _divisible(vocab, _SMALL_VOCAB, tp), notes)
            for name, token in _SPECIAL.items():
                if isinstance(getattr(each, name, None), int):
                    setattr(each, name, token)
        experts = max(4, 2 * ep)
        for name in _EXPERTS:
            _set(each, (name,), min(experts, _get(each, name) or experts), notes)
        for name in _TOP_K:
            _set(each, (name,), min(2, _get(each, name) or 2), notes)
        for name, most in _AT_MOST.items():
            _set(each, (name,), min(most, _get(each, name) or most), notes)
        for name in _POSITIONS:
            size = _get(each, name)
            if size:
                _set(each, (name,), min(size, _SMALL_POSITIONS), notes)
        image, patch = _get(each, "image_size"), _get(each, "patch_size")
        if image and patch:
            _set(each, ("image_size",), min(image, 4 * patch), notes)
    return small, list(dict.fromkeys(notes))


def _parts(config: Any) -> list[Any]:
    """Return the config and all configs inside it, such as those of a text and a vision tower."""
    kind = next(c for c in type(config).__mro__ if c.__name__.startswith("PreTrained")
                or c.__name__ == "PretrainedConfig")  # fmt: skip
    inner = [value for value in vars(config).values() if isinstance(value, kind)]
    return [config, *(part for each in inner for part in _parts(each))]


def _get(config: Any, name: str) -> int | None:
    """Return a size that the config states; None if the value is no positive integer."""
    value = getattr(config, name, None)
    return value if type(value) is int and value > 0 else None


def _set(
    config: Any, names: Sequence[str], value: Any, notes: list[str], *, adds_notes: bool = True
) -> None:
    """Set each of these attributes that the config has, and does not compute, to `value`.

    Args:
        config: The config.
        names: Names of the attributes.
        value: The new value.
        notes: Receives a description of each change.
        adds_notes: If False, no descriptions are added.
    """
    for name in names:
        old = getattr(config, name, None)
        if old is not None and old != value and not _is_computed(config, name):
            setattr(config, name, value)
            if adds_notes:
                notes.append(f"{name} {old} to {value}")


def _is_computed(config: Any, name: str) -> bool:
    """Return True if an attribute follows from others, as Falcon's head_dim from its width."""
    found = getattr(type(config), name, None)
    return isinstance(found, property) and found.fset is None


def _cut_layers(config: Any, layers: int, notes: list[str]) -> None:
    for name in _LAYERS:
        old = _get(config, name)
        if old is None or old <= layers:
            continue
        _set(config, (name,), layers, notes)
        for key, value in vars(config).items():
            if isinstance(value, list) and len(value) == old:  # One entry per layer.
                setattr(config, key, value[:layers])


def _divisible(size: int, small: int, tp: int) -> int:
    """Return `small`, increased by 1 if the original `size` is no multiple of tp.

    A `size` below `small` is returned itself.
    """
    small = min(size, small)
    return small if size % tp == 0 or small == size else small + _ODD


def _shrink_heads(config: Any, tp: int, small_tp: int, notes: list[str]) -> None:
    """Reduce the numbers of query and key heads in the same ratio, and set a width that fits.

    Args:
        config: The config to change.
        tp: The size of tp in the user's plan.
        small_tp: The size of tp with which the small model runs.
        notes: Receives a description of each change.
    """
    name = next((n for n in _HEADS if _get(config, n)), None)
    width = next((n for n in _HIDDEN if _get(config, n)), None)
    if name is None or width is None:
        return
    heads, hidden = _get(config, name) or 1, _get(config, width) or 1
    kv_name = next((n for n in _KV_HEADS if _get(config, n)), None)
    kv_heads = (_get(config, kv_name) if kv_name else None) or heads
    ratio = max(1, heads // kv_heads)
    few = kv_heads
    # The number of key heads stays a multiple of tp, or smaller than tp, as in the original.
    if kv_heads % tp == 0:
        few = min(kv_heads, max(2, small_tp))
    elif kv_heads < tp:
        few = max(1, small_tp * kv_heads // tp)
    stated = next((n for n in _HEAD_DIM if _get(config, n)), None)
    head_dim = min((_get(config, stated) if stated else None) or hidden // heads, _SMALL_HEAD)
    for each in _HEADS:
        _set(config, (each,), few * ratio, notes)
    if kv_name:
        _set(config, (kv_name,), few, notes)
    if stated:
        _set(config, (stated,), head_dim, notes)
    as_wide = [each for each in _EMBEDDED if _get(config, each) == hidden]
    for each in (*_HIDDEN, *as_wide):
        _set(config, (each,), few * ratio * head_dim, notes)
