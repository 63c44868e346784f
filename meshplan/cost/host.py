"""Estimate the cost of CPU offload: copies to and from host memory, and an optimizer on the host.

Parameters: every all-gather begins with a copy of the rank's shard to the device, and every
reduction ends with a copy of the gradient shard to the host. Both copies run on the streams of
these collectives, so computation hides them as it hides the collectives. However, if gradients are
accumulated, the host waits for each copy and adds it up. The optimizer step runs on the host, and
nothing overlaps with it.

Activations: the inputs of a fully recomputed block are copied to the host while the device waits,
and are copied back on the compute stream.

Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param.py, `all_gather_inputs`, and
_fsdp_collectives.py, `foreach_reduce`; `runtime.apply.offload`, `runtime.base.host_copies`.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshplan.cost.grid import ACTIVATIONS_ON_HOST, PARAMS_ON_HOST, SHARD, Array
from meshplan.cost.profile import Profile
from meshplan.cost.shares import share, trained
from meshplan.cost.types import BlockKind, ElementBytes

_ADDING: Final = 3
"""Passes over memory to add one tensor to another in place: two reads and one write."""


class OffloadSeconds(NamedTuple):
    """Seconds of offload of one block, [configurations]; 0 where nothing is offloaded.

    Attributes:
        params_s: Seconds to copy the rank's shards of parameters to the device.
        grads_s: Seconds to copy its shards of gradients to the host; 0 where gradients are
            accumulated on the host.
        exposed_s: Seconds per microbatch that nothing hides: to copy gradients to the host and add
            them up, and to copy the block's inputs to the host and back.
    """

    params_s: Array
    grads_s: Array
    exposed_s: Array


def has_params_on_host(grid: Array) -> NDArray[np.bool_]:
    """Return True for each configuration with parameters, gradients and states on the host."""
    return np.asarray((grid["offload"] & PARAMS_ON_HOST) > 0)


def host_rate(grid: Array, profile: Profile, gpus_per_node: int) -> Array:
    """Return bytes per second of host memory for one rank, while all ranks of its node step."""
    names = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    world = np.prod([grid[name].astype(np.float64) for name in names], axis=0)
    return np.asarray(profile.host_bytes_per_s / np.minimum(world, gpus_per_node))


def entered_s(grid: Array, kind: BlockKind, profile: Profile) -> Array:
    """Return the seconds to copy a block's inputs to the host and back.

    Assumes: the inputs are as large as the outputs.
    """
    entered = grid["micro"] / grid["cp"] * kind.boundary_bytes
    return np.asarray(2 * entered / profile.pcie_bytes_per_s)


def updates_more_s(
    grid: Array, kind: BlockKind, profile: Profile, gpus_per_node: int, widths: ElementBytes
) -> Array:
    """Return the further seconds per step if the host, not the device, updates a block."""
    passes = widths.stored * profile.optimizer_bytes + widths.unscaling
    moved = share(grid, trained(kind)) * passes
    on_host_s = moved / host_rate(grid, profile, gpus_per_node)
    return np.asarray(np.maximum(0.0, on_host_s - moved / profile.memory_bytes_per_s))


def crossing(
    grid: Array, kind: BlockKind, profile: Profile, gpus_per_node: int, stored: int
) -> OffloadSeconds:
    """Return the offload times of one block.

    Args:
        grid: Configurations of `grid.GRID`.
        kind: The kind of the block.
        profile: Constants of the device.
        gpus_per_node: Devices of one node.
        stored: Bytes per element of a parameter on the host, and of its gradient there.
    """
    on_host = has_params_on_host(grid)
    pcie = profile.pcie_bytes_per_s
    host_bytes = np.where(on_host, share(grid, kind) * stored, 0.0)
    grad_bytes = np.where(on_host, share(grid, trained(kind)) * stored, 0.0)
    # Gradients of several microbatches are added up on the host if each backward reduces them.
    adds = (grid["microbatches"] > 1) & (grid["mode"] == SHARD)
    rate = host_rate(grid, profile, gpus_per_node)
    waited = np.where(adds, grad_bytes / pcie + _ADDING * grad_bytes / rate, 0.0)
    if kind.has_options:
        waits = (grid["offload"] & ACTIVATIONS_ON_HOST) > 0
        waited = waited + np.where(waits, entered_s(grid, kind, profile), 0.0)
    return OffloadSeconds(host_bytes / pcie, np.where(adds, 0.0, grad_bytes / pcie), waited)
