"""Where a plan says that a pipeline is cut: the stage of single blocks, which the search keeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from meshplan.assign.cascade import Cascade
from meshplan.errors import PlanError, Problem
from meshplan.model.graph import ModelGraph, is_inside
from meshplan.spec.spec import Spec

LAST: Final = -1
"""The last stage, however many there are."""


@dataclass(frozen=True, slots=True)
class FixedStages:
    """What is stated.

    Args:
        by_block: Stages by fqn.
        num: How many stages there are; None where nothing says.
    """

    by_block: Mapping[str, int]
    num: int | None = None

    def can_cut(self, blocks: Sequence[str], stages: int) -> bool:
        """Whether blocks can be cut into so many stages, each with a block."""
        if self.num not in (None, stages):
            return False
        reached = {0}
        for number, block in enumerate(blocks):
            if number:
                reached |= {stage + 1 for stage in reached}
            pinned = self.by_block.get(block)
            if pinned is not None:
                reached &= {pinned if pinned >= 0 else stages - 1}
        return stages - 1 in reached

    def places(self, names: Sequence[str]) -> tuple[int | None, ...]:
        """The stage of each place; None where it is free."""
        return tuple(self.by_block.get(name) for name in names)


def fixed_stages_of(spec: Spec, graph: ModelGraph) -> FixedStages:
    """What rules, or a split, state.

    Raises:
        PlanError: A module that is cut by more than whole blocks, or contradictions.
    """
    blocks = graph.blocks()
    problems: list[Problem] = []
    pins: dict[str, int] = {}
    ends: dict[str, int] = {}
    for fqn, stage, path in _stated(spec, graph):
        if fqn in blocks:
            pins[fqn] = stage
        elif _place(graph, fqn, blocks) is None:
            what = f"the planner cuts between whole blocks, and '{fqn}' is none"
            fix = "name blocks, or state all that is left open"
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
            fix = "leave its stage out, or state all that is left open"
            problems.append(Problem(what, spec.origin("rules"), fix))
    if problems:
        raise PlanError(problems)
    return FixedStages(pins, num)


def _stated(spec: Spec, graph: ModelGraph) -> Iterator[tuple[str, int, str]]:
    """(module, stage, where that stands); a split goes before rules."""
    words = {"first": 0, "last": LAST}
    for fqn, stated in Cascade(spec, graph).modules_with("stage"):
        yield fqn, words.get(stated.value, stated.value), stated.path
    split = spec.pipeline.split if spec.pipeline is not None else None
    if isinstance(split, tuple):
        known = {n: m.fqn for m in graph.modules.values() for n in (m.fqn, *m.aliases)}
        for stage, names in enumerate(split):
            for name in names:
                if name not in known:
                    what = f"'{name}' is no module of {graph.name}"
                    raise PlanError(Problem(what, spec.origin("pipeline.split"), "correct it"))
                yield known[name], stage, "pipeline.split"


def _place(graph: ModelGraph, fqn: str, blocks: Sequence[str]) -> int | None:
    """0 of what is defined before all blocks, 1 of what is defined after; None of anything else."""
    if not blocks or any(is_inside(fqn, b) or is_inside(b, fqn) for b in blocks):
        return None
    order = list(graph.modules)
    if order.index(fqn) < order.index(blocks[0]):
        return 0
    return 1 if order.index(fqn) > order.index(blocks[-1]) else None


def _filled(blocks: Sequence[str], pins: Mapping[str, int]) -> dict[str, int]:
    """A split says it of all blocks: what follows a named one is of its stage."""
    out, current = {}, 0
    for block in blocks:
        current = max(current, pins.get(block, current))
        out[block] = current
    return out
