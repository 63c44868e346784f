"""A job of Lightning or of the Trainer of which a rank is killed goes on under another plan.

The job runs under torchrun, SIGKILL ends rank 1 between two checkpoints, and a second job with
another plan takes up the newest one. Losses are compared with one process that is never stopped.

Which seeded bug would this catch? A checkpoint that is whole only after the end of a job, a rank
that waits for the killed one, momentum or the place in the data that is not restored.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from tests.helpers.commands import output_of

pytest.importorskip("accelerate", reason="accelerate is not installed: pip install -e '.[dev]'")
pytest.importorskip("lightning", reason="lightning is not installed: pip install -e '.[lightning]'")

pytestmark = [pytest.mark.wide, pytest.mark.torchrun]

TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", 4)
JOB = Path(__file__).resolve().parents[1] / "helpers" / "killed.py"


def trained(*args):
    return importlib.import_module("tests.helpers.hf_jobs").alone(*args)


def expected_of(kind: str, folder: str, pool) -> list[float]:
    """The losses after the checkpoint, of one process."""
    if kind == "trainer":
        (found,) = pool(1).run(trained, folder, timeout=240)
        return found["losses"][3:]
    fitted = importlib.import_module("tests.helpers.lit").fitted
    fitted("", folder, 9, False, 5)
    return fitted("", folder, 9, True)["losses"]


@pytest.mark.parametrize(("before", "after"), [("full_shard", "pp_fsdp"), ("pp_fsdp", "tp_fsdp")])
def test_all_ranks_of_a_launched_job_are_killed(pool, tmp_path: Path, before, after):
    """As when a machine is switched off; `meshplan launch` starts both jobs."""
    expected = expected_of("lightning", str(tmp_path / "alone"), pool)
    assert len(set(expected)) > 3
    folder = tmp_path / "planned"
    plan = tmp_path / "plan.yaml"
    plan.write_text("version: 1\nstrategy: ddp\nhardware: {nodes: 1, gpus_per_node: 4}\n")
    launch = ("meshplan", "launch", "-f", plan, JOB, "lightning")
    code, out, errors = output_of(*launch, before, folder, 5, "all", folder=tmp_path)
    assert code != 0
    assert errors.count("Signal 9 (SIGKILL)") >= 4
    assert "losses" not in out
    code, out, errors = output_of(*launch, after, folder, 0, folder=tmp_path)
    assert code == 0, errors
    found = json.loads(out.splitlines()[-1])
    assert found["losses"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [("lightning", "full_shard", "tp_fsdp"), ("lightning", "tp_fsdp", "pp_fsdp"),
     ("trainer", "full_shard", "pp"), ("trainer", "tp_fsdp", "ddp")],
)  # fmt: skip
def test_a_killed_job_goes_on_under_another_plan(pool, tmp_path: Path, kind, before, after):
    expected = expected_of(kind, str(tmp_path / "alone"), pool)
    folder = tmp_path / "planned"
    code, out, errors = output_of(*TORCHRUN, JOB, kind, before, folder, 5, folder=tmp_path)
    assert code != 0
    assert "Signal 9 (SIGKILL)" in errors
    assert "losses" not in out
    written = {each.suffix for each in folder.rglob("*") if each.is_file()}
    assert written == {".safetensors", ".json"}
    code, out, errors = output_of(*TORCHRUN, JOB, kind, after, folder, 0, folder=tmp_path)
    assert code == 0, errors
    found = json.loads(out.splitlines()[-1])
    assert found["losses"] == pytest.approx(expected, rel=1e-6)
