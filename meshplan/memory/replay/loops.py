"""Optimizers that update one parameter after the other, and the tensors of their loop.

A local variable references its tensor until it is bound to another one. So the tensor of the
previous parameter still exists while that of the next parameter is made. Each rule follows its
source line by line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from meshplan.layout.optimizers import ITERATIONS
from meshplan.memory.log.events import Term
from meshplan.memory.replay.writer import LogWriter

_BF16: Final = 2


@dataclass(frozen=True, slots=True)
class Stepped:
    """One parameter that an optimizer's loop updates.

    Args:
        shape: Shape that the rule of the optimizer needs; (number of elements,) if the rule depends
            on that number only.
        element_bytes: Bytes of an element.
        on_host: If True, the parameter is in host memory.
    """

    shape: tuple[int, ...]
    element_bytes: int
    on_host: bool = False

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.element_bytes


class FrameLocals:
    """The local variables of a function while it runs, each of which keeps a tensor alive."""

    def __init__(self, writer: LogWriter) -> None:
        self._writer = writer
        self._names: dict[str, int] = {}
        self.on_host = False

    def make(self, num_bytes: int) -> int:
        """Allocate a tensor that no variable is bound to yet, and return its storage."""
        return self._writer.make(num_bytes, Term.TEMPORARIES, on_host=self.on_host)

    def free(self, *tensors: int) -> None:
        self._writer.free_all(tensors)

    def let(self, name: str, tensor: int) -> None:
        """Play `name = tensor`, and free the tensor that the variable was bound to before."""
        before = self._names.pop(name, None)
        self._names[name] = tensor
        self._writer.free(before)

    def passing(self, num_bytes: int) -> None:
        """Allocate a tensor and free it at once."""
        self.free(self.make(num_bytes))

    def also(self, name: str, other: str) -> None:
        """Play `name = other`, after which both variables reference one tensor."""
        tensor = self._names[other]
        self._writer.hold(tensor)
        self.let(name, tensor)

    def drop(self, name: str) -> None:
        """Play `del name`, or the end of the function in which the variable is local."""
        self._writer.free(self._names.pop(name))

    def end(self) -> None:
        """Play the return of the function, which drops all its local variables."""
        while self._names:
            self._writer.free(self._names.popitem()[1])


def _lion(loop: FrameLocals, param: Stepped) -> None:
    """Allocate the two addends of the update and their sum, whose sign is taken in place.

    Source: Chen et al. 2023, algorithm 2, as implemented in their lion_pytorch.py, which
    `runtime.fake_step.optimizers` follows.
    """
    parts = loop.make(param.num_bytes), loop.make(param.num_bytes)
    update = loop.make(param.num_bytes)
    loop.free(*parts)
    loop.let("update", update)


def _adafactor(loop: FrameLocals, param: Stepped) -> None:
    """Allocate the means of rows and columns, and the estimate of squares that becomes the update.

    Source: torch 2.13, optim/_adafactor.py, `_single_tensor_adafactor`.
    """
    shape, size, each = param.shape, param.num_bytes, param.element_bytes
    loop.passing(each)  # The norm of the parameter.
    if len(shape) > 1:
        for name, dim in (("row_mean", -1), ("col_mean", -2)):
            loop.let(name, loop.make(size // shape[dim]))
        loop.let("var_estimate", loop.make(size))
        loop.passing(math.prod(shape[:-2]) * each)
    else:
        loop.let("grad_squared", loop.make(size))
        loop.let("var_estimate", loop.make(size))
    loop.also("update", "var_estimate")
    loop.passing(each)


def _muon(loop: FrameLocals, param: Stepped) -> None:
    """Allocate the update in the parameter's dtype and in bfloat16, and its orthogonalisation.

    Source: torch 2.13, optim/_muon.py, `_single_tensor_muon` and `_zeropower_via_newtonschulz`.
    """
    numel, least = math.prod(param.shape), min(param.shape)
    loop.let("update", loop.make(param.num_bytes))
    if param.element_bytes == _BF16:
        loop.also("ortho_grad", "update")
    else:
        loop.let("ortho_grad", loop.make(numel * _BF16))
    loop.free(loop.make(_BF16), loop.make(_BF16))  # The norm, and the norm clamped from below.
    for _ in range(ITERATIONS):
        for name in ("gram_matrix", "gram_update"):
            loop.let(name, loop.make(least * least * _BF16))
        loop.let("ortho_grad", loop.make(numel * _BF16))
    for name in ("gram_matrix", "gram_update"):
        loop.drop(name)
    loop.also("update", "ortho_grad")
    loop.drop("ortho_grad")


Rule = Callable[[FrameLocals, Stepped], None]
LOOPS: Final[Mapping[str, Rule]] = MappingProxyType(
    {"lion": _lion, "adafactor": _adafactor, "muon": _muon}
)
"""Rules by the optimizer's name. muon's rule is for matrices; AdamW steps on all other parameters.
"""


def play_loop(writer: LogWriter, params: Iterable[Stepped], word: str) -> None:
    """Play a step that updates these parameters one after the other.

    Args:
        writer: The log to write to.
        params: The parameters, in order; parameters without elements are skipped.
        word: Name of the optimizer in `LOOPS`.
    """
    loop = FrameLocals(writer)
    for param in params:
        if math.prod(param.shape):
            loop.on_host = param.on_host
            LOOPS[word](loop, param)
    loop.end()
