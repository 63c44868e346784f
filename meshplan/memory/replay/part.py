"""The wrappers (FSDP2 units, DDP or none) of a model's or a stage's parameters on one rank."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from meshplan.assign import Assignment
from meshplan.layout.dtypes import DTYPE_BYTES
from meshplan.layout.mesh import GRADIENT_AXES, Mesh
from meshplan.layout.schedules import SCHEDULES
from meshplan.memory.log.events import Term
from meshplan.memory.log.microbatch import HookKind
from meshplan.memory.replay.buckets import Buckets, DdpOptions
from meshplan.memory.replay.optimizer import Updated, states_of
from meshplan.memory.replay.reduction import Reduction
from meshplan.memory.replay.shards import Numels, UnitShards, numels_of, unit_shards
from meshplan.memory.replay.unit import ReplayUnit
from meshplan.memory.replay.writer import LogWriter
from meshplan.plan.plan import Plan
from meshplan.wrappers.fsdp import Units


def splits_backward(a: Assignment) -> bool:
    """Return True if the schedule splits a backward in two halves: input and weight gradients."""
    return a.stages is not None and SCHEDULES[a.stages.schedule].splits_backward


class Wrapped:
    """The wrappers of a model or a stage on one rank, which write their storages to a log.

    Args:
        writer: The log to write to.
        plan: The plan of the stage, as `restrict` returns it.
        rank: The rank that is replayed.
        grad_relayout: Redistributions of gradients, as in `MicrobatchTrace.grad_relayout`.
    """

    def __init__(
        self,
        writer: LogWriter,
        plan: Plan,
        rank: int,
        grad_relayout: Mapping[str, Sequence[tuple[int, int]]],
    ) -> None:
        self._writer, self._plan = writer, plan
        a = plan.assignment
        is_units = a.wrapper == "units"
        self._agrees = is_units and plan.mesh.size(*GRADIENT_AXES) > 1
        shards = unit_shards(a, plan.graph, rank) if is_units else []
        self._units = ReplayUnits(writer, shards, grad_relayout, fills=self._agrees)
        self._numels = _numels_of(a, plan.mesh, rank)
        self._unit_of = {p.fqn: unit.fqn for unit in shards for p in unit.params}
        self._on_host = {p.fqn for unit in shards if unit.on_host for p in unit.params}
        self._params = list(self._updated())
        self._alone: UnwrappedParameters | Buckets
        if a.wrapper == "ddp":
            options = DdpOptions.of(plan.spec.ddp)
            self._alone = Buckets(writer, self._params, self._buffers(), options)
        else:
            alone = (p for p in self._params if p.fqn not in self._unit_of)
            self._alone = UnwrappedParameters(writer, alone, fills=self._agrees)

    def allocate_resident(
        self, found: Mapping[str, object], optimizer: str, *, has_host: bool
    ) -> None:
        """Allocate what exists before a step: buckets, parameters and optimizer state.

        Args:
            found: Fqns of the parameters that get gradients; only these have optimizer state.
            optimizer: A name of `spec.OPTIMIZER_STATES`.
            has_host: If True, the optimizer's step counts are in host memory.
        """
        self._alone.allocate_resident()
        for fqn, placed in self._plan.assignment.tensors.items():
            if not placed.info.is_buffer:
                size = self._numels[fqn].padded * DTYPE_BYTES[placed.dtype]
                there = fqn in self._on_host
                self._writer.make(size, Term.PARAMETERS, fqn.rpartition(".")[0], on_host=there)
        for param in self._params:
            if param.fqn in found:
                for size in states_of(param, optimizer, has_host=has_host):
                    module, there = param.fqn.rpartition(".")[0], param.on_host
                    self._writer.make(size, Term.OPTIMIZER, module, on_host=there)

    def begin(self, *, is_first: bool, is_last: bool) -> None:
        """Prepare the wrappers for a microbatch, the first or the last of the step if so stated."""
        self._alone.before_forward(is_first=is_first, is_last=is_last)
        self.set_last(is_last=is_last)

    def set_last(self, *, is_last: bool) -> None:
        """Set whether the coming backward is the last of the step."""
        a = self._plan.assignment
        keeps = "gradient" not in a.strategy.cuts or splits_backward(a)
        self._units.set_last(is_last, keeps_whole=keeps)

    def reduce(self) -> None:
        """Reduce the gradients left by split backwards, as `reduce_units` of the runtime does."""
        self._units.set_last(is_last=True, keeps_whole=True)
        self._units.reduce_all()
        self.end_of_backward(is_last=True)

    def has_gradient(self, fqn: str, storage: int) -> None:
        """Pass a parameter's gradient from autograd to the wrapper of the parameter."""
        unit = self._unit_of.get(fqn)
        if unit is None:
            self._alone.has_gradient(fqn, storage)
        else:
            self._units.has_gradient(unit, fqn, storage)

    def act(self, kind: HookKind, unit: str, *, in_backward: bool) -> None:
        """Let a unit act at a hook point.

        Hook points of modules that are no units of this plan are ignored. A microbatch computed
        from a config may have such hook points.
        """
        if unit not in self._plan.assignment.units:
            return
        if kind == HookKind.BEFORE_FORWARD:
            self._units.before_forward(unit)
        elif kind == HookKind.AFTER_FORWARD:
            self._units.after_forward(unit, in_backward=in_backward)
        elif kind == HookKind.BEFORE_BACKWARD:
            self._units.before_backward(unit)
        else:
            self._units.after_backward(unit)

    def end_of_backward(self, *, is_last: bool) -> None:
        """Finish a backward.

        After the last backward of a step, the ranks compare which gradients they have.
        """
        self._units.end_of_backward(is_last=is_last)
        if not is_last or not self._agrees:
            return
        self._units.forget_filled()
        self._alone.fill()
        tensors = self._plan.assignment.tensors.values()
        count = sum(p.info.trainable and not p.info.is_buffer and p.info.numel > 0 for p in tensors)
        # `runtime.apply.data.gradients` exchanges int64 numbers: a flag for each parameter and two
        # checksums of the calls.
        self._writer.free(self._writer.make(8 * (count + 2), Term.COMMUNICATION))

    def add_gradients(self, fqn: str) -> int | None:
        """Allocate the sum of a shared parameter's gradients over pipeline stages.

        Returns:
            Storage of the sum, which is to be freed once it is copied into the gradient; None if
            the parameter had no gradient, so that the sum became its gradient.
        """
        size = next(param.num_bytes for param in self._params if param.fqn == fqn)
        total = self._writer.make(size, Term.COMMUNICATION, fqn.rpartition(".")[0])
        unit = self._unit_of.get(fqn)
        reduced = self._alone.gradients if unit is None else self._units.gradients(unit)
        return total if reduced.setdefault(fqn, total) != total else None

    def updated(self) -> list[tuple[tuple[str, ...], Updated]]:
        """Return (mesh axes that shard it, parameter) for each parameter that has a gradient."""
        found = {*self._units.reduced(), *self._alone.found}
        tensors, mesh = self._plan.assignment.tensors, self._plan.mesh
        return [
            (mesh.present(tensors[param.fqn].stored.axes), param)
            for param in self._params
            if param.fqn in found
        ]

    def drop_gradients(self) -> None:
        """Play `zero_grad(set_to_none=True)`."""
        self._units.drop_gradients()
        self._alone.drop_gradients()

    def _updated(self) -> Iterator[Updated]:
        """Yield the trainable parameters with the sizes that the optimizer steps on."""
        for fqn, placed in self._plan.assignment.tensors.items():
            if not placed.info.is_buffer and placed.info.trainable:
                numel, shape = self._numels[fqn].local, placed.info.shape
                yield Updated(fqn, numel, placed.dtype, fqn in self._on_host, shape)

    def _buffers(self) -> Iterator[tuple[str, int]]:
        """Yield (dtype, bytes) of each buffer."""
        for placed in self._plan.assignment.tensors.values():
            if placed.info.is_buffer:
                yield placed.dtype, placed.info.num_bytes


