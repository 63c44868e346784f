"""FSDP2's rules for gradients: accumulate, copy into one buffer, reduce-scatter, all-reduce.

Source: torch 2.13, torch/distributed/fsdp/_fully_shard: `post_backward` of `_fsdp_param_group`, and
`foreach_reduce` of `_fsdp_collectives`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from meshplan.memory.log.events import Term
from meshplan.memory.replay.gather import Gathering
from meshplan.memory.replay.shards import Shard
from meshplan.memory.replay.unit import ADDING_UP, REDUCING, ReplayUnit
from meshplan.memory.replay.writer import LogWriter


class Reduction(Gathering):
    """The actions of all units on one rank (`wrappers.fsdp.Actions`), written to a log as storages.

    Args:
        writer: The log to write to.
        grad_relayout: Redistributions of gradients, as in `MicrobatchTrace.grad_relayout`.
        fills: If True, allocate zeros for missing gradients before gradients are reduced.
    """

    def __init__(
        self,
        writer: LogWriter,
        grad_relayout: Mapping[str, Sequence[tuple[int, int]]],
        *,
        fills: bool,
    ) -> None:
        super().__init__(writer)
        self._grad_relayout, self._fills = grad_relayout, fills
        self._scattering: list[int] = []
        self._filled: set[str] = set()
        self._real: set[str] = set()

    def take_gradients(self, unit: ReplayUnit) -> None:
        """Add autograd's gradients to those of earlier microbatches.

        If the unit reduces in this backward, move all its gradients to `unit.taken`.
        """
        if unit.reduces and unit.was_gathered:
            self._fill(unit)
        for param in unit.shards.params:
            if param.fqn in unit.summed and param.fqn in unit.grads:
                self._writer.free(unit.grads.pop(param.fqn))
        if unit.reduces:
            for param in unit.shards.params:
                if (storage := self._taken(unit, param)) is not None:
                    unit.taken[param] = storage

    def reduce(self, unit: ReplayUnit) -> None:
        """Reduce the gradients in `unit.taken`, after freeing the previous unit's buffer.

        If the unit does not reduce in this backward, only cast its gradients.
        """
        if not unit.reduces:
            self._widen(unit)
            return
        self.end_reduction()
        if unit.taken:
            self._writer.free(unit.sending)
            unit.sending = None
            self._reduce_scatter(unit, unit.taken)
            unit.taken = {}

    def end_step(self, unit: ReplayUnit) -> None:
        """Free what the last backward left: an all-gather that nothing waited for, and buffers."""
        self._writer.free(unit.sending)
        self._writer.free(unit.gathering)
        unit.sending = unit.gathering = None

    def end_reduction(self) -> None:
        """Free the input buffer of the last reduce-scatter, which has ended."""
        self._writer.free_all(self._scattering)
        self._scattering.clear()

    def _taken(self, unit: ReplayUnit, param: Shard) -> int | None:
        """Return the storage of a parameter's gradient, or None if it has none.

        The gradient is redistributed to the parameter's layout along the axes that do not belong to
        the unit, such as tp.
        """
        if param.fqn in unit.summed:
            storage, itemsize = unit.summed.pop(param.fqn), unit.shards.reduce_itemsize
        elif param.fqn in unit.grads:
            storage, itemsize = unit.grads.pop(param.fqn), param.itemsize
        else:
            return None
        made: dict[int, int] = {}
        for delta, number in self._grad_relayout.get(param.fqn, ()):
            if delta > 0:
                size = delta * itemsize // param.itemsize
                made[number] = self._make(unit, size, Term.GRADIENTS)
            else:
                self._writer.free(made.pop(number))
        if made:
            self._writer.free(storage)
            (storage,) = made.values()
        return storage

    def _fill(self, unit: ReplayUnit) -> None:
        """Allocate zeros for missing gradients, as `runtime.apply.data.gradients` does.

        Without the zeros, ranks might reduce different gradients: a parameter may have a gradient
        on one rank and none on another.
        """
        for param in unit.shards.trained if self._fills else ():
            waits = param.fqn in unit.grads or param.fqn in unit.summed
            has_been_filled = param.fqn in self._filled
            if waits or (param.fqn in unit.reduced and not has_been_filled):
                self._real.add(param.fqn)
            else:
                self._filled.add(param.fqn)
            if not waits:
                unit.grads[param.fqn] = self._make(unit, param.grad_bytes, Term.GRADIENTS)

    def forget_filled(self, units: Iterable[ReplayUnit]) -> None:
        """Drop the zeros of parameters that have a gradient on no rank: their `grad` stays None."""
        for unit in units:
            for fqn in self._filled - self._real:
                self._writer.free(unit.reduced.pop(fqn, None))
        self._filled, self._real = set(), set()

    def _widen(self, unit: ReplayUnit) -> None:
        """Cast the unit's gradients, which await the last microbatch, to the reduction's dtype."""
        itemsize = unit.shards.reduce_itemsize
        for param in unit.shards.trained:
            if param.fqn in unit.grads and itemsize != param.itemsize:
                # A gradient that is yet to be redistributed may differ in size from its parameter.
                size = self._writer.size(unit.grads[param.fqn]) * itemsize // param.itemsize
                unit.summed[param.fqn] = self._make(unit, size, Term.GRADIENTS)
                self._writer.free(unit.grads.pop(param.fqn))

    def _reduce_scatter(self, unit: ReplayUnit, found: Mapping[Shard, int]) -> None:
        """Play `foreach_reduce`: copy gradients into a buffer, reduce-scatter it, all-reduce."""
        writer, shards = self._writer, unit.shards
        relaid, kept = self._relayout(unit, found)
        numel = sum(param.padded_numel for param in found)
        self._scattering.append(
            self._make(unit, numel * shards.reduce_itemsize, Term.COMMUNICATION)
        )
        writer.free_all(relaid)
        size = numel // shards.num_ranks * shards.reduce_itemsize
        out = writer.make(
            size, Term.GRADIENTS, unit.fqn, stream=REDUCING, passing=Term.COMMUNICATION
        )
        if shards.is_replicated and not unit.reduces_replicas:
            writer.free_all(kept)
            if unit.partial is None:
                unit.partial = out
            else:
                writer.free(out)
            return
        if shards.is_replicated:
            unit.sending = out
            writer.hold(out)
        if shards.is_recast:
            size = numel // shards.num_ranks * shards.itemsize
            stream = ADDING_UP if shards.is_replicated else REDUCING
            cast = writer.make(
                size, Term.GRADIENTS, unit.fqn, stream=stream, passing=Term.TEMPORARIES
            )
            writer.free(out)
            out = cast
        # All gradients of the unit are views of one storage, which is freed with the last of them.
        for param in found:
            if shards.on_host and writer.has_host:
                self._bring_back(unit, param)
            elif param.fqn not in unit.reduced:
                unit.reduced[param.fqn] = out
                writer.hold(out)
        writer.free_all(kept)
        writer.free(out)
        writer.free(unit.partial)
        unit.partial = None

    def _bring_back(self, unit: ReplayUnit, param: Shard) -> None:
        """Copy a reduced gradient to the host, where it is added to an earlier one, if any."""
        copy = self._writer.make(param.local_bytes, Term.GRADIENTS, unit.fqn, on_host=True)
        if param.fqn in unit.reduced:
            self._writer.free(copy)
        else:
            unit.reduced[param.fqn] = copy

    def _relayout(
        self, unit: ReplayUnit, found: Mapping[Shard, int]
    ) -> tuple[list[int], list[int]]:
        """Copy the gradients of parameters that are sharded along another dim than the first.

        FSDP2 rearranges these before it copies all gradients into the buffer.

        Returns:
            (storages that are freed once they are in the buffer, storages that local variables of
            `foreach_reduce` reference until it returns).
        """
        relaid = list(found.values())
        if unit.shards.num_ranks == 1:
            return relaid, []
        in_parts, is_copied = None, False
        for place, (param, storage) in enumerate(found.items()):
            is_copied = param.dim > 0
            if is_copied:
                self._writer.free(in_parts)
                size = param.padded_numel * unit.shards.grad_itemsize
                relaid[place] = self._make(unit, size, Term.GRADIENTS)
                in_parts = storage
        kept = [] if is_copied else [relaid.pop()]
        return relaid, kept if in_parts is None else [*kept, in_parts]

    def _make(self, unit: ReplayUnit, size: int, term: Term) -> int:
        passing = Term.TEMPORARIES if term == Term.GRADIENTS else None
        return self._writer.make(size, term, unit.fqn, passing=passing)
