"""What a model with few blocks says of one with many: never more than is there, and nearly all."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshplan.memory.driver import communicators, driver_bytes
from meshplan.memory.told import told_rank
from meshplan.plan import make_plan
from meshplan.planner.asking import question_of_file
from meshplan.planner.gauge import Gauge, shorten
from meshplan.planner.job import Job
from meshplan.planner.lock import overrides
from meshplan.planner.row import Candidate, Row, solve_row
from meshplan.planner.settle import Block, statements

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024,
    "intermediate_size": 3072, "num_hidden_layers": 18, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 8192, "max_position_embeddings": 2048,
    "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return job_in(tmp_path, LLAMA, nodes=1)


def job_in(folder: Path, config: dict[str, Any], *, nodes: int) -> Job:
    (folder / "config.json").write_text(json.dumps(config))
    hardware = {"nodes": nodes, "gpus_per_node": 8, "gpu": "h100-sxm-80gb", "inter": "50GB/s"}
    plan = {
        "version": 1, "model": {"config": "config.json"}, "hardware": hardware, "mesh": "auto",
        "strategy": "auto", "precision": "bf16-mixed",
        "batch": {"global": 32 * nodes, "seq_len": 512},
    }  # fmt: skip
    (folder / "plan.yaml").write_text(json.dumps(plan))
    return Job(question_of_file(folder / "plan.yaml"))


def some(job: Job, count: int) -> Iterator[Candidate]:
    """Random rows, with as little memory as makes their blocks differ, or as small as can be."""
    rng, numbers = random.Random(0), job.usual
    while count:
        row = rng.randrange(len(job.grid))
        smallest = Row(numbers, row, float("inf")).smallest()
        room = max(smallest.linear_bytes) * rng.choice((1.01, 1.2, 1.5, 3))
        found = solve_row(numbers, row, room) or smallest
        if sum(map(len, job.blocks(numbers, found))) == LLAMA["num_hidden_layers"]:
            count -= 1
            yield found


def test_few_blocks_never_say_more_than_all_and_hardly_less(job: Job) -> None:
    question, numbers = job.question, job.usual
    assert question.shorter is not None
    shares, shortened = [], 0
    for candidate in some(job, 30):
        stages = job.blocks(numbers, candidate)
        plan = make_plan(question.read(overrides(job.stated(numbers, candidate))), question.graph)
        ranks = len(candidate.linear_bytes)
        for place in {0, ranks - 1}:
            short = shorten(stages, place, question.shorter, num_ranks=ranks)
            if short is None:
                continue
            row = job.grid[candidate.row]
            stated = statements(job.spec, job.free, row, short.stages, {})
            few = make_plan(question.read(overrides(stated)), short.graph)
            rank = place * (plan.mesh.world_size // ranks)
            log = told_rank(few, rank, device=question.device)
            least = Gauge(log, short).least_bytes
            whole = told_rank(plan, rank, device=question.device).pooled_bytes
            assert least <= whole, (row, place)
            shares.append(least / whole)
            shortened += bool(short.times)
    assert shortened > 10
    assert sorted(shares)[len(shares) // 10] > 0.95
    assert sorted(shares)[len(shares) // 2] == 1


def test_what_stands_for_others_keeps_the_ends_of_its_row() -> None:
    stages = [[Block(f"h.{n}", 0, 1) for n in range(8)],
              [Block(f"h.{n}", 2 if n < 15 else 0, 1) for n in range(8, 20)]]  # fmt: skip
    asked = []
    short = shorten(stages, 1, lambda blocks: asked.append(blocks))  # type: ignore[arg-type,func-returns-value]
    assert short is not None
    assert [[block.recompute for block in stage] for stage in short.stages] == [
        [0],
        [2] * 5 + [0] * 5,
    ]
    assert [block.name for stage in short.stages for block in stage] == [
        f"h.{n}" for n in range(11)
    ]
    assert short.times == {"h.3": 3}
    assert asked == [11]
    assert shorten(stages[:1], 0, lambda blocks: None).times == {"h.2": 4}  # type: ignore
    assert shorten([stages[0][:5]], 0, lambda blocks: None) is None  # type: ignore


def test_a_frame_is_held_by_one_microbatch_alone(tmp_path: Path) -> None:
    """What a model's own frame holds goes when its forward returns, however many are in flight."""
    at = job_in(tmp_path, LLAMA | {"num_hidden_layers": 64, "vocab_size": 512}, nodes=8)
    grid, question = at.grid, at.question
    row = int(np.flatnonzero((grid["pp"] == 64) & (grid["micro"] == 1))[0])
    smallest = Row(at.usual, row, float("inf")).smallest()
    plan = make_plan(question.read(overrides(at.stated(at.usual, smallest))), question.graph)
    log = told_rank(plan, 0, device=question.device)
    assert smallest.linear_bytes[0] <= log.pooled_bytes


def test_what_communicators_take_is_known_from_the_mesh(job: Job) -> None:
    """The same of a model with few blocks as of the plan itself, and more with more axes."""
    question, numbers = job.question, job.usual
    by_axes: dict[int, set[float]] = {}
    for candidate in some(job, 25):
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


def test_a_guess_of_what_is_reserved_is_near(job: Job) -> None:
    """Where a short model shows no rank over, it shows about what the whole one reserves."""
    numbers, shares = job.usual, []
    for candidate in some(job, 12):
        guess = job.guess(numbers, candidate)
        measured = job.measure(numbers, candidate, to_the_end=True)
        if guess is not None and measured.result is not None:
            linear = max(candidate.linear_bytes)
            shares.append((linear + guess.excess_bytes) / (linear + measured.excess_bytes))
    assert len(shares) > 6
    assert 0.9 < float(np.median(shares)) < 1.1
