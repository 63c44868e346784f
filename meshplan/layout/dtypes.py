"""Dtypes by name, and the bytes of one element of each."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

DTYPE_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2,
        "float8_e4m3fn": 1, "float8_e5m2": 1,
        "complex64": 8, "complex128": 16,
        "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
    }
)  # fmt: skip
"""Bytes per element by dtype name (torch's names without `torch.`)."""
