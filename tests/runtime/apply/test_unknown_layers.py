"""Layers that do more than torch's compute on DTensors under tp, which know what is a part.

Which seeded bug would this catch? A layer with a forward of its own that is run on one rank's part;
an embedding whose hook gets one rank's addend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import meshplan
from tests.helpers import parity


class Positive(nn.Linear):
    """Does something to its output that is not linear."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias).relu()


class Net(nn.Module):
    """A table of tokens and a pair of projections."""

    def __init__(self, embed: nn.Embedding, down: nn.Linear) -> None:
        super().__init__()
        self.embed, self.up, self.down = embed, nn.Linear(8, 16), down

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.embed(tokens)).tanh())


def own_forward() -> nn.Module:
    return Net(nn.Embedding(10, 8), Positive(16, 8))


def hooked_table() -> nn.Module:
    net = Net(nn.Embedding(10, 8), nn.Linear(16, 8))
    net.embed.register_forward_hook(lambda module, args, output: output * 1)
    return net


NETS: dict[str, Callable[[], nn.Module]] = {
    "a forward of its own": own_forward,
    "a hook on a table": hooked_table,
}


def gradients(case: str) -> float:
    """The largest difference of a gradient to that of one process."""
    torch.manual_seed(5)
    alone = NETS[case]()
    torch.manual_seed(5)
    rules: list[dict[str, Any]] = [
        {"match": "embed", "place": {"tp": "vocab"}},
        {"match": "up", "place": {"tp": "colwise"}},
        {"match": "down", "place": {"tp": "rowwise"}},
    ]
    live = meshplan.parallelize(NETS[case](), {"version": 1, "mesh": {"tp": 2}, "rules": rules})
    tokens = torch.arange(20).remainder(10).reshape(2, 10)
    for model in (live, alone):
        model(tokens).square().sum().backward()
    apart = []
    for fqn, parameter in live.named_parameters():
        gradient = parameter.grad
        assert gradient is not None
        whole = getattr(gradient, "full_tensor", lambda found=gradient: found)()
        apart.append(float((whole - alone.get_parameter(fqn).grad).abs().max()))
    return max(apart)


@pytest.mark.parametrize("case", NETS)
def test_gradients_are_those_of_one_process(pool: Any, case: str) -> None:
    assert max(pool(2).run(gradients, case)) <= 10 * parity.TOLERANCE
