"""Published runs, predicted: the very figure that each row names, and whether it fits.

    python -m tests.bench.published FILE.jsonl --json OUT [--jobs 2] [--what memory,time,ranking]

Each row is mapped to a plan by its fields (`mapping`); profiles of frameworks are in
`tests.bench.frameworks`, with their sources, and nothing is fitted to a row. Time and order of
plans are told by `published_time`.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, Final

from meshplan.memory.decoder.sizes import Shape
from meshplan.memory.log.allocator import OutOfMemoryError, Reserve, reserve
from meshplan.memory.log.events import EventLog
from tests.bench import published_time
from tests.bench.frameworks import megatron_job, native
from tests.bench.frameworks.nanotron_job import Job, log_of, made_of
from tests.bench.frameworks.nanotron_pace import QUEUE, lag_of
from tests.bench.mapping import (
    Megatron,
    Nanotron,
    Row,
    SkipError,
    case_of,
    checked,
    is_nanotron,
    measured_gib,
    metric_of,
    states_of,
    usable_gib,
)
from tests.bench.row_check import UNFORESEEN, named, read_rows

GIB: Final = 2**30
OUTSIDE: Final = 2.0
"""GiB that the context and NCCL's buffers take at most. Source: MEMORY of published runs: context
0.5 GiB, 0.5 to 0.7 GB a communicator."""
WORKSPACES: Final = 0.07
"""GiB of cuBLAS workspaces in native runs, forward's thread and backward's.
Source: torch, aten/cuda/CublasHandlePool.cpp, 32 MiB each on Hopper."""
SPREAD: Final = {"eager": 0.03, "compiled": 0.08, "nanotron": 0.04, "megatron": 0.04}
"""Half a band, as a share. [Empirical] of the rows that the profiles were made with; that of
megatron is nanotron's."""

EXACT: Final = 0.01
"""Likewise of what is allocated without tp, where nothing lags: it follows from the code, and what
segments hold beyond it is given back where memory runs out. [Empirical]: of 19 runs with neither tp
nor a pipeline 18 are told within 0.4 %, one held less."""


def predict(row: Row) -> dict[str, Any]:
    """One row of the answer."""
    out = named(row)
    out |= {"predicted_bytes": None, "band": None, "fits": None, "skipped": None}
    try:
        row = checked(row)
        kind, usable, case = metric_of(row), usable_gib(row), case_of(row)
        room = int((usable - OUTSIDE) * GIB)
        if isinstance(case, Megatron):
            return out | _megatron(row, case, kind, usable)
        if kind == "total":
            raise SkipError(f"mem_metric {row['measured']['mem_metric']!r} has no rules")
        if isinstance(case, Nanotron):
            figure, band, least = _nanotron(case, kind, room)
        else:
            figure, band, least = _native(row, case, kind, room)
    except SkipError as error:
        return out | {"skipped": str(error)}
    except UNFORESEEN as error:
        return out | {"skipped": f"{type(error).__name__}: {error}"}
    return out | {
        "predicted_bytes": round(figure * GIB),
        "band": [round(edge * GIB) for edge in band],
        "fits": bool(least <= usable - OUTSIDE),
        "metric": kind,
    }


def _nanotron(case: Nanotron, kind: str, room: int) -> tuple[float, tuple[float, float], float]:
    """(figure, band, most allocated) in GiB.

    The band goes from a device that keeps up to one that lags by all that a queue takes.
    """
    told = lag_of(case.shape, case.job, made_of(case.shape, case.job))
    lags = (0, told, QUEUE if case.job.tp > 1 else 0)
    held = [_lagging(case.shape, case.job, lag, room) for lag in lags]
    # It prints the peaks of its third step, and forgets those of forward and backward before.
    low, figure, high = (
        each.left_bytes / GIB if kind == "reserved" else _figure(each, kind) for each in held
    )
    edge, most = SPREAD["nanotron"], held[0].allocated_bytes / GIB
    # Without tp nothing lags, and what is allocated follows from the code alone.
    above = edge if case.job.tp > 1 else EXACT
    band = (min(low, figure) * (1 - edge), max(high, figure) * (1 + edge))
    return figure, band, most * (1 + above)


def _megatron(row: Row, case: Megatron, kind: str, usable: float) -> dict[str, Any]:
    """The answer of a row of Megatron's, of the fullest rank.

    Where nvidia-smi was read, and not on all nodes, it is that of the first node.
    """
    job, stages = case.job, len(case.job.stages)
    outside = megatron_job.outside_bytes(case.device, job.tp, job.dp, stages)
    logs = {rank: megatron_job.log_of(case.shape, job, rank) for rank in job.distinct()}
    read = [rank for rank in logs if rank in case.on_first_node]
    if kind != "total" or "max over nodes" in row["measured"]["mem_metric"]:
        read = list(logs)
    held = [reserve(logs[rank]) for rank in read]
    most = max(each.allocated_bytes if kind != "reserved" else each.reserved_bytes for each in held)
    more = (0, 0, 0)
    if kind == "total":
        most, more = max(each.reserved_bytes for each in held), outside
    edge, room = SPREAD["megatron"], int(usable * GIB) - outside.expected
    low, high = (round(most * (1 + sign * edge) + more[1 + sign]) for sign in (-1, 1))
    return {
        "predicted_bytes": most + more[1],
        "band": [low, high],
        "fits": all(_is_within(log, room) for log in logs.values()),
        "metric": kind,
    }


