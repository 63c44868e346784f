"""Resident state of one rank, exactly: parameters, gradients and optimizer state, from the layouts.

The closed forms of `formulas` say how much an idealised model needs; this reads the layout of
every tensor of the real one, with uneven shards, padding, frozen and tied parameters. It does
not know activations, gathered parameters or communication buffers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from meshplan.assign import Placed
from meshplan.graph import DTYPE_BYTES
from meshplan.plan import Plan
from meshplan.spec import OPTIMIZER_STATES

_STEP_COUNTERS: Final[Mapping[str, int]] = MappingProxyType(
    {"adamw": 1, "adam": 1, "adagrad": 1, "rmsprop": 1}
)
"""torch keeps the step count of these as one float32 scalar per parameter."""


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes that one rank holds between two steps, gradients still there.

    Units: bytes of tensor storage, before any rounding by an allocator.
    """

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    buffers_bytes: int

    @property
    def total_bytes(self) -> int:
        return (
            self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes + self.buffers_bytes
        )


def state_bytes(plan: Plan, rank: int = 0) -> StateBytes:
    """What `rank` holds right after backward of the last microbatch, before the optimizer step.

    Optimizer state is counted as it is from the second step on.
    """
    parameters = gradients = optimizer = buffers = 0
    kept = OPTIMIZER_STATES[plan.spec.optimizer]
    counters = 4 * _STEP_COUNTERS.get(plan.spec.optimizer, 0)
    for placed in plan.assignment.tensors.values():
        if placed.info.is_buffer:
            buffers += placed.info.num_bytes
            continue
        stored = _stored_numel(placed, plan, rank) * DTYPE_BYTES[placed.dtype]
        parameters += stored
        if placed.info.trainable:
            # FSDP2 reduces gradients into the padded shard whatever the strategy calls itself.
            gradients += stored
            local = placed.stored.local_numel(placed.info.shape, plan.mesh, rank)
            optimizer += kept * local * DTYPE_BYTES[placed.dtype] + counters
    return StateBytes(parameters, gradients, optimizer, buffers)


def _stored_numel(placed: Placed, plan: Plan, rank: int) -> int:
    """Elements of storage: FSDP2 pads what it cuts to equal pieces."""
    return placed.stored.padded_numel(placed.info.shape, plan.mesh, "dp_shard", rank)
