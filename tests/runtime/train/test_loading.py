"""What may be loaded into a parallelized model.

Which seeded bug would this catch? Whole tensors that torch meets with an error of its own insides,
or sharded ones that are refused.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import meshplan
from meshplan.errors import ApplyError
from tests.helpers import models


def load(plan: dict[str, Any]) -> tuple[str, float]:
    """(what loading whole tensors says, how far loading the model's own moves it)."""
    model = meshplan.parallelize(models.build("own_llama"), {"version": 1, **plan})
    told = ""
    try:
        model.load_state_dict(models.build("own_llama").state_dict())
    except ApplyError as error:
        told = str(error)
    before = [p.detach().clone() for p in model.parameters()]
    model.load_state_dict(model.state_dict())
    after = list(model.parameters())
    apart = [(a - b).abs().max() for a, b in zip(before, after, strict=True)]
    return told, max(float(getattr(x, "full_tensor", lambda x=x: x)()) for x in apart)


@pytest.mark.parametrize("mesh", [{"dp_shard": 2}, {"tp": 2}])
def test_whole_tensors_are_refused_and_parts_are_taken(pool: Any, mesh: dict[str, int]) -> None:
    rules = models.tp_rules("own_llama") if "tp" in mesh else []
    for told, apart in pool(2).run(load, {"mesh": mesh, "rules": rules}):
        assert "the full tensor of embed.weight, but this rank holds a shard of it" in told
        assert "fix: load the state dict before parallelize" in told
        assert apart == 0.0


def test_a_model_of_whole_tensors_takes_them(pool: Any) -> None:
    assert pool(2).run(load_whole) == [0.0, 0.0]


def load_whole() -> float:
    model = meshplan.parallelize(models.build("own_llama"), {"version": 1, "strategy": "ddp"})
    state = {f"module.{n}": torch.ones_like(t) for n, t in model.module.state_dict().items()}
    model.load_state_dict(state)
    return max(float((p - 1).abs().max()) for p in model.parameters())
