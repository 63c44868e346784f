"""Tier 1 without torch: estimate a plan's memory from the model's config.

`memory.decoder.microbatch` computes the ops of a microbatch from sizes, and `memory.replay` adds
what wrappers and the optimizer do. A model or plan for which there are no rules is refused by name;
it can still be estimated from a trace of the model, which needs torch.
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
from meshplan.memory.analytic.ranks import ERROR, AnalyticRanks
from meshplan.memory.analytic.stages import Played
from meshplan.memory.answer.assemble import assemble_figures, least_bytes, with_packed
from meshplan.memory.answer.estimate import MemoryEstimate, Tier
from meshplan.memory.answer.modules import with_modules
from meshplan.memory.answer.rank_classes import equal_ranks
from meshplan.memory.answer.reserved import ReplayCache
from meshplan.memory.decoder.attention_kernel import check_fused
from meshplan.memory.decoder.experts import Spread, most_arriving
from meshplan.memory.decoder.sizes import shape_of
from meshplan.memory.log.events import EventLog, Term
from meshplan.memory.replay import check_rules, replay
from meshplan.memory.replay.optimizer import is_uniform
from meshplan.memory.replay.shards import offloads_params, unit_shards
from meshplan.memory.replay.unit import GATHERING, REDUCING
from meshplan.plan.plan import Plan
from meshplan.plan.restrict import restrict
from meshplan.units import format_gib

_CROSS_ENTROPY: Final = "cross-entropy in float32 over the last dim of logits"


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
    tells_modules: bool = False,
    stage_guess_bytes: Sequence[float] = (),
    played: Played | None = None,
) -> MemoryEstimate:
    """Estimate every rank's peak memory from the model's config, without importing torch.

    Args:
        plan: A plan for a graph of `blueprint`, which states batch size and sequence length.
        device: A device name of `hardware`; "" if unknown.
        limit_bytes: Memory limit of one GPU in bytes; None if unknown.
        notes: Sentences that the reader of the estimate should see.
        stop_above_bytes: Stop with `OverError` as soon as one rank is known to reserve more than
            this.
        worst_routing: If True, also report the peak of a rank that receives every token.
        try_expandable: If True and the plan does not fit, also report what expandable segments
            would reserve.
        tells_modules: If True, also break the peak down by module.
        stage_guess_bytes: A guess of the bytes that ranks need, by position along pp. Ranks with
            larger guesses are replayed first, so that a plan that does not fit is rejected early.
            If empty, ranks at the end of the pipeline come first, which hold the loss, and then
            those at its start, which hold most microbatches.
        played: Cache of the stages that were played for earlier plans; None for an empty one.

    Raises:
        PlanError: There are no rules for the model's ops, or for something in the plan.
        OverError: Some rank reserves more than `stop_above_bytes`.
    """
    spec, (micro, seq_len) = plan.spec, plan.fed()
    check_fused(plan, seq_len, device=device)
    groups = equal_ranks(plan.assignment)
    shape = f"[{micro * plan.accumulate}, {seq_len // plan.mesh.size('cp')}] int64"
    certified = f"estimated from the config; traces of models differ by at most {ERROR:.0%}"
    works = analytic_microbatches(plan, micro, seq_len, device=device, played=played)
    # Expandable segments, modules and compiled blocks need logs; a search needs only figures.
    keeps_logs = try_expandable or tells_modules or bool(plan.assignment.compiled)
    ranks = AnalyticRanks(
        [each[0] for each in groups],
        lambda rank, summarised: _log_of(works, plan, rank, summarised=summarised),
        ReplayCache(device, spec),  # Ranks of different stages may have equal events.
        summarised=works.summarised,
        only_summarised=works.only_summarised,
        stop_above_bytes=stop_above_bytes,
        keeps_logs=keeps_logs,
    )
    # Ranks of the last stage hold the loss, those of the first stage most microbatches.
    order = [len(groups) - 1, *range(len(groups) - 1)]
    if stage_guess_bytes:
        places = [plan.mesh.index(ranks[0], ("pp",)) for ranks in groups]
        order.sort(key=lambda number: -stage_guess_bytes[places[number]])
    told = ranks.tell(order)
    logs = [each.log for each in told if each.log is not None]
    found = assemble_figures(
        plan,
        groups,
        [each.figures for each in told],
        device=device,
        limit_bytes=limit_bytes,
        tier=Tier.REPLAY,
        certified=certified + _in_brief(sum(each.is_full for each in told), len(groups)),
        assumed=(
            ("inputs of a rank's step", shape),
            ("loss", _CROSS_ENTROPY + in_chunks(plan)),
            ("optimizer", called(spec.optimizer)),
            *_of_experts(plan, worst_routing=worst_routing),
        ),
        notes=notes,
        error=[each.error for each in told],
        least=[least_bytes(plan, log, device) for log in logs],
    )
    if try_expandable:
        found = with_packed(found, plan, [each.held for each in told if each.held is not None])
    if tells_modules:
        found = with_modules(found, plan, logs)
    return found


@no_collection()
def check_analytic(plan: Plan, *, device: str) -> None:
    """Refuse every plan that `estimate_analytic` would refuse, in a fraction of its time.

    Args:
        plan: A plan for a graph of `blueprint`, which states batch size and sequence length.
        device: A device name of `hardware`; "" if unknown.

    Raises:
        PlanError: There are no rules for the model's ops, or for something in the plan.
    """
    micro, seq_len = plan.fed()
    check_fused(plan, seq_len, device=device)
    works = analytic_microbatches(plan, micro, seq_len, device=device)
    check_rules(plan, works.of_rank(0, summarised=True))


def estimate_worst_routing(estimate: MemoryEstimate, plan: Plan) -> MemoryEstimate:
    """Add the peak of a rank that receives every token to an estimate of `estimate_analytic`.

    Args:
        estimate: The estimate of this plan. It may have been made with any `stop_above_bytes`: a
            rank whose summarised log exceeds that bound seems to need more than every fully
            expanded rank within it, so it is expanded in any case.
        plan: The plan that the estimate is of.
    """
    before = len(estimate.assumed) - len(tuple(_of_experts(plan, worst_routing=False)))
    experts = tuple(_of_experts(plan, worst_routing=True))
    return replace(estimate, assumed=(*estimate.assumed[:before], *experts))


@no_collection()
def analytic_log_of_rank(
    plan: Plan, rank: int, *, device: str, played: Played | None = None, summarised: bool = True
) -> EventLog:
    """Return the step of one rank as `estimate_analytic` computes it.

    Args:
        plan: A plan for a graph of `blueprint`, which states batch size and sequence length.
        rank: The rank whose step is returned.
        device: A device name of `hardware`; "" if unknown.
        played: Cache of the stages that were played for earlier plans; None for an empty one.
        summarised: If True, summarise the microbatches that cannot make the peak of a long step.

    Raises:
        PlanError: There are no rules for the model's ops, or for something in the plan.
    """
    micro, seq_len = plan.fed()
    check_fused(plan, seq_len, device=device)
    works = analytic_microbatches(plan, micro, seq_len, device=device, rank=rank, played=played)
    return _log_of(works, plan, rank, summarised=summarised)


def _of_experts(plan: Plan, *, worst_routing: bool) -> Iterator[tuple[str, str]]:
    """Yield what is assumed of experts and routing, as (what, value) pairs."""
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
    stated = plan.spec.experts.capacity
    if stated is None:
        yield "routing", f"each of the {ep} ranks of ep receives an even share of the tokens{worst}"
    else:
        much = f"a rank of ep receives at most {stated:g} times an even share, as the plan states"
        yield "routing", much + worst


def in_chunks(plan: Plan) -> str:
    """Return a phrase about the chunked loss for the assumptions; "" if it is not chunked."""
    chunks = loss_chunks_of(plan)
    return f", head and loss computed over {chunks} chunks of the tokens" if chunks > 1 else ""


def _in_brief(num_in_full: int, num_groups: int) -> str:
    """Return a phrase that says which ranks had microbatches summarised; "" if none had."""
    if num_in_full == num_groups:
        return ""
    where = "" if not num_in_full else ", on ranks that need less than others"
    return f"; microbatches that cannot set the peak are summarised{where}"


def _log_of(works: Works, plan: Plan, rank: int, *, summarised: bool) -> EventLog:
    """Return the step of one rank."""
    work, foreach = works.of_rank(rank, summarised=summarised), is_uniform(plan.assignment)
    has_host = bool(offloads_params(plan.assignment) or plan.assignment.host_activations)
    optimizer = plan.spec.optimizer
    return replay(work, plan, optimizer, rank=rank, foreach=foreach, has_host=has_host)


def streams_of(plan: Plan, rank: int) -> dict[tuple[Term, int], int]:
    """Return the stream on which FSDP2 makes each kind of buffer, by (category, bytes).

    The allocator keeps a pool for each stream, so what is reserved depends on the streams.

    Args:
        plan: The plan, whose units make the buffers.
        rank: The rank whose buffers are listed.

    Source: torch 2.13, torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py.
    """
    streams: dict[tuple[Term, int], int] = {}
    if plan.assignment.wrapper != "units":
        return streams
    stages = plan.assignment.stages
    parts = [plan.assignment]
    if stages is not None:
        place = plan.mesh.index(rank, ("pp",))
        parts = [restrict(plan, stage).assignment for stage in stages.of_rank(place)]
    for unit in (unit for part in parts for unit in unit_shards(part, plan.graph, rank)):
        streams[Term.COMMUNICATION, unit.gathered_bytes] = GATHERING
        if unit.on_host:
            for param in unit.params:
                streams[Term.TEMPORARIES, param.stored_bytes] = GATHERING
                streams[Term.TEMPORARIES, param.whole_bytes // unit.num_ranks] = GATHERING
        elif unit.cast_bytes:
            streams[Term.TEMPORARIES, unit.cast_bytes // unit.num_ranks] = GATHERING
        numel = sum(param.padded_numel for param in unit.trained) // unit.num_ranks
        streams[Term.GRADIENTS, numel * unit.reduce_itemsize] = REDUCING
    return streams


@no_collection()
def analytic_log(
    plan: Plan,
    *,
    batch: int,
    seq_len: int,
    optimizer: str = "adamw",
    rank: int = 0,
    is_cuda: bool = True,
    in_place: bool = True,
    foreach: bool = True,
    spread: Spread | None = None,
    has_host: bool = False,
    device: str = "",
) -> EventLog:
    """Return the events of a step from the second one on, of a causal LM of transformers.

    Args:
        plan: A plan for a graph of `blueprint`.
        batch: Sequences of one microbatch of this rank; a pipeline splits them into its own
            microbatches.
        seq_len: Tokens of one sequence.
        optimizer: A name of `spec.OPTIMIZER_STATES`.
        rank: The rank whose step is returned.
        is_cuda: If True, CUDA's kernels run. If False, the log is what a trace on CPUs shows.
        in_place: If True, gradients of one tensor are accumulated in place, as torch does
            unless a dispatch mode is active.
        foreach: If True, the optimizer updates parameters together, as torch does on a GPU.
        spread: Distribution of the experts; None for the plan's own.
        has_host: If True, the host's memory is separate, and step counts of optimizers are in it.
        device: A device name of `hardware`; "" if unknown.

    Raises:
        PlanError: There are no rules for the model's ops, or for something in the plan.
    """
    check_fused(plan, seq_len, is_cuda=is_cuda, device=device)
    works = analytic_microbatches(
        plan, batch, seq_len, is_cuda=is_cuda, in_place=in_place, spread=spread, device=device
    )
    work = works.of_rank(rank)
    return replay(work, plan, optimizer, rank=rank, foreach=foreach, has_host=has_host)
