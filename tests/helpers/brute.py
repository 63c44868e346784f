"""Small random spaces of the planner, and their answers by trying everything."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshplan.cost.grid import GRID, OPTIONS, SCHEDULE_WORDS
from meshplan.layout.schedules import SCHEDULES, actions
from meshplan.planner.solve.config import Candidate, Capacity, ConfigSolver, solve_config
from meshplan.planner.solve.result import ReplayedMemory
from meshplan.planner.tables.cost_table import CostTable, weights
from meshplan.planner.tables.in_flight import in_flight

NUM_OPTIONS = len(OPTIONS)
HALVED = "InterleavedZeroBubble"


def _index(rng: np.random.Generator, *words: str) -> int:
    return int(rng.choice([SCHEDULE_WORDS.index(word) for word in words]))


def random_numbers(seed: int, num_rows: int = 6) -> tuple[CostTable, float]:
    """(a small space, a capacity that is sometimes tight and sometimes not)."""
    rng = np.random.default_rng(seed)
    kinds, length = int(rng.integers(1, 4)), int(rng.integers(2, 6))
    order = tuple(int(k) for k in rng.integers(0, kinds, length))
    grid = np.zeros(num_rows, GRID)
    for name in ("dp_replicate", "dp_shard", "cp", "tp", "ep", "virtual"):
        grid[name] = 1
    own = ("dp_replicate", "ep", "cp")[seed % 3]
    grid[own] = 1 + np.arange(num_rows)  # Each is another mesh, or spreads experts otherwise.
    for row in grid:
        row["pp"] = rng.integers(1, min(3, length) + 1)
        row["microbatches"] = rng.integers(1, 6)
        if row["pp"] > 1:
            row["schedule"] = rng.choice([1, 2])
    shape = (num_rows, kinds, NUM_OPTIONS)
    seconds = rng.uniform(1.0, 2.0, shape)
    saved, resident = rng.uniform(0, 10, shape), rng.uniform(0, 5, shape)
    if seed % 3 == 0:  # What is saved is paid for: the hard case.
        saved = 10 * (2.0 - seconds) + rng.uniform(0, 0.01, shape)
        resident[:] = 1.0
    offered = rng.random(shape) < 0.8
    offered[:, :, 0] = True
    numbers = CostTable(
        grid=grid,
        order=order,
        seconds=np.where(offered, seconds, np.inf),
        saved=saved,
        resident=resident,
        unreduced_grad_bytes=rng.uniform(0, 3, (num_rows, kinds)),
        first_rank_extra_bytes=rng.uniform(0, 2, num_rows),
        last_rank_extra_bytes=rng.uniform(0, 2, num_rows),
        last_stage_extra_bytes=rng.uniform(0, 5, num_rows),
        backward_extra_bytes=rng.uniform(0, 3, num_rows),
        reduction_floor_bytes=np.zeros(num_rows),
        sent=rng.uniform(0, 2, num_rows),
        all_ranks_extra_bytes=rng.uniform(0, 2, num_rows),
        step_floor_bytes=np.zeros(num_rows),
        once_s=rng.uniform(0, 0.5, num_rows),
    )
    return numbers, float(rng.uniform(5, 12 * length))


def alike_rows() -> tuple[CostTable, float, NDArray[np.float64]]:
    """(80 meshes of one model, a capacity, what each holds above its linear figures).

    The last 20 are slow and hold nothing more. All others must give up the fastest of their
    options for what they hold more; the greater their number, the faster they are. The last three
    of these hold so much that none of their answers fits.
    """
    numbers, _ = random_numbers(3, num_rows=80)
    place = np.arange(80)
    is_slow = place >= 60
    alike = {
        each.name: np.repeat(value[:1], 80, axis=0)
        for each in fields(numbers)
        if isinstance(value := getattr(numbers, each.name), np.ndarray) and len(value) == 80
    }
    alike["grid"]["dp_replicate"] = 1 + place
    alike["grid"]["tp"] = np.where(is_slow, 8, 1)
    alike["seconds"] *= np.where(is_slow, 1.5, 1.2 - 0.002 * place)[:, None, None]
    numbers = replace(numbers, **alike)
    fast = solve_config(numbers, 0, float("inf"))
    assert fast is not None
    capacity = max(fast.linear_bytes)
    least = max(ConfigSolver(numbers, 0, float("inf")).smallest().linear_bytes)
    extra = np.where(is_slow, 0.0, 0.6 * (capacity - least))
    extra[57:60] = capacity - 0.9 * least
    return numbers, capacity, extra


def random_rounds(seed: int, num_rows: int = 6) -> tuple[CostTable, float]:
    """The same of alike blocks between two ends, and ranks with several stages."""
    numbers, _ = random_numbers(seed, num_rows)
    rng = np.random.default_rng(seed + 10**6)
    blocks = int(rng.integers(4, 8))
    order = (0, *[1] * blocks, 2)
    shape = (num_rows, 3, NUM_OPTIONS)
    seconds, resident = rng.uniform(1.0, 2.0, shape), rng.uniform(0, 3, shape)
    saved = rng.uniform(0, 4, shape)
    if seed % 3 == 0:  # What is saved is paid for: the hard case.
        saved = 4 * (2.0 - seconds) + rng.uniform(0, 0.01, shape)
    offered = rng.random(shape) < 0.35
    offered[:, :, 0] = True
    offered[:, (0, 2), 1:] = False
    for row in numbers.grid:
        row["pp"] = rng.integers(1, 4)
        row["virtual"], row["schedule"] = 1, (0 if row["pp"] == 1 else _index(rng, "GPipe", "1F1B"))
        row["microbatches"] = rng.integers(1, 8)
        most = blocks // int(row["pp"])
        if row["pp"] > 1 and most > 1 and rng.random() < 0.8:
            row["schedule"] = _index(rng, "Interleaved1F1B", HALVED)
            row["virtual"] = rng.integers(2, most + 1)
            while row["microbatches"] < row["pp"] or SCHEDULES["Interleaved1F1B"].problem(
                int(row["pp"]), int(row["microbatches"])
            ):
                row["microbatches"] = rng.integers(1, 8)
    rounds = replace(
        numbers,
        order=order,
        names=("", *(f"b.{n}" for n in range(blocks)), ""),
        seconds=np.where(offered, seconds, np.inf),
        saved=saved,
        resident=resident,
        unreduced_grad_bytes=rng.uniform(0, 3, (num_rows, 3)),
    )
    return rounds, float(rng.uniform(8, 12 * blocks))


@functools.cache
def kept_by(schedule: str, ranks: int, virtual: int, count: int) -> tuple[tuple[float, ...], ...]:
    """By rank and its stages, forwards before the rank's first backward, as it is played.

    Of backwards in two halves, those that wait for the second, when the most first do.
    """
    return _kept_by(schedule, ranks, virtual, count, "W")


@functools.cache
def handed_by(schedule: str, ranks: int, virtual: int, count: int) -> tuple[tuple[float, ...], ...]:
    """At the same moment, those that wait for a first half or a whole backward."""
    return _kept_by(schedule, ranks, virtual, count, "I")


def _kept_by(
    schedule: str, ranks: int, virtual: int, count: int, ends: str
) -> tuple[tuple[float, ...], ...]:
    out = []
    for rank, order in enumerate(actions(SCHEDULES[schedule], ranks, virtual, count)):
        if SCHEDULES[schedule].splits_backward:
            live = dict.fromkeys("FIW", 0)
            most, then = -1, [0.0] * virtual
            by_stage = {kind: [0] * virtual for kind in "FIW"}
            for step in (step for step in order if step.kind in "FIW"):
                live[step.kind] += 1
                by_stage[step.kind][step.stage // ranks] += 1
                if live["F"] - live["W"] > most:
                    most = live["F"] - live["W"]
                    then = [
                        float(f - e) for f, e in zip(by_stage["F"], by_stage[ends], strict=True)
                    ]
            out.append(tuple(then))
            continue
        steps = [step for step in order if step.kind in "FB"]
        warm = [s.stage for s in itertools.takewhile(lambda step: step.kind == "F", steps)]
        out.append(
            tuple(
                float(warm.count(rank + ranks * backward_extra_bytes))
                for backward_extra_bytes in range(virtual)
            )
        )
    return tuple(out)


@functools.cache
def began_by(schedule: str, ranks: int, virtual: int, count: int) -> tuple[bool, ...]:
    """By rank, whether as much is in flight again once its last stage alone had a backward."""
    out = []
    for rank, order in enumerate(actions(SCHEDULES[schedule], ranks, virtual, count)):
        steps = [step for step in order if step.kind in "FB"]
        at = next(n for n, step in enumerate(steps) if step.kind == "B")
        warm = [s.stage for s in steps[:at]]
        is_again = at + 1 < len(steps) and steps[at + 1].kind == "F"
        last = rank + ranks * (virtual - 1)
        is_again = is_again and steps[at].stage == steps[at + 1].stage == last
        others = [
            warm.count(rank + ranks * backward_extra_bytes)
            for backward_extra_bytes in range(virtual - 1)
        ]
        out.append(ranks > 1 and is_again and warm.count(last) not in others)
    return tuple(out)


def beside_blocks(numbers: CostTable, row: int, rank: int) -> float:
    """Bytes of a rank whatever its blocks do: a block's pass, or on the last rank the loss."""
    is_last = rank == int(numbers.grid[row]["pp"]) - 1
    held = float(
        (numbers.last_stage_extra_bytes if is_last else numbers.backward_extra_bytes)[row]
        + numbers.all_ranks_extra_bytes[row]
    )
    held += (
        float(numbers.first_rank_extra_bytes[row]) * (rank == 0)
        + float(numbers.last_rank_extra_bytes[row]) * is_last
    )
    return held


