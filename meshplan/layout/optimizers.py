"""Optimizers whose state is not a number of tensors like the parameter: the bytes they keep.

`spec.OPTIMIZER_STATES` counts the state tensors of all others. The state of these depends on the
parameter's shape, so each is a function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

_Bytes = Callable[[tuple[int, ...], int, int], int]
_COUNTER: Final = 4
"""Bytes of the step count of one parameter, a float32 scalar."""
_BLOCK: Final = 256
_LEAST_OF_8_BITS: Final = 4096
"""Elements from which on a tensor's state is in 8 bits; `_BLOCK` elements then share a scale."""


@dataclass(frozen=True, slots=True)
class OptimizerStateBytes:
    """Bytes of each state tensor of one parameter.

    Args:
        here: Bytes of each tensor on the device.
        counters: Bytes of each step counter that torch keeps on the host, if that is another
            memory.
    """

    here: tuple[int, ...]
    counters: tuple[int, ...] = ()


def _adafactor(shape: tuple[int, ...], local_numel: int, element_bytes: int) -> OptimizerStateBytes:
    """One mean per row and per column, which no axis shards; for a vector, all squares.

    Source: torch 2.13, optim/_adafactor.py; Shazeer and Stern 2018, section 3.
    """
    if len(shape) < 2:
        return OptimizerStateBytes((local_numel * element_bytes,), (_COUNTER,))
    before = math.prod(shape[:-2]) * element_bytes
    return OptimizerStateBytes((before * shape[-2], before * shape[-1]), (_COUNTER,))


def _muon(shape: tuple[int, ...], local_numel: int, element_bytes: int) -> OptimizerStateBytes:
    """A momentum for matrices, AdamW's state for all others. Source: torch 2.13, optim/_muon.py."""
    size = local_numel * element_bytes
    return (
        OptimizerStateBytes((size,))
        if len(shape) == 2
        else OptimizerStateBytes((size, size), (_COUNTER,))
    )


def _adamw_8bit(
    shape: tuple[int, ...], local_numel: int, element_bytes: int
) -> OptimizerStateBytes:
    """Two moments of one byte per element, and a float32 scale per block; small tensors in float32.

    Source: bitsandbytes 0.45, optim/optimizer.py, `Optimizer2State.init_state`.
    """
    if local_numel < _LEAST_OF_8_BITS:
        return OptimizerStateBytes((4 * local_numel,) * 2)
    return OptimizerStateBytes((local_numel, 4 * -(-local_numel // _BLOCK)) * 2)


SHAPED_TENSORS: Final[Mapping[str, Callable[[tuple[int, ...], int, int], OptimizerStateBytes]]] = (
    MappingProxyType({"adafactor": _adafactor, "muon": _muon, "adamw_8bit": _adamw_8bit})
)
"""Functions (shape, elements on this rank, bytes of one) -> state tensors, by a plan's word."""


def _bytes_of(tensors: Callable[[tuple[int, ...], int, int], OptimizerStateBytes]) -> _Bytes:
    def kept_bytes(shape: tuple[int, ...], local_numel: int, element_bytes: int) -> int:
        kept = tensors(shape, local_numel, element_bytes)
        return sum(kept.here) + sum(kept.counters)

    return kept_bytes


SHAPED_STATES: Final[Mapping[str, _Bytes]] = MappingProxyType(
    {word: _bytes_of(tensors) for word, tensors in SHAPED_TENSORS.items()}
)
"""Functions (shape, elements on this rank, bytes of one) -> bytes of state, by a plan's word."""

CALLED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "lion": "the Lion of its authors, with its defaults",
        "adamw_8bit": (
            "bitsandbytes' AdamW8bit; torchao's would need up to three float32 copies of one "
            "parameter in addition"
        ),
    }
)
"""Descriptions of the optimizers that are not torch's."""


def called(word: str) -> str:
    """Return a description of the implementation that is assumed for an optimizer of a plan.

    >>> called("adamw")
    "torch's adamw with its defaults"
    """
    return CALLED.get(word, f"torch's {word} with its defaults")
