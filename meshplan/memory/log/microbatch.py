"""What one microbatch allocates and frees on one rank, apart from what wrappers and optimizer do.

The user's own code on the parts that this rank computes with, tensor parallelism and recomputation
included: traced from the model, or told from a blueprint without torch. Gathering and reducing,
buckets, accumulation, stages and the optimizer are `memory.replay`'s, which acts at the marks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

from meshplan.memory.log.events import EventLog

AT_STAGE: Final = "@stage"
"""Between a name and the number of the stage that it is of, where a rank has several."""


class HookKind(StrEnum):
    """When the wrapper of a unit acts."""

    BEFORE_FORWARD = "before forward"
    AFTER_FORWARD = "after forward"
    BEFORE_BACKWARD = "before backward"
    AFTER_BACKWARD = "after backward"
    END_OF_BACKWARD = "end of backward"
    """Once, when autograd has run all it had to run; of the root."""
    REDUCING = "reducing"
    """Once, of a stage whose backwards are run in two halves, when all is played."""
    SHARING = "sharing"
    """Once in a pipeline, when all is played: copies of one parameter add up their gradients."""


class HookPoint(NamedTuple):
    """A wrapper acts before the event of this number.

    Attributes:
        event: As many events as the log has: after the last one.
        unit: The fqn of the module whose parameters are gathered together; "" for the root.
    """

    event: int
    moment: HookKind
    unit: str


@dataclass(frozen=True)
class MicrobatchTrace:
    """One microbatch of one stage, forward, loss and backward.

    Args:
        log: Inputs and buffers are born in its phase "before"; it holds no parameter.
        marks: In the order of the events.
        gradients: By the fqn of a parameter, the storage of its gradient as backward computes it,
            neither reduced nor cut over data ranks. Its birth is in the log, its end is not.
        again: (event before which it is there, fqn, storage) of further gradients of the same
            parameters, where the work is several microbatches that a pipeline runs at once. In a
            pipeline a parameter or unit of stage 3 is named "FQN@stage3".
        ready: By the fqn of a parameter, the number of the event before which its gradient is
            whole and belongs to the parameter; of others it is as soon as it is born.
        losses: Storages of the loss, which the loop keeps until the next loss is there.
        num_before: Events of what is there before; None for all of the phase "before".
        settling: By the fqn of a parameter whose gradient is not laid out as the parameter is:
            (bytes, storage) of what is made and freed to lay it so, once it is reduced; the last
            one left is then the gradient. These storages are no storages of the log.
        taken: By the fqn of a block, the storages that it is called with, where somebody noted it.
        host: (event before which it is so, by how many bytes more or less) of what it keeps in the
            host's memory; None where nobody noted it.
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
