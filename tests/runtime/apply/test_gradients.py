"""Gradients that only some ranks have: experts without tokens, branches not taken, dropped layers.

Which seeded bug would this catch? Without `agree_on_gradients` two experts of one size are added
to one another in silence (0.08 off), of other sizes gloo aborts the process, a scalar's average
waits for ever, and filling with zeros alone lets weight decay shrink what nobody used.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import meshplan
from meshplan.runtime.apply.data import gradients

WIDTH, EXPERTS = 8, 4


class Experts(nn.Module):
    """Calls only the experts that some sample of this rank chose; each has a scalar gain."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS)])
        self.gains = nn.ParameterList([nn.Parameter(torch.tensor(1.0)) for _ in range(EXPERTS)])

    def forward(self, x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        out = x
        for number, expert in enumerate(self.experts):
            chosen = choice == number
            if chosen.any():
                out = out + self.gains[number] * expert(x) * chosen[:, None]
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Experts(), Experts()])
        self.head = nn.Linear(WIDTH, 4)
        self.dropped = -1

    def forward(self, x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if number != self.dropped:
                x = layer(x, choice)
        return self.head(x)


def build() -> Model:
    torch.manual_seed(0)
    return Model()


def optimizer(model: nn.Module) -> torch.optim.SGD:
    """Momentum and decay move a parameter whose gradient is zero, but not one without."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def batch(choice: list[int]) -> Any:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8, WIDTH, generator=generator)
    return (x, torch.tensor(choice)), torch.randn(8, 4, generator=generator)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


CHOICES = (
    [0, 0, 0, 0, 1, 1, 1, 1],  # Each rank has one expert, of the same size as the other's.
    [0, 0, 0, 0, 1, 2, 1, 2],  # One rank has more than the other.
    [0, 1, 0, 2, 2, 2, 0, 0],  # Accumulating, one microbatch of one rank has what others lack.
)
"""Chosen experts of the eight samples, step by step; the last expert is never chosen."""


def train(plan: dict[str, Any]) -> tuple[float, str]:
    """(largest difference from one process, where) after three steps."""
    alone = build()
    sgd = optimizer(alone)
    for choice in CHOICES:
        inputs, targets = batch(choice)
        loss(alone(*inputs), targets).backward()
        sgd.step()
        sgd.zero_grad()
    model = meshplan.parallelize(build(), {"version": 1, **plan})
    sgd = optimizer(model)
    for choice in CHOICES:
        inputs, targets = meshplan.local_batch(model, batch(choice))
        meshplan.train_step(model, sgd, inputs, targets, loss)
    state = meshplan.full_state_dict(model)
    if dist.get_rank():
        return 0.0, ""
    apart = {n: (state[n] - t).abs().max().item() for n, t in alone.state_dict().items()}
    worst = max(apart, key=apart.__getitem__)
    return apart[worst], worst


@pytest.mark.parametrize(
    "plan",
    [
        {"strategy": "full_shard"},
        {"strategy": "zero2"},
        {"strategy": "zero1"},
        {"strategy": "hybrid_shard", "mesh": [2, 1]},
        {"strategy": "full_shard", "batch": {"accumulate": 2}},
        {"strategy": "zero1", "batch": {"accumulate": 2}},
        {"strategy": "full_shard", "activation_checkpointing": "full"},
        {"strategy": "full_shard", "rules": [{"match": "layers.0", "place": "replicate"}]},
        {"strategy": "full_shard", "rules": [{"match": "layers.*.experts.*", "unit": False}]},
        {"strategy": "ddp", "ddp": {"find_unused_parameters": True}},
    ],
    ids=str,
)
def test_a_gradient_that_some_ranks_lack_is_a_zero(pool, plan):
    apart, worst = pool(2).run(train, plan)[0]
    assert apart <= 1e-6, worst


def drop_other_layers() -> str:
    """What `train_step` says when each rank leaves out another layer."""
    model = meshplan.parallelize(build(), {"version": 1, "strategy": "full_shard"})
    sgd = optimizer(model)
    inputs, targets = meshplan.local_batch(model, batch([0] * 8))
    before = {n: p.to_local().clone() for n, p in model.named_parameters() if p.ndim}
    model.dropped = dist.get_rank()
    try:
        meshplan.train_step(model, sgd, inputs, targets, loss)
    except meshplan.ApplyError as error:
        after = dict(model.named_parameters())
        same = all(torch.equal(value, after[n].to_local()) for n, value in before.items())
        return f"{same}: {error}"
    return "trained"


def test_ranks_that_drop_other_layers_are_told_before_the_update(pool):
    for answer in pool(2).run(drop_other_layers):
        assert answer.startswith("True: meshplan: 1 problem\nthe ranks called different units")


def drop_one_layer_everywhere() -> list[float]:
    model = meshplan.parallelize(build(), {"version": 1, "strategy": "full_shard"})
    model.dropped = 0
    sgd = optimizer(model)
    inputs, targets = meshplan.local_batch(model, batch([0, 1] * 4))
    return [meshplan.train_step(model, sgd, inputs, targets, loss) for _ in range(2)]


def test_a_layer_that_all_ranks_drop_is_fine(pool):
    first, second = pool(2).run(drop_one_layer_everywhere)
    assert first == second
    assert first[1] < first[0]


def ddp_without_the_option() -> str:
    model = meshplan.parallelize(build(), {"version": 1, "strategy": "ddp"})
    sgd = optimizer(model)
    inputs, targets = meshplan.local_batch(model, batch([0, 1, 0, 1, 0, 1, 0, 1]))
    try:
        for _ in range(2):
            meshplan.train_step(model, sgd, inputs, targets, loss)
    except meshplan.ApplyError as error:
        return str(error)
    return "trained"


def test_ddp_names_its_option(pool):
    for answer in pool(2).run(ddp_without_the_option):
        assert "find_unused_parameters" in answer


class Chain(nn.Module):
    """Layers of one size, called in the order that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.head = nn.Linear(WIDTH, 4)
        self.order = (0, 1, 2)

    def forward(self, x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        for number in self.order:
            x = self.layers[number](x)
        return self.head(x)


def calls_by_step(plan: dict[str, Any], orders: list[list[tuple[int, ...]]]) -> list[str]:
    """What each step came to: how often gradients were asked about, or what was refused.

    Args:
        orders: By step, the layers that each rank calls.
    """
    torch.manual_seed(0)
    plan = {"version": 1, "rules": [{"match": "layers.*", "unit": True}], **plan}
    model = meshplan.parallelize(Chain(), plan)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, targets = meshplan.local_batch(model, batch([0] * 8))
    out: list[str] = []
    asked = 0
    ask = gradients._Agreement._start_vote

    def count(*args: Any) -> Any:
        nonlocal asked
        asked += 1
        return ask(*args)

    with mock.patch.object(gradients._Agreement, "_start_vote", count):
        for step in orders:
            model.order, asked = step[dist.get_rank() % len(step)], 0
            before = [p.to_local().clone() for p in model.parameters()]
            try:
                loss(model(*inputs), targets).backward()
            except meshplan.ApplyError as error:
                sgd.zero_grad()
                same = all(map(torch.equal, before, [p.to_local() for p in model.parameters()]))
                return [*out, f"{same}: {error.problems[0].what[:27]}"]
            sgd.step()
            sgd.zero_grad()
            out.append(str(asked))
    return out


WHOLE, SHORT, TURNED = (0, 1, 2), (0, 1), (1, 0, 2)
REFUSED = "True: the ranks called different units"[: len("True: ") + 27]


@pytest.mark.parametrize("plan", [{"strategy": "full_shard"}, {"strategy": "zero1"}], ids=str)
@pytest.mark.parametrize(
    ("orders", "told"),
    [
        ([[WHOLE]] * 3, ["1", "1", "1"]),
        ([[SHORT], [WHOLE], [WHOLE], [SHORT]], ["1", "2", "1", "1"]),
        ([[WHOLE], [WHOLE], [WHOLE, TURNED]], ["1", "1", REFUSED]),
        ([[SHORT], [WHOLE, TURNED]], ["1", REFUSED]),
    ],
    ids=str,
)
def test_what_is_asked_early_is_asked_again_where_more_follows(pool, plan, orders, told):
    assert pool(2).run(calls_by_step, plan, orders) == [told] * 2
