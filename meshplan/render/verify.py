"""Output of `meshplan verify`: the scaled-down sizes, both trainings, and the verdict."""

from __future__ import annotations

from typing import Any

from meshplan.plan.verdict import ROUNDINGS, RankReport, Verdict
from meshplan.render.base.text import columns

_MOST_LINES = 6


def verdict_to_text(verdict: Verdict, plan: str) -> list[str]:
    """Return the lines of the report; the last line is the verdict."""
    out = _list("scaled down", verdict.notes)
    out += _list("rules that match nothing in the scaled-down model", verdict.unmatched)
    if verdict.refusal:
        return [*out, f"{plan}: does NOT RUN", *verdict.refusal.splitlines()]
    assert verdict.moved is not None
    rows = [("", "plan", "1 process", "difference", "allowed", "")]
    for each in verdict.comparisons():
        if each.step:
            numbers = (f"{each.together:.6g}", f"{each.alone:.6g}")
            apart = (f"{each.difference:.1e}", f"{each.allowed:.1e}", _word(each.is_ok))
            rows.append((f"{each.what}, step {each.step}", *numbers, *apart))
    out += [f"on {verdict.mesh}, {verdict.world} processes", *columns(rows, "<>>>><")]
    out += _moved(verdict)
    out.append(f"live shapes: ok, {verdict.num_tensors} tensors on every rank as planned")
    out += _bytes(verdict)
    out += _collectives(verdict)
    out += _remarks(verdict)
    found = verdict.findings()
    return [*out, f"{plan}: {'DIFFERS in ' + ', '.join(found) if found else 'ok'}"]


def _word(is_ok: bool) -> str:
    return "ok" if is_ok else "DIFFERENT"


def _moved(verdict: Verdict) -> list[str]:
    moved = verdict.moved
    assert moved is not None
    out = []
    for what, is_buffer in (("parameters", False), ("buffers", True)):
        shift = moved.nearest(is_buffer=is_buffer)
        if shift is None:
            continue
        wrong = [each for each in moved.wrong if each.is_buffer == is_buffer]
        count = f"{moved.num_buffers} compared" if is_buffer else f"{moved.num_judged} moved"
        still = "" if is_buffer else f"; {moved.num_still} moved no further than rounding"
        out.append(
            f"{what}: {_word(not wrong)}, {count}; nearest to its limit: {shift.name}, "
            f"off by {shift.share:.1e} of its movement, {shift.allowed_share:.1e} allowed{still}"
        )
        out += [
            f"    DIFFERENT: {each.name}, off by {each.share:.0%} of its movement, "
            f"{each.allowed_share:.0%} allowed"
            for each in wrong[:_MOST_LINES]
        ]
        if len(wrong) > _MOST_LINES:
            out.append(f"    and {len(wrong) - _MOST_LINES} more")
    return out


def _remarks(verdict: Verdict) -> list[str]:
    """Return lines that explain the tolerances and how the training in one process was run."""
    out = [
        f"allowed: {ROUNDINGS:g} times the change that rounding causes in one process, but at "
        f"least {verdict.tolerance.loss:.3g} of a loss and {verdict.tolerance.relative:.3g} of a "
        "movement"
    ]
    if verdict.microbatches > 1:
        out.append(
            f"the one process also ran {verdict.microbatches} microbatches per step: BatchNorm "
            "computes its statistics over each microbatch"
        )
    if verdict.own_statistics:
        others = len(verdict.own_statistics) - 1
        names = verdict.own_statistics[0] + (f" and {others} more" if others else "")
        out.append(
            f"unlike one process with the whole batch: {names} compute statistics over each data "
            "rank's own samples, and so did the one process here; add `sync_batchnorm: true` to "
            "compute those of BatchNorm over all samples"
        )
    return out


def _list(title: str, lines: tuple[str, ...]) -> list[str]:
    return [f"{title}:", *(f"    {line}" for line in lines)] if lines else []


def _bytes(verdict: Verdict) -> list[str]:
    apart = [(n, r) for n, r in enumerate(verdict.ranks) if r.measured != r.predicted]
    if not apart:
        return [f"bytes of state: ok, as predicted on {_ranks(verdict)}"]
    return [
        "bytes of state: DIFFERENT",
        *(
            f"    rank {n} holds {r.measured.total_bytes:,}, predicted {r.predicted.total_bytes:,}"
            for n, r in apart[:_MOST_LINES]
        ),
    ]


def _collectives(verdict: Verdict) -> list[str]:
    first = verdict.ranks[0]
    count = f"{first.num_collectives} on rank 0, {first.collective_bytes:,} B"
    head = f"collectives of a step: {count}"
    if first.unknown:
        return [f"{head}; not predicted:", *(f"    {what}" for what in first.unknown)]
    apart = [(n, r) for n, r in enumerate(verdict.ranks) if r.sent]
    if not apart:
        line = (
            f"collectives of a step: ok, {count}; kinds and bytes as predicted on {_ranks(verdict)}"
        )
        if first.num_routed:
            line += f", except the bytes of {first.num_routed}, whose sizes depend on token routing"
        return [line]
    rank, report = apart[0]
    return [
        f"{head}; DIFFERENT on {len(apart)} ranks; on rank {rank}:",
        *(
            f"    {each.route.kind} along {' and '.join(each.route.axes)} of "
            f"{each.route.num_bytes:,} B: counted {each.counted}, predicted {each.predicted}"
            for each in report.sent[:_MOST_LINES]
        ),
    ]


def _ranks(verdict: Verdict) -> str:
    return f"all {verdict.world} ranks" if verdict.world > 1 else "the one rank"


def verdict_to_json(verdict: Verdict) -> dict[str, Any]:
    """Return the `result` of schema verify/1."""
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
            "wrong": [
                {"parameter": each.name, "relative": each.share, "allowed": each.allowed_share}
                for each in verdict.moved.wrong
                if not each.is_buffer
            ],
        },
        "comparisons": [
            {
                "what": each.what,
                "step": each.step or None,
                "difference": each.difference,
                "allowed": each.allowed,
                "ok": each.is_ok,
            }
            for each in verdict.comparisons()
        ],
        "wrong_buffers": [each.name for each in verdict.moved.wrong if each.is_buffer],
        "statistics_of_each_rank": list(verdict.own_statistics),
        "tensors": verdict.num_tensors,
        "by_rank": [_rank_to_json(rank) for rank in verdict.ranks],
    }


def _rank_to_json(rank: RankReport) -> dict[str, Any]:
    return {
        "held_bytes": rank.measured.total_bytes,
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
