"""Dropout masks: one along tp, another on every data rank, whatever the program seeded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import meshplan

TP2 = {"dp_shard": 2, "tp": 2}
COLWISE = {"match": "up", "place": {"tp": "colwise"}}
ROWWISE = {"match": "down", "place": {"tp": "rowwise"}}


class Dropped(nn.Module):
    """Dropout on what is whole along tp; it keeps the mask that it drew."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dropout(x)
        self.mask = x.detach() != 0
        return self.down(torch.relu(self.up(x)))


def masks(mesh: dict[str, int], by_rank: bool = True) -> tuple[Any, Any, bool]:
    """(mask of the first step, of the second, whether the caller's generator moved)."""
    torch.manual_seed(0)
    model = Dropped()
    plan = {
        "version": 1,
        "mesh": mesh,
        "rules": [COLWISE, ROWWISE] if "tp" in mesh else [],
    }
    wrapped = meshplan.parallelize(model, plan)
    torch.manual_seed(torch.distributed.get_rank() if by_rank else 0)
    state = torch.get_rng_state()
    sgd = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    found = []
    for _ in range(2):
        meshplan.train_step(
            wrapped, sgd, torch.ones(4, 8), torch.zeros(4, 8), nn.functional.mse_loss
        )
        found.append(model.mask.tolist())
    return found[0], found[1], not torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("by_rank", [True, False])
@pytest.mark.parametrize("mesh", [TP2, {"dp_replicate": 2, "tp": 2}, {"dp_shard": 4}])
def test_masks_agree_along_tp_and_differ_across_data_ranks(pool, mesh, by_rank):
    results = pool(4).run(masks, mesh, by_rank=by_rank)
    firsts = [str(first) for first, _, _ in results]
    if "tp" in mesh:
        assert firsts[0] == firsts[1]
        assert firsts[2] == firsts[3]
        assert firsts[0] != firsts[2]
    else:
        assert len(set(firsts)) == 4
    for first, second, moved in results:
        assert first != second
        assert not moved, "the caller's generator was drawn from"


def one_and_again() -> tuple[Any, Any]:
    return masks({"dp_shard": 2})[0], masks({"dp_shard": 2})[0]


def test_the_same_seed_draws_the_same_masks_again(pool):
    first, again = pool(2).run(one_and_again)[0]
    assert first == again
