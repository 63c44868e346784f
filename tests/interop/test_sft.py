"""`meshplan.trainer(SFTTrainer)`: TRL's loop with adapters of peft has the numbers of one process.

Which seeded bug would this catch? An evaluation that takes the mean of the ranks' means although
they have different numbers of tokens, tokens that count once for each rank along tp, adapters that
are not reduced, checkpoints with the base in them, metrics of the parts of a pipeline's batch, and
tokens that attend to those of another sample in their row.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("accelerate", reason="accelerate is not installed: pip install -e '.[dev]'")
pytest.importorskip("lightning", reason="lightning is not installed: its helpers start the ranks")
for package in ("peft", "datasets", "trl"):
    pytest.importorskip(package, reason=f"{package} is not installed: pip install {package}")


def jobs():
    return importlib.import_module("tests.helpers.sft_jobs")


# Functions of the pool's ranks, which import TRL there.


def alone(*args):
    return jobs().alone(*args)


def planned(*args):
    return jobs().planned(*args)


def packed(*args):
    return jobs().packed(*args)


def refused(name, folder, more):
    return jobs().refused(name, folder, **more)


@pytest.mark.parametrize(
    ("name", "smoothing"),
    [
        ("pp", 0.1),  # Which runs the model twice.
        *(pytest.param(each, 0.0, marks=pytest.mark.wide)
          for each in ("ddp", "hybrid", "tp_fsdp", "pp")),
    ],
)  # fmt: skip
def test_all_numbers_are_those_of_one_process(pool, tmp_path: Path, name, smoothing):
    is_whole = name == "pp"
    (expected,) = pool(1).run(alone, str(tmp_path / "alone"), smoothing, is_whole, timeout=240)
    for found in pool(4).run(
        planned, name, str(tmp_path / "planned"), False, 2, smoothing, is_whole, timeout=240
    ):
        for key in ("losses", "norms", "eval_loss", "accuracy"):
            assert found[key] == pytest.approx(expected[key], rel=1e-6), key
        assert np.array(found["metrics"]) == pytest.approx(np.array(expected["metrics"]), rel=1e-6)
        assert (found["step"], found["tokens"]) == (expected["step"], expected["tokens"])
        assert {"adapter_config.json", "adapter_model.safetensors"} < set(found["files"])
        assert {"tokenizer.json", "tokenizer_config.json"} < set(found["files"])
        assert not [each for each in found["files"] if each.startswith("model")]
        assert found["adapters"].keys() == expected["adapters"].keys()
        for key, value in expected["adapters"].items():
            assert torch.allclose(found["adapters"][key], value, rtol=1e-6, atol=1e-9), key


@pytest.mark.wide
@pytest.mark.parametrize(("before", "after"), [("hybrid", "pp"), ("pp", "tp_fsdp")])
def test_a_checkpoint_goes_on_under_another_plan(pool, tmp_path: Path, before, after):
    folder = str(tmp_path / "planned")
    (expected,) = pool(1).run(alone, str(tmp_path / "alone"), 0.0, True, timeout=240)
    pool(4).run(planned, before, folder, False, 1, 0.0, True, timeout=240)
    for found in pool(4).run(planned, after, folder, True, 2, 0.0, True, timeout=240):
        for key in ("losses", "norms"):
            assert found[key] == pytest.approx(expected[key][3:], rel=1e-6), key
        assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("name", "more", "words"),
    [
        ("ddp", {"gradient_checkpointing": True}, "and say activation_checkpointing: full in the"),
        ("ddp", {"activation_offloading": True}, "and say offload: {activations: true} in the"),
        ("pp", {"packing": True}, "fix: say packing_strategy='wrapped', or use a plan without pp"),
        ("pp", {"padding_free": True, "max_length": None}, "fix: leave it out, or use a plan"),
    ],
)
def test_what_the_plan_decides_is_refused(pool, tmp_path: Path, name, more, words):
    for found in pool(4).run(refused, name, str(tmp_path), more, timeout=240):
        assert "meshplan: 1 problem" in found
        assert words in found


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("padding_free", "tp_fsdp"),
        *(pytest.param(*each, marks=pytest.mark.wide)
          for each in (("padding_free", "ddp"), ("bfd", "tp_fsdp"), ("bfd", "hybrid"))),
        # A pipeline cuts batches, and its refusal of the others names this one.
        pytest.param("wrapped", "pp", marks=pytest.mark.wide),
    ],
)  # fmt: skip
def test_rows_of_several_samples_train_as_in_one_process(pool, tmp_path: Path, kind, name):
    (expected,) = pool(1).run(packed, "", str(tmp_path / "alone"), kind, timeout=240)
    for found in pool(4).run(packed, name, str(tmp_path / "planned"), kind, timeout=240):
        for key in ("losses", "norms", "eval_loss", "tokens"):
            assert found[key] == pytest.approx(expected[key], rel=1e-6), key
