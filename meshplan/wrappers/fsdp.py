"""FSDP2's rules: when units are gathered, freed and reduced in the course of a step.

A unit is a module to which `fully_shard` or `replicate` was applied. Each method of `Units` replays
the FSDP2 hook that its docstring names, and calls `Actions` for what the hook does, in this order:

    before a unit's forward     gather its parameters and wait for them
    after a unit's forward      reshard its parameters, unless they are kept for backward
    before a unit's backward    gather its parameters and wait for them; then begin to gather those
                                of the unit whose forward ran just before this unit's
    after a unit's backward     take its gradients, reshard its parameters, reduce the gradients
    at the end of backward      the same as after backward, for units that no gradient reached

Before each backward, fields of `UnitState` set whether it reshards and reduces, as
`runtime.apply.data.data.set_gradient_sync` does on a live model. While microbatches accumulate,
sharded gradients are reduced in every backward, unsharded ones only in the last.

Source: torch 2.13, torch/distributed/fsdp/_fully_shard: `_fsdp_state` and `_fsdp_param_group`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cache
from typing import Generic, NamedTuple, Protocol, TypeVar


class TrainingState(Enum):
    """The hook of a unit that ran last, as FSDP2 names it."""

    IDLE = auto()
    FORWARD = auto()
    PRE_BACKWARD = auto()
    POST_BACKWARD = auto()


class GatherState(Enum):
    """Sharding of a unit's parameters: over all its ranks, over fewer ranks, or none (gathered)."""

    SHARDED = auto()
    FEWER = auto()
    """Sharded over fewer ranks (`reshard_after_forward: 4`)."""
    WHOLE = auto()


@dataclass(slots=True, eq=False, kw_only=True)
class UnitState:
    """The state of one unit in the course of a step.

    Attributes:
        fqn: Fqn of the unit's module.
        has_params: True if the unit has parameters. A unit without is never gathered or reduced.
        reshards: True if the parameters are resharded after forward.
        fewer_ranks: Number of ranks over which the parameters are sharded after forward; 0 for
            all ranks of the unit.
        hook: The hook of the module that ran last (`FSDPState._training_state`).
        phase: The hook of the parameters that ran last (`FSDPParamGroup._training_state`).
        sharding: How the parameters are sharded at present.
        is_gathering: True from the beginning of an all-gather until it is waited for.
        was_gathered: True once the parameters were gathered for the first time.
        forward_positions: Positions in `Units.order`, one for each forward whose backward has not
            begun.
        reshards_after_backward: If True, the next backward reshards the parameters.
        reduces: If True, the next backward reduces gradients.
        reduces_replicas: If True, the next backward also all-reduces gradients over replicas.
    """

    fqn: str
    has_params: bool
    reshards: bool
    fewer_ranks: int = 0
    hook: TrainingState = TrainingState.IDLE
    phase: TrainingState = TrainingState.IDLE
    sharding: GatherState = GatherState.SHARDED
    is_gathering: bool = False
    was_gathered: bool = False
    forward_positions: list[int] = field(default_factory=list)
    reshards_after_backward: bool = True
    reduces: bool = True
    reduces_replicas: bool = True


Unit = TypeVar("Unit", bound=UnitState)
_Unit = TypeVar("_Unit", bound=UnitState, contravariant=True)


class Actions(Protocol[_Unit]):
    """Reactions to what FSDP2 does with a unit. `Units` alone changes the fields of `UnitState`."""

    def gather(self, unit: _Unit) -> None:
        """Begin an all-gather (`FSDPParamGroup.unshard`)."""

    def wait(self, unit: _Unit) -> None:
        """Take the parameters out of the gathered buffer (`wait_for_unshard`)."""

    def end_forward(self) -> None:
        """React to the end of the forward of the outermost unit."""

    def free(self, unit: _Unit) -> None:
        """Free the gathered parameters."""

    def keep_fewer(self, unit: _Unit) -> None:
        """Free the gathered parameters except a shard over `fewer_ranks` ranks."""

    def take_gradients(self, unit: _Unit) -> None:
        """Take the gradients from autograd, before the parameters are resharded."""

    def reduce(self, unit: _Unit) -> None:
        """Reduce the gradients that were taken, or leave them for a later backward."""

    def end_step(self, unit: _Unit) -> None:
        """Free what the last backward left: an all-gather that nothing waited for, and buffers."""


