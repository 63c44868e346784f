"""Parameters used outside the forward that gathers them, and forwards that differentiate.

Which seeded bug would this catch? Without the watch, `Largest` and `Total` train on the numbers of
a part without a word, and `Forces` dies of a segmentation fault.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import meshplan
from meshplan.runtime.base.mesh import local_of
from meshplan.runtime.checks.outside import OutsideUse

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Facts(Plain):
    """Shapes and dtypes are those of the whole: asking for them is fine."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.layers[0].linear.weight
        return super().forward(x.to(weight.dtype)) * weight.shape[0] / weight.numel()


class Borrowed(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x @ self.layers[1].linear.weight)


class Bypassed(Plain):
    """Never calls its blocks, only what is inside them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer.linear(x))
        return self.head(x)


class Direct(Plain):
    """Calls `forward` by name, which leaves out the hooks of a block."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer.forward(x)
        return self.head(x)


class Hooked(Direct):
    """Hooks that a direct call leaves out, and must go on leaving out."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.register_forward_hook(lambda module, args, output: 2 * output)


class Largest(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.layers[0].linear.weight.abs().max().item()


class Total(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + float(self.layers[0].linear.weight.sum())


class Forces(Plain):
    """An energy and its gradient, as in force fields."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        energy = super().forward(x)
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy + force[:, :4]


MODELS = {
    cls.__name__: cls
    for cls in (Plain, Facts, Borrowed, Bypassed, Direct, Hooked, Largest, Total, Forces)
}


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, WIDTH, generator=generator), torch.randn(8, 4, generator=generator)


def train(name: str, plan: dict[str, Any], loop: str = "train_step") -> tuple[str, float]:
    """(what was refused, largest difference from one process) after two steps."""

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        error = (output - target).square().mean()
        if loop == "penalty":
            error = error + 0.01 * sum(p.square().sum() for p in model.parameters())
        return error

    torch.manual_seed(0)
    alone = MODELS[name]()
    sgd = torch.optim.SGD(alone.parameters(), 0.1)
    for _ in range(2):
        (alone(batch()[0]) - batch()[1]).square().mean().backward()
        sgd.step()
        sgd.zero_grad()
    torch.manual_seed(0)
    model = meshplan.parallelize(MODELS[name](), {"version": 1, **plan})
    before = {n: local_of(p).clone() for n, p in model.layers.named_parameters()}
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    inputs, targets = meshplan.local_batch(model, batch())
    try:
        if loop == "plain":
            loss(model(inputs), targets)
        else:
            for _ in range(2):
                meshplan.train_step(model, sgd, inputs, targets, loss)
    except meshplan.ApplyError as error:
        after = dict(model.layers.named_parameters())
        same = all(torch.equal(value, local_of(after[n])) for n, value in before.items())
        assert same, "refused after an update"
        return error.problems[0].what, 0.0
    state = meshplan.full_state_dict(model)
    if loop == "plain" or dist.get_rank():
        return "", 0.0
    return "", max((state[n] - t).abs().max().item() for n, t in alone.state_dict().items())


SHARD = {"strategy": "full_shard"}


@pytest.mark.parametrize(
    ("name", "loop", "says"),
    [
        ("Borrowed", "train_step", "layers.1.linear.weight is used by 'matmul' outside"),
        ("Bypassed", "train_step", "layers.0.linear.weight is used by 'linear' outside"),
        ("Hooked", "train_step", "layers.0.linear.weight is used by 'linear' outside"),
        ("Largest", "train_step", "layers.0.linear.weight is used by 'abs' outside"),
        ("Largest", "plain", "layers.0.linear.weight is used by 'abs' outside"),
        ("Total", "train_step", "layers.0.linear.weight is used by 'sum' outside"),
        ("Plain", "penalty", "layers.0.linear.weight is used by 'square' outside"),
        ("Forces", "train_step", "the forward or the loss calls 'grad', but units"),
    ],
)
def test_is_refused_by_name_before_anything_is_updated(pool, name, loop, says):
    for what, _ in pool(2).run(train, name, SHARD, loop):
        assert what.startswith(says), what


def step_of_stages(name: str) -> str:
    """What is refused in the first step of a model in two stages."""
    pipeline = {"schedule": "1F1B", "microbatches": 2, "split": [["layers"], ["head"]]}
    plan = {"version": 1, **SHARD, "mesh": {"pp": 2, "dp_shard": 2}, "pipeline": pipeline}
    model = meshplan.parallelize(MODELS[name](), plan, example_inputs=batch()[0])
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    inputs, targets = meshplan.local_batch(model, batch())
    try:
        meshplan.train_step(model, sgd, inputs, targets, torch.nn.functional.mse_loss)
    except meshplan.ApplyError as error:
        return error.problems[0].what
    return ""


