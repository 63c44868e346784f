"""The answer about a plan, from the logs of its ranks that differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from meshplan.memory.answer.compile_bound import BOUND, least_of
from meshplan.memory.answer.estimate import MemoryEstimate, Tier, group_of
from meshplan.memory.answer.hosts import host_of
from meshplan.memory.answer.reconcile import reconcile
from meshplan.memory.answer.reserved import RankSummary, ReplayCache, ReservedLog
from meshplan.memory.log.allocator import reserve
from meshplan.memory.log.driver import communicators, driver_bytes, with_workspaces
from meshplan.memory.log.events import EventLog
from meshplan.memory.log.torch_version import installed, unlike
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
    held: Mapping[int, ReservedLog] = MappingProxyType({}),
) -> MemoryEstimate:
    """What every rank needs, beside the limit, and the way there from the textbook.

    Args:
        groups: Ranks that are alike (`groups.equal_ranks`), and `logs`, of the first of each.
        device: A name of `hardware`, "" where nobody says.
        limit_bytes: What it may hold; None where nobody says.
        error: How far the logs, or each of them, may be from the truth, as a share.
        held: By place in `logs`, what is reserved for it, where that is known.
    """
    holding = ReplayCache(device, plan.spec)
    known = [held.get(number) or holding.of(log) for number, log in enumerate(logs)]
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
    """The same where the logs are gone.

    Args:
        figures: Of the first rank of each group.
        least: As for `group_of`, of each.
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
    why = unlike(installed()) if tier == Tier.REPLAY else ""
    estimate = MemoryEstimate(
        groups=tuple(found),
        tier=tier,
        certified=f"{certified}; {why}" if why else certified,
        limit_bytes=limit_bytes,
        assumed=assumed,
        bound=BOUND if plan.assignment.compiled else "",
        notes=tuple(notes),
        host=host_of(hardware, found),
    )
    is_mixed = plan.spec.precision.is_mixed
    steps = reconcile(estimate.worst, plan.assignment, is_mixed=is_mixed)
    return replace(estimate, reconciliation=steps)


def with_packed(
    estimate: MemoryEstimate, plan: Plan, held: Sequence[ReservedLog]
) -> MemoryEstimate:
    """The estimate, and where it does not fit, what expandable segments would reserve.

    Args:
        held: For the first rank of each group.
    """
    if estimate.worst.fits is not False or plan.spec.allocator != "default":
        return estimate
    groups = list(estimate.groups)
    worst = groups.index(estimate.worst)
    packed = reserve(held[worst].log, expandable=True).reserved_bytes
    groups[worst] = replace(groups[worst], packed_bytes=packed)
    return replace(estimate, groups=tuple(groups))


def as_bound(estimate: MemoryEstimate, logs: Sequence[EventLog], why: str) -> MemoryEstimate:
    """The estimate, of whose figures only is known that nothing is larger.

    At the least there is what lives before the step begins.

    Args:
        logs: Of the first rank of each group.
    """
    groups = tuple(
        replace(group, band=(min(group.band[0], log.by_phase["before"][1]), group.band[1]))
        for group, log in zip(estimate.groups, logs, strict=True)
    )
    return replace(estimate, groups=groups, bound=why)


def least_bytes(plan: Plan, log: EventLog, device: str) -> int | None:
    """What the allocator hands out at the least where blocks are compiled."""
    compiled = plan.assignment.compiled
    if not compiled:
        return None
    return reserve(with_workspaces(least_of(log, compiled), device)).allocated_bytes


def _stages_of(plan: Plan, rank: int) -> tuple[int, ...]:
    stages = plan.assignment.stages
    return () if stages is None else stages.of_rank(plan.mesh.index(rank, ("pp",)))
