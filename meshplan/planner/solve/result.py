"""The result of a search, and the state of each configuration while it runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshplan.planner.solve.config import Candidate

_ROUNDING: Final = 1e-9
"""Relative difference of linear bytes below which two candidates count as equal."""
_KEPT: Final = 0.8
"""Share of a rank's excess bytes that any candidate of its configuration is taken to have."""


@dataclass(frozen=True, slots=True)
class ReplayedMemory:
    """The memory of a candidate, as the memory package's replay estimates it.

    Attributes:
        fits: If True, every rank fits.
        excess: {index of a rank along pp: bytes that the replay reports above its
            `linear_bytes`}, for those ranks that were replayed.
        by_setting: The excess with each allocator setting, of which `excess` is the least; () if
            `excess` holds with every setting, or a single one was tried.
        why: The reason why the candidate cannot be planned (`fits` is then False); "" if it can.
        result: An object that the measuring function attaches, such as the evaluated plan; or None.
        is_of_row: If True, other candidates of the configuration have the same excess.
        over: Indices along pp of the ranks that do not fit. With `why`, of the rank whose stage
            cannot run, or of all ranks if it is not known which. It is given only where a rank's
            memory depends on its own blocks alone; else ().
    """

    fits: bool
    excess: Mapping[int, float] = field(default_factory=dict)
    by_setting: tuple[Mapping[int, float], ...] = ()
    why: str = ""
    result: object = None
    is_of_row: bool = True
    over: tuple[int, ...] = ()

    @property
    def most_excess(self) -> float:
        """The most excess bytes of a rank."""
        return max(self.excess.values(), default=0.0)


class Guess(NamedTuple):
    """A cheap estimate of a candidate's memory, made before it is replayed.

    Attributes:
        excess: {index of a rank along pp: guess of the bytes that it needs above its linear bytes},
            for those ranks that were examined.
        is_over: If True, the candidate is proved not to fit.
    """

    excess: Mapping[int, float]
    is_over: bool = False


def excess_by_rank(excess: Mapping[int, float], num_ranks: int) -> tuple[float, ...]:
    """Return the excess bytes of every rank; unknown ones have the most of the others.

    Args:
        excess: {index of a rank along pp: excess bytes}, of some ranks.
        num_ranks: Number of ranks along pp.
    """
    most = max(excess.values(), default=0.0)
    return tuple(max(excess.get(rank, most), 0.0) for rank in range(num_ranks))


def ranks_over(
    linear_bytes: Sequence[float], excess: Mapping[int, float], capacity: float
) -> tuple[int, ...]:
    """Return the ranks that exceed the capacity with their excess; of unknown ranks, none.

    Args:
        linear_bytes: Linear bytes of each rank along pp.
        excess: {index of a rank along pp: excess bytes}, of some ranks.
        capacity: Bytes that a rank may use.
    """
    return tuple(rank for rank, more in excess.items() if linear_bytes[rank] + more > capacity)


@dataclass(slots=True)
class SearchResult:
    """The result of a search.

    Attributes:
        best: The fastest candidate that fits; None if none was found.
        measured: The replayed memory of `best`; None if there is no `best`.
        lower_s: Lower bound on the seconds of a step of every plan in the space.
        near: The fastest candidate of each configuration that may be within the slack of the best;
            not replayed, fastest first.
        refused: {index of a configuration: reason why its candidate cannot be planned}.
        excess: {index of a configuration: excess bytes of its last replayed candidate, by rank}.
        num_solved: Number of times that a configuration was solved exactly.
        num_measured: Number of candidates that were replayed.
        given_up: Number of configurations that were given up after too many replays.
        is_whole: If True, the search ran to its end; if False, it was stopped before.
        unoffloaded_s: Seconds of a step of the fastest plan that fits and offloads no more than the
            plan file states; infinite if there is no such plan.
    """

    best: Candidate | None = None
    measured: ReplayedMemory | None = None
    lower_s: float = 0.0
    near: list[Candidate] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)
    excess: dict[int, tuple[float, ...]] = field(default_factory=dict)
    num_solved: int = 0
    num_measured: int = 0
    given_up: int = 0
    is_whole: bool = True
    unoffloaded_s: float = float("inf")

    @property
    def gap(self) -> float:
        """Share by which some plan of the space may be faster than `best`; 1 if `best` is None."""
        return 1.0 if self.best is None else max(0.0, 1 - self.lower_s / self.best.seconds)

    def excess_of(self, config: np.void, row: int, taken: float) -> tuple[float, ...]:
        """Return the excess bytes of each rank that are known for a configuration.

        Args:
            config: The configuration.
            row: Its index in the grid.
            taken: Bytes that every rank needs above its linear bytes in any case.
        """
        return self.excess.get(row, (taken,) * int(config["pp"]))


