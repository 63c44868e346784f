"""Estimate a plan's memory from the model's config, without torch (tier 1).

`memory.decoder.microbatch` computes the ops of a microbatch from sizes, and `memory.replay` adds
what wrappers and the optimizer allocate. A model or plan for which there are no rules raises a
`PlanError` that names the feature; it can still be estimated from a trace, which needs torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from meshplan.garbage import no_collection
from meshplan.layout.optimizers import called
from meshplan.memory.analytic.microbatches import (
    Works,
    analytic_microbatches,
    loss_chunks_of,
    spread_of,
)
from meshplan.memory.analytic.ranks import ERROR, AnalyticRanks, KnownRanks
from meshplan.memory.analytic.stages import Played
from meshplan.memory.answer.assemble import assemble_figures, least_bytes, with_packed
from meshplan.memory.answer.estimate import MemoryEstimate, Tier
from meshplan.memory.answer.modules import with_modules
from meshplan.memory.answer.rank_classes import equal_ranks
from meshplan.memory.answer.reserved import ReplayCache
from meshplan.memory.decoder.attention_kernel import check_fused
from meshplan.memory.decoder.experts import Spread, most_arriving
from meshplan.memory.decoder.sizes import shape_of
from meshplan.memory.log.events import EventLog
from meshplan.memory.replay import check_rules, replay
from meshplan.memory.replay.optimizer import is_uniform
from meshplan.plan.plan import Plan
from meshplan.units import format_gib

_CROSS_ENTROPY: Final = "cross-entropy in float32 over the last dim of logits"


class RankLogs:
    """Writes the logs of a plan's ranks, each when it is first asked for.

    The logs do not depend on the allocator, so plans that differ only in its setting share them.

    Args:
        plan: A plan for a graph of `blueprint`, which states batch size and sequence length.
        device: A device name of `hardware`; "" if unknown.
        played: Cache of the stages played for earlier plans; None for an empty cache.

    Raises:
        PlanError: There are no rules for the model's ops, or for a feature of the plan.
    """

    def __init__(self, plan: Plan, *, device: str, played: Played | None = None) -> None:
        micro, seq_len = plan.fed()
        check_fused(plan, seq_len, device=device)
        self.plan = plan
        self.works = analytic_microbatches(plan, micro, seq_len, device=device, played=played)
        self._logs: dict[tuple[int, bool], EventLog] = {}

    def log(self, rank: int, summarised: bool) -> EventLog:
        """Return the log of a rank's step.

        Args:
            rank: The rank.
            summarised: If True, summarise the microbatches that cannot contain the peak.
        """
        if (rank, summarised) not in self._logs:
            log = _log_of(self.works, self.plan, rank, summarised=summarised)
            self._logs[rank, summarised] = log
        return self._logs[rank, summarised]


@no_collection()
def estimate_analytic(
    plan: Plan,
    *,
    device: str,
    limit_bytes: int | None,
    notes: Sequence[str] = (),
    stop_above_bytes: float = float("inf"),
    worst_routing: bool = False,
    try_expandable: bool = True,
    by_module: bool = False,
    stage_guess_bytes: Sequence[float] = (),
    logs: RankLogs | None = None,
    known: KnownRanks | None = None,
) -> MemoryEstimate:
    """Estimate every rank's peak memory from the model's config, without importing torch.

    Args:
        plan: A plan for a graph of `blueprint`, which states batch size and sequence length.
        device: A device name of `hardware`; "" if unknown.
        limit_bytes: Memory limit of one GPU in bytes; None if unknown.
        notes: Sentences to show to the reader of the estimate.
        stop_above_bytes: Stop with `OverError` as soon as one rank is known to reserve more than
            this.
        worst_routing: If True, also report the peak of an expert-parallel rank that receives every
            token.
        try_expandable: If True and the plan does not fit, also report how many bytes torch would
            reserve with `expandable_segments:True`.
        by_module: If True, also break the peak down by module.
        stage_guess_bytes: A guess of the bytes that ranks need, by position along pp. Ranks with
            larger guesses are replayed first, so that a plan that does not fit is rejected early.
            If empty, ranks of the last stages are replayed first, because they compute the loss,
            then those of the first stages, because they have the most microbatches in flight.
        logs: Logs of this plan, or of one that differs only in the allocator setting; None to
            write them.
        known: Cache of the ranks' results, for plans that differ only in the blocks of some
            pipeline ranks; None for no cache.

    Raises:
        PlanError: There are no rules for the model's ops, or for a feature of the plan.
        OverError: Some rank reserves more than `stop_above_bytes`.
    """
    spec, (micro, seq_len) = plan.spec, plan.fed()
    groups = equal_ranks(plan.assignment)
    shape = f"[{micro * plan.accumulate}, {seq_len // plan.mesh.size('cp')}] int64"
    certified = f"estimated from the config; traces of models differ by at most {ERROR:.0%}"
    logs = logs or RankLogs(plan, device=device)
    works = logs.works
    # Results for expandable segments, modules and compiled blocks are computed from logs. A search
    # asks for none of these, and needs only peaks.
    keeps_logs = try_expandable or by_module or bool(plan.assignment.compiled)

    places = [plan.mesh.index(ranks[0], ("pp",)) for ranks in groups]
    ranks = AnalyticRanks(
        [each[0] for each in groups],
        logs.log,
        ReplayCache(device, spec),  # Ranks of different stages may have equal events.
        summarised=works.summarised,
        only_summarised=works.only_summarised,
        stop_above_bytes=stop_above_bytes,
        keeps_logs=keeps_logs,
        known=known,
        places=places,
    )
    # The last stage computes the loss; the first has the most microbatches in flight.
    order = [len(groups) - 1, *range(len(groups) - 1)]
    if stage_guess_bytes:
        order.sort(key=lambda number: -stage_guess_bytes[places[number]])
    results = ranks.results(order)
    kept = [each.log for each in results if each.log is not None]
    found = assemble_figures(
        plan,
        groups,
        [each.figures for each in results],
        device=device,
        limit_bytes=limit_bytes,
        tier=Tier.REPLAY,
        certified=certified + _summary_note(sum(each.is_full for each in results), len(groups)),
        assumed=(
            ("inputs of a rank's step", shape),
            ("loss", _CROSS_ENTROPY + in_chunks(plan)),
            ("optimizer", called(spec.optimizer)),
            *_of_experts(plan, worst_routing=worst_routing),
        ),
        notes=notes,
        error=[each.error for each in results],
        least=[least_bytes(plan, log, device) for log in kept],
    )
    if try_expandable:
        found = with_packed(
            found, plan, [each.replayed for each in results if each.replayed is not None]
        )
    if by_module:
        found = with_modules(found, plan, kept)
    return found


@no_collection()
def check_analytic(plan: Plan, *, device: str) -> None:
    """Raise the error that `estimate_analytic` would raise for a plan, in a fraction of its time.

    Args:
        plan: A plan for a graph of `blueprint`, which states batch size and sequence length.
        device: A device name of `hardware`; "" if unknown.

    Raises:
        PlanError: There are no rules for the model's ops, or for a feature of the plan.
    """
    check_rules(plan, RankLogs(plan, device=device).works.of_rank(0, summarised=True))


def estimate_worst_routing(estimate: MemoryEstimate, plan: Plan) -> MemoryEstimate:
    """Add the peak of a rank that receives every token to an estimate of `estimate_analytic`.

    Args:
        estimate: The estimate of this plan, made with any `stop_above_bytes`. The bound does not
            change the estimate: it only causes ranks whose summarised log exceeds it to be expanded
            in full. These need more than all ranks within the bound, so they are expanded anyway.
        plan: The plan that the estimate is of.
    """
    before = len(estimate.assumed) - len(tuple(_of_experts(plan, worst_routing=False)))
    experts = tuple(_of_experts(plan, worst_routing=True))
    return replace(estimate, assumed=(*estimate.assumed[:before], *experts))


@no_collection()
def analytic_log_of_rank(
    plan: Plan, rank: int, *, device: str, played: Played | None = None, summarised: bool = True
) -> EventLog:
    """Return the event log of one rank's step as `estimate_analytic` computes it.

    Args:
        plan: A plan for a graph of `blueprint`, which states batch size and sequence length.
        rank: The rank whose step is returned.
        device: A device name of `hardware`; "" if unknown.
        played: Cache of the stages played for earlier plans; None for an empty cache.
        summarised: If True and the step is a long one of a pipeline, summarise the microbatches
            that cannot contain the peak: write only the storages that they leave behind.

    Raises:
        PlanError: There are no rules for the model's ops, or for a feature of the plan.
    """
    micro, seq_len = plan.fed()
    check_fused(plan, seq_len, device=device)
    works = analytic_microbatches(plan, micro, seq_len, device=device, rank=rank, played=played)
    return _log_of(works, plan, rank, summarised=summarised)


def _of_experts(plan: Plan, *, worst_routing: bool) -> Iterator[tuple[str, str]]:
    """Yield the assumptions about experts and routing as (subject, assumption) pairs."""
    shape, ep = shape_of(plan.graph), plan.mesh.size("ep")
    if not shape.experts:
        return
    how = "transformers' grouped_mm"
    if ep == 1:
        yield "experts", f"{how}, whose sizes do not depend on the routing"
        return
    yield "experts", how
    worst = ""
    if worst_routing:
        assert plan.micro is not None
        assert plan.spec.batch.seq_len is not None
        spread = Spread(ep, most_arriving(shape, ep), spread_of(plan).is_unit)
        works = analytic_microbatches(plan, plan.micro, plan.spec.batch.seq_len, spread=spread)
        peak = _log_of(works, plan, 0, summarised=False).peak.live_bytes
        worst = f"; if one rank received all of them, its tensors would be {format_gib(peak)}"
    yield "routing", shares_of_experts(plan) + worst


def shares_of_experts(plan: Plan) -> str:
    """Return the assumption about the tokens that the ranks of ep receive, as a phrase."""
    stated = plan.spec.experts.capacity
    if stated is not None:
        return f"a rank of ep receives at most {stated:g} times an even share, as the plan states"
    return f"each of the {plan.mesh.size('ep')} ranks of ep receives an even share of the tokens"


def in_chunks(plan: Plan) -> str:
    """Return the assumption about a chunked loss, as a phrase; "" if the loss is not chunked."""
    chunks = loss_chunks_of(plan)
    return f", head and loss computed over {chunks} chunks of the tokens" if chunks > 1 else ""


def _summary_note(num_in_full: int, num_groups: int) -> str:
    """Return a phrase that says on which ranks microbatches were summarised; "" if on none."""
    if num_in_full == num_groups:
        return ""
    where = "" if not num_in_full else ", on ranks that need less than others"
    return f"; microbatches that cannot set the peak are summarised{where}"


def _log_of(works: Works, plan: Plan, rank: int, *, summarised: bool) -> EventLog:
    """Return the event log of one rank's step."""
    trace, foreach = works.of_rank(rank, summarised=summarised), is_uniform(plan.assignment)
    has_host = bool(plan.assignment.offloads_parameters or plan.assignment.host_activations)
    optimizer = plan.spec.optimizer
    return replay(trace, plan, optimizer, rank=rank, foreach=foreach, has_host=has_host)
