"""Models whose forward writes parameters, buffers or attributes, beside one process.

Which seeded bug would this catch? Without `checks.forward_writes` a unit frees what was written
(`Renormed`, `Followed`), a second microbatch counts again (`Counted`), and weights that follow the
samples part ways (`Drifting`); without `max_norm` each rank scales the rows that it looks up.
"""

from __future__ import annotations

import functools
import gc
import types
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import meshplan
from tests.helpers import parity

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.write(x)
        return x + self.down(torch.tanh(self.up(x)))

    def write(self, x: torch.Tensor) -> None:
        pass


class Renormed(Block):
    """Assigns to `.data`, as EEGNet's constrained layers do."""

    def write(self, x: torch.Tensor) -> None:
        self.up.weight.data = torch.renorm(self.up.weight.data, 2, 0, 0.5)


class Clamped(Block):
    def write(self, x: torch.Tensor) -> None:
        with torch.no_grad():
            self.up.weight.clamp_(min=0)


class Normalised(Block):
    def write(self, x: torch.Tensor) -> None:
        with torch.no_grad():
            self.up.weight.copy_(F.normalize(self.up.weight, dim=-1))


class Followed(Block):
    """A target network that follows the online one by a moving average."""

    def __init__(self) -> None:
        super().__init__()
        self.target = nn.Linear(WIDTH, 2 * WIDTH).requires_grad_(False)

    def write(self, x: torch.Tensor) -> None:
        with torch.no_grad():
            self.target.weight.lerp_(self.up.weight, 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.target(x)[:, :WIDTH]


class Counted(Block):
    """Counts its calls in a buffer, in a buffer that it replaces, and in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("others", torch.zeros(()))
        self.times = 0

    def write(self, x: torch.Tensor) -> None:
        self.calls += 1
        self.others = self.others + 1
        self.times += 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + 0.1 * self.calls + 0.05 * self.others + 0.02 * self.times)


def louder(seen: dict[str, int], module: nn.Module, args: Any) -> Any:
    seen["times"] += 1
    return (args[0] * (1 + 0.01 * seen["times"]),)


class CountedElsewhere(Block):
    """Counts its calls in other places, and lowers a number from the second call on."""

    times, gain = 0, 1.0

    def __init__(self) -> None:
        super().__init__()
        self.table, self.kept, self.log = {"times": 0}, types.SimpleNamespace(times=0), [0]
        self.lowered = 1.0
        seen, given = {"times": 0}, {"times": 0}

        @torch.enable_grad()
        def hook(module: nn.Module, args: Any) -> Any:
            return louder(seen, module, args)

        self.register_forward_pre_hook(hook)
        self.register_forward_pre_hook(functools.partial(louder, given))

    def write(self, x: torch.Tensor) -> None:
        self.times += 1
        self.table["times"] += 1
        self.kept.times += 1
        self.log.append(1)
        if self.times > 1:
            self.lowered *= 0.9
            self.gain = self.gain * 0.95

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        times = self.times + 2 * self.table["times"] + 3 * self.kept.times + 4 * len(self.log)
        return super().forward(x) * self.gain * self.lowered * (1 + 0.002 * times)


class Drifting(Block):
    def write(self, x: torch.Tensor) -> None:
        self.up.weight.data.add_(0.01 * x.mean())


class Centred(Block):
    """Keeps a statistic of its samples, in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def write(self, x: torch.Tensor) -> None:
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.5)


