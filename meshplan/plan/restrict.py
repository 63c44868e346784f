"""Restrict a plan to one pipeline stage, for the code that wraps the stage's modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType
from typing import TypeVar

from meshplan.assign.base.types import Assignment, Placed, Stages, Unit
from meshplan.model.graph import around
from meshplan.plan.plan import Plan

_T = TypeVar("_T")


def restrict(plan: Plan, stage: int) -> Plan:
    """Return the plan of one stage, as if the stage were the whole model.

    Returns:
        A plan with only the tensors of the stage, and the units, styles and other decisions for
        modules that run in it. Its `accumulate` is the number of backwards per optimizer step.
    """
    if not plan.by_stage:  # Computed once for all stages, because callers need most of them.
        plan.by_stage.update(enumerate(_restricted(plan)))
    return plan.by_stage[stage]


def _restricted(plan: Plan) -> Iterator[Plan]:
    """Yield the plans of all stages, in one pass over the whole plan."""
    whole = plan.assignment
    stages = whole.stages
    assert stages is not None
    where, every = _places(stages.units), range(stages.num)

    def apart(items: Mapping[str, _T]) -> list[dict[str, _T]]:
        """Return, for each stage, the decisions for modules that run in it."""
        out: list[dict[str, _T]] = [{} for _ in every]
        for fqn, value in items.items():
            for stage in where.stages(fqn) or every:
                out[stage][fqn] = value
        return out

    def owned(items: Sequence[_T], fqn_of: Callable[[_T], str]) -> list[tuple[_T, ...]]:
        out: list[list[_T]] = [[] for _ in every]
        for each in items:
            for stage in where.stages(fqn_of(each)) or every:
                out[stage].append(each)
        return [tuple(own) for own in out]

    tensors: list[dict[str, Placed]] = [{} for _ in every]
    for fqn, placed in whole.tensors.items():
        for stage in stages.tensors[fqn]:
            tensors[stage][fqn] = placed
    owning = [{placed.unit for placed in own.values()} for own in tensors]
    units: list[dict[str, Unit]] = [{} for _ in every]
    for fqn, unit in whole.units.items():
        if not fqn:
            for stage in every:
                units[stage][fqn] = unit if stage == stages.num - 1 else _without_cast(unit)
        elif fqn not in where.outer:
            # FSDP2 all-gathers a unit for backward when a gradient reaches the unit's output, so
            # the stage must return that output. It does not if the module's submodules are in
            # different stages, or if its forward is called by name, which makes only its callees
            # units of the pipeline. For the root, the stage's own output serves.
            for stage in where.stages(fqn) or every:
                if fqn in owning[stage]:
                    units[stage][fqn] = unit
    styles, experts = apart(whole.styles), apart(whole.experts)
    recompute, host_activations = apart(whole.recompute), apart(whole.host_activations)
    attributes = owned(whole.attributes, lambda each: each.module)
    crossings = owned(whole.crossings, lambda each: each.module)
    synchronized = owned(whole.synchronized, str)
    for stage in every:
        own = units[stage]
        part: Assignment = replace(
            whole,
            tensors=MappingProxyType({f: _housed(p, own) for f, p in tensors[stage].items()}),
            units=MappingProxyType(own),
            styles=MappingProxyType(styles[stage]),
            experts=MappingProxyType(experts[stage]),
            recompute=MappingProxyType(recompute[stage]),
            host_activations=MappingProxyType(host_activations[stage]),
            attributes=attributes[stage],
            crossings=crossings[stage],
            synchronized=synchronized[stage],
            apply=(),
        )
        yield replace(plan, assignment=part, accumulate=plan.accumulate * stages.microbatches)


def runs(fqn: str, stages: Stages, stage: int) -> bool:
    """Return True if a stage runs the forward of a module instead of replacing it by a stand-in."""
    return _places(stages.units).runs(fqn, stage)


class _ModuleStages:
    """The stages in which modules run.

    Attributes:
        outer: Fqns of the modules that contain a module which is assigned to a stage.
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
        """Return True if a module runs in a stage; a module without a stage runs in all."""
        found = self.stages(fqn)
        return stage in found if found else True

    def stages(self, fqn: str) -> frozenset[int]:
        """Return the stages to which a module, or a module that contains it, is assigned."""
        found = self._known.get(fqn)
        if found is None:
            found = frozenset().union(*(self._own.get(module, ()) for module in around(fqn)))
            self._known[fqn] = found
        return found


@lru_cache(maxsize=8)
def _places(units: tuple[tuple[str, int], ...]) -> _ModuleStages:
    return _ModuleStages(units)


def _housed(placed: Placed, units: dict[str, Unit]) -> Placed:
    """Return a tensor with its unit; if the stage lacks it, with the closest unit around it."""
    unit = placed.unit
    while unit and unit not in units:
        unit = unit.rpartition(".")[0]
    return placed if unit == placed.unit else replace(placed, unit=unit)


def _without_cast(unit: Unit) -> Unit:
    """Return the root unit without an output cast: only the last stage's output is the model's."""
    return replace(unit, precision=replace(unit.precision, output=None))
