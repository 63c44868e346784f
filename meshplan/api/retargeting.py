"""Plans for other hardware: `meshplan.retarget`, and `meshplan plan --what-if`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

from meshplan.api import checking, planning
from meshplan.api.source import PlanSource, Source, SourceArguments, source_of
from meshplan.cost.profile import framework_of
from meshplan.errors import MeshplanError, Origin, Problem, SpecError
from meshplan.plan.plan import Plan
from meshplan.planner.answers.difference import PlanDifference, figures_of
from meshplan.planner.answers.reshard import Reshard, reshard
from meshplan.planner.answers.what_if import WhatIf
from meshplan.planner.lock.lock import overrides as overrides_of
from meshplan.planner.problem.decision import Decision, Evaluated
from meshplan.shown import shown
from meshplan.units import format_gib

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
    source = source_of(plan, overrides, **given)
    if old is None:
        old = checking.decide(source)
    there = on_other_hardware(source, old, words)
    decision = planning.search_plan(there, report=report)
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


def what_if(
    source: Source,
    chosen: Evaluated,
    words: str,
    *,
    report: Callable[[str], None] = lambda text: None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> WhatIf:
    """Estimate a chosen plan on other hardware, and search the best plan there.

    Args:
        source: The question that the planner answered.
        chosen: Its answer.
        words: The changed fields, such as "gpu=b200".
        report: Called with a line for each better plan.
        is_stopped: Asked regularly; if it returns True, the search ends with the best plan so far.

    Raises:
        SpecError: A field is not one of `hardware`.
    """
    other = on_other_hardware(source, chosen.plan, words, "--what-if")

    def searched(of: Source, none: str) -> tuple[Evaluated | None, str]:
        try:
            found = planning.search_plan(of, report=report, is_stopped=is_stopped)
        except MeshplanError as error:
            return None, error.problems[0].what
        late = "" if found.is_whole else ", as far as was searched"
        return found.chosen, "" if found.chosen else f"{none} {format_gib(found.limit_bytes)}{late}"

    same, why = searched(other.with_overrides(overrides_of(chosen.stated)), "does not fit into")
    anew, why_not = searched(other, "nothing fits into")
    return WhatIf(hardware=words, same=same, why=why, anew=anew, why_not=why_not)


def on_other_hardware(source: Source, plan: Plan, words: str, flag: str = "--retarget") -> Source:
    """Return the question about other hardware.

    Seconds there are estimated by the constants of the same code, so that what differs is the
    hardware.

    Args:
        source: The question about the hardware that the plan file states.
        plan: The plan for that hardware.
        words: The changed fields, such as "nodes=4,gpu=h200".
        flag: The flag that they were given by, for an error.

    Raises:
        SpecError: A field is not one of `hardware`.
    """
    settings = retarget_settings(words, flag)
    if source.profile is None:
        settings.append(f"profile={framework_of(plan.spec, plan.graph)}")
    return source.with_overrides(settings)


def retarget_settings(words: str, flag: str = "--retarget") -> list[str]:
    """Return the overrides that change the hardware, such as ["hardware.nodes=4"].

    Args:
        words: The changed fields, such as "nodes=4,gpu=h200".
        flag: The flag that they were given by, for an error.

    Raises:
        SpecError: A field is not one of `hardware`.
    """
    out = []
    for word in words.split(","):
        name, equals, value = word.strip().partition("=")
        if not equals or name not in _HARDWARE:
            what = f"'{word}' does not set a hardware field"
            fix = f"write {', '.join(f'{each}=...' for each in _HARDWARE)}"
            raise SpecError(Problem(what, Origin(flag), fix))
        out.append(f"hardware.{name}={value}")
    return out
