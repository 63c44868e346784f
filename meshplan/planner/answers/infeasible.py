"""Explain why no plan fits: which statements are in conflict, and which changes would help.

Every claim is the result of a search. A set of statements is in conflict if no plan with all of
them fits. The set is minimal if, whichever of its statements is dropped, some plan fits. Every
remedy is a plan that was found by a search and fits by its replay.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from meshplan.errors import PlanError, SpecError
from meshplan.planner.answers.stated import Statement, in_words, statements_of, without
from meshplan.planner.lock.lock import overrides
from meshplan.planner.objectives.memory import least_rows
from meshplan.planner.objectives.offload_variants import add_offload_variants, fastest_of_all
from meshplan.planner.problem.decision import Evaluated, PlanRequest
from meshplan.planner.problem.problem import PlanningProblem
from meshplan.planner.problem.request import cluster_of
from meshplan.planner.solve.config import ConfigSolver
from meshplan.planner.space.space import EmptySpaceError
from meshplan.planner.tables.cost_table import memory_bounds
from meshplan.shown import shown

_MOST_TIMES: Final = 16
"""Largest factor by which the number of nodes is raised."""
_USUAL_NODE: Final = 8
"""Devices up to which a single node is enlarged before more nodes are tried."""
_PROBES: Final = 4
"""Most numbers of nodes tried between one that is too small and one that is enough."""
_SHARES: Final = 4
"""A single search may take the time limit divided by this."""


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """One change to the plan file, and a plan that fits with it.

    Args:
        change: The change in words, for the user.
        setting: {path: value} statements of the plan file that change.
        num_gpus: Number of devices of the plan.
        evaluated: The fastest plan found with the change.
        is_whole: If True, `evaluated` is proved to be the fastest plan with the change.
    """

    change: str
    setting: Mapping[str, Any]
    num_gpus: int
    evaluated: Evaluated
    is_whole: bool


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """The reason why there is no plan, and the changes that would help.

    Args:
        conflict: Statements that together allow no plan that fits; () if no such set was found.
        is_least: If True, the conflict is minimal: dropping any one of its statements, and all
            statements outside of it, allows a plan that fits.
        is_hopeless: If True, no plan fits even without any statement.
        why: Reason of the conflict; "" if the reason is memory.
        remedies: Changes that help: those with the fewest devices first, then the fastest.
        is_whole: If True, all searches ran to their end; if False, the time limit or the user
            stopped them.
        more_devices: Reason why more devices could not be tried or do not help; "" if the reason is
            memory.
        is_interrupted: If True, the user stopped the searches.
    """

    conflict: tuple[Statement, ...]
    is_least: bool
    is_hopeless: bool
    why: str
    remedies: tuple[Remedy, ...]
    is_whole: bool
    more_devices: str = ""
    is_interrupted: bool = False


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The outcome of a search.

    Args:
        fits: True if a plan fits, False if none does, None if the search was stopped before.
        evaluated: A plan that fits; None if none was found.
        why: Reason why nothing fits; "" if a plan fits or the reason is memory.
        is_whole: If True, `evaluated` is proved to be the fastest.
        dropped: The statements that the search left to the planner.
    """

    fits: bool | None
    evaluated: Evaluated | None = None
    why: str = ""
    is_whole: bool = True
    dropped: tuple[Statement, ...] = ()


def trouble_of(request: PlanRequest, report: Callable[[str], None] = lambda text: None) -> Trouble:
    """Find out why no plan of a request fits, and which changes would help.

    Args:
        request: The request.
        report: Called with a line on each search.
    """
    return _Asking(request, report).answer()


