"""FSDP2's rules for parameters: all-gather them before a unit runs, free them afterwards.

Source: torch 2.13, torch/distributed/fsdp/_fully_shard: `_fsdp_param_group`, `_fsdp_param`, and
`foreach_all_gather` of `_fsdp_collectives`.
"""

from __future__ import annotations

from meshplan.memory.log.events import Term
from meshplan.memory.replay.shards import Shard
from meshplan.memory.replay.unit import GATHERING, ReplayUnit
from meshplan.memory.replay.writer import LogWriter
from meshplan.wrappers.fsdp import GatherState, TrainingState


class Gathering:
    """The all-gathers of all units on one rank, written to a log as storages.

    Attributes:
        last: In forward, the buffer of the last all-gather, which is freed once the parameters of
            the next all-gather are copied out; None if there is none.
    """

    def __init__(self, writer: LogWriter) -> None:
        self._writer = writer
        self.last: int | None = None

    def end_forward(self) -> None:
        """Free the buffer of the last all-gather, at the end of the root's forward."""
        self._writer.free(self.last)
        self.last = None

    def gather(self, unit: ReplayUnit) -> None:
        """Play `FSDPParamGroup.unshard`: cast the shards into one buffer, all-gather into another.

        A unit on one rank is not gathered.
        """
        if unit.num_ranks == 1:
            return
        total, cast = unit.shards.gathered_bytes, unit.shards.cast_bytes
        make, fqn = self._writer.make, unit.fqn
        if unit.shards.on_host:
            # FSDP2 copies every shard to the device separately before the all-gather. Shards over
            # fewer ranks are on the device already.
            params = unit.shards.params if unit.sharding is GatherState.SHARDED else ()
            copies = [c for p in params if (c := self._brought(unit, p, GATHERING)) is not None]
        else:
            size = cast // unit.num_ranks
            copies = [make(size, Term.TEMPORARIES, fqn, stream=GATHERING)] if cast else []
        unit.gathering = make(total, Term.COMMUNICATION, fqn, stream=GATHERING)
        self._writer.free_all(copies)

    def _brought(self, unit: ReplayUnit, param: Shard, stream: int = 0) -> int | None:
        """Copy a shard from the host to the device, and cast it there to the compute dtype.

        Returns:
            Storage of the cast, or of the copy if there is no cast; None if host memory is not
            separate and there is no cast.
        """
        make, fqn, copy = self._writer.make, unit.fqn, None
        if self._writer.has_host:
            copy = make(param.stored_bytes, Term.TEMPORARIES, fqn, stream=stream)
        if not param.is_cast:
            return copy
        size = param.whole_bytes // unit.num_ranks
        cast = make(size, Term.TEMPORARIES, fqn, stream=stream)
        self._writer.free(copy)
        return cast

    def wait(self, unit: ReplayUnit) -> None:
        """Play `FSDPParamGroup.wait_for_unshard`, which copies parameters out of the buffer.

        In forward, the buffer is kept until the next unit has copied out its parameters.
        """
        is_forward, before = unit.phase is TrainingState.FORWARD, None
        if is_forward:
            before, self.last = self.last, None
        if unit.num_ranks == 1:
            self._copy_own(unit)
        else:
            self._copy_out(unit)
        if unit.sharding is GatherState.FEWER:
            self._writer.free_all(unit.fewer.values())
            unit.fewer.clear()
        if is_forward:
            self.last = unit.gathering
        else:
            self._writer.free(unit.gathering)
        unit.gathering = None
        self._writer.free(before)

    def _copy_out(self, unit: ReplayUnit) -> None:
        """Copy the gathered parameters out of the buffer.

        Parameters that are sharded along another dim than the first are copied twice, because their
        shards have to be rearranged.
        """
        between = []
        for param in unit.shards.params:
            unit.whole.append(self._writer.make(param.whole_bytes, Term.GATHERED, unit.fqn))
            if param.dim:
                between.append(self._writer.make(param.whole_bytes, Term.TEMPORARIES, unit.fqn))
        self._writer.free_all(between)

    def _copy_own(self, unit: ReplayUnit) -> None:
        """Copy and cast the parameters of a unit on one rank, where nothing is gathered."""
        before = None
        for param in unit.shards.params:
            if unit.shards.on_host:
                cast = self._brought(unit, param)
            else:
                size = param.whole_bytes
                cast = (
                    self._writer.make(size, Term.TEMPORARIES, unit.fqn) if param.is_cast else None
                )
            self._writer.free(before)
            unit.whole.append(self._writer.make(param.whole_bytes, Term.GATHERED, unit.fqn))
            before = cast
        self._writer.free(before)

    def free(self, unit: ReplayUnit) -> None:
        """Free the gathered parameters."""
        self._writer.free_all(unit.whole)
        unit.whole = []

    def keep_fewer(self, unit: ReplayUnit) -> None:
        """Copy shards over fewer ranks out of the gathered parameters, then free the latter."""
        for param, whole in zip(unit.shards.params, unit.whole, strict=True):
            size = param.whole_bytes // unit.fewer_ranks
            own = self._writer.make(size, Term.GATHERED, unit.fqn)
            self._writer.free(unit.fewer.pop(param.fqn, None))
            unit.fewer[param.fqn] = own
            self._writer.free(whole)
        unit.whole = []
