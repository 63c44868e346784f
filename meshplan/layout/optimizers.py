"""Optimizers whose state is not so many tensors like the parameter: what they keep, in bytes.

`spec.OPTIMIZER_STATES` counts those that are. These depend on the shape, so each is a function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

_Bytes = Callable[[tuple[int, ...], int, int], int]
_COUNTER: Final = 4
"""The step count of one parameter, a float32 scalar."""
_BLOCK: Final = 256
_LEAST_OF_8_BITS: Final = 4096
"""Elements that share a scale, and from how many on a tensor is kept in 8 bits."""


@dataclass(frozen=True, slots=True)
class OptimizerStateBytes:
    """Bytes of each tensor that is kept of one parameter.

    Args:
        here: Of those on the device.
        counters: Of those that torch keeps on the host, where that is another memory.
    """

    here: tuple[int, ...]
    counters: tuple[int, ...] = ()


def _adafactor(shape: tuple[int, ...], local_numel: int, element_bytes: int) -> OptimizerStateBytes:
    """A mean for each row and each column, which no axis cuts; of a vector all squares.

    Source: torch 2.13, optim/_adafactor.py; Shazeer and Stern 2018, section 3.
    """
    if len(shape) < 2:
        return OptimizerStateBytes((local_numel * element_bytes,), (_COUNTER,))
    before = math.prod(shape[:-2]) * element_bytes
    return OptimizerStateBytes((before * shape[-2], before * shape[-1]), (_COUNTER,))


def _muon(shape: tuple[int, ...], local_numel: int, element_bytes: int) -> OptimizerStateBytes:
    """A momentum of matrices, AdamW's state of all others. Source: torch 2.13, optim/_muon.py."""
    size = local_numel * element_bytes
    return (
        OptimizerStateBytes((size,))
        if len(shape) == 2
        else OptimizerStateBytes((size, size), (_COUNTER,))
    )


def _adamw_8bit(
    shape: tuple[int, ...], local_numel: int, element_bytes: int
) -> OptimizerStateBytes:
    """Two moments of a byte an element and a float32 scale for each block; small ones in float32.

    Source: bitsandbytes 0.45, optim/optimizer.py, `Optimizer2State.init_state`.
    """
    if local_numel < _LEAST_OF_8_BITS:
        return OptimizerStateBytes((4 * local_numel,) * 2)
    return OptimizerStateBytes((local_numel, 4 * -(-local_numel // _BLOCK)) * 2)


SHAPED_TENSORS: Final[Mapping[str, Callable[[tuple[int, ...], int, int], OptimizerStateBytes]]] = (
    MappingProxyType({"adafactor": _adafactor, "muon": _muon, "adamw_8bit": _adamw_8bit})
)
"""By the word of a plan: (shape, elements on this rank, bytes of one) -> what is kept of it."""


def _bytes_of(tensors: Callable[[tuple[int, ...], int, int], OptimizerStateBytes]) -> _Bytes:
    def kept_bytes(shape: tuple[int, ...], local_numel: int, element_bytes: int) -> int:
        kept = tensors(shape, local_numel, element_bytes)
        return sum(kept.here) + sum(kept.counters)

    return kept_bytes


SHAPED_STATES: Final[Mapping[str, _Bytes]] = MappingProxyType(
    {word: _bytes_of(tensors) for word, tensors in SHAPED_TENSORS.items()}
)
"""By the word of a plan: (shape, elements on this rank, bytes of one) -> bytes kept of it."""

CALLED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "lion": "Lion as its authors wrote it, with its defaults",
        "adamw_8bit": (
            "bitsandbytes' AdamW8bit; torchao's would take up to three float32 copies of one "
            "parameter at a time besides"
        ),
    }
)
"""What is said of those that are not torch's."""


def called(word: str) -> str:
    """What is taken for the optimizer of a plan.

    >>> called("adamw")
    "torch's adamw with its defaults"
    """
    return CALLED.get(word, f"torch's {word} with its defaults")
