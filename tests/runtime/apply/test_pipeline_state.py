"""Pipelines of models that remember: what a forward leaves for the next, and what cannot be cut."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import meshplan
from meshplan.errors import MeshplanError
from tests.helpers.parity import TOLERANCE


class Chain(nn.Module):
    """Layers in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Counting(Chain):
    """Counts its forwards at their end, in a buffer and in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.run(x * (1 + self.count)) / (1 + self.calls)
        self.count += 1
        self.calls += 1
        return x


class Averaging(Chain):
    """Sets a buffer, rather than writing into it, to a mean of what a layer gave."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.run(x + self.mean)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x


class Remembering(Chain):
    """Keeps what it computed in a list, for the next forward."""

    def __init__(self) -> None:
        super().__init__()
        self.memories: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.run(x + sum(self.memories))
        self.memories = [x.detach().mean(0)]
        return x


class Listening(nn.Module):
    """Keeps a mean for itself, of what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x + self.mean)
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        self.last = x.detach()
        return out


class KeepingForItself(Chain):
    """The memory of one layer, which any stage can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2] = Listening()

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


class Centring(nn.Module):
    """Writes into a mean of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return self.inner(x)


class Reading(Chain):
    """Reads between layers what a layer writes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = Centring()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.run(x + self.norm.mean.clone()))


class ReadingStatistics(Chain):
    """Reads between layers the statistics of BatchNorm, whose operator does not say it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.norm(x)) + self.norm.running_mean


class Normalising(Chain):
    """BatchNorm between layers, by its function."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("variance", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.batch_norm(self.run(x), self.mean, self.variance, training=True)
        return x / (1 + self.mean)


class Watching(nn.Module):
    """Reads the statistics of another module, which it holds a hand of."""

    def __init__(self, other: nn.BatchNorm1d) -> None:
        super().__init__()
        self.inner, self.other = nn.Linear(4, 4), [other]

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x + self.other[0].running_mean)


class ReadingInAnother(Chain):
    """A module that reads what another writes: both in one stage, the layers where they like."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = nn.BatchNorm1d(4)
        self.layers[2] = Watching(self.layers[1])

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


class Reentrant(Chain):
    """Recomputes its layers by the checkpoint that cuts the graph."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


class Scaling(Chain):
    """Uses one weight after every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * self.scale
        return x


CLASSES: dict[str, type[nn.Module]] = {
    c.__name__: c
    for c in (
        Counting, Averaging, Remembering, KeepingForItself, Reading, ReadingStatistics,
        Normalising, ReadingInAnother, Reentrant, Scaling,
    )
}  # fmt: skip


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return CLASSES[name]()


def train(name: str, schedule: str, parts: int = 2) -> tuple[str, float]:
    """What was refused, or the largest difference of losses and state from one process.

    Args:
        parts: Into how many the one process cuts a batch: what it writes, it writes for each.
    """
    pipeline = {"schedule": schedule, "microbatches": 2}
    spec = {"version": 1, "mesh": {"pp": 2}, "pipeline": pipeline, "batch": {"per_rank": parts > 1}}
    alone, apart = build(name), 0.0
    own = torch.optim.SGD(alone.parameters(), lr=0.1)
    try:
        model = meshplan.parallelize(build(name), spec, example_inputs=torch.zeros(4, 4))
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
            y = x.flip(1)
            loss = meshplan.train_step(model, sgd, x, y, nn.functional.mse_loss)
            expected = 0.0
            for inputs, targets in zip(x.chunk(parts), y.chunk(parts), strict=True):
                part = nn.functional.mse_loss(alone(inputs), targets) / parts
                part.backward()
                expected += part.item()
            own.step()
            own.zero_grad()
            apart = max(apart, abs(loss - expected))
    except MeshplanError as error:
        return str(error), 0.0
    live = meshplan.full_state_dict(model)
    found = [float((live[n] - t).abs().max()) for n, t in alone.state_dict().items() if live]
    return "", max(apart, *found, 0.0)


@pytest.mark.parametrize(
    ("name", "parts"), [("Counting", 1), ("KeepingForItself", 2), ("ReadingInAnother", 2)]
)
def test_what_every_stage_can_remember_is_remembered(pool, name, parts):
    for refused, apart in pool(2).run(train, name, "1F1B", parts):
        assert refused == ""
        assert apart <= TOLERANCE


@pytest.mark.parametrize(
    ("name", "schedule", "why"),
    [
        ("Averaging", "1F1B", "the model stores in 'mean' what its modules computed"),
        ("Remembering", "1F1B", "the model stores in 'memories.0' what its modules computed"),
        ("Reading", "1F1B", "'norm' writes norm.mean, which is also used elsewhere"),
        ("ReadingStatistics", "1F1B", "'norm' writes in place into a tensor"),
        ("Normalising", "1F1B", "writes what its modules computed into a buffer"),
        ("Reentrant", "1F1B", "use_reentrant=True"),
        ("Scaling", "ZBVZeroBubble", "cannot be split into input gradients"),
    ],
)
def test_what_stages_cannot_do_is_refused_on_all_ranks(pool, name, schedule, why):
    for refused, _ in pool(2).run(train, name, schedule):
        assert why in refused
