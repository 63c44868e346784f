"""Bytes and seconds of links between nodes. Which seeded bug would this catch?

A group placed on the wrong nodes, gloo's reduce-scatter charged as a ring, a link between nodes
that is priced as one inside, and the sides of a hybrid exchanged.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshplan.layout.mesh import Mesh
from meshplan.traffic import Forecast, Route, Traffic
from tests.cluster.crossing import leaving_bytes
from tests.cluster.measured import Row, measure, ranks_of, regret, spearman
from tests.helpers.nodes import why_none

MESH = Mesh.of({"dp_replicate": 2, "dp_shard": 4})
SHARD, REPLICATE = ("dp_shard",), ("dp_replicate",)
ALL = (*REPLICATE, *SHARD)


@pytest.mark.parametrize(
    ("kind", "axes", "by_rank"),
    [
        # A ring of all ranks leaves each node once, behind its last rank.
        ("all_gather", ALL, [0, 0, 0, 700, 0, 0, 0, 700]),
        ("all_reduce", ALL, [0, 0, 0, 1400, 0, 0, 0, 1400]),
        ("reduce_scatter", ALL, [0, 0, 0, 1400, 0, 0, 0, 1400]),
        # Along the shards of a node nothing leaves it; along replicas all does.
        ("all_gather", SHARD, [0] * 8),
        ("all_reduce", REPLICATE, [800] * 8),
        ("all_to_all", ALL, [400] * 8),
        ("broadcast", ALL, [800] * 4 + [0] * 4),
        ("send", REPLICATE, [800] * 8),
    ],
)
def test_bytes_leave_a_node_where_a_ring_does(kind, axes, by_rank):
    told = Forecast((Traffic(route=Route(kind, axes, 800), count=1, what=""),))
    twice = replace(told, traffic=(replace(told.traffic[0], count=2),))
    found = [leaving_bytes(MESH, told, rank, 4) for rank in range(8)]
    assert found == by_rank
    assert [leaving_bytes(MESH, twice, rank, 4) for rank in range(8)] == [2 * n for n in found]


def test_a_stage_in_the_middle_sends_to_both_sides():
    mesh = Mesh.of({"pp": 4, "dp_replicate": 2})
    told = Forecast((Traffic(route=Route("send", ("pp",), 100), count=2, what=""),))
    # Stages 0 and 1 are on one node, 2 and 3 on the other.
    assert [leaving_bytes(mesh, told, rank, 4) for rank in (0, 2, 4, 6)] == [0, 100, 100, 0]


def made(plan, told_s, seconds):
    return Row(plan=plan, speed="1gbit", told_s=told_s, seconds=(seconds,), told_bytes=(100.0,),
               sent_bytes=(104.0,), unknown=())  # fmt: skip


def test_figures_of_the_order():
    rows = [made("a", 1.0, 11.0), made("b", 2.0, 10.0), made("c", 3.0, 30.0), made("d", None, 1.0)]
    assert spearman(rows) == pytest.approx(0.5)
    assert regret(rows) == pytest.approx(0.1)
    assert rows[0].bytes_error == pytest.approx(1 - 100 / 104)
    assert ranks_of([30.0, 10.0, 10.0]) == [2.0, 0.5, 0.5]


SLOW, EVEN = "25mbit", "50mbit"
"""Links of a node that are half as fast as what a rank sends inside it, and as fast."""
FULL, HYBRID, ACROSS = "full_shard", "hybrid, a node a replica", "tp across x full_shard"


@pytest.mark.wide
def test_a_hybrid_loses_its_lead_over_links_that_are_fast(tmp_path):
    """HYBRID_SHARD sends a third as much between nodes, and one collective more after the other."""
    if why := why_none(limits=True):
        pytest.skip(why)
    chosen = (FULL, HYBRID, ACROSS)
    rows = measure(2, (SLOW, EVEN), tmp_path, inside="200mbit", plans=chosen, timeout_s=540)
    assert [(row.plan, row.speed) for row in rows] == [(p, s) for p in chosen for s in (SLOW, EVEN)]
    for row in rows:
        assert row.unknown == ()
        # A megabyte in many small all-reduces: what gloo adds to each of them is 4 % of it.
        assert row.bytes_error < (0.05 if row.plan == ACROSS else 0.02), row
    at = {(row.plan, row.speed): row for row in rows}
    # Busy processors lengthen both plans, which brings the ratios nearer to 1.
    for speed, is_slower, least, most in ((SLOW, True, 1.2, 2.0), (EVEN, False, 0.5, 1.1)):
        full, hybrid = at[FULL, speed], at[HYBRID, speed]
        assert full.told_s is not None
        assert hybrid.told_s is not None
        assert (full.told_s > hybrid.told_s) == is_slower, speed
        assert least < full.median_s / hybrid.median_s < most, speed
