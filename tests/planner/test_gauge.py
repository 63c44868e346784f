"""What a model with few blocks says of one with many: never more than is there, and nearly all."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshplan.memory.analytic.estimate import analytic_log_of_rank
from meshplan.memory.log.allocator import reserve
from meshplan.memory.log.driver import communicators, driver_bytes, with_workspaces
from meshplan.memory.log.events import Event, EventLog, Storage, Term
from meshplan.model.graph import is_inside
from meshplan.plan.plan import make_plan
from meshplan.planner.lock.lock import overrides
from meshplan.planner.problem.overrides import BlockChoice, statements
from meshplan.planner.problem.problem import PlanningProblem
from meshplan.planner.problem.request import request_of_file
from meshplan.planner.problem.truncated import Short, TruncatedBound, shorten
from meshplan.planner.solve.config import Candidate, ConfigSolver, solve_config
from meshplan.spec.spec import Spec

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024,
    "intermediate_size": 3072, "num_hidden_layers": 18, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 8192, "max_position_embeddings": 2048,
    "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip


@pytest.fixture
def job(tmp_path: Path) -> PlanningProblem:
    return job_in(tmp_path, LLAMA, nodes=1)


def job_in(folder: Path, config: dict[str, Any], *, nodes: int) -> PlanningProblem:
    (folder / "config.json").write_text(json.dumps(config))
    hardware = {"nodes": nodes, "gpus_per_node": 8, "gpu": "h100-sxm-80gb", "inter": "50GB/s"}
    plan = {
        "version": 1, "model": {"config": "config.json"}, "hardware": hardware, "mesh": "auto",
        "strategy": "auto", "precision": "bf16-mixed",
        "batch": {"global": 32 * nodes, "seq_len": 512},
    }  # fmt: skip
    (folder / "plan.yaml").write_text(json.dumps(plan))
    return PlanningProblem(request_of_file(folder / "plan.yaml"))


def some(job: PlanningProblem, count: int, *, staged: bool = False) -> Iterator[Candidate]:
    """Random rows, with as little memory as makes their blocks differ, or as small as can be."""
    rng, numbers = random.Random(0), job.table
    rows = np.flatnonzero(staged | (job.grid["pp"] == 1)).tolist()
    while count:
        row = rng.choice(rows)
        smallest = ConfigSolver(numbers, row, float("inf")).smallest()
        room = max(smallest.linear_bytes) * rng.choice((1.01, 1.2, 1.5, 3))
        found = solve_config(numbers, row, room) or smallest
        if sum(map(len, job.blocks(numbers, found))) == LLAMA["num_hidden_layers"]:
            count -= 1
            yield found


def test_few_blocks_never_say_more_than_all_and_hardly_less(job: PlanningProblem) -> None:
    question, numbers = job.request, job.table
    assert question.shorter is not None
    shares, shortened = [], 0
    for candidate in some(job, 30):
        (blocks,) = job.blocks(numbers, candidate)
        short = shorten(blocks, question.shorter)
        if short is None:
            continue
        row = job.grid[candidate.row]
        plan = make_plan(question.read(overrides(job.stated(numbers, candidate))), question.graph)
        stated = statements(job.spec, job.free, row, [short.blocks], {}, "default")
        few = make_plan(question.read(overrides(stated)), short.graph)
        log = analytic_log_of_rank(few, 0, device=question.device)
        least = TruncatedBound(log, short).least_bytes
        whole = analytic_log_of_rank(plan, 0, device=question.device).pooled_bytes
        assert least <= whole, row
        shares.append(least / whole)
        shortened += bool(short.times)
    assert shortened > 10
    assert sorted(shares)[len(shares) // 10] > 0.95
    assert sorted(shares)[len(shares) // 2] == 1


def test_what_stands_for_others_keeps_the_ends_of_its_row() -> None:
    blocks = [BlockChoice(f"h.{n}", 2 if 8 <= n < 15 else 0, 1) for n in range(20)]
    asked = []
    short = shorten(blocks, lambda blocks: asked.append(blocks))  # type: ignore[arg-type,func-returns-value]
    assert short is not None
    assert [block.recompute for block in short.blocks] == [0] * 5 + [2] * 5 + [0] * 5
    assert [block.name for block in short.blocks] == [f"h.{n}" for n in range(15)]
    assert short.times == {"h.2": 4, "h.7": 3}
    assert asked == [15]
    assert shorten(blocks[:5], lambda blocks: None) is None  # type: ignore


def test_a_frame_is_held_by_one_microbatch_alone(tmp_path: Path) -> None:
    """What a model's own frame holds goes when its forward returns, however many are in flight."""
    at = job_in(tmp_path, LLAMA | {"num_hidden_layers": 64, "vocab_size": 512}, nodes=8)
    grid, question = at.grid, at.request
    row = int(np.flatnonzero((grid["pp"] == 64) & (grid["micro"] == 1))[0])
    smallest = ConfigSolver(at.table, row, float("inf")).smallest()
    plan = make_plan(question.read(overrides(at.stated(at.table, smallest))), question.graph)
    log = analytic_log_of_rank(plan, 0, device=question.device)
    assert smallest.linear_bytes[0] <= log.pooled_bytes


