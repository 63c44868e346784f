"""What there is to choose from, row by row: which data ranks share what."""

from __future__ import annotations

import pytest

from meshplan.cost.grid import MODES
from meshplan.planner.space.enumeration import enumerate_grid
from meshplan.planner.space.space import Freedom, divisors


def modes(world: int, tp: int, stated: tuple[str, ...] = MODES) -> set[str]:
    """Of all rows of a world with this tp."""
    axes = {name: divisors(world) for name in ("dp_replicate", "dp_shard")}
    axes |= {"pp": (1,), "cp": (1,), "ep": (1,), "tp": (tp,)}
    chosen = tuple(MODES.index(word) for word in stated)
    grid = enumerate_grid(Freedom(world=world, axes=axes, modes=chosen, global_=world))
    return {MODES[row["mode"]] for row in grid}


@pytest.mark.parametrize(
    ("world", "tp", "stated", "expected"),
    [
        # A model on one device may be sharded, which gives back what was cast.
        (1, 1, MODES, {"ddp", "shard"}),
        (1, 1, ("zero1",), {"zero1"}),
        # One data rank of several devices has nobody to share with.
        (2, 2, MODES, {"ddp"}),
        (2, 2, ("zero1",), set()),
        (2, 2, ("shard",), set()),
        (2, 1, MODES, {"ddp", "zero1", "shard"}),
    ],
)
def test_one_data_rank_shares_nothing_unless_it_is_alone(world, tp, stated, expected):
    assert modes(world, tp, stated) == expected
