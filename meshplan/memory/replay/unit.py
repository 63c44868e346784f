"""One unit of FSDP2 in the course of a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

from meshplan.memory.replay.shards import UnitShards

GATHERING: Final = 1
REDUCING: Final = 2
ADDING_UP: Final = 3
"""The streams on which a unit's buffers are made; the allocator keeps a pool for each.
Source: torch 2.13, torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py."""


class Doing(Enum):
    IDLE = auto()
    FORWARD = auto()
    PRE_BACKWARD = auto()
    POST_BACKWARD = auto()


class GatherState(Enum):
    """How the parameters of a unit are there."""

    SHARDED = auto()
    FEWER = auto()
    """In shards over fewer ranks (`reshard_after_forward: 4`)."""
    WHOLE = auto()


@dataclass(slots=True, eq=False)
class ReplayUnit:
    """One unit in the course of a step; numbers are storages.

    Attributes:
        hook: What its module is doing.
        doing: What its parameters are doing.
        gathering: The buffer of an all-gather that nobody waited for yet; -1 for none needed.
        grads: Gradients as autograd gave them, by parameter.
        summed: Those of microbatches before, in the dtype in which they are reduced.
        reduced: The cut gradients, by parameter; several share one storage.
        partial: Reduced, but not yet over the replicas.
        sending: The buffer of the last all-reduce.
        reduces, reduces_replicas, gives_back: What the coming backward does.
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
        """Over how many the parameters are cut now."""
        fewer = self.shards.fewer_ranks
        return fewer if self.held is GatherState.FEWER and fewer else self.shards.num_ranks