def _is_within(log: EventLog, room: int) -> bool:
    """Whether the allocator finds a place for everything, once it has given back what is free."""
    try:
        reserve(log, limit_bytes=room)
    except OutOfMemoryError:
        return False
    return True


def _lagging(shape: Shape, job: Job, lag: int, room: int) -> Reserve:
    """Where memory runs out the allocator waits for the device, and all that lags is back."""
    held = _held(shape, job, lag, room)
    while lag and (held.num_retries or held.reserved_bytes > room):
        lag //= 2
        held = _held(shape, job, lag, room)
    return held


@cache
def _held(shape: Shape, job: Job, lag: int, room: int) -> Reserve:
    return _reserve(log_of(shape, job, lag), room)


def _native(row: Row, case: Any, kind: str, room: int) -> tuple[float, tuple[float, float], float]:
    """(figure, band, most allocated) in GiB."""
    log = native.log_of(case.config, case.mesh, case.how, case.profile, accumulate=case.accumulate)
    held = _reserve(log, room, expandable=case.profile.expandable)
    figure = _figure(held, kind) + WORKSPACES
    edge = SPREAD["compiled" if case.how.is_compiled or row["training"].get("float8") else "eager"]
    band = (figure * (1 - edge), figure * (1 + edge))
    return figure, band, held.allocated_bytes / GIB * (1 + edge)


def _reserve(log: EventLog, room: int, *, expandable: bool = False) -> Reserve:
    """On a device of this size, or of any where it does not fit."""
    try:
        return reserve(log, limit_bytes=room, expandable=expandable)
    except OutOfMemoryError:
        return reserve(log, expandable=expandable)


def _figure(held: Reserve, kind: str) -> float:
    return (held.reserved_bytes if kind == "reserved" else held.allocated_bytes) / GIB


def summary(rows: Sequence[Row], answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Per group and in all."""
    groups: dict[str, list[tuple[Row, Mapping[str, Any]]]] = defaultdict(list)
    for row, answer in zip(rows, answers, strict=True):
        groups["all"].append((row, answer))
        groups[str(answer["group"])].append((row, answer))
        if answer["skipped"] is None:
            groups[_kind_of(row)].append((row, answer))
    return {name: _of_group(members) for name, members in groups.items()}


def _kind_of(row: Row) -> str:
    """By whose rules a row is told."""
    if is_nanotron(row):
        return "nanotron"
    return "native" if states_of(row) is None else "copies in fp32"


def _of_group(members: Iterable[tuple[Row, Mapping[str, Any]]]) -> dict[str, Any]:
    errors: list[float] = []
    skipped: dict[str, int] = defaultdict(int)
    scored = false_fits = false_refusals = 0
    for row, answer in members:
        if answer["skipped"] is not None:
            skipped[answer["skipped"]] += 1
            continue
        scored += 1
        real = measured_gib(row)
        if real:
            errors.append(abs(answer["predicted_bytes"] / GIB / real - 1))
        did_fit = row["measured"].get("fits")
        false_fits += bool(answer["fits"] and did_fit is False)
        false_refusals += bool(not answer["fits"] and did_fit)
    errors.sort()
    return {
        "scored": scored,
        "skipped": sum(skipped.values()),
        "reasons": dict(sorted(skipped.items(), key=lambda each: -each[1])),
        "with_figure": len(errors),
        "median": statistics.median(errors) if errors else None,
        "p90": errors[min(len(errors) - 1, int(0.9 * len(errors)))] if errors else None,
        "false_fits": false_fits,
        "false_refusals": false_refusals,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--what", default="memory,time,ranking")
    options = parser.parse_args(arguments)
    rows = read_rows(options.file)
    what, answer = options.what.split(","), {}
    if "memory" in what:
        answer["memory"] = _memory(rows, options.jobs)
    if {"time", "ranking"} & set(what):
        told = published_time.predict_rows(rows)
        time, order = published_time.times(told), published_time.ranking(told)
        answer["time"] = {"rows": told, "summary": time}
        answer["ranking"] = order
        print(
            published_time.table(
                *(
                    each if name in what else None
                    for name, each in (("time", time), ("ranking", order))
                )
            )
        )
    options.json.write_text(json.dumps(answer, indent=1))
    return 0


def _memory(rows: Sequence[Row], jobs: int) -> dict[str, Any]:
    with ProcessPoolExecutor(jobs) as pool:
        answers = list(pool.map(predict, rows, chunksize=20))
    told = summary(rows, answers)
    print(f"{'group':28} {'scored':>7} {'skipped':>7} {'figures':>7} {'median':>7} {'p90':>7}"
          f" {'false fits':>10} {'refusals':>8}")  # fmt: skip
    for name, g in told.items():
        median, p90 = (f"{x:.1%}" if x is not None else "-" for x in (g["median"], g["p90"]))
        print(f"{name:28} {g['scored']:7} {g['skipped']:7} {g['with_figure']:7} {median:>7}"
              f" {p90:>7} {g['false_fits']:10} {g['false_refusals']:8}")  # fmt: skip
    return {"rows": answers, "summary": told}


if __name__ == "__main__":
    raise SystemExit(main())
