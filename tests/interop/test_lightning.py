"""`meshplan.interop.lightning`: a Trainer under a plan has the numbers of one process.

Which seeded bug would this catch? Samplers that count ranks along tp or pp, gradients that are
reduced or divided once too often while they accumulate, a norm of one rank's shards, metrics that
count copies, a checkpoint of one rank's shards, gradients of a pipeline that Lightning zeroes, and
stages that stay in evaluation mode after a validation.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from meshplan.errors import PlanError, StateError

pytest.importorskip("lightning", reason="lightning is not installed: pip install -e '.[lightning]'")

PLANS = ("ddp", "zero2", "full_shard", "hybrid", "tp_fsdp", "pp_fsdp", "cp_fsdp", "ep_fsdp")
FAST = ("tp_fsdp", "pp_fsdp")


def lit():
    return importlib.import_module("tests.helpers.lit")


# Functions of the pool's ranks, which import Lightning there.


def planned(*args, **kwargs):
    return lit().planned(*args, **kwargs)


def fitted(*args):
    return lit().fitted(*args)


def script(*args):
    return lit().script_planned(*args)


def fabric(*args):
    return lit().fabric_planned(*args)


def refused(kind):
    return lit().refused(kind)


def refusals(*kinds):
    return {kind: lit().refused(kind) for kind in kinds}


def fabric_refused():
    return lit().fabric_refused()


def clipped_by_hand(*kinds):
    return [lit().clipped_by_hand(by) for by in kinds]


def in_float64(name):
    return lit().in_float64(name)


def plans(fast):
    return [name if name in fast else pytest.param(name, marks=pytest.mark.wide) for name in PLANS]


@pytest.fixture(scope="module")
def one_process():
    return lit().alone()


@pytest.mark.parametrize("name", plans(FAST))
def test_all_numbers_are_those_of_one_process(pool, one_process, name):
    ranks = lit().data_ranks(name)
    seen = set()
    for found in pool(4).run(planned, name, timeout=240):
        assert found["losses"] == pytest.approx(one_process["losses"], rel=1e-6)
        for key in ("val_loss", "hits", "test_loss", *(["epoch"] if "pp" not in name else [])):
            assert found[key] == pytest.approx(one_process[key], rel=1e-6), key
        if name == "ddp":  # DistributedDataParallel is told which backward is the last one.
            assert found["syncs"] == [False, True, True] * 2
        # Each data rank predicts every so-manieth sample; under cp, the last token is on one rank.
        for index in range(ranks):
            expected = one_process["predicted"][index::ranks]
            if torch.allclose(found["predicted"], expected, atol=1e-5):
                seen.add(index)
    assert seen == set(range(ranks))


@pytest.mark.parametrize("name", plans(("pp_fsdp",)))
def test_losses_of_a_model_in_float64_have_all_their_digits(pool, name):
    """A loss of stages that is handed on in float32 is 1e-8 apart."""
    expected = lit().in_float64()
    for found in pool(4).run(in_float64, name, timeout=240):
        assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.wide
@pytest.mark.parametrize("name", ["full_shard", "tp_fsdp", "pp_fsdp"])
def test_tokens_are_weighted_by_their_number(pool, name):
    expected = lit().alone(masks=True)["predicted"]
    ranks = lit().data_ranks(name)
    seen = set()
    for found in pool(4).run(planned, name, masks=True, timeout=240):
        for index in range(ranks):
            if torch.allclose(found["predicted"], expected[index::ranks], atol=1e-5):
                seen.add(index)
    assert seen == set(range(ranks))


@pytest.mark.wide
def test_what_the_trainer_leaves_open_is_the_plans(pool, one_process):
    more = {"accumulate_grad_batches": 1, "gradient_clip_val": None}
    extra = {"batch": {"accumulate": 2}, "clip_grad_norm": 0.5}
    for found in pool(4).run(planned, "full_shard", extra=extra, **more, timeout=240):
        assert found["losses"] == pytest.approx(one_process["losses"], rel=1e-6)


@pytest.mark.parametrize(
    ("before", "after"),
    [("full_shard", "tp_fsdp"), *(pytest.param(*pair, marks=pytest.mark.wide) for pair in (
        ("tp_fsdp", "pp_fsdp"), ("pp_fsdp", "ddp"), ("ddp", "hybrid")))],
)  # fmt: skip
def test_a_job_that_died_goes_on_under_another_plan(pool, tmp_path: Path, before, after):
    alone = tmp_path / "alone"
    died = lit().fitted("", str(alone), 9, False, 5)
    expected = lit().fitted("", str(alone), 9, True)
    folder = tmp_path / "planned"
    for found in pool(4).run(fitted, before, str(folder), 9, False, 5, timeout=240):
        assert found["losses"] == pytest.approx(died["losses"], rel=1e-6)
    assert {each.name for each in folder.iterdir()} == {"epoch=0-step=3.ckpt", "last.ckpt"}
    written = {each.suffix for each in folder.rglob("*") if each.is_file()}
    assert written == {".safetensors", ".json"}  # Nothing is pickled.
    for found in pool(4).run(fitted, after, str(folder), 9, True, timeout=240):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6)
        for key in ("step", "epoch", "rate", "best"):
            assert found[key] == expected[key], key
        assert found["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-6)


TP = {"mesh": {"dp_shard": 2, "tp": 2},
      "rules": [{"match": "0", "place": {"tp": "colwise"}},
                {"match": "2", "place": {"tp": "rowwise"}}]}  # fmt: skip
SCRIPTS = [
    ("autoencoder", {"strategy": "full_shard"}, 4),
    *(pytest.param(*case, marks=pytest.mark.wide) for case in (
        ("autoencoder", {"strategy": "ddp"}, 4),
        ("classifier", {"strategy": "ddp"}, 4),
        ("classifier", {"strategy": "hybrid_shard", "mesh": [2, 2]}, 4),
        ("classifier", TP, 2),
        ("adversarial", {"strategy": "ddp"}, 4),
        ("adversarial", {"strategy": "full_shard"}, 4),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("name", "plan", "ranks"), SCRIPTS)
def test_scripts_run_as_they_are(pool, name, plan, ranks):
    expected = lit().script_alone(name)
    for found in pool(4).run(script, name, {"version": 1, **plan}, ranks, timeout=240):
        assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.wide
@pytest.mark.parametrize("name", ["ddp", "full_shard", "tp_fsdp"])
def test_a_loop_of_fabric(pool, tmp_path: Path, name):
    expected = lit().fabric_alone()
    for losses, before, after, number in pool(4).run(
        fabric, name, str(tmp_path / "state"), timeout=240
    ):
        assert losses == pytest.approx(expected, rel=1e-6)
        assert number == 3
        # The state of the second step: the sixth batch has again the loss that it had after it.
        assert after == pytest.approx(losses[-1:], rel=1e-6)
        assert before != pytest.approx(losses[-1:], rel=1e-4)


@pytest.mark.parametrize(
    ("kind", "words"),
    [("loss", "define meshplan_loss(self, output, batch)"),
     pytest.param("penalty", "head.weight is used by", marks=pytest.mark.wide),
     pytest.param("clip", "the Trainer clips gradients at 0.5, but the plan at the norm 0.1",
                  marks=pytest.mark.wide),
     pytest.param("accumulate", "over 2 batches, but the plan over 3", marks=pytest.mark.wide),
     pytest.param("same", "same samples", marks=pytest.mark.wide),
     pytest.param("two", "configure_optimizers made 2 optimizers", marks=pytest.mark.wide)],
)  # fmt: skip
def test_contradictions_are_refused_on_every_rank(pool, kind, words):
    for found in pool(4).run(refused, kind, timeout=240):
        assert words in found


MANUAL = {
    "two_scaled": "2 optimizers of one model cannot step one by one",
    "manual_clip": "call self.clip_gradients(optimizer, gradient_clip_val=0.1",
    "manual_accumulate": "accumulates gradients over 3 microbatches, which the Trainer leaves to",
}


def test_what_manual_optimization_would_ignore_is_refused(pool):
    for found in pool(4).run(refusals, *MANUAL, timeout=240):
        for kind, words in MANUAL.items():
            assert words in found[kind]


def test_manual_clipping_is_of_unscaled_gradients(pool):
    for by_norm, by_value in pool(4).run(clipped_by_hand, "norm", "value", timeout=240):
        assert by_norm[0] == pytest.approx(0.01, rel=1e-3)
        assert by_value[1] == pytest.approx(0.01, rel=1e-3)


FABRIC = {
    "pp": "a loop of Fabric calls backward itself, but a pipeline runs its own",
    "cp": "whole sequences, which cp cuts",
    "clip": "call fabric.clip_gradients(model, optimizer, max_norm=0.5)",
    "accumulate": "fabric.no_backward_sync(model)",
    "two": "2 optimizers of one model cannot step one by one",
    "late": "backward was called between clipping and the optimizer's step",
}


def test_what_a_loop_of_fabric_would_ignore_is_refused(pool):
    for found in pool(4).run(fabric_refused, timeout=240):
        for kind, words in FABRIC.items():
            assert words in found[kind]


@pytest.mark.wide
def test_a_failure_of_one_rank_ends_all(pool):
    found = pool(4).run(refused, "fails", timeout=240)
    assert found[1] == "ValueError: a bad sample"
    for rank in (0, 2, 3):
        assert "rank 1 failed: ValueError: a bad sample" in found[rank]
    pool(4).close()  # Its process group is gone.


def strategy(plan):
    return importlib.import_module("meshplan.interop.lightning").MeshplanStrategy(plan)


def test_ranks_are_counted_before_any_is_started():
    with pytest.raises(PlanError, match=r"mesh has 8 ranks, but devices=4 and num_nodes=1 make 4"):
        lit().trainer(strategy({"version": 1, "mesh": {"dp_shard": 8}}), 4)


def test_another_precision_is_refused_with_both():
    plan = {"version": 1, "strategy": "full_shard", "precision": "bf16-mixed"}
    with pytest.raises(
        PlanError, match=r"'bf16-true' was given, but the plan states precision: bf16-mixed"
    ):
        lit().trainer(strategy(plan), 1, precision="bf16-true")
    assert lit().trainer(strategy(plan), 1).precision == "bf16-mixed"


def test_batch_norm_over_all_ranks_is_the_plans():
    plan = {"version": 1, "strategy": "ddp"}
    with pytest.raises(PlanError, match=r"state sync_batchnorm: true in the plan"):
        lit().trainer(strategy(plan), 1, sync_batchnorm=True)
    lit().trainer(strategy({**plan, "sync_batchnorm": True}), 1, sync_batchnorm=True)


def test_the_alias_finds_its_plan(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MESHPLAN_PLAN", raising=False)
    with pytest.raises(PlanError, match=r"plan.yaml is not a file"):
        lit().trainer("meshplan", 1)
    (tmp_path / "plan.yaml").write_text("version: 1\nstrategy: full_shard\n")
    assert lit().trainer("meshplan", 1).strategy.spec.strategy == "full_shard"
    (tmp_path / "other.yaml").write_text("version: 1\nstrategy: ddp\n")
    monkeypatch.setenv("MESHPLAN_PLAN", "other.yaml")
    assert lit().trainer("meshplan", 1).strategy.spec.strategy == "ddp"


def test_a_file_of_lightning_is_refused_with_the_way(tmp_path: Path):
    from meshplan.interop.lightning.states import find_saved

    torch.save({}, tmp_path / "old.ckpt")
    with pytest.raises(StateError, match=r"single file of Lightning"):
        find_saved(tmp_path / "old.ckpt")
