"""What offloading costs: what crosses to the host's memory and back, and an optimizer there.

Parameters: every gather begins with a copy of the rank's shard to the device, every reduction ends
with one of its gradient back; both lie in the streams that gather and reduce, so computation hides
them as it hides those. But a gradient that is added to one already there is waited for, and added
by the host. The optimizer steps where its parameters are, with nothing beside it.

Activations: what a fully recomputed block is called with is copied while everything waits, and
comes back in the stream that computes.

Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param.py, `all_gather_inputs`, and
_fsdp_collectives.py, `foreach_reduce`; `runtime.apply.offload`, `runtime.base.host_copies`.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshplan.cost.grid import ACTIVATIONS_THERE, MODES, PARAMS_THERE
from meshplan.cost.profile import Profile
from meshplan.cost.shares import share, trained
from meshplan.cost.types import BlockKind, ElementBytes

Array = NDArray[Any]

_SHARD: Final = MODES.index("shard")
_ADDING: Final = 3
"""To add one tensor to another reads both and writes one."""


class OffloadSeconds(NamedTuple):
    """Seconds of one block by row; zero where nothing is offloaded.

    Attributes:
        there: To copy the shards of its parameters to the device.
        back: To copy the shards of their gradients to the host.
        waited: Of every microbatch, to add these up, and of what its activations take.
    """

    there: Array
    back: Array
    waited: Array


def is_there(grid: Array) -> NDArray[np.bool_]:
    """By row, whether parameters, gradients and states lie on the host."""
    return np.asarray((grid["offload"] & PARAMS_THERE) > 0)


def host_rate(grid: Array, profile: Profile, gpus_per_node: int) -> Array:
    """Bytes a second of the host's memory that a rank reaches while all of its node step."""
    names = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    world = np.prod([grid[name].astype(np.float64) for name in names], axis=0)
    return np.asarray(profile.host_bytes_per_s / np.minimum(world, gpus_per_node))


def entered_s(grid: Array, kind: BlockKind, profile: Profile) -> Array:
    """What a block is called with, there and back: as much as what it hands on."""
    entered = grid["micro"] / grid["cp"] * kind.boundary_bytes
    return np.asarray(2 * entered / profile.pcie_bytes_per_s)


def updates_more_s(
    grid: Array, kind: BlockKind, profile: Profile, gpus_per_node: int, widths: ElementBytes
) -> Array:
    """Once a step, how much longer the host takes to update a block than its device would."""
    passes = widths.stored * profile.optimizer_bytes + widths.unscaling
    moved = share(grid, trained(kind)) * passes
    there = moved / host_rate(grid, profile, gpus_per_node)
    return np.asarray(np.maximum(0.0, there - moved / profile.memory_bytes_per_s))


def crossing(
    grid: Array, kind: BlockKind, profile: Profile, gpus_per_node: int, stored: int
) -> OffloadSeconds:
    """What one block takes.

    Args:
        stored: Bytes of an element of a parameter as it is updated; its gradient's has as many.
    """
    on_host = is_there(grid)
    pcie = profile.pcie_bytes_per_s
    held = np.where(on_host, share(grid, kind) * stored, 0.0)
    grown = np.where(on_host, share(grid, trained(kind)) * stored, 0.0)
    adds = (grid["microbatches"] > 1) & (grid["mode"] == _SHARD)
    rate = host_rate(grid, profile, gpus_per_node)
    waited = np.where(adds, grown / pcie + _ADDING * grown / rate, 0.0)
    if kind.has_options:
        waits = (grid["offload"] & ACTIVATIONS_THERE) > 0
        waited = waited + np.where(waits, entered_s(grid, kind, profile), 0.0)
    return OffloadSeconds(held / pcie, np.where(adds, 0.0, grown / pcie), waited)
