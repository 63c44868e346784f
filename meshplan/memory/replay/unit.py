"""The state of one FSDP2 unit in the course of a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

from meshplan.memory.replay.shards import UnitShards

GATHERING: Final = 1
REDUCING: Final = 2
ADDING_UP: Final = 3
"""Streams on which a unit's buffers are made; the allocator keeps a pool for each.
Source: torch 2.13, torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py."""


class Doing(Enum):
    IDLE = auto()
    FORWARD = auto()
    PRE_BACKWARD = auto()
    POST_BACKWARD = auto()


class GatherState(Enum):
    """The state of the parameters of a unit: sharded, sharded over fewer ranks, or gathered."""

    SHARDED = auto()
    FEWER = auto()
    """Sharded over fewer ranks (`reshard_after_forward: 4`)."""
    WHOLE = auto()


@dataclass(slots=True, eq=False)
class ReplayUnit:
    """The state of one unit in the course of a step. Numbers are storages.

    Attributes:
        shards: Sizes of the unit's parameters on this rank.
        hook: State of the hooks of its module, as in `FSDPState`.
        doing: State of the hooks of its parameters, as in `FSDPParamGroup`.
        held: State of its parameters.
        was_gathered: True once its parameters were gathered.
        gathering: Buffer of an all-gather that was not waited for yet; -1 if no buffer is needed;
            None if no all-gather was started.
        whole: The gathered parameters.
        fewer: Shards over fewer ranks, by parameter.
        places: Positions in the order of forward, one for each forward that backward has not
            reached.
        grads: Gradients as autograd returned them, by parameter.
        summed: Gradients of earlier microbatches in the dtype of the reduction, by parameter.
        reduced: Sharded gradients, by parameter; several share one storage.
        partial: Gradients that are reduce-scattered, but not yet all-reduced over replicas.
        sending: Buffer of the last all-reduce.
        reduces: If True, the coming backward reduces gradients.
        reduces_replicas: If True, the coming backward all-reduces them over replicas too.
        gives_back: If True, the coming backward reshards the parameters.
    """

    shards: UnitShards
    hook: Doing = Doing.IDLE
    doing: Doing = Doing.IDLE
    held: GatherState = GatherState.SHARDED
    was_gathered: bool = False
    gathering: int | None = None
    whole: list[int] = field(default_factory=list)
    fewer: dict[str, int] = field(default_factory=dict)
    places: list[int] = field(default_factory=list)
    grads: dict[str, int] = field(default_factory=dict)
    summed: dict[str, int] = field(default_factory=dict)
    reduced: dict[str, int] = field(default_factory=dict)
    partial: int | None = None
    sending: int | None = None
    reduces: bool = True
    reduces_replicas: bool = True
    gives_back: bool = True

    @property
    def fqn(self) -> str:
        return self.shards.fqn

    @property
    def num_ranks(self) -> int:
        """Number of ranks over which the parameters are sharded now."""
        fewer = self.shards.fewer_ranks
        return fewer if self.held is GatherState.FEWER and fewer else self.shards.num_ranks