class Centring(Centred):
    """Computes its output from the statistic, as codebooks and queues are used."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - self.mean)


class Remembering(Block):
    """Computes its output from what the forward before left in an attribute."""

    last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x if self.last is None else x - self.last)
        self.last = out.detach().mean(0)
        return out


class Spectral(Block):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.utils.spectral_norm(self.up)
        self.down = nn.utils.parametrizations.spectral_norm(self.down)


class Net(nn.Module):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH, max_norm=1.0 if block is Block else None)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([block() for _ in range(4)])
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(self.embed((3 * x[:, 0]).abs().long() % 16) + x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Averaged(Net):
    """Averages all of its weights in the root's forward, and nothing of its own reads that."""

    def __init__(self) -> None:
        super().__init__(Block)
        for name, parameter in self.layers.named_parameters():
            self.register_buffer(name.replace(".", "_"), parameter.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for name, parameter in self.layers.named_parameters():
                getattr(self, name.replace(".", "_")).lerp_(parameter, 0.1)
        return super().forward(x)


BLOCKS = {
    cls.__name__: cls
    for cls in (Block, Renormed, Clamped, Normalised, Followed, Counted, CountedElsewhere,
                Drifting, Centred, Centring, Remembering, Spectral)
}  # fmt: skip


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return Averaged() if name == "Averaged" else Net(BLOCKS[name])


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step + 1)
    return torch.randn(8, WIDTH, generator=generator), torch.randn(8, 4, generator=generator)


