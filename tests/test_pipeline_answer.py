"""A pipelined model is called without gradients: every rank gets the output of one process.

Which seeded bug would this catch? An output that stays on the last stage's ranks, one whose
tensors change places on the way, arguments that lose their names.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshplan
from meshplan.errors import ApplyError


class Answers(nn.Module):
    """Returns a nested output, and takes a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        a = self.first(x)
        b = self.norm(self.second(a))
        return {"parts": [a, b.sum(1)], "scale": scale, "out": self.third(b.tanh()) * scale}


def differences(plan: dict[str, Any]) -> tuple[float, float, str]:
    """(in evaluation, in training mode, what a call with gradients says), on this rank."""
    torch.manual_seed(0)
    alone = Answers()
    torch.manual_seed(0)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    model = meshplan.parallelize(Answers(), {"version": 1} | plan, example_inputs=x)
    apart = []
    for mode in (False, True):
        with torch.no_grad():
            told, found = (m.train(mode)(x, scale=0.5) for m in (alone, model))
        assert found["scale"] == told["scale"]
        pairs = [*zip(found["parts"], told["parts"], strict=True), (found["out"], told["out"])]
        apart.append(max(float((a - b).abs().max()) for a, b in pairs))
    with pytest.raises(ApplyError) as caught:
        model(x)
    return *apart, str(caught.value)


@pytest.mark.parametrize(
    ("ranks", "plan"),
    [
        (2, {"mesh": {"pp": 2}, "pipeline": {"schedule": "1F1B", "microbatches": 2}}),
        (2, {"mesh": {"pp": 2}, "pipeline": {"schedule": "ZBVZeroBubble", "microbatches": 4}}),
        (4, {"mesh": {"pp": 2, "dp_shard": 2}, "pipeline": {"microbatches": 2}}),
    ],
)
def test_every_rank_gets_the_output(pool, ranks, plan):
    for evaluated, trained, text in pool(ranks).run(differences, plan):
        assert evaluated <= 1e-6
        assert trained <= 1e-6
        assert "inside torch.no_grad()" in text
