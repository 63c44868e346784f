"""Traces of a model in which the shape of some tensors depends on values, as upper bounds.

A model that masks frames at random, or routes what a mask selects, runs other sizes in every step.
Its traces have data-dependent operators select all that they can (`trace.bounds`), so a plan that
fits by them fits in every step. A second trace, with half selected, shows that it is a bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from meshplan.errors import PlanError, Problem
from meshplan.memory.log.events import EventLog
from meshplan.runtime.trace.bounds import (
    NoBoundError,
    UnknownShapeError,
    bound_of,
    check_grows,
    everything,
    half,
    picking,
)

T = TypeVar("T")


class BoundedTraces:
    """Runs traces of one model: as they are, or at the largest sizes if it has unknown ones.

    Args:
        report: Called with lines on the progress.

    Attributes:
        bound: A sentence that says why the traces are upper bounds; "" if they are exact.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self.bound = ""
        self._problem: Problem | None = None

    def run(self, trace: Callable[[], T], logs_of: Callable[[T], Sequence[EventLog]]) -> T:
        """Return what a trace returns.

        Args:
            trace: Runs the model on fake tensors; called again for a bound.
            logs_of: Returns the logs of what `trace` returned.

        Raises:
            PlanError: The trace failed, or no upper bound can be proved.
        """
        if self._problem is None:
            try:
                return trace()
            except UnknownShapeError as error:
                self._report("tracing with all data-dependent operators at their maximum size")
                (self._problem,), self.bound = error.problems, bound_of(error)
        with picking(everything):
            most = trace()
        with picking(half, has_buffers=False):
            less = trace()
        try:
            for one, other in zip(logs_of(most), logs_of(less), strict=True):
                check_grows(one, other)
        except NoBoundError as error:
            what = f"{self._problem.what}; no upper bound can be proved: {error}"
            raise PlanError(Problem(what, self._problem.origin, self._problem.fix)) from None
        return most
