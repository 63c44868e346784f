"""Costs and memory of a live model for the planner, from traces on fake tensors.

For each choice of tp, a few microbatches are traced (`block_traces`). The memory of a plan is
composed from them, and the actions of the plan's wrappers are added. The plan that the search
chooses is then traced itself. The memory of a plan with pipeline stages is not composed: each of
its stages is traced, once for all plans that have it (`stage_traces`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Final

import torch.distributed as dist
from torch import nn

from meshplan.assign.axes.stage_starts import stage_starts
from meshplan.cost.types import Chain
from meshplan.errors import MeshplanError, Origin, PlanError, Problem
from meshplan.layout.mesh import Mesh
from meshplan.memory.analytic.ranks import ERROR, OverError
from meshplan.memory.answer.assemble import as_bound, assemble
from meshplan.memory.answer.estimate import MemoryEstimate, Tier
from meshplan.memory.answer.rank_classes import equal_ranks
from meshplan.memory.answer.reserved import ReplayCache, ReservedLog
from meshplan.memory.log.events import EventLog
from meshplan.memory.replay import Prepared
from meshplan.memory.replay.optimizer import OF_WHOLE_TENSORS, check_optimizer
from meshplan.memory.replay.step import composed_log
from meshplan.plan.plan import Plan
from meshplan.planner.problem.live_model import Priced, TracedChoices
from meshplan.planner.space.offload import stated_offloads
from meshplan.planner.space.trials import data_axis, with_axes
from meshplan.runtime.base.pytree import tensors_in
from meshplan.runtime.estimate.estimate import estimate_by_trace
from meshplan.runtime.estimate.request import EstimateRequest, FakeStepResult, PlanDecider
from meshplan.runtime.estimate.scale_down import ModelSource
from meshplan.runtime.fake_step.chain import staged_of
from meshplan.runtime.live.block_traces import MOST, BlockTraces
from meshplan.runtime.live.bounded import BoundedTraces
from meshplan.runtime.live.priced import priced
from meshplan.runtime.live.recording import Recording
from meshplan.runtime.live.stage_traces import StageTraces
from meshplan.spec.spec import AUTO, Spec

_AS_STATED: Final = "of a live model is priced as the plan states it, and not searched"


class TracedModel:
    """Costs and memory of a live model; implements `planner.problem.live_model.Traced`.

    Args:
        model: The unsharded model of one process, on any device. It is copied, and its values are
            not read.
        decider: Decides plans for the model.
        recording_of: Returns the recording of the model; None if it cannot have one.
        spec: The plan file, which may leave fields open.
        device: Name of the device, as in the plan's `hardware`.
        limit_bytes: Bytes that one device may reserve.
        source: Source from which another process can build the model; None if the model exists in
            this process only.
        origin: Place where the user named the model; None if the user passed the model itself.
        report: Called with lines on the progress.
    """

    def __init__(
        self,
        model: nn.Module,
        decider: PlanDecider,
        recording_of: Callable[[], Recording | None],
        spec: Spec,
        *,
        device: str,
        limit_bytes: int,
        source: ModelSource | None,
        origin: Origin | None,
        report: Callable[[str], None],
    ) -> None:
        self._model, self._spec = model, spec
        self._decider = decider
        self._source = source
        self._device, self._limit_bytes = device, limit_bytes
        self._origin, self._report = origin, report
        self._traces: dict[TracedChoices, BlockTraces] = {}
        self._why_not: dict[TracedChoices, str] = {}
        self._staged_chains: dict[tuple[TracedChoices, int], Chain] = {}
        self._bounded = BoundedTraces(report, device, recording_of)
        self._stages = StageTraces(
            model, device=device, origin=origin, report=report, bounded=self._bounded
        )

    @property
    def recording(self) -> Recording | None:
        """The recording of the model; None if it cannot have one."""
        return self._bounded.recording

    # Interface of the planner

    def refuses(self, spec: Spec) -> str:
        """Return why the planner cannot search plans like this spec; "" if it can.

        The plan file, with any mesh, must pass the same checks.
        """
        stated = replace(self._spec, mesh=None)
        whys = ((*_unsearched(each), *_without_figures(each)) for each in (spec, stated))
        why = next((why for each in whys for why in each), "")
        choices = TracedChoices.of(spec)
        if why:
            return why
        if spec.optimizer in OF_WHOLE_TENSORS and self._has_dtensors(spec):
            return f"the optimizer {spec.optimizer} on DTensors {_AS_STATED}"
        if choices.tp > 1 and choices not in self._why_not:
            self._why_not[choices] = self._why_no_tp(spec)
        why = self._why_not.get(choices, "")
        return why or (self._why_no_stages(spec) if _spreads(spec, "pp") else "")

    def _has_dtensors(self, spec: Spec) -> bool:
        """Return True if a plan with a stated mesh shards parameters, or FSDP2 manages them."""
        if not isinstance(spec.mesh, Mapping):
            return False
        try:
            return self.decide(spec).assignment.shards_parameters
        except PlanError:
            return False

    def _why_no_stages(self, spec: Spec) -> str:
        """Return why plans with this pp cannot be searched; "" if they can."""
        if dist.is_initialized():
            return _in_a_group("pp")
        try:
            plan = self.decide(spec)
            starts = stage_starts(with_axes(spec, {"pp": 2}), plan.graph)
        except MeshplanError as error:
            return error.problems[0].what
        return starts.problem(plan.mesh.size("pp"))

    def _why_no_tp(self, spec: Spec) -> str:
        """Return why plans with this tp cannot be searched; "" if they can."""
        if dist.is_initialized():
            return _in_a_group("tp")
        try:
            traces = self.traces(spec)
            groups = equal_ranks(traces.plan.assignment)
            if any(_has_larger_shards(traces.plan, ranks[0]) for ranks in groups):
                return "a rank of tp has larger shards than the first one, which is traced"
            self.chain(spec)
        except MeshplanError as error:
            return error.problems[0].what
        return ""

    def is_priced(self, spec: Spec) -> bool:
        """Return True if `priced` can handle a spec without open fields, searchable or not."""
        return self._source is not None and not any(_without_figures(spec))

    def priced(self, spec: Spec) -> Priced:
        """Return the memory and the costs of a plan that leaves no field open, without a search."""
        return priced(self._asked(spec), self._report, self._decider)

    def _asked(self, spec: Spec) -> EstimateRequest:
        assert self._source is not None
        return EstimateRequest(
            spec=spec, source=self._source, device=self._device, limit_bytes=self._limit_bytes
        )

    def decide(self, spec: Spec) -> Plan:
        """Return the plan that a spec declares for the model.

        Raises:
            PlanError: The plan does not fit the model, or the forward cannot be recorded.
        """
        return self._decider.decide(spec)

    def chain(self, spec: Spec, stage_samples: int = 0) -> Chain:
        """Return the costs of the blocks, and of the modules before and after them.

        Args:
            spec: A spec; with `stage_samples`, of a model that is cut into pipeline stages.
            stage_samples: As in `cost.grid.ProgramKey`.
        """
        traces = self.traces(spec)
        if not stage_samples:
            return traces.chain
        # All but a microbatch of one sample may have one chain.
        samples = 1 if stage_samples == 1 and traces.is_single_unlike else 2
        key = TracedChoices.of(spec), samples
        if key not in self._staged_chains:
            staged = staged_of(self.decide(spec))
            self._staged_chains[key] = traces.staged_chain(staged, samples)
        return self._staged_chains[key]

    def traces(self, spec: Spec) -> BlockTraces:
        """Return the traces of microbatches under the `TracedChoices` of a spec.

        They are made on first use.
        """
        choices = TracedChoices.of(spec)
        if choices not in self._traces:
            # Only plans with whole parameters are searched for an optimizer that needs them.
            is_whole = self._spec.optimizer in OF_WHOLE_TENSORS
            axis = "dp_replicate" if is_whole else data_axis(self._spec)
            sizes = {axis: 2, "tp": choices.tp} if choices.tp > 1 else {axis: 2}
            trial = with_axes(
                spec,
                sizes,
                sequence_parallel=choices.sequence_parallel,
                loss_parallel=choices.loss_parallel,
            )
            trial = replace(trial, batch=replace(trial.batch, micro=MOST))
            self._traces[choices] = BlockTraces(
                self._model,
                self.decide(trial),
                device=self._device,
                origin=self._origin,
                report=self._report,
                bounded=self._bounded,
                expects_unlike=self._expects_unlike,
            )
        return self._traces[choices]

    def _expects_unlike(self) -> bool:
        """Return True if traces that were made ran other operators on one sample than on two."""
        return any(each.is_traced and each.is_single_unlike for each in self._traces.values())

    def memory(self, plan: Plan, stop_above_bytes: float = float("inf")) -> MemoryEstimate:
        """Estimate every rank's memory, never below what the plan needs.

        Args:
            plan: A plan of this model.
            stop_above_bytes: Bytes per rank above which the estimate stops with an OverError.

        Raises:
            OverError: A rank needs more than `stop_above_bytes`.
            PlanError: The traces are not valid for the plan, or the model cannot be traced.
        """
        if problems := list(_clashes(plan)):
            raise PlanError(problems)
        traces = self.traces(plan.spec)
        if plan.assignment.stages is not None:
            if problems := list(traces.clashes(plan)):
                raise PlanError(problems)
            return self._estimate(
                plan,
                self._log_of_stages(plan),
                "as many microbatches as the peak depends on were traced through each stage",
                stop_above_bytes,
            )
        least, most = traces.works(plan)
        # No trace of this plan is needed if the composed upper bound fits into
        # `stop_above_bytes`, or if even the composed lower bound does not.
        try:
            return self._composed(plan, most, stop_above_bytes)
        except OverError:
            if least is most:
                raise
        self._composed(plan, least, stop_above_bytes)  # May raise OverError.
        return self._composed(plan, traces.traced_as_is(plan), stop_above_bytes)

    def certify(self, plan: Plan, stop_above_bytes: float = float("inf")) -> MemoryEstimate:
        """Estimate every rank's memory from a microbatch traced under the plan itself.

        If a subprocess can build the model, `estimate_by_trace` makes the estimate, so that the
        planner and `meshplan estimate` report the same bytes.
        """
        if plan.assignment.stages is not None:
            if self._source is None:
                return self.memory(plan, stop_above_bytes)
            if self._bounded.bound:
                return self._estimated_by_trace(plan)
            # The search has traced the stages as an estimate would: do not trace them again.
            log_of, assumed = (
                self._log_of_stages(plan),
                self.traces(plan.spec).loop_of(plan).assumed,
            )
            return self._estimated_by_trace(
                plan, lambda rank: FakeStepResult(log_of(rank), assumed)
            )
        traced = self.traces(plan.spec).traced_as_is(plan)
        if self._source is not None:
            return self._estimated_by_trace(plan)
        return self._composed(plan, traced, stop_above_bytes)

    def _estimated_by_trace(
        self, plan: Plan, composed_of: Callable[[int], FakeStepResult] | None = None
    ) -> MemoryEstimate:
        return estimate_by_trace(
            self._asked(plan.spec),
            self._report,
            composed_of=composed_of,
            known=(self._model, self.decide(plan.spec)),
        )

    def _log_of_stages(self, plan: Plan) -> Callable[[int], EventLog]:
        """Return what returns the log of a rank's step under a plan with pipeline stages."""
        traces = self.traces(plan.spec)
        return partial(self._stages.log, plan, loop_of=lambda: traces.loop_of(plan))

    def _composed(self, plan: Plan, prepared: Prepared, stop_above_bytes: float) -> MemoryEstimate:
        """Estimate every rank's memory from one microbatch of the whole model."""
        is_exact = any(traces.is_exact(prepared) for traces in self._traces.values())
        how = "under the plan" if is_exact else "block by block, not under the plan itself"
        return self._estimate(
            plan,
            # The traces are of the first rank of tp, whose shards are the largest.
            lambda rank: composed_log(prepared, plan, _first_along_tp(plan.mesh, rank)),
            f"a microbatch of the model was traced {how}",
            stop_above_bytes,
        )

    def _estimate(
        self, plan: Plan, log_of: Callable[[int], EventLog], traced: str, stop_above_bytes: float
    ) -> MemoryEstimate:
        """Estimate every rank's memory.

        Args:
            plan: A plan of this model.
            log_of: Returns the log of a rank's step.
            traced: What was traced, for the user.
            stop_above_bytes: As in `memory`.
        """
        groups = equal_ranks(plan.assignment)
        logs: list[EventLog] = []
        replayed: dict[int, ReservedLog] = {}
        holding = ReplayCache(self._device, plan.spec)
        for number, ranks in enumerate(groups):
            logs.append(log_of(ranks[0]))
            if logs[-1].pooled_bytes > stop_above_bytes:
                raise OverError(ranks[0], logs[-1].pooled_bytes)
            replayed[number] = holding.of(logs[-1])
            if replayed[number].reserve.reserved_bytes > stop_above_bytes:
                raise OverError(ranks[0], replayed[number].reserve.reserved_bytes)
        found = assemble(
            plan,
            groups,
            logs,
            device=self._device,
            limit_bytes=self._limit_bytes,
            tier=Tier.REPLAY,
            certified=f"{traced}; wrappers were added by rules",
            assumed=self._assumed(plan),
            error=ERROR,
            replayed=replayed,
        )
        return as_bound(found, logs, self._bounded.bound) if self._bounded.bound else found

    def _assumed(self, plan: Plan) -> tuple[tuple[str, str], ...]:
        """Return the loop's assumptions, with the input shapes for one step of the plan."""
        samples, loop = (plan.micro or 1) * plan.accumulate, self.traces(plan.spec).loop
        parts = [
            f"{[samples, *t.shape[1:]]} {str(t.dtype)[6:]}" for _, t in tensors_in(loop.inputs)
        ]
        (name, _), *rest = loop.assumed
        return ((name, ", ".join(parts)), *rest)


