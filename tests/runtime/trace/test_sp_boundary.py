"""Boundaries of sequence parallel regions that `tp_plan: auto` finds: gradients of one process.

Which seeded bug would this catch? A boundary whose backward adds up what every rank has whole, or
keeps the part that one rank has; a sequence that is split although tp does not divide it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import meshplan
from meshplan.runtime.trace.sp_boundary import _part
from tests.helpers import models

PLAN = {"version": 1, "mesh": {"tp": 2}, "tp_plan": "auto", "sequence_parallel": True}
CLOSE = 1e-4
"""Relative, for each gradient: a part that is lost or counted twice is off by 0.1 and more."""


def compared(name: str) -> tuple[set[str], dict[str, float]]:
    """The kinds of boundaries, and the relative difference of every gradient that is off."""
    inputs, targets = models.batch(name, 0, 2)
    live = meshplan.parallelize(models.build(name), PLAN, example_inputs=inputs)
    alone = models.build(name)
    for model in (live, alone):
        models.loss(models.call(model, inputs), targets).backward()
    apart = {}
    for fqn, parameter in live.named_parameters():
        gradient, expected = parameter.grad, alone.get_parameter(fqn).grad
        assert (gradient is None) == (expected is None)
        if gradient is None or expected is None:
            continue
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        scale = max(float(expected.norm()), 1e-6)  # A bias before a softmax has none but rounding.
        apart[fqn] = float((whole - expected).norm()) / scale
    crossings = live.meshplan.plan.assignment.crossings
    kinds = {each.change if each.path is not None else "gather the output" for each in crossings}
    return kinds, {fqn: each for fqn, each in apart.items() if each > CLOSE}


@pytest.mark.parametrize(
    ("name", "kinds"),
    [("own_llama", {"cut", "gather"}), ("gpt2", {"cut", "gather", "gather the output"})],
)
def test_gradients_are_those_of_one_process(pool: Any, name: str, kinds: set[str]) -> None:
    assert pool(2).run(compared, name) == [(kinds, {})] * 2


def odd() -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    try:
        _part(torch.zeros(2, 5, 4), mesh)
    except meshplan.ApplyError as error:
        return str(error)
    return ""


def test_a_sequence_that_tp_does_not_divide_is_refused(pool: Any) -> None:
    for told in pool(2).run(odd):
        assert "does not divide its length 5" in told