class _Asking:
    """The searches for one request.

    The search for the conflict may take the request's time limit, and so may the search for
    statements to drop. The search for more devices may take half of it.
    """

    def __init__(self, request: PlanRequest, report: Callable[[str], None]) -> None:
        self._request, self._report = request, report
        self._stated = statements_of(request.read(()))
        self._limit = request.limit_s
        self._deadline = 0.0
        self._known: dict[frozenset[Statement], _Outcome] = {}
        self._is_whole, self._is_hopeless = True, False
        self._more_devices = ""

    def answer(self) -> Trouble:
        self._deadline = time.monotonic() + self._limit
        conflict, is_least, why = self._conflict()
        self._deadline = time.monotonic() + self._limit
        remedies = list(self._by_statements([one] for one in conflict))
        if conflict and not remedies:
            remedies = list(self._by_statements(self._corrections()))
        self._deadline = time.monotonic() + self._limit / 2
        remedies += self._by_devices()
        remedies.sort(key=lambda each: (each.num_gpus, each.evaluated.seconds))
        return Trouble(
            conflict=conflict,
            is_least=is_least,
            is_hopeless=self._is_hopeless,
            why=why,
            remedies=tuple(remedies),
            is_whole=self._is_whole,
            more_devices=self._more_devices,
            is_interrupted=self._request.is_stopped(),
        )

    def _conflict(self) -> tuple[tuple[Statement, ...], bool, str]:
        """Return (statements in conflict, True if the set is proved minimal, reason)."""
        whole = self._anything_without(())
        self._report("no configuration fits: looking for statements that conflict")
        free = self._anything_without(self._stated)
        self._is_hopeless = free.fits is False
        if whole.fits is not False or free.fits is not True:
            return (), False, whole.why
        # Deletion filter: drop each statement in turn, and keep it only if some plan then fits.
        kept, why, is_least = list(self._stated), whole.why, True
        for one in self._stated:
            rest = [each for each in kept if each is not one]
            dropped = [each for each in self._stated if each not in rest]
            found = self._anything_without(dropped)
            if found.fits is False:
                kept, why = rest, found.why
            is_least = is_least and found.fits is not None
        return tuple(kept), is_least, why

    def _corrections(self) -> list[list[Statement]]:
        """Return up to two minimal sets of statements to drop so that some plan fits.

        All statements are dropped first. They are then taken back one by one as long as some plan
        fits, once in the order of the plan's statements (the mesh first) and once in reverse.
        """
        out: list[list[Statement]] = []
        for order in (self._stated, self._stated[::-1]):
            kept: list[Statement] = []
            left = self._anything_without(self._stated).dropped
            for one in order:
                rest = [each for each in order if each not in (*kept, one)]
                found = self._anything_without(rest)
                if found.fits:
                    kept.append(one)
                    left = found.dropped
            ordered = [each for each in self._stated if each in left]
            if ordered and ordered not in out:
                out.append(ordered)
        return out

    def _anything_without(self, dropped: Sequence[Statement]) -> _Outcome:
        """Find out if a plan fits with some statements dropped, that is, left to the planner.

        Some statements allow more than the planner would try by itself, so that a plan may fit only
        with them. Of the dropped statements of this kind, every subset is also tried as stated.
        """
        more = [each for each in dropped if each.allows_more]
        outcome = _Outcome(False)
        for count in range(len(more) + 1):
            for stay in itertools.combinations(more, count):
                found = self._anything_of([each for each in dropped if each not in stay])
                if found.fits:
                    return found
                is_known = outcome.fits is False and found.fits is False
                outcome = replace(outcome, fits=False if is_known else None,
                                  why=outcome.why or found.why)  # fmt: skip
        return outcome

    def _anything_of(self, dropped: Sequence[Statement]) -> _Outcome:
        """Find out if a plan fits with exactly these statements left to the planner."""
        key = frozenset(dropped)
        if key not in self._known:
            found = self._ask(self._without(dropped), any_will_do=True)
            if found.fits is None:
                return found
            self._known[key] = replace(found, dropped=tuple(dropped))
        return self._known[key]

    def _by_statements(self, tries: Iterable[Sequence[Statement]]) -> Iterator[Remedy]:
        """Yield the remedies that leave some statements to the planner and keep the others.

        Args:
            tries: The sets of statements to leave to the planner.
        """
        for some in tries:
            self._report(f"looking for a plan without {' and '.join(map(str, some))}")
            request = self._without(some)
            found = self._ask(request)
            if found.evaluated is not None:
                chosen = found.evaluated.stated
                setting = {k: v for one in some for k, v in one.settings(chosen).items()}
                yield Remedy(
                    change=" and ".join(one.change(chosen) for one in some),
                    setting=setting,
                    num_gpus=request.cluster.num_gpus,
                    evaluated=found.evaluated,
                    is_whole=found.is_whole,
                )

    def _by_devices(self) -> Iterator[Remedy]:
        """Yield at most one remedy: the smallest number of devices found on which a plan fits.

        All statements are kept except the sizes of the data axes.
        """
        cluster = self._request.cluster
        nodes, each, failed = cluster.nodes, cluster.gpus_per_node, 0
        sizes = []
        while nodes == 1 and each < _USUAL_NODE:
            each = min(2 * each, _USUAL_NODE)
            sizes.append((1, each))
        while nodes < cluster.nodes * _MOST_TIMES:
            nodes *= 2
            sizes.append((nodes, each))
        failed, best = cluster.nodes, None
        for size in sizes:
            best = self._with_devices(*size)
            if best is not None or self._is_late():
                break
            if size[0] > 1 and cluster.inter is None:
                break  # Without `inter` bandwidth, no number of nodes can be planned.
            failed = size[0]
        if best is None:
            return
        self._more_devices = ""
        nodes = best.evaluated.plan.mesh.world_size // each if best.num_gpus >= each else 1
        for _ in range(_PROBES):
            middle = (failed + nodes) // 2
            if middle in (failed, nodes) or self._is_late():
                break
            found = self._with_devices(middle, each)
            if found is None:
                failed = middle
            else:
                best, nodes = found, middle
        yield best

    def _with_devices(self, nodes: int, each: int) -> Remedy | None:
        """Search a plan on this many nodes of `each` devices; return None if none was found."""
        setting: dict[str, Any] = {"hardware.nodes": nodes, "hardware.gpus_per_node": each}
        mesh = self._request.read(()).mesh
        if isinstance(mesh, Mapping):
            data = [axis for axis in ("dp_replicate", "dp_shard") if axis in mesh] or ["dp_shard"]
            kept = {axis: in_words(size) for axis, size in mesh.items() if axis not in data}
            setting["mesh"] = {**dict.fromkeys(data, "auto"), **kept}
        self._report(f"looking for a plan on {nodes * each:,} GPUs")
        request = self._request.stating(overrides(setting))
        try:
            cluster = cluster_of(request.read(()), request.device, request.profile)
        except PlanError:
            return None
        found = self._ask(replace(request, cluster=cluster))
        if found.evaluated is None:
            self._more_devices = found.why
            return None
        return Remedy(
            change=f"{nodes * each:,} GPUs ({nodes:,} node{'s' if nodes > 1 else ''} of {each})",
            setting={"hardware.nodes": nodes, "hardware.gpus_per_node": each,
                     "mesh": found.evaluated.stated["mesh"]},
            num_gpus=nodes * each,
            evaluated=found.evaluated,
            is_whole=found.is_whole,
        )  # fmt: skip

    def _without(self, dropped: Sequence[Statement]) -> PlanRequest:
        request = self._request
        return replace(request, read=lambda more: without(request.read, dropped, more))

    def _is_late(self) -> bool:
        late = time.monotonic() > self._deadline or self._request.is_stopped()
        self._is_whole = self._is_whole and not late
        return late

    def _ask(self, request: PlanRequest, *, any_will_do: bool = False) -> _Outcome:
        """Search the fastest plan that fits; with `any_will_do`, return the first that fits."""
        if self._is_late():
            return _Outcome(None)
        try:
            problem = PlanningProblem(request)
            small, is_proved = self._anything(problem)
            if small is None and is_proved and add_offload_variants(problem):
                small, is_proved = self._anything(problem)
            if small is None or any_will_do:
                self._is_whole = self._is_whole and (is_proved or small is not None)
                return _Outcome(True if small else False if is_proved else None, small)
            deadline = min(self._deadline, time.monotonic() + self._limit / _SHARES)
            problem, found = fastest_of_all(problem, deadline)
        except (PlanError, SpecError) as error:  # Other statements may now be invalid.
            first = error.problems[0]
            is_empty = isinstance(error, EmptySpaceError)
            fix = f"; {first.fix}" if first.fix and not is_empty else ""
            return _Outcome(False, why=f"{first.what}{fix}")
        evaluated = found.measured.result if found.measured is not None else small
        assert isinstance(evaluated, Evaluated)
        best = problem.certified(min((evaluated, small), key=lambda each: each.seconds))
        if best is None:  # A trace shows that the plan does not fit.
            self._is_whole = False
            return _Outcome(None)
        return _Outcome(True, best, is_whole=found.is_whole)

    def _anything(self, problem: PlanningProblem) -> tuple[Evaluated | None, bool]:
        """Look for any plan that fits, trying only plans with little memory.

        Of configurations that differ only in their microbatches, only the one with the smallest
        microbatches is tried, and of each configuration only the candidate with the fewest linear
        bytes: the others use more memory.

        Returns:
            (a plan that fits or None, True if it is proved that none fits).
        """
        table = problem.table
        bounds = memory_bounds(table)
        for row in least_rows(table.grid, bounds, problem.capacity):
            if self._is_late():
                return None, False
            candidate = ConfigSolver(table, row, float("inf")).smallest()
            if max(candidate.linear_bytes) > problem.capacity:
                continue
            found = problem.measure(table, candidate)
            if found.fits:
                assert isinstance(found.result, Evaluated)
                return found.result, False
        return None, True
