"""Estimate the ranks of a plan in order of interest, and expand only the decisive ones in full.

Microbatches that cannot make the peak are summarised, which takes a fraction of the time. A rank is
expanded in full if its summarised log exceeds the limit, or if it may be the largest of all ranks.
Ranks are independent, so two of them are computed at once where there are two cores; the results
are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

from meshplan.memory.answer.estimate import margin
from meshplan.memory.answer.reserved import RankSummary, ReplayCache, ReservedLog
from meshplan.memory.log.events import EventLog
from meshplan.two_cores import each, has_another

ERROR: Final = 0.01
"""Possible relative error of a step computed from a config, compared with a traced one.
Source: `tests/memory/test_memory_tape.py`."""

BRIEF_ERROR: Final = 0.03
"""Additional relative error of the reserved bytes where microbatches are summarised.
[Empirical]: between 1 % less and 5 % more in 27 cases; what is requested is the same in all."""


class OverError(Exception):
    """Some rank reserves more than the caller's limit.

    Attributes:
        rank: The rank.
        reserved_bytes: Lower bound on its reserved bytes.
    """

    def __init__(self, rank: int, reserved_bytes: int) -> None:
        super().__init__(rank, reserved_bytes)
        self.rank, self.reserved_bytes = rank, reserved_bytes


class AnalyticRank(NamedTuple):
    """The result for one rank.

    Attributes:
        figures: Peak, categories and reserved bytes.
        is_full: True if every microbatch was expanded, False if some were summarised.
        log: The step without workspaces; None if logs are not kept.
        held: The log as it was played on the allocator; None if logs are not kept.
    """

    figures: RankSummary
    is_full: bool
    log: EventLog | None = None
    held: ReservedLog | None = None

    @property
    def error(self) -> float:
        """Possible relative error of the figures."""
        return ERROR + BRIEF_ERROR * (not self.is_full)

    @property
    def high_bytes(self) -> int:
        """Upper end of its range, without the driver's bytes, which all ranks share."""
        return int(margin(self.figures.reserve.reserved_bytes) * (1 + self.error))


class AnalyticRanks:
    """Computes the results of the distinct ranks of a plan.

    Args:
        ranks: The first rank of each group of equal ranks.
        write: Maps (rank, in brief) to the log of its step.
        holding: Plays logs on the allocator.
        summarised: If True, the step is so long that only the fullest ranks should be expanded in
            full.
        only_summarised: If True, the step is so long that no rank should be expanded in full.
        stop_above_bytes: Stop with `OverError` as soon as one rank is known to reserve more than
            this.
        keeps_logs: If True, keep the logs in addition to their figures.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        write: Callable[[int, bool], EventLog],
        holding: ReplayCache,
        *,
        summarised: bool,
        only_summarised: bool,
        stop_above_bytes: float,
        keeps_logs: bool,
    ) -> None:
        self._ranks, self._write, self._holding = ranks, write, holding
        self._in_brief, self._only_in_brief = summarised, only_summarised
        self._most_bytes, self._keeps_logs = stop_above_bytes, keeps_logs

    def tell(self, order: Sequence[int]) -> list[AnalyticRank]:
        """Return the result of each rank, in the order of `ranks`.

        Args:
            order: Indices into `ranks`, with the ranks that probably need most first. The first one
                usually decides whether the plan is over the limit.

        Raises:
            OverError: A rank reserves more than `stop_above_bytes`; of several, the first in
                `order`.
        """
        first = partial(self._first, before_all=order[0])
        if self._keeps_logs:
            done = [*map(first, order)]
        elif len(order) == 2:
            done = each(first, order)
        else:  # A plan over the limit usually ends with its first rank, and forking takes time.
            done = [first(order[0]), *each(first, order[1:])]
        found = dict(zip(order, done, strict=True))
        told = [found[number] for number in range(len(order))]
        if not self._only_in_brief:
            self._tell_highest(told)
        return told

    def _first(self, number: int, *, before_all: int) -> AnalyticRank:
        """Return the result of one rank.

        It is expanded in full if all ranks are, or if its summarised log exceeds the limit.
        """
        told = self._of(number, summarised=self._in_brief, is_first=number == before_all)
        if self._in_brief and told.figures.reserve.reserved_bytes > self._most_bytes:
            return self._of(number, summarised=False)  # The summary may overstate it.
        return told

    def _of(self, number: int, *, summarised: bool, is_first: bool = False) -> AnalyticRank:
        rank, stop_above_bytes = self._ranks[number], self._most_bytes
        log = self._write(rank, summarised)
        can_tell = summarised and not self._only_in_brief and stop_above_bytes < math.inf
        # The first rank usually decides, so check its cheap lower bound before playing the log.
        # The reserved bytes of other ranks, which are no less than this bound, are needed anyway.
        if can_tell and is_first and log.pooled_bytes > stop_above_bytes:
            raise OverError(rank, log.pooled_bytes)
        held = self._holding.of(log)
        reserved = held.reserve.reserved_bytes
        if can_tell and reserved > stop_above_bytes and log.pooled_bytes > stop_above_bytes:
            raise OverError(rank, log.pooled_bytes)
        if reserved > stop_above_bytes and (self._only_in_brief or not summarised):
            raise OverError(rank, reserved)
        kept = (log, held) if self._keeps_logs else ()
        return AnalyticRank(held.figures, not summarised, *kept)

    def _tell_highest(self, told: list[AnalyticRank]) -> None:
        """Expand the rank with the highest upper end, until that rank is one expanded in full.

        Requested bytes do not change by this, only reserved bytes.
        """
        # With a second core, the rank that probably comes next is expanded at the same time.
        ahead: dict[int, AnalyticRank | OverError] = {}
        while not told[highest := max(range(len(told)), key=lambda n: told[n].high_bytes)].is_full:
            if highest not in ahead:
                some = [highest]
                if not self._keeps_logs and has_another():
                    some += _next_ones(told, highest)
                ahead.update(zip(some, each(self._in_full, some), strict=True))
            found = ahead[highest]
            if isinstance(found, OverError):
                raise found
            told[highest] = found

    def _in_full(self, number: int) -> AnalyticRank | OverError:
        """Return the result of one rank expanded in full, or the error if it is over the limit.

        The error is returned, because it counts only once it is this rank's turn, which may never
        come.
        """
        try:
            return self._of(number, summarised=False)
        except OverError as error:
            return error


def _next_ones(told: Sequence[AnalyticRank], highest: int) -> list[int]:
    """Return the rank to expand after `highest`, if that reserves as much in full as summarised.

    The result is empty if no other rank would have to be expanded.
    """
    others = [n for n in range(len(told)) if n != highest]
    whole = told[highest]._replace(is_full=True).high_bytes
    then = max(others, key=lambda n: told[n].high_bytes, default=highest)
    return [] if told[then].is_full or told[then].high_bytes <= whole else [then]
