"""Seconds of what is sent: on which nodes ranks lie, and by which links they reach each other.

Which seeded bug would this catch? A ring that is as fast as a node's links where it leaves the
node; a tree where there is none; a cut between stages that crosses nodes, and is charged as none.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from meshplan.cost.collectives import all_gather, all_reduce, all_to_all, group, send
from meshplan.cost.pipeline import crossing_seconds
from tests.cost.test_step import COUNTING, REAL, row


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
