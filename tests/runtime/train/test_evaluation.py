"""`eval_step` and `reduce`: numbers of one process, and a model that is as it was before.

Which seeded bug would this catch? A mean of the ranks' means, tokens of padding that count, ranks
along tp or pp that count twice, modules left in evaluation mode, or a frozen norm that trains.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import meshplan
from meshplan.errors import ApplyError
from tests.helpers.stated import BATCH, LAYOUTS, SEQ_LEN, VOCAB, Model, next_token_loss, plan_of


def tokens(num, masks=False):
    generator = torch.Generator().manual_seed(3)
    drawn = torch.randint(VOCAB, (num, SEQ_LEN + 1), generator=generator)
    targets = drawn[:, 1:].clone()
    if masks:
        targets[: num // 2, 2:] = -100
        targets[-1] = -100
    return drawn[:, :-1], targets


def summed(logits, targets):
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return loss, (targets != -100).sum()


def total(logits, targets):
    return summed(logits, targets)[0]


KINDS = {"mean": next_token_loss, "tokens": next_token_loss, "sum": total, "pair": summed}


def alone(kind):
    torch.manual_seed(0)
    inputs, targets = tokens(BATCH, masks=kind in ("tokens", "pair"))
    with torch.no_grad():
        loss, count = summed(Model()(inputs), targets)
    return float(loss if kind == "sum" else loss / count)


def wrapped(layout, kind):
    torch.manual_seed(0)
    more = {} if kind == "pair" else {"loss": kind}
    plan = plan_of(layout)
    if LAYOUTS[layout].world == 1:
        plan["batch"] = {"accumulate": 2}
    return meshplan.parallelize(Model(), plan | more)


def evaluated(layout, kind):
    """Losses before and after steps of training, and those of the steps."""
    model = wrapped(layout, kind)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batch = meshplan.local_batch(model, tokens(BATCH, masks=kind in ("tokens", "pair")))
    found = [meshplan.eval_step(model, *batch, KINDS[kind])]
    for _ in range(2):
        found.append(meshplan.train_step(model, optimizer, *batch, KINDS[kind]))
        found.append(meshplan.eval_step(model, *batch, KINDS[kind]))
    assert all(module.training for module in model.modules())
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "layout",
    ["one", "full_shard", "packed", "pp", "cp", *(pytest.param(name, marks=pytest.mark.wide)
     for name in ("ddp", "hybrid", "tp_fsdp", "pp_fsdp_tp", "ep_fsdp"))],
)  # fmt: skip
def test_losses_are_those_of_one_process(pool, layout, kind):
    expected = alone(kind)
    for found in pool(LAYOUTS[layout].world).run(evaluated, layout, kind):
        assert found[0] == pytest.approx(expected, rel=1e-5)
        # A step returns the loss before it: evaluation says the same, and changes nothing.
        assert found[1] == pytest.approx(found[0], rel=1e-5)
        assert found[3] == pytest.approx(found[2], rel=1e-5)
        assert found[4] < found[2] < found[0]


def uneven():
    """Rank 0 has two samples, rank 1 six."""
    model = wrapped("ddp", "mean")
    inputs, targets = tokens(BATCH)
    own = slice(0, 2) if torch.distributed.get_rank() == 0 else slice(2, 8)
    return meshplan.eval_step(model, inputs[own], targets[own], next_token_loss)


def test_each_sample_counts_once_if_ranks_have_unequal_numbers(pool):
    assert pool(2).run(uneven) == [pytest.approx(alone("mean"), rel=1e-5)] * 2


def uneven_pipelines():
    """Two data ranks of two stages, with 4 samples each, with 4 and 2, and with 2 and 4."""
    plan = plan_of("pp") | {"mesh": {"pp": 2, "dp_shard": 2}, "strategy": "full_shard"}
    torch.manual_seed(0)
    model = meshplan.parallelize(Model(), plan)
    inputs, targets = tokens(BATCH)
    is_second = torch.distributed.get_rank() % 2
    found = []
    for first, num in ((4, 8), (4, 6), (2, 6)):
        own = slice(first, num) if is_second else slice(0, first)
        found.append(meshplan.eval_step(model, inputs[own], targets[own], next_token_loss))
    return found


def test_data_ranks_of_a_pipeline_may_have_unequal_numbers(pool):
    """The one that meets a new number waited for the other, which knew its own: a deadlock."""
    torch.manual_seed(0)
    model = Model().eval()
    inputs, targets = tokens(BATCH)
    losses = [next_token_loss(model(inputs[:n]), targets[:n]).item() for n in (8, 6, 6)]
    for found in pool(4).run(uneven_pipelines):
        assert found == pytest.approx(losses, rel=1e-5)


def modes():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout())
    model = meshplan.parallelize(model, {"version": 1, "strategy": "full_shard"})
    model[1].eval()
    x = torch.randn(8, 4)
    before = model[1].running_mean.clone()
    losses = {meshplan.eval_step(model, x, x, F.mse_loss) for _ in range(2)}
    assert len(losses) == 1  # Dropout is off.
    assert torch.equal(model[1].running_mean, before)
    assert [m.training for m in model] == [True, False, True]
    with pytest.raises(ZeroDivisionError):
        meshplan.eval_step(model, x, x, lambda out, y: 1 / 0)
    assert [m.training for m in model] == [True, False, True]
    with pytest.raises(ApplyError, match="returned a float instead of a loss"):
        meshplan.eval_step(model, x, x, lambda out, y: 1.0)


def test_every_module_is_back_in_its_own_mode(pool):
    pool(1).run(modes)


def reduced(layout):
    model = wrapped(layout, "mean")
    plan = model.meshplan.plan
    place = plan.mesh.index(torch.distributed.get_rank(), ("dp_replicate", "dp_shard", "cp"))
    number = torch.tensor([place, 2 * place])
    return [
        meshplan.reduce(float(place), model=model),
        meshplan.reduce(place, "sum", model),
        meshplan.reduce(place, "max", model),
        meshplan.reduce(place + 1, "min", model),
        meshplan.reduce(number, "sum", model).tolist(),
        meshplan.reduce(number, model=model).tolist(),
        number.tolist() == [place, 2 * place],
    ]


@pytest.mark.parametrize(("layout", "ranks"), [("tp_fsdp", 4), ("cp", 2), ("pp", 1), ("one", 1)])
def test_ranks_with_other_samples_count_once(pool, layout, ranks):
    most = ranks - 1
    expected = [most / 2, ranks * most / 2, most, 1, [ranks * most / 2, ranks * most],
                [most / 2, most], True]  # fmt: skip
    assert pool(LAYOUTS[layout].world).run(reduced, layout) == [expected] * LAYOUTS[layout].world


def test_what_cannot_be_reduced_is_said():
    with pytest.raises(ApplyError, match="there is no reduction 'median'"):
        meshplan.reduce(1.0, "median")
