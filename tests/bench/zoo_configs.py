"""Configurations of transformers' architectures, made tiny without knowing the architecture.

A configuration is a dataclass. Its fields are shrunk by what their names say (`RULES`), its
sub-configurations likewise, and whatever the class derives from other fields is left to it. No
one recipe fits every architecture, so there are several (`RECIPES`), tried in order.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Final

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN = 64, 4, 2, 16, 128
LAYERS, VOCAB, POSITIONS, IMAGE, PATCH = 2, 128, 64, 32, 8

RULES: Final[tuple[tuple[str, str, int], ...]] = (
    (r"(bos|eos|pad|sep|cls|mask|start|end|unk|blank|forced\w*)_(token_)?(id|index)$", "id", 0),
    (r"_(token_id|token_index|id|index|idx)$", "id", 0),
    (r"(vocab_size|num_embeddings|vocabulary_size|num_labels|codebook_size)$", "vocab", VOCAB),
    (r"^(n_group|topk_group|n_shared_experts|num_shared_experts|moe_num_shared_experts"
     r"|first_k_dense_replace|num_expert_group|pretraining_tp)$", "count", 1),
    (r"(experts_per_tok|experts_per_token|moe_topk|moe_k|num_selected_experts|top_k)$", "count", 2),
    (r"(num_experts|n_routed_experts|num_local_experts|moe_num_experts)$", "count", 4),
    (r"(key_value_heads|kv_heads|num_key_value_heads|multi_query_group_num)$", "heads", KV_HEADS),
    (r"(attention_heads|n_heads?|num_heads|_heads)$", "heads", HEADS),
    (r"(qk_rope_head_dim|rotary_dim|rope_head_dim)$", "head_dim", 8),
    (r"(head_dim|^d_kv|attention_head_size|head_size|head_dim_\w+|kv_channels)$", "head_dim",
     HEAD_DIM),
    (r"(lora_rank|time_step_rank)$", "width", 16),
    (r"(insert_layer_id|feature_layer|kv_shared_layers|mtp_layers|nextn_predict_layers)$", "keep",
     0),
    (r"(num_feature_levels|head_in_index)$", "keep", 0),
    (r"(layers|n_layer|^depth|num_blocks|num_encoder_blocks|num_layer|_depth)$", "layers", LAYERS),
    (r"(intermediate_size|ffn_dim|^d_ff|mlp_dim|ffn_hidden_size|feedforward_dim|inner_dim"
     r"|ffn_size|d_inner|n_inner|feed_forward_hidden_size|dim_feedforward)$", "ffn", FFN),
    (r"(position_embeddings|n_positions|source_positions|target_positions|n_ctx|max_seq_len"
     r"|max_position\w*|max_length|max_text_len|pos_emb)$", "positions", POSITIONS),
    (r"(image_size|img_size|crop_size)$", "image", IMAGE),
    (r"(mel_bins|num_mel_filters)$", "keep", 0),
    (r"(hidden_size|d_model|n_embd|embed_dim|embedding_size|emb_dim|hidden_dim|projection_dim"
     r"|embedding_dim|hidden_size_\w+|output_dim|out_hidden_size|proj_size|_dim|^dim|query_dim"
     r"|_hidden_size\w*|hidden_channels|num_filters|base_channels|width)$", "width", HIDDEN),
)  # fmt: skip
"""(what the name of a whole-number field ends with, its kind, its tiny value); first match wins."""

STILL: Final = re.compile(
    r"drop|jitter|mask_time_prob|mask_feature_prob|label_noise|mask_ratio$|noise_scale"
)
"""Fields whose zero makes a model draw no random numbers."""

IDS: Final[Mapping[str, int]] = {"pad": 0, "bos": 1, "eos": 2, "decoder_start": 1}
FIRST_ID: Final = 100
"""Ids of special tokens are given from here upwards; inputs draw theirs from below."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One way to shrink.

    Args:
        ratio: Divide widths so that the widest hidden size is this; 0 for the values of RULES.
        image: Side of images, 0 to leave it.
        layers: Number of layers, 0 to leave it.
        lists: Whether lists of widths are divided too.
        mrope: Rotated pairs of a head that time, height and width share, 0 where there are none.
    """

    ratio: int = 0
    image: int = IMAGE
    layers: int = LAYERS
    lists: bool = True
    mrope: int = 0


RECIPES: Final = (
    Recipe(),
    Recipe(ratio=64),
    Recipe(ratio=64, image=64),
    Recipe(ratio=128, image=64, layers=4),
    Recipe(image=0),
    Recipe(ratio=128, image=0),
    Recipe(ratio=64, image=64, lists=False),
    Recipe(ratio=256, image=0, layers=0, lists=False),
    Recipe(mrope=8),
    Recipe(mrope=4),
    Recipe(ratio=1 << 20, image=64, layers=0, lists=False),
    Recipe(image=64, lists=False),
)


def _resnet() -> Any:
    """A backbone of transformers' own in place of one of timm's."""
    from transformers import ResNetConfig

    return ResNetConfig(embedding_size=16, hidden_sizes=[16, 16, 32, 64], depths=[1, 1, 1, 1],
                        out_features=["stage2", "stage3", "stage4"])  # fmt: skip


PARTICULAR: Final[Mapping[str, Mapping[str, Any]]] = {
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 8,
              "attn_layer_indices": [1]},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16,
                         "mamba_chunk_size": 8, "layer_types": ["mamba", "attention"]},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16,
                  "mamba_chunk_size": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "chunk_size": 8, "n_groups": 2},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "hunyuan_vl_text": {"head_dim": 16},
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_group": 1, "n_group": 1, "head_dim": 8},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "gemma3n_text": {"intermediate_size": [128, 128], "activation_sparsity_pattern": [0.0, 0.0],
                     "layer_types": ["sliding_attention", "full_attention"],
                     "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 16,
                     "vocab_size_per_layer_input": 128, "laurel_rank": 8},
    "gemma4_text": {"vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 16},
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "csm": {"num_codebooks": 4},
    "depth_anything": {"neck_hidden_sizes": [16, 16, 16, 16], "reassemble_hidden_size": 64},
    "dpt": {"neck_hidden_sizes": [16, 16, 16, 16], "backbone_out_indices": [1, 2, 3, 4],
            "num_hidden_layers": 4, "fusion_hidden_size": 16},
    "esm": {"vocab_size": 128, "pad_token_id": 0, "mask_token_id": 3},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "autoformer": {"prediction_length": 8, "context_length": 16, "label_length": 4},
    "informer": {"prediction_length": 8, "context_length": 16},
    "time_series_transformer": {"prediction_length": 8, "context_length": 16},
    "granite_speech_encoder": {"max_pos_emb": 64, "context_size": 16},
    "granite_speech5_encoder": {"context_size": 16},
    "glm5_next_text": {"num_key_value_heads": 4},
    "decision_transformer": {"max_ep_len": 64},
    "dab-detr": {"query_dim": 4},
    "mimi": {"num_filters": 8, "upsample_groups": 64},
    "xmod": {"default_language": "en_XX"},
    "reformer": {"axial_pos_shape": [8, 8], "axial_pos_embds_dim": [16, 48],
                 "attn_layers": ["local", "local"], "local_attn_chunk_length": 4,
                 "max_position_embeddings": 64},
    "led": {"attention_window": [4, 4]},
    "zamba": {"num_hidden_layers": 3, "layer_types": ["mamba", "mamba", "hybrid"],
              "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8,
              "n_mamba_heads": 2, "mamba_d_state": 8, "attention_hidden_size": 128},
    "zamba2": {"num_hidden_layers": 3, "layer_types": ["mamba", "mamba", "hybrid"],
               "mamba_d_state": 8, "n_mamba_heads": 8, "mamba_headdim": 16, "chunk_size": 8,
               "mamba_ngroups": 1, "use_mem_rope": True, "num_mem_blocks": 1},
    "cosmos3_edge_text": {"head_dim": 16, "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "mobilevit": {"hidden_sizes": [32, 48, 64], "neck_hidden_sizes": [8, 8, 16, 16, 24, 24, 64]},
    "glpn": {"decoder_hidden_size": 16},
    "dbrx": {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}},
    "qwen3_asr_encoder": {"n_window": 16},
    "perceiver": {"d_latents": 32, "num_latents": 8, "d_model": 64,
                  "num_self_attends_per_block": 2},
    **{name: {"use_timm_backbone": False, "backbone": None, "backbone_config": _resnet}
       for name in ("detr", "conditional_detr", "deformable_detr", "table-transformer",
                    "omdet-turbo")},
}  # fmt: skip
"""Fields of configurations whose parts depend on one another in ways of their own."""


def tiny(config: Any, recipe: Recipe, ids: dict[str, int] | None = None) -> Any:
    """A configuration of the same class as `config`, shrunk by a recipe."""
    ids = {} if ids is None else ids
    return type(config)(**_fields(config, recipe, ids))


def _fields(config: Any, recipe: Recipe, ids: dict[str, int]) -> dict[str, Any]:
    from transformers import PreTrainedConfig

    inner = set(getattr(config, "sub_configs", None) or ())
    out: dict[str, Any] = {}
    divisor = _divisor(config, recipe)
    depth = _get(config, "num_hidden_layers")
    layers = depth if isinstance(depth, int) and depth > 4 else 0
    for field in dataclasses.fields(config):
        name = field.name
        value = _get(config, name)
        if name in inner or isinstance(value, PreTrainedConfig):
            if isinstance(value, PreTrainedConfig):
                out[name] = tiny(value, recipe, ids)
            continue
        if name in ("transformers_version", "architectures", "dtype", "id2label", "label2id"):
            continue
        default = field.default if field.default is not dataclasses.MISSING else value
        if name == "vocab_size" and value is None:
            out[name] = VOCAB
            continue
        if default is None and not name.startswith("_out") and not isinstance(value, dict):
            is_id = re.search(RULES[0][0], name) or re.search(RULES[1][0], name)
            if is_id and isinstance(value, int):
                out[name] = _id(name, ids)
            continue  # Derived from others by the class.
        if (
            name == "rope_parameters"
            and isinstance(value, dict)
            and (recipe.mrope or "mrope_section" in value)
        ):
            pairs = recipe.mrope or HEAD_DIM // 2
            out[name] = {**value, "mrope_section": [pairs // 2, pairs // 4, pairs // 4]}
            continue
        if isinstance(value, dict) and default is None:
            continue
        shrunk = _value(name, value, recipe, divisor, ids, layers)
        if shrunk is not value:
            out[name] = shrunk
        elif value != default:
            out[name] = value
    for name in inner - set(out):
        value = _get(config, name)
        if isinstance(value, PreTrainedConfig):
            out[name] = tiny(value, recipe, ids)
    if "use_cache" in {f.name for f in dataclasses.fields(config)}:
        out["use_cache"] = False
    particular = PARTICULAR.get(config.model_type, {})
    return out | {name: value() if callable(value) else value for name, value in particular.items()}


def _get(config: Any, name: str) -> Any:
    """A field as it is stored; reading it as an attribute may raise where layers differ."""
    return vars(config).get(name, getattr(type(config), name, None))


def _divisor(config: Any, recipe: Recipe) -> int:
    if not recipe.ratio:
        return 1
    names = ("hidden_size", "d_model", "n_embd", "embed_dim", "hidden_dim", "dim", "hidden_sizes")
    for name in names:
        value = _get(config, name)
        if isinstance(value, (list, tuple)) and value and isinstance(value[-1], int):
            value = value[-1]
        if isinstance(value, int) and value > recipe.ratio:
            return 1 << max(0, (value // recipe.ratio).bit_length() - 1)
    return 8


def _value(
    name: str, value: Any, recipe: Recipe, divisor: int, ids: dict[str, int], layers: int
) -> Any:
    if isinstance(value, bool):
        return False if name in ("apply_spec_augment", "use_cache") else value
    if STILL.search(name) and isinstance(value, (int, float)) and "dropless" not in name:
        return type(value)(0)
    if isinstance(value, int):
        return _int(name, value, recipe, divisor, ids)
    if isinstance(value, (list, tuple)) and layers and len(value) == layers and recipe.layers:
        value = value[: recipe.layers]
    if isinstance(value, (list, tuple)) and value and all(type(v) is int for v in value):
        return _list(name, value, recipe, divisor)
    return value


def _int(name: str, value: int, recipe: Recipe, divisor: int, ids: dict[str, int]) -> int:
    for pattern, kind, small in RULES:
        if not re.search(pattern, name):
            continue
        if kind == "id":
            return _id(name, ids)
        if kind == "keep":
            return value
        if kind == "image":
            return recipe.image or value
        if kind == "layers":
            return min(value, recipe.layers) if recipe.layers else value
        if kind in ("vocab", "positions", "count"):
            return min(value, small)
        if recipe.ratio:
            return value if kind == "heads" else max(1, value // divisor)
        return min(value, small) if kind == "heads" else small
    return value


def _list(name: str, value: Any, recipe: Recipe, divisor: int) -> Any:
    if not recipe.lists:
        return value
    if re.search(r"^(depths|num_block_repeats|layer_depths)$|_depths$", name):
        return type(value)(min(v, LAYERS) for v in value)
    if re.search(r"(hidden_sizes|embed_dims?|conv_dim|tdnn_dim|neck_hidden_sizes|channels)$", name):
        least = min(value)
        by = max(1, least // 16) if least >= 16 else 1
        return type(value)(max(1, v // by) for v in value)
    if re.search(r"image_size$", name) and recipe.image:
        return type(value)(recipe.image for _ in value)
    return value


def _id(name: str, ids: dict[str, int]) -> int:
    """One id per name, the same in every sub-configuration."""
    for word, known in IDS.items():
        if name.startswith(word):
            return known
    return ids.setdefault(name, FIRST_ID + len(ids) % (VOCAB - FIRST_ID))
