"""What one FSDP2 unit holds in the course of a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Self

from meshplan.memory.replay.shards import Shard, UnitShards
from meshplan.wrappers.fsdp import GatherState, UnitState

GATHERING: Final = 1
REDUCING: Final = 2
ADDING_UP: Final = 3
"""Streams on which a unit's buffers are made; the allocator keeps a pool for each.
Source: torch 2.13, torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py."""


@dataclass(slots=True, eq=False, kw_only=True)
class ReplayUnit(UnitState):
    """The state of one unit and what it holds. Numbers are storages.

    Attributes:
        shards: Sizes of the unit's parameters on this rank.
        gathering: Buffer of an all-gather that was not waited for yet; None if there is none, as
            over one rank.
        whole: The gathered parameters.
        fewer: Shards over fewer ranks, by parameter.
        grads: Gradients as autograd returned them, by parameter.
        summed: Gradients of earlier microbatches in the dtype of the reduction, by parameter.
        taken: Gradients that are about to be reduced, by parameter.
        reduced: Sharded gradients, by parameter; several share one storage.
        partial: Gradients that are reduce-scattered, but not yet all-reduced over replicas.
        sending: Buffer of the last all-reduce.
    """

    shards: UnitShards
    gathering: int | None = None
    whole: list[int] = field(default_factory=list)
    fewer: dict[str, int] = field(default_factory=dict)
    grads: dict[str, int] = field(default_factory=dict)
    summed: dict[str, int] = field(default_factory=dict)
    taken: dict[Shard, int] = field(default_factory=dict)
    reduced: dict[str, int] = field(default_factory=dict)
    partial: int | None = None
    sending: int | None = None

    @classmethod
    def of(cls, shards: UnitShards) -> Self:
        """Return a unit before its first step."""
        return cls(
            fqn=shards.fqn,
            has_params=bool(shards.params),
            reshards=shards.reshard_after_forward,
            fewer_ranks=shards.fewer_ranks,
            shards=shards,
        )

    @property
    def num_ranks(self) -> int:
        """Number of ranks over which the parameters are sharded now."""
        is_fewer = self.held is GatherState.FEWER and self.fewer_ranks > 0
        return self.fewer_ranks if is_fewer else self.shards.num_ranks