def train(name: str, plan: dict[str, Any]) -> tuple[str, float, list[str]]:
    """(what was refused, largest difference from one process, what was warned of)."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        apart, refused = 0.0, ""
        try:
            model = meshplan.parallelize(build(name), plan, example_inputs=batch(0)[0])
            sgd = torch.optim.SGD(model.parameters(), lr=0.1)
            alone = build(name)
            optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
            for step in range(3):
                mine = meshplan.local_batch(model, batch(step))
                loss = meshplan.train_step(model, sgd, *mine, F.mse_loss)
                x, y = batch(step)
                expected = F.mse_loss(alone(x), y)
                expected.backward()
                optimizer.step()
                optimizer.zero_grad()
                apart = max(apart, abs(loss - expected.item()))
            live, state = meshplan.full_state_dict(model), alone.state_dict()
            apart = max([apart, *(abs(live[n] - state[n]).max().item() for n in live)])
        except meshplan.ApplyError as error:
            refused = error.problems[0].what
    return refused, apart, [str(w.message) for w in caught]


def plan_of(**words: Any) -> dict[str, Any]:
    return {"version": 1, **words}


PIPE = {"pipeline": {"schedule": "1F1B", "microbatches": 2}}
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, plan_of(strategy="ddp")),
    "ddp, accumulated": (2, plan_of(strategy="ddp", batch={"accumulate": 2})),
    "full_shard": (2, plan_of(strategy="full_shard")),
    "zero1": (2, plan_of(strategy="zero1")),
    "hybrid_shard": (4, plan_of(strategy="hybrid_shard", mesh=[2, 2])),
    "accumulated": (2, plan_of(strategy="full_shard", batch={"accumulate": 2})),
    "recomputed": (2, plan_of(strategy="full_shard", activation_checkpointing="full")),
    "pp": (2, plan_of(mesh={"pp": 2}, **PIPE)),
    "pp x full_shard": (4, plan_of(mesh={"pp": 2, "dp_shard": 2}, **PIPE)),
}
RIGHT = ("Block", "Renormed", "Clamped", "Normalised", "Followed", "Counted", "CountedElsewhere",
         "Spectral")  # fmt: skip
ONCE_MORE = "but writes other values when it is recomputed in backward"
SECOND = "a second microbatch of the same step writes other values"
REFUSED = {
    ("Followed", "accumulated"): SECOND,
    ("Followed", "pp x full_shard"): SECOND,
    ("Followed", "recomputed"): ONCE_MORE,
}


FEW = {
    "Block": ("ddp", "hybrid_shard"),
    "Renormed": ("full_shard", "recomputed"),
    "Clamped": ("zero1", "pp x full_shard", "accumulated"),
    "Normalised": ("hybrid_shard", "pp"),
    "Followed": tuple(PLANS),
    "Counted": ("ddp, accumulated", "recomputed", "pp"),
    "CountedElsewhere": ("ddp", "accumulated", "recomputed", "pp"),
    "Spectral": ("full_shard", "pp"),
}
"""Each way of writing under the plans that treat it differently; the others are for `-m wide`."""


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        pytest.param(name, plan, marks=() if plan in FEW[name] else pytest.mark.wide)
        for name in RIGHT
        for plan in PLANS
    ],
)
def test_what_a_forward_writes_is_what_one_process_writes(pool, name, plan):
    world, words = PLANS[plan]
    refused, apart, _ = pool(world).run(train, name, words)[0]
    if (name, plan) in REFUSED:
        assert REFUSED[name, plan] in refused
    else:
        assert (refused, apart <= parity.TOLERANCE) == ("", True), (refused, apart)


@pytest.mark.parametrize("plan", ["ddp", "full_shard", "hybrid_shard"])
def test_a_parameter_that_follows_the_samples_is_refused(pool, plan):
    world, words = PLANS[plan]
    for refused, _, _ in pool(world).run(train, "Drifting", words):
        assert refused.startswith(
            "the forward writes layers.0.up.weight and 3 more, and ranks with different samples"
        )


def test_an_average_of_all_weights_is_written_in_every_stage(pool):
    # Each has the weights that it writes from, though none of its modules reads them.
    ranks, words = PLANS["pp"]
    for refused, apart, _ in pool(ranks).run(train, "Averaged", words):
        assert refused == ""
        assert apart < 1e-6


@pytest.mark.parametrize("plan", ["ddp", "ddp, accumulated", "full_shard", "pp"])
def test_what_the_output_is_computed_from_may_not_follow_the_samples(pool, plan):
    world, words = PLANS[plan]
    for refused, _, _ in pool(world).run(train, "Centring", words):
        assert "the forward computes layers." in refused
        assert "from the samples it gets, and its output from " in refused


@pytest.mark.parametrize("plan", ["ddp", "full_shard"])
def test_nor_may_an_attribute(pool, plan):
    world, words = PLANS[plan]
    for refused, _, _ in pool(world).run(train, "Remembering", words):
        assert "the forward computes layers.0.last from the samples it gets" in refused


def test_half_precision_copies_are_not_written_back(pool):
    words = plan_of(strategy="full_shard", precision="bf16-mixed")
    for refused, _, _ in pool(2).run(train, "Clamped", words):
        assert "works on a copy of it in bfloat16" in refused
    rule = {"match": "layers.*", "precision": "32-true"}
    refused, apart, _ = pool(2).run(train, "Clamped", {**words, "rules": [rule]})[0]
    assert (refused, apart < 1e-2) == ("", True)


def statistics(plan: dict[str, Any]) -> tuple[list[float], list[str]]:
    """(the statistic that the first layer begins its next forward with, what was warned of)."""
    model = meshplan.parallelize(build("Centred"), plan)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(2):
            mine = meshplan.local_batch(model, batch(step))
            meshplan.train_step(model, sgd, *mine, F.mse_loss)
    with torch.no_grad():
        model.eval()(mine[0])
    inner = getattr(model, "module", model)
    return inner.layers[0].mean.tolist(), [str(w.message) for w in caught]


@pytest.mark.parametrize("plan", ["ddp", "full_shard", "hybrid_shard"])
def test_statistics_are_the_first_ranks_and_told_once(pool, plan):
    world, words = PLANS[plan]
    results = pool(world).run(statistics, words)
    assert all(mean == results[0][0] for mean, _ in results)
    told = [text for _, texts in results for text in texts if "layers.0.mean" in text]
    assert len(told) == 1
    assert "the written values differ between ranks" in told[0]


def one_after_another() -> float:
    """A module outlives its model, whose checks have nothing to say of the next one."""
    first = meshplan.parallelize(build("Clamped"), {"version": 1, "strategy": "full_shard"})
    kept = next(m for m in first.modules() if isinstance(m, Clamped))
    del first
    gc.collect()
    model = meshplan.parallelize(build("Clamped"), {"version": 1, "strategy": "full_shard"})
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    loss = meshplan.train_step(model, sgd, *meshplan.local_batch(model, batch(0)), F.mse_loss)
    assert kept.up is not None
    return float(loss)


def test_a_model_that_is_gone_says_nothing_of_the_next(pool):
    first, second = pool(2).run(one_after_another)
    assert first == second
