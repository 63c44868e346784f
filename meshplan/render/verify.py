"""`meshplan verify` on paper: what was made small, both trainings side by side, the verdict."""

from __future__ import annotations

from typing import Any

from meshplan.render.text import columns
from meshplan.verdict import RankReport, Verdict

_MOST_LINES = 6


def verdict_to_text(verdict: Verdict, plan: str) -> list[str]:
    """The report, its last line the verdict."""
    out = _list("made smaller", verdict.notes)
    out += _list("rules that match nothing of the small model", verdict.unmatched)
    if verdict.refusal:
        return [*out, f"{plan}: does NOT RUN", *verdict.refusal.splitlines()]
    assert verdict.together is not None
    assert verdict.alone is not None
    assert verdict.moved is not None
    rows = [("", "plan", "1 process", "difference")]
    for name, mine, other in (
        ("loss", verdict.together.losses, verdict.alone.losses),
        ("gradient norm", verdict.together.norms, verdict.alone.norms),
    ):
        rows += [
            (f"{name}, step {step + 1}", f"{a:.6g}", f"{b:.6g}", f"{abs(a - b):.1e}")
            for step, (a, b) in enumerate(zip(mine, other, strict=True))
        ]
    moved = verdict.moved
    out += [f"on {verdict.mesh}, {verdict.world} processes", *columns(rows, "<>>>")]
    if verdict.microbatches > 1:
        out.append(
            f"one process took {verdict.microbatches} microbatches a step too: BatchNorm has "
            "statistics of each"
        )
    out.append(
        f"parameters: {moved.num_judged} moved, at most {moved.worst:.1e} of it apart; "
        f"{moved.num_still} did not move visibly"
    )
    out += [f"    DIFFERENT: {n}, {s:.0%} of its movement" for n, s in moved.wrong[:_MOST_LINES]]
    if len(moved.wrong) > _MOST_LINES:
        out.append(f"    and {len(moved.wrong) - _MOST_LINES} more")
    out.append(f"live shapes: {verdict.num_tensors} tensors on every rank as the plan says")
    out += _bytes(verdict)
    out += _collectives(verdict)
    found = verdict.findings()
    return [*out, f"{plan}: {'DIFFERS in ' + ', '.join(found) if found else 'ok'}"]


def _list(title: str, lines: tuple[str, ...]) -> list[str]:
    return [f"{title}:", *(f"    {line}" for line in lines)] if lines else []


def _bytes(verdict: Verdict) -> list[str]:
    apart = [(n, r) for n, r in enumerate(verdict.ranks) if r.held != r.predicted]
    if not apart:
        return [f"bytes of state: as predicted on {_ranks(verdict)}"]
    return [
        "bytes of state: DIFFERENT",
        *(
            f"    rank {n} holds {r.held.total_bytes:,}, predicted {r.predicted.total_bytes:,}"
            for n, r in apart[:_MOST_LINES]
        ),
    ]


def _collectives(verdict: Verdict) -> list[str]:
    first = verdict.ranks[0]
    head = f"collectives of a step: {first.num_collectives} on rank 0, {first.collective_bytes:,} B"
    if first.unknown:
        return [f"{head}; not predicted:", *(f"    {what}" for what in first.unknown)]
    apart = [(n, r) for n, r in enumerate(verdict.ranks) if r.sent]
    if not apart:
        told = f"{head}; kind by kind and byte by byte as predicted on {_ranks(verdict)}"
        if first.num_routed:
            told += f", but for the bytes of {first.num_routed} that the routing of tokens decides"
        return [told]
    rank, report = apart[0]
    return [
        f"{head}; DIFFERENT on {len(apart)} ranks, on rank {rank}:",
        *(
            f"    {each.route.kind} along {' and '.join(each.route.axes)} of "
            f"{each.route.num_bytes:,} B: {each.counted}, predicted {each.predicted}"
            for each in report.sent[:_MOST_LINES]
        ),
    ]


def _ranks(verdict: Verdict) -> str:
    return f"all {verdict.world} ranks" if verdict.world > 1 else "the one rank"


def verdict_to_json(verdict: Verdict) -> dict[str, Any]:
    """The `result` of schema verify/1."""
    out: dict[str, Any] = {
        "ok": verdict.is_ok,
        "ranks": verdict.world,
        "made_smaller": list(verdict.notes),
        "rules_without_match": list(verdict.unmatched),
        "refusal": verdict.refusal,
    }
    if verdict.refusal:
        return out
    assert verdict.together is not None
    assert verdict.alone is not None
    assert verdict.moved is not None
    return out | {
        "differs_in": verdict.findings(),
        "mesh": verdict.mesh,
        "losses": list(verdict.together.losses),
        "losses_of_one_process": list(verdict.alone.losses),
        "microbatches_of_one_process": verdict.microbatches,
        "gradient_norms": list(verdict.together.norms),
        "gradient_norms_of_one_process": list(verdict.alone.norms),
        "parameters": {
            "judged": verdict.moved.num_judged,
            "still": verdict.moved.num_still,
            "worst": verdict.moved.worst,
            "wrong": [{"parameter": n, "relative": s} for n, s in verdict.moved.wrong],
        },
        "tensors": verdict.num_tensors,
        "by_rank": [_rank_to_json(rank) for rank in verdict.ranks],
    }


def _rank_to_json(rank: RankReport) -> dict[str, Any]:
    return {
        "held_bytes": rank.held.total_bytes,
        "predicted_bytes": rank.predicted.total_bytes,
        "collectives": rank.num_collectives,
        "collective_bytes": rank.collective_bytes,
        "sized_by_routing": rank.num_routed,
        "not_predicted": list(rank.unknown),
        "differences": [
            {
                "kind": each.route.kind,
                "axes": list(each.route.axes),
                "bytes": each.route.num_bytes,
                "counted": each.counted,
                "predicted": each.predicted,
            }
            for each in rank.sent
        ],
    }
