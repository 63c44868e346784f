"""FLOPs of the operators that torch runs: matrix products, convolutions and attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch.utils.flop_counter import flop_registry

from meshplan.kernels import ATTENTION_BACKWARD, attention_flops

ATTENTION: Final = frozenset(
    name + end
    for name in (
        f"aten::_scaled_dot_product_{kernel}"
        for kernel in (
            "flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu",
        )
    )
    for end in ("", "_backward")
)  # fmt: skip
"""Names of the operators of attention, of which torch's `flop_registry` counts masked halves."""

_FLOPS_CACHE: Final[dict[tuple[Any, ...], float]] = {}
_MOST: Final = 1 << 14


def flops_of(func: Any, args: Any, kwargs: Mapping[str, Any], out: Any) -> float | None:
    """Return the FLOPs of an operator's call by its shapes; None for an operator without a rule.

    Args:
        func: The operator.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        out: Results of the call.
    """
    if func._schema.name in ATTENTION:
        return _attention_flops(func, arguments_by_name(func, args, kwargs))
    if func._schema.name == "aten::_grouped_mm":
        return _grouped_flops(args[0], args[1])
    rule: Callable[..., Any] | None = flop_registry.get(func.overloadpacket)
    return None if rule is None else _by_rule(func.overloadpacket, rule, args, kwargs, out)


def _grouped_flops(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the FLOPs of products by groups of rows, or of columns, for which torch has no rule.

    Groups that share a dim (the rows of `a`, the columns of `b`, or the summed dim of both) take
    together what one product over the whole dim takes.
    """
    groups = a.shape[0] if a.dim() == b.dim() == 3 else 1
    return 2.0 * groups * a.shape[-2] * a.shape[-1] * b.shape[-1]


def arguments_by_name(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments of an operator's call, by their names in its schema."""
    return {
        argument.name: args[place] if place < len(args) else kwargs.get(argument.name)
        for place, argument in enumerate(func._schema.arguments)
    }


def _by_rule(packet: Any, rule: Callable[..., Any], args: Any, kwargs: Any, out: Any) -> float:
    """Return an operator's FLOPs by its rule in torch's `flop_registry`.

    Results are cached by shapes and plain arguments, since rules read nothing else.
    """
    key = packet, _form(args), _form(kwargs), _form(out)
    if key not in _FLOPS_CACHE:
        if len(_FLOPS_CACHE) >= _MOST:
            _FLOPS_CACHE.clear()
        _FLOPS_CACHE[key] = float(rule(*args, **kwargs, out_val=out))
    return _FLOPS_CACHE[key]


def _form(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape
    if isinstance(value, dict):
        return tuple((name, _form(each)) for name, each in value.items())
    if isinstance(value, tuple | list):
        return tuple(map(_form, value))
    return type(value), value


def _attention_flops(func: Any, named: Mapping[str, Any]) -> float:
    """Return the FLOPs of an attention operator: of its two products, forward or backward."""
    query, key, value = named["query"], named["key"], named["value"]
    elements = query.shape[:3].numel() * (query.shape[-1] + value.shape[-1])
    flops = attention_flops(elements, key.shape[2], is_causal=bool(named.get("is_causal")))
    return flops * (ATTENTION_BACKWARD if func._schema.name.endswith("_backward") else 1.0)