def test_a_stage_is_watched_too(pool):
    """Which seeded bug would this catch? Stages that pass for compiled, and are not watched."""
    told = pool(4).run(step_of_stages, "Borrowed")
    assert all("layers.1.linear.weight is used by 'matmul' outside" in what for what in told), told


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("Facts", SHARD),
        ("Direct", SHARD),
        ("Direct", {**SHARD, "activation_checkpointing": "full"}),
        ("Direct", {**SHARD, "rules": [{"match": "layers.0", "place": "replicate"}]}),
        ("Hooked", {**SHARD, "rules": [{"match": "layers.*", "unit": False}]}),
        ("Bypassed", {**SHARD, "rules": [{"match": "layers.*", "unit": False}]}),
        ("Largest", {**SHARD, "rules": [{"match": "layers.0", "unit": False}]}),
    ],
)
def test_what_is_allowed_is_exact(pool, name, plan):
    what, apart = pool(2).run(train, name, plan)[0]
    assert what == ""
    assert apart <= 1e-6


def slope(plan: dict[str, Any]) -> str:
    """What a loop of one's own is told that differentiates the gradient of the input."""
    torch.manual_seed(0)
    x = batch()[0].requires_grad_()
    model = meshplan.parallelize(Plain(), {"version": 1, **plan}, example_inputs=batch()[0])
    torch.autograd.grad(model(x).sum(), x, retain_graph=True)  # A first derivative is right.
    with pytest.raises(meshplan.ApplyError) as caught:
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return caught.value.problems[0].what


@pytest.mark.parametrize("plan", [SHARD, {"mesh": {"tp": 2}, "tp_plan": "auto"}])
def test_second_derivatives_are_refused_where_they_would_be_wrong(pool, plan):
    for what in pool(2).run(slope, plan):
        assert what.startswith("a gradient of the model's output is computed with create_graph")


def test_a_forward_that_differentiates_is_refused_under_tp(pool):
    for what, _ in pool(2).run(train, "Forces", {"mesh": {"tp": 2}, "rules": TP_RULES}):
        assert what.startswith("the forward or the loss calls 'grad', but units")


def returned() -> float:
    """The second step of a model that returns a parameter."""
    model = meshplan.parallelize(Scaled(), {"version": 1, **SHARD})
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    x, y = meshplan.local_batch(model, batch())
    for _ in range(2):
        loss = meshplan.train_step(model, sgd, x, y, lambda o, t: (o[0] * o[1] - t).square().mean())
    return loss


class Scaled(Plain):
    """Returns its temperature, as CLIP does."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return super().forward(x), self.scale


def test_a_model_may_return_a_parameter(pool):
    """A hook on what it returns would be one on the parameter, which is refused."""
    losses = pool(2).run(returned)
    assert losses[0] == losses[1]


class Fails(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("not today")


def looks_after_a_failure() -> tuple[int, ...]:
    """The shape of what a parameter's square is, once the first forward has failed."""
    model = meshplan.parallelize(Fails(), {"version": 1, **SHARD})
    with pytest.raises(ValueError, match="not today"):
        model(batch()[0])
    weight = model.layers[0].linear.weight
    with pytest.raises(meshplan.ApplyError), OutsideUse(model, model.meshplan.plan):
        weight.square()
    return tuple(weight.square().shape)


def test_nothing_is_watched_when_a_forward_has_failed(pool):
    assert pool(2).run(looks_after_a_failure) == [(WIDTH, WIDTH)] * 2


TP_RULES = [{"match": "layers.*.linear", "place": {"tp": "colwise_gather_output"}}]


class Part(nn.Module):
    """A unit of which the model calls a module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.embed(tokens))))


class Detour(nn.Module):
    """Looks tokens up in a table of a unit that does not run at that time, from a given call on."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first, self.calls = first, 0
        self.part, self.head = Part(), nn.Linear(WIDTH, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out = self.part(tokens)
        if self.calls >= self.first:
            out = out + self.part.embed(tokens)
        self.calls += 1
        return self.head(out)


def looked_up_too_late(first: int) -> tuple[int, str]:
    """Run three forwards; return how many gave a result, and what the next one raised."""
    rules = [
        {"match": "part", "unit": True},
        {"match": "part.embed", "place": {"tp": "vocab"}},
        {"match": "part.up", "place": {"tp": "colwise"}},
        {"match": "part.down", "place": {"tp": "rowwise"}},
    ]
    plan = {"version": 1, "mesh": {"dp_shard": 2, "tp": 2}, "rules": rules}
    model = meshplan.parallelize(Detour(first), plan)
    for number in range(3):
        try:
            model(torch.arange(16).reshape(2, 8))
        except meshplan.ApplyError as error:
            return number, str(error)
    return 3, ""


@pytest.mark.parametrize("first", [0, 2])
def test_a_shard_is_not_taken_for_a_part_along_tp(pool, first):
    """Rows that another data rank holds would be looked up as zeros."""
    for number, message in pool(4).run(looked_up_too_late, first):
        assert number == first
        assert "part.embed.weight is used outside the forward of the unit" in message
