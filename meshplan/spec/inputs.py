"""The key `input` of plan.yaml: one tensor, or one for each argument of the model's forward."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from meshplan.layout.dtypes import DTYPE_BYTES
from meshplan.spec.spec import DTYPE_WORDS, InputSpec
from meshplan.spec.values import (
    Decoder,
    Findings,
    PlanValue,
    choice,
    decoder,
    integer,
    is_mapping,
    items,
    list_form,
    mapping_form,
    section,
)

_DTYPES: Final[Mapping[str, str]] = {
    **{word: name for name in DTYPE_BYTES for word in (name, f"torch.{name}")},
    **DTYPE_WORDS,
}
_EXAMPLE: Final = "{shape: [4, 3, 224, 224], dtype: float32}"
_REQUIRED: Final[Mapping[str, str]] = {
    "shape": "add shape: [4, 3, 224, 224]",
    "dtype": "add dtype: float32, or int64 for tokens",
}


@decoder(list_form(integer(1).form))
def _shape(value: PlanValue, found: Findings) -> tuple[int, ...]:
    sizes = [integer(1)(v, found) for v in items(value, found, "shape: [4, 3, 224, 224]")]
    return tuple(size for size in sizes if size is not None)


_FIELDS: Final[Mapping[str, Decoder]] = {"shape": _shape, "dtype": choice(_DTYPES, "a dtype")}
_ONE: Final = mapping_form(_FIELDS, required=("shape",))
_NAMED: Final = mapping_form(_FIELDS, required=("shape", "dtype"))


@decoder(
    _ONE,
    {
        "type": "object",
        "additionalProperties": _NAMED,
        "minProperties": 1,
    },
)
def model_input(value: PlanValue, found: Findings) -> InputSpec | Mapping[str, InputSpec] | None:
    """Decode the input of the model: one tensor, or tensors by argument of its forward."""
    example = f"input: {_EXAMPLE}"
    if not is_mapping(value, found, example):
        return None
    if not value.data or not all(isinstance(each.data, dict) for each in value.data.values()):
        got = section(value, found, _FIELDS, example, required={"shape": _REQUIRED["shape"]})
        return InputSpec(**got) if got and "shape" in got else None
    out = {}
    for name, child in value.data.items():
        got = section(child, found, _FIELDS, f"{name}: {_EXAMPLE}", required=_REQUIRED)
        if got and got.keys() == _FIELDS.keys():
            out[name] = InputSpec(**got)
    return MappingProxyType(out) if len(out) == len(value.data) else None
