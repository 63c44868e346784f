"""Compute the microbatches of every rank of a pipeline from the ops of the whole model.

A plan for which there are no rules raises a `PlanError` that names the feature.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Final

from meshplan.errors import PlanError, Problem
from meshplan.layout.dtypes import DTYPE_BYTES
from meshplan.layout.schedules import SCHEDULES, Action, actions, num_to_simulate, released
from meshplan.memory.decoder.attention_kernel import no_rules
from meshplan.memory.repeat.equal_stages import outline_of
from meshplan.memory.replay import Prepared
from meshplan.memory.stages.microbatch import StageWork, play_stage
from meshplan.memory.stages.rank import trace_of_rank
from meshplan.memory.stages.split_backward import play_split_backward
from meshplan.memory.stages.tape import StageTape, TapeCutter
from meshplan.memory.tape.tape import Tape
from meshplan.model.graph import is_inside
from meshplan.plan.plan import Plan

_MOST: Final = 40_000
"""Maximum number of ops of a step for which every microbatch is expanded on all ranks."""
_FAR_TOO_MANY: Final = 600_000
"""Maximum number of ops of a step for which any rank has every microbatch expanded."""
_MOST_ORDERS: Final = 8
"""Maximum number of schedules whose actions are cached."""
_MOST_PLAYED: Final = 32
"""Maximum number of stages that are cached for other plans."""


class Played:
    """A cache of played stages, because the plans of a search have most stages in common."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[tuple[str, ...], StageWork]] = {}
        """For each signature: the names in the stage that was played, and its microbatch."""

    def work_of(
        self, alike: Hashable, names: tuple[str, ...], play: Callable[[], StageWork]
    ) -> StageWork:
        """Return the microbatch of a stage, which is played only if no equal stage is cached.

        Args:
            alike: A key that is equal for stages that differ only in their names.
            names: Names of the stage's modules and parameters, as in `StageSignature`.
            play: Plays the stage and returns its microbatch.
        """
        if alike not in self._known:
            while len(self._known) >= _MOST_PLAYED:
                del self._known[next(iter(self._known))]
            self._known[alike] = names, play()
        others, trace = self._known[alike]
        return trace if names == others else trace.renamed(dict(zip(others, names, strict=True)))


