"""Find the fastest plan of each kind of layout that the chosen plan is not of.

Plans close to the chosen one differ in a setting or two. A user also wants to know about other
shapes of the mesh: what would tensor parallelism cost, or a pipeline? Each kind is a subset of the
configurations that were searched, and its fastest plan is found by the same search among them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from meshplan.layout.mesh import AXES
from meshplan.plan.plan import Plan
from meshplan.planner.objectives.offload_variants import FastestAmong
from meshplan.planner.problem.decision import Decision, Evaluated, OtherLayout
from meshplan.planner.problem.problem import PlanningProblem
from meshplan.two_cores import each, is_interrupted

_SHARE: Final = 0.3
"""Share of the processor time of the plan's own search that these searches may take together."""
_LEAST_S: Final = 3.0
"""Processor seconds that these searches may take in any case: of a small plan, they are all
proved."""

_STOPPED: Final = "the search was stopped before a plan that fits was found"

Sizes = Mapping[str, NDArray[Any]] | NDArray[np.void]
"""Sizes of the mesh axes by their names: a grid, or arrays of equal shape."""


def _is_hybrid(sizes: Sizes) -> NDArray[np.bool_]:
    return np.asarray((sizes["dp_replicate"] > 1) & (sizes["dp_shard"] > 1))


def _is_data_only(sizes: Sizes) -> NDArray[np.bool_]:
    alone = [sizes[axis] == 1 for axis in ("tp", "pp", "cp", "ep")]
    return np.asarray(np.all([*alone, ~_is_hybrid(sizes)], axis=0), dtype=np.bool_)


KINDS: Final[Mapping[str, Callable[[Sizes], NDArray[np.bool_]]]] = MappingProxyType(
    {
        "tp": lambda sizes: np.asarray(sizes["tp"] > 1),
        "pp": lambda sizes: np.asarray(sizes["pp"] > 1),
        "hybrid": _is_hybrid,
        "data": _is_data_only,
    }
)
"""The kinds of layout. Each maps the sizes of the mesh axes to a mask of the layouts of this kind:
tensor parallelism, a pipeline, two data axes (dp_replicate and dp_shard), and nothing but one data
axis. A layout may be of several kinds, such as tp and pp, or of none, such as cp alone."""


_TOGETHER: Final = (("tp", "pp"), ("hybrid",), ("data",))
"""Kinds that one process searches, one after the other."""


def kinds_of(plan: Plan) -> frozenset[str]:
    """Return the kinds of layout (keys of `KINDS`) that a plan is of."""
    sizes = {axis: np.array([plan.mesh.size(axis)]) for axis in AXES}
    return frozenset(kind for kind, is_kind in KINDS.items() if is_kind(sizes)[0])


def with_other_layouts(problem: PlanningProblem, decision: Decision) -> Decision:
    """Add the fastest plan of each other kind of layout to a decision.

    Each is exact, as `meshplan explain why-not` is: the fastest of its kind that fits. It is
    neither simplified nor traced. Where no plan of a kind fits without offload, and the chosen plan
    has none, plans of the kind with offload are not searched: they are far slower, and the search
    is long. The searches take at most the time limit that the plan states,
    and little processor time beside the plan's own search; a search that is stopped says so.

    Args:
        problem: The problem that was searched. Variants with offload are added to its grid.
        decision: The decision on it.

    Returns:
        The decision with `other_layouts`; unchanged if there is no chosen plan.
    """
    if decision.chosen is None:
        return decision
    return _Searches(problem, decision.chosen, decision.search_s).added_to(decision, {})


def decide_beside_others(
    problem: PlanningProblem, fastest: Evaluated, search_s: float, decide: Callable[[], Decision]
) -> Decision:
    """Make the decision, search other kinds of layout at the same time, and add these to it.

    Simplifying the fastest plan takes about as long as searching another kind, and neither waits
    for the other.

    Args:
        problem: The problem, searched to its end.
        fastest: The fastest plan found.
        search_s: Seconds that the search took.
        decide: Makes the decision on the problem from the search. It may choose another plan than
            `fastest`.

    Returns:
        The decision with `other_layouts`, as `with_other_layouts` returns it.
    """
    searches, own = _Searches(problem, fastest, search_s), kinds_of(fastest.plan)
    _ = problem.less_sharded  # Make the problems here, so that a copy of this process has them.
    works: list[Callable[[], Any]] = [
        decide, *searches.works([kind for kind in KINDS if kind not in own])
    ]  # fmt: skip
    decision, *answers = each(_call, works)
    return searches.added_to(decision, {k: v for some in answers for k, v in some.items()})


def _call(work: Callable[[], Any]) -> Any:
    return work()


