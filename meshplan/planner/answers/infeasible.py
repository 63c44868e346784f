"""When nothing is left: which statements contradict each other, and what would help.

Every word is a search of its own: a set of statements is in conflict when nothing fits with all of
it, and the set is the least one when something fits without any single one. What is said to help
was searched, replayed and fits.
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
from meshplan.planner.objectives.offload_variants import add_offload_variants, fastest_that_fits
from meshplan.planner.problem.decision import Evaluated, PlanRequest
from meshplan.planner.problem.problem import PlanningProblem
from meshplan.planner.problem.request import cluster_of
from meshplan.planner.solve.config import ConfigSolver
from meshplan.planner.space.space import EmptySpaceError
from meshplan.planner.tables.cost_table import memory_bounds
from meshplan.spec.keys import TIME_LIMIT_S

_MOST_TIMES: Final = 16
"""How many times as many devices are tried."""
_USUAL_NODE: Final = 8
_PROBES: Final = 4
"""Numbers of devices that are tried between one that does not do and one that does."""
_SHARES: Final = 4
"""A single search may take this part of the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """One change that was searched, and what fits then.

    Args:
        change: In words.
        setting: As it would stand in the plan, by path.
        num_gpus: All together.
        way: The fastest with it.
        is_whole: Whether that is proved to be the fastest.
    """

    change: str
    setting: Mapping[str, Any]
    num_gpus: int
    way: Evaluated
    is_whole: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """Why there is no plan.

    Args:
        conflict: Statements that nothing fits with, together; () where it is none of theirs.
        is_least: Whether something is known to fit without any single one of these, where all
            other statements are left open too.
        is_hopeless: Whether nothing is known to fit even with nothing stated.
        why: Of the conflict, where it is not about memory.
        remedies: Cheapest first: what costs no devices, fastest first, then fewest devices.
        is_whole: Whether all was asked, and neither was the time up nor did anybody end it.
        more_devices: Why more of them could not be tried, or are of no use; "" where it is memory.
        is_interrupted: Whether somebody ended it.
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
    """What a search came to: whether something fits, None where the time was up before.

    Args:
        dropped: The statements that it was without.
    """

    fits: bool | None
    way: Evaluated | None = None
    why: str = ""
    is_whole: bool = True
    dropped: tuple[Statement, ...] = ()


def trouble_of(question: PlanRequest, told: Callable[[str], None] = lambda text: None) -> Trouble:
    """Why nothing is left of a question, and what would help.

    Args:
        told: Is told what is asked.
    """
    return _Asking(question, told).answer()


class _Asking:
    """All searches about one question, within its time limit each for conflict and remedies."""

    def __init__(self, question: PlanRequest, told: Callable[[str], None]) -> None:
        self._question, self._told = question, told
        self._stated = statements_of(question.read(()))
        self._limit = TIME_LIMIT_S if question.time_limit_s is None else question.time_limit_s
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
        remedies.sort(key=lambda each: (each.num_gpus, each.way.seconds))
        return Trouble(
            conflict=conflict,
            is_least=is_least,
            is_hopeless=self._is_hopeless,
            why=why,
            remedies=tuple(remedies),
            is_whole=self._is_whole,
            more_devices=self._more_devices,
            is_interrupted=self._question.is_stopped(),
        )

    def _conflict(self) -> tuple[tuple[Statement, ...], bool, str]:
        """(the least set, whether it is known to be the least, why)."""
        whole = self._anything_without(())
        self._told("nothing is left: looking for what contradicts what")
        free = self._anything_without(self._stated)
        self._is_hopeless = free.fits is False
        if whole.fits is not False or free.fits is not True:
            return (), False, whole.why
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
        """Sets of statements without which something fits, none of which could be held.

        Statement by statement is held as long as something fits: those of the mesh first, then
        those of the blocks first.
        """
        out: list[list[Statement]] = []
        for order in (self._stated, self._stated[::-1]):
            held: list[Statement] = []
            left = self._anything_without(self._stated).dropped
            for one in order:
                rest = [each for each in order if each not in (*held, one)]
                found = self._anything_without(rest)
                if found.fits:
                    held.append(one)
                    left = found.dropped
            ordered = [each for each in self._stated if each in left]
            if ordered and ordered not in out:
                out.append(ordered)
        return out

    def _anything_without(self, dropped: Sequence[Statement]) -> _Outcome:
        """Whether anything fits without some statements.

        With a statement that allows more than the planner would try by itself it may be what fits,
        so what is asked without such ones is asked with each number of them as well.
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
        """Whether anything fits with these left to the planner, as it chooses by itself."""
        key = frozenset(dropped)
        if key not in self._known:
            found = self._ask(self._without(dropped), any_will_do=True)
            if found.fits is None:
                return found
            self._known[key] = replace(found, dropped=tuple(dropped))
        return self._known[key]

    def _by_statements(self, tries: Iterable[Sequence[Statement]]) -> Iterator[Remedy]:
        """Some statements of the conflict left to the planner, all others held."""
        for some in tries:
            self._told(f"looking for a plan without {' and '.join(map(str, some))}")
            question = self._without(some)
            found = self._ask(question)
            if found.way is not None:
                chosen = found.way.stated
                setting = {k: v for one in some for k, v in one.settings(chosen).items()}
                yield Remedy(
                    change=" and ".join(one.change(chosen) for one in some),
                    setting=setting,
                    num_gpus=question.cluster.num_gpus,
                    way=found.way,
                    is_whole=found.is_whole,
                )

    def _by_devices(self) -> Iterator[Remedy]:
        """The fewest more devices, all statements held but for how many ranks share data."""
        cluster = self._question.cluster
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
                break  # Of no other number of nodes is more known.
            failed = size[0]
        if best is None:
            return
        self._more_devices = ""
        nodes = best.way.plan.mesh.world_size // each if best.num_gpus >= each else 1
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
        setting: dict[str, Any] = {"hardware.nodes": nodes, "hardware.gpus_per_node": each}
        mesh = self._question.read(()).mesh
        if isinstance(mesh, Mapping):
            data = [axis for axis in ("dp_replicate", "dp_shard") if axis in mesh] or ["dp_shard"]
            kept = {axis: in_words(size) for axis, size in mesh.items() if axis not in data}
            setting["mesh"] = {**dict.fromkeys(data, "auto"), **kept}
        self._told(f"looking for a plan on {nodes * each:,} GPUs")
        question = _with(self._question, overrides(setting))
        try:
            cluster = cluster_of(question.read(()), question.device, question.profile)
        except PlanError:
            return None
        found = self._ask(replace(question, cluster=cluster))
        if found.way is None:
            self._more_devices = found.why
            return None
        return Remedy(
            change=f"{nodes * each:,} GPUs ({nodes:,} node{'s' if nodes > 1 else ''} of {each})",
            setting={"hardware.nodes": nodes, "hardware.gpus_per_node": each,
                     "mesh": found.way.stated["mesh"]},
            num_gpus=nodes * each,
            way=found.way,
            is_whole=found.is_whole,
        )  # fmt: skip

    def _without(self, dropped: Sequence[Statement]) -> PlanRequest:
        question = self._question
        return replace(question, read=lambda more: without(question.read, dropped, more))

    def _is_late(self) -> bool:
        late = time.monotonic() > self._deadline or self._question.is_stopped()
        self._is_whole = self._is_whole and not late
        return late

    def _ask(self, question: PlanRequest, *, any_will_do: bool = False) -> _Outcome:
        """The fastest that fits, or anything that does."""
        if self._is_late():
            return _Outcome(None)
        try:
            job = PlanningProblem(question)
            small, is_proved = self._anything(job)
            if small is None and is_proved and add_offload_variants(job):
                small, is_proved = self._anything(job)
            if small is None or any_will_do:
                self._is_whole = self._is_whole and (is_proved or small is not None)
                return _Outcome(True if small else False if is_proved else None, small)
            deadline = min(self._deadline, time.monotonic() + self._limit / _SHARES)
            found = fastest_that_fits(job, deadline)
        except (PlanError, SpecError) as error:  # What is left may contradict itself as well.
            first = error.problems[0]
            is_empty = isinstance(error, EmptySpaceError)
            fix = f"; {first.fix}" if first.fix and not is_empty else ""
            return _Outcome(False, why=f"{first.what}{fix}")
        way = found.measured.result if found.measured is not None else small
        assert isinstance(way, Evaluated)
        best = job.certified(min((way, small), key=lambda each: each.seconds))
        if best is None:  # What its pieces told was too little.
            self._is_whole = False
            return _Outcome(None)
        return _Outcome(True, best, is_whole=found.is_whole)

    def _anything(self, job: PlanningProblem) -> tuple[Evaluated | None, bool]:
        """(something that fits; whether it is proved that nothing does).

        Of configurations that differ in the microbatch alone the smallest holds the least, and of
        all ways of one configuration the one with the least linear bytes.
        """
        numbers = job.usual
        bounds = memory_bounds(numbers)
        for row in least_rows(numbers.grid, bounds, job.capacity):
            if self._is_late():
                return None, False
            candidate = ConfigSolver(numbers, row, float("inf")).smallest()
            if max(candidate.linear_bytes) > job.capacity:
                continue
            found = job.measure(numbers, candidate)
            if found.fits:
                assert isinstance(found.result, Evaluated)
                return found.result, False
        return None, True


def _with(question: PlanRequest, statements: Sequence[str]) -> PlanRequest:
    read = question.read
    return replace(question, read=lambda more: read([*statements, *more]))
