"""Check that a lock makes only choices that its plan file leaves open.

A lock lies next to a plan, and anybody may have written it. Its statements go on top of the plan's,
so each is checked against the plan without the lock. A key that the planner never writes, and a
choice that changes a stated value, raise an error with their line in the lock.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, Final

from meshplan.assign.base.cascade import Cascade
from meshplan.errors import Origin, Problem, SpecError
from meshplan.layout.styles import EXPERT_STYLE
from meshplan.model.graph import ModelGraph
from meshplan.planner.space.ep import is_placed
from meshplan.spec.spec import AUTO, Spec
from meshplan.spec.strategies import STRATEGIES

_CHOICES: Final = frozenset(
    {
        "mesh", "strategy", "batch.micro", "batch.accumulate", "tp_plan", "sequence_parallel",
        "loss_parallel", "pipeline.schedule", "pipeline.virtual", "pipeline.microbatches",
        "pipeline.split", "offload", "activation_checkpointing", "context.attention",
        "experts.capacity", "hardware.nodes", "loss_chunks", "allocator",
    }
)  # fmt: skip
"""Paths that a lock may state, in addition to rules for single blocks."""
_RULE: Final = re.compile(r"rules\[([0-9]{1,5})\]")
_EXPERTS: Final = {"ep": EXPERT_STYLE}
_OF_BLOCKS: Final = ("activation_checkpointing", "reshard_after_forward")
_FIX: Final = "delete the lock, or run meshplan plan again"

Load = Callable[[Sequence[str]], Spec]


def check_chosen(
    chosen: Mapping[str, Any],
    origins: Mapping[str, Origin],
    load: Load,
    statements: Sequence[str],
    graph: ModelGraph | None = None,
) -> None:
    """Check that a lock makes only choices that its plan leaves open.

    Args:
        chosen: {path: value} choices of the lock.
        origins: {path: place of the choice in the lock file}.
        load: Reads the plan file with statements on top.
        statements: The choices as "path=value" statements for `load`.
        graph: The model; if None, rules of the lock are not compared with rules of the plan.

    Raises:
        SpecError: The lock makes other choices; the error lists them.
    """
    spec = load(())
    problems = [
        Problem(f"a lock may not choose {path}", origins[path], _FIX)
        for path in chosen
        if path not in _CHOICES and not _is_own_rule(path, chosen[path], spec)
    ]
    if problems:
        raise SpecError(problems)
    try:
        locked = load(statements)
    except SpecError as error:
        raise SpecError([_in_lock(problem, origins) for problem in error.problems]) from None
    problems = [
        Problem(f"the plan says {stated}, and a lock cannot change it", origins[path], _FIX)
        for path, stated in _overruled(chosen, spec, locked, graph)
    ]
    if problems:
        raise SpecError(problems)


def _is_own_rule(path: str, rule: Any, spec: Spec) -> bool:
    """Return True if a choice is a rule that the planner may add to the plan.

    Such a rule sets an open choice of blocks, or places experts that no rule of the plan places.
    """
    found = _RULE.fullmatch(path)
    if found is None or int(found[1]) < len(spec.rules) or not isinstance(rule, dict):
        return False
    if "place" in rule:
        return (
            rule.keys() == {"match", "place"} and rule["place"] == _EXPERTS and not is_placed(spec)
        )
    is_open = {
        "activation_checkpointing": _stated(spec, "activation_checkpointing") is None
        or spec.activation_checkpointing.mode == AUTO,
        "reshard_after_forward": spec.strategy in (None, AUTO),
    }
    return len(rule) == 2 and "match" in rule and any(is_open.get(key) for key in rule)


def _in_lock(problem: Problem, origins: Mapping[str, Origin]) -> Problem:
    """Return a problem of the locked spec with its place in the lock, if a choice causes it."""
    at = problem.origin.path if problem.origin is not None else ""
    around = (path for path in origins if at == path or at.startswith((f"{path}.", f"{path}[")))
    path = next(around, None)
    return Problem(problem.what, problem.origin if path is None else origins[path], _FIX)


def _overruled(
    chosen: Mapping[str, Any], spec: Spec, locked: Spec, graph: ModelGraph | None
) -> Iterator[tuple[str, str]]:
    """Yield (path, statement of the plan) for each choice that contradicts the plan.

    Args:
        chosen: {path: value} choices of the lock.
        spec: The spec of the plan file.
        locked: The spec with the choices on top.
        graph: The model; if None, rules are not compared.
    """
    sizes = _sizes(locked.mesh)
    for path in chosen:
        stated, now = _stated(spec, path), _stated(locked, path)
        if stated not in (None, AUTO) and not _agrees(path, stated, now, spec, sizes):
            yield path, f"{path}: {stated}"
    if graph is not None and any(path.startswith("rules[") for path in chosen):
        yield from _overruled_rules(spec, locked, graph)


def _stated(spec: Spec, path: str) -> Any:
    """Return the value that a file states at a path; None if it states none."""
    if not any(at == path or at.startswith(f"{path}.") for at in spec.origins):
        return None
    found: Any = spec
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def _agrees(path: str, stated: Any, now: Any, spec: Spec, sizes: Mapping[str, Any]) -> bool:
    """Return True if a choice keeps a stated value, or drops it where it has no effect.

    Args:
        path: Path of the choice.
        stated: Value that the plan states.
        now: Value with the lock on top.
        spec: The spec of the plan file.
        sizes: Axes of the locked mesh that are larger than 1.
    """
    has_tp, has_ep = "tp" in sizes, "ep" in sizes
    match path:
        case "mesh":
            return _keeps_mesh(stated, sizes)
        case "hardware.nodes":  # With the objective `cost`, the answer may be fewer nodes.
            return bool(now == stated or (spec.solve.get("objective") == "cost" and now < stated))
        case "strategy":
            if now is None:  # A mesh without data axes has no strategy.
                return not sizes.keys() & {"dp_replicate", "dp_shard"}
            return now in STRATEGIES and STRATEGIES[now].cuts == STRATEGIES[stated].cuts
        case "tp_plan" | "sequence_parallel" | "loss_parallel":
            return bool(now == stated or not has_tp)
        case "experts.capacity":
            return bool(now == stated or not has_ep)
        case "activation_checkpointing":
            return bool(stated.mode == AUTO or now == stated)
        case "offload":
            if now is None:
                return False
            parts = [(getattr(stated, f.name), getattr(now, f.name)) for f in fields(stated)]
            return all(old in (None, AUTO) or bool(old) == bool(new) for old, new in parts)
    return bool(now == stated)


def _sizes(mesh: Any) -> dict[str, Any]:
    """Return the axes of a mesh that are larger than 1."""
    axes = mesh if isinstance(mesh, Mapping) else {}
    return {axis: size for axis, size in axes.items() if size != 1}


def _keeps_mesh(stated: Any, sizes: Mapping[str, Any]) -> bool:
    """Return True if every axis has the size that the plan states, and there are no other axes."""
    if not isinstance(stated, Mapping):
        listed = sorted(size for size in stated if size != 1)
        return listed == sorted(size for size in sizes.values() if isinstance(size, int))
    is_known = all(size in (AUTO, sizes.get(axis, 1)) for axis, size in stated.items())
    return is_known and sizes.keys() <= stated.keys()


def _overruled_rules(spec: Spec, locked: Spec, graph: ModelGraph) -> Iterator[tuple[str, str]]:
    """Yield one (path of a lock's rule, statement of the plan that it contradicts), if any."""
    before, after = Cascade(spec, graph), Cascade(locked, graph)
    for fqn in graph.modules:
        for field in _OF_BLOCKS:
            old, new = before.inherited(fqn, field), after.inherited(fqn, field)
            if old is not None and new is not None and old.value != new.value:
                yield f"rules[{new.rule.index}]", f"{old.path} of {fqn or 'the model'}"
                return
