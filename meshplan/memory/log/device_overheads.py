"""A table of the memory overheads of each GPU generation, with the source of every entry.

The table has the bytes of a CUDA context, of NCCL's buffers for a group of ranks and of cuBLAS's
workspaces. The context and the buffers depend on versions, links and algorithms that are chosen
when a job starts, so each is a `Band`. `driver` adds up the entries that a plan needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple

_MIB: Final = 1 << 20


class Band(NamedTuple):
    """A number of bytes that is not known exactly, with both ends of its range.

    Attributes:
        low: The least bytes that any source reports.
        expected: Bytes to add to an estimate.
        high: Bytes to leave room for.
    """

    low: int
    expected: int
    high: int

    def plus(self, other: Band) -> Band:
        """Return the sum, with the ends added separately: both low, both high."""
        return Band(self.low + other.low, self.expected + other.expected, self.high + other.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """GPUs with the same overheads.

    Args:
        words: Words that identify the generation; a device's name contains one of them.
        context: Bytes of the CUDA context, with the kernels that a training step loads.
        context_source: Source of `context`.
        pair: Bytes of a communicator of two ranks.
        group: Bytes of a communicator of more than two ranks in a node.
        group_source: Source of `pair` and `group`.
        channels_per_peer: NCCL channels over which two ranks of a node send to each other, as
            (fewest, usual, most).
        workspace_bytes: Bytes of cuBLAS's workspace for each thread that calls cuBLAS.
    """

    words: tuple[str, ...]
    context: Band
    context_source: str
    pair: Band
    group: Band
    group_source: str
    channels_per_peer: tuple[int, int, int]
    workspace_bytes: int


CONNECTION: Final = 14 * _MIB
"""Bytes of NCCL's buffers for one peer on one channel, both directions: a receive buffer of
9,633,792 bytes (LL 512 KiB, LL128 4,800 KiB, Simple 4 MiB) and two small ones, each rounded up to
pages of 2 MiB.

