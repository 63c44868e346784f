"""DistributedDataParallel's rules: gradients in buckets, buffers broadcast before a forward.

Source: torch 2.13, csrc/distributed/c10d/reducer.cpp and nn/parallel/distributed.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from meshplan.memory.log.events import Term
from meshplan.memory.replay.optimizer import Updated
from meshplan.memory.replay.writer import LogWriter


@dataclass(frozen=True, slots=True)
class DdpOptions:
    """Options of a plan's `ddp:` section, as `runtime.apply.data.data` passes them to DDP."""

    is_view: bool = True
    broadcasts: bool = True
    finds_unused: bool = False
    is_static: bool = False

    @classmethod
    def of(cls, words: Mapping[str, object]) -> DdpOptions:
        """Return the options of the `ddp:` section `words`, with torch's defaults."""
        return cls(
            is_view=bool(words.get("gradient_as_bucket_view", True)),
            broadcasts=bool(words.get("broadcast_buffers", True)),
            finds_unused=bool(words.get("find_unused_parameters", False)),
            is_static=bool(words.get("static_graph", False)),
        )

    @property
    def clones_output(self) -> bool:
        """True if DDP copies the model's output, so that backward passes through a node of DDP."""
        return self.finds_unused and not self.is_static


class Buckets:
    """The gradients of the whole model under DDP, in one bucket for each dtype.

    The real DDP makes several buckets for each dtype, but the sum of their bytes is the same.

    Args:
        writer: The log to write to.
        params: The trainable parameters.
        buffers: (dtype, bytes) of each buffer.
        options: The options of DDP.

    Attributes:
        gradients: Storages of the gradients that are not views of buckets, by fqn of the parameter.
        found: Fqns of the parameters that have a gradient.
    """

    def __init__(
        self,
        writer: LogWriter,
        params: Iterable[Updated],
        buffers: Iterable[tuple[str, int]],
        options: DdpOptions,
    ) -> None:
        self._writer, self._options = writer, options
        self._sizes = Counter[str]()
        self._count = 0
        for param in params:
            self._sizes[param.dtype] += param.num_bytes
            self._count += 1
        self._buffers = Counter[str]()
        for dtype, size in buffers if options.broadcasts else ():
            self._buffers[dtype] += size
        self._buckets: list[int] = []
        self._used: list[int] = []
        self._synchronizes = True
        self.gradients: dict[str, int] = {}
        self.found: set[str] = set()

    def allocate_resident(self) -> None:
        """Allocate what exists before a step: the buckets, and the flags of used parameters."""
        term = Term.GRADIENTS if self._options.is_view else Term.COMMUNICATION
        self._buckets = [self._writer.make(size, term) for size in self._sizes.values()]
        if self._options.finds_unused or self._options.is_static:
            flags = 4 * self._count
            self._used = [self._writer.make(flags, Term.COMMUNICATION) for _ in range(2)]

    def before_forward(self, *, is_first: bool, is_last: bool) -> None:
        """Allocate what DDP does before a forward: rebuilt buckets, flat copies of buffers.

        DDP rebuilds its buckets once, in its second forward, in the order in which gradients came.
        Without accumulation, that is the forward of the second step, which is the one replayed.
        Buffers are broadcast if the previous backward was synchronized, which is the case before
        the first microbatch of a step.
        """
        self._writer.begin("forward")
        self._synchronizes = is_last
        if is_first and is_last:
            self._writer.free_all(self._buckets)
            used = self._used
            self.allocate_resident()
            self._writer.free_all(used)
        flat = [
            self._writer.make(size, Term.COMMUNICATION)
            for size in (self._buffers.values() if is_first else ())
        ]
        self._writer.free_all(flat)

    def has_gradient(self, param: str, storage: int) -> None:
        """Keep a gradient from autograd, or free it if it is added to an earlier gradient.

        With `gradient_as_bucket_view`, a synchronized backward copies the kept gradient into its
        bucket and frees it.
        """
        self.found.add(param)
        if param in self.gradients:
            self._writer.free(storage)
        else:
            self.gradients[param] = storage
        if self._synchronizes and self._options.is_view:
            self._writer.free(self.gradients.pop(param))

    def fill(self) -> None:
        """Do nothing: the buckets have room for all gradients."""

    def drop_gradients(self) -> None:
        """Play `zero_grad(set_to_none=True)`, which does not free the buckets."""
        self._writer.free_all(self.gradients.values())
        self.gradients.clear()
        self.found.clear()
