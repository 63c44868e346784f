"""The known keys of a config.json, and the kind of value that each may have.

All known keys are checked, also those that no estimate depends on, because a config may come from
anywhere. Unknown keys are reported, because they may be misspelled.

Source: transformers 5.23, `configuration_utils.py` and `models/<family>/configuration_*.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

MAX_SIZE: Final = 10**9
_HUGE: Final = 1e300  # excludes nan, and ints too large for a float


@dataclass(frozen=True, slots=True)
class ValueKind:
    """A kind of value that a key may have; null is always allowed and means the default.

    Args:
        what: Name of the kind, which follows "is not" in a message.
        fix: Advice on what to write.
        fits: Function that returns True for a value of this kind.
    """

    what: str
    fix: str
    fits: Callable[[Any], bool]


def _is_number(value: Any, least: float = -math.inf, most: float = math.inf) -> bool:
    is_one = isinstance(value, int | float) and not isinstance(value, bool)
    return is_one and -_HUGE < value < _HUGE and least <= value <= most


def _is_size(value: Any, least: int = 1) -> bool:
    return type(value) is int and least <= value <= MAX_SIZE


def _are(kind: type, value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is kind for each in value)


_SIZE: Final = ValueKind("a size", f"write an int from 1 to {MAX_SIZE}", _is_size)
_COUNT: Final = ValueKind("a count", f"write an int from 0 to {MAX_SIZE}", lambda v: _is_size(v, 0))
_TOKENS: Final = ValueKind(
    "a token id", "write an int, or a list of ints", lambda v: type(v) is int or _are(int, v)
)
_FLAG: Final = ValueKind("true or false", "write true or false", lambda v: isinstance(v, bool))
_CHANCE: Final = ValueKind(
    "a probability", "write a number from 0 to 1", lambda v: _is_number(v, 0.0, 1.0)
)
_NUMBER: Final = ValueKind("a number", "write a finite number", _is_number)
_SPREAD: Final = ValueKind(
    "a number of 0 or more", "write a finite number of 0 or more", lambda v: _is_number(v, 0.0)
)
_TEXT: Final = ValueKind("a string", "write a string", lambda v: isinstance(v, str))
_WORDS: Final = ValueKind("a list of strings", "write a list of strings", lambda v: _are(str, v))
_LAYERS: Final = ValueKind(
    "a list of layer indices",
    "write a list of ints",
    lambda v: isinstance(v, list) and all(_is_size(each, 0) for each in v),
)
_TABLE: Final = ValueKind("a JSON object", "write a JSON object", lambda v: isinstance(v, Mapping))

_KEYS: Final = (
    (_SIZE, "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
            "num_key_value_heads head_dim max_position_embeddings num_experts "
            "num_local_experts n_routed_experts num_experts_per_tok moe_intermediate_size "
            "shared_expert_intermediate_size n_shared_experts decoder_sparse_step n_group "
            "topk_group q_lora_rank kv_lora_rank qk_rope_head_dim qk_nope_head_dim qk_head_dim "
            "v_head_dim n_embd n_layer n_head n_positions n_ctx n_inner pretraining_tp "
            "moe_layer_freq ep_size original_max_position_embeddings"),
    (_COUNT, "sliding_window first_k_dense_replace max_window_layers chunk_size_feed_forward "
             "num_mtp_layers num_nextn_predict_layers"),
    (_TOKENS, "bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id"),
    (_FLAG, "attention_bias qkv_bias mlp_bias tie_word_embeddings use_sliding_window use_cache "
            "norm_topk_prob rope_interleave output_attentions output_hidden_states "
            "output_router_logits return_dict is_decoder is_encoder_decoder add_cross_attention "
            "reorder_and_upcast_attn scale_attn_by_inverse_layer_idx scale_attn_weights "
            "summary_proj_to_labels summary_use_proj use_bidirectional_attention seq_aux "
            "gradient_checkpointing"),
    (_CHANCE, "attention_dropout attn_pdrop embd_pdrop resid_pdrop summary_first_dropout "
              "hidden_dropout classifier_dropout"),
    (_NUMBER, "attention_multiplier embedding_multiplier residual_multiplier logits_scaling "
              "routed_scaling_factor router_aux_loss_coef aux_loss_alpha final_logit_softcapping "
              "attn_logit_softcapping"),
    (_SPREAD, "initializer_range rms_norm_eps layer_norm_epsilon layer_norm_eps rope_theta "
              "partial_rotary_factor query_pre_attn_scalar router_jitter_noise"),
    (_TEXT, "model_type hidden_act hidden_activation activation_function dtype torch_dtype "
            "transformers_version summary_type summary_activation problem_type name_or_path "
            "topk_method scoring_func cache_implementation experts_implementation"),
    (_WORDS, "architectures layer_types"),
    (_LAYERS, "mlp_only_layers"),
    (_TABLE, "rope_parameters rope_scaling id2label label2id quantization_config auto_map "
             "task_specific_params"),
)  # fmt: skip

KEYS: Final[Mapping[str, ValueKind]] = MappingProxyType(
    {key: kind for kind, keys in _KEYS for key in keys.split()}
)
"""The kind of value of each known key."""


def misfits(config: Mapping[str, Any]) -> Iterator[tuple[str, ValueKind]]:
    """Yield (key, expected kind) for each known key whose value is not of that kind."""
    for key, kind in KEYS.items():
        value = config.get(key)
        if value is not None and not kind.fits(value):
            yield key, kind


def unknown(config: Mapping[str, Any]) -> list[str]:
    """Return the keys of a config that are not in `KEYS` and do not begin with _, in order."""
    return [key for key in config if key not in KEYS and not key.startswith("_")]
