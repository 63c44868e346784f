"""Replay one step of one rank: microbatches, the mean of their losses, the optimizer step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from meshplan.errors import PlanError, Problem
from meshplan.layout.mesh import DATA_AXES, GRADIENT_AXES
from meshplan.memory.log.events import EventLog, Term
from meshplan.memory.log.microbatch import AT_STAGE, HookKind, MicrobatchTrace
from meshplan.memory.replay.buckets import DdpOptions
from meshplan.memory.replay.gradient_scale import clip, unscale
from meshplan.memory.replay.optimizer import Updated, check_optimizer, step
from meshplan.memory.replay.part import Wrapped, splits_backward
from meshplan.memory.replay.prepare import Act, Prepared
from meshplan.memory.replay.writer import Copy, LogWriter
from meshplan.plan.plan import Plan
from meshplan.plan.restrict import restrict

_MOST: Final = 3
"""Maximum number of accumulated microbatches that are played: the first, the second and the last.
All microbatches between the second and the last have the same events as the second."""


def replay(
    trace: MicrobatchTrace | Prepared,
    plan: Plan,
    optimizer: str,
    *,
    rank: int = 0,
    foreach: bool = True,
    has_host: bool = False,
) -> EventLog:
    """Return the event log of a step, as `runtime.fake_step` would trace it.

    The step is any but the first, so the optimizer's state exists.

    Args:
        trace: One microbatch of this rank, made for this plan's tp, cp and recomputation; with
            pipeline stages, all microbatches of one pass through the schedule.
        plan: The plan of the whole model, all stages included.
        optimizer: A name of `spec.OPTIMIZER_STATES`.
        rank: The rank whose step is replayed.
        foreach: If True, the optimizer updates parameters together, as torch does on a GPU.
        has_host: If True, host memory is separate from the device's, and has the optimizer's step
            counts.

    Raises:
        PlanError: There is no rule for a feature of this plan; a trace of the whole step can
            estimate the plan.
    """
    prepared = trace if isinstance(trace, Prepared) else Prepared(trace)
    check_rules(plan, prepared, optimizer)
    # Units that reduce at the end of backward, such as the root, act at `END_OF_BACKWARD`.
    ends = any(point.kind == HookKind.END_OF_BACKWARD for point in prepared.hook_points)
    assert ends or not plan.assignment.units
    return _StepBuilder(prepared, plan, optimizer, rank, foreach=foreach, has_host=has_host).play()


def check_rules(plan: Plan, trace: Prepared | None = None, optimizer: str = "") -> None:
    """Check that `replay` has rules for every feature of a plan.

    Args:
        plan: The plan of the whole model, all stages included.
        trace: The microbatch that would be replayed; None if it is yet to be traced.
        optimizer: A name of `spec.OPTIMIZER_STATES`; "" for the plan's own.

    Raises:
        PlanError: There is no rule for a feature of this plan; a trace of the whole step can
            estimate the plan.
    """
    if trace is not None:
        name = optimizer or plan.spec.optimizer
        check_optimizer(name, is_sharded=plan.assignment.shards_parameters)
    if problems := list(_unknown(plan, trace)):
        raise PlanError(problems)
    if trace is not None and plan.accumulate > 1:
        trace.check_repeats()


def _unknown(plan: Plan, trace: Prepared | None) -> Iterator[Problem]:
    """Yield a problem for each feature of the plan that the replay has no rules for."""
    a, spec = plan.assignment, plan.spec
    shared = a.shared
    hook_points = trace.hook_points if trace is not None else ()
    has_sharing = any(point.kind == HookKind.SHARING for point in hook_points)
    has_reducing = any(point.kind == HookKind.REDUCING for point in hook_points)
    for is_present, what in (
        (
            splits_backward(a) and not has_reducing,
            "a schedule that splits the backward",
        ),
        (
            bool(shared) and trace is not None and not has_sharing,
            "parameters that several stages share",
        ),
        (
            any(
                len(set(map(a.stages.rank_of, stages_of))) < len(stages_of)
                for stages_of in shared.values()
            )
            if a.stages is not None
            else False,
            "a parameter that two stages of one rank share",
        ),
        (
            bool(a.host_activations) and (trace is None or trace.host is None),
            "offloaded activations",
        ),
        (
            a.wrapper == "ddp" and DdpOptions.of(spec.ddp).clones_output and plan.accumulate > 1,
            "find_unused_parameters with accumulation",
        ),
    ):
        if is_present:
            fix = "trace the whole step: meshplan estimate --tier 3"
            yield Problem(f"the replay of a step has no rules for {what}", fix=fix)


class _StepBuilder:
    """Builds the event log of one step of one rank."""

    def __init__(
        self,
        trace: Prepared,
        plan: Plan,
        optimizer: str,
        rank: int,
        *,
        foreach: bool,
        has_host: bool,
    ) -> None:
        self._trace, self._plan = trace, plan
        self._optimizer, self._foreach, self._has_host = optimizer, foreach, has_host
        self._writer = LogWriter(has_host=has_host)
        stages = plan.assignment.stages
        plans = {"": plan}
        if stages is not None:
            place = plan.mesh.index(rank, ("pp",))
            plans = {f"{AT_STAGE}{s}": restrict(plan, s) for s in stages.of_rank(place)}
        self._parts = {
            at: Wrapped(self._writer, part, rank, trace.grad_relayout_at.get(at, {}))
            for at, part in plans.items()
        }
        self._num_backwards = stages.microbatches if stages is not None else 1
        self._loss: int | None = None
        self._total: int | None = None
        self._carried: tuple[int, ...] = ()

    def play(self) -> EventLog:
        """Return the event log of the whole step."""
        writer, accumulate = self._writer, self._plan.accumulate
        log, begin = self._trace.log, len(self._trace.before)
        first = Copy(writer, log, begin)
        self._before(first)
        count = min(accumulate, _MOST)
        for number in range(count):
            copy = first if number == 0 else Copy(writer, log, begin, self._known())
            copy.host = self._trace.host or ()
            self._microbatch(copy, is_first=number == 0, is_last=number == count - 1)
        mean = self._mean()
        writer.begin("step")
        self._update()
        for part in self._parts.values():
            part.drop_gradients()
        for kept in (self._total, self._loss, mean):
            writer.free(kept)
        return writer.log()

    def _before(self, copy: Copy) -> None:
        """Allocate what exists before the step."""
        mesh = self._plan.mesh
        copy.allocate_resident(self._trace.before, times={Term.INPUTS: self._plan.accumulate})
        for at, part in self._parts.items():
            gradients = self._trace.gradients_at.get(at, {})
            part.allocate_resident(gradients, self._optimizer, has_host=self._has_host)
        if any(mesh.size(axis) > 1 for axis in mesh.names if axis not in DATA_AXES):
            # The ranks of a replica compare the shapes of their batches: two int64 numbers.
            self._writer.free(self._writer.make(16, Term.COMMUNICATION))

    def _known(self) -> dict[int, int]:
        """Map numbers in the trace to storages of the log that exist before the next microbatch.

        These are inputs, buffers, and the tensors that the model keeps from the previous
        microbatch.
        """
        trace = self._trace
        return {storage: storage for _, storage, _ in trace.before} | dict(
            zip(trace.forgotten, self._carried, strict=True)
        )

    def _microbatch(self, copy: Copy, *, is_first: bool, is_last: bool) -> None:
        """Play forward, loss and backward of one microbatch, with wrappers at the hook points."""
        for part in self._parts.values():
            part.begin(is_first=is_first, is_last=is_last and self._num_backwards == 1)
        backwards = Counter[str]()
        for act in self._trace.acts:
            copy.until(act.event, enters=act.enters)
            if act.kind is not None:
                self._at(act, act.kind, backwards, is_last=is_last)
            elif act.storage < 0:  # Backward begins, and the loop's variable has a new loss.
                self._drop_loss()
            else:
                number = copy.number(act.storage)
                self._writer.adopt(number, act.size)
                self._parts[act.at].has_gradient(act.fqn, number)
        copy.until(self._trace.num_events)
        self._keep_loss(copy)
        self._carried = tuple(map(copy.number, self._trace.kept))

    def _at(self, act: Act, kind: HookKind, backwards: Counter[str], *, is_last: bool) -> None:
        """Let a wrapper act at a hook point."""
        if kind is HookKind.SHARING:
            if is_last:
                self._share()
            return
        at = act.at
        part = self._parts[at]
        if kind is HookKind.REDUCING:
            if is_last:
                part.reduce()
            return
        if kind is not HookKind.END_OF_BACKWARD:
            part.act(kind, act.fqn, in_backward=act.in_backward)
            return
        backwards[at] += 1
        # Split backwards reduce later, at `HookKind.REDUCING`.
        if splits_backward(self._plan.assignment):
            part.end_of_backward(is_last=False)
            return
        part.end_of_backward(is_last=is_last and backwards[at] == self._trace.ends[at])
        if self._num_backwards > 1:
            part.set_last(is_last=is_last and backwards[at] + 1 == self._trace.ends[at])

    def _share(self) -> None:
        """Play `runtime.apply.pipeline.shared.SharedTensors.add_gradients`."""
        before: int | None = None
        for fqn, holders in self._plan.assignment.shared.items():
            for at, part in self._parts.items():
                if at not in (f"{AT_STAGE}{stage}" for stage in holders):
                    continue
                is_there = self._writer.make(4, Term.COMMUNICATION)
                total = part.add_gradients(fqn)
                self._writer.free(is_there)
                self._writer.free(before)
                before = total
        self._writer.free(before)

    def _drop_loss(self) -> None:
        """Free the previous loss, because the loop's variable is bound to the new one."""
        self._writer.free(self._loss)
        self._loss = None

    def _keep_loss(self, copy: Copy) -> None:
        """Keep the loss, and add it to the step's sum of losses, in float32 or wider.

        A pipeline returns the sum over its microbatches, which is freed once it is added.
        """
        for loss, size in self._trace.losses.items():
            number = copy.number(loss)
            self._writer.adopt(number, size)
            before, self._total = self._total, self._make_number(size)
            self._writer.free(before)
            if self._plan.assignment.stages is None:
                self._loss = number
            else:
                self._writer.free(number)

    def _mean(self) -> int | None:
        """Play `runtime.base.batch_agreement.mean_over_ranks`, which adds up in float64.

        Returns:
            Storage of the mean loss; None if the rank has no loss.
        """
        if not self._trace.losses:
            return None
        (size,) = self._trace.losses.values()
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
        """Unscale and clip the gradients, then step on the parameters that have a gradient."""
        shared = self._plan.assignment.shared
        found, counted = [], []
        for at, part in self._parts.items():
            for each in part.updated():
                holders = shared.get(each[1].fqn)
                found.append(each)
                # A parameter shared by stages counts once in the norm of all gradients.
                if holders is None or at == f"{AT_STAGE}{holders[0]}":
                    counted.append(each)
        if self._plan.spec.precision.scales_loss:
            unscale(self._writer, [param for _, param in found])
        if self._plan.spec.clip_grad_norm is not None:
            by_axes: dict[tuple[tuple[str, ...], bool], list[Updated]] = {}
            for axes, param in counted:
                by_axes.setdefault((axes, param.on_host), []).append(param)
            clip(self._writer, by_axes)
        params = [param for _, param in found]
        step(self._writer, params, self._optimizer, foreach=self._foreach)
