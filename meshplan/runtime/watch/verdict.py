"""Messages about ranks that hang, made from the reports of the ranks (`Watchdog._says`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from meshplan.errors import Problem
from meshplan.runtime.watch.job import NEEDS_ALL, RESTART

_NAMED: Final = 8
"""Largest number of ranks that a message lists one by one."""
_BATCHES: Final = "give every rank the same number of batches"


def verdict(reports: Mapping[int, Mapping[str, Any]]) -> Problem | None:
    """Return the problem of ranks that all wait for each other: where each of them waits.

    Args:
        reports: The report of each rank that has not left, by rank.

    Returns:
        The problem; None if all reports are equal, or if a process outside the job may be a member
        of a process group and end the wait.
    """
    if _has_foreign_group(reports):
        return None
    places = _by_place([_place(each) for each in reports.values()], reports)
    if len(places) == 1:
        words = [f"{_place(each)} with {_collectives(each)}" for each in reports.values()]
        places = _by_place(words, reports)
    if len(places) == 1:
        return None
    verbs = {str(each["running"]).partition(" ")[0] for each in reports.values()}
    rare = sorted(verbs - {"", NEEDS_ALL, "step", "eval_step"})
    if len(verbs) > 1 and rare:
        fix = f"call {rare[0]} on every rank, and {_BATCHES}"
    else:
        fix = f"{_BATCHES}, and call the same functions in the same order on every rank"
    what = f"the ranks wait for each other in a deadlock: {_join_places(places)}"
    return Problem(what, fix=f"{fix}; then {RESTART}")


def notice(reports: Mapping[int, Mapping[str, Any]], size: int, waited_s: float) -> str:
    """Return the text of a warning about ranks that keep others waiting but may only be busy.

    Args:
        reports: The report of each rank that answered, by rank.
        size: Number of ranks.
        waited_s: Seconds that the asking rank has waited.
    """
    waiting = {rank: each for rank, each in reports.items() if each["waits"]}
    lines = [f"{len(waiting)} of {size} ranks have waited for {waited_s:.0f} s"]
    lines.append(
        "  waiting: " + _join_places(_by_place([_place(e) for e in waiting.values()], waiting))
    )
    missing = [rank for rank, each in reports.items() if not each["waits"]]
    lines += [f"  rank {rank} is missing: {_busy(reports[rank])}" for rank in missing[:_NAMED]]
    silent = [rank for rank in range(size) if rank not in reports]
    if silent:
        why = "the process has ended or is stopped, or its Python interpreter is blocked"
        lines.append(f"  no answer from {name_ranks(silent)}: {why}")
    return "\n".join(lines)


def _busy(each: Mapping[str, Any]) -> str:
    """Describe where a rank is that keeps others waiting, from its report."""
    running = f"in {each['running']}" if each["running"] else "outside meshplan's functions"
    at = ", called from ".join(each["lines"]) or "code without Python lines"
    return f"{running}{_after(each)}, at {at}"


def _place(each: Mapping[str, Any]) -> str:
    """Describe where a rank waits. Ranks that wait for the same thing get the same text."""
    where = [each["where"]] if each["where"] else []
    if each["running"]:
        return each["running"] + (f" ({where[0]})" if where else "")
    where += [each["last"]] if each["last"] else []
    return each["waits"] + (f" ({', '.join(where)})" if where else "")


def _after(each: Mapping[str, Any]) -> str:
    """Return " after" with the last verb or forward of a rank; "" if there was none."""
    return f" after {each['last']}" if each["last"] else ""


def _collectives(each: Mapping[str, Any]) -> str:
    """Describe how many collectives a rank has begun in each process group."""
    return ", ".join(
        f"{count} collectives of {name_ranks(ranks)}" for ranks, count in each["groups"]
    )


def _has_foreign_group(reports: Mapping[int, Mapping[str, Any]]) -> bool:
    """Return True if a process outside the job may be a member of a rank's process group.

    Such a process may be a server that receives new weights, for example. Its group has a member
    whose number is not a rank of the job, or a member that does not report the group.
    """
    known = {rank: {tuple(r) for r, _ in each["groups"]} for rank, each in reports.items()}
    return any(
        member >= reports[rank]["size"] or (member in known and ranks not in known[member])
        for rank, groups in known.items()
        for ranks in groups
        for member in ranks
    )


def _by_place(places: Sequence[str], ranks: Iterable[int]) -> dict[str, list[int]]:
    """Return the ranks at each place; `places` has one text for each of `ranks`."""
    out: dict[str, list[int]] = {}
    for rank, place in zip(ranks, places, strict=True):
        out.setdefault(place, []).append(rank)
    return out


def _join_places(places: Mapping[str, list[int]]) -> str:
    """Return "ranks 0 and 1 in <place>, rank 2 in <other place>"."""
    return ", ".join(f"{name_ranks(ranks)} in {place}" for place, ranks in places.items())


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 1", "ranks 0, 1 and 3" or, for many ranks, "9 ranks from 0 to 12"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > _NAMED:
        return f"{len(ranks)} ranks from {min(ranks)} to {max(ranks)}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
