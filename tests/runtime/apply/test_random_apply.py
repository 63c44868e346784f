"""`model.apply(fn)` of a parallelized model gives the weights of one process, or is refused.

Which seeded bug would this catch? Shards of a tensor that start alike, because every rank drew the
same numbers for its own; a function without random numbers that is refused.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import meshplan


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def drawn(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight)


def filled(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.constant_(module.weight, 0.5)


def applied(plan: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Weights after functions were applied, those of one process, and the error of one."""
    torch.manual_seed(1)
    alone = Small()
    torch.manual_seed(1)
    model = meshplan.parallelize(Small(), plan, example_inputs=(torch.ones(2, 4),))
    assert model.apply(filled) is model
    alone.apply(filled)
    error = ""
    torch.manual_seed(2)
    try:
        model.apply(drawn)
    except meshplan.ApplyError as raised:
        error = str(raised)
    else:
        torch.manual_seed(2)
        alone.apply(drawn)
    if error:
        model.apply(filled)
    full = meshplan.full_state_dict(model)
    return (
        {name: value.tolist() for name, value in full.items()},
        {name: value.tolist() for name, value in alone.state_dict().items()},
        error,
    )


@pytest.mark.parametrize(
    ("ranks", "plan", "is_refused"),
    [
        (2, {"strategy": "ddp"}, False),
        (1, {"strategy": "full_shard"}, False),
        (2, {"strategy": "full_shard"}, True),
        (2, {"mesh": {"tp": 2}, "tp_plan": "auto"}, True),
        (4, {"mesh": {"dp_replicate": 2, "tp": 2}, "strategy": "ddp", "tp_plan": "auto"}, True),
    ],
    ids=str,
)
def test_numbers_are_those_of_one_process_or_none(pool, ranks, plan, is_refused):
    found = pool(ranks).run(applied, {"version": 1, **plan})
    full, alone, _ = found[0]
    assert full == alone
    for *_, error in found:
        assert bool(error) == is_refused
        if is_refused:
            assert "model.apply(drawn) drew random numbers after the model was sharded" in error
            assert "model.apply(drawn), then model = meshplan.parallelize" in error
