"""`examples/ray_train.py` as it stands: eight workers of Ray train with the losses of one process.

Which seeded bug would this catch? A second process group beside Ray's, samples that are counted
along tp or pp, gradients that are divided by all workers in place of the data ranks, a plan that is
not read, a loss that every worker prints or none reports, and a state that loads under another
plan without its momentum or its place in the epoch.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import yaml

from meshplan.runtime.train.sample_order import order_of

pytest.importorskip("ray.train", reason="Ray is not installed: pip install 'ray[train]'")

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/ray_train.py"
PLANS = {
    "tp": {"mesh": {"dp_shard": 4, "tp": 2}, "tp_plan": "auto"},
    "pp": {
        "mesh": {"pp": 2, "dp_shard": 4},
        "pipeline": {"schedule": "1F1B", "microbatches": 2},
    },
}
NUM_STEPS = 12
TIMEOUT_S = 500
OURS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def losses_of_one_process() -> list[float]:
    """The losses of the example's model in a loop of plain torch."""
    example = runpy.run_path(str(EXAMPLE))
    torch.manual_seed(0)
    model = example["Decoder"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rows = torch.arange(96)[:, None] * torch.arange(17) % 64
    losses = []
    for epoch in range(2):
        for places in torch.as_tensor(order_of(96, 0, epoch, shuffles=True)).split(16):
            loss = example["loss_fn"](model(rows[places, :-1]), rows[places, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def losses_under(plan: str, folder: Path) -> dict[int, float]:
    """What the example prints under a plan: the loss of each step, from one worker alone."""
    path = folder / f"{plan}.yaml"
    inputs = {"shape": [8, 16], "dtype": "int64"}
    path.write_text(yaml.safe_dump({"version": 1, "input": inputs, **PLANS[plan]}))
    environment = {
        name: value for name, value in os.environ.items() if name not in (*OURS, "RAY_ADDRESS")
    }
    # The path of Ray's sockets has at most 107 characters: too few for pytest's folders.
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as short:
        done = subprocess.run(
            [sys.executable, EXAMPLE, path.name, "states"],
            capture_output=True, text=True, cwd=folder, timeout=TIMEOUT_S, check=False,
            env={**environment, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
                 "RAY_TMPDIR": short,
                 "RAY_DEDUP_LOGS": "0", "CUDA_VISIBLE_DEVICES": ""},
        )  # fmt: skip
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed[-5000:]
    assert "'step': 8, 'loss': " in printed  # As Ray logs what the workers report.
    manifest = json.loads((folder / "states/step-00000012/manifest.json").read_text())
    assert (manifest["world_size"], manifest["mesh"]) == (8, PLANS[plan]["mesh"])
    lines = re.findall(r"pid=(\d+).*? step (\d+): loss (\d\.\d{6})", printed)
    assert len({worker for worker, _, _ in lines}) == 1
    return {int(step): float(loss) for _, step, loss in lines}


@pytest.mark.wide
def test_eight_workers_have_the_losses_of_one_process_and_go_on_under_another_plan(
    tmp_path: Path,
) -> None:
    expected = losses_of_one_process()
    assert expected[-1] < expected[0] - 0.1
    first = losses_under("tp", tmp_path)
    assert list(first) == [*range(1, NUM_STEPS + 1)]
    assert [*first.values()] == pytest.approx(expected, abs=1e-5)
    for step in (8, 12):
        shutil.rmtree(tmp_path / f"states/step-{step:08}")
    again = losses_under("pp", tmp_path)  # From step 4, in the middle of the first epoch.
    assert list(again) == [*range(5, NUM_STEPS + 1)]
    assert [*again.values()] == pytest.approx(expected[4:], abs=1e-5)
