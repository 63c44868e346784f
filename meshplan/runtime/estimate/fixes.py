"""Find changes to a plan that would make its step fit into memory.

The memory with each change is estimated like that of the plan. Changes are tried in the order of
what they cost a training run: nothing, a little communication, more computing, more machines. A
change that contradicts the plan or the model is left out.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final

from meshplan.errors import MeshplanError
from meshplan.memory.answer.estimate import Fix, MemoryEstimate, margin
from meshplan.plan.plan import Plan, make_plan
from meshplan.runtime.estimate.changes import PlanChange, changes_of
from meshplan.spec.spec import Spec

SECONDS: Final = 6.0
"""Seconds that the search may take: no estimate begins that would probably end later."""
_LEAST_TRIES: Final = 3
"""Number of estimates that the search makes, however long one takes."""
_A_FEW_SECONDS: Final = 4.0
"""Seconds that the search may take if the user does not ask for it."""
_MOST_NAMED: Final = 3
"""Number of changes that were not tried and are named."""
_MOST_PAIRS: Final = 3
"""Number of pairs that fit after which no more are tried."""


@dataclass(frozen=True, slots=True)
class _Combination:
    """A change that was tried, or several that are made together.

    Args:
        changes: The changes, each made from the plan with those before it.
        high: Upper end of the worst rank's band with all of them, in bytes.
    """

    changes: tuple[PlanChange, ...]
    high: int

    @property
    def spec(self) -> Spec:
        """The plan with all of the changes."""
        return self.changes[-1].spec

    @property
    def settings(self) -> tuple[str, ...]:
        """The settings of plan.yaml, in the order of the changes."""
        return tuple(change.setting for change in self.changes)

    def fix(self, limit: int) -> Fix:
        """Return the changes as an answer, for devices with `limit` bytes."""
        return Fix(
            change=_words(self.changes),
            settings=self.settings,
            total_bytes=self.high,
            fits=self.high <= limit,
        )


def with_fixes(
    plan: Plan,
    estimate: MemoryEstimate,
    estimate_of: Callable[[Spec], MemoryEstimate],
    is_asked: bool | None,
    report: Callable[[str], None],
    took_s: float,
) -> MemoryEstimate:
    """Return an estimate that does not fit with changes to the plan that would fit.

    Changes that only take less memory are added too, marked as not fitting. If no single change
    fits, combinations are tried. The search ends after `SECONDS`; what it left out is a note.

    Args:
        plan: The plan that was estimated.
        estimate: The estimate of the plan.
        estimate_of: Estimates another spec by the same method, so that the results can be compared.
        is_asked: If True, look for changes; if False, do not; if None, look if that takes at most a
            few seconds, else add a note.
        report: Progress callback.
        took_s: Seconds that the estimate took, to predict how long each change takes.

    Returns:
        The estimate with `fixes`; unchanged if it fits or no limit is known.
    """
    if estimate.fits is not False or is_asked is False:
        return estimate
    changes = list(changes_of(plan))
    takes_s = min(took_s * sum(1 + change.num_parts for change in changes), SECONDS)
    if is_asked is None and takes_s > _A_FEW_SECONDS:
        note = f"--fixes looks for changes that make the plan fit, in about {takes_s:.0f} s"
        fixes = tuple(_free(estimate))
        return replace(estimate, fixes=fixes, notes=(*estimate.notes, note))
    search = _FixSearch(plan, estimate, estimate_of, report)
    fixes = (*_free(estimate), *search.singles(changes))
    if not any(fix.fits for fix in fixes):
        fixes = (*fixes, *search.combined())
    notes = estimate.notes
    if search.left_out:
        first, more = search.left_out[:_MOST_NAMED], len(search.left_out) - _MOST_NAMED
        skipped = ", ".join(first) + (f" and {more} more" if more > 0 else "")
        notes = (*notes, f"not tried for lack of time: {skipped}")
    return replace(estimate, fixes=fixes, notes=notes)


class _FixSearch:
    """A search for changes that make a plan fit, within a limited time.

    Args:
        plan: The plan that was estimated.
        estimate: Its estimate, which does not fit.
        estimate_of: Estimates another spec.
        report: Progress callback.

    Attributes:
        left_out: Texts of the changes that were not tried for lack of time.
    """

    def __init__(
        self,
        plan: Plan,
        estimate: MemoryEstimate,
        estimate_of: Callable[[Spec], MemoryEstimate],
        report: Callable[[str], None],
    ) -> None:
        assert estimate.limit_bytes is not None
        self._plan, self._estimate_of, self._report = plan, estimate_of, report
        self._base, self._limit = estimate.worst.band[1], estimate.limit_bytes
        self._ends = time.monotonic() + SECONDS
        self._took_s, self._num_tries = 0.0, 0
        self._tried: dict[str, _Combination] = {}
        self.left_out: list[str] = []

    def singles(self, changes: Sequence[PlanChange]) -> list[Fix]:
        """Return the single changes that fit or take less memory, in the order of their cost.

        The smallest part of a change that fits is looked for last, once every change was tried.
        """
        strongest: dict[str, _Combination] = {}
        waiting = deque((change.text, change, self._base) for change in changes)
        while waiting:
            name, change, weaker = waiting.popleft()
            high = self._high_of(change)
            if high is None:
                continue
            if high < self._base:
                strongest[name] = self._tried[change.text] = _Combination((change,), high)
            # Half the samples or twice the ranks save at most half of what the step before saved,
            # so all further steps together save at most as much as this one.
            if high > self._limit >= 2 * high - weaker and change.further is not None:
                waiting.append((name, change.further(), high))
        found = []
        for single in strongest.values():
            (change,), least = single.changes, None
            if single.high <= self._limit:
                least = _least(change, self._high_of, self._limit)
            if least is not None:
                found.append(least)
            if least is None or change.is_whole:
                found.append(single.fix(self._limit))
        return found

    def combined(self) -> list[Fix]:
        """Return pairs of changes that fit; else the smallest combination that was found to fit.

        If no pair fits, the pair that takes the least memory is extended by one change at a time.
        If that does not lead to a combination that fits either, return the last one, or nothing if
        it takes no less memory than a single change.
        """
        fitting, nearest = self._extended([*self._tried.values()], _MOST_PAIRS)
        while not fitting and nearest is not None:
            fitting, larger = self._extended([nearest], 1)
            if larger is None:
                break
            nearest = larger
        found = fitting or ([nearest] if nearest is not None else [])
        return [each.fix(self._limit) for each in found]

    def _extended(
        self, firsts: Sequence[_Combination], most: int
    ) -> tuple[list[_Combination], _Combination | None]:
        """Return up to `most` extensions by one change that fit, and the one with the least memory.

        Extensions whose savings would suffice if they added up are tried first, those with the
        least cost first; then the others, those that would save most first.

        Args:
            firsts: The combinations to extend.
            most: Number of extensions that fit after which no more are tried.

        Returns:
            The extensions that fit, and the one with the least memory; None if no extension takes
            less memory than all of `firsts`.
        """
        predicted: dict[frozenset[str], tuple[int, _Combination, PlanChange]] = {}
        for first in firsts:
            keys = {change.key for change in first.changes}
            others = changes_of(make_plan(first.spec, self._plan.graph))
            for change, saved in chain.from_iterable(map(self._forms, others)):
                if change.key not in keys:
                    texts = frozenset((*(each.text for each in first.changes), change.text))
                    predicted.setdefault(texts, (first.high - saved, first, change))
        fitting: list[_Combination] = []
        fitted: set[tuple[tuple[str, ...], str]] = set()
        nearest, least = None, min((first.high for first in firsts), default=0)
        for _, first, change in sorted(
            predicted.values(), key=lambda each: max(each[0], self._limit)
        ):
            if (first.settings, change.key) in fitted:
                continue  # A weaker form of this change fits already.
            changes = (*first.changes, change)
            high = self._high_of(change, _words(changes))
            if high is None:
                continue
            extended = _Combination(changes, high)
            if high <= self._limit:
                fitting.append(extended)
                fitted.add((first.settings, change.key))
            if len(fitting) == most:
                break
            if high < least:
                nearest, least = extended, high
        return fitting, nearest

    def _forms(self, change: PlanChange) -> Iterator[tuple[PlanChange, int]]:
        """Yield a change and its stronger forms, each with the bytes that it saves by itself.

        For forms that were not tried this is predicted: half the samples, or twice the ranks, save
        half of what the step before saved. Changes that save nothing are left out.
        """
        saved = gain = 0
        form: PlanChange | None = change
        while form is not None:
            tried = self._tried.get(form.text)
            gain = gain // 2 if tried is None else self._base - tried.high - saved
            if gain <= 0:
                return
            saved += gain
            yield form, saved
            form = form.further() if form.further is not None else None

    def _high_of(self, change: PlanChange, text: str | None = None) -> int | None:
        """Return the upper end, in bytes, of the worst rank's band under a change.

        Return None if the change is impossible, exceeds the host's memory, or if no time is left.
        """
        began = time.monotonic()
        if self._num_tries >= _LEAST_TRIES and began + self._took_s > self._ends:
            self.left_out.append(text or change.text)
            return None
        self._num_tries += 1
        self._report(f"trying: {text or change.text}")
        try:
            other = self._estimate_of(change.spec)
        except MeshplanError:
            return None  # The change contradicts this plan or this model.
        finally:
            self._took_s = time.monotonic() - began
        if other.host is not None and other.host.is_over:
            return None
        return other.worst.band[1]


def _words(changes: Sequence[PlanChange]) -> str:
    *first, last = (change.text for change in changes)
    return f"{', '.join(first)} and {last}" if first else last


def _least(
    change: PlanChange, high_of: Callable[[PlanChange], int | None], limit: int
) -> Fix | None:
    """Find the smallest part of a change that fits, by binary search.

    Args:
        change: A change that fits.
        high_of: Returns the worst rank's bytes under a change, or None if it is impossible.
        limit: Bytes of a device.

    Returns:
        The part, or None if only the whole change fits.
    """
    fails, fits, found = change.fails, change.count, None
    while change.part is not None and fits - fails > 1:
        middle = (fails + fits) // 2
        part = change.part(middle)
        high = high_of(part)
        if high is not None and high <= limit:
            fits, found = middle, _Combination((part,), high).fix(limit)
        else:
            fails = middle
    return found


def _free(estimate: MemoryEstimate) -> Iterator[Fix]:
    """Yield the change to expandable segments, if it takes less memory.

    It needs no new estimate: `packed_bytes` of the existing one has the bytes reserved with them.
    """
    highs = []
    for group in estimate.groups:
        packed = group.packed_bytes
        saved = 0 if packed is None else margin(group.peak.reserved_bytes) - margin(packed)
        highs.append(group.band[1] - max(0, saved))
    assert estimate.limit_bytes is not None
    if max(highs) < estimate.worst.band[1]:
        yield Fix(
            change="use expandable segments in the allocator",
            settings=("allocator: expandable",),
            total_bytes=max(highs),
            fits=max(highs) <= estimate.limit_bytes,
        )
