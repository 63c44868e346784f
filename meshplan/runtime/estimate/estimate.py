"""Estimate a plan's memory by fake steps in subprocesses.

One rank of each class of equal ranks is traced. There are two methods: tier 1 traces a microbatch
and composes the step from it (`composed`), and tier 3 traces the whole step (`fake_step`). This
module chooses between them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from torch import nn

from meshplan.errors import MeshplanError, Origin, PlanError, Problem
from meshplan.memory.answer.assemble import as_bound, assemble
from meshplan.memory.answer.estimate import MemoryEstimate, Tier
from meshplan.memory.answer.modules import with_modules
from meshplan.memory.answer.rank_classes import equal_ranks
from meshplan.memory.log.driver import with_workspaces
from meshplan.memory.log.events import EventLog
from meshplan.plan.plan import Plan
from meshplan.runtime.base.subprocess_pool import run_in_subprocesses
from meshplan.runtime.estimate.composed import (
    COMPOSED_ERROR,
    NotComposedError,
    composed,
    is_cheaper,
)
from meshplan.runtime.estimate.request import (
    EstimateRequest,
    FakeStepResult,
    built_without_memory,
    decided,
    for_subprocess,
)
from meshplan.runtime.estimate.tried import try_forward
from meshplan.runtime.fake_step.default_loop import DefaultLoop, check_stated, loop_of
from meshplan.runtime.fake_step.few_microbatches import num_traced
from meshplan.runtime.fake_step.step import fake_step
from meshplan.runtime.torch_private.fakes import untraceable
from meshplan.runtime.trace.bounds import (
    NoBoundError,
    UnknownShapeError,
    bound_of,
    check_grows,
    everything,
    half,
    picking,
)
from meshplan.runtime.trace.trace_errors import refused

_MOST_PLAYED: Final = 1 << 12
"""Most blocks times microbatches that are traced: this takes minutes."""
_ALL_TRACED: Final = "nothing is extrapolated"
_BY_RULES: Final = (
    "a microbatch was traced, and the memory of wrappers and the optimizer was added by rules; "
    "--tier 3 traces them"
)


@dataclass(frozen=True, slots=True)
class _TieredLogs:
    """The event logs of some ranks, and how they were obtained.

    Attributes:
        logs: One log per rank.
        assumed: Assumptions about inputs, loss and optimizer as (what, value); see `DefaultLoop`.
        tier: The tier that the logs come from.
        certified: How the result was obtained and compared, for the user.
        error: Largest relative error of the logs' peaks.
        bound: Why the logs are only an upper bound, for the user; "" if they are exact.
        least: A log per rank that is a lower bound; None if there is none.
    """

    logs: list[EventLog]
    assumed: tuple[tuple[str, str], ...]
    tier: Tier
    certified: str
    error: float = 0.0
    bound: str = ""
    least: Sequence[EventLog] | None = None


def estimate_by_trace(
    request: EstimateRequest,
    report: Callable[[str], None],
    notes: Sequence[str] = (),
    composed_of: Callable[[int], FakeStepResult] | None = None,
    known: tuple[nn.Module, Plan] | None = None,
) -> MemoryEstimate:
    """Estimate the memory of every rank by fake steps.

    Args:
        request: The request.
        report: Progress callback.
        notes: Notes to the user that the estimate must include.
        composed_of: Returns the composed step of a rank, if its microbatches are traced already;
            None to trace them here.
        known: What `decided` returns for the request, if it is known already.

    Raises:
        SpecError: The model cannot be built, or its inputs are not stated and cannot be guessed.
        PlanError: The plan does not fit the model, leaves too much open, or its step cannot be
            traced.
    """
    model, plan = decided(request.spec, request.source) if known is None else known
    check_stated(request.spec, plan.micro, reads_tokens=False)
    groups = equal_ranks(plan.assignment)
    firsts = [ranks[0] for ranks in groups]
    try:
        if composed_of is not None:
            answer = _by_rules([composed_of(rank) for rank in firsts])
        else:
            answer = _logs(request, model, plan, firsts, report)
    except UnknownShapeError as error:
        answer = _bounded(request, plan, firsts, report, error)
    found = assemble(
        plan,
        groups,
        answer.logs,
        device=request.device,
        limit_bytes=request.limit_bytes,
        tier=answer.tier,
        certified=answer.certified,
        assumed=answer.assumed,
        notes=notes,
        error=answer.error,
    )
    if answer.bound:
        least = answer.least and [with_workspaces(log, request.device) for log in answer.least]
        found = as_bound(found, answer.logs, answer.bound, least)
    else:
        found = replace(found, log=answer.logs[found.groups.index(found.worst)])
    return with_modules(found, plan, answer.logs)


def log_of_rank(request: EstimateRequest, rank: int, report: Callable[[str], None]) -> EventLog:
    """Return the event log of one rank's step.

    Args:
        request: The request.
        rank: The rank.
        report: Progress callback.

    Raises:
        SpecError, PlanError: See `estimate_by_trace`.
    """
    model, plan = decided(request.spec, request.source)
    check_stated(request.spec, plan.micro, reads_tokens=False)
    return _logs(request, model, plan, [rank], report).logs[0]


def _logs(
    request: EstimateRequest,
    model: nn.Module,
    plan: Plan,
    ranks: Sequence[int],
    report: Callable[[str], None],
) -> _TieredLogs:
    """Return the logs of these ranks, from the requested tier or the cheapest that can answer.

    Without a request, tier 1 is used if some blocks, microbatches or ranks are equal. Otherwise it
    would cost as much as tier 3 and be less accurate.
    """
    check_played(plan)
    words = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    requested, why = Tier.asked(request.tier), ""
    if requested == Tier.REPLAY or (requested is None and is_cheaper(model, plan, ranks)):
        report(f"tracing a microbatch of {words}")
        try:
            return _composed(request, plan, ranks)
        except NotComposedError as error:
            if requested:
                raise _not_by(requested, str(error)) from None
            why = f"; the step cannot be composed: {error}"
    check_played(plan, is_whole=True)
    report(f"tracing a step of {words}")
    sent = for_subprocess(plan)
    imagined = run_in_subprocesses(_fake_step, [(request, sent, rank) for rank in ranks])
    logs = [each.log for each in imagined]
    whole = _TieredLogs(logs, imagined[0].assumed, Tier.WHOLE, _ALL_TRACED + why)
    return _beside_composed(request, plan, ranks, whole)


def check_played(plan: Plan, *, is_whole: bool = False) -> None:
    """Raise a PlanError if a trace would take too long, because microbatches run one by one.

    Args:
        plan: The plan.
        is_whole: If True, the whole step is traced; if False, one accumulated microbatch, and of
            those of a pipeline as many as the peak depends on.
    """
    stages, accumulate = plan.assignment.stages, plan.accumulate if is_whole else 1
    ranks, passes = 1, 1
    if stages is not None:
        ranks, passes = stages.num_ranks, stages.microbatches if is_whole else num_traced(stages)
    blocks = max(1, -(-len(plan.graph.blocks()) // ranks))
    if (count := accumulate * passes) * blocks <= _MOST_PLAYED:
        return
    key, few = "batch.accumulate", 2
    if stages is not None and passes * blocks > _MOST_PLAYED:
        key, few = "pipeline.microbatches", 4 * ranks * stages.virtual
    what = f"a trace would run {count:,} microbatches of {blocks} blocks each, one after the other"
    fix = (
        f"add --set {key}={few}, which hardly changes the memory; with a config, leaving out "
        "--trace and --tier avoids the trace"
    )
    raise PlanError(Problem(what, plan.spec.origin(key), fix))


def _not_by(tier: Tier, why: str) -> PlanError:
    what = f"tier {tier} cannot answer: {why}"
    return PlanError(Problem(what, Origin("--tier"), "leave --tier out, or ask for --tier 3"))


def _composed(request: EstimateRequest, plan: Plan, ranks: Sequence[int]) -> _TieredLogs:
    """Return the logs of these ranks from tier 1: a traced microbatch, composed to a step.

    Raises:
        NotComposedError: There are no rules to compose this step.
    """
    return _by_rules(composed(request, plan, ranks))


def _by_rules(found: Sequence[FakeStepResult]) -> _TieredLogs:
    logs = [each.log for each in found]
    return _TieredLogs(logs, found[0].assumed, Tier.REPLAY, _BY_RULES, COMPOSED_ERROR)


def _beside_composed(
    request: EstimateRequest, plan: Plan, ranks: Sequence[int], found: _TieredLogs
) -> _TieredLogs:
    """Add to `certified` how much the peak of tier 1 differs, if the user requested a tier.

    Args:
        request: The request.
        plan: The plan.
        ranks: The ranks of the logs.
        found: The logs of tier 3.
    """
    if request.tier is None:
        return found
    try:
        others = composed(request, plan, ranks)
    except NotComposedError as error:
        return replace(found, certified=f"{found.certified}; tier 1 cannot answer: {error}")
    pairs = [(a.peak.live_bytes, b.log.peak.live_bytes)
             for a, b in zip(found.logs, others, strict=True)]  # fmt: skip
    right, other = max(pairs, key=lambda pair: abs(pair[1] - pair[0]))
    words = "has the same peak, to the byte"
    if other != right:
        words = f"has a peak that differs by {(other - right) / right:+.4%}"
    return replace(found, certified=f"{found.certified}; the composed step (tier 1) {words}")


def _bounded(
    request: EstimateRequest,
    plan: Plan,
    ranks: Sequence[int],
    report: Callable[[str], None],
    error: UnknownShapeError,
) -> _TieredLogs:
    """Return logs of tier 3 that are an upper bound, if some tensors' sizes depend on values.

    Args:
        request: The request.
        plan: The plan.
        ranks: The ranks to trace.
        report: Progress callback.
        error: Names the operator whose result has such a size.

    Raises:
        PlanError: No upper bound can be proved.
    """
    (problem,) = error.problems
    report("tracing the step with all data-dependent operators at their maximum size")
    try:
        sent = for_subprocess(plan)
        found = run_in_subprocesses(_fake_step_at_most, [(request, sent, rank) for rank in ranks])
    except UnknownShapeError:
        raise PlanError(problem) from None
    refused = next((each for each in found if isinstance(each, str)), None)
    if refused is not None:
        what = f"{problem.what}; no upper bound can be proved: {refused}"
        raise PlanError(Problem(what, problem.origin, problem.fix))
    pairs = [each for each in found if not isinstance(each, str)]
    logs, least = [each.log for each, _ in pairs], [each for _, each in pairs if each is not None]
    return _TieredLogs(
        logs, pairs[0][0].assumed, Tier.WHOLE, _ALL_TRACED, bound=bound_of(error),
        least=least if len(least) == len(logs) else None,
    )  # fmt: skip


def _fake_step_at_most(
    request: EstimateRequest, plan: Plan, rank: int
) -> tuple[FakeStepResult, EventLog | None] | str:
    """Trace one rank's step with data-dependent operators at their maximum size, and at half of it.

    Returns:
        (result with the maximum sizes, log that is a lower bound), or the reason why the first is
        no upper bound. The log is None if shapes depend on values, whose minimum is not known.
    """
    model = built_without_memory(request.source).train()
    with picking(everything):
        most = _fake_steps(model, plan, request, rank)
    with picking(half, has_buffers=False) as picks:
        less = _fake_steps(model, plan, request, rank)
    try:
        check_grows(most.log, less.log)
    except NoBoundError as error:
        return str(error)
    return most, None if picks.are_used else less.log


def _fake_step(request: EstimateRequest, plan: Plan, rank: int) -> FakeStepResult:
    """Trace one rank's step; the task of a subprocess."""
    model = built_without_memory(request.source).train()
    return _fake_steps(model, plan, request, rank)


def _fake_steps(
    model: nn.Module, plan: Plan, request: EstimateRequest, rank: int
) -> FakeStepResult:
    warnings.simplefilter("ignore")
    try:
        loop = loop_of(model, plan)
        log = _step(model, plan, loop, rank, request.device)
    except MeshplanError:
        raise
    except Exception as error:  # The model's own code may raise anything.
        origin = request.source.origin
        problem = None if untraceable(error) else try_forward(model, plan, origin)[0]
        raise PlanError(problem) if problem else refused(error, model, origin) from None
    return FakeStepResult(log, loop.assumed)


def _step(model: nn.Module, plan: Plan, loop: DefaultLoop, rank: int, device: str) -> EventLog:
    return fake_step(
        model, plan, loop.inputs, loop.targets, loop.loss_fn, loop.make_optimizer, rank, device
    )
