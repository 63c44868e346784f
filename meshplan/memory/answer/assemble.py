"""Assemble the memory estimate of a plan from the event logs of one rank of each class."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from meshplan.memory.answer.estimate import MemoryEstimate, Tier, group_of
from meshplan.memory.answer.hosts import host_of
from meshplan.memory.answer.reconcile import reconcile
from meshplan.memory.answer.reserved import (
    RankSummary,
    ReplayCache,
    ReservedLog,
    reserve_from_start,
)
from meshplan.memory.log.driver import communicators, driver_bytes, with_workspaces
from meshplan.memory.log.events import COMPILED_OUTPUT, EventLog, Storage, Term
from meshplan.memory.log.torch_version import installed, unlike
from meshplan.model.graph import around
from meshplan.plan.plan import Plan

_GPUS_PER_NODE: Final = 8


def assemble(
    plan: Plan,
    groups: Sequence[tuple[int, ...]],
    logs: Sequence[EventLog],
    *,
    device: str,
    limit_bytes: int | None,
    tier: Tier,
    certified: str,
    assumed: tuple[tuple[str, str], ...] = (),
    notes: Sequence[str] = (),
    error: float | Sequence[float] = 0.0,
    replayed: Mapping[int, ReservedLog] = MappingProxyType({}),
) -> MemoryEstimate:
    """Return the memory of every rank, compared with the limit and with the textbook's figure.

    Args:
        plan: The plan that the logs are of.
        groups: The classes of equal ranks, as `rank_classes.equal_ranks` returns them.
        logs: The step of the first rank of each group, without cuBLAS's workspaces.
        device: A device name of `hardware`; "" if unknown.
        limit_bytes: Memory limit of one GPU in bytes; None if unknown.
        tier: The tier of estimation that made the logs.
        certified: A sentence on how exact the logs are known to be.
        assumed: Assumptions about what the plan does not state, as (subject, assumption) pairs.
        notes: Sentences to show to the reader of the estimate.
        error: Possible relative error of the logs: one number for all, or one for each log.
        replayed: Logs that were played on the allocator already, by their index in `logs`.
    """
    holding = ReplayCache(device, plan.spec)
    known = [replayed.get(number) or holding.of(log) for number, log in enumerate(logs)]
    estimate = assemble_figures(
        plan,
        groups,
        [own.figures for own in known],
        device=device,
        limit_bytes=limit_bytes,
        tier=tier,
        certified=certified,
        assumed=assumed,
        notes=notes,
        error=error,
        least=[least_bytes(plan, log, device) for log in logs],
    )
    return with_packed(estimate, plan, known)


def assemble_figures(
    plan: Plan,
    groups: Sequence[tuple[int, ...]],
    figures: Sequence[RankSummary],
    *,
    device: str,
    limit_bytes: int | None,
    tier: Tier,
    certified: str,
    assumed: tuple[tuple[str, str], ...] = (),
    notes: Sequence[str] = (),
    error: float | Sequence[float] = 0.0,
    least: Sequence[int | None] = (),
) -> MemoryEstimate:
    """Return the same as `assemble`, from summaries of the logs instead of the logs.

    Args:
        plan: The plan that the summaries are of.
        groups: The classes of equal ranks, as `rank_classes.equal_ranks` returns them.
        figures: The summary of the first rank of each group.
        device: A device name of `hardware`; "" if unknown.
        limit_bytes: Memory limit of one GPU in bytes; None if unknown.
        tier: The tier of estimation that made the summaries.
        certified: A sentence on how exact the summaries are known to be.
        assumed: Assumptions about what the plan does not state, as (subject, assumption) pairs.
        notes: Sentences to show to the reader of the estimate.
        error: Possible relative error of the summaries: one number for all, or one for each.
        least: For each group, a lower bound on its allocated bytes, or None if its summary is no
            upper bound; () if no summary is one.
    """
    errors = [error] * len(groups) if isinstance(error, float) else error
    hardware = plan.spec.hardware
    per_node = hardware.gpus_per_node if hardware else _GPUS_PER_NODE
    driver = driver_bytes(device, communicators(plan.assignment, gpus_per_node=per_node))
    found = [
        group_of(
            own,
            ranks,
            driver=driver,
            limit_bytes=limit_bytes,
            stages=_stages_of(plan, ranks[0]),
            error=each,
            least=fewest,
        )
        for own, ranks, each, fewest in zip(
            figures, groups, errors, least or [None] * len(groups), strict=True
        )
    ]
    # Rules reproduce certain versions of torch, so say if another one is installed. A trace runs
    # the installed version.
    why = unlike(installed()) if tier == Tier.REPLAY else ""
    of_plan = plan.assumed_precision
    estimate = MemoryEstimate(
        groups=tuple(found),
        tier=tier,
        certified=f"{certified}; {why}" if why else certified,
        limit_bytes=limit_bytes,
        assumed=(*assumed, *([("precision", of_plan)] if of_plan else [])),
        bound=BOUND if plan.assignment.compiled else "",
        notes=tuple(notes),
        host=host_of(hardware, found),
    )
    is_mixed = plan.spec.precision.is_mixed
    steps = reconcile(estimate.worst, plan.assignment, is_mixed=is_mixed)
    return replace(estimate, reconciliation=steps)


def with_packed(
    estimate: MemoryEstimate, plan: Plan, replayed: Sequence[ReservedLog]
) -> MemoryEstimate:
    """Add to an estimate that does not fit how many bytes expandable segments would reserve.

    Only the worst group is played again, and only if the plan uses the default allocator.

    Args:
        estimate: The estimate to complete.
        plan: The plan that the estimate is of.
        replayed: The played log of the first rank of each group.
    """
    if estimate.worst.fits is not False or plan.spec.allocator != "default":
        return estimate
    groups = list(estimate.groups)
    worst = groups.index(estimate.worst)
    packed = reserve_from_start(replayed[worst].log, plan.spec, expandable=True).reserved_bytes
    groups[worst] = replace(groups[worst], packed_bytes=packed)
    return replace(estimate, groups=tuple(groups))


def as_bound(
    estimate: MemoryEstimate,
    logs: Sequence[EventLog],
    why: str,
    least: Sequence[EventLog] | None = None,
) -> MemoryEstimate:
    """Return the estimate marked as an upper bound, with lower ends of its ranges that follow.

    Args:
        estimate: The estimate whose figures may be too large.
        logs: The step of the first rank of each group.
        why: A sentence that says why the figures are only an upper bound.
        least: For each group, a log that is a lower bound on the step; its peak becomes the lower
            end of the range. None uses the bytes that are resident before the step.
    """
    if least is None:
        lows = [log.by_phase["before"][1] for log in logs]
    else:
        lows = [log.peak.live_bytes for log in least]
    groups = tuple(
        # Only the allocator's share of the lower end changes, not the driver's.
        replace(
            group, band=(group.band[0] - max(0, group.peak.allocated_bytes - low), group.band[1])
        )
        for group, low in zip(estimate.groups, lows, strict=True)
    )
    return replace(estimate, groups=groups, bound=why)


def least_bytes(plan: Plan, log: EventLog, device: str) -> int | None:
    """Return a lower bound on the allocated bytes if blocks are compiled; None if no block is.

    Args:
        plan: The plan that the log is of.
        log: The step of one rank as it runs without a compiler, without cuBLAS's workspaces.
        device: A device name of `hardware`; "" if unknown.
    """
    compiled = plan.assignment.compiled
    if not compiled:
        return None
    log = with_workspaces(least_of(log, compiled), device)
    return reserve_from_start(log, plan.spec).allocated_bytes


def _stages_of(plan: Plan, rank: int) -> tuple[int, ...]:
    stages = plan.assignment.stages
    return () if stages is None else stages.of_rank(plan.mesh.index(rank, ("pp",)))


BOUND: Final = (
    "blocks are compiled, and the figures are those of the same blocks without a compiler; "
    "the lower end, 'from', leaves out every tensor that the compiler may fuse away or recompute"
)
_PRODUCTS: Final = ("mm", "convolution", "attention", "_flash", "_efficient")
"""Substrings in the names of operators that run as separate kernels, and are never fused."""
_FREE: Final = frozenset({Term.TEMPORARIES, Term.ACTIVATIONS})


def least_of(log: EventLog, compiled: Collection[str]) -> EventLog:
    """Return the log without the tensors inside compiled modules that a compiler may fuse away.

    This is the lower bound on the memory of a step whose blocks are compiled; the log without a
    compiler is the upper bound. A compiled block receives the same inputs and returns the same
    outputs as before. Inside the block, the compiler fuses chains of elementwise operators, most of
    whose results then never exist as tensors, and chooses what it saves for backward. It never
    computes a matrix product twice, and it cannot avoid the buffers of collectives. So the results
    of matrix products, convolutions and attention kernels stay in the log.

    Source: torch 2.13, torch/_functorch/partitioners.py, `min_cut_rematerialization_partition`,
    which never recomputes compute-intensive operators; torch/_inductor fuses pointwise operators
    and reductions.

    Args:
        log: The step of one rank as it runs without a compiler.
        compiled: Fqns of the compiled modules. The outputs of a compiled module, which the compiler
            cannot fuse away, must be logged under its parent or as made by `COMPILED_OUTPUT`.
    """
    kept = [not _may_go(storage, frozenset(compiled)) for storage in log.storages]
    events = tuple(event for event in log.events if kept[event.storage])
    return replace(log, changes=events)


def _may_go(storage: Storage, compiled: frozenset[str]) -> bool:
    # Traces list operators as torch names them, the analytic estimate without namespace.
    namespace, is_traced, name = storage.op.partition(".")
    name = name or namespace
    if storage.term not in _FREE or (is_traced and namespace != "aten"):
        return False
    if not name or name.startswith(("empty", COMPILED_OUTPUT)):
        return False
    if any(word in name for word in _PRODUCTS):
        return False
    return not compiled.isdisjoint(around(storage.module))
