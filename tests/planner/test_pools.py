"""What FSDP2's own streams hold at the least, against sums by hand."""

from __future__ import annotations

from typing import Any

import pytest

from meshplan.cost.chain import chain_of
from meshplan.cost.grid import SCHEDULE_WORDS
from meshplan.model.blueprint import from_mapping
from meshplan.planner.tables.memory_bounds import HeldElementBytes, reducing_bytes
from meshplan.planner.tables.stream_pools import StreamPools, stream_pools_of
from tests.cost.test_step import LENGTH, LLAMA, row

CHAIN = chain_of(from_mapping(LLAMA), seq_len=LENGTH, element_bytes=2)
BEFORE, *BLOCKS, AFTER = (CHAIN.kinds[number] for number in CHAIN.order)
BLOCK, ROOT = (float(sum(sum(k.numels) for k in those)) for those in (BLOCKS[1:2], (BEFORE, AFTER)))


def pools(stored: int = 4, **sizes: Any) -> StreamPools:
    """Of parameters that are computed with in two bytes and reduced in four."""
    sizes = {"microbatches": 1, **sizes}
    return stream_pools_of(
        row(**sizes), BLOCKS[1], ((BEFORE,), (AFTER,)), HeldElementBytes(stored, 2, 8), 4
    )


def test_nothing_is_gathered_of_what_is_whole():
    for sizes in ({"mode": "ddp", "dp_replicate": 4, "microbatches": 3}, {}):
        assert pools(**sizes).every == 0


def test_the_root_and_two_buffers_of_a_block_are_gathered():
    """Shards that are cast lie beside what is gathered of them."""
    for mode in ("shard", "zero1"):
        assert pools(stored=2, mode=mode, dp_shard=4).every == (BLOCK + ROOT) * 2
        assert pools(mode=mode, dp_shard=4).every == (BLOCK * (1 + 1 / 4) + ROOT) * 2


@pytest.mark.parametrize("count", [2, 5])
def test_later_microbatches_are_reduced_beside_what_they_are_added_to(count):
    one, more = pools(dp_shard=4), pools(dp_shard=4, microbatches=count)
    assert more.every - one.every == max(BLOCK, ROOT) * 4 / 4
    # Under zero1 they are added up before they are reduced.
    zero1 = {"mode": "zero1", "dp_shard": 4}
    assert pools(**zero1, microbatches=count).every == pools(**zero1).every
    # On the host there is room enough.
    assert pools(dp_shard=4, microbatches=count, offload=1).every == one.every


def test_in_a_pipeline_its_ends_hold_the_root():
    flat, piped = pools(dp_shard=4), pools(dp_shard=4, pp=2, schedule=SCHEDULE_WORDS.index("1F1B"))
    ends = [float(sum(each.numels)) * 2 for each in (BEFORE, AFTER)]
    assert [flat.first, flat.last] == [0, 0]
    assert [piped.first, piped.last] == ends
    assert flat.every - piped.every == sum(ends)


def test_a_block_that_is_reduced_at_once_has_its_gradients_twice():
    """As backward made them, in the dtype computed with, and as they are summed."""

    def made(**sizes: Any) -> float:
        return float(reducing_bytes(row(**sizes), BLOCKS[1], HeldElementBytes(4, 2, 8), 4)[0])

    assert made(dp_shard=4) == BLOCK * (2 + 4)
    halves = SCHEDULE_WORDS.index("InterleavedZeroBubble")
    for sizes in (
        {"mode": "zero1", "dp_shard": 4},
        {"mode": "ddp", "dp_replicate": 4},
        {},
        {"dp_shard": 4, "pp": 2, "virtual": 2, "schedule": halves},
    ):
        assert made(**sizes) == 0