class StageWorks:
    """The microbatches of all ranks of a pipeline.

    Args:
        tape: One microbatch of the whole model.
        plan: A plan for a graph of `blueprint`, with stages.
        in_place: If True, several gradients of one tensor are added up in place.
        played: Cache of the stages played for earlier plans; None for an empty cache.

    Attributes:
        summarised: True if expanding every microbatch of all ranks would take seconds.
        only_summarised: True if expanding every microbatch of one rank would take seconds.

    Raises:
        PlanError: There is no rule for a feature of this plan.
    """

    def __init__(
        self, tape: Tape, plan: Plan, *, in_place: bool, played: Played | None = None
    ) -> None:
        if problems := list(_unknown(plan, tape)):
            raise PlanError(problems)
        assert plan.assignment.stages is not None
        self._stages, self._plan, self._in_place = plan.assignment.stages, plan, in_place
        self._cutter = TapeCutter(tape, self._stages, widening=_widening(plan))
        stages = self._stages
        schedule = SCHEDULES[stages.schedule]
        count = num_to_simulate(schedule, stages.num_ranks, stages.microbatches)
        self._run = stages.schedule, stages.num_ranks, stages.virtual, count
        num_rows = len(tape.rows) * count
        self.summarised, self.only_summarised = num_rows > _MOST, num_rows > _FAR_TOO_MANY
        self._parts: dict[tuple[int, bool], StageWork] = {}
        self._played = Played() if played is None else played
        self._modules = {name: n for n, name in enumerate(plan.graph.modules)}
        self._tensors = {fqn: n for n, fqn in enumerate(plan.assignment.tensors)}
        self._found: dict[tuple[int, bool], Prepared] = {}

    def of_rank(self, rank: int, *, summarised: bool = False) -> Prepared:
        """Return all microbatches of one rank, interleaved as in its schedule.

        The result is the same object for all ranks at the same position along pp.

        Args:
            rank: The rank.
            summarised: If True, summarise the microbatches that cannot contain the peak: write only
                the storages that they leave behind.
        """
        place = self._plan.mesh.index(rank, ("pp",))
        if (place, summarised) not in self._found:
            own_stages, order = self._stages.of_rank(place), _orders(*self._run)[place]
            split = {action.stage for action in order if action.kind == "I"}
            unsplit = {action.stage for action in order if action.kind == "B"}
            halved = {stage: self._part(stage, in_halves=True) for stage in split}
            whole = {stage: self._part(stage) for stage in unsplit}
            parts = {stage: whole.get(stage) or halved[stage] for stage in own_stages}
            trace = trace_of_rank(
                parts,
                self._stages,
                order,
                released=_released(*self._run, place),
                takes_gradients=bool(self._plan.assignment.units),
                summarised=summarised,
                halved=halved,
            )
            self._found[place, summarised] = Prepared(trace)
        return self._found[place, summarised]

    def _part(self, stage: int, *, in_halves: bool = False) -> StageWork:
        key = stage, in_halves
        if key not in self._parts:
            part = self._cutter.part(stage)
            outline = outline_of(part, self._order if in_halves else None)
            alike = outline.shape, in_halves, self._in_place
            play = partial(self._play, part, in_halves=in_halves)
            self._parts[key] = self._played.work_of(alike, outline.names, play)
        return self._parts[key]

    def _play(self, part: StageTape, *, in_halves: bool) -> StageWork:
        if in_halves:
            return play_split_backward(part, self._order, sums_in_place=self._in_place)
        return play_stage(part, sums_in_place=self._in_place)

    def _order(self, module: str, fqn: str) -> tuple[int, int]:
        """Return (index of an op's module, index of its parameter) in the model, to sort weights.

        A tied weight counts as a weight of the module that uses it, because the module that owns it
        may be in another stage.
        """
        at = module if module in self._modules else fqn.rpartition(".")[0]
        return self._modules[at], self._tensors[fqn]


@lru_cache(maxsize=_MOST_ORDERS)
def _orders(
    schedule: str, num_ranks: int, virtual: int, count: int
) -> tuple[tuple[Action, ...], ...]:
    """Return the actions of all ranks, which the plans of a search mostly have in common."""
    return actions(SCHEDULES[schedule], num_ranks, virtual, count)


@lru_cache(maxsize=_MOST_ORDERS * 16)
def _released(
    schedule: str, num_ranks: int, virtual: int, count: int, place: int
) -> Mapping[Action, tuple[Action, ...]]:
    """Return the sends that each action of the rank at `place` along pp releases."""
    return released(_orders(schedule, num_ranks, virtual, count), place)


def _widening(plan: Plan) -> int:
    """Return the largest ratio of a parameter's stored itemsize to its compute itemsize."""
    tensors = plan.assignment.tensors.values()
    dtypes = {(p.dtype, p.compute_dtype) for p in tensors if not p.info.is_buffer}
    return max(DTYPE_BYTES[stored] // DTYPE_BYTES[computed] for stored, computed in dtypes)


def _unknown(plan: Plan, tape: Tape) -> Iterator[Problem]:
    """Yield a problem for each feature of the plan that stages have no rules for."""
    a = plan.assignment
    assert a.stages is not None
    stages = a.stages
    units = [module for module, _ in stages.units]
    blocks = [fqn for fqn, _, _ in tape.units]
    for is_present, what, fix in (
        (len(set(units)) < len(units), "modules that run twice in a pipeline", ""),
        (
            any(unit != block and is_inside(unit, block) for unit in units for block in blocks),
            "stages that are cut inside blocks",
            "use fewer stages",
        ),
        (
            plan.micro is not None and plan.micro % stages.microbatches > 0,
            f"{plan.micro} samples in {stages.microbatches} microbatches",
            f"use a multiple of {stages.microbatches} for batch.micro",
        ),
    ):
        if is_present:
            found = no_rules(what)
            yield replace(found, origin=stages.reason.origin, fix=fix or found.fix)
