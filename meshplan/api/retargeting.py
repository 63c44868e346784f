"""`meshplan.retarget`: search a plan for other hardware and compare it with the existing plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

from meshplan.api import checking, planning
from meshplan.api.source import PlanSource, Source, SourceArguments, source_of
from meshplan.errors import Origin, Problem, SpecError
from meshplan.plan.plan import Plan
from meshplan.planner.answers.difference import PlanDifference, figures_of
from meshplan.planner.answers.reshard import Reshard, reshard
from meshplan.planner.problem.decision import Decision
from meshplan.shown import shown

_HARDWARE = (
    "nodes", "gpus_per_node", "gpu", "memory", "host_memory", "intra", "inter", "headroom",
)  # fmt: skip


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class Retarget:
    """The result of planning for other hardware.

    Args:
        decision: The planner's decision for the new hardware; `decision.chosen` is None if nothing
            fits.
        difference: The comparison of the old plan with the new one; None without a new plan.
        moved: Bytes of parameters and optimizer state that ranks receive to switch to the new plan;
            None without a new plan.
    """

    decision: Decision
    difference: PlanDifference | None
    moved: Reshard | None


def retarget(
    plan: PlanSource | Source,
    hardware: str | Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    old: Plan | None = None,
    report: Callable[[str], None] = lambda text: None,
    **given: Unpack[SourceArguments],
) -> Retarget:
    """Search the best plan for other hardware, and compare it with the plan that runs now.

    Args:
        plan: Path of a plan file, its content as a mapping, or a whole `Source`.
        hardware: The changed fields: `{"nodes": 4, "gpu": "h200"}`, or "nodes=4,gpu=h200".
        overrides: `KEY=VALUE` statements that change the plan.
        old: The plan that runs now; if None, `decide` reads it from the plan file and its lock.
        report: Called with a line for each better plan.
        given: The model and the machine, by the names of `Source`: `model`, `config` and
            `profile`.

    Raises:
        SpecError: The plan or the model cannot be read, or `hardware` names other fields.
        PlanError: The plan contradicts itself, or lacks a value that the search needs.
    """
    words = hardware if isinstance(hardware, str) else ",".join(
        f"{name}={value}" for name, value in hardware.items()
    )  # fmt: skip
    if not words:
        what = "no changed hardware field is given"
        raise SpecError(Problem(what, Origin("hardware"), 'pass "nodes=4,gpu=h200", for example'))
    settings = retarget_settings(words)
    source = source_of(plan, overrides, **given)
    if old is None:
        old = checking.decide(source)
    decision = planning.search_plan(source.with_overrides(settings), report=report)
    if decision.chosen is None:
        return Retarget(decision=decision, difference=None, moved=None)
    new = decision.chosen.plan
    return Retarget(
        decision=decision,
        difference=planning.compare(
            ("the plan", old),
            (words, new),
            profile=source.profile,
            known=({}, figures_of(decision)),
        ),
        moved=reshard(old, new),
    )


def retarget_settings(words: str) -> list[str]:
    """Return the overrides that change the hardware, such as ["hardware.nodes=4"].

    Args:
        words: The changed fields, such as "nodes=4,gpu=h200".

    Raises:
        SpecError: A field is not one of `hardware`.
    """
    out = []
    for word in words.split(","):
        name, equals, value = word.strip().partition("=")
        if not equals or name not in _HARDWARE:
            what = f"'{word}' does not set a hardware field"
            fix = f"write {', '.join(f'{each}=...' for each in _HARDWARE)}"
            raise SpecError(Problem(what, Origin("--retarget"), fix))
        out.append(f"hardware.{name}={value}")
    return out
