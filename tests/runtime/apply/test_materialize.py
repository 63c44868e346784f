"""Where the numbers come from: meta, different seeds, one rank with all values."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

import meshplan
from meshplan.plan.plan import Plan, make_plan
from meshplan.runtime.apply.parameters import materialize
from meshplan.runtime.apply.parameters.materialize import InitialValues, _part
from meshplan.runtime.trace.structure import graph_of
from meshplan.spec.reader import load_spec
from tests.helpers import models, parity

FROM_META = ("own_llama", "hf_llama_tied", "gpt2", "qwen3", "bert", "vit", "t5", "resnet")


def on_meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return models.BUILDERS[name]().train()


def initialised_alone(name: str) -> nn.Module:
    """What one process gets: transformers' own initialisation, or the constructor's numbers."""
    torch.manual_seed(0)
    if not hasattr(on_meta(name), "init_weights"):
        return models.BUILDERS[name]()
    model = on_meta(name).to_empty(device="cpu")
    model.tie_weights()
    model.init_weights()
    return model


def differing(name: str, plan: dict[str, Any]) -> list[str]:
    """The tensors of a model from meta that are not bit for bit those of one process."""
    model = on_meta(name)
    # Only rank 0's seed may count.
    torch.manual_seed(torch.distributed.get_rank())
    live = meshplan.full_state_dict(meshplan.parallelize(model, plan))
    if torch.distributed.get_rank():
        return []
    expected = initialised_alone(name).state_dict()
    assert live.keys() == expected.keys()
    return [fqn for fqn, t in expected.items() if not torch.equal(live[fqn], t)]


@pytest.mark.parametrize("layout", ["ddp", "full_shard", "tp_full_shard"])
@pytest.mark.parametrize("name", FROM_META)
def test_meta_gives_the_numbers_of_one_process(pool, name, layout):
    plan = parity.cell_plan(name, layout, 4)
    if isinstance(plan, str):
        pytest.skip(plan)
    assert pool(4).run(differing, name, plan)[0] == []


def trained_from_meta(name: str, plan: dict[str, Any]) -> float:
    """A step after meta: buffers and ties must be live too."""
    torch.manual_seed(0)
    model = meshplan.parallelize(on_meta(name), plan)
    inputs, targets = meshplan.local_batch(model, models.batch(name, 0))
    live = meshplan.train_step(model, models.optimizer(model), inputs, targets, models.loss)
    alone = initialised_alone(name)
    inputs, targets = models.batch(name, 0)
    return abs(models.loss(models.call(alone, inputs), targets).item() - live)


@pytest.mark.parametrize("name", ["hf_llama_tied", "bert", "t5"])
def test_a_model_from_meta_trains(pool, name):
    plan = parity.cell_plan(name, "tp_full_shard", 4)
    assert max(pool(4).run(trained_from_meta, name, plan)) <= parity.TOLERANCE


def different_seeds(plan: dict[str, Any]) -> list[float]:
    """Every rank built another model: rank 0's must win."""
    model = meshplan.parallelize(models.build("own_llama", torch.distributed.get_rank()), plan)
    expected = models.build("own_llama", 0).state_dict()
    live = meshplan.full_state_dict(model)
    return [(live[n] - t).abs().max().item() for n, t in expected.items() if live]


@pytest.mark.parametrize("layout", ["ddp", "full_shard", "tp_full_shard", "hybrid_mixture"])
def test_rank_0_decides_where_ranks_differ(pool, layout):
    plan = parity.cell_plan("own_llama", layout, 4)
    assert max(pool(4).run(different_seeds, plan)[0]) == 0.0


def values_on(rank: int, plan: dict[str, Any]) -> list[float]:
    """One rank loaded the weights, the others built on meta."""
    mine = torch.distributed.get_rank() == rank
    model = models.build("own_llama", 5) if mine else on_meta("own_llama")
    live = meshplan.full_state_dict(meshplan.parallelize(model, plan))
    expected = models.build("own_llama", 5).state_dict()
    return [(live[n] - t).abs().max().item() for n, t in expected.items() if live]


