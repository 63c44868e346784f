"""`meshplan verify` of models whose global batch is too large for the one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import meshplan
from meshplan.errors import Origin
from meshplan.plan.plan import Plan
from meshplan.runtime.estimate.scale_down import ModelSource, shrink
from meshplan.runtime.trace.structure import graph_of
from meshplan.runtime.train.one_process import (
    WHOLE_BYTES,
    Batches,
    parts_for_memory,
    train_alone,
)
from meshplan.runtime.verify.verify import verify

HELD = WHOLE_BYTES // 4 - 2**20
"""Bytes that a sample keeps for backward, besides its few activations."""
PLAN = {
    "version": 1, "mesh": {"dp_shard": 2}, "strategy": "full_shard", "clip_grad_norm": 1.0,
    "input": {"shape": [1, 8], "dtype": "fp32"}, "batch": {"micro": 4, "accumulate": 2},
}  # fmt: skip


class Kept(torch.autograd.Function):
    """Keep much memory for backward that nothing writes, so that a test costs none."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(torch.empty(len(x), HELD, dtype=torch.uint8))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


class Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(Kept.apply(self.up(x))))


class Coupled(Large):
    """Subtracts the mean over the samples, as a normalization does that torch does not know."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean(dim=0))


class Light(Large):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


def plan_of(model: nn.Module) -> Plan:
    return meshplan.make_plan(meshplan.load_spec(PLAN), graph_of(model))


@pytest.mark.parametrize(("kind", "parts"), [(Large, 4), (Coupled, 1), (Light, 1)])
def test_only_a_large_batch_of_samples_on_their_own_is_cut(kind: type[nn.Module], parts: int):
    model = kind()
    assert parts_for_memory(model, plan_of(model), 16) == parts


def test_a_batch_in_parts_trains_like_the_whole_one():
    torch.manual_seed(0)
    model = Large()
    batches = Batches(model, plan_of(model), [(2, 4)], 16)
    whole = train_alone(batches, 0.1)
    cut = train_alone(Batches(model, batches.plan, batches.shapes, 16, parts=4), 0.1)
    assert cut.training.losses == pytest.approx(whole.training.losses, rel=1e-6)
    assert cut.training.norms == pytest.approx(whole.training.norms, rel=1e-6)
    pairs = zip(whole.model.parameters(), cut.model.parameters(), strict=True)
    assert all(torch.allclose(a, b, rtol=1e-6) for a, b in pairs)
    # The comparison would show parts of which one is left out.
    start = [p.clone() for p in copy.deepcopy(model).parameters()]
    assert any(not torch.allclose(a, b) for a, b in zip(start, cut.model.parameters(), strict=True))


@pytest.mark.parametrize(("kind", "is_told"), [(Large, True), (Light, False)])
def test_the_verdict_says_that_the_batch_was_cut(kind: type[nn.Module], is_told: bool):
    source = ModelSource(entry=f"{__name__}:{kind.__name__}", origin=Origin("<test>"))
    verdict = verify(shrink(meshplan.load_spec(PLAN), source), lambda line: None)
    assert verdict.is_ok, verdict.refusal
    assert ("batch of one process: taken in 2 parts" in verdict.notes) == is_told
