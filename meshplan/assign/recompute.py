"""Activation checkpointing: which modules recompute, and how."""

from __future__ import annotations

from meshplan.assign.cascade import Cascade
from meshplan.assign.types import Reason, Recompute
from meshplan.errors import Problem
from meshplan.graph import ModelGraph, is_inside
from meshplan.spec import Spec

_FIELD = "activation_checkpointing"


def assign_recompute(
    spec: Spec, graph: ModelGraph, cascade: Cascade
) -> tuple[dict[str, Recompute], list[Problem]]:
    """The policy of every module that recomputes, by fqn.

    A policy reaches the repeated blocks below where it is stated. Stated on a module inside a
    block, or around no block at all, it is that module's own.
    """
    out: dict[str, Recompute] = {}
    problems: list[Problem] = []
    blocks = graph.blocks()
    stated_at = dict(cascade.modules_with(_FIELD))
    if spec.activation_checkpointing.mode != "none" and not blocks:
        problems.append(
            Problem(
                f"{graph.name} has no repeated blocks, so nothing says what to recompute",
                spec.origin(_FIELD),
                "state it by a rule on the modules to recompute",
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
                    f"'{fqn}' is a {graph.modules[fqn].type}, never called itself, so it "
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
                    f"state activation_checkpointing: none for '{around}', or remove this",
                )
            )
            continue
        out[fqn] = Recompute(stated.value, Reason(f"{_FIELD}: {stated.value.mode}", origin))
    by_origin = {problem.origin: problem for problem in reversed(problems)}
    return out, list(reversed(by_origin.values()))
