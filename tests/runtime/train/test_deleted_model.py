"""What a deleted model leaves in memory: nothing, so that the next one has the whole device.

Which seeded bug would this catch? A callback of the optimizer, a cache or a registry that keeps the
parameters of the last model.
"""

from __future__ import annotations

import gc

import pytest
from torch import nn

from tests.helpers.stated import LAYOUTS, Job, plan_of


def left(layout: str) -> int:
    """How many parameters more there are after a model was made, trained and deleted."""
    before = num_parameters()
    Job(plan_of(layout)).train(3)
    return num_parameters() - before


def num_parameters() -> int:
    gc.collect()
    return sum(isinstance(found, nn.Parameter) for found in gc.get_objects())


@pytest.mark.parametrize("layout", ["one", "ddp", "full_shard", "packed", "pp", "cp", "ep_fsdp"])
def test_a_deleted_model_leaves_no_parameter(pool, layout):
    world = LAYOUTS[layout].world
    assert pool(world).run(left, layout) == [0] * world