def rank_value(
    numbers: CostTable, row: int, stages: Any, keeps: Any, began: bool, room: float
) -> float:
    """The least seconds of some stages' blocks on a rank, by trying all options of each."""
    if began:
        room -= sum(float(numbers.unreduced_grad_bytes[row, kind]) for kind in stages[-1])
    return least_seconds(
        numbers,
        row,
        [(k, b.count(k), keep) for b, keep in zip(stages, keeps, strict=True) for k in {*b}],
        room,
    )


@functools.cache
def ways_of(options: int, count: int) -> NDArray[np.int64]:
    """Every way to give each of so many equal blocks one of the options: (ways, blocks)."""
    found = itertools.combinations_with_replacement(range(options), count)
    return np.array([*found], dtype=np.int64).reshape(-1, count)


def least_seconds(
    numbers: CostTable, row: int, blocks: Sequence[tuple[int, int, float]], room: float
) -> float:
    """The least seconds of some blocks that fit, of all ways to give each of them an option.

    Args:
        blocks: (kind, how many, how often each keeps what it saves).
    """
    held = seconds = np.zeros(1)
    for kind, count, keep in blocks:
        options = np.flatnonzero(np.isfinite(numbers.seconds[row, kind]))
        option_counts = options[ways_of(len(options), count)]
        each = numbers.resident[row, kind] + keep * numbers.saved[row, kind]
        held = np.add.outer(held, each[option_counts].sum(axis=1)).ravel()
        seconds = np.add.outer(
            seconds, numbers.seconds[row, kind][option_counts].sum(axis=1)
        ).ravel()
    return float(seconds[held <= room * (1 + 1e-12)].min(initial=float("inf")))


