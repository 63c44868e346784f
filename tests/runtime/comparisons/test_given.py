"""Samples that data ranks were given: the same on several of them, or not as many as planned."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import meshplan
from meshplan.plan.plan import make_plan
from meshplan.runtime.base.digest import mark
from meshplan.runtime.comparisons import given
from meshplan.runtime.comparisons.given import is_distinctive, repeated_axis
from meshplan.runtime.trace.structure import graph_of

DDP: dict[str, Any] = {"version": 1, "strategy": "ddp"}
FULL: dict[str, Any] = {"version": 1, "strategy": "full_shard"}
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, DDP),
    "full_shard": (2, FULL),
    "hybrid": (4, {"version": 1, "strategy": "hybrid_shard", "mesh": [2, 2]}),
    "accumulate": (2, FULL | {"batch": {"accumulate": 2}}),
    "tp x fsdp": (4, {"version": 1, "mesh": {"dp_shard": 2, "tp": 2}, "rules": [
        {"match": "0", "place": {"tp": "colwise"}}, {"match": "2", "place": {"tp": "rowwise"}}]}),
    "pp x fsdp": (4, {"version": 1, "mesh": {"pp": 2, "dp_shard": 2},
                      "pipeline": {"schedule": "1F1B", "microbatches": 2}}),
}  # fmt: skip


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def batch(seed: int, size: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 8, generator=generator), torch.randn(size, 4, generator=generator)


def seeds(what: str, step: int, plan: meshplan.Plan) -> int:
    """A number of the batch that this rank is given."""
    rank = dist.get_rank()
    own = plan.mesh.index(rank, ("dp_replicate", "dp_shard"))
    match what:
        case "the same":
            return step
        case "the same once":
            return step if step == 4 else 100 * step + own
        case "the same from 4 on":
            return step if step >= 4 else 100 * step + own
        case "a sampler that counts too few":
            return 100 * step + plan.mesh.index(rank, ("dp_shard",))
    return 100 * step + own


def train(plan: dict[str, Any], what: str, by_hand: bool, steps: int = 5) -> tuple[int, str, int]:
    """(the step that was refused or 0, what was said, notes)."""
    x, _ = batch(0)
    model = meshplan.parallelize(net(), plan, example_inputs=x[:4])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = [p.detach().clone() for p in model.parameters()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(1, steps + 1):
            seed = seeds(what, step, model.meshplan.plan)
            x, y = batch(seed)
            if what == "local_batch":
                x, y = meshplan.local_batch(model, batch(step, 8 * dist.get_world_size()))
            if what == "local_batch of one sample":
                world, (x, y) = dist.get_world_size(), batch(step, 1)
                x, y = meshplan.local_batch(model, (x.repeat(world, 1), y.repeat(world, 1)))
            if what == "ones":
                x, y = torch.ones(8, 8), torch.zeros(8, 4)
            try:
                if not by_hand:
                    meshplan.train_step(model, optimizer, x, y, F.mse_loss)
                    continue
                if hasattr(model, "step"):
                    model.step(x, y, F.mse_loss)
                else:
                    F.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            except meshplan.ApplyError as error:
                if step == 1:
                    after = list(model.parameters())
                    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
                return step, str(error), 0
    notes = [n for n in caught if "the plan states" in str(n.message)]
    return 0, "", len(notes)


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_the_same_samples_are_refused_in_the_first_step(pool, plan, by_hand):
    world, stated = PLANS[plan]
    for step, told, _ in pool(world).run(train, stated, "the same", by_hand):
        assert step == 1
        assert "were given the same 8 samples" in told
        assert "local_batch" in told
        assert "*meshplan.data_rank(model)" in told


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_sampler_that_counts_too_few_ranks_is_refused(pool, by_hand):
    world, stated = PLANS["hybrid"]
    for step, told, _ in pool(world).run(train, stated, "a sampler that counts too few", by_hand):
        assert step == 1
        assert "ranks 0 and 2 were given the same 8 samples, like all ranks along" in told


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize(
    ("what", "step"), [("the same from 4 on", 5), ("the same once", 0), ("others", 0)]
)
def test_later_only_what_is_repeated_is_refused(pool, what, step, by_hand):
    assert [at for at, *_ in pool(2).run(train, FULL, what, by_hand, 6)] == [step] * 2


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("what", ["local_batch", "local_batch of one sample", "ones"])
def test_what_may_be_equal_is_not_refused(pool, what, by_hand):
    plan = PLANS["full_shard"][1]
    assert pool(2).run(train, plan, what, by_hand) == [(0, "", 0)] * 2


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_plan_may_say_that_ranks_hold_the_same(pool, by_hand):
    plan = DDP | {"batch": {"per_rank": True}}
    assert pool(2).run(train, plan, "the same", by_hand) == [(0, "", 0)] * 2


@pytest.mark.parametrize("by_hand", [False, True])
def test_one_data_rank_has_nobody_to_differ_from(pool, by_hand):
    plan = {"version": 1, "mesh": {"tp": 2}, "rules": PLANS["tp x fsdp"][1]["rules"]}
    assert pool(2).run(train, plan, "the same", by_hand) == [(0, "", 0)] * 2


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize(
    ("stated", "notes"),
    [
        ({"micro": 4}, 1),
        ({"micro": 8}, 0),
        ({"global": 16}, 0),
        ({"global": 32}, 1),
        ({"micro": 4, "accumulate": 2}, 0),
    ],
)
def test_another_size_than_the_plans_is_noted_once(pool, stated, notes, by_hand):
    told = pool(2).run(train, DDP | {"batch": stated}, "others", by_hand, 2)
    assert told == [(0, "", notes), (0, "", 0)]


def test_both_numbers_are_said(pool):
    plan = DDP | {"batch": {"micro": 4}}
    for step, told, _ in pool(2).run(train, plan, "the same", False):
        assert step == 1
        assert "the same 8 samples" in told
        assert "but the plan's batch of 8 has 4 for each of 2 data ranks" in told


def two_models(is_alone: bool) -> str:
    """What is said of a generator that is fed the same noise, beside a discriminator or alone."""
    generator, judge = meshplan.parallelize(net(), DDP), meshplan.parallelize(net(), DDP)
    sgd = [torch.optim.SGD(model.parameters(), 0.1) for model in (generator, judge)]
    noise = torch.Generator().manual_seed(0)
    for step in range(3):
        z, (x, y) = torch.randn(8, 8, generator=noise), batch(10 * step + dist.get_rank())
        try:
            if not is_alone:
                F.mse_loss(judge(x), y).backward()
                sgd[1].step()
                sgd[1].zero_grad()
            generator(z).square().mean().backward()
            sgd[0].step()
            sgd[0].zero_grad()
        except meshplan.ApplyError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("is_alone", [False, True])
def test_noise_may_be_the_same_beside_samples_that_differ(pool, is_alone):
    for told in pool(2).run(two_models, is_alone):
        assert ("were given the same 8 samples" in told) == is_alone


def evaluated() -> str:
    """What is said of the same samples that nobody trains on."""
    model = meshplan.parallelize(net(), DDP)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, _ = batch(0)
    model.eval()
    with torch.no_grad():
        model(x)
    model.train()
    try:
        F.mse_loss(model(batch(1 + dist.get_rank())[0]), torch.zeros(8, 4)).backward()
        optimizer.step()
    except meshplan.ApplyError as error:
        return str(error)
    return ""


def test_evaluation_is_not_compared(pool):
    assert pool(2).run(evaluated) == ["", ""]


def test_what_a_batch_can_tell():
    assert is_distinctive(batch(0))
    assert is_distinctive(torch.randint(0, 1000, (1, 64)))
    assert not is_distinctive(torch.ones(4, 8))
    assert not is_distinctive(torch.randn(1, 8).repeat(4, 1))
    assert not is_distinctive((torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([0, 1])))
    assert not is_distinctive(mark(torch.randn(4, 8), None))


@pytest.mark.parametrize(
    ("numbers", "axis"),
    [
        ([1, 2, 3, 4], None),
        ([1, 1, 2, 2], "dp_shard"),
        ([1, 2, 1, 2], "dp_replicate"),
        ([1, 2, 2, 1], None),
        ([1, 1, 1, 2], None),
    ],
)
def test_twins_are_found_along_either_axis(numbers, axis):
    spec = meshplan.load_spec({"version": 1, "strategy": "hybrid_shard", "mesh": [2, 2]})
    plan = make_plan(spec, graph_of(net()), world_size=4)
    assert repeated_axis(numbers, plan) == axis


def looks(steps: int) -> int:
    """How often all ranks exchange numbers for it in a loop by hand."""
    asked = []
    with pytest.MonkeyPatch.context() as patch:
        real = given.slots
        patch.setattr(given, "slots", lambda *args: asked.append(0) or real(*args))
        train(FULL, "others", True, steps)
    return len(asked)


def test_it_is_looked_at_ever_less(pool):
    assert pool(2).run(looks, 9) == [4, 4]
