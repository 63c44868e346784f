"""Some cells of tests/bench/verify_verdicts.py: right plans are ok, and seeded bugs are found."""

from __future__ import annotations

import math

import pytest

from meshplan.render.verify import verdict_to_json, verdict_to_text
from tests.bench.verify_verdicts import Cell, judge, nearness, right_cells, wrong_cells

RIGHT = [
    Cell("mlp", "full_shard", "32-true"),
    Cell("twins", "ddp", "bf16-true"),
    Cell("experts", "tp", "32-true"),  # What several modules read is added up for each of them.
    Cell("mlp", "ddp", "16-mixed"),
    Cell("autoencoder", "pp x fsdp", "bf16-mixed"),
]
WRONG = [
    Cell("autoencoder", "full_shard", "bf16-mixed", "lost buffers"),
    Cell("twins", "ddp", "32-true", "another constant"),
    Cell("gpt", "full_shard", "bf16-mixed", "gradients not reduced"),
    Cell("encoder", "ddp", "bf16-mixed", "one gradient lost"),
    Cell("unet", "full_shard", "bf16-mixed", "a stale weight"),
    Cell("mlp", "full_shard", "32-true", "outputs in bfloat16"),
]


@pytest.mark.parametrize("cell", RIGHT, ids=str)
def test_a_right_plan_is_ok(pools, cell):
    verdict = judge(cell, pools)
    assert verdict.refusal == ""
    assert verdict.is_ok, verdict.findings()
    assert nearness(verdict) < 1


@pytest.mark.parametrize("cell", WRONG, ids=str)
def test_a_seeded_bug_is_found(pools, cell):
    verdict = judge(cell, pools)
    assert verdict.refusal == ""
    assert not verdict.is_ok
    assert nearness(verdict) > 1


@pytest.mark.parametrize("syncs", [False, True])
def test_a_network_with_batch_norm_is_judged_in_half_precision(pools, syncs):
    """Its precision moves it by more than a fixed tolerance, and its statistics are its ranks'."""
    verdict = judge(Cell("unet", "full_shard", "bf16-mixed", syncs=syncs), pools)
    assert verdict.is_ok, verdict.findings()
    assert verdict.moved is not None
    assert verdict.moved.worst > verdict.tolerance.relative
    assert bool(verdict.own_statistics) is not syncs
    told = "\n".join(verdict_to_text(verdict, "plan"))
    assert ("compute those of BatchNorm over all samples" in told) is not syncs


def test_every_comparison_says_what_is_allowed(pools):
    verdict = judge(Cell("mlp", "ddp", "32-true", "gradients half"), pools)
    rows = verdict_to_json(verdict)["comparisons"]
    assert [row["what"] for row in rows] == [
        *["loss"] * 3, *["gradient norm"] * 2, "parameters", "bytes held", "collectives",
    ]  # fmt: skip
    for row in rows:
        assert math.isfinite(row["allowed"])
        assert row["ok"] is (row["difference"] <= row["allowed"])
    found = {row["what"] for row in rows if not row["ok"]}
    assert found == set(verdict.findings()) == {"loss", "gradient norm", "parameters"}
    lines = verdict_to_text(verdict, "plan")
    assert "difference" in lines[1]
    assert "allowed" in lines[1]
    steps = [line for line in lines if line.startswith(("loss, step", "gradient norm, step"))]
    assert [line.split()[-1] for line in steps] == ["ok", *["DIFFERENT"] * 4]


def test_the_bench_has_enough_cells():
    right, wrong = list(right_cells()), list(wrong_cells())
    assert len(set(right)) == len(right) >= 60
    assert len(set(wrong)) == len(wrong) >= 60
    assert len({cell.bug for cell in wrong}) >= 20
