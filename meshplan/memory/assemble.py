"""The answer about a plan, from the logs of its ranks that differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from meshplan.memory.allocator import reserve
from meshplan.memory.driver import communicators, driver_bytes, with_workspaces
from meshplan.memory.estimate import MemoryEstimate, Tier, group_of
from meshplan.memory.fusing import BOUND, least_of
from meshplan.memory.held import Held, Holding
from meshplan.memory.hosts import host_of
from meshplan.memory.log import EventLog
from meshplan.memory.reconcile import reconcile
from meshplan.plan import Plan

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
    held: Mapping[int, Held] = MappingProxyType({}),
    packs: bool = True,
) -> MemoryEstimate:
    """What every rank needs, beside the limit, and the way there from the textbook.

    Args:
        groups: Ranks that are alike (`groups.equal_ranks`), and `logs`, of the first of each.
        device: A name of `hardware`, "" where nobody says.
        limit_bytes: What it may hold; None where nobody says.
        error: How far the logs, or each of them, may be from the truth, as a share.
        packs: Whether to tell, where it does not fit, what expandable segments would reserve.
        held: By place in `logs`, what is reserved for it, where that is known.
    """
    holding = Holding(device, plan.spec)
    known = [held.get(number) or holding.of(log) for number, log in enumerate(logs)]
    errors = [error] * len(logs) if isinstance(error, float) else error
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
            least=_least(plan, log, device),
        )
        for log, own, ranks, each in zip(logs, known, groups, errors, strict=True)
    ]
    worst = max(range(len(found)), key=lambda number: found[number].band[1])
    if packs and found[worst].fits is False and plan.spec.allocator == "default":
        packed = reserve(known[worst].log, expandable=True).reserved_bytes
        found[worst] = replace(found[worst], packed_bytes=packed)
    estimate = MemoryEstimate(
        groups=tuple(found),
        tier=tier,
        certified=certified,
        limit_bytes=limit_bytes,
        assumed=assumed,
        bound=BOUND if plan.assignment.compiled else "",
        notes=tuple(notes),
        host=host_of(hardware, found),
    )
    is_mixed = plan.spec.precision.is_mixed
    steps = reconcile(estimate.worst, plan.assignment, is_mixed=is_mixed)
    return replace(estimate, reconciliation=steps)


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


def _least(plan: Plan, log: EventLog, device: str) -> int | None:
    """What the allocator hands out at the least where blocks are compiled."""
    compiled = plan.assignment.compiled
    if not compiled:
        return None
    return reserve(with_workspaces(least_of(log, compiled), device)).allocated_bytes


def _stages_of(plan: Plan, rank: int) -> tuple[int, ...]:
    stages = plan.assignment.stages
    return () if stages is None else stages.of_rank(plan.mesh.index(rank, ("pp",)))