@pytest.mark.parametrize("rank", [0, 2])
def test_one_rank_may_have_all_values(pool, rank):
    plan = parity.cell_plan("own_llama", "tp_full_shard", 4)
    assert max(pool(4).run(values_on, rank, plan)[0]) == 0.0


class Forgetful(nn.Module):
    """Its buffer is computed in the constructor and by nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(4.0), persistent=False)


class Partly(nn.Linear):
    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight[:2].zero_()
            if self.bias is not None:
                self.bias.zero_()


def refusal(kind: type[nn.Module], *args: Any) -> tuple[str, bool]:
    with torch.device("meta"):
        model = kind(*args)
    try:
        meshplan.parallelize(model, {"version": 1, "strategy": "full_shard"})
    except meshplan.ApplyError as error:
        tensors = [*model.parameters(), *model.buffers()]
        return str(error), all(t.is_meta for t in tensors)
    return "", False


def test_what_nothing_initialises_is_refused(pool):
    message, untouched = pool(2).run(refusal, Forgetful)[0]
    assert untouched
    assert message == (
        "meshplan: 1 problem\n"
        "table is on the meta device, and no code initialises it: Forgetful has no "
        "reset_parameters() that sets it\n"
        "    fix: define Forgetful.reset_parameters(), define init_weights() on the model, or "
        "build the model on the CPU"
    )


def test_what_is_initialised_in_part_is_refused(pool):
    message, untouched = pool(2).run(refusal, Partly, 4, 4)[0]
    assert untouched
    assert "weight was on the meta device, and its initialisation leaves some" in message


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("style", ["colwise", "rowwise"])
def test_a_part_keeps_nothing_of_the_rest(monkeypatch, rank, style):
    """A view would keep the whole tensor, and every rank the whole model."""
    monkeypatch.setattr("meshplan.runtime.apply.parameters.materialize.dist.get_rank", lambda: rank)
    rules = [{"match": "0", "place": {"tp": style}}]
    spec = load_spec({"version": 1, "mesh": {"tp": 2}, "rules": rules})
    plan = make_plan(spec, graph_of(nn.Sequential(nn.Linear(4, 8))), world_size=2)
    value = torch.arange(32.0).reshape(8, 4)
    part = _part(value, "0.weight", plan)
    assert part.equal(value.chunk(2, 0 if style == "colwise" else 1)[rank])
    assert part.untyped_storage().nbytes() == value.nbytes // 2
    assert part.is_contiguous()


def test_a_model_on_meta_is_given_memory_where_the_plan_keeps_each_part(monkeypatch):
    """With a device that is not the host, only what is offloaded lies on the host."""
    monkeypatch.setattr(
        "meshplan.runtime.apply.parameters.materialize.device", lambda: torch.device("meta")
    )
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    rules = [{"match": "1", "offload": "params"}]
    spec = load_spec({"version": 1, "strategy": "full_shard", "rules": rules})
    plan = make_plan(spec, graph_of(model), world_size=2)
    InitialValues({"1.weight": torch.ones(4, 4)}).fill(model, plan)
    assert [param.device.type for param in model.parameters()] == ["meta", "meta", "cpu", "cpu"]
    assert model[1].weight.equal(torch.ones(4, 4))


def alive_while_filling() -> tuple[list[int], int]:
    """How many initial values are alive at each copy of one, and how many there are."""
    alive: list[int] = []
    values: list[weakref.ref[torch.Tensor]] = []
    fill, local_of = InitialValues.fill, materialize.local_of

    def watched(self: InitialValues, model: nn.Module, plan: Plan) -> None:
        values.extend(map(weakref.ref, self.local.values()))
        fill(self, model, plan)

    def counted(tensor: Any) -> torch.Tensor:
        alive.append(sum(value() is not None for value in values))
        return local_of(tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InitialValues, "fill", watched)
        patch.setattr(materialize, "local_of", counted)
        meshplan.parallelize(on_meta("own_llama"), {"version": 1, "strategy": "full_shard"})
    return alive, len(values)


def test_an_initial_value_is_freed_once_it_is_in_the_model(pool):
    for alive, count in pool(2).run(alive_while_filling):
        assert alive == list(range(count, 0, -1))