def _first_along_tp(mesh: Mesh, rank: int) -> int:
    """Return the rank that is first along tp, with the coordinates of `rank` on other axes."""
    inner = mesh.names[mesh.names.index("tp") + 1 :] if "tp" in mesh.names else ()
    return rank - mesh.index(rank, ("tp",)) * mesh.size(*inner)


def _has_larger_shards(plan: Plan, rank: int) -> bool:
    """Return True if a rank stores more of some tensor than the first rank along its tp."""
    mesh, first = plan.mesh, _first_along_tp(plan.mesh, rank)
    return any(
        math.prod(each.local_shape(mesh, rank)) > math.prod(each.local_shape(mesh, first))
        for each in plan.assignment.tensors.values()
    )


def _in_a_group(axis: str) -> str:
    """Return why a process in a process group cannot search this axis."""
    return (
        f"this process is in a process group, so the model cannot run as a rank of {axis}; "
        f"meshplan plan searches {axis} before the job starts"
    )


def _clashes(plan: Plan) -> Iterator[Problem]:
    """Yield reasons why the memory of a plan cannot be composed from microbatches."""
    if plan.mesh.size("cp", "ep") > 1:
        what = "cp or ep exceeds 1, but the live model was traced without these axes"
        fix = "remove them from the mesh, or state the whole plan and run meshplan estimate"
        yield Problem(what, plan.spec.origin("mesh"), fix)