def test_what_communicators_take_is_known_from_the_mesh(job: PlanningProblem) -> None:
    """The same of a model with few blocks as of the plan itself, and more with more axes."""
    question, numbers = job.request, job.table
    by_axes: dict[int, set[float]] = {}
    for candidate in some(job, 25, staged=True):
        row = job.grid[candidate.row]
        plan = make_plan(question.read(overrides(job.stated(numbers, candidate))), question.graph)
        taken = job.taken(candidate.row)
        opened = communicators(plan.assignment, gpus_per_node=8)
        device = question.device
        more = driver_bytes(device, opened).high - driver_bytes(device, ()).high
        assert 0 < taken <= more < taken * 1.1
        axes = sum(int(row[axis] > 1) for axis in ("pp", "dp_replicate", "dp_shard", "tp"))
        by_axes.setdefault(axes, set()).add(taken)
    assert max(by_axes[1]) < min(by_axes[max(by_axes)])


def test_a_guess_of_what_is_reserved_is_near(job: PlanningProblem) -> None:
    """Where a short model shows no rank over, it shows about what the whole one reserves."""
    numbers, shares = job.table, []
    for candidate in some(job, 12):
        guess = job.guess(numbers, candidate)
        measured = job.measure(numbers, candidate, to_the_end=True)
        if guess is not None and measured.result is not None:
            (linear,) = candidate.linear_bytes
            shares.append((linear + guess.excess[0]) / (linear + measured.excess[0]))
    assert len(shares) > 6
    assert 0.9 < float(np.median(shares)) < 1.1


def made_up(rng: random.Random) -> tuple[EventLog, Short]:
    """A log of blocks that run one after the other, and make and free in every order."""
    blocks = tuple(BlockChoice(f"h.{n}", 0, 1) for n in range(8))
    names = ["", *(block.name for block in blocks)]
    storages: list[Storage] = []
    changes: list[tuple[int, int, int]] = []
    live: dict[int, int] = {}
    for phase in range(4):
        for name in rng.sample(names, len(names)):
            for _ in range(rng.randrange(6)):
                module = rng.choice((name, name and f"{name}.mlp", rng.choice(names)))
                op, stream = rng.choice(("", "mm")), rng.choice((0, 0, 1))
                storages.append(Storage(Term.TEMPORARIES, op, module, stream=stream))
                live[len(storages) - 1] = size = rng.randrange(1, 100)
                changes.append((size, len(storages) - 1, phase))
            for storage in rng.sample(sorted(live), min(len(live), rng.randrange(6))):
                left = rng.choice((0, 0, 0, rng.randrange(1, 100)))
                changes.append((left - live[storage], storage, phase))
                live[storage] = left
                live = {each: size for each, size in live.items() if size}
    phases = ("before", "forward", "backward", "step")
    return EventLog(tuple(storages), tuple(changes), phases), Short(None, blocks, TIMES)  # type: ignore[arg-type]


TIMES = {"h.1": 7, "h.6": 3}


