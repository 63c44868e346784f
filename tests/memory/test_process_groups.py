"""The groups of ranks that a step sends in are those for which memory is left.

Which seeded bug would this catch? A group that a check opens for itself, of which no estimate
knows: NCCL keeps up to two gigabytes for each.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import meshplan
from meshplan.layout.mesh import Axis, Mesh
from meshplan.memory.log.driver import CommunicatorUse, communicators, driver_bytes
from meshplan.model.blueprint import from_mapping
from meshplan.plan.plan import make_plan
from meshplan.runtime.base.mesh import (
    device_mesh,
    objects_along,
    reduce_along,
    unit_mesh,
    without_partial,
)
from meshplan.spec.reader import load_spec
from tests.helpers import models

TIED = from_mapping({
    "model_type": "llama", "vocab_size": 160, "hidden_size": 48, "intermediate_size": 112,
    "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 6,
    "tie_word_embeddings": True,
})  # fmt: skip
RULES: dict[str, Any] = {"rules": models.tp_rules("own_llama"), "version": 1}


def opened(name: str, spec: dict[str, Any]) -> tuple[set[tuple[int, ...]], set[tuple[int, ...]]]:
    """(the groups that this rank is in after two steps, those that are told of)."""
    example, _ = models.batch(name, 0, 2)
    model = meshplan.parallelize(models.build(name), spec, example_inputs=example)
    sgd = models.optimizer(model)
    for step in range(2):
        inputs, targets = meshplan.local_batch(model, models.batch(name, step))
        meshplan.train_step(model, sgd, inputs, targets, models.loss)
    rank = dist.get_rank()
    live = (dist.get_process_group_ranks(g) for g in dist.distributed_c10d._world.pg_map)
    there = {tuple(sorted(ranks)) for ranks in live if rank in ranks and len(ranks) > 1}
    plan, mesh = model.meshplan.plan, model.meshplan.mesh
    names, place = mesh.mesh_dim_names, mesh.get_coordinate()
    told = set()
    for each in communicators(plan.assignment):
        at = tuple(
            slice(None) if name in each.axes else own
            for name, own in zip(names, place, strict=True)
        )
        told.add(tuple(sorted(mesh.mesh[at].flatten().tolist())))
    return there, told


@pytest.mark.parametrize(
    "mesh",
    [
        {"pp": 2, "tp": 2},
        pytest.param({"pp": 2, "dp_shard": 2, "tp": 2}, marks=pytest.mark.wide),
        pytest.param({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, marks=pytest.mark.wide),
    ],
    ids=str,
)
def test_no_group_is_opened_that_nobody_counts(pool: Any, mesh: dict[str, int]) -> None:
    ranks = pool(math.prod(mesh.values()))
    ranks.close()  # processes that ran other tests may be in groups of those
    for there, told in ranks.run(opened, "own_llama", RULES | {"mesh": mesh}):
        assert there == told


def test_stages_that_share_a_weight_have_a_group_of_their_own(pool: Any) -> None:
    """The first and the last of four; every rank leaves room for it."""
    found = pool(4).run(opened, "hf_llama_tied", {"version": 1, "mesh": {"pp": 4}})
    # Processes that ran other tests have other groups too.
    assert [(0, 3) in there for there, _ in found] == [True, False, False, True]
    plan = make_plan(load_spec({"version": 1, "mesh": {"pp": 4}}), TIED)
    *others, own = communicators(plan.assignment)
    assert (own.use, own.ranks) == (CommunicatorUse.SHARED, 2)
    least, usual, most = driver_bytes("h100-sxm-80gb", [own])
    plain = driver_bytes("h100-sxm-80gb")
    assert least == plain.low
    assert usual > plain.expected
    assert most > plain.high
    assert CommunicatorUse.SHARED not in {each.use for each in others}


def along_both() -> tuple[float, float, list[int], list[int]]:
    """What two axes, and one of them, come to."""
    mesh = device_mesh(Mesh((Axis("dp_shard", 2), Axis("tp", 2))))
    highest, own = (torch.tensor(float(dist.get_rank())) for _ in range(2))
    reduce_along(highest, mesh, ("dp_shard", "tp"), dist.ReduceOp.MAX)
    reduce_along(own, mesh, ("tp",), dist.ReduceOp.SUM)
    both, one = (
        objects_along(dist.get_rank(), mesh, axes) for axes in (("dp_shard", "tp"), ("tp",))
    )
    return float(highest), float(own), both, one


def test_axis_by_axis_all_ranks_come_to_the_same(pool: Any) -> None:
    found = pool(4).run(along_both)
    assert [highest for highest, *_ in found] == [3.0] * 4
    assert [own for _, own, *_ in found] == [1.0, 1.0, 5.0, 5.0]
    assert all(sorted(both) == [0, 1, 2, 3] and both == found[0][2] for *_, both, _ in found)
    assert [one for *_, one in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def meshes_of_units() -> list[tuple[int, ...]]:
    """Of a unit that is sharded alone, and of one that has replicas."""
    mesh = device_mesh(Mesh((Axis("dp_shard", 2), Axis("cp", 2))))
    each = [((), ("dp_shard", "cp")), (("dp_shard",), ("cp",))]
    return [tuple(unit_mesh(mesh, replicate, shard).shape) for replicate, shard in each]


def test_what_two_axes_shard_is_cut_over_all_of_their_ranks(pool: Any) -> None:
    # Of a mesh of two dims FSDP would take the first for replicas, which hold twice as much.
    assert pool(4).run(meshes_of_units) == [[(4,), (2, 2)]] * 4


def without_addends() -> list[Any]:
    mesh = device_mesh(Mesh((Axis("dp_shard", 2), Axis("tp", 2))))
    part = DTensor.from_local(torch.ones(2), mesh, [Shard(0), Partial()], run_check=False)
    done = without_partial(part)
    assert isinstance(done, DTensor)
    return [done.placements, done.to_local().tolist()]


def test_what_one_axis_adds_up_is_added_where_another_cuts(pool: Any) -> None:
    assert pool(4).run(without_addends) == [[(Shard(0), Replicate()), [2.0, 2.0]]] * 4
