"""Hooks of other code on modules that tensor parallelism shards see what they see in one process.

Which seeded bug would this catch? A hook that is given one rank's addend of a sum, a part of the
gradient's sum or a plain shard of features as if it were the whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import meshplan
from meshplan.errors import ApplyError, PlanError
from tests.helpers import parity


class Pair(nn.Module):
    """A pair of projections behind one that must get the whole gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.first(x)).tanh())


def limited(module: nn.Module, to_input: Any, to_output: Any) -> Any:
    """Return a gradient whose norm is limited: not what the limited parts add up to."""
    (gradient,) = to_input
    return (gradient * (1e-3 / gradient.norm()),)


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "reads a parameter": lambda m: m.register_forward_hook(lambda m, args, out: out + m.bias),
    "changes the output": lambda m: m.register_forward_hook(lambda m, args, out: out.relu() + 1),
    "changes the input": lambda m: m.register_forward_pre_hook(lambda m, args: args[0].cosh()),
    "limits the gradient": lambda m: m.register_full_backward_hook(limited),
    "only looks": lambda m: m.register_forward_hook(lambda m, args, out: print(end="")),
}
PLANS: dict[str, dict[str, Any]] = {
    "auto": {"tp_plan": "auto"},
    "rules": {
        "rules": [
            {"match": "up", "place": {"tp": "colwise"}},
            {"match": "down", "place": {"tp": "rowwise"}},
        ]
    },
}


def trained(which: str, kind: str, is_late: bool, layout: str = "auto") -> float:
    """The largest difference to one process, of losses and of parameters."""
    torch.manual_seed(11)
    data = torch.randn(4, 5, 8)

    def run(model: nn.Module) -> list[torch.Tensor]:
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(3):
            loss = model(data).square().mean()
            loss.backward()
            sgd.step()
            sgd.zero_grad()
            losses.append(loss.detach())
        return losses

    alone, model = Pair(), Pair()
    HOOKS[kind](alone.get_submodule(which))
    if not is_late:
        HOOKS[kind](model.get_submodule(which))
    plan = {"version": 1, "mesh": {"tp": 2}, **PLANS[layout]}
    live = meshplan.parallelize(model, plan, example_inputs=data)
    if is_late:
        HOOKS[kind](live.get_submodule(which))
    expected, losses = run(alone), run(live)
    apart = [a - b for a, b in zip(losses, expected, strict=True)]
    whole = meshplan.full_state_dict(live)
    apart += [value - alone.state_dict()[name] for name, value in whole.items()]
    return max(float(each.abs().max()) for each in apart)


@pytest.mark.parametrize("layout", PLANS)
@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("which", ["up", "down"])
def test_a_hook_sees_the_whole_tensors(pool, which, kind, layout):
    assert max(pool(2).run(trained, which, kind, False, layout)) <= parity.TOLERANCE


HOOKS_OF_SHARDS = {
    "normalises features": lambda m: m.register_forward_pre_hook(
        lambda m, args: args[0] / args[0].norm(dim=-1, keepdim=True)
    ),
}


def refused() -> str:
    HOOKS.update(HOOKS_OF_SHARDS)
    try:
        trained("down", "normalises features", False, "rules")
    except ApplyError as error:
        return str(error)
    return ""


def test_a_hook_that_needs_features_of_other_ranks_is_refused_under_rules(pool):
    for text in pool(2).run(refused):
        assert "computes other values when its heads, fused projections or features are" in text


def seeded(norm: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Any]:
    """Apply a norm that draws its first vectors."""

    def put(module: nn.Module) -> Any:
        torch.manual_seed(5)
        return norm(module)

    return put


NORMS: dict[str, Callable[[nn.Module], Any]] = {
    "weight_norm hook": nn.utils.weight_norm,
    "spectral_norm hook": seeded(nn.utils.spectral_norm),
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": seeded(parametrizations.spectral_norm),
}


def of_computed_weight(which: str, kind: str) -> tuple[str, float]:
    """What rules say to a module whose weight is computed, and the difference under auto."""
    HOOKS.update(NORMS)
    try:
        trained(which, kind, False, "rules")
    except PlanError as error:
        return str(error), trained(which, kind, False, "auto")
    return "", 0.0


@pytest.mark.parametrize("which", ["up", "down"])
@pytest.mark.parametrize("kind", NORMS)
def test_a_weight_that_is_computed_is_left_to_auto(pool, which, kind):
    for text, apart in pool(2).run(of_computed_weight, which, kind):
        assert "its weight is computed from other parameters" in text
        assert "use tp_plan: auto" in text
        assert apart <= parity.TOLERANCE


@pytest.mark.parametrize(
    ("which", "kind"),
    [("up", "changes the input"), ("up", "limits the gradient"), ("down", "changes the output")],
)
def test_a_hook_that_is_registered_later_sees_what_is_whole_outside(pool, which, kind):
    assert max(pool(2).run(trained, which, kind, is_late=True)) <= parity.TOLERANCE


class Asking(nn.Module):
    """Asks for the gradient of its input only after a projection has read it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.left, self.right, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left = self.left(x)
        x.requires_grad_()
        return self.down(left * self.right(x))


class Writing(Asking):
    """Writes into a tensor between two projections that read it; the first one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.left.requires_grad_(False)  # Otherwise torch refuses to write what it has saved.

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1
        left = self.left(x)
        x.mul_(3)
        return self.down(left * self.right(x))


def gradient_of_input(kind: type[Asking]) -> float:
    rules = [
        {"match": "{left,right}", "place": {"tp": "colwise"}},
        {"match": "down", "place": {"tp": "rowwise"}},
    ]
    live = meshplan.parallelize(kind(), {"version": 1, "mesh": {"tp": 2}, "rules": rules})
    given = [torch.ones(2, 8).requires_grad_(kind is Writing) for _ in range(2)]
    for model, x in zip((live, kind()), given, strict=True):
        model(x).square().sum().backward()
    assert given[0].grad is not None
    return float((given[0].grad - given[1].grad).abs().max())


@pytest.mark.parametrize("kind", [Asking, Writing])
def test_an_input_of_two_projections_gets_its_gradient(pool, kind):
    assert max(pool(2).run(gradient_of_input, kind)) <= parity.TOLERANCE