class _Searches:
    """The searches for the fastest plan of each kind, on two cores.

    Args:
        problem: The problem that was searched.
        best: The plan that was chosen, or the fastest one.
        search_s: Seconds that the search of the problem took.
    """

    def __init__(self, problem: PlanningProblem, best: Evaluated, search_s: float) -> None:
        self._problem, limit_s = problem, problem.request.time_limit_s
        self._deadline = None
        if limit_s is not None:
            self._deadline = time.monotonic() + max(0.0, limit_s - search_s)
        self._left_s = max(_LEAST_S, _SHARE * search_s)
        self._has_offload = best.stated.get("offload", "none") != "none"

    def works(self, kinds: Sequence[str]) -> list[Callable[[], dict[str, OtherLayout]]]:
        """Return functions that search some kinds, each together with those it shares plans with.

        The fastest plan with tp and the one with pp often are the same, or nearly: one process
        searches both, and keeps what it replayed.

        Args:
            kinds: The kinds, keys of `KINDS`.
        """
        groups = ([kind for kind in some if kind in kinds] for some in _TOGETHER)
        return [partial(self.all_of, some) for some in groups if some]

    def added_to(self, decision: Decision, known: Mapping[str, OtherLayout]) -> Decision:
        """Return a decision with the fastest plan of each kind that the chosen plan is not of.

        Args:
            decision: The decision.
            known: Answers by kind; those that lack are searched, if the search of the decision came
                to its end.
        """
        if decision.chosen is None:
            return decision
        own = kinds_of(decision.chosen.plan)
        stopped = {kind: OtherLayout(kind=kind, why=_STOPPED, is_whole=False) for kind in KINDS}
        found = {kind: known.get(kind, other) for kind, other in stopped.items() if kind not in own}
        if decision.is_whole:
            works = self.works([kind for kind in found if kind not in known])
            for answers in each(_call, works):
                found |= answers
        return replace(decision, other_layouts=tuple(found.values()))

    def all_of(self, kinds: Sequence[str]) -> dict[str, OtherLayout]:
        """Search the fastest plan of each of several kinds.

        Args:
            kinds: The kinds, keys of `KINDS`.
        """
        found = {kind: self._fastest_in(self._problem, kind) for kind in kinds}
        # Last, since time may run out: the plans whose tp shards less are seldom faster.
        for other in self._problem.less_sharded:
            for kind, best in found.items():
                if best.is_in_space:
                    found[kind] = self._or_faster(best, other)
        return found

    def _or_faster(self, best: OtherLayout, other: PlanningProblem) -> OtherLayout:
        """Return the fastest plan of a kind so far, or a faster one of another problem."""
        below_s = best.evaluated.seconds if best.evaluated is not None else float("inf")
        found = self._fastest_in(other, best.kind, below_s)
        is_whole = best.is_whole and (found.is_whole or not found.is_in_space)
        return replace(found if found.evaluated is not None else best, is_whole=is_whole)

    def _fastest_in(
        self, problem: PlanningProblem, kind: str, below_s: float = float("inf")
    ) -> OtherLayout:
        """Search the fastest plan of a kind among those of one problem that take less."""
        if not KINDS[kind](problem.grid).any():
            return OtherLayout(kind=kind, why="not in the search space", is_in_space=False)
        with self._limited(problem, kind, below_s) as among:
            among.search()
            if not among.found.is_whole:
                return _answer(kind, among)
            if among.found.best is None and among.has_offload and not self._has_offload:
                return OtherLayout(kind=kind, why="no plan fits without offload")
            among.search_offload()
        return _answer(kind, among)

    @contextmanager
    def _limited(
        self, problem: PlanningProblem, kind: str, below_s: float
    ) -> Iterator[FastestAmong]:
        """Yield the search of a kind, which stops when the time for all searches is used up."""
        began_s = time.process_time()  # A forked copy of this process counts its own time.
        began_wall_s = time.monotonic()

        def is_stopped() -> bool:
            # Reading the processor's time is slow, and it is less than the time that passed.
            late = time.monotonic() - began_wall_s > self._left_s
            late = late and time.process_time() - began_s > self._left_s
            return late or is_interrupted() or self._problem.request.is_stopped()

        yield FastestAmong(
            problem, KINDS[kind], deadline=self._deadline, is_stopped=is_stopped, below_s=below_s
        )
        self._left_s -= time.process_time() - began_s


def _answer(kind: str, among: FastestAmong) -> OtherLayout:
    """Return the plan that a search found, or why it found none.

    Args:
        kind: The kind that was searched.
        among: The search.
    """
    found = among.found
    evaluated = found.measured.result if found.measured is not None else None
    if isinstance(evaluated, Evaluated):
        return OtherLayout(kind=kind, evaluated=evaluated, is_whole=found.is_whole)
    why = "no plan fits" if found.is_whole else _STOPPED
    return OtherLayout(kind=kind, why=why, is_whole=found.is_whole)
