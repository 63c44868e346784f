"""One stage's part of a plan: what the rooms that wrap a module read for it."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from meshplan.assign.types import Assignment, Placed, Stages, Unit
from meshplan.graph import around
from meshplan.plan import Plan


def restrict(plan: Plan, stage: int) -> Plan:
    """The plan of one stage, as if it were the whole model.

    Returns:
        The tensors that the stage holds, the units, styles and other decisions on modules that
        run in it; as many microbatches as backwards per optimizer step.
    """
    if stage not in plan.by_stage:  # Every rank of a stage asks again.
        plan.by_stage[stage] = _restricted(plan, stage)
    return plan.by_stage[stage]


def _restricted(plan: Plan, stage: int) -> Plan:
    whole = plan.assignment
    stages = whole.stages
    assert stages is not None
    tensors = {f: p for f, p in whole.tensors.items() if stage in stages.tensors[f]}
    where = _places(stages.units)
    owning = {placed.unit for placed in tensors.values()}

    def is_here(fqn: str) -> bool:
        return where.runs(fqn, stage)

    def is_whole(unit: str) -> bool:
        """Whether a unit runs here, and not only modules inside it.

        A unit gathers for its backward when a gradient comes to its output. Where modules inside
        it are cut apart, or its forward is called by name so that only what it calls is known, what
        is sent on is not its output; that of the stage always is.
        """
        return unit not in where.outer and is_here(unit)

    units = {
        fqn: _without_cast(unit) if not fqn and stage < stages.num - 1 else unit
        for fqn, unit in whole.units.items()
        if not fqn or (fqn in owning and is_whole(fqn))
    }

    def here(items: Any) -> Any:
        return MappingProxyType({f: v for f, v in items.items() if is_here(f)})

    part: Assignment = replace(
        whole,
        tensors=MappingProxyType({f: _housed(p, units) for f, p in tensors.items()}),
        units=MappingProxyType(units),
        styles=here(whole.styles),
        experts=here(whole.experts),
        recompute=here(whole.recompute),
        host_activations=here(whole.host_activations),
        attributes=tuple(a for a in whole.attributes if is_here(a.module)),
        crossings=tuple(c for c in whole.crossings if is_here(c.module)),
        synchronized=tuple(f for f in whole.synchronized if is_here(f)),
        apply=(),
    )
    return replace(plan, assignment=part, accumulate=plan.accumulate * stages.microbatches)


def runs(fqn: str, stages: Stages, stage: int) -> bool:
    """Whether the forward of a module runs in a stage, rather than being stood in for."""
    return _places(stages.units).runs(fqn, stage)


class _Places:
    """Where modules run.

    Attributes:
        outer: The modules around one that runs as a whole.
    """

    def __init__(self, units: tuple[tuple[str, int], ...]) -> None:
        self._own: dict[str, set[int]] = {}
        for module, stage in units:
            self._own.setdefault(module, set()).add(stage)
        self.outer = frozenset(
            each for module, _ in units if module for each in around(module.rpartition(".")[0])
        )
        self._known: dict[str, frozenset[int]] = {}

    def runs(self, fqn: str, stage: int) -> bool:
        """Whether a module runs in a stage; one that no stage has runs in every one."""
        found = self._known.get(fqn)
        if found is None:
            found = frozenset().union(*(self._own.get(module, ()) for module in around(fqn)))
            self._known[fqn] = found
        return stage in found if found else True


@lru_cache(maxsize=8)
def _places(units: tuple[tuple[str, int], ...]) -> _Places:
    return _Places(units)


def _housed(placed: Placed, units: dict[str, Unit]) -> Placed:
    """A tensor whose unit does not run here is gathered by the one around it."""
    unit = placed.unit
    while unit and unit not in units:
        unit = unit.rpartition(".")[0]
    return placed if unit == placed.unit else replace(placed, unit=unit)


def _without_cast(unit: Unit) -> Unit:
    """What goes to another stage keeps its dtype; only the model's output is cast."""
    return replace(unit, precision=replace(unit.precision, output=None))
