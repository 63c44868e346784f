"""`meshplan verify` on models with BatchNorm, whose numbers depend on what is in a microbatch."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from meshplan.cli import main


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
    "model": {"entry": "tests.test_verify_batchnorm:Net"},
    "input": {"shape": [4, 8], "dtype": "float32"},
    "mesh": {"dp_shard": 4},
    "sync_batchnorm": True,
}


def run(tmp_path, capsys, plan: dict[str, Any], *flags: str) -> tuple[int, str, str]:
    path = tmp_path / "plan.yaml"
    path.write_text(json.dumps(PLAN | plan))
    code = main(["verify", "-f", str(path), "-q", *flags])
    return code, *capsys.readouterr()

PIPELINE = {"mesh": {"pp": 2, "dp_shard": 2}, "pipeline": {"schedule": "1F1B", "microbatches": 2}}

@pytest.mark.parametrize("plan", [
    {}, {"batch": {"micro": 4, "global": 32}}, {"batch": {"micro": 4, "accumulate": 2}},PIPELINE,PIPELINE|{"batch": {"micro": 4, "accumulate": 2}},
    {"mesh":{"pp":2},"pipeline":{"schedule": "1F1B", "microbatches": 2},"sync_batchnorm":False},
    {"sync_batchnorm":False},
])
def test_it(tmp_path,capsys, plan):
    code,out,err=run(tmp_path,capsys,plan)
    assert code==0, out+err
