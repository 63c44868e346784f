"""Samples that look at one another, in the model or in the loss: refused before anything moves.

Which seeded bug would this catch? A comparison of halves of a microbatch alone passes over a
capacity that is never reached in it, over a branch that all of its samples agree on, and over a
loss of one sample.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import meshplan
from tests.helpers import models

PLANS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "full_shard": {"strategy": "full_shard"},
    "accumulate": {"strategy": "ddp", "batch": {"accumulate": 2}},
    "accumulate, unused": {
        "strategy": "ddp",
        "batch": {"accumulate": 2},
        "ddp": {"find_unused_parameters": True},
    },
    "pp, two": {"mesh": {"pp": 2}, "pipeline": {"schedule": "1F1B", "microbatches": 2}},
    "pp": {"mesh": {"pp": 2}, "pipeline": {"schedule": "1F1B", "microbatches": 4}},
}


class Mixing(nn.Module):
    """Takes the mean over the batch away from every sample, somewhere inside."""

    def __init__(self, inner: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inner, self.last = nn.Linear(8, 8), inner(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x)))


class Centered(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Halting(nn.Module):
    """Goes on until all samples have had enough."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(20):
            if bool((x.norm(dim=1) < 1.0).all()):
                break
            x = x * 0.7
        return x


class BatchNormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(x))


class Crowded(nn.Module):
    """An expert that takes the first samples that come, as many as it has room for."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.expert = nn.Linear(8, 2), nn.Linear(8, 8)
        self.room = 1

    def forward(self, x: Tensor) -> Tensor:
        wanted = self.gate(x).argmax(1).nonzero()[:, 0][: self.room]
        return x.index_add(0, wanted, self.expert(x[wanted]))


class Routed(Crowded):
    """The same with room for all."""

    def __init__(self) -> None:
        super().__init__()
        self.room = 1000


class Settling(nn.Module):
    """Repeats until the batch as a whole hardly moves, which changes a late digit."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(8, 8)
        self.w.weight.data.mul_(0.3)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.zeros_like(x)
        for _ in range(30):
            z, before = torch.tanh(self.w(z) + x), z
            if (z - before).norm() < 1e-3:
                break
        return z


class Sized(nn.Module):
    """Divides by the number of samples."""

    def forward(self, x: Tensor) -> Tensor:
        return x / len(x)


INNER: dict[str, Callable[[], nn.Module]] = {
    "centered": Centered, "halting": Halting, "norm": BatchNormed, "plain": nn.Tanh,
    "crowded": Crowded, "routed": Routed, "settling": Settling, "sized": Sized,
}  # fmt: skip


def mixing(kind: str, plan: dict[str, Any]) -> str:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 8, generator=generator) * torch.logspace(-1, 2, 16)[:, None]
    plan = {"version": 1, **plan}
    model = meshplan.parallelize(Mixing(INNER[kind]), plan, example_inputs=x)
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    batch = meshplan.local_batch(model, (x, torch.zeros(16, 4)))
    norms = [b.clone() for n, b in model.named_buffers() if "running" in n]
    assert not [b for b in norms if b.abs().sum() != b.numel() and b.abs().sum()]
    try:
        meshplan.train_step(model, sgd, *batch, F.mse_loss)
    except meshplan.ApplyError as error:
        return str(error)
    if kind == "norm":  # Counted once: what looks on leaves no trace.
        counted = [b for n, b in model.named_buffers() if "num_batches" in n]
        assert [int(b) for b in counted] == [plan.get("batch", {}).get("accumulate", 1)]
    return ""


def test_a_pipeline_is_also_asked_about_fewer_samples(pool):
    assert pool(2).run(mixing, "plain", PLANS["pp, two"]) == ["", ""]
    for told in pool(2).run(mixing, "sized", PLANS["pp, two"]):
        assert "gives a sample another output when the other samples of the batch change" in told


