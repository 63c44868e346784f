"""States and products of optimizers beyond a fixed number of tensors of the parameter's shape.

The state of Adafactor, Muon and 8-bit AdamW depends on the shape; `spec.OPTIMIZER_STATES` counts
the tensors of all others. Muon's step multiplies matrices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from meshplan.shown import shown

STATES_FROM_START: Final = frozenset({"adagrad"})
"""Optimizers that make their states when they are constructed. All others make them in their first
step. Source: torch 2.13, optim/adagrad.py, `Adagrad.__init__`."""

ITERATIONS: Final = 5
"""Newton-Schulz iterations of Muon's step. Source: torch 2.13, optim/_muon.py, `DEFAULT_NS_STEPS`.
"""

_Bytes = Callable[[tuple[int, ...], int, int], int]
_COUNTER: Final = 4
"""Bytes of the step count of one parameter, a float32 scalar."""
_BLOCK: Final = 256
"""Number of elements of 8-bit state that share one scale."""
_LEAST_OF_8_BITS: Final = 4096
"""Minimum number of elements of a tensor for its state to be in 8 bits; below it is float32."""


@shown
@dataclass(frozen=True, slots=True)
class OptimizerStateBytes:
    """Bytes of each state tensor of one parameter.

    Args:
        on_device: Bytes of each state tensor on the parameter's device.
        counters: Bytes of each step counter; torch keeps them on the host, even if the parameter is
            on a GPU.
    """

    on_device: tuple[int, ...]
    counters: tuple[int, ...] = ()


def _adafactor(shape: tuple[int, ...], local_numel: int, element_bytes: int) -> OptimizerStateBytes:
    """Return Adafactor's state: a mean of squares per row and per column of the whole parameter.

    These means are not sharded. A vector has one square per local element instead.

    Source: torch 2.13, optim/_adafactor.py; Shazeer and Stern 2018, section 3.
    """
    if len(shape) < 2:
        return OptimizerStateBytes((local_numel * element_bytes,), (_COUNTER,))
    before = math.prod(shape[:-2]) * element_bytes
    return OptimizerStateBytes((before * shape[-2], before * shape[-1]), (_COUNTER,))


def _muon(shape: tuple[int, ...], local_numel: int, element_bytes: int) -> OptimizerStateBytes:
    """Return Muon's state: a momentum for a matrix, AdamW's two moments for any other tensor.

    Source: torch 2.13, optim/_muon.py.
    """
    size = local_numel * element_bytes
    return (
        OptimizerStateBytes((size,))
        if len(shape) == 2
        else OptimizerStateBytes((size, size), (_COUNTER,))
    )


def _adamw_8bit(
    shape: tuple[int, ...], local_numel: int, element_bytes: int
) -> OptimizerStateBytes:
    """Return AdamW8bit's state: two moments of one byte per element, and a float32 scale per block.

    The moments of a small tensor are float32.

    Source: bitsandbytes 0.45, optim/optimizer.py, `Optimizer2State.init_state`.
    """
    if local_numel < _LEAST_OF_8_BITS:
        return OptimizerStateBytes((4 * local_numel,) * 2)
    return OptimizerStateBytes((local_numel, 4 * -(-local_numel // _BLOCK)) * 2)


SHAPED_TENSORS: Final[Mapping[str, Callable[[tuple[int, ...], int, int], OptimizerStateBytes]]] = (
    MappingProxyType({"adafactor": _adafactor, "muon": _muon, "adamw_8bit": _adamw_8bit})
)
"""The function (shape of the whole parameter, number of elements on this rank, bytes per element)
-> bytes of each state tensor on this rank, by the optimizer's name in a plan.
"""


def _bytes_of(tensors: Callable[[tuple[int, ...], int, int], OptimizerStateBytes]) -> _Bytes:
    def kept_bytes(shape: tuple[int, ...], local_numel: int, element_bytes: int) -> int:
        kept = tensors(shape, local_numel, element_bytes)
        return sum(kept.on_device) + sum(kept.counters)

    return kept_bytes


SHAPED_STATES: Final[Mapping[str, _Bytes]] = MappingProxyType(
    {word: _bytes_of(tensors) for word, tensors in SHAPED_TENSORS.items()}
)
"""The functions of `SHAPED_TENSORS`, with the total bytes of state as their result."""


def product_flops(word: str, shape: tuple[int, ...]) -> int:
    """Return the FLOPs of the matrix products with which an optimizer steps on a whole parameter.

    Only Muon's step has any: of a matrix of a rows and b >= a columns, an iteration makes X X^T,
    its square, and their product with X.

    Args:
        word: The optimizer's name in a plan.
        shape: Shape of the whole parameter.

    Source: torch 2.13, optim/_muon.py, `_zeropower_via_newtonschulz`.

    >>> product_flops("muon", (2, 3)), product_flops("adamw", (2, 3))
    (320, 0)
    """
    if word != "muon" or len(shape) != 2:
        return 0
    rows, columns = sorted(shape)
    return ITERATIONS * (4 * rows * rows * columns + 2 * rows**3)


CALLED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "lion": "the Lion of its authors, with its defaults",
        "adamw_8bit": (
            "bitsandbytes' AdamW8bit; torchao's would need up to three float32 copies of one "
            "parameter in addition"
        ),
    }
)
"""The assumed implementation of each optimizer that is not torch's, by its name in a plan."""


def called(word: str) -> str:
    """Return a description of the implementation that is assumed for an optimizer of a plan.

    >>> called("adamw")
    "torch's adamw with its defaults"
    """
    return CALLED.get(word, f"torch's {word} with its defaults")
