"""FSDP2's units on one rank: the storages that the rules of `wrappers.fsdp` make and free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshplan.memory.replay.reduction import Reduction
from meshplan.memory.replay.shards import UnitShards
from meshplan.memory.replay.unit import ReplayUnit
from meshplan.memory.replay.writer import LogWriter
from meshplan.wrappers.fsdp import Units


class ReplayUnits(Units[ReplayUnit]):
    """All units of a model, or of a stage, on one rank, with the storages that they allocate.

    Args:
        writer: The log to write to.
        shards: Sizes of the units, in the order of the modules.
        grad_relayout: Redistributions of gradients, as in `MicrobatchTrace.grad_relayout`.
        fills: If True, allocate zeros for missing gradients before gradients are reduced.
    """

    def __init__(
        self,
        writer: LogWriter,
        shards: Sequence[UnitShards],
        grad_relayout: Mapping[str, Sequence[tuple[int, int]]],
        *,
        fills: bool,
    ) -> None:
        self._writer = writer
        self._bytes = Reduction(writer, grad_relayout, fills=fills)
        super().__init__(map(ReplayUnit.of, shards), self._bytes)

    def set_last(self, is_last: bool, *, keeps_whole: bool) -> None:
        """Set which units reduce in the coming backward.

        This is what `runtime.apply.data.data.set_gradient_sync` does before each microbatch.

        Args:
            is_last: True if the coming backward is the last of the step.
            keeps_whole: If True, gradients stay unsharded until the last backward.
        """
        for unit in self.states.values():
            unit.reshards_after_backward = is_last or unit.reshards
            if keeps_whole or not unit.shards.is_sharded:
                unit.reduces = is_last
            elif unit.shards.is_replicated:
                unit.reduces_replicas = is_last

    def has_gradient(self, fqn: str, param: str, storage: int) -> None:
        """Keep a gradient from autograd, or free it if it is added to an earlier gradient.

        Args:
            fqn: Fqn of the unit.
            param: Fqn of the parameter.
            storage: Storage of the gradient.
        """
        unit = self.states[fqn]
        if param in unit.grads:
            self._writer.free(storage)
        else:
            unit.grads[param] = storage

    def reduce_all(self) -> None:
        """Reduce the gradients of every unit, each unit before the units inside it."""
        for fqn in self.states:
            self.after_backward(fqn)

    def end_of_backward(self, *, is_last: bool) -> None:
        super().end_of_backward(is_last=is_last)
        if is_last:
            self._bytes.end_reduction()

    def forget_filled(self) -> None:
        """Drop the zeros of parameters without a gradient on any rank, at the end of a step."""
        self._bytes.forget_filled(self.states.values())

    def reduced(self) -> Mapping[str, int]:
        """Return the storages of all reduced gradients, which the optimizer finds, by parameter."""
        return {fqn: n for unit in self.states.values() for fqn, n in unit.reduced.items()}

    def gradients(self, fqn: str) -> dict[str, int]:
        """Return the unit's own dict of its reduced gradients: storages by fqn of the parameter."""
        return self.states[fqn].reduced

    def drop_gradients(self) -> None:
        """Play `zero_grad(set_to_none=True)`."""
        for unit in self.states.values():
            self._writer.free_all(unit.reduced.values())
            unit.reduced.clear()
