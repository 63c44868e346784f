"""What must be the same on several ranks: batches, copies of parameters, a criterion's weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import meshplan
from meshplan.runtime.base import digest
from meshplan.runtime.base.mesh import local_of
from meshplan.runtime.comparisons import drift
from meshplan.runtime.comparisons.drift import _differ, _sums, _tolerance
from tests.helpers import models, parity

RULES = models.tp_rules("own_llama")
PP = {"schedule": "1F1B", "microbatches": 2}
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {"strategy": "ddp"}),
    "full_shard": (2, {"strategy": "full_shard"}),
    "hybrid": (4, {"strategy": "hybrid_shard", "mesh": [2, 2]}),
    "tp": (2, {"mesh": {"tp": 2}, "rules": RULES}),
    "tp x fsdp": (4, {"mesh": {"dp_shard": 2, "tp": 2}, "rules": RULES}),
    "pp": (2, {"mesh": {"pp": 2}, "pipeline": PP}),
    "cp": (2, {"mesh": {"cp": 2}}),
}


def make(plan: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    example, _ = models.batch("own_llama", 0, 2)
    stated = {"version": 1, **PLANS[plan][1]}
    model = meshplan.parallelize(models.build("own_llama"), stated, example_inputs=example)
    return model, models.optimizer(model)


def others_from(step: int, plan: str, what: str) -> tuple[int, str]:
    """(the step that was refused, what it said) where a rank reads other samples from a step on."""
    model, sgd = make(plan)
    for now in range(1, 6):
        inputs, targets = models.batch("own_llama", now)
        if now >= step and dist.get_rank() == 1:
            other_inputs, other_targets = models.batch("own_llama", now + 50)
            inputs = other_inputs if what == "inputs" else inputs
            targets = other_targets if what == "targets" else targets
        before = [local_of(p).clone() for p in model.parameters()]
        try:
            meshplan.train_step(
                model, sgd, *meshplan.local_batch(model, (inputs, targets)), models.loss
            )
        except meshplan.ApplyError as error:
            after = [local_of(p) for p in model.parameters()]
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
            return now, str(error)
    return 0, ""


@pytest.mark.parametrize(
    ("plan", "step", "what"),
    [
        ("tp", 1, "inputs"),
        ("tp", 3, "targets"),
        ("pp", 1, "targets"),
        ("pp", 5, "inputs"),
        ("cp", 3, "inputs"),
        ("tp x fsdp", 3, "inputs"),
    ],
)
def test_other_samples_in_a_replica_are_refused_in_that_step(pool, plan, step, what):
    told = pool(PLANS[plan][0]).run(others_from, step, plan, what)
    for rank, (found, words) in enumerate(told):
        assert found == step
        if plan != "tp x fsdp" or rank < 2:
            name = "the batch given to local_batch" if plan == "cp" else what
            assert f"the values of {name} differ between rank 0 and rank 1" in words
            assert "*meshplan.data_rank(model)" in words
    pool(PLANS[plan][0]).close()  # Ranks of another replica went on: the group is dead.


def others_on_a_gpu(plan: str) -> tuple[int, str]:
    """The same where batches are summed as on an accelerator, whose numbers no rank waits for."""
    of_host, digest._is_on_host = digest._is_on_host, lambda tensor: False
    try:
        return others_from(3, plan, "inputs")
    finally:
        digest._is_on_host = of_host


@pytest.mark.parametrize("plan", ["tp", "pp", "cp"])
def test_batches_on_a_gpu_are_compared_too(pool, plan):
    for found, words in pool(PLANS[plan][0]).run(others_on_a_gpu, plan):
        assert found == 3
        assert "differ between rank 0 and rank 1" in words
    pool(PLANS[plan][0]).close()


def by_hand(plan: str) -> str:
    """What a loop by hand says when a rank of the replica reads other samples."""
    model, _ = make(plan)
    inputs, targets = models.batch("own_llama", dist.get_rank())
    try:
        if plan == "pp":
            model.step(inputs, targets, models.loss)
        else:
            models.loss(model(inputs), targets).backward()
    except meshplan.ApplyError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("plan", ["tp", "pp"])
def test_a_loop_by_hand_is_told_too(pool, plan):
    for told in pool(2).run(by_hand, plan):
        assert "inputs.0.0 differ" in told or "inputs differ" in told
        assert "between rank 0 and rank 1" in told


def rounded() -> str:
    """Inputs that each rank has computed for itself, equal but for rounding."""
    model = meshplan.parallelize(
        nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)),
        {"version": 1, "mesh": {"tp": 2}, "rules": [{"match": "0", "place": {"tp": "colwise"}},
                                                    {"match": "1", "place": {"tp": "rowwise"}}]},
    )  # fmt: skip
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)) * (1 + 1e-7 * dist.get_rank())
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    try:
        meshplan.train_step(model, sgd, x, torch.zeros(4, 8), F.mse_loss)
    except meshplan.ApplyError as error:
        return str(error)
    return ""


def test_rounding_is_not_another_batch(pool):
    assert pool(2).run(rounded) == ["", ""]


# Copies of parameters.


def drifted(plan: str, name: str, when: str) -> tuple[str, int]:
    """(what was said, the step) after one rank wrote to its copy behind step 1 or before a save."""
    model, sgd = make(plan)
    for step in range(1, 5):
        try:
            batch = meshplan.local_batch(model, models.batch("own_llama", step))
            meshplan.train_step(model, sgd, *batch, models.loss)
            if step == 1 and when == "step":
                write(model, name)
        except meshplan.ApplyError as error:
            return str(error), step
    if when == "save":
        write(model, name)
    try:
        meshplan.full_state_dict(model)
    except meshplan.ApplyError as error:
        return str(error), 5
    return "", 0


def write(model: nn.Module, name: str) -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        parameter = next(p for n, p in model.named_parameters() if n.endswith(name))
        with torch.no_grad():
            local_of(parameter).mul_(1.1)


@pytest.mark.parametrize(
    ("plan", "when"), [("ddp", "save"), ("ddp", "step"), ("hybrid", "step"), ("tp", "step")]
)
def test_copies_that_part_are_refused_by_name(pool, plan, when):
    name = "norm.weight"
    for told, step in pool(PLANS[plan][0]).run(drifted, plan, name, when):
        assert "several ranks hold a copy of" in told
        assert name in told
        assert step == (2 if when == "step" else 5)


@pytest.mark.parametrize("plan", ["full_shard", "tp x fsdp", "pp"])
def test_nothing_is_said_of_copies_that_stay(pool, plan):
    assert pool(PLANS[plan][0]).run(drifted, plan, "", "never") == [("", 0)] * PLANS[plan][0]


def num_compared(plan: str) -> int:
    """How often copies are compared in two steps."""
    asked = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drift, "check_drift", lambda *_: asked.append(0))
        model, sgd = make(plan)
        for step in range(2):
            batch = meshplan.local_batch(model, models.batch("own_llama", step))
            meshplan.train_step(model, sgd, *batch, models.loss)
    return len(asked)


@pytest.mark.parametrize(("plan", "times"), [("ddp", 2), ("full_shard", 0)])
def test_only_where_there_are_copies_they_are_compared(pool, plan, times):
    assert pool(2).run(num_compared, plan) == [times] * 2


class Sharing(nn.Module):
    """Its second half has the weights of the first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(4))
        self.layers[2].weight = self.layers[0].weight
        self.layers[3].weight = self.layers[1].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def shared_by_stages() -> str:
    """What is said after one stage alone wrote to the second weight, while the first is frozen."""
    split = [["layers.0", "layers.1"], ["layers.2", "layers.3"]]
    plan = {"version": 1, "mesh": {"pp": 2}, "pipeline": PP | {"split": split}}
    batch = torch.ones(4, 4), torch.zeros(4, 4)
    model = meshplan.parallelize(Sharing(), plan, example_inputs=batch[0])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith("layers.0.weight"))
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    meshplan.train_step(model, sgd, *batch, F.mse_loss)
    write(model, "layers.1.weight")
    try:
        meshplan.train_step(model, sgd, *batch, F.mse_loss)
    except meshplan.ApplyError as error:
        return str(error)
    return ""


