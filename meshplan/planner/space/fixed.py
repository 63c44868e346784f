"""What a plan states of single blocks, which the planner keeps, and what it cannot keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshplan.assign.cascade import Cascade
from meshplan.cost.grid import RECOMPUTE
from meshplan.errors import PlanError, Problem
from meshplan.model.graph import ModelGraph
from meshplan.spec.spec import Borrow, Spec


@dataclass(frozen=True, slots=True)
class Pin:
    """What rules leave a block: the values it may take; () leaves it all that the plan does."""

    recompute: tuple[int, ...] = ()
    reshard: tuple[int, ...] = ()


Pins = Mapping[str, Pin]
"""By the fqn of a block."""


def fixed_choices_of(spec: Spec, graph: ModelGraph) -> Pins:
    """What rules state of single blocks.

    Raises:
        PlanError: Something that the planner has no figures for.
    """
    cascade = Cascade(spec, graph)
    if cascade.problems:
        raise PlanError(cascade.problems)
    pins = {}
    for fqn in graph.blocks():
        again = _policy(spec, cascade, graph, fqn)
        back = cascade.inherited(fqn, "reshard_after_forward")
        if back is not None and not isinstance(back.value, bool):
            what = "the planner has no figures for parameters that are resharded to fewer ranks"
            raise PlanError(Problem(what, spec.origin(back.path), "write true or false"))
        pins[fqn] = Pin(
            (RECOMPUTE.index(again),) if again else (),
            (int(back.value),) if back else (),
        )
    return {fqn: pin for fqn, pin in pins.items() if pin != Pin()}


def _policy(spec: Spec, cascade: Cascade, graph: ModelGraph, fqn: str) -> str:
    """What a rule says that a block recomputes, or the plan says of every n-th; "" if neither."""
    stated = cascade.inherited(fqn, "activation_checkpointing")
    policy = stated.value if stated else spec.activation_checkpointing
    if stated is None and policy.every == 1:
        return ""
    container = fqn.rpartition(".")[0]
    siblings = [b for b in graph.blocks() if b.rpartition(".")[0] == container]
    return "none" if siblings.index(fqn) % policy.every else policy.mode


def check_fixed_choices(spec: Spec) -> None:
    """What the plan states and the planner would overrule, or has no figures for, is refused.

    Raises:
        PlanError: There is any.
    """
    mesh = spec.mesh if isinstance(spec.mesh, Mapping) else {}
    policies = {"activation_checkpointing": spec.activation_checkpointing}
    policies |= {
        f"rules[{rule.index}].activation_checkpointing": rule.activation_checkpointing
        for rule in spec.rules
        if rule.activation_checkpointing is not None
    }
    asked = [
        *((f"{at}.save", "other operations than the usual") for at, p in policies.items()
          if p.save),
        *((f"{at}.budget", "a budget of activations") for at, p in policies.items()
          if p.budget is not None),
        *((f"mesh.{axis}", "borrowed ranks") for axis, size in mesh.items()
          if isinstance(size, Borrow) and axis != "ep"),
    ]  # fmt: skip
    if isinstance(spec.batch.accumulate, Mapping):
        asked.append(("batch.accumulate", "a batch that changes with the epoch"))
    problems = [
        Problem(f"the planner cannot hold {what} yet", spec.origin(path),
                "leave it out, or state all that is left open")
        for path, what in asked
    ]  # fmt: skip
    if problems:
        raise PlanError(problems)
