"""Parity with one process: loss and every parameter, after three steps of SGD with momentum.

Every layout on the models that differ most at 4 ranks, the main ones on the others, and those that
need it at 8; `-m wide` runs every layout on every model, `tests/bench/parity.py` the whole matrix.
Which seeded bug would this catch? Any layout that is applied otherwise than declared: a gradient
reduced twice or not at all, a cut along the wrong dim, an untied weight.
"""

from __future__ import annotations

import pytest
import torch

import meshplan
from tests.helpers import models, parity

CELLS = [(name, layout, 4) for name in models.NAMES for layout in parity.LAYOUTS] + [
    (name, layout, 8)
    for name in ("own_llama", "hf_llama_tied", "t5", "odd")
    for layout in ("hybrid_shard", "hybrid_mixture", "tp_full_shard", "tp_hybrid")
]
APART = ("own_llama", "t5", "odd")
"""Models that have little in common."""
MAIN = ("full_shard", "tp_full_shard")
ALIKE = ("hf_llama", "qwen3")
"""Models of which another has all but the names."""


def is_wide(name: str, layout: str, world: int) -> bool:
    """Whether a cell only combines what others show."""
    if world > 4:
        return name != "odd"
    return name not in APART and (layout not in MAIN or name in ALIKE)


RUNNABLE = [
    pytest.param(*cell, marks=[pytest.mark.wide] if is_wide(*cell) else [])
    for cell in CELLS
    if not isinstance(parity.cell_plan(*cell), str)
]


def assert_same(result: dict[str, float]) -> None:
    assert result["loss"] <= parity.TOLERANCE, result
    assert result["state"] <= parity.TOLERANCE, result


@pytest.mark.parametrize(("name", "layout", "world"), RUNNABLE)
def test_cell(pool, name, layout, world):
    plan = parity.cell_plan(name, layout, world)
    assert_same(pool(world).run(parity.train, name, plan)[0])


@pytest.mark.parametrize("strategy", ["full_shard", "zero1"])
@pytest.mark.parametrize("beside", ["blocks.1", "blocks.1.shared"])
def test_a_module_of_many_names_is_a_unit_inside_others(pool, strategy, beside):
    """Its first name is short, but it lies in blocks that are units too: it is wrapped first."""
    rules = [{"match": name, "unit": True} for name in ("shared", beside)]
    result = pool(2).run(parity.train, "odd", {"version": 1, "strategy": strategy, "rules": rules})
    assert_same(result[0])


def test_loss_is_the_same_number_on_every_rank(pool):
    results = pool(4).run(parity.train, "own_llama", {"version": 1, "strategy": "full_shard"})
    assert len({r["loss"] for r in results}) == 1


def wrong_on_purpose(plan: dict[str, object]) -> dict[str, float]:
    """A seeded bug: rank 1 trains on rank 0's samples."""
    original = meshplan.Mesh.index
    meshplan.Mesh.index = lambda self, rank, names: original(self, 0 if rank == 1 else rank, names)
    try:
        return parity.train("own_llama", plan)
    finally:
        meshplan.Mesh.index = original


def test_the_comparison_can_fail(pool):
    result = pool(2).run(wrong_on_purpose, {"version": 1, "strategy": "full_shard"})[0]
    assert result["loss"] > 1e-3
    assert result["state"] > 1e-4


def plain_loop(plan: dict[str, object]) -> tuple[float, float]:
    """The ordinary PyTorch loop, with nothing of meshplan after `parallelize`."""
    model = meshplan.parallelize(models.build("own_llama"), plan)
    sgd = models.optimizer(model)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for step in range(3):
        inputs, targets = models.batch("own_llama", step)
        loss = models.loss(model(inputs.chunk(world)[rank]), targets.chunk(world)[rank])
        loss.backward()
        sgd.step()
        sgd.zero_grad()
    torch.distributed.all_reduce(loss := loss.detach())
    _, expected = models.reference("own_llama")
    live = meshplan.full_state_dict(model)
    apart = [(live[n] - t).abs().max().item() for n, t in expected.items() if n in live]
    return loss.item() / world - models.reference("own_llama")[0][-1], max(apart, default=0.0)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "full_shard"])
def test_plain_pytorch_loop(pool, strategy):
    loss, state = pool(2).run(plain_loop, {"version": 1, "strategy": strategy})[0]
    assert abs(loss) <= parity.TOLERANCE
    assert state <= parity.TOLERANCE