@pytest.mark.filterwarnings("ignore:.*own rank")
@pytest.mark.parametrize(
    ("plan", "kind"),
    [
        ("ddp", "centered"),
        ("ddp", "crowded"),
        ("full_shard", "settling"),
        ("full_shard", "routed"),
        ("accumulate", "halting"),
        ("full_shard", "norm"),
        ("accumulate", "norm"),
        *(
            pytest.param(plan, kind, marks=pytest.mark.wide)
            for plan, kind in (
                ("full_shard", "centered"), ("full_shard", "halting"), ("ddp", "plain"),
                ("ddp", "norm"), ("ddp", "settling"),
                ("accumulate, unused", "crowded"),  # Its gate never gets a gradient.
            )
        ),
    ],
)  # fmt: skip
def test_samples_that_look_at_one_another_are_refused_by_name(pool, plan, kind):
    for told in pool(2).run(mixing, kind, PLANS[plan]):
        if kind in ("norm", "plain", "routed"):
            assert told == ""
        else:
            assert f"'inner' ({INNER[kind].__name__}) gives a sample another output" in told
            assert "meshplan.gather_batch" in told


@pytest.mark.parametrize("kind", ["centered", "halting"])
def test_a_batch_that_stands_alone_is_left_alone(pool, kind):
    plan = {"strategy": "ddp", "batch": {"per_rank": True}}
    assert pool(2).run(mixing, kind, plan) == ["", ""]


class Branching(nn.Module):
    """Goes another way where the sum of the batch is negative."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if x.sum().item() > 0 else self.b(x)


def branching(offset: float, plan: dict[str, Any]) -> list[str]:
    """What is said in each of six steps; ranks disagree about the branch in the sixth."""
    model = meshplan.parallelize(Branching(), {"version": 1, **plan})
    sgd = torch.optim.SGD(model.parameters(), 0.0)
    said = []
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        x = 0.1 * torch.randn(8, 8, generator=generator) + 1.0
        if step == 5:
            x[:4] -= offset
        batch = meshplan.local_batch(model, (x, torch.zeros(8, 4)))
        try:
            meshplan.train_step(model, sgd, *batch, F.mse_loss)
            said.append("")
        except meshplan.ApplyError as error:
            said.append(str(error))
            break
    return said


@pytest.mark.parametrize("offset", [2.0, 0.5])
def test_a_branch_on_numbers_of_the_batch_is_compared_in_every_step_at_first(pool, offset):
    # The sixth is none of the steps in which models are compared that ask for no numbers.
    for said in pool(2).run(branching, offset, PLANS["full_shard"]):
        assert said[:5] == [""] * 5
        assert ("gives a sample another output" in said[5]) == (offset > 1)


def asking(name: str) -> bool:
    model = meshplan.parallelize(models.build(name), {"version": 1, "strategy": "full_shard"})
    batch = meshplan.local_batch(model, models.batch(name, 0))
    meshplan.train_step(model, models.optimizer(model), *batch, models.loss)
    return model.meshplan.history.asks_values


def test_numbers_that_are_the_same_for_every_batch_are_not_compared_in_every_step(pool):
    # transformers asks whether ids hold padding, positions begin at 0 and experts get tokens.
    assert pool(2).run(asking, "gpt2") == [False, False]
    assert pool(2).run(asking, "mixtral") == [False, False]


def best_half(output: Tensor, targets: Tensor) -> Tensor:
    """Mines the hardest half of the samples."""
    each = (output - targets).square().mean(1)
    return each.topk((len(each) + 1) // 2).values.mean()


def by_hardest(samples: int, plan: dict[str, Any]) -> str:
    generator = torch.Generator().manual_seed(0)
    batch = torch.randn(samples, 8, generator=generator), torch.zeros(samples, 4)
    words = {"version": 1, **plan}
    model = meshplan.parallelize(Mixing(nn.Tanh), words, example_inputs=batch[0])
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    try:
        meshplan.train_step(model, sgd, *meshplan.local_batch(model, batch), best_half)
    except meshplan.ApplyError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("plan", ["ddp", "accumulate", "pp"])
def test_a_loss_of_microbatches_of_one_sample_is_asked_about_several(pool, plan):
    # The hardest half of one sample, and of two, is one: nothing shows in a microbatch by itself.
    samples = {"ddp": 2, "accumulate": 4, "pp": 4}[plan]
    for told in pool(2).run(by_hardest, samples, PLANS[plan]):
        assert "loss_fn" in told


def lone(kind: str) -> str:
    """One sample on each rank, as large models train."""
    model = meshplan.parallelize(Mixing(INNER[kind]), {"version": 1, "strategy": "full_shard"})
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    try:
        batch = meshplan.local_batch(model, (x, torch.zeros(2, 4)))
        meshplan.train_step(model, sgd, *batch, F.mse_loss)
    except meshplan.ApplyError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ["centered", "plain"])
def test_one_sample_is_compared_beside_that_of_the_first_rank(pool, kind):
    told = pool(2).run(lone, kind)
    assert all(("another output" in each) == (kind == "centered") for each in told)


class Tagger(nn.Module):
    """Tags each step of sequences that are packed; gives as many steps as the longest has."""

    def __init__(self, *, is_sorted: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.is_sorted = is_sorted
        self.rnn, self.out = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            x, lengths, batch_first=True, enforce_sorted=self.is_sorted
        )
        steps, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.out(steps)


class Chaotic(nn.Module):
    """Makes much of the rounding of each sample, and looks at no other one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w, self.out = nn.Linear(64, 64), nn.Linear(64, 4)
        self.w.weight.data.normal_(0, 3 / 8)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros_like(x)
        for _ in range(60):
            h = torch.tanh(self.w(h) + x)
        return self.out(h)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out = nn.Embedding(10, 8), nn.Linear(8, 10)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.embed(ids)).transpose(1, 2)


