"""Results that the modules for the tp axis fill in together: styles, cuts, attributes, problems."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshplan.assign.base.types import LocalAttribute, Reason, StyleUse
from meshplan.errors import Problem
from meshplan.layout.layout import Layout


@dataclass(frozen=True, slots=True)
class TensorCut:
    """The layout that tp gives to one parameter, and the reason."""

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
    """Add a problem once per origin: a rule that matches 32 layers reports the first."""
    if not any(p.origin == problem.origin for p in out.problems):
        out.problems.append(problem)