@dataclass(slots=True)
class NodeState:
    """The state of one configuration during a search.

    Attributes:
        capacity: Linear bytes that each rank of the configuration's next candidate may use.
        over_from: With each allocator setting, and for each rank, the fewest linear bytes with
            which it did not fit; infinite if there are none. A single entry is of all settings.
        fits_up_to: Linear bytes of each rank of the last candidate that fitted; () if none did.
        excess: {index of a rank along pp: excess bytes of the last candidate for which they are
            known}.
        over: Indices along pp of the ranks that did not fit in the last candidate that failed.
        tries: Number of candidates that were replayed.
        seconds: Seconds of a step of the last candidate that did not fit.
        num_misses: Number of times that no candidate was found within an `_AHEAD` factor of the
            bound.
        sure_capacity: The capacity to go back to if a guess lowered `capacity`; else None.
        guesses: Number of guesses made for the configuration's candidates.
        reachable_s: Seconds of a step, by the last candidate or LP bound, that the configuration
            may reach; `_explore` tries the lowest first.
        guessed: Excess bytes of each rank by the last guess.
        dropped_guess: Excess bytes of each rank by a guess that was dropped later; () if there is
            no such guess.
        has_ranges: If True, block ranges of the configuration were solved by replays.
        why: Why some stage of the configuration cannot run; "" if none is known.
    """

    capacity: tuple[float, ...]
    over_from: tuple[tuple[float, ...], ...]
    fits_up_to: tuple[float, ...] = ()
    excess: dict[int, float] = field(default_factory=dict)
    over: tuple[int, ...] = ()
    tries: int = 0
    seconds: float = 0.0
    num_misses: int = 0
    sure_capacity: tuple[float, ...] | None = None
    guesses: int = 0
    reachable_s: float = float("inf")
    guessed: tuple[float, ...] = ()
    dropped_guess: tuple[float, ...] = ()
    has_ranges: bool = False
    why: str = ""

    @property
    def is_replayed(self) -> bool:
        """True if some candidate was replayed, so that replays may have left out others."""
        return self.tries > 0 or bool(self.excess)

    def has_fitted(self, candidate: Candidate) -> bool:
        """Return True if a candidate with as many linear bytes on every rank has fitted."""
        linear, fitted = candidate.linear_bytes, self.fits_up_to
        return bool(fitted) and all(own <= up for own, up in zip(linear, fitted, strict=True))

    def learn(self, candidate: Candidate, measured: ReplayedMemory, capacity: float) -> None:
        """Take the result of a replay, and set `capacity` for the next candidate.

        The next candidate must leave room for the excess, and need less than those that failed.

        Args:
            candidate: The candidate that was replayed.
            measured: Its memory.
            capacity: Bytes that a rank may use, with its excess.
        """
        linear, own = candidate.linear_bytes, 0
        self.excess |= measured.excess
        if measured.fits:
            self.fits_up_to = linear
        else:
            self.seconds = candidate.seconds
            self.over = ranks_over(linear, measured.excess, capacity)
            settings = measured.by_setting or (measured.excess,) * len(self.over_from)
            if len(self.over_from) < len(settings):
                self.over_from *= len(settings)
            self.over_from = tuple(
                _lowered(over_from, linear, excess, capacity)
                for over_from, excess in zip(self.over_from, settings, strict=True)
            )
            own = settings.index(measured.excess)
        self.capacity = tuple(
            min(capacity - more, math.nextafter(least, 0.0))
            for more, least in zip(
                excess_by_rank(self.excess, len(linear)), self.over_from[own], strict=True
            )
        )

    def exclude(self, candidate: Candidate, measured: ReplayedMemory, capacity: float) -> None:
        """Take the result of a replay as `learn` does, but leave `capacity` to other candidates.

        The smallest candidate of a configuration may have much more excess than its fastest.
        """
        before = self.capacity
        self.learn(candidate, measured, capacity)
        self.capacity = before

    def left(self, room: Sequence[float]) -> Iterator[tuple[float, ...]]:
        """Yield the linear bytes that failures leave to each rank, with each allocator setting.

        Args:
            room: Linear bytes that each rank may use before any replay.
        """
        for over_from in dict.fromkeys(self.over_from):
            # Solving allows for rounding, so leave out what differs from a failure by no more.
            each = zip(over_from, room, strict=True)
            yield tuple(min(over * (1 - _ROUNDING), own) for over, own in each)

    def hopes(self, room: Sequence[float], capacity: float) -> Iterator[tuple[float, ...]]:
        """Yield `left`, less what ranks that failed last need with most of their excess.

        If no candidate is within these bytes, the configuration is excluded. That assumes that the
        excess of a rank hardly shrinks with its linear bytes, as replays show: with fewer blocks or
        more recomputation, it mostly grows.

        Args:
            room: Linear bytes that each rank may use before any replay.
            capacity: Bytes that a rank may use, with its excess.
        """
        for most in self.left(room):
            yield tuple(
                min(own, capacity - _KEPT * self.excess[rank]) if rank in self.over else own
                for rank, own in enumerate(most)
            )


