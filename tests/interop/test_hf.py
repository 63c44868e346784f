"""`meshplan.trainer`: transformers' Trainer under a plan has the numbers of one process.

Which seeded bug would this catch? Tokens counted once for each rank along tp, losses scaled by the
number of all ranks, a norm of one rank's shards, evaluated samples that count twice, and a
checkpoint that one rank alone wrote.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import meshplan
from meshplan.errors import ApplyError

pytest.importorskip("accelerate", reason="accelerate is not installed: pip install -e '.[dev]'")
pytest.importorskip("lightning", reason="lightning is not installed: its helpers start the ranks")

PLANS = ("ddp", "full_shard", "hybrid", "tp_fsdp", "pp")


def jobs():
    return importlib.import_module("tests.helpers.hf_jobs")


# Functions of the pool's ranks, which import transformers' Trainer there.


def alone(*args):
    return jobs().alone(*args)


def planned(*args):
    return jobs().planned(*args)


def refused(name, folder, more):
    return jobs().refused(name, folder, **more)


def errors_at_construction(folder):
    with jobs().launched():
        return jobs().errors_at_construction(folder)


def errors_of_batches(folder):
    with jobs().launched():
        return jobs().errors_of_batches(folder)


def check(found, expected):
    for key in ("losses", "norms", "eval_loss"):
        assert found[key] == pytest.approx(expected[key], rel=1e-6), key
    for key in ("step", "tokens", "accumulate"):
        assert found[key] == expected[key], key
    assert found["flops"] == pytest.approx(expected["flops"], rel=1e-3)  # Cut to whole numbers.
    assert found["predicted"].shape == expected["predicted"].shape
    assert torch.allclose(found["predicted"], expected["predicted"], atol=1e-5)
    assert found["kept"] == expected["kept"]
    assert torch.allclose(found["means"], expected["means"], rtol=1e-5)
    assert found["logged"] == expected["logged"]


@pytest.mark.parametrize(
    "name",
    [each if each == "tp_fsdp" else pytest.param(each, marks=pytest.mark.wide) for each in PLANS],
)
def test_all_numbers_are_those_of_one_process(pool, tmp_path: Path, name):
    (expected,) = pool(1).run(alone, str(tmp_path / "alone"), timeout=240)
    for found in pool(4).run(planned, name, str(tmp_path / "planned"), timeout=240):
        check(found, expected)


@pytest.mark.wide
@pytest.mark.parametrize("name", ["full_shard", "pp"])
@pytest.mark.parametrize(
    "loss",
    [
        "function",
        "smoothing",
        "own",
        "pictures",
        "mean",
        "scores",
        "adapters",
        "gathering",
        "step",
        "beside",
    ],
)
def test_losses_of_ones_own_are_those_of_one_process(pool, tmp_path: Path, name, loss):
    if loss == "adapters":
        pytest.importorskip("peft", reason="peft is not installed: pip install peft")
    (expected,) = pool(1).run(alone, str(tmp_path / "alone"), False, 1, loss, timeout=240)
    for found in pool(4).run(planned, name, str(tmp_path / "at"), False, 1, loss, timeout=240):
        check(found, expected)


@pytest.mark.parametrize("name", ["full_shard", pytest.param("pp", marks=pytest.mark.wide)])
def test_values_that_all_samples_share_are_those_of_one_process(pool, tmp_path: Path, name):
    (expected,) = pool(1).run(alone, str(tmp_path / "alone"), False, 1, "shared", timeout=240)
    for found in pool(4).run(planned, name, str(tmp_path / "at"), False, 1, "shared", timeout=240):
        check(found, expected)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("how", "words"),
    [("dependent", "for its parts together, into which a pipeline cuts it"),
     ("contrasting", "for its parts together, into which a pipeline cuts it"),
     ("unstated", "set trainer.loss_is_scaled_for_ga = False for a mean over the samples"),
     ("twice", "compute_loss calls the model twice"),
     ("embedding", "compute_loss runs an Embedding, but a pipeline's last stage has the"),
     ("trained", "compute_loss runs trainer.model beside the model that it is given, and needs"),
     ("turned", "compute_loss runs the model beside on other values than those of the batch"),
     ("steps", "a training_step runs forward and backward twice on one microbatch")],
)  # fmt: skip
def test_losses_that_no_last_stage_can_compute_are_refused(pool, tmp_path: Path, how, words):
    for found in pool(4).run(refused, "pp", str(tmp_path), {"how": how}, timeout=240):
        assert words in found


@pytest.mark.wide
@pytest.mark.parametrize(
    ("before", "after"), [("full_shard", "pp"), ("pp", "tp_fsdp"), ("tp_fsdp", "ddp")]
)
def test_a_checkpoint_goes_on_under_another_plan(pool, tmp_path: Path, before, after):
    folder = str(tmp_path / "planned")
    (expected,) = pool(1).run(alone, str(tmp_path / "alone"), timeout=240)
    pool(4).run(planned, before, folder, False, 1, timeout=240)
    written = {each.name for each in (tmp_path / "planned" / "checkpoint-3").iterdir()}
    assert {"config.json", "meshplan", "trainer_state.json"} < written
    endings = {each.suffix for each in (tmp_path / "planned").rglob("*") if each.is_file()}
    assert endings == {".safetensors", ".json"}  # Nothing is pickled.
    for found in pool(4).run(planned, after, folder, True, 2, timeout=240):
        assert found["losses"] == pytest.approx(expected["losses"][3:], rel=1e-6)
        assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-6)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "more", "words"),
    [("full_shard", {"loss": "tokens"}, "the Trainer weights tokens itself"),
     ("full_shard", {"batch": {"accumulate": 4}}, "gradient_accumulation_steps is 2"),
     ("full_shard", {"clip_grad_norm": 0.1}, "max_grad_norm is 0.5, but the plan clips at 0.1")],
)  # fmt: skip
def test_contradictions_are_refused_on_every_rank(pool, tmp_path: Path, name, more, words):
    for found in pool(4).run(refused, name, str(tmp_path), more, timeout=240):
        assert words in found


def test_a_trainer_of_another_version_is_refused(monkeypatch):
    """It would not call what takes the place of its methods, and train without the plan."""
    from transformers import Trainer

    monkeypatch.delattr(Trainer, "_prepare_for_training")
    with pytest.raises(ApplyError, match="has no _prepare_for_training"):
        meshplan.trainer(Trainer)


AT_CONSTRUCTION = {
    "compile": ("torch_compile=True was given", "say compile: true in the plan"),
    "fsdp": ("fsdp= was given", "the plan states how the model is sharded"),
    "fsdp_config": ("fsdp_config= was given", "leave it out"),
    "deepspeed": ("deepspeed= was given", "meshplan import translates the file"),
    "parallelism": ("parallelism_config= was given", "leave it out"),
    "environment": ("the environment has ACCELERATE_USE_FSDP=true", "unset ACCELERATE_USE_FSDP"),
    "checkpointing": ("gradient_checkpointing=True was given", "activation_checkpointing: full"),
    "dispatch": ("accelerator_config.dispatch_batches=True was given", "leave it out"),
    "rebalance": ("train_sampling_strategy='batch_rebalance' was given", "use 'group_by_length'"),
    "split": ("accelerator_config.split_batches=True was given", "leave it out"),
    "best": ("load_best_model_at_end=True needs the state", "leave out one of them"),
    "scheduler": ("optimizers= was given", "override create_scheduler"),
    "positional": ("optimizers= was given", "optimizer_cls_and_kwargs="),
    "init": ("model_init was given", "pass model=model_init()"),
    "unreadable": ("SpecError", "no such"),
}


def test_arguments_that_no_plan_leaves_room_for_are_refused_at_construction(pool, tmp_path: Path):
    for found in pool(4).run(errors_at_construction, str(tmp_path), timeout=240):
        assert found.pop("nothing") == ""
        assert found.keys() == AT_CONSTRUCTION.keys()
        for name, words in AT_CONSTRUCTION.items():
            assert all(each in found[name] for each in words), (name, found[name])


def test_batches_that_both_state_must_agree(pool, tmp_path: Path):
    one = "gradient_accumulation_steps is 2, but the plan accumulates over 1"
    for found in pool(4).run(errors_of_batches, str(tmp_path), timeout=240):
        assert [found[name] for name in ("nothing", "same", "global")] == ["", "", ""]
        assert "per_device_train_batch_size is 4, but a microbatch of the plan" in found["micro"]
        assert one in found["one"]
        assert one in found["derived"]
        assert "microbatch of the plan has 2 samples" in found["derived_micro"]


def test_a_loss_that_no_pipeline_can_record_is_refused():
    from meshplan.interop.trainer_arguments import recording_problems
    from meshplan.runtime.parallelize import spec_of

    def found(loss_type, **plan):
        runner = SimpleNamespace(args=SimpleNamespace(loss_type=loss_type, world_size=2))
        return recording_problems(runner, spec_of({"version": 1, **plan}))

    pipeline = {"mesh": {"pp": 2}}
    (problem,) = found("chunked_nll", **pipeline)
    assert "loss_type='nll'" in problem.fix
    assert found("nll", **pipeline) == found("chunked_nll", strategy="ddp") == []