def _unsearched(spec: Spec) -> Iterator[str]:
    """Yield reasons why a spec can only be priced as it is, not searched."""
    if _spreads(spec, "cp"):
        yield f"context parallelism {_AS_STATED}"
    if _spreads(spec, "ep"):
        yield f"expert parallelism {_AS_STATED}"
    has_split = spec.pipeline is not None and spec.pipeline.split != AUTO
    if has_split or any(rule.stage is not None for rule in spec.rules):
        yield f"a stated split into pipeline stages {_AS_STATED}"
    modes = {spec.activation_checkpointing.mode} | {
        rule.activation_checkpointing.mode
        for rule in spec.rules
        if rule.activation_checkpointing is not None
    }
    if stated_offloads(spec)[0] or any(rule.offload for rule in spec.rules):
        yield f"offload {_AS_STATED}"
    if spec.sync_batchnorm:
        yield f"sync_batchnorm {_AS_STATED}"
    if "selective" in modes:
        yield f"selective recomputation {_AS_STATED}"


def _spreads(spec: Spec, axis: str) -> bool:
    return isinstance(spec.mesh, Mapping) and spec.mesh.get(axis, 1) != 1


def _without_figures(spec: Spec) -> Iterator[str]:
    """Yield reasons why neither step time nor memory of a live model is known under a spec."""
    if any(rule.apply for rule in spec.rules):
        yield "the planner cannot know what the code of 'apply' does to a model"
    try:
        check_optimizer(spec.optimizer, is_sharded=False)
    except PlanError as error:
        yield error.problems[0].what
