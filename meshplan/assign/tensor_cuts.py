"""What the rooms of the tp axis fill in together: styles, cuts, attributes and problems."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshplan.assign.types import LocalAttribute, Reason, StyleUse
from meshplan.errors import Problem
from meshplan.layout.layout import Layout


@dataclass(frozen=True, slots=True)
class TensorCut:
    """How tp lays out one parameter, and why."""

    layout: Layout
    gathered: bool
    reason: Reason
    is_local: bool = False


@dataclass(slots=True)
class TensorParallel:
    """The tp side of an assignment: styles by module, cuts by parameter."""

    styles: dict[str, StyleUse] = field(default_factory=dict)
    cuts: dict[str, TensorCut] = field(default_factory=dict)
    attributes: list[LocalAttribute] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)


def report(out: TensorParallel, problem: Problem) -> None:
    """One mistake, one message: a rule that hits 32 layers reports the first."""
    if not any(p.origin == problem.origin for p in out.problems):
        out.problems.append(problem)
