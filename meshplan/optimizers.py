"""Optimizers whose state is not so many tensors like the parameter: what they keep, in bytes.

`spec.OPTIMIZER_STATES` counts those that are. These depend on the shape, so each is a function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

_COUNTER: Final = 4
"""The step count of one parameter, a float32 scalar."""
_BLOCK: Final = 256
_LEAST_OF_8_BITS: Final = 4096
"""Elements that share a scale, and from how many on a tensor is kept in 8 bits."""


def _adafactor(shape: tuple[int, ...], local_numel: int, element_bytes: int) -> int:
    """A mean for each row and each column, which no axis cuts; of a vector all squares.

    Source: torch 2.13, optim/_adafactor.py; Shazeer and Stern 2018, section 3.
    """
    if len(shape) < 2:
        return local_numel * element_bytes + _COUNTER
    before = math.prod(shape[:-2])
    return before * (shape[-2] + shape[-1]) * element_bytes + _COUNTER


def _muon(shape: tuple[int, ...], local_numel: int, element_bytes: int) -> int:
    """A momentum of matrices, AdamW's state of all others. Source: torch 2.13, optim/_muon.py."""
    if len(shape) == 2:
        return local_numel * element_bytes
    return 2 * local_numel * element_bytes + _COUNTER


def _adamw_8bit(shape: tuple[int, ...], local_numel: int, element_bytes: int) -> int:
    """Two moments of a byte an element and a float32 scale for each block; small ones in float32.

    Source: bitsandbytes 0.45, optim/optimizer.py, `Optimizer2State.init_state`.
    """
    if local_numel < _LEAST_OF_8_BITS:
        return 2 * 4 * local_numel
    return 2 * (local_numel + 4 * -(-local_numel // _BLOCK))


SHAPED_STATES: Final[Mapping[str, Callable[[tuple[int, ...], int, int], int]]] = MappingProxyType(
    {"adafactor": _adafactor, "muon": _muon, "adamw_8bit": _adamw_8bit}
)
"""By the word of a plan: (shape, elements on this rank, bytes of one) -> bytes kept of it."""
