"""The storages that a rank's forward and backward allocate and free, without those of wrappers.

The forward and backward run on this rank's shards, with tensor parallelism and recomputation. Their
events are traced from the model, or estimated from its config without torch. `memory.replay` adds
at the hook points what the wrappers (FSDP2, DDP) and the optimizer allocate: gathered parameters,
buffers of reductions, buckets, accumulated gradients and optimizer state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

from meshplan.memory.log.events import EventLog

AT_STAGE: Final = "@stage"
"""Separator between a name and the number of its stage, used if a rank has several stages."""


class HookKind(StrEnum):
    """Kinds of hook points: where in a step the wrapper of a unit acts."""

    BEFORE_FORWARD = "before forward"
    AFTER_FORWARD = "after forward"
    BEFORE_BACKWARD = "before backward"
    AFTER_BACKWARD = "after backward"
    END_OF_BACKWARD = "end of backward"
    """Occurs once per backward, after autograd has run all nodes; the unit is the root."""
    REDUCING = "reducing"
    """Occurs once per step for a stage with split backwards (I and W), after all actions of the
    rank; the stage's gradients are reduced here."""
    SHARING = "sharing"
    """Occurs once per step in a pipeline, after all actions of the rank; the gradients of a
    parameter that several stages share are added up here."""


class HookPoint(NamedTuple):
    """A point between two events at which a wrapper acts.

    Attributes:
        event: Index of the event before which the wrapper acts; the number of events in the log if
            the wrapper acts after the last event.
        kind: Kind of the hook point.
        unit: Fqn of the wrapped module (an FSDP unit); "" for the root.
    """

    event: int
    kind: HookKind
    unit: str


@dataclass(frozen=True)
class MicrobatchTrace:
    """Forward, loss and backward of one microbatch, or of all microbatches of a pipeline rank.

    In the trace of a whole pipeline rank, a parameter or unit of stage 3 is named "FQN@stage3".

    Args:
        log: Events of the microbatch, without any parameter. Inputs and buffers are born in its
            phase "before".
        hook_points: Hook points in the order of the events.
        gradients: For each parameter's fqn, the storage of its gradient as backward computes it,
            neither reduced nor sharded over data-parallel ranks. The log has the gradient's birth,
            but not its end.
        later_gradients: Gradients of later microbatches, if a pipeline interleaves several: (index
            of the event before which the gradient is complete, fqn of the parameter, storage).
        ready: For each parameter's fqn, the index of the event before which its gradient is
            complete and assigned to the parameter. A gradient that is not listed is complete as
            soon as it is born.
        losses: Storages of the loss, which the training loop keeps until the next loss exists.
        num_before: Number of events of storages that exist before the microbatch; None for all
            events of the phase "before".
        grad_relayout: For the fqn of each parameter whose gradient has another layout than the
            parameter: (bytes, storage) of each tensor that is made, or freed if negative, to
            redistribute the gradient after its reduction. The last storage left is the gradient.
            These storages are not in the log.
        taken: For each block's fqn, the storages that the block is called with, if they were
            recorded.
        host: Changes of the activations kept in host memory: (index of the event before which the
            change happens, bytes). None if they were not recorded.
    """

    log: EventLog
    hook_points: tuple[HookPoint, ...]
    gradients: Mapping[str, int]
    ready: Mapping[str, int] = field(default_factory=dict)
    losses: tuple[int, ...] = ()
    later_gradients: tuple[tuple[int, str, int], ...] = ()
    num_before: int | None = None
    grad_relayout: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    taken: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    host: tuple[tuple[int, int], ...] | None = None