Source: NCCL 2.26, `computeBuffSizes` of init.cc; NVIDIA/nccl issue 1685: allocations of 10,485,760
and 2,097,152 bytes, 3.28 GB more after an all-to-all of 8 H100, 7 peers x 32 channels x 14 MiB."""
OVER_NODES: Final = Band(64 * _MIB, 512 * _MIB, 1024 * _MIB)
"""Bytes of the buffers that all sends to other nodes share. Source: NVIDIA/nccl issue 2363 (NCCL
2.28.9 asks for 536,870,912 bytes). Both ends are [Empirical]: `low` is two channels of one peer,
`high` is twice the buffer."""
PEERS: Final = "NVIDIA/nccl issues 1685 (14 MiB for each peer and channel) and 2363 (over nodes)"

_LAZY: Final = (
    "pytorch/pytorch 86509 (287,047,680 bytes with lazily loaded kernels), "
    "unslothai/unsloth-zoo 1053 (426 MiB, RTX 6000 Ada, CUDA 13)"
)
_OLD_RING: Final = 220 * _MIB
_AMPERE_GROUP: Final = (
    "NVIDIA/nccl issue 964 (4 A100 over NVLink: 544 MiB for 2 ranks, 688 MiB for more); low: ring "
    "alone, 24 channels; high: ring and tree, 24 channels of 14 MiB"
)
_HOPPER_GROUP: Final = (
    "NVIDIA/nccl issues 964 and 1685 (8 H100: 1.06 GB with the context); low: ring alone, 16 "
    "channels; high: ring, tree and NVLS of NCCL 2.17-2.20, 16 channels x 2 x 6 MiB x 8 heads "
    "(nvls.cc; issue 864 sees 1.6 GB)"
)

_AMPERE: Final = Generation(
    words=("a100", "a10g", "a6000", "3090", "a800"),
    context=Band(287_047_680, 450 * _MIB, 1536 * _MIB),
    context_source=f"{_LAZY}; high: bigscience tr11-176B chronicles (about 1.5 GiB, eager)",
    pair=Band(_OLD_RING, 544 * _MIB, 672 * _MIB),
    group=Band(_OLD_RING, 688 * _MIB, 1008 * _MIB),
    group_source=_AMPERE_GROUP,
    channels_per_peer=(2, 4, 24),
    workspace_bytes=8_519_680,
)
_HOPPER: Final = Generation(
    words=("h100", "h200", "gh200", "h800", "h20"),
    context=Band(426 * _MIB, 550 * _MIB, 1060 * 10**6),
    context_source=f"{_LAZY}; high: NVIDIA/nccl issue 1685 (1.06 GB with NCCL); expected: "
    "[Empirical]",
    pair=Band(224 * _MIB, 544 * _MIB, 832 * _MIB),
    group=Band(224 * _MIB, 688 * _MIB, 2208 * _MIB),
    group_source=_HOPPER_GROUP,
    channels_per_peer=(2, 16, 32),
    workspace_bytes=32 * _MIB,
)
_GENERATIONS: Final = (
    Generation(
        words=("v100", "rtx"),
        context=Band(287_047_680, 450 * _MIB, 1113 * _MIB),
        context_source=f"{_LAZY}; high: bigscience tr3m-1B3 (1113 MiB, V100, eager)",
        pair=Band(112 * _MIB, 544 * _MIB, 672 * _MIB),
        group=Band(112 * _MIB, 688 * _MIB, 1008 * _MIB),
        group_source=f"as for A100; low: ring alone, 12 channels. {_AMPERE_GROUP}",
        channels_per_peer=(2, 4, 12),
        workspace_bytes=8_519_680,
    ),
    _AMPERE,
    Generation(
        words=("l40s", "4090", "4070ti", "l4"),
        context=Band(287_047_680, 450 * _MIB, 1060 * 10**6),
        context_source=_LAZY,
        pair=Band(28 * _MIB, 56 * _MIB, 224 * _MIB),
        group=Band(28 * _MIB, 84 * _MIB, 336 * _MIB),
        group_source="no NVLink: 2 to 8 channels of 14 MiB, ring (low) or ring and tree; computed",
        channels_per_peer=(1, 2, 8),
        workspace_bytes=8_519_680,
    ),
    _HOPPER,
    Generation(
        words=("b200", "gb200", "b300", "gb300"),
        context=Band(426 * _MIB, 650 * _MIB, 1536 * _MIB),
        context_source=f"{_LAZY}; expected and high: as for H100, with more kernels, [Empirical]",
        pair=Band(224 * _MIB, 544 * _MIB, 1344 * _MIB),
        group=Band(224 * _MIB, 688 * _MIB, 2880 * _MIB),
        group_source=f"as for H100; high: 32 channels. {_HOPPER_GROUP}",
        channels_per_peer=(2, 32, 32),
        workspace_bytes=32 * _MIB,
    ),
    Generation(
        words=("mi250x", "mi300x", "mi325x", "mi355x"),
        context=Band(287_047_680, 360 * _MIB, 1024 * _MIB),
        context_source="Lumi-supercomputer/LUMI-AI-Guide issue 111: context and first group 1 GiB",
        pair=Band(300 * _MIB, 666 * _MIB, 1024 * _MIB),
        group=Band(300 * _MIB, 666 * _MIB, 1024 * _MIB),
        group_source="Lumi-supercomputer/LUMI-AI-Guide issue 111: 0.65 GiB for each group",
        channels_per_peer=(2, 4, 32),
        workspace_bytes=128 * _MIB,
    ),
)


def _widest() -> Generation:
    """Return the entry for an unknown device.

    Expected bytes are those of an H100; low and high are the extremes over all generations.
    """

    def ends(bands: Iterable[Band], expected: int) -> Band:
        every = tuple(bands)
        return Band(min(b.low for b in every), expected, max(b.high for b in every))

    rows = _GENERATIONS
    return Generation(
        words=(),
        context=ends((g.context for g in rows), _HOPPER.context.expected),
        context_source="device not in the table: the range over all devices",
        pair=ends((g.pair for g in rows), _HOPPER.pair.expected),
        group=ends((g.group for g in rows), _HOPPER.group.expected),
        group_source="device not in the table: the range over all devices",
        channels_per_peer=(1, 16, 32),
        workspace_bytes=32 * _MIB,
    )


_BY_WORD: Final[Mapping[str, Generation]] = MappingProxyType(
    {word: generation for generation in _GENERATIONS for word in generation.words}
)


def generation_of(device: str) -> Generation:
    for word in device.lower().split("-"):
        if word in _BY_WORD:
            return _BY_WORD[word]
    return _widest()
