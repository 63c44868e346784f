"""Do the constants of nanotron's pace hold for a model that they were not chosen on?

    python -m tests.bench.pace_holdout FILE.jsonl [--stride 1] [--jobs 2]

Memory is told for some lags of each run with tp that did not stall, and lies between these for
others. Constants are chosen again on the runs of one model, from the ends of what is tried and not
from what they are now, and told for each model.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tests.bench import published
from tests.bench.frameworks import nanotron_pace as pace
from tests.bench.frameworks.nanotron_job import made_of
from tests.bench.mapping import Nanotron, Row, SkipError, case_of, checked, is_nanotron, usable_gib
from tests.bench.row_check import read_rows

LAGS: Final = (0, 25, 75, 150, 225, 300, 375, 450)
TRIED: Final[Mapping[str, tuple[float, ...]]] = {
    "QUEUE": (400, 450, 500),
    "PAIR": (50, 75, 100, 125, 150),
    "IN_PIPELINE": (0.6, 0.7, 0.75, 0.8, 0.9),
    "LAUNCH_S": (3e-5, 4.5e-5, 6e-5, 8e-5, 1e-4),
    "LAUNCH_IN_PIPELINE_S pair": (3e-5, 6e-5, 9e-5, 1.3e-4),
    "LAUNCH_IN_PIPELINE_S node": (8e-5, 1e-4, 1.3e-4, 1.6e-4, 2e-4),
    "LAUNCH_IN_PIPELINE_S nodes": (1.3e-4, 1.8e-4, 2.3e-4, 3e-4),
    "WAITING": (0.6, 0.7, 0.8, 0.9),
    "DRIFT": (0.01, 0.015, 0.025, 0.04),
}

Curve = tuple[str, Nanotron, tuple[int, int], tuple[float, ...], float]


def curve(row: Row) -> Curve | None:
    """Model, case, tensors of a microbatch, GiB by lag and GiB measured; None for other runs."""
    try:
        row = checked(row)
        case = case_of(row) if is_nanotron(row) else None
    except SkipError:
        return None
    if not isinstance(case, Nanotron) or case.job.tp == 1:
        return None
    job = case.job
    if pace.stalls(dp=job.dp, tp=job.tp, pp=job.pp, zero=job.zero, batch=job.batch):
        return None
    room = int((usable_gib(row) - published.OUTSIDE) * published.GIB)
    held = [published._lagging(case.shape, job, lag, room) for lag in LAGS]
    told = tuple(each.left_bytes / published.GIB for each in held)
    made = made_of(case.shape, job)
    return str(case.shape.layers), case, made, told, row["measured"]["peak_mem_gib"]


def errors(curves: Sequence[Curve]) -> NDArray[Any]:
    """Relative, with the constants that the module has now."""
    out = []
    for _, case, made, told, real in curves:
        lag = pace.lag_of(case.shape, case.job, made)
        out.append(abs(float(np.interp(lag, LAGS, told)) / real - 1))
    return np.array(out)


def score(curves: Sequence[Curve]) -> float:
    """A mean to which no run adds more than 30 %: some went a way that no field tells."""
    return float(np.minimum(errors(curves), 0.3).mean())


def choose(curves: Sequence[Curve]) -> dict[str, float]:
    """One constant after the other, until none is better elsewhere."""
    chosen = {name: values[0] for name, values in TRIED.items()}
    for name, value in chosen.items():
        _set(name, value)
    best, is_done = score(curves), False
    while not is_done:
        is_done = True
        for name, values in TRIED.items():
            for value in values:
                _set(name, value)
                if (found := score(curves)) < best - 1e-6:
                    chosen[name], best, is_done = value, found, False
            _set(name, chosen[name])
    return chosen


def _set(name: str, value: float) -> None:
    constant, _, key = name.partition(" ")
    if key:
        getattr(pace, constant)[key] = value
    else:
        setattr(pace, constant, value)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--stride", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args(arguments)
    rows = read_rows(options.file)[:: options.stride]
    with ProcessPoolExecutor(options.jobs) as pool:
        found = [each for each in pool.map(curve, rows, chunksize=10) if each is not None]
    models: dict[str, list[Curve]] = defaultdict(list)
    for each in found:
        models[each[0]].append(each)
    print(f"{'chosen on':>24}" + "".join(f"{f'{m} layers: median':>20} {'p90':>6}" for m in models))
    _line("what there is", models)
    for name, curves in models.items():
        choose(curves)
        _line(f"{len(curves)} runs of {name} layers", models)
    return 0


def _line(chosen_on: str, models: Mapping[str, Sequence[Curve]]) -> None:
    line = f"{chosen_on:>24}"
    for curves in models.values():
        size = errors(curves)
        line += f"{np.median(size):20.1%} {np.quantile(size, 0.9):6.1%}"
    print(line)


if __name__ == "__main__":
    raise SystemExit(main())
