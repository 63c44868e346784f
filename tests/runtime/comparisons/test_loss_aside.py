"""Loss functions are asked beside the training, and neither they nor the training notice it.

Which seeded bug would this catch? Parts that share memory with what backward has saved, a buffer
that is put back by another write, a counter or a generator that goes on, a collective that one
rank asks for once more than another, a tolerance of the dtype that a loss is returned in.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import meshplan

SAMPLES, CLASSES = 16, 5
PLAIN = F.cross_entropy


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES)).to(dtype)

    def forward(self, x: Tensor) -> Any:
        return self.layers(x)


class Weighing(Net):
    """Returns a parameter too, which is as long as a rank has samples."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.linspace(0.1, 0.4, SAMPLES // 2))

    def forward(self, x: Tensor) -> Any:
        return self.layers(x), self.weights.view(-1)


class Shaken(Net):
    def forward(self, x: Tensor) -> Any:
        return self.layers(x) * (1 + 0.1 * random.random())


class Clamped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(()))

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        self.weight.clamp_(max=1.0)
        return self.weight * PLAIN(output, targets)


class Warming(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(()))

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        self.weight.add_(0.1)
        return PLAIN(output, targets) + self.weight * output.pow(2).mean()


class Calls:
    """Counts its calls where nothing looks for it."""

    def __init__(self) -> None:
        self.inside = [[0]]


def ignoring(output: Tensor, targets: Tensor) -> Tensor:
    targets[targets == 0] = -100
    return PLAIN(output, targets, reduction="sum") / len(targets)


def scaling(output: Tensor, targets: Tensor) -> Tensor:
    output.div_(0.5)
    return PLAIN(output, targets)


def by_global_count(output: Tensor, targets: Tensor) -> Tensor:
    is_kept = targets != 0
    count = is_kept.sum().float()
    if dist.is_initialized() and output.shape[0] < SAMPLES:
        dist.all_reduce(count)
        count = count / dist.get_world_size()
    return PLAIN(output, targets, reduction="none")[is_kept].sum() / count


def in_half(output: Tensor, targets: Tensor) -> Tensor:
    return PLAIN(output.bfloat16(), targets).float()


