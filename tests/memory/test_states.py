"""Predicted state is live state, byte for byte, on every rank.

The prediction is made here, in a process without a group; the bytes are counted on the ranks.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import meshplan
from meshplan.api import checking
from meshplan.layout.layout import Layout
from meshplan.memory import StateBytes, state_bytes_by_rank
from meshplan.memory.answer import states
from meshplan.plan.plan import Plan, make_plan
from meshplan.runtime.base.held_bytes import live_bytes
from meshplan.runtime.trace.structure import graph_of
from meshplan.spec.reader import load_spec
from tests.helpers import models
from tests.helpers.parity import cell_plan
from tests.planner.test_planner import LLAMA, job

__all__ = ["job"]

SGD, ADAM = {"optimizer": "sgd_momentum"}, {"optimizer": "adamw"}
MIXED, HALF = {"precision": "bf16-mixed"}, {"precision": "bf16-true"}
HALF_REDUCED = {"precision": {"param": "bf16", "reduce": "bf16", "master": "fp32"}}
ALONE = [{"match": {"param": "{embed,norm}.weight"}, "place": {"dp_shard": "R"}}]
DIM_1 = [{"match": "layers.*.ffn.{w1,w2}", "place": {"dp_shard": "S(1)"}}]
GATHERED = [{"match": {"param": "layers.*.norm1.weight"}, "place": {"tp": "S(0)"}}]

CELLS: list[tuple[int, str, str, dict[str, Any]]] = [
    (4, "own_llama", "ddp", ADAM),
    (4, "own_llama", "ddp", ADAM | {"ddp": {"gradient_as_bucket_view": False}}),
    (4, "own_llama", "zero1", ADAM | MIXED),
    (4, "own_llama", "zero2", SGD | HALF),
    (4, "own_llama", "full_shard", ADAM | HALF),
    (4, "own_llama", "full_shard", SGD | {"more rules": DIM_1}),
    (4, "own_llama", "full_shard", ADAM | {"more rules": ALONE}),
    (4, "own_llama", "hybrid_mixture", ADAM | MIXED),
    (4, "own_llama", "tp", SGD),
    (4, "own_llama", "tp", ADAM | {"more rules": GATHERED}),
    (4, "own_llama", "tp_ddp", ADAM | MIXED),
    (4, "own_llama", "tp_full_shard", SGD | {"more rules": ALONE}),
    (4, "hf_llama_tied", "full_shard", ADAM),
    (4, "hf_llama_tied", "tp", SGD),
    (4, "hf_llama_tied", "tp_full_shard", ADAM | HALF_REDUCED),
    (4, "gpt2", "hybrid_shard_zero2", ADAM),
    (4, "t5", "tp_full_shard", ADAM),
    (4, "odd", "ddp", SGD),
    (4, "odd", "zero1", ADAM),
    (4, "odd", "hybrid_mixture", SGD),
    (4, "resnet", "full_shard", ADAM),
    (8, "odd", "full_shard", SGD),
    (8, "odd", "hybrid_shard", ADAM),
    (8, "own_llama", "tp_hybrid", ADAM | MIXED),
]


def plan_of(world: int, model: str, layout: str, more: dict[str, Any]) -> dict[str, Any]:
    plan = cell_plan(model, layout, world)
    assert isinstance(plan, dict), plan
    rules = [*plan["rules"], *more.get("more rules", ())]
    return {**plan, **{k: v for k, v in more.items() if k != "more rules"}, "rules": rules}


def predicted(plan: Plan) -> tuple[StateBytes, ...]:
    return state_bytes_by_rank(plan.assignment, plan.spec.optimizer)


def decide(world: int, model: str, plan: dict[str, Any]) -> Plan:
    return make_plan(load_spec(plan), graph_of(models.build(model)), world_size=world)


def train(name: str, plan: dict[str, Any], on_meta: bool = False) -> tuple[StateBytes, list[str]]:
    """This rank's bytes at their height, and the parameters whose gradient lies otherwise."""
    model = models.build(name)
    model = meshplan.parallelize(model.to("meta") if on_meta else model, plan)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer: torch.optim.Optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    if plan.get("optimizer") == "adamw":
        optimizer = torch.optim.AdamW(params)
    for step in range(3):
        optimizer.step()
        optimizer.zero_grad()
        inputs, targets = meshplan.local_batch(model, models.batch(name, step))
        models.loss(models.call(model, inputs), targets).backward()
    otherwise = [
        fqn
        for fqn, p in model.named_parameters()
        if p.requires_grad and getattr(p, "placements", None) != getattr(p.grad, "placements", None)
    ]
    return live_bytes(model, optimizer), otherwise