def fastest_rounds(numbers: CostTable, row: int, capacity: Capacity) -> float:
    """Seconds of the best way of a row with several stages a rank, by trying every cut."""
    config, blocks = numbers.grid[row], sum(map(bool, numbers.names))
    ranks, virtual = int(config["pp"]), int(config["virtual"])
    capacities = capacity if isinstance(capacity, tuple) else (capacity,) * ranks
    played = SCHEDULE_WORDS[config["schedule"]], ranks, virtual, int(config["microbatches"])
    kept, handed = kept_by(*played), handed_by(*played)
    began = began_by(*played) if played[0] != HALVED else (False,) * ranks
    a, b = (float(each[row]) for each in weights(numbers.grid))
    best, known = float("inf"), {}
    for inner in itertools.combinations(range(1, blocks), ranks * virtual - 1):
        sizes = [j - i for i, j in itertools.pairwise((0, *inner, blocks))]
        own = [sizes[rank::ranks] for rank in range(ranks)]
        if any(max(each) - min(each) > 1 for each in own):
            continue
        if any(each != sorted(each, reverse=r == ranks - 1) for r, each in enumerate(own)):
            continue  # Where the longer ones are: the last rank has them first.
        times = []
        for rank, each in enumerate(own):
            stages = [(1,) * size for size in each]
            waiting = sum(handed[rank]) - (handed[rank][-1] if rank == ranks - 1 else 0.0)
            waiting -= handed[rank][0] if rank == 0 else 0.0
            room = capacities[rank] - waiting * float(numbers.sent[row])
            if rank == 0:
                stages[0] = (0, *stages[0])
            if rank == ranks - 1:
                stages[-1] = (*stages[-1], 2)
            room -= beside_blocks(numbers, row, rank)
            key = rank, sum(each)
            if key not in known:
                known[key] = rank_value(numbers, row, stages, kept[rank], began[rank], room)
            times.append(known[key])
        best = min(best, a * max(times) + b * sum(times) + float(numbers.once_s[row]))
    return best


