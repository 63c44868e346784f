"""The pipeline stages that a plan fixes for single blocks. The search keeps them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from meshplan.assign.base.cascade import Cascade
from meshplan.errors import PlanError, Problem
from meshplan.model.graph import ModelGraph, is_inside
from meshplan.planner.space.schedule import stated_virtual
from meshplan.spec.spec import Spec

LAST: Final = -1
"""Stands for the last stage, whatever the number of stages."""


@dataclass(frozen=True, slots=True)
class FixedStages:
    """The stages that a plan fixes.

    Args:
        by_block: {fqn of a fixed block: its stage, or `LAST` for the last stage}.
        num: Number of stages; None if the plan does not state it.
        virtual: Number of stages of each rank along pp.
    """

    by_block: Mapping[str, int]
    num: int | None = None
    virtual: int = 1

    def can_cut(self, blocks: Sequence[str], ranks: int) -> bool:
        """Return True if the fixed stages allow a cut for so many ranks, each stage with a block.

        Args:
            blocks: Fqns of the model's blocks, in order.
            ranks: Number of ranks along pp.
        """
        stages = ranks * self.virtual
        if self.num not in (None, stages):
            return False
        reached = {0}  # Stages that the current block may be in.
        for number, block in enumerate(blocks):
            if number:
                reached |= {stage + 1 for stage in reached}
            pinned = self.by_block.get(block)
            if pinned is not None:
                reached &= {pinned if pinned >= 0 else stages - 1}
        return stages - 1 in reached

    def places(self, names: Sequence[str]) -> tuple[int | None, ...]:
        """Return the fixed stage of each place; None where the plan fixes none.

        Args:
            names: Fqn of the block at each place, as in `CostTable`.
        """
        return tuple(self.by_block.get(name) for name in names)


def fixed_stages_of(spec: Spec, graph: ModelGraph) -> FixedStages:
    """Return the stages that rules, or `pipeline.split`, fix.

    Raises:
        PlanError: A stage boundary lies inside a block, or statements contradict each other.
    """
    blocks = graph.blocks()
    problems: list[Problem] = []
    pins: dict[str, int] = {}
    ends: dict[str, int] = {}
    for fqn, stage, path in _stated(spec, graph):
        if fqn in blocks:
            pins[fqn] = stage
        elif _place(graph, fqn, blocks) is None:
            what = f"the planner splits stages between blocks, and '{fqn}' is not a block"
            fix = "name a block, or state every open key"
            problems.append(Problem(what, spec.origin(path), fix))
        else:
            ends[fqn] = stage
    num = None
    split = spec.pipeline.split if spec.pipeline is not None else None
    if isinstance(split, tuple):
        num = len(split)
        pins = _filled(blocks, pins)
    for fqn, stage in ends.items():
        wanted = 0 if _place(graph, fqn, blocks) == 0 else LAST
        is_last = stage == LAST or (num is not None and stage == num - 1)
        if (wanted == 0 and stage != 0) or (wanted == LAST and not is_last):
            what = f"the planner puts '{fqn}' into the {'first' if wanted == 0 else 'last'} stage"
            fix = "leave its stage out, or state every open key"
            problems.append(Problem(what, spec.origin("rules"), fix))
    if problems:
        raise PlanError(problems)
    return FixedStages(pins, num, stated_virtual(spec) or 1)


def _stated(spec: Spec, graph: ModelGraph) -> Iterator[tuple[str, int, str]]:
    """Yield (module, stage, path of the statement); `pipeline.split` comes last, to override rules.

    Raises:
        PlanError: `pipeline.split` names a module that the model does not have.
    """
    words = {"first": 0, "last": LAST}
    for fqn, stated in Cascade(spec, graph).modules_with("stage"):
        yield fqn, words.get(stated.value, stated.value), stated.path
    split = spec.pipeline.split if spec.pipeline is not None else None
    if isinstance(split, tuple):
        known = {n: m.fqn for m in graph.modules.values() for n in (m.fqn, *m.aliases)}
        for stage, names in enumerate(split):
            for name in names:
                if name not in known:
                    what = f"'{name}' is not a module of {graph.name}"
                    fix = "write a module listed by: meshplan show"
                    raise PlanError(Problem(what, spec.origin("pipeline.split"), fix))
                yield known[name], stage, "pipeline.split"


def _place(graph: ModelGraph, fqn: str, blocks: Sequence[str]) -> int | None:
    """Return 0 for a module that is defined before all blocks, 1 after all of them; else None."""
    if not blocks or any(is_inside(fqn, b) or is_inside(b, fqn) for b in blocks):
        return None
    order = list(graph.modules)
    if order.index(fqn) < order.index(blocks[0]):
        return 0
    return 1 if order.index(fqn) > order.index(blocks[-1]) else None


def _filled(blocks: Sequence[str], pins: Mapping[str, int]) -> dict[str, int]:
    """Return {block: stage} of all blocks; a block without a pin follows the block before it."""
    out, current = {}, 0
    for block in blocks:
        current = max(current, pins.get(block, current))
        out[block] = current
    return out
