"""The groups of ranks that a step sends in are those for which memory is left.

Which seeded bug would this catch? A group that a check opens for itself, of which no estimate
knows: NCCL keeps up to two gigabytes for each.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

import meshplan
from meshplan.memory.driver import communicators
from tests import models

RULES: dict[str, Any] = {"rules": models.tp_rules("own_llama"), "version": 1}


def opened(spec: dict[str, Any]) -> tuple[set[tuple[int, ...]], set[tuple[int, ...]]]:
    """(the groups that this rank is in after two steps, those that are told of)."""
    model = meshplan.parallelize(models.build("own_llama"), spec)
    sgd = models.optimizer(model)
    for step in range(2):
        inputs, targets = meshplan.local_batch(model, models.batch("own_llama", step))
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
        {"pp": 2, "dp_shard": 2, "tp": 2},
        pytest.param({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, marks=pytest.mark.wide),
    ],
    ids=str,
)
def test_no_group_is_opened_that_nobody_counts(pool: Any, mesh: dict[str, int]) -> None:
    for there, told in pool(8).run(opened, RULES | {"mesh": mesh}):
        assert there == told
