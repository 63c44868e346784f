"""Seconds of what is sent: on which nodes ranks lie, and by which links they reach each other.

Which seeded bug would this catch? A ring that is as fast as a node's links where it leaves the
node; a tree where there is none; a cut between stages that crosses nodes, and is charged as none;
a network that is as fast with many nodes as with few, or slower by the nodes of a group alone.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from meshplan.cost.collectives import all_gather, all_reduce, all_to_all, group, group_along, send
from meshplan.cost.pipeline import crossing_seconds
from meshplan.cost.rows import Rows, widths_of
from meshplan.layout.mesh import AXES, GRADIENT_AXES, Mesh, order_of
from tests.cost.test_step import COUNTING, FP32, REAL, row


@pytest.mark.parametrize(
    ("ranks", "stride", "per_node", "nodes"),
    [(8, 1, 8, 1), (16, 1, 8, 2), (4, 8, 1, 4), (4, 2, 4, 1), (8, 4, 2, 4), (6, 4, 2, 3)],
)  # fmt: skip
def test_groups_lie_on_nodes(ranks, stride, per_node, nodes):
    found = group(np.array([ranks]), np.array([stride]), 8)
    assert (found.per_node[0], found.nodes[0]) == (per_node, nodes)


def test_bandwidth_of_a_ring_is_that_of_the_links_its_ranks_have():
    quiet = replace(REAL, intra_latency_s=0.0, inter_latency_s=0.0,
                    intra_bytes_per_s=387e9, inter_bytes_per_s=49e9)  # fmt: skip
    size = np.array([1e9])
    for per_node, bandwidth in ((1, 49e9), (2, 98e9), (4, 196e9), (8, 387e9)):
        ring = group(np.array([per_node * 16]), np.array([8 // per_node]), 8)
        share = (per_node * 16 - 1) / (per_node * 16)
        assert all_gather(size, ring, quiet)[0] == pytest.approx(1e9 * share / bandwidth)
        assert all_reduce(size, ring, quiet)[0] == pytest.approx(2e9 * share / bandwidth)


def test_trees_help_sums_and_nothing_else():
    none = np.array([0.0])
    far = group(np.array([2048.0]), np.array([1.0]), 8)
    gather, reduce = all_gather(none, far, REAL)[0], all_reduce(none, far, REAL)[0]
    assert gather == pytest.approx(255 * REAL.inter_latency_s + 1792 * REAL.intra_latency_s)
    assert reduce == pytest.approx(2 * (8 * REAL.inter_latency_s + 3 * REAL.intra_latency_s))
    near = group(np.array([2.0]), np.array([1.0]), 8)
    assert all_reduce(none, near, REAL)[0] == pytest.approx(2 * REAL.intra_latency_s)
    alone = group(np.array([1.0]), np.array([1.0]), 8)
    for collective in (all_gather, all_reduce, all_to_all):
        assert collective(np.array([1e9]), alone, REAL)[0] == 0.0


def test_exchanges_and_sends():
    exact = replace(REAL, intra_latency_s=0.0, inter_latency_s=0.0)
    size, both = np.array([16e9]), group(np.array([16.0]), np.array([1.0]), 8)
    out = 8e9 / exact.inter_bytes_per_s
    assert all_to_all(size, both, exact)[0] == pytest.approx(out)
    crosses = np.array([True, False])
    assert send(np.array([1e9, 1e9]), crosses, exact) == pytest.approx(
        [1e9 / exact.inter_bytes_per_s, 1e9 / exact.intra_bytes_per_s]
    )


def test_what_crosses_leaves_the_node_where_stages_do():
    size = 1e9
    for sizes, inside in (({"pp": 2, "dp_shard": 4}, True), ({"pp": 2, "dp_shard": 8}, False),
                          ({"pp": 4, "tp": 2}, True)):  # fmt: skip
        told = crossing_seconds(row(micro=2, **sizes), size, COUNTING, 8)[0]
        assert told == (2e9 if inside else 2.0)
    # Of three cuts one lies between nodes.
    told = crossing_seconds(row(pp=4, dp_shard=4, micro=2), size, COUNTING, 8)[0]
    assert told == pytest.approx((2 * 2e9 + 2) / 3)
    assert crossing_seconds(row(dp_shard=8), size, COUNTING, 8)[0] == 0


@pytest.mark.parametrize("axes", [("tp",), ("dp_replicate",), ("dp_shard", "cp"), GRADIENT_AXES])
def test_the_order_of_the_axes_says_which_ranks_share_a_node(axes):
    rng = random.Random(0)
    for _ in range(40):
        names = [axis for axis in AXES if axis not in ("ep", "pp", "tp")]
        names.insert(rng.randint(0, 3), "tp")
        names.insert(rng.randint(0, 4), "pp")
        mesh = Mesh.of({axis: rng.choice((1, 2, 4)) for axis in names})
        grid = row(**mesh.sizes)
        found = group_along(grid, axes, order_of(mesh.sizes), 8)
        own = [rank for rank in range(mesh.world_size) if _differs_only(mesh, rank, axes)]
        counts = Counter(rank // 8 for rank in own)
        assert found.ranks[0] == len(own)
        assert (found.per_node[0], found.nodes[0]) == (max(counts.values()), len(counts)), mesh


def _differs_only(mesh, rank, axes):
    at = mesh.coordinates(rank)
    return all(place == 0 or axis in axes for axis, place in at.items())


def test_an_axis_across_nodes_costs_what_its_links_take():
    """A mesh with tp outermost was priced as one with tp inside of the nodes."""
    grid = row(tp=8, dp_shard=8, micro=1)
    slow_outside = replace(COUNTING, intra_bytes_per_s=1e9, inter_bytes_per_s=1.0)
    inside, across = (
        Rows(grid, COUNTING, 8, widths_of(FP32), order_of(names))
        for names in ({"dp_shard": 8, "tp": 8}, {"tp": 8, "dp_shard": 8})
    )
    size = np.array([8e9])
    for rows, tp_s, shard_s in ((inside, 7.0, 7e9), (across, 7e9, 7.0)):
        assert all_gather(size, rows.along_tp, slow_outside)[0] == pytest.approx(tp_s)
        assert all_gather(size, rows.along_shards, slow_outside)[0] == pytest.approx(shard_s)


def test_stages_that_are_not_outermost_stay_inside_their_nodes():
    grid = row(pp=4, dp_shard=4, micro=2)
    order = order_of({"dp_shard": 4, "pp": 4})
    assert crossing_seconds(grid, 1e9, COUNTING, 8, order)[0] == 2e9  # A second for each byte.


def test_links_between_nodes_are_slower_in_larger_jobs():
    """A group on two of sixteen nodes shares the switches with the seven beside it."""
    quiet = replace(REAL, intra_latency_s=0.0, inter_latency_s=0.0)
    shared = replace(quiet, congestion=0.1)
    small, large = row(dp_shard=2, tp=8), row(dp_shard=16, tp=8)
    size = np.array([1e9])
    for grid, slower in ((small, 1.1), (large, 1.4)):
        order = order_of({"dp_shard": 1, "tp": 1})
        across = group_along(grid, ("dp_shard",), order, 8)
        for collective in (all_gather, all_reduce, all_to_all):
            free, told = (collective(size, across, p)[0] for p in (quiet, shared))
            assert told == pytest.approx(slower * free)
        within = group_along(grid, ("tp",), order, 8)
        assert all_gather(size, within, shared) == all_gather(size, within, quiet)
    stages = [row(pp=2, tp=8, dp_shard=data, micro=2) for data in (1, 8)]
    free, told = (
        [crossing_seconds(grid, 1e9, p, 8)[0] for grid in stages] for p in (quiet, shared)
    )
    assert told == pytest.approx([1.1 * free[0], 1.4 * free[1]])


def test_parameters_gathered_from_neighbours_share_the_switches_too():
    """With two GPUs a node, four neighbours are on two of the job's sixteen nodes."""
    shared = replace(COUNTING, intra_bytes_per_s=9.0, inter_bytes_per_s=1.0, congestion=0.1)
    job_nodes = group_along(row(dp_shard=32), ("dp_shard",), AXES, 2).job_nodes
    assert job_nodes.tolist() == [16]
    near = group(np.array([4.0]), np.array([1.0]), 2, job_nodes)
    free = all_gather(np.array([8.0]), near, replace(shared, congestion=0.0))[0]
    assert all_gather(np.array([8.0]), near, shared)[0] == pytest.approx(1.4 * free)