def _numels_of(a: Assignment, mesh: Mesh, rank: int) -> dict[str, Numels]:
    """Return the numbers of elements of each parameter, by fqn.

    The numbers are computed once for each shape and layout.
    """
    known: dict[tuple[tuple[int, ...], int], Numels] = {}
    out = {}
    for fqn, placed in a.tensors.items():
        if not placed.info.is_buffer:
            key = placed.info.shape, id(placed.stored)
            if key not in known:
                known[key] = numels_of(placed.info.shape, placed.stored, mesh, rank)
            out[fqn] = known[key]
    return out


class UnwrappedParameters:
    """The parameters that neither an FSDP unit nor DDP manages, and their gradients.

    Args:
        writer: The log to write to.
        params: The trainable parameters among them.
        fills: If True, allocate zeros for missing gradients, because another rank may have these
            gradients.

    Attributes:
        gradients: Storages of the gradients, by fqn of the parameter.
    """

    def __init__(self, writer: LogWriter, params: Iterable[Updated], *, fills: bool) -> None:
        self._writer, self._fills = writer, fills
        self._params = {param.fqn: param for param in params}
        self.gradients: dict[str, int] = {}

    def allocate_resident(self) -> None:
        """Allocate nothing: these parameters need no buffers before a step."""

    def before_forward(self, *, is_first: bool, is_last: bool) -> None:
        """Do nothing, because no wrapper acts before forward."""

    def has_gradient(self, param: str, storage: int) -> None:
        """Keep a gradient from autograd, or free it if it is added to an earlier gradient."""
        if param in self.gradients:
            self._writer.free(storage)
        else:
            self.gradients[param] = storage

    def fill(self) -> None:
        """Allocate zeros for missing gradients, before gradients are averaged."""
        for fqn, param in self._params.items() if self._fills else ():
            if fqn not in self.gradients:
                self.gradients[fqn] = self._writer.make(param.num_bytes, Term.GRADIENTS)

    @property
    def found(self) -> Collection[str]:
        """Fqns of the parameters that have a gradient."""
        return self.gradients.keys()

    def drop_gradients(self) -> None:
        """Play `zero_grad(set_to_none=True)`."""
        self._writer.free_all(self.gradients.values())
        self.gradients.clear()


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
