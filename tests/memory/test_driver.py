"""What lies outside of torch's allocator: which groups a plan opens, and bands that hold.

Which seeded bug would this catch? A group counted twice or left out, ranks of a node miscounted,
a band that does not hold what was measured, a workspace that is not in the log.
"""

from __future__ import annotations

from typing import Any

import pytest

from meshplan.layout.hardware import devices
from meshplan.memory.log.allocator import reserve
from meshplan.memory.log.driver import (
    Band,
    Communicator,
    CommunicatorUse,
    communicators,
    driver_bytes,
    driver_terms,
    with_workspaces,
    workspace_bytes,
)
from meshplan.memory.log.events import Event, EventLog, Storage, Term
from tests.helpers.graphs import decide, tp

MIB = 1 << 20
C, P = CommunicatorUse.COLLECTIVE, CommunicatorUse.NEIGHBOURS


def group(ranks: int, in_node: int, use: CommunicatorUse = C) -> Communicator:
    return Communicator(axes=("dp_shard",), ranks=ranks, ranks_in_node=in_node, use=use)


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ({"strategy": "ddp"}, {("dp_replicate",): (8, 8, C)}),
        ({"mesh": {"dp_shard": 8}}, {("dp_shard",): (8, 8, C)}),
        (
            {"mesh": {"dp_replicate": 4, "dp_shard": 8}},
            {
                ("dp_replicate", "dp_shard"): (32, 8, C),
                ("dp_shard",): (8, 8, C),
                ("dp_replicate",): (4, 1, C),
            },
        ),
        (
            {"mesh": {"dp_shard": 4, "tp": 4}},
            {
                ("dp_shard", "tp"): (16, 8, C),
                ("tp",): (4, 4, C),
                ("dp_shard",): (4, 2, C),
            },
        ),
        (
            {"mesh": {"pp": 2, "dp_shard": 2}, "pipeline": {"microbatches": 4}},
            {
                ("pp", "dp_shard"): (4, 4, C),
                ("pp",): (2, 2, P),
                ("dp_shard",): (2, 2, C),
            },
        ),
    ],
)
def test_each_group_is_opened_once(plan: dict[str, Any], expected: dict[Any, Any]) -> None:
    rules = [tp("**.wq", "colwise"), tp("**.wo", "rowwise")] if "tp" in plan.get("mesh", {}) else []
    world = {} if "mesh" in plan else {"mesh": {"dp_replicate": 8}}
    found = communicators(decide(plan | world, *rules), gpus_per_node=8)
    assert {c.axes: (c.ranks, c.ranks_in_node, c.use) for c in found} == expected
    assert len(found) == len(expected)


def test_a_node_may_end_inside_a_group() -> None:
    rules = [tp("**.wq", "colwise"), tp("**.wo", "rowwise")]
    plan = {"mesh": {"dp_shard": 4, "tp": 4}}
    found = {c.axes: c.ranks_in_node for c in communicators(decide(plan, *rules), gpus_per_node=6)}
    assert found == {("dp_shard", "tp"): 6, ("tp",): 4, ("dp_shard",): 2}


@pytest.mark.parametrize(
    ("device", "opened", "measured_bytes"),
    [
        # bigscience: 1113 MiB on V100, about 1.5 GiB on A100, kernels loaded at once.
        ("v100-sxm-32gb", [], 1113 * MIB),
        ("a100-sxm-80gb", [], 1536 * MIB),
        # pytorch 86509.
        ("a100-sxm-40gb", [], 287_047_680),
        # NVIDIA/nccl 964, beside some context.
        ("a100-sxm-80gb", [group(2, 2)], (544 + 400) * MIB),
        ("a100-sxm-80gb", [group(4, 4)], (688 + 400) * MIB),
        # NVIDIA/nccl 1685, both with context.
        ("h100-sxm-80gb", [group(8, 8)], 1_060_000_000),
        ("h100-sxm-80gb", [group(8, 8, CommunicatorUse.EXCHANGE)], 4_340_000_000),
    ],
)
def test_what_was_measured_is_in_the_band(
    device: str, opened: list[Communicator], measured_bytes: int
) -> None:
    band = driver_bytes(device, opened)
    assert band.low <= measured_bytes <= band.high


@pytest.mark.parametrize("device", [*devices(), "a device of my own"])
def test_bands_are_in_order_and_have_sources(device: str) -> None:
    opened = [
        group(2, 2),
        group(16, 8),
        group(4, 1),
        group(16, 8, CommunicatorUse.EXCHANGE),
        group(2, 1, P),
    ]
    terms = driver_terms(device, opened)
    assert len(terms) == 1 + len(opened)
    for term in terms:
        assert 0 < term.band.low <= term.band.expected <= term.band.high
        assert term.source
    assert driver_bytes(device, opened) == Band(*(sum(t.band[i] for t in terms) for i in range(3)))


def test_a_device_in_no_row_gets_the_ends_of_all() -> None:
    mine = driver_bytes("a device of my own", [group(8, 8)])
    for device in devices():
        band = driver_bytes(device, [group(8, 8)])
        assert mine.low <= band.low
        assert band.high <= mine.high


def test_workspaces_lie_in_the_allocator_all_the_time() -> None:
    log = EventLog((Storage(Term.PARAMETERS),), (Event(100 * MIB, 0, 0),), ("before",))
    for device, size in (("h100-sxm-80gb", 32 * MIB), ("a100-sxm-80gb", 8_519_680)):
        assert workspace_bytes(device) == size
        whole = with_workspaces(log, device)
        assert whole.peak.live_bytes == log.peak.live_bytes + 2 * size
        assert whole.terms_at_peak[Term.WORKSPACES] == 2 * size
        assert len({event.storage for event in whole.events}) == 3, "one for each thread"
        assert reserve(whole).allocated_bytes == 100 * MIB + 2 * size


@pytest.mark.parametrize("device", [*devices(), "a device of my own"])
def test_a_group_takes_what_its_connections_take(device: str) -> None:
    """Beside what collectives of as many ranks take: of two, or of more."""

    def more(first: Communicator, second: Communicator) -> Band:
        one, other = (driver_bytes(device, [each]) for each in (first, second))
        return Band(*(a - b for a, b in zip(one, other, strict=True)))

    pair, three = more(group(2, 2, P), group(2, 2)), more(group(3, 3, P), group(3, 3))
    assert 0 < pair.low <= pair.expected
    # A neighbour to each side, however many there are; who is alone on its node has none there.
    assert (three.low, three.expected) == (2 * pair.low, 2 * pair.expected)
    assert more(group(5, 5, P), group(5, 5)) == three
    over_nodes = more(group(8, 1, CommunicatorUse.EXCHANGE), group(8, 1))
    assert over_nodes.low > 0
    assert more(group(2, 1, P), group(2, 1)).low == over_nodes.low
    assert more(group(4, 3, P), group(3, 3, P)) == over_nodes
    # All to all has every other rank of its node.
    every = more(group(8, 8, CommunicatorUse.EXCHANGE), group(8, 8))
    assert (every.low, every.expected) == (7 * pair.low, 7 * pair.expected)
    assert (
        driver_bytes(device, [group(2, 1, CommunicatorUse.SHARED)]).low == driver_bytes(device).low
    )
