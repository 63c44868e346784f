"""Decisions about tp, which several modules fill in together: styles, layouts, attributes."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshplan.assign.base.types import LocalAttribute, Reason, StyleUse
from meshplan.errors import Problem
from meshplan.layout.layout import Layout


@dataclass(frozen=True, slots=True)
class TensorCut:
    """The layout of one parameter on tp.

    Args:
        layout: The layout, without the data axes.
        gathered: If True, the parameter is all-gathered each time its module runs; if False, the
            module computes with the shard.
        reason: The reason for the layout.
        is_local: See `Placed.is_local`.
    """

    layout: Layout
    gathered: bool
    reason: Reason
    is_local: bool = False


@dataclass(slots=True)
class Reported:
    """The problems that were found while something was decided."""

    problems: list[Problem] = field(default_factory=list)

    def report(self, problem: Problem) -> None:
        """Add a problem, but one per origin: a rule that matches 32 layers is reported once."""
        if not any(known.origin == problem.origin for known in self.problems):
            self.problems.append(problem)


@dataclass(slots=True)
class TensorParallel(Reported):
    """Decisions about tp: styles by module fqn, cuts by parameter fqn, attributes, problems."""

    styles: dict[str, StyleUse] = field(default_factory=dict)
    cuts: dict[str, TensorCut] = field(default_factory=dict)
    attributes: list[LocalAttribute] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)
