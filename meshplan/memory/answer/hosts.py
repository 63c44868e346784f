"""Host memory of a node: the total that its ranks use, compared with the host's capacity."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from meshplan.spec.spec import HardwareSpec

HOST_BYTES_PER_DEVICE: Final = 144 * 2**30
"""Assumed bytes of host memory for each GPU of a node, if the plan states no host memory.
Source: aws.amazon.com/ec2/instance-types/p4: 1152 GiB beside eight A100 (p4d.24xlarge)."""
_DEVICES: Final = 8
"""Assumed number of GPUs of a node, if the plan states none."""


class HostRanks(Protocol):
    """The fields of `memory.answer.estimate.RankGroup` that `host_of` reads."""

    @property
    def ranks(self) -> tuple[int, ...]: ...

    @property
    def host_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Host:
    """Host memory of the node that uses the most.

    Attributes:
        held_bytes: Sum, over the ranks of the node, of each rank's peak of host memory.
        mean_bytes: Mean of that sum over all nodes.
        limit_bytes: Capacity of one host in bytes.
        is_stated: True if the plan states the capacity, False if it is assumed.
    """

    held_bytes: int
    mean_bytes: int
    limit_bytes: int
    is_stated: bool

    @property
    def is_over(self) -> bool:
        """True if the ranks of the node need more than the host's capacity."""
        return self.held_bytes > self.limit_bytes


def host_limit(hardware: HardwareSpec | None) -> int:
    """Return the capacity of one host in bytes: the one that the plan states, or an assumed one."""
    stated = hardware.host_memory_bytes if hardware is not None else None
    per_node = hardware.gpus_per_node if hardware is not None else _DEVICES
    return HOST_BYTES_PER_DEVICE * per_node if stated is None else stated


def host_of(hardware: HardwareSpec | None, groups: Iterable[HostRanks]) -> Host | None:
    """Return the host memory of the node that uses the most; None if no rank uses host memory."""
    by_rank = {rank: group.host_bytes for group in groups for rank in group.ranks}
    if not any(by_rank.values()):
        return None
    per_node = hardware.gpus_per_node if hardware is not None else _DEVICES
    nodes: dict[int, int] = {}
    for rank, host_bytes in by_rank.items():
        nodes[rank // per_node] = nodes.get(rank // per_node, 0) + host_bytes
    stated = hardware is not None and hardware.host_memory_bytes is not None
    mean = sum(nodes.values()) // len(nodes)
    return Host(max(nodes.values()), mean, host_limit(hardware), stated)
