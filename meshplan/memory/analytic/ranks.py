"""Group after group of the ranks of a told plan: which are told first, and which in full.

Microbatches that make no peak are told in brief, which takes a fraction of the time. Where that
seems to be over, or may be the most of all ranks, the whole is told. Ranks do not ask each other
for anything, so where there are two cores two are told at once; what is found is the same.
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
"""How far a step told from a config may be from the traced one, as a share.
Source: `tests/memory/test_memory_tape.py`."""

BRIEF_ERROR: Final = 0.03
"""How much farther what is reserved may be where microbatches are written in brief.
[Empirical]: between 1 % less and 5 % more in 27 cases; what is requested is the same in all."""


class OverError(Exception):
    """Some ranks need more than the caller cares to know.

    Attributes:
        rank: One of them.
        reserved_bytes: What is reserved for it at the least.
    """

    def __init__(self, rank: int, reserved_bytes: int) -> None:
        super().__init__(rank, reserved_bytes)
        self.rank, self.reserved_bytes = rank, reserved_bytes


class AnalyticRank(NamedTuple):
    """What was told of one rank.

    Attributes:
        is_full: Whether every microbatch was written out.
        log, held: None where nobody asks for them.
    """

    figures: RankSummary
    is_full: bool
    log: EventLog | None = None
    held: ReservedLog | None = None

    @property
    def error(self) -> float:
        """How far it may be from the truth, as a share."""
        return ERROR + BRIEF_ERROR * (not self.is_full)

    @property
    def high_bytes(self) -> int:
        """Where the band of its group ends, but for what all have."""
        return int(margin(self.figures.reserve.reserved_bytes) * (1 + self.error))


class AnalyticRanks:
    """The ranks to tell.

    Args:
        ranks: One of each group.
        write: (rank, in brief) -> the log of its step.
        holding: Plays logs.
        in_brief, only_in_brief: As of `microbatches.Works`.
        most_bytes: What a rank may reserve at the most for the rest to be of interest.
        keeps_logs: Whether logs are of interest, and not their figures alone.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        write: Callable[[int, bool], EventLog],
        holding: ReplayCache,
        *,
        in_brief: bool,
        only_in_brief: bool,
        most_bytes: float,
        keeps_logs: bool,
    ) -> None:
        self._ranks, self._write, self._holding = ranks, write, holding
        self._in_brief, self._only_in_brief = in_brief, only_in_brief
        self._most_bytes, self._keeps_logs = most_bytes, keeps_logs

    def tell(self, order: Sequence[int]) -> list[AnalyticRank]:
        """By place in `ranks`, what was told of each.

        Args:
            order: Places, the sooner the more its rank may hold: the first one mostly decides.

        Raises:
            OverError: A rank takes more than `most_bytes`, the first in order of those.
        """
        first = partial(self._first, before_all=order[0])
        if self._keeps_logs:
            done = [*map(first, order)]
        elif len(order) == 2:
            done = each(first, order)
        else:  # What is over mostly ends with the first one, and to copy a process takes time.
            done = [first(order[0]), *each(first, order[1:])]
        found = dict(zip(order, done, strict=True))
        told = [found[number] for number in range(len(order))]
        if not self._only_in_brief:
            self._tell_highest(told)
        return told

    def _first(self, number: int, *, before_all: int) -> AnalyticRank:
        """Of one rank: in full where all are, or where in brief it takes too much."""
        told = self._of(number, in_brief=self._in_brief, is_first=number == before_all)
        if self._in_brief and told.figures.reserve.reserved_bytes > self._most_bytes:
            return self._of(number, in_brief=False)  # In brief: is it so?
        return told

    def _of(self, number: int, *, in_brief: bool, is_first: bool = False) -> AnalyticRank:
        rank, most_bytes = self._ranks[number], self._most_bytes
        log = self._write(rank, in_brief)
        can_tell = in_brief and not self._only_in_brief and most_bytes < math.inf
        # The first one mostly tells; of others what is reserved, which is no less, is needed.
        if can_tell and is_first and log.pooled_bytes > most_bytes:
            raise OverError(rank, log.pooled_bytes)
        held = self._holding.of(log)
        reserved = held.reserve.reserved_bytes
        if can_tell and reserved > most_bytes and log.pooled_bytes > most_bytes:
            raise OverError(rank, log.pooled_bytes)
        if reserved > most_bytes and (self._only_in_brief or not in_brief):
            raise OverError(rank, reserved)
        kept = (log, held) if self._keeps_logs else ()
        return AnalyticRank(held.figures, not in_brief, *kept)

    def _tell_highest(self, told: list[AnalyticRank]) -> None:
        """Tell in full what may reserve the most, until nothing told in brief may.

        What is requested is the same in brief.
        """
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
        """Of a rank whose turn may never come: that it is over is told when it has."""
        try:
            return self._of(number, in_brief=False)
        except OverError as error:
            return error


def _next_ones(told: Sequence[AnalyticRank], highest: int) -> list[int]:
    """Who comes next if the highest in full reserves as much as in brief; nobody where it ends."""
    others = [n for n in range(len(told)) if n != highest]
    whole = told[highest]._replace(is_full=True).high_bytes
    then = max(others, key=lambda n: told[n].high_bytes, default=highest)
    return [] if told[then].is_full or told[then].high_bytes <= whole else [then]
