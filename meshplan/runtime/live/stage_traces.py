"""Traces of a live model's pipeline stages, shared by all plans in which a stage does the same.

The trace of a rank covers as many microbatches of a step as its peak depends on, through the rank's
stages. It depends on the modules of these stages, on the samples of a microbatch and on what is
recomputed, but not on the cuts between other stages nor on the data axes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

from torch import nn

from meshplan.errors import Origin, PlanError
from meshplan.memory.log.events import EventLog
from meshplan.memory.log.microbatch import MicrobatchTrace
from meshplan.memory.replay import Prepared
from meshplan.memory.replay.main import check_rules
from meshplan.memory.replay.step import composed_log
from meshplan.plan.plan import Plan
from meshplan.plan.restrict import restrict
from meshplan.planner.problem.live_model import StageError, TracedChoices
from meshplan.runtime.base.batch import mapped
from meshplan.runtime.estimate.estimate import check_played
from meshplan.runtime.fake_step.default_loop import DefaultLoop
from meshplan.runtime.fake_step.few_microbatches import (
    first_microbatches,
    num_traced,
    of_few,
    with_all_inputs,
)
from meshplan.runtime.fake_step.microbatch import trace_microbatch
from meshplan.runtime.live.block_traces import in_words
from meshplan.runtime.live.bounded import BoundedTraces, Question
from meshplan.runtime.live.trace_json import trace_from_json, trace_to_json


class StageTraces:
    """Event logs of the ranks of plans with a pipeline, for one live model.

    Args:
        model: The unsharded model of one process, on any device. It is copied, and its values are
            not read.
        device: Name of the device whose kernels are emulated.
        origin: Place where the user named the model; None if the user passed the model itself.
        report: Called with lines on the progress.
        bounded: Runs the traces of this model.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        device: str,
        origin: Origin | None,
        report: Callable[[str], None],
        bounded: BoundedTraces,
    ) -> None:
        self._model, self._device, self._bounded = model, device, bounded
        self._origin, self._report = origin, report
        self._traces: dict[Hashable, MicrobatchTrace | StageError] = {}
        self._known: dict[Hashable, Prepared] = {}

    def log(self, plan: Plan, rank: int, loop_of: Callable[[], DefaultLoop]) -> EventLog:
        """Return the log of one rank's step.

        Args:
            plan: A plan of this model with a pipeline.
            rank: The rank.
            loop_of: Returns the loop of a step of the plan; called if the trace is missing.

        Raises:
            StageError: The stages of the rank cannot run.
            PlanError: There are no rules for a feature of the plan.
        """
        check_rules(plan)
        check_played(plan)
        prepared = self._prepared(plan, rank, loop_of)
        try:
            return composed_log(prepared, plan, rank)
        except PlanError as error:
            raise StageError(error.problems, plan.mesh.index(rank, ("pp",))) from None

    def _prepared(self, plan: Plan, rank: int, loop_of: Callable[[], DefaultLoop]) -> Prepared:
        stages = plan.assignment.stages
        assert stages is not None
        key = _key(plan, rank), stages.microbatches
        if key not in self._known:
            trace = self._trace(plan, rank, loop_of)
            self._known[key] = Prepared(with_all_inputs(trace, stages))
        return self._known[key]

    def _trace(self, plan: Plan, rank: int, loop_of: Callable[[], DefaultLoop]) -> MicrobatchTrace:
        """Return the trace of the first microbatches of a rank."""
        key, place = _key(plan, rank), plan.mesh.index(rank, ("pp",))
        if key not in self._traces:
            traced = partial(self._traced, plan, rank, loop_of)

            def run(_: Sequence[int]) -> list[MicrobatchTrace]:
                return [in_words(traced, self._model, self._origin)]

            question = Question.of(plan.spec, "stages", trace_to_json, trace_from_json)
            try:
                (self._traces[key],) = self._bounded.recorded(
                    question, [key], run, lambda trace: trace.log
                )
            except PlanError as error:
                self._traces[key] = StageError(error.problems, place)
        found = self._traces[key]
        if isinstance(found, StageError):
            raise found
        return found

    def _traced(self, plan: Plan, rank: int, loop_of: Callable[[], DefaultLoop]) -> MicrobatchTrace:
        assert plan.assignment.stages is not None
        place, loop = plan.mesh.index(rank, ("pp",)), loop_of()
        self._report(f"tracing {_words(plan, place)} of {type(self._model).__name__}")
        # Without the inputs of the others, so that plans with more microbatches have this trace.
        batch = first_microbatches((loop.inputs, loop.targets), plan.assignment.stages)
        inputs, targets = mapped(batch, lambda tensor: tensor.clone())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return trace_microbatch(
                self._model, of_few(plan), inputs, targets, loop.loss_fn, rank, self._device
            )


def _key(plan: Plan, rank: int) -> Hashable:
    """Return all that the trace of a rank depends on."""
    plan = of_few(plan)
    stages = plan.assignment.stages
    assert stages is not None
    place = plan.mesh.index(rank, ("pp",))
    parts: list[Any] = []
    for stage in stages.of_rank(place):
        own = restrict(plan, stage).assignment
        parts += (
            tuple(fqn for fqn, at in stages.units if at == stage),
            frozenset(own.recompute),
            tuple(
                (fqn, p.compute_dtype, len(stages.tensors[fqn])) for fqn, p in own.tensors.items()
            ),
            tuple((fqn, str(unit.precision), unit.casts_inputs) for fqn, unit in own.units.items()),
            own.wrapper,
        )
    return (
        TracedChoices.of(plan.spec),
        plan.mesh.index(rank, ("pp", "tp")) if plan.mesh.size("tp") > 1 else place,
        (plan.micro, stages.schedule, stages.num_ranks, stages.virtual, stages.microbatches),
        tuple(parts),
    )


def _words(plan: Plan, place: int) -> str:
    stages = plan.assignment.stages
    assert stages is not None
    number, count = stages.of_rank(place)[0], num_traced(stages)
    return f"stage {number} of {stages.num} with {count} microbatches"
