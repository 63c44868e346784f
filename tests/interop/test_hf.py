"""`meshplan.trainer`: transformers' Trainer under a plan has the numbers of one process.

Which seeded bug would this catch? Tokens counted once for each rank along tp, losses scaled by the
number of all ranks, a norm of one rank's shards, evaluated samples that count twice, and a
checkpoint that one rank alone wrote.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

pytest.importorskip("accelerate", reason="accelerate is not installed: pip install -e '.[dev]'")
pytest.importorskip("lightning", reason="lightning is not installed: its helpers start the ranks")

PLANS = ("ddp", "full_shard", "hybrid", "tp_fsdp")


def jobs():
    return importlib.import_module("tests.helpers.hf_jobs")


# Functions of the pool's ranks, which import transformers' Trainer there.


def alone(*args):
    return jobs().alone(*args)


def planned(*args):
    return jobs().planned(*args)


def refused(name, folder, more):
    return jobs().refused(name, folder, **more)


def check(found, expected):
    for key in ("losses", "norms", "eval_loss"):
        assert found[key] == pytest.approx(expected[key], rel=1e-6), key
    assert found["step"] == expected["step"]
    assert found["predicted"].shape == expected["predicted"].shape
    assert torch.allclose(found["predicted"], expected["predicted"], atol=1e-5)


@pytest.mark.parametrize(
    "name",
    [each if each == "tp_fsdp" else pytest.param(each, marks=pytest.mark.wide) for each in PLANS],
)
def test_all_numbers_are_those_of_one_process(pool, tmp_path: Path, name):
    (expected,) = pool(1).run(alone, str(tmp_path / "alone"), timeout=240)
    for found in pool(4).run(planned, name, str(tmp_path / "planned"), timeout=240):
        check(found, expected)


@pytest.mark.wide
@pytest.mark.parametrize(("before", "after"), [("full_shard", "tp_fsdp"), ("tp_fsdp", "ddp")])
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
    [("pp", {}, "a pipeline runs its own"),
     ("full_shard", {"loss": "tokens"}, "the Trainer weights tokens itself"),
     ("full_shard", {"batch": {"accumulate": 4}}, "gradient_accumulation_steps is 2"),
     ("full_shard", {"clip_grad_norm": 0.1}, "max_grad_norm is 0.5, but the plan clips at 0.1")],
)  # fmt: skip
def test_contradictions_are_refused_on_every_rank(pool, tmp_path: Path, name, more, words):
    for found in pool(4).run(refused, name, str(tmp_path), more, timeout=240):
        assert words in found
