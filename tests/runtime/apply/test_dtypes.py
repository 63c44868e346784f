"""Several dtypes in one model: each is trained as one process trains it.

Which seeded bug would this catch? A complex parameter that loses its imaginary part to a
precision, gradients of another dtype summed as those of their unit, or not at all.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshplan
from meshplan import make_plan
from meshplan.runtime.trace.structure import graph_of
from meshplan.spec.reader import load_spec
from tests.helpers.parity import TOLERANCE


class Mixed(nn.Module):
    """A complex list beside real layers, a complex parameter among real ones, a float64 head."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(8, 8)
        self.spectral = nn.ParameterList(torch.randn(8, 3, dtype=torch.complex64) for _ in range(2))
        self.phase = nn.Parameter(torch.randn(8, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x).float()
        for weight in self.spectral:
            low = torch.fft.rfft(x)[..., :3] * weight.mT[:, :3].sum(1)
            x = x + torch.fft.irfft(low, n=8)
        return self.head((x * self.scale.float() * self.phase).abs().double())


def build() -> nn.Module:
    torch.manual_seed(0)
    return Mixed()


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 8, generator=generator), torch.randn(8, 4, generator=generator).double()


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def apart(plan: dict[str, Any]) -> float:
    """The largest difference of the state after three steps from one process."""
    alone, model = build(), meshplan.parallelize(build(), {"version": 1} | plan)
    one, sgd = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (alone, model))
    for step in range(3):
        x, y = batch(step)
        loss(alone(x), y).backward()
        one.step()
        one.zero_grad()
        meshplan.train_step(model, sgd, *meshplan.local_batch(model, (x, y)), loss)
    live, told = meshplan.full_state_dict(model), alone.state_dict()
    if torch.distributed.get_rank():
        return 0.0
    assert {n: t.dtype for n, t in live.items()} == {n: t.dtype for n, t in told.items()}
    return max(float((live[n] - told[n]).abs().max()) for n in told)


@pytest.mark.parametrize(
    ("ranks", "plan"),
    [
        (2, {"strategy": "ddp"}),
        (2, {"strategy": "full_shard"}),
        (4, {"strategy": "hybrid_shard", "mesh": [2, 2]}),
    ],
)
def test_several_dtypes_train_as_in_one_process(pool, ranks, plan):
    assert pool(ranks).run(apart, plan)[0] <= TOLERANCE


def test_a_precision_reaches_the_main_dtype_only(pool):
    plan = {"strategy": "full_shard", "precision": "bf16-mixed"}
    assert 0 < pool(2).run(apart, plan)[0] < 2e-2


def test_modules_of_another_dtype_are_units_and_parameters_are_reduced_alone():
    plan = {"version": 1, "strategy": "full_shard", "precision": "bf16-mixed"}
    found = make_plan(load_spec(plan), graph_of(build()), world_size=2).assignment
    assert set(found.units) == {"", "head"}
    alone = {fqn for fqn, placed in found.tensors.items() if placed.reduced_alone}
    assert alone == {"phase", "spectral.0", "spectral.1"}
    computed = {fqn: placed.compute_dtype for fqn, placed in found.tensors.items()}
    assert computed["head.weight"] == "float64"
    assert computed["phase"] == "complex64"
    assert computed["lift.weight"] == "bfloat16"
    assert "float64 by itself" in str(found.tensors["head.weight"].data_reason)


def test_half_precision_beside_float32_is_told_where_ranks_add_up():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).to(torch.bfloat16), nn.Linear(8, 8))
    spec = load_spec({"version": 1, "strategy": "ddp"})
    told = [w.what for w in make_plan(spec, graph_of(model), world_size=2).assignment.warnings]
    assert [text[:48] for text in told] == ["some parameters, such as 1.weight, are bfloat16 "]
    assert make_plan(spec, graph_of(model), world_size=1).assignment.warnings == ()
