"""The choices that a plan fixes for single blocks, and the statements that cannot be planned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from meshplan.assign.base.cascade import Cascade
from meshplan.cost.grid import RECOMPUTE
from meshplan.errors import PlanError, Problem
from meshplan.model.graph import ModelGraph
from meshplan.spec.compatibility import clashes
from meshplan.spec.spec import Borrow, Spec

AS_STATED: Final = (
    "leave nothing auto, and state mesh and batch.micro: the plan is priced as it stands"
)
"""The way forward where the search cannot vary a plan, but the cost model has figures for it."""


@dataclass(frozen=True, slots=True)
class Pin:
    """The values of recompute and reshard that a plan's rules allow one block.

    Args:
        recompute: Indices into `cost.grid.RECOMPUTE`; () for all that the plan leaves open.
        reshard: Values of reshard after forward, 0 or 1; () for all that the plan leaves open.
    """

    recompute: tuple[int, ...] = ()
    reshard: tuple[int, ...] = ()


Pins = Mapping[str, Pin]
"""{fqn of a block: its pin}."""


def fixed_choices_of(spec: Spec, graph: ModelGraph) -> Pins:
    """Return the fixed choices of each block for which rules fix any.

    Raises:
        PlanError: Rules are wrong, or fix something that the planner has no figures for.
    """
    cascade = Cascade(spec, graph)
    if cascade.problems:
        raise PlanError(cascade.problems)
    pins = {}
    for fqn in graph.blocks():
        recompute = _policy(spec, cascade, graph, fqn)
        back = cascade.inherited(fqn, "reshard_after_forward")
        if back is not None and not isinstance(back.value, bool):
            what = "the planner does not search plans with parameters resharded over fewer ranks"
            fix = f"write true or false, or {AS_STATED}"
            raise PlanError(Problem(what, spec.origin(back.path), fix))
        pins[fqn] = Pin(
            (RECOMPUTE.index(recompute),) if recompute else (),
            (int(back.value),) if back else (),
        )
    return {fqn: pin for fqn, pin in pins.items() if pin != Pin()}


def _policy(spec: Spec, cascade: Cascade, graph: ModelGraph, fqn: str) -> str:
    """Return the recompute mode that the plan fixes for a block; "" if it is open.

    It is fixed by a rule, or by an `every` other than 1 (recompute every n-th block).
    """
    stated = cascade.inherited(fqn, "activation_checkpointing")
    policy = stated.value if stated else spec.activation_checkpointing
    if stated is None and policy.every == 1:
        return ""
    container = fqn.rpartition(".")[0]
    siblings = [b for b in graph.blocks() if b.rpartition(".")[0] == container]
    return "none" if siblings.index(fqn) % policy.every else policy.mode


def check_fixed_choices(spec: Spec) -> None:
    """Check that the plan states nothing that no choice of the planner can make work.

    These are statements that it would override or has no figures for, and clashes.

    Raises:
        PlanError: The plan states something of the kind, such as a list of operations to save, or
            two features that do not go together.
    """
    mesh = spec.mesh if isinstance(spec.mesh, Mapping) else {}
    policies = {"activation_checkpointing": spec.activation_checkpointing}
    policies |= {
        f"rules[{rule.index}].activation_checkpointing": rule.activation_checkpointing
        for rule in spec.rules
        if rule.activation_checkpointing is not None
    }
    stated = [
        *((f"{at}.budget", "a budget for activation memory") for at, p in policies.items()
          if p.budget is not None),
        *((f"mesh.{axis}", "borrowed ranks") for axis, size in mesh.items()
          if isinstance(size, Borrow) and axis != "ep"),
    ]  # fmt: skip
    if isinstance(spec.batch.accumulate, Mapping):
        stated.append(("batch.accumulate", "a batch that changes with the epoch"))
    problems = [
        Problem(f"the planner does not support {what} yet", spec.origin(path),
                "leave it out, or run meshplan estimate, which needs no step time")
        for path, what in stated
    ]  # fmt: skip
    as_stated = [(f"{at}.save", "a list of operations to save", "leave it out")
                 for at, p in policies.items() if p.save]  # fmt: skip
    if _accumulates_around_stages(spec, mesh):
        instead = "state all samples as batch.micro, which the pipeline splits"
        as_stated.append(("batch.accumulate", "gradient accumulation around a pipeline", instead))
    problems += [
        Problem(f"the planner does not search plans with {what}", spec.origin(path),
                f"{instead}, or {AS_STATED}")
        for path, what, instead in as_stated
    ]  # fmt: skip
    problems += clashes(spec)
    if problems:
        raise PlanError(problems)


def _accumulates_around_stages(spec: Spec, mesh: Mapping[str, object]) -> bool:
    """Return True if a plan states a pipeline that runs several times in a step."""
    pp, accumulate = mesh.get("pp", 1), spec.batch.accumulate
    return isinstance(pp, int) and pp > 1 and isinstance(accumulate, int) and accumulate > 1