# One of four: the traces of test_memory_exact hold the same sums against real processes.
@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(cell, marks=[pytest.mark.wide] if number % 4 else [])
        for number, cell in enumerate(CELLS)
    ],
    ids=lambda c: "-".join(map(str, c[:3])),
)
def test_live_bytes_are_the_predicted_bytes(pool: Any, cell: Any) -> None:
    world, model, layout, more = cell
    plan = plan_of(world, model, layout, more)
    ranks = pool(world).run(train, model, plan)
    assert tuple(live for live, _ in ranks) == predicted(decide(world, model, plan))
    assert [otherwise for _, otherwise in ranks] == [[]] * world


@pytest.mark.parametrize(
    ("layout", "more"), [("tp", []), ("full_shard", ALONE), ("tp_full_shard", ALONE)]
)
def test_a_model_from_meta_holds_the_same_bytes(pool: Any, layout: str, more: list[Any]) -> None:
    plan = plan_of(4, "own_llama", layout, SGD | {"more rules": more})
    ranks = pool(4).run(train, "own_llama", plan, on_meta=True)
    assert tuple(live for live, _ in ranks) == predicted(decide(4, "own_llama", plan))
    assert [otherwise for _, otherwise in ranks] == [[]] * 4


def test_it_can_fail(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of memory that forgets FSDP2's padding is found out, on the ranks it is wrong on."""
    plan = plan_of(4, "odd", "full_shard", SGD)
    live = [bytes_ for bytes_, _ in pool(4).run(train, "odd", plan)]
    monkeypatch.setattr(
        states,
        "_stored_numel",
        lambda kind, mesh, rank: kind.stored.local_numel(kind.shape, mesh, rank),
    )
    wrong = predicted(decide(4, "odd", plan))
    assert [a == b for a, b in zip(live, wrong, strict=True)] == [True, True, True, False]


def test_what_the_numbers_are() -> None:
    """Odd, added up by hand."""
    # Shared 24x24 + 24; each block 24 + 37x24 + 37 + 24x37; bias; temperature; head 8x24 + 8.
    trainable, frozen, buffers = 600 + 2 * 1837 + 24 + 1 + 200, 600, 72
    whole = predicted(decide(2, "odd", {"version": 1, "strategy": "ddp"} | SGD))
    assert whole[0] == whole[1] == StateBytes(
        4 * (trainable + frozen), 4 * trainable, 4 * trainable, 4 * buffers
    )  # fmt: skip
    # 14 trainable tensors: one float32 step counter each.
    adam = predicted(decide(2, "odd", {"version": 1, "strategy": "ddp"} | ADAM))
    assert adam[0].optimizer_bytes == 8 * trainable + 4 * 14
    assert adam[0].total_bytes == 16 * trainable + 4 * (frozen + buffers) + 56
    # Every tensor but the scalar is halved; `up` has 37 rows: 19 and 18, stored as 19 and 19.
    halves = predicted(decide(2, "odd", {"version": 1, "strategy": "full_shard"} | SGD))
    padding = 2 * (24 + 1)
    stored = 1 + (trainable - 1 + padding) // 2
    assert [h.gradients_bytes for h in halves] == [4 * stored] * 2
    assert [h.optimizer_bytes for h in halves] == [4 * stored, 4 * (stored - padding)]


def test_padding_is_of_the_piece_that_tp_left() -> None:
    layout = Layout((("tp", "dp_shard"),))
    mesh = meshplan.Mesh.of({"dp_shard": 4, "tp": 2})
    assert [layout.padded_numel((10,), mesh, ("dp_shard",), rank) for rank in range(8)] == [2] * 8
    assert [layout.local_numel((10,), mesh, rank) for rank in (0, 2, 4, 6)] == [2, 2, 1, 0]


@pytest.mark.parametrize(
    "fields",
    [
        {"mesh": {"dp_shard": 8}, "strategy": "full_shard"},
        {"mesh": {"dp_replicate": 2, "dp_shard": 4}, "strategy": "hybrid_shard"},
        {"mesh": {"pp": 2, "dp_shard": 2, "tp": 2}, "tp_plan": "auto", "strategy": "zero1",
         "pipeline": {"schedule": "Interleaved1F1B", "virtual": 2, "microbatches": 4},
         "batch": {"micro": 4, "accumulate": 1, "seq_len": 64}},
        {"mesh": {"dp_shard": 8}, "strategy": "full_shard", "offload": "params"},
    ],
)  # fmt: skip
def test_all_ranks_together_hold_what_each_does(job, fields):
    """Many are alike, and are counted once: each for itself says the same."""
    batch = {"micro": 1, "accumulate": 1, "seq_len": 64}
    path = job(LLAMA | {"vocab_size": 4099}, **({"batch": batch} | fields))
    plan = checking.decide(path)
    optimizer = plan.spec.optimizer
    every = states.state_bytes_by_rank(plan.assignment, optimizer)
    alone = [states.state_bytes(plan.assignment, optimizer, rank) for rank in range(8)]
    assert list(map(dataclasses.astuple, every)) == list(map(dataclasses.astuple, alone))
    assert len(set(every)) > 1
