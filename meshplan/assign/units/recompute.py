"""Activation checkpointing: choose the modules that are recomputed, and what each saves."""

from __future__ import annotations

from meshplan.assign.base.cascade import Cascade
from meshplan.assign.base.types import Reason, Recompute
from meshplan.errors import Problem
from meshplan.model.graph import ModelGraph, is_inside
from meshplan.spec.spec import Spec

_FIELD = "activation_checkpointing"


def assign_recompute(
    spec: Spec, graph: ModelGraph, cascade: Cascade
) -> tuple[dict[str, Recompute], list[Problem]]:
    """Return the policy of every module that is recomputed.

    A policy that is stated for a module which contains repeated blocks applies to these blocks. For
    any other module it applies to the module itself. If the model has no repeated blocks, the
    policy of the whole plan applies to its largest modules (`largest_modules`).

    Returns:
        (policies by module fqn, problems found).
    """
    out: dict[str, Recompute] = {}
    problems: list[Problem] = []
    blocks = graph.blocks()
    stated_at = dict(cascade.modules_with(_FIELD))
    if spec.activation_checkpointing.mode != "none" and not blocks:
        own = tuple(fqn for fqn, stated in stated_at.items() if stated.value.mode != "none")
        blocks = tuple(
            fqn
            for fqn in largest_modules(graph)
            if not any(is_inside(fqn, other) or is_inside(other, fqn) for other in own)
        )
        if not blocks and not own:
            problems.append(
                Problem(
                    f"{graph.name} has neither repeated blocks nor a module to recompute",
                    spec.origin(_FIELD),
                    "remove activation_checkpointing, or move the code to recompute into a "
                    "separate module",
                )
            )
    for container in dict.fromkeys(b.rpartition(".")[0] for b in blocks):
        siblings = [b for b in blocks if b.rpartition(".")[0] == container]
        for number, fqn in enumerate(siblings):
            stated = cascade.inherited(fqn, _FIELD)
            policy = stated.value if stated else spec.activation_checkpointing
            if policy.mode == "none" or number % policy.every:
                continue
            path, text = (
                (stated.path, stated.text) if stated else (_FIELD, f"{_FIELD}: {policy.mode}")
            )
            out[fqn] = Recompute(policy, Reason(text.partition("(")[0], spec.origin(path)))
    for fqn, stated in stated_at.items():
        reaches_blocks = any(is_inside(b, fqn) for b in blocks)
        if reaches_blocks or stated.value.mode == "none":
            continue
        origin = spec.origin(stated.path)
        if not graph.modules[fqn].has_forward:
            problems.append(
                Problem(
                    f"'{fqn}' is a {graph.modules[fqn].type}, which is never called, so it "
                    "cannot be recomputed",
                    origin,
                    f"match its children, such as '{fqn}.*'",
                )
            )
            continue
        around = next((o for o in out if o and fqn.startswith(o + ".")), None)
        if around is not None:
            problems.append(
                Problem(
                    f"'{fqn}' lies inside '{around}', which is recomputed as a whole",
                    origin,
                    f"write activation_checkpointing: none for '{around}', or remove this setting",
                )
            )
            continue
        out[fqn] = Recompute(stated.value, Reason(f"{_FIELD}: {stated.value.mode}", origin))
    by_origin = {problem.origin: problem for problem in reversed(problems)}
    return out, list(reversed(by_origin.values()))


def largest_modules(graph: ModelGraph) -> tuple[str, ...]:
    """Return the fqns of the modules to recompute in a model without blocks, in definition order.

    These are the outermost called modules that have between a twentieth and a half of the
    parameters. A larger one would have nearly all activations of the model in memory while it is
    recomputed. Single layers are included only if nothing else qualifies: for a single layer the
    saved input is hardly smaller than its activations.
    """
    total = sum(t.numel for t in graph.parameters)
    with_params = graph.with_params()
    out: list[str] = []

    def size(fqn: str) -> int:
        return sum(t.numel for t in graph.inside(fqn) if not t.is_buffer)

    def visit(fqn: str) -> None:
        for child in graph.children(fqn):
            if child.fqn not in with_params:
                continue
            # The only child of a ModuleList is taken as a block, however large it is.
            is_large = 2 * size(child.fqn) > total and graph.modules[fqn].has_forward
            if not child.has_forward or (is_large and _is_divided(graph, child.fqn)):
                visit(child.fqn)
            elif 20 * size(child.fqn) >= total:
                out.append(child.fqn)

    visit("")
    divided = tuple(fqn for fqn in out if _is_divided(graph, fqn))
    return divided or tuple(out)


def _is_divided(graph: ModelGraph, fqn: str) -> bool:
    """Return True if a module contains called modules with parameters: it is no single layer."""
    with_params = graph.with_params()
    inside = [m for f, m in graph.modules.items() if f != fqn and is_inside(f, fqn)]
    return any(m.has_forward and m.fqn in with_params for m in inside)
