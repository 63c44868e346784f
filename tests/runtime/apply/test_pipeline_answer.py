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
from meshplan.errors import ApplyError, Problem


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


class Refuses(torch.optim.SGD):
    """What the self-test of one stage does: the step of its rank is refused."""

    def step(self, closure: Any = None) -> None:
        if torch.distributed.get_rank() == 1:
            raise ApplyError(Problem("this stage does not train"))
        super().step()


def first_step() -> str:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    plan = {"version": 1, "mesh": {"pp": 2}, "pipeline": {"microbatches": 2}}
    model = meshplan.parallelize(Answers(), plan, example_inputs=x)
    sgd = Refuses(model.parameters(), lr=0.1)
    with pytest.raises(ApplyError) as caught:
        meshplan.train_step(model, sgd, x, x, lambda out, y: (out["out"] - y).square().mean())
    return str(caught.value)


def test_what_one_stage_refuses_to_update_is_refused_in_all(pool):
    first, second = pool(2).run(first_step, timeout=30)
    assert "the first step failed on rank 1" in first
    assert "this stage does not train" in first
    assert "this stage does not train" in second


def poisoned() -> tuple[str, float]:
    """(what the first step on numbers that are none is told, the loss of a later one)."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    plan = {"version": 1, "mesh": {"pp": 2}, "pipeline": {"microbatches": 2}}
    said, losses = "", []
    for batches in ([x * torch.nan], [x, x * torch.nan]):
        model = meshplan.parallelize(Answers(), plan, example_inputs=x)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        for each in batches:
            try:
                args = model, sgd, each, x, lambda out, y: (out["out"] - y).square().mean()
                losses.append(meshplan.train_step(*args))
            except ApplyError as error:
                said += str(error)
    return said, losses[-1]


def test_numbers_that_are_none_are_refused_the_first_time(pool):
    """They may come of what was not sent; later they are the model's own."""
    for said, loss in pool(2).run(poisoned, timeout=30):
        assert said.count("the loss contains NaN") == 1
        assert loss != loss


class Early(nn.Module):
    """Returns a tensor of its first stage beside that of its last one, as T5 its encoder's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        early = self.first(x)
        return self.second(early.tanh()), early


def loss_of_both(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return torch.stack([(each - target).square().mean() for each in output]).sum()


def losses_with_early(plan: dict[str, Any]) -> tuple[list[float], list[float]]:
    """(losses of one process, losses under the plan) of two steps."""
    x, y = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    alone = Early()
    torch.manual_seed(0)
    model = meshplan.parallelize(Early(), {"version": 1} | plan, example_inputs=x)
    told, found = [], []
    one = torch.optim.SGD(alone.parameters(), lr=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        loss = loss_of_both(alone(x), y)
        loss.backward()
        one.step()
        one.zero_grad()
        told.append(float(loss))
        found.append(float(meshplan.train_step(model, optimizer, x, y, loss_of_both)))
    return told, found


def test_a_loss_may_read_what_an_earlier_stage_returned(pool):
    # Such a tensor arrives as a leaf that requires a gradient, like a parameter. A microbatch has
    # two samples, of which one can be compared with both where it is not cut.
    plan = {"mesh": {"pp": 2}, "pipeline": {"microbatches": 2}, "batch": {"micro": 4}}
    for told, found in pool(2).run(losses_with_early, plan):
        assert found == pytest.approx(told, rel=1e-6)
