"""Expert parallelism in the planner: which modules have experts, and how a plan shards them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from meshplan.layout.styles import EXPERT_STYLE
from meshplan.model.graph import ModelGraph, pattern_of
from meshplan.spec.borrow import LENDER
from meshplan.spec.compatibility import CLASHES
from meshplan.spec.spec import Borrow, Rule, Selector, Spec

_EXPERT: Final = "expert"
_STACK: Final = 3
"""Number of dims of a parameter that stacks the experts' matrices. A router's weight, with a row
for each expert, has one dim less."""
_CLASHES: Final = frozenset(frozenset((clash.left, clash.right)) for clash in CLASHES)


@dataclass(frozen=True, slots=True)
class ExpertCounts:
    """The experts of a model.

    Args:
        modules: Patterns of the modules with stacked experts; () if there are none.
        count: Number of experts in the module that has the fewest; 0 if there are none.
    """

    modules: tuple[str, ...] = ()
    count: int = 0


NO_EXPERTS: Final = ExpertCounts()


def experts_of(graph: ModelGraph) -> ExpertCounts:
    """Return the experts of a model that ep could shard."""
    stacks = [
        tensor
        for tensor in graph.parameters
        if len(tensor.shape) >= _STACK and tensor.dims[0] == _EXPERT
    ]
    modules = tuple(dict.fromkeys(pattern_of(tensor.module) for tensor in stacks))
    return ExpertCounts(modules, min((tensor.shape[0] for tensor in stacks), default=0))


def is_placed(spec: Spec) -> bool:
    """Return True if a rule of the plan already places experts along ep."""
    return any("ep" in rule.place for rule in spec.rules)


def go_together(sizes: Mapping[str, int], *, is_sequence: bool) -> bool:
    """Return True if meshplan supports these axes together (`spec.compatibility.CLASHES`).

    Args:
        sizes: Size of each axis, by name.
        is_sequence: If True, tp shards activations along the sequence, which counts as an axis.
    """
    there = {axis for axis, size in sizes.items() if size > 1}
    there |= {"sequence_parallel"} if is_sequence else set()
    return not any(clash <= there for clash in _CLASHES)


def as_trial(spec: Spec, sizes: Mapping[str, int], modules: tuple[str, ...]) -> Spec:
    """Return a trial spec with this mesh, and with a rule that shards experts if ep needs one.

    Without ep, the plan's statements on ep are removed.

    Args:
        spec: The spec of the plan file.
        sizes: Size of each axis, by name.
        modules: Patterns of the modules with stacked experts.
    """
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
    """Drop a rule's placement along ep, for meshes where ep is 1."""
    place = {axis: word for axis, word in rule.place.items() if axis != "ep"}
    return replace(rule, place=place)


def words(modules: tuple[str, ...]) -> dict[str, Any]:
    """Return the rule, as in plan.yaml, that shards the experts of these modules along ep."""
    match = modules[0] if len(modules) == 1 else list(modules)
    return {"match": match, "place": {"ep": EXPERT_STYLE}}