def stage_values(numbers: CostTable, row: int, stage: int, blocks: Any, room: float) -> float:
    """The least seconds of some blocks on a stage, by trying all options of each."""
    keeps = in_flight(numbers.grid[row], stage)
    config = numbers.grid[row]
    played = SCHEDULE_WORDS[config["schedule"]], int(config["pp"]), 1, int(config["microbatches"])
    if played[1] > 1 and began_by(*played)[stage]:
        room -= sum(float(numbers.unreduced_grad_bytes[row, kind]) for kind in blocks)
    return least_seconds(numbers, row, [(k, blocks.count(k), keeps) for k in {*blocks}], room)


def fastest(numbers: CostTable, row: int, capacity: Capacity) -> float:
    """Seconds of the best way of one row, by trying every cut."""
    config, length = numbers.grid[row], len(numbers.order)
    if config["virtual"] > 1:
        return fastest_rounds(numbers, row, capacity)
    stages = int(config["pp"])
    capacities = capacity if isinstance(capacity, tuple) else (capacity,) * stages
    named = numbers.names or ("block",) * length
    may_begin = [c for c in range(1, length) if named[c] and any(named[:c])]
    a, b = (float(each[row]) for each in weights(numbers.grid))
    best = float("inf")
    known: dict[Any, float] = {}
    for inner in itertools.combinations(may_begin, stages - 1):
        ends = (0, *inner, length)
        times = []
        for stage, (i, j) in enumerate(itertools.pairwise(ends)):
            is_last = stage == stages - 1
            waiting = 0.0 if is_last or not stage else in_flight(config, stage)
            room = capacities[stage] - waiting * float(numbers.sent[row])
            room -= beside_blocks(numbers, row, stage)
            key = (stage, i, j)
            if key not in known:
                known[key] = stage_values(numbers, row, stage, numbers.order[i:j], room)
            times.append(known[key])
        best = min(best, a * max(times) + b * sum(times) + float(numbers.once_s[row]))
    return best


def everywhere(candidate: Candidate, excess: float) -> dict[int, float]:
    """The same excess bytes on every rank."""
    return dict.fromkeys(range(len(candidate.linear_bytes)), float(excess))


def always_fits(candidate: Candidate) -> ReplayedMemory:
    return ReplayedMemory(fits=True)
