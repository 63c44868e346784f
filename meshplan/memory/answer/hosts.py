"""The memory of a node's host: what its ranks hold there together, beside what there is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from meshplan.spec.spec import HardwareSpec

HOST_BYTES_PER_DEVICE: Final = 144 * 2**30
"""What a node's host has for each of its devices, where the plan does not say.
Source: aws.amazon.com/ec2/instance-types/p4: 1152 GiB beside eight A100 (p4d.24xlarge)."""
_DEVICES: Final = 8
"""Of a node, where the plan does not say."""


class HostRanks(Protocol):
    """As `memory.answer.estimate.RankGroup`."""

    @property
    def ranks(self) -> tuple[int, ...]: ...

    @property
    def host_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Host:
    """The fullest node's host.

    Attributes:
        held_bytes: What tensors of its ranks hold, each at its own worst moment.
        mean_bytes: The mean over all nodes.
        limit_bytes: What there is.
        is_stated: Whether the plan says so; else it is assumed.
    """

    held_bytes: int
    mean_bytes: int
    limit_bytes: int
    is_stated: bool

    @property
    def is_over(self) -> bool:
        """Whether it holds too much."""
        return self.held_bytes > self.limit_bytes


def host_limit(hardware: HardwareSpec | None) -> int:
    """Bytes of one node's host: as the plan says, or what is assumed."""
    stated = hardware.host_memory_bytes if hardware is not None else None
    per_node = hardware.gpus_per_node if hardware is not None else _DEVICES
    return HOST_BYTES_PER_DEVICE * per_node if stated is None else stated


def host_of(hardware: HardwareSpec | None, groups: Iterable[HostRanks]) -> Host | None:
    """The fullest node's host; None where nothing lies on any."""
    by_rank = {rank: group.host_bytes for group in groups for rank in group.ranks}
    if not any(by_rank.values()):
        return None
    per_node = hardware.gpus_per_node if hardware is not None else _DEVICES
    nodes: dict[int, int] = {}
    for rank, held in by_rank.items():
        nodes[rank // per_node] = nodes.get(rank // per_node, 0) + held
    stated = hardware is not None and hardware.host_memory_bytes is not None
    mean = sum(nodes.values()) // len(nodes)
    return Host(max(nodes.values()), mean, host_limit(hardware), stated)
