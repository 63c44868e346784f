"""`compile: true`: every block is compiled, once, and the numbers are those of one process."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import meshplan
from meshplan.errors import PlanError
from tests.helpers import models, parity
from tests.helpers.wide import leaving
from tests.runtime.apply.test_parity import assert_same

TP = models.tp_rules("own_llama")
AUTO: dict[str, Any] = {"tp_plan": "auto", "loss_parallel": True}
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "ddp": ("own_llama", 2, {"strategy": "ddp"}),
    "full_shard, recomputed": (
        "hf_llama",
        2,
        {"strategy": "full_shard", "activation_checkpointing": "full"},
    ),
    # Asynchronous collectives in the styles' hooks gave wrong gradients here, silently.
    "tp x full_shard": ("own_llama", 4, {"mesh": {"dp_shard": 2, "tp": 2}, "rules": TP}),
    "tp, recomputed but for products": (
        "own_llama",
        2,
        {"mesh": {"tp": 2}, "rules": TP, "activation_checkpointing": "selective"},
    ),
    # The loss's torch function mode is active while compiled blocks run.
    "tp, loss_parallel": ("hf_llama", 2, {**AUTO, "mesh": {"tp": 2}}),
    "pp x tp, loss_parallel": (
        "hf_llama",
        4,
        {**AUTO, "mesh": {"pp": 2, "tp": 2}, "batch": {"global": 8, "micro": 8},
         "pipeline": {"microbatches": 4}},
    ),
}  # fmt: skip


@contextmanager
def without_code_generation() -> Iterator[None]:
    """Trace and differentiate as always, but leave out the half minute of a C++ compiler."""
    compile_module = nn.Module.compile
    nn.Module.compile = lambda self: compile_module(self, backend="aot_eager")
    try:
        yield
    finally:
        nn.Module.compile = compile_module


def train(name: str, plan: dict[str, Any]) -> tuple[dict[str, float], int, int]:
    """(the differences, graphs compiled, graph breaks)."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with without_code_generation():
        found = parity.train(name, {"version": 1, "compile": True, **plan})
    counters = torch._dynamo.utils.counters
    return found, counters["stats"]["unique_graphs"], len(counters["graph_break"])


@pytest.mark.parametrize("case", leaving(CASES, lambda _, case: "tp" in case))
def test_compiled_blocks_train_as_one_process_does(pool, case):
    name, world, plan = CASES[case]
    result, graphs, breaks = pool(world).run(train, name, plan)[0]
    assert_same(result)
    assert (graphs, breaks) == (1, 0), "equal blocks share one whole graph"


def test_a_model_without_blocks_is_refused():
    with pytest.raises(PlanError, match="compiles the repeated blocks, but"):
        meshplan.parallelize(nn.Linear(4, 4), {"version": 1, "strategy": "ddp", "compile": True})


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(16, 16), nn.Linear(16, 4)
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def train_compiled(how: str, plan: dict[str, Any]) -> float:
    """The largest difference of a loss from one process, of blocks that the user has compiled."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net()
    alone = copy.deepcopy(model)
    for number, layer in enumerate(model.layers):
        if how == "in place":
            layer.compile(backend="aot_eager")
        else:
            model.layers[number] = torch.compile(layer, backend="aot_eager")
    x, y = torch.randn(8, 16), torch.randn(8, 4)
    model = meshplan.parallelize(model, {"version": 1, **plan}, example_inputs=x)
    steps = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, alone)]
    apart = 0.0
    for _ in range(3):
        mine = meshplan.local_batch(model, (x, y))
        loss = meshplan.train_step(model, steps[0], *mine, F.mse_loss)
        expected = F.mse_loss(alone(x), y)
        expected.backward()
        steps[1].step()
        steps[1].zero_grad()
        apart = max(apart, abs(loss - expected.item()))
    return apart


@pytest.mark.parametrize(
    ("how", "plan"),
    [
        ("in place", {"strategy": "full_shard"}),
        ("around", {"mesh": {"tp": 2}, "tp_plan": "auto"}),
        pytest.param("around", {"strategy": "full_shard"}, marks=pytest.mark.wide),
        pytest.param("in place", {"strategy": "ddp"}, marks=pytest.mark.wide),
    ],
)
def test_blocks_that_were_compiled_before_train_as_one_process_does(pool, how, plan):
    # The hooks of checks would be compiled with them: they failed to, or changed what runs.
    assert max(pool(2).run(train_compiled, how, plan)) < 1e-6
