"""Ways round the wrapper: refused where they are gone, with the call that does what was meant.

Which seeded bug would this catch? A model inside DistributedDataParallel that is called by itself
from the third step on trains each rank on its own samples until the next comparison of gradients.
"""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

import meshplan
from tests.runtime.checks.test_outside import Plain, batch

PLANS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "full_shard": {"strategy": "full_shard"},
    "pp": {"mesh": {"pp": 2}, "pipeline": {"schedule": "1F1B", "microbatches": 2}},
}


def made(plan: str) -> nn.Module:
    words = {"version": 1, **PLANS[plan]}
    return meshplan.parallelize(Plain(), words, example_inputs=batch()[0])


def go(plan: str, way: str) -> str:
    """What is said to a model that has trained for two steps."""
    model = made(plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = meshplan.local_batch(model, batch())
    for _ in range(2):
        meshplan.train_step(model, optimizer, x, y, F.mse_loss)
    inner = getattr(model, "module", model) if plan == "ddp" else model
    ways = {
        "inside": lambda: inner(x),
        "a block": lambda: inner.layers[0](x),
        "a layer": lambda: inner.head(x),
        "attribute": lambda: model.head,
        "deepcopy": lambda: copy.deepcopy(model),
        "average": lambda: AveragedModel(model),
        "pickle": lambda: pickle.dumps(model),
        "save": lambda: torch.save(model, io.BytesIO()),
        "half": lambda: model.half(),
        "double": lambda: model.to(torch.float64),
    }
    try:
        ways[way]()
    except (meshplan.ApplyError, AttributeError) as error:
        text = str(error)
    else:
        return "done"
    # It trains on, whatever was tried.
    meshplan.train_step(model, optimizer, x, y, F.mse_loss)
    return text


SAID = {
    ("ddp", "inside"): "model.module was called directly instead of through DistributedData",
    ("ddp", "a block"): "model.module.layers.0 was called directly",
    ("ddp", "attribute"): "read it as model.module.head",
    ("full_shard", "a layer"): "'head' was called directly, outside the model's forward",
    ("full_shard", "a block"): "done",
    ("pp", "attribute"): "is not on this rank, which holds only some pipeline stages",
    **{(plan, way): "cannot be copied or pickled" for plan in PLANS
       for way in ("deepcopy", "average", "pickle", "save")},
    **{(plan, way): "set precision in the plan" for plan in PLANS for way in ("half", "double")},
}  # fmt: skip


@pytest.mark.parametrize(("plan", "way"), SAID, ids=" ".join)
def test_each_way_round_is_told(pool, plan, way):
    for text in pool(2).run(go, plan, way):
        assert SAID[plan, way] in text


def harmless(plan: str) -> bool:
    """Evaluation by parts, moves that change nothing, and reading are left alone."""
    model = made(plan)
    x, _ = meshplan.local_batch(model, batch())
    inner = getattr(model, "module", model) if plan == "ddp" else model
    model.to(torch.float32).cpu().float()
    if plan == "ddp":
        with torch.no_grad():
            inner(x)
            inner.head(x)
    return copy.deepcopy(model.meshplan.plan.spec) is not None


@pytest.mark.parametrize("plan", PLANS)
def test_what_is_harmless_goes_on(pool, plan):
    assert all(pool(2).run(harmless, plan))


def penalised(plan: str, is_whole: bool) -> tuple[str, float]:
    """What is said to an L1 penalty on the parameters, and how far it goes from one process."""
    torch.manual_seed(0)
    alone = Plain()
    model = meshplan.parallelize(copy.deepcopy(alone), {"version": 1, **PLANS[plan]})
    steps = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, alone)]
    x, y = batch()
    here = meshplan.local_batch(model, (x, y))
    for _ in range(2):
        for each, optimizer, inputs, targets in ((model, steps[0], *here), (alone, steps[1], x, y)):
            norms = [p.abs().sum() for p in each.parameters()]
            whole = [n.full_tensor() if is_whole and isinstance(n, DTensor) else n for n in norms]
            try:
                (F.mse_loss(each(inputs), targets) + 1e-2 * sum(whole)).backward()
            except meshplan.ApplyError as error:
                return str(error), 0.0
            optimizer.step()
            optimizer.zero_grad()
    full, state = meshplan.full_state_dict(model), alone.state_dict()
    return "", max([0.0, *((full[n] - state[n]).abs().max().item() for n in full)])


def test_a_penalty_on_sharded_parameters_is_told_what_to_add(pool):
    for said, _ in pool(2).run(penalised, "full_shard", False):
        assert "penalty.full_tensor()" in said
    for plan, is_whole in (("full_shard", True), ("ddp", False)):
        for said, apart in pool(2).run(penalised, plan, is_whole):
            assert said == ""
            assert apart < 1e-6


TP = {
    "mesh": {"tp": 2},
    "rules": [{"match": "head", "place": {"tp": "colwise_gather_output"}}],
}
"""The blocks stay plain, so that a sum over all parameters is one of two kinds."""


def penalised_inside(plan: dict[str, Any], form: str) -> tuple[str, float]:
    """What is said to a loss function that reads the parameters, and how far it is from alone."""
    torch.manual_seed(0)
    alone = Plain()
    inner = copy.deepcopy(alone)
    model = meshplan.parallelize(inner, {"version": 1, **plan}, example_inputs=batch()[0])
    x, y = batch()

    def plain(value: Any) -> Any:
        return value.full_tensor() if isinstance(value, DTensor) else value

    def loss(output: Any, targets: Any, module: nn.Module = inner) -> Any:
        terms = [p.square().sum() for p in module.parameters()]
        if form == "each":
            terms = [plain(term) for term in terms]
        penalty = plain(sum(terms)) if form == "sum" else sum(terms)
        return F.mse_loss(output, targets) + 1e-2 * penalty

    expected = loss(alone(x), y, alone)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        found = meshplan.train_step(model, sgd, *meshplan.local_batch(model, (x, y)), loss)
    except meshplan.ApplyError as error:
        return str(error), 0.0
    expected.backward()
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    full, state = meshplan.full_state_dict(model), alone.state_dict()
    apart = max([0.0, *((full[n] - state[n]).abs().max().item() for n in full)])
    return "", max(abs(found - expected.item()), apart)


@pytest.mark.parametrize("form", ["as they are", "sum", "each"])
def test_a_loss_that_reads_parameters_is_right_or_told_what_to_add(pool, form):
    for said, apart in pool(2).run(penalised_inside, TP, form):
        assert ("penalty.full_tensor()" in said) == (form != "each"), said
        assert apart < 1e-6


def test_a_loss_that_reads_parameters_of_other_stages_is_refused(pool):
    for said, _ in pool(2).run(penalised_inside, PLANS["pp"], "each"):
        assert "reads parameters of the model that was given to parallelize" in said
