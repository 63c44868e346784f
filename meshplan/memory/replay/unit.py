"""The state of one FSDP2 unit in the course of a step, with the storages that it allocated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Self

from meshplan.memory.replay.shards import Shard, UnitShards
from meshplan.wrappers.fsdp import GatherState, UnitState

GATHERING: Final = 1
REDUCING: Final = 2
ADDING_UP: Final = 3
"""Numbers of the CUDA streams on which a unit's buffers are made: those of all-gathers,
reduce-scatters and all-reduces. The allocator keeps a pool for each stream. Source:
torch 2.13, torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py."""


@dataclass(slots=True, eq=False, kw_only=True)
class ReplayUnit(UnitState):
    """The state of one unit. In the attributes below, an int is the number of a storage.

    Attributes:
        shards: Sizes of the unit's parameters on this rank.
        gathering: Buffer of an all-gather that was not waited for yet; None if there is none, as
            in a unit on one rank.
        whole: The gathered parameters, in the order of `shards.params`.
        fewer: Shards over `fewer_ranks` ranks, by fqn of the parameter.
        grads: Gradients as autograd returned them, by fqn of the parameter.
        summed: Gradients of earlier microbatches in the dtype of the reduction, by fqn of the
            parameter.
        taken: Gradients that are about to be reduced, by parameter.
        reduced: Sharded gradients, by fqn of the parameter; those of one reduction share a storage.
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
        """Return the state of a unit before its first step."""
        return cls(
            fqn=shards.fqn,
            has_params=bool(shards.params),
            reshards=shards.reshard_after_forward,
            fewer_ranks=shards.fewer_ranks,
            shards=shards,
        )

    @property
    def num_ranks(self) -> int:
        """Number of ranks over which the parameters are sharded in their current state."""
        is_fewer = self.sharding is GatherState.FEWER and self.fewer_ranks > 0
        return self.fewer_ranks if is_fewer else self.shards.num_ranks
