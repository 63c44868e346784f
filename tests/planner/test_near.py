"""What is simpler and hardly slower is tried in order, and nothing simpler is left out."""

from __future__ import annotations

from itertools import combinations

import pytest

from meshplan.cost.grid import OPTIONS
from meshplan.planner.objectives.simplify import Simplifier, Try
from meshplan.planner.solve.search import search
from tests.helpers.brute import always_fits
from tests.planner.test_planner import LARGE, LLAMA, OPEN, job, job_of

__all__ = ["job"]


SLACK = 0.5
"""Enough for rows that differ in all that counts."""


@pytest.mark.parametrize("gib", [26, 18])
def test_what_is_simpler_comes_simplest_first(job, gib, monkeypatch):
    monkeypatch.setattr("meshplan.planner.objectives.simplify.SLACK", SLACK)
    config = LLAMA | LARGE | {"num_hidden_layers": 8}
    batch = {"global": 32, "seq_len": 8192}
    at = job_of(job(config, batch=batch, activation_checkpointing="auto", **OPEN))
    at.allow(gib * 2**30)
    numbers = at.table
    found = search(numbers, at.capacity, always_fits, slack=SLACK)
    assert found.best is not None
    found.near = found.near[::-1][:: max(1, len(found.near) // 6)]
    near = Simplifier(at, numbers, found)
    # Anything counts as simpler than what no row is as bad as.
    limit = (9.0, 9.0, 9.0, 9.0, 9.0, 99.0, float("inf"))
    keys = [answered(near, each) for each in near._simpler(limit)]
    assert keys == sorted(keys)
    every = {
        key
        for row in {candidate.row for candidate in found.near}
        for allocator in at.free.allocators
        for size in range(1, len(OPTIONS) + 1)
        for some in combinations(range(len(OPTIONS)), size)
        if is_product(some)
        if (key := answered(near, Try(row, options_of(some), (allocator,))))
    }
    assert len({key[:2] for key in every}) > 1
    for place in (2, 3, 4):  # Axes that cut the model, settings for memory, choices of blocks.
        assert len({key[place] for key in every}) > 1
    assert {key[:6] for key in every} == {key[:6] for key in keys}
    assert every == set(keys)


def answered(near, each):
    """How simple the fastest way with these options is; () where none is near."""
    one = near._solve(each)
    return () if one is None else (*near._complexity(one, *each.allocators), each.row)


def options_of(some):
    return tuple(n in some for n in range(len(OPTIONS)))


def is_product(some):
    """Some recomputations with the same choices of parameters."""
    pairs = {OPTIONS[n] for n in some}
    return pairs == {(again, back) for again, _ in pairs for _, back in pairs}


def test_the_mesh_of_the_best_is_not_looked_at_again(job):
    """What it holds with other recomputation is the best once more, and takes a measure."""
    at = job_of(job(LLAMA | LARGE, batch={"global": 32, "seq_len": 8192}))
    numbers = at.table
    found = search(numbers, at.capacity, always_fits, slack=SLACK)
    assert found.best is not None
    near = Simplifier(at, numbers, found)
    best = near._mesh(found.best.row)
    rows = list(near._one_of_a_mesh())
    assert {near._mesh(row) for row in rows} == {near._mesh(c.row) for c in found.near} - {best}
    assert len(rows) == len({near._mesh(row) for row in rows}) > 2
    fastest = {near._mesh(c.row): c.row for c in reversed(found.near)}
    assert rows == [row for mesh, row in sorted_by_place(fastest, found.near) if mesh != best]


def sorted_by_place(rows, near):
    order = [c.row for c in near]
    return sorted(rows.items(), key=lambda item: order.index(item[1]))
