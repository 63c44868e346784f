"""`gather_batch` and `global_mean`: losses over more than one rank have one process's gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshplan
from tests.helpers import models, parity

WIDTH = 16


class Clip(nn.Module):
    """Two towers and a temperature; the forward gives the logits of all pairs of the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.right = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        left, right = F.normalize(self.left(a), dim=-1), F.normalize(self.right(b), dim=-1)
        left, right = meshplan.gather_batch(left), meshplan.gather_batch(right)
        return self.scale.exp() * left @ right.T


class SimClr(nn.Module):
    """One tower; the loss function compares."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tower = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.stack((self.tower(a), self.tower(b)), 1)


def clip_loss(logits: Tensor, _: Any) -> Tensor:
    labels = torch.arange(len(logits))
    return F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)


def local_simclr(z: Tensor, _: Any) -> Tensor:
    z = F.normalize(z.transpose(0, 1).flatten(0, 1), dim=-1)
    n = len(z) // 2
    logits = (z @ z.T / 0.5).masked_fill(torch.eye(2 * n, dtype=torch.bool), -1e9)
    return F.cross_entropy(logits, torch.arange(2 * n).roll(n))


def simclr_loss(z: Tensor, targets: Any) -> Tensor:
    return local_simclr(meshplan.gather_batch(z), targets)


KINDS: dict[str, tuple[Any, Any]] = {
    "clip": (Clip, clip_loss),
    "simclr": (SimClr, simclr_loss),
    "alone": (SimClr, local_simclr),
}
TP = [
    {"match": "*.0", "place": {"tp": "colwise"}},
    {"match": "*.2", "place": {"tp": "rowwise"}},
]
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {"strategy": "ddp"}),
    "full_shard": (2, {"strategy": "full_shard"}),
    "hybrid": (4, {"strategy": "hybrid_shard", "mesh": [2, 2]}),
    "tp x fsdp": (4, {"mesh": {"dp_shard": 2, "tp": 2}, "rules": TP}),
}


def batch(step: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(step)
    a = torch.randn(8, WIDTH, generator=generator)
    return (a, a + 0.3 * torch.randn(8, WIDTH, generator=generator)), torch.zeros(8)


def train(kind: str, plan: dict[str, Any]) -> tuple[float, float, str]:
    build, loss_fn = KINDS[kind]
    alone = build()
    model = meshplan.parallelize(build(), {"version": 1, **plan}, example_inputs=batch(0)[0])
    sgd = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone)]
    losses, expected = [], []
    for step in range(3):
        inputs, targets = batch(step)
        left = alone(*inputs) if kind != "clip" else _clip_alone(alone, *inputs)
        loss = (clip_loss if kind == "clip" else local_simclr)(left, targets)
        loss.backward()
        sgd[1].step()
        sgd[1].zero_grad()
        expected.append(loss.item())
        try:
            mine = meshplan.local_batch(model, (inputs, targets))
            losses.append(meshplan.train_step(model, sgd[0], *mine, loss_fn))
        except meshplan.ApplyError as error:
            return 0.0, 0.0, str(error)
    live, state = meshplan.full_state_dict(model), alone.state_dict()
    apart = max([0.0, *((live[n] - state[n]).abs().max().item() for n in live)])
    return max(abs(a - b) for a, b in zip(losses, expected, strict=True)), apart, ""


def _clip_alone(model: Clip, a: Tensor, b: Tensor) -> Tensor:
    left, right = F.normalize(model.left(a), dim=-1), F.normalize(model.right(b), dim=-1)
    return model.scale.exp() * left @ right.T


CELLS = [(kind, plan) for kind in ("clip", "simclr") for plan in PLANS]


@pytest.mark.parametrize(("kind", "plan"), CELLS)
def test_gradients_are_those_of_one_process(pool, kind, plan):
    world, stated = PLANS[plan]
    for loss, state, told in pool(world).run(train, kind, stated):
        assert told == ""
        assert loss <= 1e-5
        assert state <= parity.TOLERANCE


PP = {"mesh": {"pp": 2, "dp_replicate": 2}, "strategy": "ddp"}


@pytest.mark.parametrize("microbatches", [1, 2])
def test_stages_gather_in_the_loss_of_a_whole_batch(pool, microbatches):
    plan = PP | {"pipeline": {"schedule": "GPipe", "microbatches": microbatches}}
    for loss, state, told in pool(4).run(train, "simclr", plan):
        if microbatches == 1:
            assert (loss <= 1e-5, state <= parity.TOLERANCE, told) == (True, True, "")
        else:
            assert "gather_batch sees only one of the 2 microbatches" in told


def test_what_cannot_be_gathered_is_refused(pool):
    plan = PP | {"pipeline": {"schedule": "GPipe", "microbatches": 1}}
    for _, _, told in pool(4).run(train, "clip", plan):
        assert "call gather_batch in the loss function" in told
    accumulated = {"strategy": "ddp", "batch": {"accumulate": 2}}
    for _, _, told in pool(2).run(train, "simclr", accumulated):
        assert "gather_batch sees only one of the 2 microbatches" in told


def uneven() -> str:
    """What ranks are told that hold other numbers of samples."""
    model = meshplan.parallelize(SimClr(), {"version": 1, "strategy": "ddp"})
    rank = torch.distributed.get_rank()
    try:
        meshplan.gather_batch(torch.zeros(2 + rank, 3), model)
    except meshplan.ApplyError as error:
        return str(error)
    return ""


def test_uneven_samples_are_refused(pool):
    for told in pool(2).run(uneven):
        assert "(2, 3) torch.float32 on rank 0 and (3, 3) torch.float32 on rank 1" in told


@pytest.mark.parametrize("plan", ["ddp", "full_shard"])
def test_a_loss_that_does_not_gather_is_refused(pool, plan):
    for _, _, told in pool(2).run(train, "alone", PLANS[plan][1]):
        assert "loss_fn compares samples with one another" in told
        assert "meshplan.gather_batch" in told


def test_without_other_ranks_it_is_the_tensor_itself():
    tensor = torch.ones(3)
    assert meshplan.gather_batch(tensor) is tensor


MEANS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {"strategy": "ddp"}),
    "full_shard": (2, {"strategy": "full_shard"}),
    "cp": (2, {"mesh": {"cp": 2}}),
    "hybrid": (4, {"strategy": "hybrid_shard", "mesh": [2, 2]}),
    "tp x fsdp": (4, {"mesh": {"dp_shard": 2, "tp": 2}, "rules": models.tp_rules("own_llama")}),
}


def masked_batch(step: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of which the ranks keep very unequal numbers."""
    tokens, targets = models.batch("own_llama", step)
    generator = torch.Generator().manual_seed(step)
    kept = (
        torch.rand(targets.shape, generator=generator) < torch.linspace(0, 1, len(targets))[:, None]
    )
    return tokens, torch.where(kept, targets, -100)


