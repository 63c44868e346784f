"""The result of a search, and the state of each configuration while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshplan.planner.solve.config import Candidate


@dataclass(frozen=True, slots=True)
class ReplayedMemory:
    """The memory of a candidate, as the memory package's replay estimates it.

    Attributes:
        fits: If True, every rank fits.
        excess_bytes: Bytes that the replay reports above a pipeline rank's `linear_bytes`; the
            maximum over ranks.
        why: The reason why the candidate cannot be planned (`fits` is then False); "" if it can.
        result: An object that the measuring function attaches, such as the evaluated plan; or None.
        is_of_row: If True, other candidates of the configuration have the same excess.
        over: Indices along pp of the ranks that do not fit. With `why`, of the rank whose stage
            cannot run, or of all ranks if it is not known which. It is given only where a rank's
            memory depends on its own blocks alone; else ().
    """

    fits: bool
    excess_bytes: float = 0.0
    why: str = ""
    result: object = None
    is_of_row: bool = True
    over: tuple[int, ...] = ()


class Guess(NamedTuple):
    """A cheap estimate of a candidate's memory, made before it is replayed.

    Attributes:
        excess_bytes: Guess of the bytes that the worst rank needs above its linear bytes.
        is_over: If True, the candidate is proved not to fit.
    """

    excess_bytes: float
    is_over: bool = False


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
        excess: {index of a configuration: excess bytes of its last replayed candidate}.
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
    excess: dict[int, float] = field(default_factory=dict)
    num_solved: int = 0
    num_measured: int = 0
    given_up: int = 0
    is_whole: bool = True
    unoffloaded_s: float = float("inf")

    @property
    def gap(self) -> float:
        """Share by which some plan of the space may be faster than `best`; 1 if `best` is None."""
        return 1.0 if self.best is None else max(0.0, 1 - self.lower_s / self.best.seconds)


@dataclass(slots=True)
class NodeState:
    """The state of one configuration during a search.

    Attributes:
        capacity: Linear bytes that a rank of the configuration's next candidate may use.
        fits_up_to: Linear bytes of the last candidate that fitted; negative if none did.
        over_from: Fewest linear bytes of a candidate that did not fit; infinite if there is none.
        tries: Number of candidates that were replayed.
        seconds: Seconds of a step of the last candidate that did not fit.
        num_misses: Number of times that no candidate was found within an `_AHEAD` factor of the
            bound.
        sure_capacity: The capacity to go back to if a guess lowered `capacity`; else None.
        guesses: Number of guesses made for the configuration's candidates.
        reachable_s: Seconds of a step, by the last candidate or LP bound, that the configuration
            may reach; `_explore` tries the lowest first.
        guessed: Excess bytes by the last guess.
        dropped_guess: Excess bytes of a guess that was dropped later; None if there is no such
            guess.
        has_ranges: If True, block ranges of the configuration were solved by replays.
        why: Why some stage of the configuration cannot run; "" if none is known.
    """

    capacity: float
    fits_up_to: float = -1.0
    over_from: float = float("inf")
    tries: int = 0
    seconds: float = 0.0
    num_misses: int = 0
    sure_capacity: float | None = None
    guesses: int = 0
    reachable_s: float = float("inf")
    guessed: float = 0.0
    dropped_guess: float | None = None
    has_ranges: bool = False
    why: str = ""


def mesh_key(config: np.void) -> tuple[int, ...]:
    """Return a key for comparing memory: if keys are equal, larger microbatches need more memory.

    A pipeline with few microbatches keeps fewer of them in flight. Below the number that its
    warm-up needs, their number is part of the key.
    """
    names = (
        "pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "virtual", "mode", "schedule",
        "offload", "loss_chunks",
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