class Units(Generic[Unit]):
    """All units of a model, or of a pipeline stage, on one rank.

    Args:
        units: The units, in the order of `named_modules()`.
        actions: The object whose methods are called for each action of a hook.
    """

    def __init__(self, units: Iterable[Unit], actions: Actions[Unit]) -> None:
        self.states: Mapping[str, Unit] = {unit.fqn: unit for unit in units}
        self.order: list[Unit] = []
        """One entry for each forward of a unit since the step began, in order."""
        self._actions = actions
        self._root: Unit | None = None

    def before_forward(self, fqn: str) -> None:
        """Replay `FSDPState._pre_forward`."""
        unit = self.states[fqn]
        # Recomputation runs a unit's forward within its backward, where it stays gathered.
        if unit.hook is not TrainingState.PRE_BACKWARD:
            unit.hook = unit.phase = TrainingState.FORWARD
            self._root = self._root or unit
        self._gather(unit)
        self._wait(unit)

    def after_forward(self, fqn: str, *, in_backward: bool) -> None:
        """Replay `FSDPState._post_forward`.

        Args:
            fqn: Fqn of the unit's module.
            in_backward: True if the forward is recomputed in backward, and so frees nothing.
        """
        unit = self.states[fqn]
        if unit.hook is TrainingState.PRE_BACKWARD:
            return
        if unit.has_params:
            if not in_backward:
                self._reshard(unit)
                unit.forward_positions.append(len(self.order))
                self.order.append(unit)
            unit.phase = TrainingState.IDLE
        unit.hook = TrainingState.IDLE
        if self._root is unit:
            self._actions.end_forward()
            self._root = None

    def before_backward(self, fqn: str) -> None:
        """Replay `FSDPState._pre_backward`, which prefetches the unit of the preceding forward."""
        unit = self.states[fqn]
        unit.hook = TrainingState.PRE_BACKWARD
        if not unit.has_params or unit.phase is TrainingState.PRE_BACKWARD:
            return
        unit.phase = TrainingState.PRE_BACKWARD
        self._gather(unit)
        self._wait(unit)
        if unit.forward_positions and (position := unit.forward_positions.pop()) > 0:
            self._gather(self.order[position - 1])

    def after_backward(self, fqn: str) -> None:
        """Replay `FSDPParamGroup.post_backward`: reshard the parameters, reduce the gradients."""
        unit = self.states[fqn]
        if not unit.has_params:
            return
        unit.phase = TrainingState.POST_BACKWARD
        self._actions.take_gradients(unit)
        if unit.reshards_after_backward:
            self._reshard(unit)
        self._actions.reduce(unit)

    def end_of_backward(self, *, is_last: bool) -> None:
        """Replay `FSDPState._root_post_backward_final_callback`.

        Units that no gradient reached do their post-backward here. The last backward of a step
        (`is_last`) also clears the order of forwards, and prefetches of units that did not run.
        """
        self._root = None
        for unit in self.states.values():
            if unit.phase is not TrainingState.POST_BACKWARD:
                self.after_backward(unit.fqn)
            unit.phase = unit.hook = TrainingState.IDLE
            if is_last:
                self._actions.end_step(unit)
                unit.is_gathering = False
                unit.forward_positions.clear()
        if is_last:
            self.order.clear()

    def _gather(self, unit: Unit) -> None:
        if unit.has_params and not unit.is_gathering and unit.sharding is not GatherState.WHOLE:
            unit.is_gathering = True
            self._actions.gather(unit)

    def _wait(self, unit: Unit) -> None:
        if unit.is_gathering:
            self._actions.wait(unit)
            unit.sharding, unit.was_gathered, unit.is_gathering = GatherState.WHOLE, True, False

    def _reshard(self, unit: Unit) -> None:
        """Replay `FSDPParamGroup.reshard`."""
        if unit.phase is TrainingState.FORWARD and not unit.reshards:
            return
        if unit.phase is TrainingState.FORWARD and unit.fewer_ranks:
            self._actions.keep_fewer(unit)
            unit.sharding = GatherState.FEWER
        elif unit.sharding is not GatherState.SHARDED:
            self._actions.free(unit)
            unit.sharding = GatherState.SHARDED


class BlockGathers(NamedTuple):
    """The all-gathers of one block in each pass over a microbatch.

    Args:
        first_forward: Number in the first forward of a step.
        forward: Number in every later forward of the step.
        backward: Number in every backward.
    """

    first_forward: int
    forward: int
    backward: int


class _Gathers(Counter[str]):
    """The `Actions` that count the all-gathers of each unit."""

    def gather(self, unit: UnitState) -> None:
        self[unit.fqn] += 1

    def _send_nothing(self, *_: UnitState) -> None:
        """Count no all-gather."""

    wait = end_forward = free = keep_fewer = _send_nothing
    take_gradients = reduce = end_step = _send_nothing


@cache
def gathers_of_block(*, reshards: bool) -> BlockGathers:
    """Count the all-gathers of a block that is neither the first nor the last of the model.

    The counts are those of gradient accumulation over microbatches.

    Args:
        reshards: True if the parameters of all blocks are resharded after forward.
    """
    blocks, counts = ("before", "block", "after"), _Gathers()
    units = Units((UnitState(fqn=b, has_params=True, reshards=reshards) for b in blocks), counts)
    for unit in units.states.values():
        unit.reshards_after_backward = reshards

    def forward() -> int:
        for fqn in blocks:
            units.before_forward(fqn)
            units.after_forward(fqn, in_backward=False)
        return counts.pop("block", 0)

    def backward() -> int:
        for fqn in reversed(blocks):
            units.before_backward(fqn)
            units.after_backward(fqn)
        units.end_of_backward(is_last=False)
        return counts.pop("block", 0)

    return BlockGathers(first_forward=forward(), backward=backward(), forward=forward())
