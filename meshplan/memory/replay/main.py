"""One step of one rank: microbatches, the mean of their losses, the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

from meshplan.errors import PlanError, Problem
from meshplan.graph import DTYPE_BYTES
from meshplan.memory.log import EventLog, Term
from meshplan.memory.replay.alone import Alone
from meshplan.memory.replay.buckets import Buckets, Options
from meshplan.memory.replay.optimizer import Updated, check_optimizer, state_of, step
from meshplan.memory.replay.prepare import Prepared
from meshplan.memory.replay.shards import unit_shards
from meshplan.memory.replay.units import Units
from meshplan.memory.replay.writer import Copy, Writer
from meshplan.memory.work import Mark, Moment, Work
from meshplan.mesh import DATA_AXES, GRADIENT_AXES, UNIT_AXES
from meshplan.plan import Plan

_MOST: Final = 3
"""Microbatches that are played: what comes between the second and the last is like the second."""


def replay(
    work: Work | Prepared, plan: Plan, optimizer: str, *, rank: int = 0, foreach: bool = True
) -> EventLog:
    """The events of a step from the second one on, as `runtime.imagine_step` would trace them.

    Args:
        work: One microbatch of this rank, made for this plan's tp, cp and recomputation.
        plan: Decided for the whole model.
        optimizer: A word of `spec.OPTIMIZER_STATES`.
        rank: Which rank to be.
        foreach: Whether the optimizer takes the parameters together, as torch does on a GPU.

    Raises:
        PlanError: There is no rule for something in this plan: trace the whole step instead.
    """
    check_optimizer(optimizer)
    if problems := list(_unknown(plan)):
        raise PlanError(problems)
    prepared = work if isinstance(work, Prepared) else Prepared(work)
    return _Step(prepared, plan, optimizer, rank, foreach=foreach).play()


def _unknown(plan: Plan) -> Iterator[Problem]:
    """What has no rule."""
    a, spec = plan.assignment, plan.spec
    for is_there, what in (
        (a.stages is not None, "a pipeline"),
        (bool(a.compiled), "compiled blocks"),
        (bool(a.experts), "expert parallelism"),
        (
            a.wrapper == "ddp" and Options.of(spec.ddp).clones_output and plan.accumulate > 1,
            "find_unused_parameters with accumulation",
        ),
        (spec.precision.param == "float16", "a scaled loss (float16)"),
        (spec.clip_grad_norm is not None, "clipped gradients"),
    ):
        if is_there:
            fix = "trace the whole step (tier 3) or a shorter model (tier 2)"
            yield Problem(f"the replay of a step has no rules for {what}", fix=fix)


class _Step:
    """One step in the making."""

    def __init__(
        self, work: Prepared, plan: Plan, optimizer: str, rank: int, *, foreach: bool
    ) -> None:
        self._work, self._plan, self._rank = work, plan, rank
        self._optimizer, self._foreach = optimizer, foreach
        self._writer = writer = Writer()
        mesh, is_units = plan.mesh, plan.assignment.wrapper == "units"
        fills = is_units and mesh.size(*GRADIENT_AXES) > 1
        shards = unit_shards(plan.assignment, plan.graph, rank) if is_units else []
        self._units = Units(writer, shards, work.settling, fills=fills)
        self._alone: Alone | Buckets
        if plan.assignment.wrapper == "ddp":
            options = Options.of(plan.spec.ddp)
            self._alone = Buckets(writer, self._params(), self._buffers(), options)
        else:
            self._alone = Alone(writer, self._params(alone=True), fills=fills)
        self._unit_of = {p.fqn: unit.fqn for unit in shards for p in unit.params}
        self._agrees = fills
        self._loss: int | None = None
        self._total: int | None = None
        self._carried: tuple[int, ...] = ()

    def play(self) -> EventLog:
        """All of it."""
        writer, accumulate = self._writer, self._plan.accumulate
        log, begin = self._work.log, len(self._work.before)
        first = Copy(writer, log, begin)
        self._before(first)
        count = min(accumulate, _MOST)
        for number in range(count):
            copy = first if number == 0 else Copy(writer, log, begin, self._known())
            self._microbatch(copy, is_first=number == 0, is_last=number == count - 1)
        mean = self._mean()
        writer.begin("step")
        self._update()
        self._units.drop_gradients()
        self._alone.drop_gradients()
        for kept in (self._total, self._loss, mean):
            writer.free(kept)
        return writer.log()

    def _before(self, copy: Copy) -> None:
        """What is there before the step."""
        writer, a, mesh = self._writer, self._plan.assignment, self._plan.mesh
        self._alone.be_there()
        copy.be_there(self._work.before, times={Term.INPUTS: self._plan.accumulate})
        for fqn, placed in a.tensors.items():
            if not placed.info.is_buffer:
                numel = placed.stored.padded_numel(placed.info.shape, mesh, UNIT_AXES, self._rank)
                size = numel * DTYPE_BYTES[placed.dtype]
                writer.make(size, Term.PARAMETERS, fqn.rpartition(".")[0])
        for param in self._params():
            if param.fqn in self._work.gradients:
                size = state_of(param, self._optimizer)
                writer.make(size, Term.OPTIMIZER, param.fqn.rpartition(".")[0])
        if any(mesh.size(axis) > 1 for axis in mesh.names if axis not in DATA_AXES):
            # Two numbers tell whether the ranks of a replica hold batches of one shape.
            writer.free(writer.make(16, Term.COMMUNICATION))

    def _params(self, *, alone: bool = False) -> Iterator[Updated]:
        """The trainable parameters as the optimizer has them, or those that no unit reduces."""
        for fqn, placed in self._plan.assignment.tensors.items():
            if placed.info.is_buffer or not placed.info.trainable:
                continue
            if alone and placed.unit is not None and self._plan.assignment.wrapper == "units":
                continue
            numel = placed.stored.local_numel(placed.info.shape, self._plan.mesh, self._rank)
            yield Updated(fqn, numel, placed.dtype)

    def _buffers(self) -> Iterator[tuple[str, int]]:
        """(dtype, bytes) of each buffer."""
        for placed in self._plan.assignment.tensors.values():
            if placed.info.is_buffer:
                yield placed.dtype, placed.info.num_bytes

    def _known(self) -> dict[int, int]:
        """What the next microbatch finds, by the numbers that the work gives it."""
        work = self._work
        return {e.storage: e.storage for e in work.before} | dict(
            zip(work.forgotten, self._carried, strict=True)
        )

    def _microbatch(self, copy: Copy, *, is_first: bool, is_last: bool) -> None:
        """Forward, loss, backward, and wrappers at the marks."""
        self._writer.begin("forward")
        self._alone.before_forward(is_first=is_first, is_last=is_last)
        cuts = self._plan.assignment.strategy.cuts
        self._units.set_last(is_last, keeps_whole="gradient" not in cuts)
        acts: list[tuple[int, bool, Callable[[], None]]] = [
            (event, False, partial(self._take, copy, fqn))
            for fqn, event in self._work.ready.items()
        ]
        for mark in self._work.marks:
            acts.append((mark.event, _is_before(mark), partial(self._at, mark, is_last=is_last)))
        acts.append((self._work.first_made_in_backward, False, self._drop_loss))
        for event, enters, act in sorted(acts, key=lambda each: each[0]):
            copy.until(event, enters=enters)
            act()
        copy.until(self._work.num_events)
        self._keep_loss(copy)
        self._carried = tuple(map(copy.number, self._work.kept))

    def _take(self, copy: Copy, fqn: str) -> None:
        """A gradient is there."""
        storage, size = self._work.gradients[fqn]
        number = copy.number(storage)
        self._writer.adopt(number, size)
        unit = self._unit_of.get(fqn)
        if unit is None:
            self._alone.has_gradient(fqn, number)
        else:
            self._units.has_gradient(unit, fqn, number)

    def _at(self, mark: Mark, *, is_last: bool) -> None:
        """A wrapper acts."""
        if mark.moment == Moment.END_OF_BACKWARD:
            self._units.end_of_backward(is_last=is_last)
            if is_last and self._agrees:
                self._agree()
        elif mark.unit not in self._plan.assignment.units:
            return  # A told work marks more than this plan has.
        elif mark.moment == Moment.BEFORE_FORWARD:
            self._units.before_forward(mark.unit)
        elif mark.moment == Moment.AFTER_FORWARD:
            again = self._work.is_in_backward(mark)
            self._units.after_forward(mark.unit, in_backward=again)
        elif mark.moment == Moment.BEFORE_BACKWARD:
            self._units.before_backward(mark.unit)
        else:
            self._units.after_backward(mark.unit)

    def _agree(self) -> None:
        """`runtime.gradients`: the data ranks tell each other which gradients they have."""
        self._units.forget_filled()
        self._alone.fill()
        tensors = self._plan.assignment.tensors.values()
        count = sum(p.info.trainable and not p.info.is_buffer and p.info.numel > 0 for p in tensors)
        # One number for each, and two of the calls that were made.
        self._writer.free(self._writer.make(8 * (count + 2), Term.COMMUNICATION))

    def _drop_loss(self) -> None:
        """The name of the last loss is given to the new one."""
        self._writer.free(self._loss)
        self._loss = None

    def _keep_loss(self, copy: Copy) -> None:
        """The loop keeps the loss, and the sum of all, at least in single precision."""
        for loss, size in self._work.losses.items():
            self._loss = copy.number(loss)
            self._writer.adopt(self._loss, size)
            before, self._total = self._total, self._make_number(size)
            self._writer.free(before)

    def _mean(self) -> int | None:
        """`runtime.peers.mean_over_ranks`, in double precision."""
        if not self._work.losses:
            return None
        (size,) = self._work.losses.values()
        mean = self._make_number(size)
        if self._plan.mesh.size(*GRADIENT_AXES) == 1:
            return mean
        sums = self._writer.make(24, Term.COMMUNICATION)
        out = self._writer.make(8, Term.LOSS)
        self._writer.free(mean)
        self._writer.free(sums)
        return out

    def _make_number(self, size: int) -> int:
        return self._writer.make(max(size, 4), Term.LOSS)

    def _update(self) -> None:
        """The optimizer takes what has a gradient."""
        found = self._units.reduced().keys() | set(self._alone.found)
        params = [param for param in self._params() if param.fqn in found]
        step(self._writer, params, self._optimizer, foreach=self._foreach)


def _is_before(mark: Mark) -> bool:
    """Whether a mark belongs to the phase that it begins rather than to the one that it ends."""
    return mark.moment in (Moment.BEFORE_FORWARD, Moment.BEFORE_BACKWARD)