def by_itself(kind: str, plan: dict[str, Any]) -> str:
    """What is said to a model that takes samples one by one, whose ranks have unlike batches."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    loss: Callable[[Any, Any], Tensor] = F.mse_loss
    if kind in ("sorted", "lengths"):
        model: nn.Module = Tagger(is_sorted=kind == "sorted")
        lengths = [[9, 7, 4, 2], [6, 5, 4, 4]][rank]
        batch: Any = ((torch.randn(4, 9, 4), torch.tensor(lengths)), torch.zeros(4, 4))
        loss = lambda output, targets: F.mse_loss(output[:, 0], targets)  # noqa: E731
    elif kind in ("padded", "hooked"):  # So that one rank alone has a large microbatch.
        model, loss = Words(), F.cross_entropy
        ids = torch.randint(10, (8, [500, 520][rank]))
        batch = (ids, ids)
    else:
        batch, model = (torch.randn(2, 64), torch.zeros(2, 4)), Chaotic()  # Which sets the seed.
    model = meshplan.parallelize(model, {"version": 1, **plan})
    seen: list[str] = []
    if kind == "hooked":  # Such a model is not compared: what its hooks keep cannot be put back.
        model.register_forward_hook(partial(lambda name, *_: seen.append(name), kind))
    sgd = torch.optim.SGD(model.parameters(), 0.0)
    try:
        meshplan.train_step(model, sgd, *batch, loss)
    except meshplan.ApplyError as error:
        return str(error)
    return "" if len(seen) == (kind == "hooked") else f"a hook was called {len(seen)} times"


@pytest.mark.parametrize("kind", ["sorted", "lengths", "padded", "chaotic", "hooked"])
def test_models_that_take_samples_one_by_one_are_left_alone(pool, kind):
    told = pool(2).run(by_itself, kind, PLANS["full_shard" if kind == "sorted" else "ddp"])
    assert told == ["", ""]


def test_what_is_sent_is_not_all_that_it_is_a_view_of(pool):
    assert max(pool(2).run(sent)) < 1 << 16


def sent() -> int:
    """Bytes of the largest object that a step sends of a batch cut out of a large tensor."""
    sizes = [0]
    kept = dist.distributed_c10d._object_to_tensor

    def watched(item: Any, *args: Any, **kwargs: Any) -> Any:
        found = kept(item, *args, **kwargs)
        sizes.append(found[0].numel())
        return found

    model = meshplan.parallelize(Mixing(nn.Tanh), {"version": 1, "strategy": "ddp"})
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(dist.get_rank())
    data, targets = torch.randn(100_000, 8), torch.randn(100_000, 4)
    with mock.patch.object(dist.distributed_c10d, "_object_to_tensor", watched):
        meshplan.train_step(model, sgd, data[:2], targets[:2], F.mse_loss)
    assert len(sizes) > 1
    return max(sizes)