def _lowered(
    over_from: tuple[float, ...],
    linear_bytes: Sequence[float],
    excess: Mapping[int, float],
    capacity: float,
) -> tuple[float, ...]:
    """Return `NodeState.over_from` of one setting after a candidate did not fit with it.

    Args:
        over_from: The value before.
        linear_bytes: Linear bytes of each rank of the candidate.
        excess: {index of a rank along pp: excess bytes}, of some ranks.
        capacity: Bytes that a rank may use, with its excess.
    """
    over = ranks_over(linear_bytes, excess, capacity)
    if not over:  # By rounding, or since nothing is known of the ranks.
        needs = {rank: linear_bytes[rank] + more for rank, more in excess.items()}
        over = (max(needs, key=needs.__getitem__),) if needs else tuple(range(len(linear_bytes)))
    return tuple(
        min(least, linear_bytes[rank]) if rank in over else least
        for rank, least in enumerate(over_from)
    )


def mesh_key(config: np.void) -> tuple[int, ...]:
    """Return a key for comparing memory: if keys are equal, larger microbatches need more memory.

    A pipeline with few microbatches keeps fewer of them in flight. Below the number that its
    warm-up needs, their number is part of the key.
    """
    names = (
        "pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "virtual", "mode", "schedule",
        "offload", "loss_chunks", "gathers_kv",
    )  # fmt: skip
    enough = config["pp"] * (2 if config["virtual"] > 1 else 1)
    few = int(config["microbatches"]) if config["microbatches"] < enough else 0
    return (*(int(config[name]) for name in names), few, int(config["microbatches"] > 1))


class RuledOut:
    """The set of configurations that cannot fit: those added, and those that need more memory.

    Add a configuration whose smallest candidate does not fit.

    Args:
        grid: The configurations.
    """

    def __init__(self, grid: NDArray[np.void]) -> None:
        self._grid = grid
        self._least: dict[tuple[int, ...], int] = {}
        """{`mesh_key`: samples of the smallest microbatch that cannot fit}."""

    def add(self, row: int) -> None:
        """Add a configuration whose smallest candidate does not fit."""
        key, micro = mesh_key(self._grid[row]), int(self._grid[row]["micro"])
        self._least[key] = min(micro, self._least.get(key, micro))

    def __contains__(self, row: int) -> bool:
        config = self._grid[row]
        return int(config["micro"]) >= self._least.get(mesh_key(config), float("inf"))
