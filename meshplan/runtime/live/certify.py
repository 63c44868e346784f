"""Trace a live model under a plan that was chosen for the model from its config."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch.distributed as dist
from torch import nn

from meshplan.errors import MeshplanError, Origin, PlanError
from meshplan.memory.answer.assemble import assemble
from meshplan.memory.answer.estimate import MemoryEstimate, Tier
from meshplan.memory.answer.rank_classes import equal_ranks
from meshplan.memory.log.events import EventLog
from meshplan.memory.replay import Prepared
from meshplan.memory.replay.main import check_rules
from meshplan.memory.replay.step import composed_log
from meshplan.plan.plan import Plan
from meshplan.runtime.base.batch import mapped, microbatch
from meshplan.runtime.estimate.composed import COMPOSED_ERROR, alike_ranks
from meshplan.runtime.estimate.request import decided_of
from meshplan.runtime.fake_step.default_loop import loop_of
from meshplan.runtime.fake_step.few_microbatches import num_traced
from meshplan.runtime.fake_step.microbatch import trace_microbatch
from meshplan.runtime.trace.trace_errors import problem_of
from meshplan.spec.spec import Spec

_CERTIFIED = (
    "chosen by estimates from the config; then a microbatch of each distinct rank was traced under "
    "the plan, and the memory of wrappers and the optimizer was added by rules"
)

_MOST_BLOCKS = 128
"""Most executions of blocks (blocks times microbatches) in the trace of a pipeline.

Each takes 30 to 60 ms: forward and backward, both run twice.
"""


class Certifier:
    """Estimates the memory of plans by traces of one live model.

    Args:
        model: The unsharded model of one process, on any device. It is copied, and its values are
            not read.
        device: Name of the device, as in the plan's `hardware`.
        limit_bytes: Bytes that one device may reserve.
        origin: Place where the user named the model; None if the user passed the model itself.
        report: Called with lines on the progress.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        device: str,
        limit_bytes: int,
        origin: Origin | None,
        report: Callable[[str], None],
    ) -> None:
        self._model, self._device, self._limit_bytes = model, device, limit_bytes
        self._origin, self._report = origin, report

    def of(self, spec: Spec) -> MemoryEstimate | str:
        """Estimate every rank's memory by a trace; return the reason if no trace can be made.

        Args:
            spec: The plan file with the planner's choices, so that no field is left open.
        """
        if dist.is_initialized():
            return "torch.distributed is already initialized in this process, so no trace can run"
        try:
            plan = decided_of(self._model, spec, self._origin)
            check_rules(plan)
            why = _why_not(plan)
            if not why:
                return self._traced(plan)
        except MeshplanError as error:
            why = error.problems[0].what
        self._report(
            f"the memory of the chosen plan is estimated from the config, and not traced: {why}"
        )
        return why

    def _traced(self, plan: Plan) -> MemoryEstimate:
        groups = equal_ranks(plan.assignment)
        name = type(self._model).__name__
        logs: dict[int, EventLog] = {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loop = loop_of(self._model, plan)
            first = microbatch((loop.inputs, loop.targets), plan.accumulate)
            inputs, targets = mapped(first, lambda tensor: tensor.clone())
            for same in alike_ranks(plan, [ranks[0] for ranks in groups]):
                self._report(f"tracing a microbatch of the plan of {name}, rank {same[0]}")
                try:
                    prepared = Prepared(
                        trace_microbatch(self._model, plan, inputs, targets, loop.loss_fn, same[0],
                                   self._device)
                    )  # fmt: skip
                except MeshplanError:
                    raise
                except Exception as error:  # The model's own code may raise anything.
                    raise PlanError(problem_of(error, self._model, self._origin)) from None
                logs |= {rank: composed_log(prepared, plan, rank) for rank in same}
        return assemble(
            plan,
            groups,
            [logs[ranks[0]] for ranks in groups],
            device=self._device,
            limit_bytes=self._limit_bytes,
            tier=Tier.REPLAY,
            certified=_CERTIFIED,
            assumed=loop.assumed,
            error=COMPOSED_ERROR,
        )


def _why_not(plan: Plan) -> str:
    """Return why a trace would take too long; "" if it would not.

    Only pipelines can take too long: their trace runs several microbatches, not just one.
    """
    stages = plan.assignment.stages
    if stages is None:
        return ""
    firsts = alike_ranks(plan, [ranks[0] for ranks in equal_ranks(plan.assignment)])
    places = [plan.mesh.index(same[0], ("pp",)) for same in firsts]
    blocks = set(plan.graph.blocks())
    run = sum(places.count(stages.rank_of(s)) for fqn, s in stages.units if fqn in blocks)
    count = num_traced(stages)
    if run * count <= _MOST_BLOCKS:
        return ""
    much = f"{run} blocks with {count} microbatches each"
    return f"a trace would run {much}; meshplan estimate does so, but takes longer"
