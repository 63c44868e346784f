"""`meshplan verify` on models with BatchNorm, whose numbers depend on what is in a microbatch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshplan.cli.app import main
from meshplan.runtime.base.batch import taken_together


class Features(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.mix(self.norm(x)))


class Net(nn.Module):
    """One value per sample and channel: statistics of one sample do not exist."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Features() for _ in range(4))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


PLAN: dict[str, Any] = {
    "version": 1,
    "model": {"entry": "tests.runtime.verify.test_verify_batchnorm:Net"},
    "input": {"shape": [4, 8], "dtype": "float32"},
    "mesh": {"dp_shard": 4},
    "sync_batchnorm": True,
}


PIPELINE = {"mesh": {"pp": 2}, "pipeline": {"schedule": "1F1B", "microbatches": 2}}


def run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: dict[str, Any]
) -> tuple[int, dict[str, Any]]:
    """(exit code, result) of the verb."""
    path = tmp_path / "plan.yaml"
    path.write_text(json.dumps(PLAN | more))  # JSON is YAML.
    code = main(["verify", "-f", str(path), "-q", "--json"])
    return code, json.loads(capsys.readouterr().out)["result"]


@pytest.mark.parametrize(
    ("more", "microbatches"),
    [
        ({}, 1),
        ({"batch": {"micro": 4, "global": 64}}, 2),
        (PIPELINE | {"mesh": {"pp": 2, "dp_shard": 2}, "batch": {"accumulate": 2}}, 4),
        (PIPELINE | {"sync_batchnorm": False}, 2),
    ],
)
def test_one_process_takes_the_same_microbatches(tmp_path, capsys, more, microbatches):
    code, result = run(tmp_path, capsys, more)
    assert (code, result["differs_in"]) == (0, [])
    assert result["microbatches_of_one_process"] == microbatches
    assert result["losses"] == pytest.approx(result["losses_of_one_process"], abs=1e-5)
    assert result["parameters"]["judged"] > 5


def test_statistics_of_each_rank_alone_are_named(tmp_path, capsys):
    """One process takes them likewise, since with those of the whole batch it would differ."""
    code, result = run(tmp_path, capsys, {"sync_batchnorm": False})
    assert (code, result["differs_in"]) == (0, [])
    assert result["statistics_of_each_rank"] == ["blocks.0.norm", "blocks.1.norm"]
    assert run(tmp_path, capsys, {})[1]["statistics_of_each_rank"] == []


def test_a_global_batch_is_cut_as_its_ranks_cut_it():
    batch = {"x": torch.arange(8), "scale": torch.tensor(2.0), "name": "one"}
    first, second = taken_together(batch, 2, 2)
    assert first["x"].tolist() == [0, 1, 4, 5]
    assert second["x"].tolist() == [2, 3, 6, 7]
    assert (first["scale"].item(), second["name"]) == (2.0, "one")
