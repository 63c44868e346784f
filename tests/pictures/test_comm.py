"""The picture of who sends how much to whom."""

from __future__ import annotations

import numpy as np
import pytest

from meshplan.pictures.main import draw
from meshplan.pictures.mesh.comm import comm
from meshplan.pictures.mesh.links import links_of
from tests.helpers.graphs import blocks
from tests.helpers.pictured import PIPED, boxes, check_readable, llama, plan_of, written


def test_the_matrix_has_what_each_rank_sends():
    plan = llama(4)
    facts = comm(plan)
    assert facts.matrix.shape == (16, 16)
    assert facts.matrix.sum(axis=1) == pytest.approx([facts.sent_bytes] * 16)
    assert not facts.matrix.diagonal().any()
    across = facts.matrix[:8, 8:].sum() + facts.matrix[8:, :8].sum()
    assert across == pytest.approx(facts.crossing_bytes)
    gather = next(lane for lane in facts.lanes if lane.kind == "all_gather")
    # Gathered for forward and backward of four microbatches, and what forward does not give back
    # for the first of them, in bfloat16.
    root = sum(
        p.info.numel for p in plan.assignment.tensors.values()
        if not p.info.is_buffer and p.unit == ""
    )  # fmt: skip
    inner = plan.graph.num_params - root
    assert gather.pair_bytes * 8 == 2 * (8 * inner + root)
    picture = draw(plan, "comm")
    cells = boxes(picture.figure, "cell ")
    assert len(cells) == 256
    assert picture.title.startswith("Rank 0 sends ")
    check_readable(picture.figure)


def test_pairs_are_the_same_whichever_way_they_are_counted():
    whole = comm(llama(2, mesh={"dp_shard": 16}, strategy="full_shard"))
    by_hand = np.full((16, 16), whole.matrix[0, 1])
    np.fill_diagonal(by_hand, 0.0)
    assert whole.matrix == pytest.approx(by_hand)
    nodes = {"nodes": 8, "gpus_per_node": 8, "gpu": "h100-sxm-80gb"}
    folded = comm(llama(2, mesh={"dp_replicate": 8, "dp_shard": 8}, hardware=nodes))
    assert (folded.per_cell, folded.matrix.shape) == (8, (8, 8))
    assert folded.matrix.sum() == pytest.approx(64 * folded.sent_bytes)


def test_a_pipeline_sends_to_the_stages_beside_it():
    plan = llama(4, **PIPED)
    facts = comm(plan)
    assert not facts.unknown
    assert facts.is_computed
    micro = 2 * 4 * 2048 * 4096  # bfloat16 of a step's samples at one cut
    beside = [facts.matrix[a, b] for r in range(12) for a, b in ((r, r + 4), (r + 4, r))]
    # Words of bytes on top: whether every stage went well.
    assert beside == pytest.approx([micro] * 24, abs=100)
    assert facts.matrix[:4, 8:].max() < 100
    middle = links_of(plan, 4)
    data = {lane.kind: lane for lane in middle.lanes if lane.axes == ("dp_shard",)}
    tensors, stages = plan.assignment.tensors, plan.assignment.stages
    stage = [
        tensors[f] for f, at in stages.tensors.items() if 1 in at and not tensors[f].info.is_buffer
    ]
    held = sum(p.info.numel for p in stage if p.stored.dim_of("tp") is not None) // 2
    held += sum(p.info.numel for p in stage if p.stored.dim_of("tp") is None)
    # Each of four microbatches reduces the gradients of the stage, in float32, between two.
    assert data["reduce_scatter"].pair_bytes == 4 * 4 * held / 2
    assert data["all_gather"].pair_bytes > 0
    assert next(lane for lane in middle.lanes if lane.kind == "send").sent_bytes == 2 * micro
    check_readable(draw(plan, "comm", rank=4).figure)


def test_what_is_not_known_is_said():
    stated = {"mesh": {"tp": 2, "dp_shard": 2}, "strategy": "full_shard"}
    rules = [{"match": "layers.*.{attn.wq,up}", "place": {"tp": "colwise"}},
             {"match": "layers.*.{attn.wo,down}", "place": {"tp": "rowwise"}}]  # fmt: skip
    picture = draw(plan_of(blocks(), rules=rules, **stated), "comm")
    assert "at least" in picture.title
    assert any(
        "Unknown, and not counted: what activations send" in t for t in written(picture.figure)
    )