def in_autocast(output: Tensor, targets: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        product = output.float() @ torch.eye(CLASSES)
    return product.pow(2).mean().float() + PLAIN(output, targets)


def with_weights(output: Any, targets: Tensor) -> Tensor:
    return PLAIN(output[0], targets) + output[1].square().sum()


def warming() -> Callable[[Tensor, Tensor], Tensor]:
    calls, last = [0], 0

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        nonlocal last
        calls[0] += 1
        last += 1
        return PLAIN(output, targets) * (calls[0] + last)

    return loss


def warming_inside() -> Callable[[Tensor, Tensor], Tensor]:
    inner = Calls()

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        inner.inside[0][0] += 1
        return PLAIN(output, targets) * inner.inside[0][0]

    return loss


def drawing(draw: Callable[[], float]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda output, targets: PLAIN(output, targets) * (0.5 + draw())


CASES: dict[str, tuple[Callable[[], Any], Callable[[], nn.Module]]] = {
    "writes into targets": (lambda: ignoring, Net),
    "writes into the output": (lambda: scaling, lambda: Net(torch.float64)),
    "writes into a saved buffer": (Clamped, Net),
    "warms up by a buffer": (Warming, Net),
    "warms up by its closure": (warming, Net),
    "warms up deeper inside": (warming_inside, Net),
    "draws of Python": (lambda: drawing(random.random), Net),
    "draws of NumPy": (lambda: drawing(np.random.rand), Net),
    "a forward draws of Python": (lambda: PLAIN, Shaken),
    "a collective of its own": (lambda: by_global_count, Net),
    "in half precision inside": (lambda: in_half, Net),
    "in autocast inside": (lambda: in_autocast, Net),
    "gets a parameter": (lambda: with_weights, Weighing),
}


def trained(case: str, accumulate: int = 1) -> tuple[str, float, float]:
    """(the refusal, how far loss and parameters are from one process, after one step)."""
    make_loss, make_net = CASES[case]
    generator = torch.Generator().manual_seed(0)
    alone = make_net()
    x = torch.randn(SAMPLES, 6, generator=generator).to(next(alone.parameters()).dtype)
    y = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
    plan = {"version": 1, "strategy": "ddp", "batch": {"accumulate": accumulate}}
    model = meshplan.parallelize(make_net(), plan)
    sgd = [torch.optim.SGD(each.parameters(), 0.1) for each in (alone, model)]
    ends = []
    random.seed(0)
    np.random.seed(0)
    expected = make_loss()(alone(x), y.clone())
    expected.backward()
    sgd[0].step()
    ends.append((random.random(), np.random.rand()))
    random.seed(0)
    np.random.seed(0)
    mine = meshplan.local_batch(model, (x, y))
    try:
        found = meshplan.train_step(model, sgd[1], mine[0], mine[1].clone(), make_loss())
    except meshplan.ApplyError as error:
        return str(error), 0.0, 0.0
    ends.append((random.random(), np.random.rand()))
    assert ends[0] == ends[1]
    both = zip(model.parameters(), alone.parameters(), strict=True)
    apart = max((one - other).abs().max().item() for one, other in both)
    return "", abs(found - expected.item()), apart


@pytest.mark.parametrize("case", CASES)
def test_a_loss_that_does_more_than_to_return_a_number_trains_as_alone(pool, case):
    for told, loss, state in pool(2).run(trained, case):
        assert told == ""
        # Half precision rounds the mean of both halves otherwise.
        assert loss <= (1e-2 if "half" in case or "autocast" in case else 1e-5)
        assert state <= (1e-3 if "half" in case or "autocast" in case else 1e-6)


WARMING = [case for case in CASES if case.startswith("warms up")]


@pytest.mark.parametrize("case", WARMING)
def test_a_loss_that_changes_from_microbatch_to_microbatch_is_refused(pool, case):
    for told, _, _ in pool(2).run(trained, case, 2):
        assert "keeps something from call to call" in told
        assert "change what it keeps once a step" in told


class Taken(Net):
    """Leaves a loss of its own, which the loss function takes from it."""

    def __init__(self) -> None:
        super().__init__()
        self.left = []

    def forward(self, x: Tensor) -> Any:
        hidden = self.layers[:2](x)
        self.left.append(hidden.square().mean())
        return self.layers[2](hidden)


def takes() -> float:
    """How far the loss is from one process."""
    net, alone = Taken(), Taken()
    plan = {"version": 1, "strategy": "ddp", "batch": {"accumulate": 2}}
    model = meshplan.parallelize(net, plan)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 6, generator=generator)
    y = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)

    def loss_of(of: Taken) -> Callable[[Tensor, Tensor], Tensor]:
        def loss(output: Tensor, targets: Tensor) -> Tensor:
            total = PLAIN(output, targets) + sum(of.left)
            of.left.clear()
            return total

        return loss

    expected = loss_of(alone)(alone(x), y)
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    found = meshplan.train_step(model, sgd, *meshplan.local_batch(model, (x, y)), loss_of(net))
    return abs(found - expected.item())


def test_a_loss_that_takes_from_the_model_is_left_alone(pool):
    assert max(pool(2).run(takes)) <= 1e-6


def padded(lengths: tuple[int, int]) -> list[float]:
    """Losses of ranks whose shapes let one rank ask in other ways than another one."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    length = lengths[dist.get_rank()]
    x = torch.randn(8, length, 6, generator=generator)
    y = torch.randint(0, CLASSES, (8, length), generator=generator)

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        count = torch.tensor(float(targets.numel()))
        dist.all_reduce(count)
        return PLAIN(output.flatten(0, 1), targets.flatten(), reduction="sum") * 2 / count

    model = meshplan.parallelize(Net(), {"version": 1, "strategy": "ddp"})
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    return [meshplan.train_step(model, sgd, x, y, loss) for _ in range(2)]


def test_collectives_of_a_loss_meet_those_of_other_ranks(pool):
    first, second = pool(2).run(padded, (8, 10))
    assert first == second


def returned(kind: str) -> tuple[str, float]:
    """(what a step says, its loss) of a loss that returns one thing or another."""
    model = meshplan.parallelize(Net(), {"version": 1, "strategy": "ddp"})
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    mine = meshplan.local_batch(model, (torch.ones(4, 6), torch.tensor([0, 1, 2, 3])))
    losses: dict[str, Any] = {
        "a dict": lambda o, t: {"loss": PLAIN(o, t)},
        "an integer of NumPy": lambda o, t: (PLAIN(o, t, reduction="sum"), np.int64(len(t))),
        "a mean": PLAIN,
    }
    try:
        return "", meshplan.train_step(model, sgd, *mine, losses[kind])
    except meshplan.ApplyError as error:
        return str(error), 0.0


def test_what_is_no_loss_is_refused_and_numbers_of_numpy_are_counts(pool):
    for told, _ in pool(2).run(returned, "a dict"):
        assert "loss_fn returned a dict instead of a loss" in told
    assert pool(2).run(returned, "an integer of NumPy") == [
        (told, pytest.approx(loss)) for told, loss in pool(2).run(returned, "a mean")
    ]