def one_by_one(log: EventLog, short: Short) -> tuple[int, int]:
    """(least bytes, bytes of what was left out when most is there), one event after the other."""
    order = [block.name for block in short.blocks]

    def block_of(module: str) -> str:
        return next((name for name in order if is_inside(module, name)), "")

    def makers(events: Iterable[tuple[int, Event]]) -> list[str]:
        out, last, now = [], "", -1
        for _, event in events:
            if event.phase != now:
                last, now = "", event.phase
            if event.delta > 0 and log.storages[event.storage].op:
                last = block_of(log.storages[event.storage].module)
            out.append(last)
        return out

    events = list(enumerate(log.events))
    running = [*zip(makers(events), makers(events[::-1])[::-1], strict=True)]
    lasting: set[int] = set()
    there: dict[int, int] = {}
    for place, (delta, storage, _) in events:
        there[storage] = there.get(storage, 0) + delta
        for each, size in there.items():
            name = block_of(log.storages[each].module)
            at = order.index(name) if name in short.times else -1
            near = {*order[max(at - 1, 0) : at + 2]}
            if size and at >= 0 and near.isdisjoint(running[place]):
                lasting.add(each)
    pools, most = {0: 0, 1: 0}, {0: 0, 1: 0}
    live = left_out = fullest = then = 0
    for place, (delta, storage, _) in events:
        made = log.storages[storage]
        many = short.times[block_of(made.module)] if storage in lasting else 1
        pools[made.stream] += delta * many
        if not short.times.keys() & {*running[place]}:
            most[made.stream] = max(most[made.stream], pools[made.stream])
        live, left_out = live + delta, left_out + delta * (many - 1)
        if live + left_out > fullest:
            fullest, then = live + left_out, left_out
    return sum(most.values()), then


def test_columns_tell_what_one_event_after_the_other_tells() -> None:
    told = set()
    for seed in range(20):
        log, short = made_up(random.Random(seed))
        gauge = TruncatedBound(log, short)
        reserved = reserve(with_workspaces(log, "h100-sxm-80gb")).reserved_bytes
        found = gauge.least_bytes, gauge.likely_bytes("h100-sxm-80gb", Spec()) - reserved
        assert found == one_by_one(log, short), seed
        told.add(found)
        plain = TruncatedBound(log, Short(short.graph, short.blocks, {}))
        assert plain.least_bytes == log.pooled_bytes <= found[0]
    assert len(told) == 20


def test_what_is_surely_over_is_known_without_a_guess(job: PlanningProblem) -> None:
    """And whoever asks for the guess after that gets what he would have got before."""
    numbers, over, again, rng = job.table, 0, PlanningProblem(job.request), random.Random(1)
    for candidate in some(job, 8):
        job.capacity = again.capacity = max(candidate.linear_bytes) * rng.choice((1.1, 20))
        is_over = job.is_over(numbers, candidate)
        guess = job.guess(numbers, candidate)
        assert guess == again.guess(numbers, candidate)
        assert is_over == (guess is not None and guess.is_over)
        over += is_over
    assert 1 < over < 8


def test_a_rank_of_an_earlier_candidate_is_not_replayed_again(job: PlanningProblem) -> None:
    """Another rank's blocks, cuts or options change nothing of it: as if nothing was known."""
    numbers, rng, ranks = job.table, random.Random(2), 0
    rows = np.flatnonzero((job.grid["pp"] > 1) & (job.grid["pp"] < 8) & (job.grid["offload"] == 0))
    for row in map(int, rng.sample(rows.tolist(), 4)):
        smallest = ConfigSolver(numbers, row, float("inf")).smallest()
        for _ in range(3):
            room = tuple(each * rng.uniform(1.0, 1.6) for each in smallest.linear_bytes)
            found = solve_config(numbers, row, room) or smallest
            for each in job.free.allocators:
                fresh = PlanningProblem(job.request)
                one = job.measure(numbers, found, to_the_end=True, allocators=(each,))
                other = fresh.measure(fresh.table, found, to_the_end=True, allocators=(each,))
                assert one.result.memory.groups == other.result.memory.groups
                ranks += len(found.linear_bytes)
    assert len(job.free.allocators) == 2
    assert len({key[:2] for key in vars(job)["_ranks"]}) < 0.9 * ranks
