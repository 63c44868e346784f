"""What may lie on the host is searched with all else: exactly, and only where it may win.

Which seeded bug would this catch? A bound above what a row takes, a row that is nobody's twin, a
copy that costs nothing, states that are counted on the device, a host that holds what it cannot.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshplan.cost.grid import ACTIVATIONS_ON_HOST, GRID, MODES, OPTIONS, PARAMS_ON_HOST
from meshplan.cost.host import crossing, host_rate
from meshplan.cost.profile import Profile, profile_of
from meshplan.cost.types import BlockKind, Sent, Tally
from meshplan.errors import PlanError
from meshplan.layout.hardware import Cluster, find_device
from meshplan.memory.answer.hosts import HOST_BYTES_PER_DEVICE
from meshplan.planner.objectives import offload_variants
from meshplan.planner.objectives.fastest import fastest_of
from meshplan.planner.objectives.offload_variants import _merged, searched
from meshplan.planner.problem.problem import PlanningProblem
from meshplan.planner.solve.config import Candidate, solve_config
from meshplan.planner.solve.result import ReplayedMemory, SearchResult
from meshplan.planner.solve.search import search
from meshplan.planner.space.enumeration import enumerate_grid
from meshplan.planner.space.offload import offload_words
from meshplan.planner.tables.cost_table import CostTable, memory_bounds
from meshplan.spec.reader import load_spec
from tests.helpers.brute import always_fits, fastest
from tests.helpers.pooled import pooled_bytes
from tests.planner.test_planner import LARGE, LLAMA, job, job_of

__all__ = ["job"]

ONE: dict[str, Any] = {"nodes": 1, "gpus_per_node": 1, "gpu": "l40s-48gb"}
EIGHT: dict[str, Any] = {"nodes": 1, "gpus_per_node": 8, "gpu": "h100-sxm-80gb"}
TINY = LLAMA | {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128,
                "vocab_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip


def random_job(path: Path, seed: int) -> PlanningProblem:
    """A small space on a machine whose parts are about as fast as each other."""
    at = job_of(path)
    rng = np.random.default_rng(seed)
    usual = at.profile
    at.profile = replace(
        usual,
        pcie_bytes_per_s=usual.pcie_bytes_per_s * 10 ** rng.uniform(-3, 0),
        host_bytes_per_s=usual.host_bytes_per_s * 10 ** rng.uniform(-3, 1),
        memory_bytes_per_s=usual.memory_bytes_per_s * 10 ** rng.uniform(-2, 0),
        launch_s=usual.launch_s * 10 ** rng.uniform(-2, 0),
    )
    held = memory_bounds(at.table)
    at.capacity = float(rng.uniform(0.2, 1.1) * rng.choice(held[np.isfinite(held)]))
    return at


def every_row(at: PlanningProblem) -> CostTable:
    """All rows of the space, those with what lies on the host written as if it was stated."""
    free = at.free
    rows = [enumerate_grid(replace(free, offload=(what,))) for what in free.offload]
    grid = np.concatenate(rows)
    if MODES.index("ddp") not in free.modes:  # Of one data rank only where nothing shards is free.
        grid = grid[grid["dp_shard"] * grid["dp_replicate"] > 1]
    again = PlanningProblem(at.request, free)
    again.grid = grid
    again.profile = at.profile
    return again.table


def answers(at: PlanningProblem) -> tuple[float, float, int]:
    """(the fastest by search, by trying everything, how often something on the host is it)."""

    def run(numbers: CostTable) -> SearchResult:
        return search(numbers, at.capacity, always_fits, tolerance=0.0)

    everything = every_row(at)
    _, found = searched(at, run)
    by_row = [fastest(everything, row, at.capacity) for row in range(len(everything.grid))]
    assert at.num_configs == len(by_row)
    least = min(by_row)
    is_there = everything.grid["offload"][int(np.argmin(by_row))] > 0
    seconds = found.best.seconds if found.best else float("inf")
    return seconds, least, int(np.isfinite(least) and is_there)


def small(seed: int) -> dict[str, Any]:
    """What differs between small spaces."""
    rng = np.random.default_rng(seed)
    hardware = {"nodes": 1, "gpus_per_node": int(rng.choice([1, 2, 2, 4])), "gpu": "h100-sxm-80gb"}
    stated: dict[str, Any] = {"hardware": hardware, "mesh": "auto", "strategy": "auto"}
    stated["batch"] = {"global": 4, "seq_len": int(rng.choice([128, 512]))}
    if seed % 5 == 1:
        stated["activation_checkpointing"] = "full"
    if seed % 5 == 2 and hardware["gpus_per_node"] > 1:
        stated |= {"strategy": "full_shard", "mesh": None}
    if seed % 5 == 3:
        stated["offload"] = {"activations": False}
    return stated


@pytest.mark.parametrize(
    "block", [0, *(pytest.param(n, marks=pytest.mark.wide) for n in range(1, 60))]
)
def test_nothing_in_the_space_is_faster(job, block):
    num_there = 0
    for seed in (39, 41) if block == 0 else range(block * 10, block * 10 + 10):
        at = random_job(job(TINY, **small(seed)), seed)
        found, expected, is_there = answers(at)
        assert found == pytest.approx(expected, rel=2e-4), seed
        num_there += is_there
    assert num_there or block


@pytest.mark.parametrize("seed", [1, 23])
def test_the_lower_bound_of_a_search_cut_short_holds_for_what_lies_on_the_host(job, seed):
    """Also where the time is up before that is looked at, which here is the fastest by far."""

    def cut_short(num_looks: int | None) -> SearchResult:
        at = job_of(job(TINY, **small(seed)))
        at.profile = replace(at.profile, pcie_bytes_per_s=1e15, host_bytes_per_s=1e16)
        held = memory_bounds(at.table)
        at.capacity = float(np.quantile(held[np.isfinite(held)], 0.2))
        looks = iter(range(num_looks or 0))

        def run(numbers: CostTable) -> SearchResult:
            return search(
                numbers, at.capacity, always_fits, tolerance=0.0,
                is_stopped=lambda: num_looks is not None and next(looks, None) is None,
            )  # fmt: skip

        return searched(at, run)[1]

    whole = cut_short(None)
    assert whole.best is not None
    for num_looks in range(6):
        found = cut_short(num_looks)
        assert not found.is_whole
        assert found.lower_s <= whole.best.seconds


@pytest.mark.wide
@pytest.mark.parametrize("what", ["bound", "twins", "copies"])
def test_a_mistake_shows(job, monkeypatch, what):
    """In the answer to some of the spaces above."""
    right = offload_variants._bounds
    if what == "bound":
        monkeypatch.setattr(offload_variants, "_bounds", lambda *given: 1.5 * right(*given))
    elif what == "twins":
        monkeypatch.setattr(
            offload_variants, "_offload_variants", lambda grid, what, job: (np.arange(0), grid[:0])
        )
    wrong = 0
    for seed in (0, 2, 15, 23, 40, 89):
        at = random_job(job(TINY, **small(seed)), seed)
        everything = every_row(at)
        if what == "copies":  # As if the search took what it copies for nothing.
            at.profile = replace(at.profile, pcie_bytes_per_s=float("inf"), host_bytes_per_s=1e15)
        _, found = searched(at, lambda n, at=at: search(n, at.capacity, always_fits, tolerance=0.0))
        rows = range(len(everything.grid))
        expected = min(fastest(everything, row, at.capacity) for row in rows)
        seconds = found.best.seconds if found.best else float("inf")
        wrong += seconds != pytest.approx(expected, rel=2e-4)
    assert wrong


@pytest.mark.wide
def test_bounds_on_memory_are_below_what_is_replayed(job):
    """What rules a row out must never be above the truth."""
    at = job_of(job(LLAMA))
    at.capacity = float("inf")
    assert offload_variants.add_offload_variants(at)
    numbers, rng = at.table, np.random.default_rng(0)
    grid = numbers.grid
    there = np.flatnonzero(grid["offload"] > 0)
    plain = there[(grid["pp"][there] == 1) & (grid["tp"][there] == 1)]
    kinds = set()
    for row in {*rng.choice(plain, 12, replace=False), *rng.choice(there, 8, replace=False)}:
        offered = np.flatnonzero(np.isfinite(numbers.seconds[row]).any(axis=0))
        option = rng.choice(offered)
        mask = [number == option for number in range(len(OPTIONS))]
        one = solve_config(numbers.only(int(row), mask), 0, float("inf"))
        if one is None:
            continue
        candidate = replace(one, row=int(row))
        measured = at.measure(numbers, candidate)
        assert not measured.why
        truth = pooled_bytes(at, measured)
        assert max(one.linear_bytes) <= truth, (grid[row], OPTIONS[option])
        assert measured.result.memory.worst.host_bytes > 0
        kinds.add(int(grid[row]["offload"]))
    assert kinds == {1, 2, 3}


BIG = LLAMA | LARGE | {"num_hidden_layers": 32}
"""Llama-3 8B."""
HOME: dict[str, Any] = {
    "hardware": ONE, "mesh": None, "strategy": None, "batch": {"global": 16, "seq_len": 4096},
}  # fmt: skip


def test_a_model_that_fits_on_no_device_is_trained_from_the_host(job):
    decision = fastest_of(at := job_of(job(BIG, **HOME)))
    chosen = decision.chosen
    assert chosen is not None
    assert chosen.stated["offload"] == "params"
    assert chosen.memory.fits
    assert decision.gap <= 1e-4
    numel = sum(t.numel for t in chosen.plan.graph.tensors.values() if not t.is_buffer)
    assert chosen.memory.worst.host_bytes >= 16 * numel
    assert 0 < chosen.memory.host.held_bytes <= HOST_BYTES_PER_DEVICE
    assert at.num_configs == decision.num_configs == len(at.grid)


@pytest.mark.wide
def test_it_is_not_without_that_nor_where_its_host_cannot_hold_it(job):
    assert fastest_of(job_of(job(BIG, **HOME, offload="none"))).chosen is None
    less = HOME | {"hardware": ONE | {"host_memory": "64GiB"}}
    refused = fastest_of(job_of(job(BIG, **less)))
    assert refused.chosen is None
    assert any(each.why.endswith("more than its 64.0 GiB") for each in refused.rejected)


@pytest.mark.wide
def test_what_fits_without_is_planned_without(job):
    plans = [fastest_of(job_of(job(offload=word))) for word in (None, "none", "auto")]
    assert "offload" not in plans[0].chosen.stated
    without = {key: v for key, v in plans[0].chosen.stated.items() if key != "offload"}
    for each in plans[1:]:
        assert {k: v for k, v in each.chosen.stated.items() if k != "offload"} == without
    assert plans[2].chosen.stated["offload"] == "none"
    assert plans[0].num_configs > 2 * plans[1].num_configs  # All of the space, most by bounds.


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"offload": {"activations": True}, "activation_checkpointing": "none"},
         "where every block is recomputed in full, only"),
        ({"offload": "optimizer"}, "optimizer states cannot be offloaded alone"),
        ({"rules": [{"match": "model.layers.0", "offload": "params"}]},
         "does not search plans with offloaded parameters of single"),
    ],
)  # fmt: skip
def test_what_has_no_figures_is_refused(job, fields, what):
    with pytest.raises(PlanError, match=what):
        fastest_of(job_of(job(**fields)))


@pytest.mark.wide
def test_what_is_stated_is_held(job):
    for stated, what in (("params", 1), ({"activations": True}, 2),
                         ({"params": True, "activations": True}, 3)):  # fmt: skip
        at = job_of(job(offload=stated, hardware=EIGHT))
        found = fastest_of(at)
        assert set(at.grid["offload"]) <= {what, what | 1 if what == 2 else what, what | 2}
        assert found.chosen is not None
        assert found.chosen.plan.assignment.host_activations or not what & 2
        on_host = [unit.on_host for unit in found.chosen.plan.assignment.units.values()]
        assert all(on_host) or not what & 1


@pytest.mark.wide
def test_weights_that_stages_share_keep_pipelines_from_it(job):
    tied = LLAMA | {"tie_word_embeddings": True}
    at = job_of(job(tied, offload="params", hardware=EIGHT))
    assert not at.free.stages_may_offload
    assert set(at.grid["pp"]) == {1}
    assert set(job_of(job(offload="params", hardware=EIGHT)).grid["pp"]) > {1}


def test_a_crossing_takes_what_its_bytes_do():
    """By hand, of one block on one of four ranks."""
    at = np.ones(1, GRID)
    at["dp_shard"], at["mode"], at["schedule"] = 4, MODES.index("shard"), 0
    at["micro"], at["microbatches"] = 2, 1
    kind, profile = some_kind(), some_profile()
    at["offload"] = PARAMS_ON_HOST
    there, back, waited = crossing(at, kind, profile, 2, 4)
    share = 4 * 1000 / 4
    assert there[0] == pytest.approx(share / profile.pcie_bytes_per_s)
    assert (back[0], waited[0]) == (there[0], 0)
    assert host_rate(at, profile, 2)[0] == profile.host_bytes_per_s / 2
    at["microbatches"] = 3  # What is there already is added to, and waited for.
    _, back, waited = crossing(at, kind, profile, 2, 4)
    added = 3 * share / (profile.host_bytes_per_s / 2)
    assert back[0] == 0
    assert waited[0] == pytest.approx(there[0] + added)
    at["offload"] = ACTIVATIONS_ON_HOST
    there, back, waited = crossing(at, kind, profile, 2, 4)
    assert (there[0], back[0]) == (0, 0)
    assert waited[0] == pytest.approx(2 * 2 * 64 / profile.pcie_bytes_per_s)


def some_kind() -> BlockKind:
    work, sent = Tally(), Sent()
    return BlockKind(
        name="layers.0", has_options=True, numels=(400, 600), forward=work, backward=work,
        recompute=(work, work, work), sent_forward=sent, sent_backward=sent,
        sent_recompute=(sent, sent, sent), saved_bytes=(0, 0, 0), transient_bytes=(0, 0, 0),
        boundary_bytes=64,
    )  # fmt: skip


def some_profile() -> Profile:
    cluster = Cluster(device=find_device("h100-sxm-80gb"), nodes=1, gpus_per_node=4)
    return profile_of(cluster)


def test_a_plan_says_no_more_than_it_must():
    def words(stated: Any, what: int) -> dict[str, Any]:
        more = {} if stated is None else {"offload": stated}
        return offload_words(load_spec({"version": 1, "strategy": "full_shard"} | more), what)

    assert words(None, 0) == words("none", 0) == words("params", PARAMS_ON_HOST) == {}
    assert words("auto", 0) == {"offload": "none"}
    assert words(None, 1) == words("auto", 1) == {"offload": "params"}
    both = {"offload": {"params": True, "activations": True}}
    assert words(None, 3) == words("params", 3) == both
    assert words({"activations": True}, 2) == {}


def test_a_second_search_does_not_lose_a_faster_plan():
    """It may end with a slower plan of the same configuration, or with none."""

    def found(seconds: float | None) -> SearchResult:
        if seconds is None:
            return SearchResult()
        candidate = Candidate(0, seconds, (), (), ())
        return SearchResult(best=candidate, measured=ReplayedMemory(fits=True))

    for one, two, best in ((1.0, 1.1, 1.0), (1.1, 1.0, 1.0), (1.0, None, 1.0), (None, 1.0, 1.0)):
        merged = _merged(found(one), found(two))
        assert merged.best is not None
        assert merged.best.seconds == best
        assert merged.measured is not None
    assert _merged(found(None), found(None)).best is None
