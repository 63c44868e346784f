"""Experts over ranks, as the planner may say it: which modules hold them, and the words for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from meshplan.layout.styles import EXPERT_STYLE
from meshplan.model.graph import ModelGraph, pattern_of
from meshplan.spec.compatibility import CLASHES
from meshplan.spec.spec import Borrow, Rule, Selector, Spec

LENDER: Final = "dp_shard"
_EXPERT: Final = "expert"
_STACK: Final = 3
"""Dims of a parameter that stacks matrices; a router has a row for each expert, and one less."""
_CLASHES: Final = frozenset(frozenset((clash.left, clash.right)) for clash in CLASHES)


@dataclass(frozen=True, slots=True)
class ExpertCounts:
    """Of a model.

    Args:
        modules: Patterns of the modules that stack them; () where there are none.
        count: Of one module.
    """

    modules: tuple[str, ...] = ()
    count: int = 0


NO_EXPERTS: Final = ExpertCounts()


def experts_of(graph: ModelGraph) -> ExpertCounts:
    """Those that could be spread."""
    stacks = [
        tensor
        for tensor in graph.parameters
        if len(tensor.shape) >= _STACK and tensor.dims[0] == _EXPERT
    ]
    modules = tuple(dict.fromkeys(pattern_of(tensor.module) for tensor in stacks))
    return ExpertCounts(modules, min((tensor.shape[0] for tensor in stacks), default=0))


def is_placed(spec: Spec) -> bool:
    """Whether rules say already which experts are spread."""
    return any("ep" in rule.place for rule in spec.rules)


def go_together(sizes: Mapping[str, int], *, is_sequence: bool) -> bool:
    """Whether no two things in a mesh clash."""
    there = {axis for axis, size in sizes.items() if size > 1}
    there |= {"sequence_parallel"} if is_sequence else set()
    return not any(clash <= there for clash in _CLASHES)


def as_trial(spec: Spec, sizes: Mapping[str, int], modules: tuple[str, ...]) -> Spec:
    """A trial's mesh as words have it, with a rule where none places experts."""
    ep, rules = sizes.get("ep", 1), spec.rules
    if ep == 1:
        bare = {axis: size for axis, size in sizes.items() if axis != "ep"}
        nothing = replace(spec.experts, capacity=None)
        return replace(spec, mesh=bare, rules=tuple(map(_without, rules)), experts=nothing)
    mesh: dict[str, int | Literal["auto"] | Borrow] = {**sizes}
    mesh |= {LENDER: max(ep, sizes.get(LENDER, 1)), "ep": Borrow(ep, LENDER)}
    if not is_placed(spec):
        match = tuple(Selector("glob", module) for module in modules)
        rules += (Rule(index=len(rules), match=match, place={"ep": EXPERT_STYLE}),)
    return replace(spec, mesh=mesh, rules=rules)


def _without(rule: Rule) -> Rule:
    """A rule that has nothing to say where experts are not spread."""
    place = {axis: word for axis, word in rule.place.items() if axis != "ep"}
    return replace(rule, place=place)


def words(modules: tuple[str, ...]) -> dict[str, Any]:
    """The rule that a plan file would have."""
    match = modules[0] if len(modules) == 1 else list(modules)
    return {"match": match, "place": {"ep": EXPERT_STYLE}}