def summed(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    flat = targets.flatten()
    return F.cross_entropy(output.flatten(0, 1), flat, reduction="sum"), (flat != -100).sum()


def by_hand(plan: dict[str, Any], microbatches: int, is_local: bool = False) -> tuple[float, float]:
    """The largest differences of losses and parameters from one process.

    Args:
        is_local: Whether each rank takes the mean over its own tokens instead.
    """
    alone = models.build("own_llama")
    model = meshplan.parallelize(models.build("own_llama"), {"version": 1, **plan})
    sgd = [models.optimizer(m) for m in (alone, model)]
    losses = 0.0
    for step in range(3):
        tokens, targets = masked_batch(step)
        total, count = summed(alone(tokens), targets)
        (total / count).backward()
        own, kept = meshplan.local_batch(model, (tokens, targets))
        num = (kept != -100).sum()
        mean = 0.0
        for part, wanted in zip(own.chunk(microbatches), kept.chunk(microbatches), strict=True):
            sums, _ = summed(model(part), wanted)
            loss = sums / num if is_local else meshplan.global_mean(sums, num, model)
            loss.backward()
            mean += loss.item()
        losses = max(losses, abs(mean - (total / count).item()))
        for each in sgd:
            each.step()
            each.zero_grad()
    live, state = meshplan.full_state_dict(model), alone.state_dict()
    return losses, max([0.0, *((live[n] - state[n]).abs().max().item() for n in live)])


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("case", MEANS)
def test_a_loop_by_hand_has_the_mean_of_one_process(pool, case, microbatches):
    world, plan = MEANS[case]
    for loss, state in pool(world).run(by_hand, plan, microbatches):
        assert loss <= 1e-5
        assert state <= parity.TOLERANCE


def test_the_means_of_ranks_are_not_that_mean(pool):
    """Else the test above would tell nothing."""
    loss, state = pool(2).run(by_hand, MEANS["ddp"][1], 1, True)[0]
    assert loss > 1e-2
    assert state > 100 * parity.TOLERANCE


def test_on_one_process_it_is_the_mean():
    x = torch.tensor([3.0, 5.0], requires_grad=True)
    mean = meshplan.global_mean(x.sum(), 4)
    mean.backward()
    assert (mean.item(), x.grad.tolist()) == (2.0, [0.25, 0.25])
    half = torch.tensor([3.0], dtype=torch.bfloat16, requires_grad=True)
    mean = meshplan.global_mean(half, torch.tensor([2]))
    mean.backward()
    assert (mean.dtype, mean.shape, half.grad.tolist()) == (torch.float32, (), [0.5])


def none_counted() -> tuple[float, list[float]]:
    model = meshplan.parallelize(nn.Linear(2, 2), {"version": 1, "strategy": "ddp"})
    loss = meshplan.global_mean(model(torch.ones(1, 2)).sum() * float("nan"), 0, model)
    loss.backward()
    return loss.item(), model.module.bias.grad.nan_to_num(0.0).tolist()


def test_nothing_counted_is_zero(pool):
    assert pool(2).run(none_counted) == [(0.0, [0.0, 0.0])] * 2


@pytest.mark.parametrize(
    ("total", "count", "says"),
    [
        (torch.ones(2), 2, r"a sum of shape \[2\]\n.*sum the losses first"),
        (torch.tensor(1), 2, "a sum that is not a floating-point tensor"),
        (1.0, 2, "a sum that is not a floating-point tensor"),
        (torch.tensor(1.0), torch.ones(2), "a count that is not one number"),
        (torch.tensor(1.0), True, "a count that is not one number"),
        (torch.tensor(1.0), -1, "add up to -1"),
        (torch.tensor(1.0), float("nan"), "add up to nan"),
    ],
)
def test_what_is_no_sum_and_count_is_refused(total, count, says):
    with pytest.raises(meshplan.ApplyError, match=says):
        meshplan.global_mean(total, count)


def mean_in(plan: dict[str, Any], is_own_loop: bool) -> str:
    """What is said of a loss function that takes the global mean itself."""
    tokens, targets = models.batch("own_llama", 0)
    words = {"version": 1, **plan}
    model = meshplan.parallelize(models.build("own_llama"), words, example_inputs=tokens)
    batch = meshplan.local_batch(model, (tokens, targets))

    def loss(output: Tensor, wanted: Tensor) -> Tensor:
        return meshplan.global_mean(*summed(output, wanted), model)

    try:
        if is_own_loop:
            model.step(*batch, loss)
        else:
            meshplan.train_step(model, models.optimizer(model), *batch, loss)
    except meshplan.ApplyError as error:
        return str(error)
    return ""


def test_where_it_is_not_for_it_is_refused(pool):
    for told in pool(2).run(mean_in, {"strategy": "ddp"}, False):
        assert "global_mean was called inside train_step" in told
        assert "return (sum, count) from the loss function" in told
    stages = {"mesh": {"pp": 2}, "pipeline": {"schedule": "1F1B", "microbatches": 2}}
    for told in pool(2).run(mean_in, stages, True):
        assert "global_mean does not support pipelined models" in told
