"""The command that a message tells to type: the script's own name, arguments and nodes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from meshplan.runtime.base.launch import torchrun_line
from meshplan.spec.spec import HardwareSpec

SCRIPT = """
import meshplan
from meshplan.runtime.demo_model import ByteLlama
meshplan.parallelize(ByteLlama(), {"version": 1, "mesh": {"dp_shard": 8}})
"""


@pytest.fixture(autouse=True)
def started(monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--name", "my run"])
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def test_one_node() -> None:
    assert torchrun_line(8) == "torchrun --nproc-per-node 8 train.py --name 'my run'"


def test_the_nodes_of_the_plan() -> None:
    hardware = HardwareSpec(nodes=2, gpus_per_node=4)
    line = "torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29400 "
    assert torchrun_line(8, hardware).startswith(line + "train.py --name 'my run' on each of the 2")
    assert torchrun_line(3, hardware).startswith("torchrun --nproc-per-node 3 ")


def test_the_nodes_of_the_job(monkeypatch: Any) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert torchrun_line(8).startswith("torchrun --nnodes 2 --nproc-per-node 4 ")
    assert torchrun_line(3).startswith("torchrun --nproc-per-node 3 ")


def test_more_ranks_than_this_machine_has_gpus(monkeypatch: Any) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    assert torchrun_line(16).startswith("torchrun --nnodes 2 --nproc-per-node 8 ")


def test_a_module(monkeypatch: Any) -> None:
    main = ModuleType("__main__")
    main.__spec__ = type("Spec", (), {"name": "pkg.train.__main__"})()
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert torchrun_line(2) == "torchrun --nproc-per-node 2 -m pkg.train --name 'my run'"


def test_plain_python_with_too_few_ranks(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "train.py", "--lr", "1"], cwd=tmp_path, text=True, stderr=subprocess.PIPE
    )
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith(
        "    fix: make the product 1, such as dp_shard: 1, or start 8 ranks: "
        "torchrun --nproc-per-node 8 train.py --lr 1"
    )
