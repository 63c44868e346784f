"""The blocks that a pipeline stage can begin with, for plans whose stages are left open."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from meshplan.assign.axes.stages import StageCutter, Units
from meshplan.assign.base.cascade import Cascade
from meshplan.errors import PlanError
from meshplan.model.graph import ModelGraph, is_inside
from meshplan.model.stage_boundary import Bond
from meshplan.spec.spec import Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStarts:
    """The blocks of a model that a pipeline stage can begin with, if stages are cut at blocks.

    Args:
        why_not: For each block but the first, in execution order, the reason why no stage can begin
            with it; "" if one can.
        crossing: For each block that a stage can begin with, the ids in `ModelGraph.flow` of the
            values that the stage receives.
        homes: For each tensor, the earliest of these blocks whose stage needs it; "" if the first
            stage needs it. Cuts at all of these blocks are assumed.
    """

    why_not: Mapping[str, str]
    crossing: Mapping[str, tuple[int, ...]]
    homes: Mapping[str, str]

    @property
    def blocks(self) -> tuple[str, ...]:
        """The blocks that a stage can begin with, in execution order."""
        return tuple(self.crossing)

    def problem(self, count: int) -> str:
        """Return why the model cannot be cut into `count` stages at its blocks; "" if it can."""
        if count <= len(self.crossing) + 1:
            return ""
        most = len(self.crossing) + 1
        named = next(((block, why) for block, why in self.why_not.items() if why), None)
        many = f"at most {most} stages" if most > 1 else "no stages"
        more = f": no stage can begin with '{named[0]}', because {named[1]}" if named else ""
        return f"its blocks can be cut into {many}{more}"


def stage_starts(spec: Spec, graph: ModelGraph) -> StageStarts:
    """Return the blocks that a pipeline stage can begin with.

    Args:
        spec: A spec that states no stages.
        graph: The model, with its recorded forward.

    Raises:
        PlanError: The model has fewer than two modules that run.
    """
    assert graph.flow is not None
    cutter = StageCutter(spec, graph, Cascade(spec, graph), 2, {})
    units = cutter.units()
    if cutter.problems:
        raise PlanError(cutter.problems)
    return _starts(cutter, units)


def _starts(cutter: StageCutter, units: Units) -> StageStarts:
    """Return the blocks that a stage can begin with, for a model with a recorded forward."""
    assert cutter.flow is not None
    calls = [call for _, call in units if call is not None]
    cut = cutter.cut(cutter.flow, calls)
    runs: dict[str, list[int]] = {}
    for number, (module, _) in enumerate(units):
        if module in cutter.graph.blocks():
            runs.setdefault(module, []).append(number)
    bonds = [*cut.bonds(), *(_of_one_block(module, runs[module]) for module in runs)]
    later = {block: numbers[0] for block, numbers in [*runs.items()][1:]}
    bonds += _sharing(cutter, units, _first_units(later, bonds))
    firsts = _first_units(later, bonds)
    stages = _stages_at(cutter, units, firsts)
    first_blocks = ["", *firsts]
    why_not = {
        block: next((b.why for b in bonds if b.first < number <= b.last), "")
        for block, number in later.items()
    }
    return StageStarts(
        why_not=why_not,
        crossing=dict(zip(firsts, cut.relay(stages, cutter.count).crossing, strict=True)),
        homes={
            fqn: first_blocks[min(needing)]
            for fqn, needing in cutter.tensors(units, stages).items()
        },
    )


def _sharing(cutter: StageCutter, units: Units, firsts: Mapping[str, int]) -> Iterator[Bond]:
    """Yield bonds between the units that need one parameter of a block.

    Stages may share parameters outside of the blocks, as a head has those of an embedding: each has
    a copy, and their gradients are summed.

    Args:
        cutter: The cutter of the model.
        units: The units.
        firsts: By block that a stage can begin with, the index of its first unit.
    """
    stages = _stages_at(cutter, units, firsts)
    begins, blocks = [0, *firsts.values()], cutter.graph.blocks()
    for fqn, needing in cutter.tensors(units, stages).items():
        tensor = cutter.graph.tensors[fqn]
        is_of_block = any(is_inside(name, each) for name in tensor.names for each in blocks)
        if len(needing) > 1 and is_of_block and not tensor.is_buffer:
            why = f"the stages before and after it would share the parameter '{fqn}'"
            yield Bond(begins[min(needing)], begins[max(needing)], why)


def _stages_at(cutter: StageCutter, units: Units, firsts: Mapping[str, int]) -> list[int]:
    """Return the stage of each unit if a stage begins with each of these units.

    The cutter then has that many stages.
    """
    begins = set(firsts.values())
    cutter.count = len(begins) + 1
    return [*itertools.accumulate(int(number in begins) for number in range(len(units)))]


def _of_one_block(block: str, runs: Sequence[int]) -> Bond:
    """Return the bond between all runs of a block, by their indices among the units."""
    why = f"'{block}' runs {len(runs)} times, and the planner keeps all runs in one stage"
    return Bond(runs[0], runs[-1], why)


def _first_units(later: Mapping[str, int], bonds: Iterable[Bond]) -> dict[str, int]:
    """Return the first units of the blocks that a stage can begin with.

    Args:
        later: By block, the index of its first unit.
        bonds: The units that must be in one stage.
    """
    kept = [*bonds]
    return {
        block: number
        for block, number in later.items()
        if not any(bond.first < number <= bond.last for bond in kept)
    }
