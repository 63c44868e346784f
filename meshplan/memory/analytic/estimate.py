"""Tier 1 without torch: a plan for a blueprint's model, told operation by operation and replayed.

The operations come from sizes (`memory.decoder.microbatch`), the wrappers' rules from
`memory.replay`. What neither knows is refused by name; a trace of the model, which needs torch,
answers then.
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
    most_bytes: float = float("inf"),
    tells_worst: bool = False,
    packs: bool = True,
    tells_modules: bool = False,
    likely: Sequence[float] = (),
    played: Played | None = None,
) -> MemoryEstimate:
    """What every rank needs, without torch and in a second.

    Args:
        plan: Made for a graph of `blueprint`; it states batch and length.
        device, limit_bytes: As for `assemble`.
        most_bytes: What a rank may reserve at the most for the rest to be of interest.
        tells_worst: Whether to tell what a rank would need that all tokens are routed to.
        packs: Whether to tell, where it does not fit, what expandable segments would reserve.
        tells_modules: Whether to tell of which modules the peak is.
        likely: By place along pp, what its ranks may need: the more, the sooner they are told.
            Where nobody says, what is last holds the loss, and what is first most microbatches.
        played: As for `told_stages.StageWorks`.

    Raises:
        PlanError: The model's operations, or something in the plan, are not known.
        OverError: Some rank takes more than `most_bytes`.
    """
    spec, (micro, seq_len) = plan.spec, plan.fed()
    check_fused(plan, seq_len, device=device)
    groups = equal_ranks(plan.assignment)
    shape = f"[{micro * plan.accumulate}, {seq_len // plan.mesh.size('cp')}] int64"
    certified = f"told from the config; traced models differ by at most {ERROR:.0%}"
    works = analytic_microbatches(plan, micro, seq_len, device=device, played=played)
    # What is asked of logs beside their figures; only where somebody searches is nothing.
    keeps_logs = packs or tells_modules or bool(plan.assignment.compiled)
    ranks = AnalyticRanks(
        [each[0] for each in groups],
        lambda rank, in_brief: _log_of(works, plan, rank, in_brief=in_brief),
        ReplayCache(device, spec),  # Places along pp may do the same with other blocks.
        in_brief=works.in_brief,
        only_in_brief=works.only_in_brief,
        most_bytes=most_bytes,
        keeps_logs=keeps_logs,
    )
    order = [len(groups) - 1, *range(len(groups) - 1)]
    if likely:
        places = [plan.mesh.index(ranks[0], ("pp",)) for ranks in groups]
        order.sort(key=lambda number: -likely[places[number]])
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
            *_of_experts(plan, tells_worst=tells_worst),
        ),
        notes=notes,
        error=[each.error for each in told],
        least=[least_bytes(plan, log, device) for log in logs],
    )
    if packs:
        found = with_packed(found, plan, [each.held for each in told if each.held is not None])
    if tells_modules:
        found = with_modules(found, plan, logs)
    return found


@no_collection()
def check_analytic(plan: Plan, *, device: str) -> None:
    """Refuse what `estimate_analytic` would, for a part of its time.

    Raises:
        PlanError: As `estimate_analytic`.
    """
    micro, seq_len = plan.fed()
    check_fused(plan, seq_len, device=device)
    works = analytic_microbatches(plan, micro, seq_len, device=device)
    check_rules(plan, works.of_rank(0, in_brief=True))


def estimate_worst_routing(estimate: MemoryEstimate, plan: Plan) -> MemoryEstimate:
    """What `estimate_analytic` told of a plan, and what a rank would need that all tokens came to.

    Args:
        estimate: Of this plan. What ranks might reserve at the most moved none of its figures:
            one that is over it in brief seems to need more than any that is told in full and is
            not, so it is told in full in any case.
    """
    before = len(estimate.assumed) - len(tuple(_of_experts(plan, tells_worst=False)))
    experts = tuple(_of_experts(plan, tells_worst=True))
    return replace(estimate, assumed=(*estimate.assumed[:before], *experts))


@no_collection()
def analytic_log_of_rank(
    plan: Plan, rank: int, *, device: str, played: Played | None = None, in_brief: bool = True
) -> EventLog:
    """The step of one rank as `estimate_analytic` has it.

    Args:
        in_brief: Whether it is told in brief where there is much to do.

    Raises:
        PlanError: As `estimate_analytic`.
    """
    micro, seq_len = plan.fed()
    check_fused(plan, seq_len, device=device)
    works = analytic_microbatches(plan, micro, seq_len, device=device, rank=rank, played=played)
    return _log_of(works, plan, rank, in_brief=in_brief)


def _of_experts(plan: Plan, *, tells_worst: bool) -> Iterator[tuple[str, str]]:
    """What is assumed of them."""
    shape, ep = shape_of(plan.graph), plan.mesh.size("ep")
    if not shape.experts:
        return
    how = "transformers' grouped_mm"
    if ep == 1:
        yield "experts", f"{how}, whose sizes do not depend on the routing"
        return
    yield "experts", how
    worst = ""
    if tells_worst:
        assert plan.micro is not None
        assert plan.spec.batch.seq_len is not None
        spread = Spread(ep, most_arriving(shape, ep), spread_of(plan).is_unit)
        works = analytic_microbatches(plan, plan.micro, plan.spec.batch.seq_len, spread=spread)
        peak = _log_of(works, plan, 0, in_brief=False).peak.live_bytes
        worst = f"; with all of them sent to one, its tensors would be {format_gib(peak)}"
    stated = plan.spec.experts.capacity
    if stated is None:
        yield "routing", f"the {ep} ranks of ep are sent as many tokens each{worst}"
    else:
        much = f"a rank of ep is sent {stated:g} times an even share at the most, as stated"
        yield "routing", much + worst


def in_chunks(plan: Plan) -> str:
    """What is to be added of how a loss is computed."""
    chunks = loss_chunks_of(plan)
    return f", head and loss over {chunks} parts of the tokens" if chunks > 1 else ""


def _in_brief(num_in_full: int, num_groups: int) -> str:
    """What is to be said of microbatches that were not written out."""
    if num_in_full == num_groups:
        return ""
    where = "" if not num_in_full else ", on ranks that need less than others"
    return f"; microbatches that make no peak are told in brief{where}"


def _log_of(works: Works, plan: Plan, rank: int, *, in_brief: bool) -> EventLog:
    """The step of one rank."""
    work, foreach = works.of_rank(rank, in_brief=in_brief), is_uniform(plan.assignment)
    has_host = bool(offloads_params(plan.assignment) or plan.assignment.host_activations)
    optimizer = plan.spec.optimizer
    return replay(work, plan, optimizer, rank=rank, foreach=foreach, has_host=has_host)


def streams_of(plan: Plan, rank: int) -> dict[tuple[Term, int], int]:
    """By term and bytes, the stream on which FSDP2 makes a buffer of its own.

    The allocator keeps a pool for each stream, so what is reserved depends on it.
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
    """The events of a step from the second one on, of a causal language model of transformers.

    Args:
        plan: Made for a graph of `blueprint`.
        batch: Sequences of one microbatch of this rank, which a pipeline cuts into its own.
        seq_len: Tokens of one sequence.
        optimizer: A word of `spec.OPTIMIZER_STATES`.
        is_cuda: Whether CUDA's kernels run; what CPUs keep is what a trace on CPUs shows.
        in_place: Whether gradients that meet are added up in place, as torch does when nothing
            watches it.
        foreach, has_host: As in `replay`.
        spread: How experts are spread, if not evenly as the plan has it.
        device: A name of `hardware`, where kernels of CUDA run and it is known.

    Raises:
        PlanError: The model's operations, or something in the plan, are not known.
    """
    check_fused(plan, seq_len, is_cuda=is_cuda, device=device)
    works = analytic_microbatches(
        plan, batch, seq_len, is_cuda=is_cuda, in_place=in_place, spread=spread, device=device
    )
    work = works.of_rank(rank)
    return replay(work, plan, optimizer, rank=rank, foreach=foreach, has_host=has_host)
