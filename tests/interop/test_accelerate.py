"""`MeshplanAccelerator` and `planned_state`: accelerate's loops and states under a plan.

Which seeded bug would this catch? A momentum of one rank's shards, a scheduler that starts again, a
generator that accelerate sets to that of another rank, a state that is saved once only, an
optimizer that goes on with the parameters of before, and values of ranks along tp that count twice.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

pytest.importorskip("accelerate", reason="accelerate is not installed: pip install -e '.[dev]'")
pytest.importorskip("lightning", reason="lightning is not installed: its helpers start the ranks")


def jobs():
    return importlib.import_module("tests.helpers.accelerate_jobs")


# Functions of the pool's ranks, which import accelerate there.


def trained(*args):
    return jobs().trained(*args)


def errors(*args):
    return jobs().errors(*args)


@pytest.mark.parametrize(
    ("before", "after"),
    [("full_shard", "tp_fsdp"), pytest.param("tp_fsdp", "pp", marks=pytest.mark.wide)],
)
def test_a_state_goes_on_under_another_plan(pool, tmp_path: Path, before, after):
    folder = str(tmp_path / "state")
    expected = pool(4).run(trained, before, folder, False, timeout=240)
    assert len(list((tmp_path / "state/meshplan").iterdir())) == 1
    assert not list((tmp_path / "state").glob("*optimizer*"))
    found = pool(4).run(trained, after, folder, True, timeout=240)
    for was, now in zip(expected, found, strict=True):
        assert now["losses"] == pytest.approx(was["losses"][3:], rel=1e-9)
        assert now["drawn"] == was["drawn"]
        assert now["rate"] == was["rate"]
    assert found[0]["state"].keys() == expected[0]["state"].keys()
    for key, value in expected[0]["state"].items():
        assert torch.allclose(found[0]["state"][key], value, rtol=1e-9, atol=1e-12), key


def test_what_would_save_by_itself_is_refused(pool, tmp_path: Path):
    for found in pool(4).run(errors, str(tmp_path), timeout=240):
        assert found["good"] == ""
        assert "has a planned state already" in found["twice"]
        assert "this folder has no training state of meshplan" in found["missing"]
        assert "the model was passed to accelerator.prepare" in found["prepared"]
        assert "the optimizer was passed to accelerator.prepare" in found["prepared"]
        assert "mixed_precision='bf16', but the plan decides the precision" in found["half"]


def looped(*args):
    return jobs().looped(*args)


def values(*args):
    return jobs().values(*args)


def counted():
    return jobs().counted()


def syncs():
    return jobs().syncs()


def overflowed(*args):
    return jobs().overflowed(*args)


def loop_errors(*args):
    return jobs().loop_errors(*args)


@pytest.mark.wide
@pytest.mark.parametrize("splits", [True, False])
def test_a_loop_goes_on_under_another_plan(pool, tmp_path: Path, splits):
    (expected,) = pool(1).run(looped, "", str(tmp_path / "one"), False, splits, timeout=240)
    folder = str(tmp_path / "state")
    for found in pool(4).run(looped, "ddp", folder, False, splits, timeout=240):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6)
        assert found["rates"] == pytest.approx(expected["rates"], rel=1e-6)
    for rank, found in enumerate(pool(4).run(looped, "tp_fsdp", folder, True, splits, timeout=240)):
        if not splits:  # The schedule was one of four steps in each step of the optimizer.
            assert "take 4 steps in each step of the optimizer" in found
            assert "but 2 under this plan" in found
            assert "use split_batches=True" in found
            continue
        assert found["losses"] == pytest.approx(expected["losses"][3:], rel=1e-6)
        assert found["rates"] == pytest.approx(expected["rates"][3:], rel=1e-6)
        if rank == 0:
            assert found["state"].keys() == expected["state"].keys()
            for key, value in expected["state"].items():
                assert torch.allclose(found["state"][key], value, rtol=1e-6, atol=1e-9), key


def test_values_of_ranks_that_share_samples_count_once(pool, tmp_path: Path):
    for rank, found in enumerate(pool(4).run(values, str(tmp_path), timeout=240)):
        assert found["before"] == found["after"] == (2, rank // 2)
        assert found["gathered"] == [0, 7, 1, 7]
        assert found["reduced"] == [[1, 14], [0.5, 7], [1, 7]]
        assert found["samples"] == [[0, 1, 2, 3], [4, 5, 6]]
        assert found["objects"] == [["s0", "s1", "s2", "s3"], ["s4", "s5", "s6"]]
        assert found["is_last"] is (rank == 3)
        assert found["full"] == (found["saved"] if rank == 0 else 0)
        assert found["full"] or rank


def test_gradients_are_reduced_once_a_step(pool):
    for found in pool(4).run(syncs, timeout=240):
        assert found == [False, True, False, True, False]


def test_a_forward_counts_once_a_step(pool):
    for found in pool(4).run(counted, timeout=240):
        assert found == [1, 2, 3]


def test_a_step_that_overflowed_float16_is_skipped(pool):
    for found in pool(4).run(overflowed, timeout=240):
        assert found["skipped"] == [True, False, False]
        assert found["norms"][1] == pytest.approx(found["norms"][2], rel=0.05)
        assert found["norms"][1] < 100  # Gradients are unscaled before they are clipped.
        assert found["scales"] == [2.0**39, 2.0**10, 2.0**8]


LOOPS = {
    "states": ("Adagrad has states of the parameters", "prepare the model alone, then make"),
    "references": ("LBFGS keeps references of its own", "prepare the model alone, then make"),
    "optimizer_first": ("an optimizer was prepared before its model", "pass both to prepare"),
    "scheduler_first": ("a scheduler was prepared before its optimizer", "pass both to prepare"),
    "part": ("other parameters than all of the model's", "clip_grad_norm_(model.parameters(), "),
    "second": ("prepare was called for a second model", "parts of one module"),
    "two": ("prepare was called for a second optimizer", "several parameter groups"),
    "early": ("accelerator.backward was called before a model", "accelerator.prepare(model)"),
    "split": ("ranks of the plan share their samples", "inputs[accelerator.process_index ::"),
    "dispatch": ("dispatch_batches=True was given", "leave it out"),
    "uneven": ("even_batches=False lets ranks have unequal", "counts each sample once"),
    "handlers": ("DistributedDataParallelKwargs were given", "find_unused_parameters: true"),
    "pp": ("calls backward itself, but a pipeline", "parallelize(model, plan, example_inputs=("),
    "cp": ("has whole sequences, which cp cuts", "or use meshplan.trainer(Trainer)"),
    "clip": ("the plan clips gradients at the norm 0.5", "call accelerator.clip_grad_norm_(model"),
    "accumulate": ("over 3 microbatches", "pass gradient_accumulation_steps=3"),
    "tokens": ("loss: tokens, which a loop of accelerate", "accelerator.backward(meshplan.global_"),
    "open": ("leaves its mesh to the planner", "prepare the model before loaders"),
    "compile": ("given a dynamo backend", "say compile: true in the plan"),
    "fsdp": ("two strategies at once: fsdp_plugin was given", "leave it out; meshplan import"),
    "environment": ("the environment has ACCELERATE_USE_DEEPSPEED=true", "not with accelerate la"),
}


def test_loops_that_no_plan_suits_are_refused(pool):
    for found in pool(4).run(loop_errors, timeout=240):
        assert found.pop("good") == ""
        assert found.keys() == LOOPS.keys()
        for name, words in LOOPS.items():
            assert all(each in found[name] for each in words), (name, found[name])
