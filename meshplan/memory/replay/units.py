"""FSDP2's rules: what units all-gather, free and reduce in the course of forward and backward.

A unit is a module to which `fully_shard` or `replicate` was applied. Each method stands for the
hook of FSDP2 that calls it, and makes and frees the same bytes in the same order.

Source: torch 2.13, torch/distributed/fsdp/_fully_shard: `_fsdp_state` and
`_fsdp_param_group`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshplan.memory.replay.gather import Gathering
from meshplan.memory.replay.reduction import Reduction
from meshplan.memory.replay.shards import UnitShards
from meshplan.memory.replay.unit import Doing, ReplayUnit
from meshplan.memory.replay.writer import LogWriter


class ReplayUnits:
    """All units of a model, or of a stage, on one rank.

    Args:
        writer: The log to write to.
        shards: Sizes of the units, in the order of the modules.
        settling: Relayouts of gradients, by parameter, as in the microbatch trace.
        fills: If True, zeros replace missing gradients before gradients are reduced.
    """

    def __init__(
        self,
        writer: LogWriter,
        shards: Sequence[UnitShards],
        settling: Mapping[str, Sequence[tuple[int, int]]],
        *,
        fills: bool,
    ) -> None:
        self._writer = writer
        self._gathering = Gathering(writer)
        self._reduction = Reduction(writer, settling, fills=fills)
        self._units = {each.fqn: ReplayUnit(each) for each in shards}
        self._order: list[ReplayUnit] = []
        self._root: ReplayUnit | None = None

    def set_last(self, is_last: bool, *, keeps_whole: bool) -> None:
        """Do what `runtime.apply.data.set_gradient_sync` does before each microbatch.

        Args:
            is_last: True if the coming backward is the last of the step.
            keeps_whole: If True, gradients stay unsharded until the last backward.
        """
        for unit in self._units.values():
            unit.gives_back = is_last or unit.shards.reshard_after_forward
            if keeps_whole or not unit.shards.is_sharded:
                unit.reduces = is_last
            elif unit.shards.is_replicated:
                unit.reduces_replicas = is_last

    def before_forward(self, fqn: str) -> None:
        """Play `FSDPState._pre_forward`."""
        unit = self._units[fqn]
        if unit.hook is Doing.PRE_BACKWARD:
            self._gathering.start(unit)
            self._gathering.wait(unit)
            return
        unit.hook = Doing.FORWARD
        if self._root is None:
            self._root = unit
        unit.doing = Doing.FORWARD
        self._gathering.start(unit)
        self._gathering.wait(unit)

    def after_forward(self, fqn: str, *, in_backward: bool) -> None:
        """Play `FSDPState._post_forward`.

        A forward that is recomputed during backward frees nothing.
        """
        unit = self._units[fqn]
        if unit.hook is Doing.PRE_BACKWARD:
            return
        if unit.shards.params:
            if not in_backward:
                self._gathering.reshard(unit)
                unit.places.append(len(self._order))
                self._order.append(unit)
            unit.doing = Doing.IDLE
        unit.hook = Doing.IDLE
        if self._root is unit:
            self._gathering.end_forward()
            self._root = None

    def before_backward(self, fqn: str) -> None:
        """Play `FSDPState._pre_backward`, which also prefetches the unit before it in forward."""
        unit = self._units[fqn]
        unit.hook = Doing.PRE_BACKWARD
        if not unit.shards.params or unit.doing is Doing.PRE_BACKWARD:
            return
        unit.doing = Doing.PRE_BACKWARD
        self._gathering.start(unit)
        self._gathering.wait(unit)
        if unit.places and (place := unit.places.pop()) > 0:
            self._gathering.start(self._order[place - 1])

    def has_gradient(self, fqn: str, param: str, storage: int) -> None:
        """Take over a gradient from autograd, or free it if it is added to an earlier one."""
        unit = self._units[fqn]
        if param in unit.grads:
            self._writer.free(storage)
        else:
            unit.grads[param] = storage

    def after_backward(self, fqn: str) -> None:
        """Play `FSDPParamGroup.post_backward`: reshard the parameters, reduce the gradients."""
        unit = self._units[fqn]
        if not unit.shards.params:
            return
        if unit.reduces and unit.was_gathered:
            self._reduction.fill(unit)
        unit.doing = Doing.POST_BACKWARD
        self._reduction.add_up(unit)
        found = self._reduction.take(unit) if unit.reduces else None
        if unit.gives_back:
            self._gathering.reshard(unit)
        if found is None:
            self._reduction.widen(unit)
            return
        self._reduction.run(unit, found)

    def reduce_all(self) -> None:
        """Reduce the gradients of every unit, each unit before those inside it."""
        for unit in self._units.values():
            self.after_backward(unit.fqn)

    def end_of_backward(self, *, is_last: bool) -> None:
        """Play `FSDPState._root_post_backward_final_callback`.

        Units that no gradient reached do their post-backward here.
        """
        self._root = None
        for unit in self._units.values():
            if unit.shards.params and unit.doing is not Doing.POST_BACKWARD:
                self.after_backward(unit.fqn)
            unit.doing = unit.hook = Doing.IDLE
            if is_last:
                self._writer.free(unit.sending)
                # An all-gather may have been prefetched for a unit that did not run.
                if unit.gathering is not None and unit.gathering >= 0:
                    self._writer.free(unit.gathering)
                unit.sending = unit.gathering = None
                unit.places.clear()
        if is_last:
            self._order.clear()
            self._reduction.end()

    def forget_filled(self) -> None:
        """Drop the gradients that no rank had, once the ranks have compared them."""
        self._reduction.forget_filled(self._units.values())

    def reduced(self) -> Mapping[str, int]:
        """Return the storages of the gradients that the optimizer finds, by parameter."""
        return {fqn: n for unit in self._units.values() for fqn, n in unit.reduced.items()}

    def gradients(self, fqn: str) -> dict[str, int]:
        """Return the storage of each reduced gradient of a unit, by parameter."""
        return self._units[fqn].reduced

    def drop_gradients(self) -> None:
        """Play `zero_grad(set_to_none=True)`."""
        for unit in self._units.values():
            self._writer.free_all(unit.reduced.values())
            unit.reduced.clear()
