"""The plan for other hardware beside the one that there is."""

from __future__ import annotations

import pytest

import meshplan
from meshplan.errors import SpecError
from meshplan.planner.answers.reshard import reshard
from tests.planner.test_planner import job

__all__ = ["job"]

HARDWARE = {"nodes": 1, "gpus_per_node": 4, "gpu": "h100-sxm-80gb", "inter": "50GB/s"}


def test_other_hardware_has_its_own_plan_and_the_way_there_its_bytes(job):
    path = job(hardware=HARDWARE)
    found = meshplan.retarget(path, {"nodes": 2, "gpu": "h200-sxm-141gb"})
    chosen = found.decision.chosen.plan
    assert (chosen.mesh.world_size, chosen.spec.hardware.gpu) == (8, "h200-sxm-141gb")
    old = meshplan.decide(path)
    assert old.mesh.world_size == 4
    assert found.moved == reshard(old, chosen)
    assert {("mesh.dp_shard", 4, 8)} <= {
        (each.what, each.old, each.new) for each in found.difference.fields
    }
    same = meshplan.retarget(path, "nodes=2,gpu=h200-sxm-141gb", old=chosen)
    assert same.moved.moved_bytes == 0
    assert same.difference.fields == ()


@pytest.mark.wide
def test_where_nothing_fits_there_is_nothing_to_compare(job):
    found = meshplan.retarget(job(hardware=HARDWARE), {"headroom": 0.999})
    assert (found.decision.chosen, found.difference, found.moved) == (None, None, None)


@pytest.mark.parametrize("bad", ["colour=red", "nodes", "", {}])
def test_what_is_no_hardware_is_refused(bad, job):
    with pytest.raises(SpecError):
        meshplan.retarget(job(hardware=HARDWARE), bad)
