"""`planned_state`: accelerate's `save_state` and `load_state` with the state of a plan.

Which seeded bug would this catch? A momentum of one rank's shards, a scheduler that starts again, a
generator that accelerate sets to that of another rank, and a state that is saved once only.
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
