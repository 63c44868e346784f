"""The storages that one microbatch allocates and frees on one rank, without the wrappers' own.

That is the user's own forward and backward on this rank's shards, tensor parallelism and
recomputation included: traced from the model, or estimated from its config without torch. Gathering
and reducing, buckets, accumulation, stages and the optimizer are added by `memory.replay`, which
acts at the hook points.
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
    """Kinds of hook points: the moments at which the wrapper of a unit acts."""

    BEFORE_FORWARD = "before forward"
    AFTER_FORWARD = "after forward"
    BEFORE_BACKWARD = "before backward"
    AFTER_BACKWARD = "after backward"
    END_OF_BACKWARD = "end of backward"
    """Once, when autograd has run everything; the unit is the root."""
    REDUCING = "reducing"
    """Once for a stage whose backwards are split in two halves, after all its actions."""
    SHARING = "sharing"
    """Once in a pipeline, after all actions: the gradients of copies of one parameter are added
    up."""


class HookPoint(NamedTuple):
    """A point between two events at which a wrapper acts.

    Attributes:
        event: Number of the event before which it acts; the number of events in the log if it acts
            after the last one.
        moment: Kind of the hook point.
        unit: Fqn of the module whose parameters are gathered together; "" for the root.
    """

    event: int
    moment: HookKind
    unit: str


@dataclass(frozen=True)
class MicrobatchTrace:
    """One microbatch of one stage: forward, loss and backward.

    Args:
        log: Events of the microbatch, without any parameter. Inputs and buffers are born in its
            phase "before".
        marks: Hook points in the order of the events.
        gradients: For each parameter's fqn, the storage of its gradient as backward computes it,
            neither reduced nor sharded over data-parallel ranks. The log has its birth, but not its
            end.
        again: (event before which it exists, fqn, storage) of further gradients of the same
            parameters, if the trace is of several microbatches that a pipeline interleaves. In a
            pipeline a parameter or unit of stage 3 is named "FQN@stage3".
        ready: For each parameter's fqn, the number of the event before which its gradient is
            complete and assigned to the parameter. A gradient that is not listed is complete as
            soon as it is born.
        losses: Storages of the loss, which the training loop keeps until the next loss exists.
        num_before: Number of events of storages that exist before the microbatch; None for all
            events of the phase "before".
        settling: For the fqn of each parameter whose gradient has another layout than the
            parameter: (bytes, storage) of what is made and freed to redistribute it after it is
            reduced. The last storage left is the gradient. These storages are not in the log.
        taken: For each block's fqn, the storages that the block is called with, if they were
            recorded.
        host: (event before which it happens, change in bytes) of activations kept in host memory;
            None if that was not recorded.
    """

    log: EventLog
    marks: tuple[HookPoint, ...]
    gradients: Mapping[str, int]
    ready: Mapping[str, int] = field(default_factory=dict)
    losses: tuple[int, ...] = ()
    again: tuple[tuple[int, str, int], ...] = ()
    num_before: int | None = None
    settling: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    taken: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    host: tuple[tuple[int, int], ...] | None = None
