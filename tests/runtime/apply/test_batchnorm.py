"""`sync_batchnorm: true`: statistics over the global batch, as one process takes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import meshplan
from meshplan.errors import PlanError
from tests.helpers import parity

SAMPLES = 8


def net(momentum: float | None = 0.1, tracks: bool = True, width: int = 1) -> nn.Module:
    """Convolutions with BatchNorm2d, then BatchNorm1d over (samples, channels)."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8, momentum=momentum, track_running_stats=tracks),
        nn.SiLU(),
        nn.Conv2d(8, 8, 3),
        nn.BatchNorm2d(8, affine=False, momentum=momentum, track_running_stats=tracks),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 6),
        nn.BatchNorm1d(6, momentum=momentum, track_running_stats=tracks),
    )


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(SAMPLES, 3, 8, 8, generator=generator) * 3 + 5
    return images, torch.randint(6, (SAMPLES,), generator=generator)


def train(plan: dict[str, Any], **kinds: Any) -> tuple[float, float]:
    """(largest difference of the loss, of the state and of an evaluation) from one process."""
    alone, model = net(**kinds), meshplan.parallelize(net(**kinds), {"version": 1, **plan})
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (alone, model)]
    apart = 0.0
    for step in range(3):
        images, classes = batch(step)
        expected = nn.functional.cross_entropy(alone(images), classes)
        expected.backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        mine = meshplan.local_batch(model, (images, classes))
        found = meshplan.train_step(model, optimizers[1], *mine, nn.functional.cross_entropy)
        apart = max(apart, abs(found - expected.item()))
    live = meshplan.full_state_dict(model)
    state = alone.state_dict()
    return apart, max((abs(live[n] - state[n]).max().item() for n in live), default=0.0)


SYNC = {"sync_batchnorm": True}
PLANS = {
    "ddp": {"strategy": "ddp", **SYNC},
    "full_shard": {"strategy": "full_shard", **SYNC},
    "hybrid_shard": {"strategy": "hybrid_shard", "mesh": [2, 2], **SYNC},
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kinds", [{}, {"momentum": None}, {"tracks": False}])
def test_trains_as_one_process_does(pool, plan, kinds):
    for apart, state in pool(4).run(train, PLANS[plan], **kinds):
        assert apart <= parity.TOLERANCE
        assert state <= 2e-6  # Statistics of numbers around 5, in single precision.


def test_without_it_the_numbers_differ(pool):
    apart, _ = pool(4).run(train, {"strategy": "ddp"})[0]
    assert apart > 1e-3


def evaluate() -> float:
    """The largest difference between the wrapped model's evaluation and its own module's."""
    model = meshplan.parallelize(net(), {"version": 1, "strategy": "full_shard", **SYNC}).eval()
    images, _ = batch(0)
    with torch.no_grad():
        return (model(images) - net().eval()(images)).abs().max().item()


def test_evaluation_uses_the_running_statistics(pool):
    assert pool(2).run(evaluate) == [0.0, 0.0]


class Own(nn.BatchNorm2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (
            nn.Sequential(nn.Conv2d(3, 3, 3), Own(3)),
            "cannot be applied to 1: Own overrides the forward",
        ),
        (nn.Linear(4, 4), "has no effect: Linear has no BatchNorm"),
    ],
)
def test_what_it_cannot_do_is_refused(model, what):
    with pytest.raises(PlanError, match=what):
        meshplan.parallelize(model, {"version": 1, "strategy": "ddp", **SYNC})


def half(plan: dict[str, Any]) -> tuple[float, set[str], set[str]]:
    """(difference from one process in float32, dtypes of statistics, dtypes that norms get)."""
    seen = set()

    def look(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        parameters = [str(p.dtype) for p in module.parameters()]
        seen.add(" ".join((str(args[0].dtype), *parameters, str(output.dtype))))

    model = net()
    for module in (model[1], model[4]):
        module.register_forward_hook(look)
    model = meshplan.parallelize(model, {"version": 1, **plan})
    alone, optimizer = net(), torch.optim.SGD(model.parameters(), lr=0.05)
    images, classes = batch(0)
    expected = nn.functional.cross_entropy(alone(images), classes).item()
    mine = meshplan.local_batch(model, (images, classes))
    found = meshplan.train_step(model, optimizer, *mine, nn.functional.cross_entropy)
    statistics = {str(b.dtype) for n, b in model.named_buffers() if "running" in n}
    return abs(found - expected), statistics, seen


@pytest.mark.parametrize("strategy", ["ddp", "full_shard"])
@pytest.mark.parametrize("word", ["bf16-mixed", "16-mixed"])
def test_norms_with_running_statistics_keep_float32_in_mixed_precision(pool, strategy, word):
    """Without units of their own the kernels refuse: half parameters, float32 statistics."""
    plan = {"strategy": strategy, "precision": word, **SYNC}
    half_dtype = "torch.bfloat16" if word == "bf16-mixed" else "torch.float16"
    for apart, statistics, seen in pool(2).run(half, plan):
        assert apart < 5e-2
        assert statistics == {"torch.float32"}
        assert seen == {
            f"{half_dtype} torch.float32 torch.float32 {half_dtype}",
            f"{half_dtype} {half_dtype}",
        }