def test_copies_of_stages_that_part_are_refused_beside_a_frozen_one(pool):
    for told in pool(2).run(shared_by_stages):
        assert "several ranks hold a copy of layers.1.weight, and the copies" in told


def test_copies_of_one_sum_differ_by_their_squares():
    pairs = torch.tensor([[1.0, 1.0], [1.0, 2.0]])
    one, other = ([nn.Parameter(torch.stack((x, -x))) for x in each] for each in pairs)
    low, high = torch.minimum(_sums(one), _sums(other)), torch.maximum(_sums(one), _sums(other))
    assert _differ(low, high, _tolerance(one, ("dp_replicate",))).tolist() == [False, True]


# A criterion with parameters of its own.


class Criterion(nn.Module):
    """Learned weights of two losses."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.tensor([0.3, -0.2]))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        both = torch.stack((F.mse_loss(output, target), F.l1_loss(output, target)))
        return (both * self.weights.exp() - self.weights).sum()


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def with_criterion(plan: dict[str, Any], is_known: bool) -> tuple[str, float]:
    alone, alone_criterion = net(), Criterion()
    model: nn.Module = meshplan.parallelize(net(), {"version": 1, **plan})
    criterion: nn.Module = Criterion()
    if is_known:
        criterion = meshplan.parallelize(criterion, {"version": 1, "strategy": "ddp"})
    sgd = torch.optim.SGD([*model.parameters(), *criterion.parameters()], 0.1)
    sgd_alone = torch.optim.SGD([*alone.parameters(), *alone_criterion.parameters()], 0.1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        x, y = torch.randn(8, 8, generator=generator), torch.randn(8, 4, generator=generator)
        alone_criterion(alone(x), y).backward()
        sgd_alone.step()
        sgd_alone.zero_grad()
        try:
            meshplan.train_step(model, sgd, *meshplan.local_batch(model, (x, y)), criterion)
        except meshplan.ApplyError as error:
            return str(error), 0.0
    inner = getattr(criterion, "module", criterion)
    apart = (inner.weights - alone_criterion.weights).abs().max().item()
    state = meshplan.full_state_dict(model)
    expected = alone.state_dict()
    return "", max([apart, *((state[n] - expected[n]).abs().max().item() for n in state)])


CRITERIA: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "full_shard": {"strategy": "full_shard"},
    "accumulate": {"strategy": "full_shard", "batch": {"accumulate": 2}},
}


@pytest.mark.parametrize("plan", CRITERIA)
def test_a_parallelized_criterion_trains_as_in_one_process(pool, plan):
    for told, apart in pool(2).run(with_criterion, CRITERIA[plan], True):
        assert told == ""
        assert apart <= parity.TOLERANCE


@pytest.mark.parametrize("plan", ["ddp"])
def test_a_criterion_that_no_plan_knows_is_refused(pool, plan):
    for told, _ in pool(2).run(with_criterion, CRITERIA[plan], False):
        assert "of shape [2] that belongs to no parallelized model" in told


def stepped(plan: dict[str, Any], is_early: bool) -> str:
    """Take a step in a loop by hand, with an optimizer made before or after `parallelize`."""
    model = net()
    early = torch.optim.SGD(model.parameters(), 0.1)
    wrapped = meshplan.parallelize(model, plan)
    sgd = early if is_early else torch.optim.SGD(wrapped.parameters(), 0.1)
    x, y = meshplan.local_batch(wrapped, (torch.randn(8, 8), torch.randn(8, 4)))
    F.mse_loss(wrapped(x), y).backward()
    try:
        sgd.step()
    except meshplan.ApplyError as error:
        return str(error)
    return ""


EARLY: dict[str, dict[str, Any]] = {
    "full_shard": {"version": 1, "strategy": "full_shard"},
    "tp": {
        "version": 1,
        "mesh": {"tp": 2},
        "rules": [{"match": "0", "place": {"tp": "colwise_gather_output"}}],
    },
}


@pytest.mark.parametrize("plan", EARLY)
def test_an_optimizer_of_parameters_that_were_replaced_is_refused(pool, plan):
    for told in pool(2).run(stepped, EARLY[plan], is_early=True):
        assert "the optimizer was created before parallelize" in told
    assert pool(2).run(stepped, EARLY[plan], is_early=False) == ["", ""]


def test_ddp_replaces_no_parameter(pool):
    plan = {"version": 1, "strategy": "ddp"}
    assert pool(2).run(stepped, plan, is_early=True) == ["", ""]


def two_models() -> str:
    """A generator and its discriminator in one optimizer."""
    both = [meshplan.parallelize(net(), {"version": 1, "strategy": "ddp"}) for _ in range(2)]
    sgd = torch.optim.SGD([p for model in both for p in model.parameters()], 0.1)
    x, y = torch.randn(8, 8), torch.randn(8, 4)
    try:
        meshplan.train_step(both[0], sgd, *meshplan.local_batch(both[0], (x, y)), F.mse_loss)
    except meshplan.ApplyError as error:
        return str(error)
    return ""


def test_one_optimizer_may_hold_two_models(pool):
    assert pool(2).run(two_models) == ["", ""]
