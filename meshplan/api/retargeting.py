"""`meshplan.retarget`: the best plan for other hardware, beside the one that there is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshplan.api import checking, planning
from meshplan.api.in_force import PlanSource
from meshplan.errors import Origin, Problem, SpecError
from meshplan.plan.plan import Plan
from meshplan.planner.answers.difference import PlanDifference, figures_of
from meshplan.planner.answers.reshard import Reshard
from meshplan.planner.problem.decision import Decision

_HARDWARE = (
    "nodes", "gpus_per_node", "gpu", "memory", "host_memory", "intra", "inter", "headroom",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Retarget:
    """What other hardware would change.

    Args:
        decision: What the planner says for it; `decision.chosen` is None where nothing fits.
        difference: The old plan beside the new one; None without a new one.
        moved: Bytes of parameters and optimizer state that change hands between them, likewise.
    """

    decision: Decision
    difference: PlanDifference | None
    moved: Reshard | None


def retarget(
    plan: PlanSource,
    hardware: str | Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    config: str | Path | None = None,
    old: Plan | None = None,
    profile: str | Path | None = None,
    told: Callable[[str], None] = lambda text: None,
) -> Retarget:
    """The best plan for other hardware, and what it takes to go on with it.

    Args:
        plan, overrides, config: As for `search_plan`.
        hardware: What is otherwise: `{"nodes": 4, "gpu": "h200"}`, or "nodes=4,gpu=h200".
        old: What runs now; None takes what the plan file says, or its lock, or a search.
        profile, told: As for `search_plan`.

    Raises:
        SpecError: The plan or the model cannot be read, or this is nothing of hardware.
        PlanError: The plan contradicts itself, or says too little.
    """
    words = hardware if isinstance(hardware, str) else ",".join(
        f"{name}={value}" for name, value in hardware.items()
    )  # fmt: skip
    if not words:
        what = "nothing of the hardware is otherwise"
        raise SpecError(Problem(what, Origin("hardware"), 'give "nodes=4,gpu=h200", say'))
    settings = retarget_settings(words)
    if old is None:
        old = checking.decide(plan, overrides, config=config)
    decision = planning.search_plan(
        plan, [*overrides, *settings], config=config, profile=profile, told=told
    )
    if decision.chosen is None:
        return Retarget(decision=decision, difference=None, moved=None)
    new = decision.chosen.plan
    return Retarget(
        decision=decision,
        difference=planning.compare(
            ("the plan", old), (words, new), profile=profile, known=({}, figures_of(decision))
        ),
        moved=planning.moved_between(old, new),
    )


def retarget_settings(words: str) -> list[str]:
    """Other hardware, as statements.

    Args:
        words: Such as "nodes=4,gpu=h200".

    Raises:
        SpecError: It says something that is not of hardware.
    """
    out = []
    for word in words.split(","):
        name, equals, value = word.strip().partition("=")
        if not equals or name not in _HARDWARE:
            what = f"'{word}' is nothing of hardware"
            fix = f"write {', '.join(f'{each}=...' for each in _HARDWARE)}"
            raise SpecError(Problem(what, Origin("--retarget"), fix))
        out.append(f"hardware.{name}={value}")
    return out
