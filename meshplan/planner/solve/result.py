"""The result of a search, and what it records of each configuration on the way."""

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
        excess_bytes: Bytes of the worst-off pipeline stage above its `linear_bytes`.
        why: The reason why the candidate cannot be planned (`fits` is then False); "" if it can.
        result: An object that the measuring function attaches, such as the evaluated plan; None if
            it attaches none.
        is_of_row: If True, other candidates of the configuration have the same excess.
    """

    fits: bool
    excess_bytes: float = 0.0
    why: str = ""
    result: object = None
    is_of_row: bool = True


class Guess(NamedTuple):
    """A cheap estimate of a candidate's memory, made before it is replayed.

    Attributes:
        excess_bytes: Guess of the bytes that a rank needs above its linear bytes.
        is_over: If True, the candidate is known not to fit.
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
        near: Candidates of all configurations that may be within the slack of the best, not
            replayed, fastest first.
        refused: Reason why a candidate of a configuration cannot be planned, by configuration.
        excess: Excess bytes of the last replayed candidate, by configuration.
        num_solved: Number of times that a configuration was solved exactly.
        num_measured: Number of candidates that were replayed.
        given_up: Number of configurations that were given up after too many replays.
        is_whole: If True, the search ended by itself; if False, it was stopped.
        unoffloaded_s: Seconds of a step of the fastest plan that fits without offload beyond what
            the plan file states; infinite if there is none.
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
        """Share by which some plan of the space may be faster than the best; 1 without a best."""
        return 1.0 if self.best is None else max(0.0, 1 - self.lower_s / self.best.seconds)


@dataclass(slots=True)
class NodeState:
    """The state of one configuration during a search.

    Attributes:
        capacity: Linear bytes that its next candidate may use.
        fits_up_to: Linear bytes of the last candidate that fitted; negative if none did.
        over_from: Fewest linear bytes of a candidate that did not fit; infinite if there is none.
        tries: Number of its candidates that were replayed.
        seconds: Seconds of the last candidate that did not fit.
        halved: Number of bisections between `fits_up_to` and `over_from`.
        looks: Number of times that no candidate was found within an `_AHEAD` factor of the bound.
        is_of_row: If True, all candidates of the configuration have the same excess.
        sure_capacity: The capacity without the guess while `capacity` rests on a guess; else None.
        guesses: Number of guesses made for its candidates.
        hoped: Seconds of the candidate, or of the LP bound, that it last entered the queue with.
        guessed: Excess bytes by the last guess.
        doubted: Excess bytes by a guess that has been dropped since; None if none has.
    """

    capacity: float
    fits_up_to: float = -1.0
    over_from: float = float("inf")
    tries: int = 0
    seconds: float = 0.0
    halved: int = 0
    looks: int = 0
    is_of_row: bool = True
    sure_capacity: float | None = None
    guesses: int = 0
    hoped: float = float("inf")
    guessed: float = 0.0
    doubted: float | None = None


def mesh_key(config: np.void) -> tuple[int, ...]:
    """Return a key of configurations that need the more memory, the larger their microbatches are.

    A pipeline with fewer microbatches than ranks keeps fewer of them in flight, so the key then
    includes their number.
    """
    names = (
        "pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "virtual", "mode", "schedule",
        "offload", "loss_chunks",
    )  # fmt: skip
    enough = config["pp"] * (2 if config["virtual"] > 1 else 1)
    few = int(config["microbatches"]) if config["microbatches"] < enough else 0
    return (*(int(config[name]) for name in names), few, int(config["microbatches"] > 1))


class RuledOut:
    """Configurations whose smallest candidate does not fit, and those that need more than these.

    Args:
        grid: The configurations.
    """

    def __init__(self, grid: NDArray[np.void]) -> None:
        self._grid = grid
        self._least: dict[tuple[int, ...], int] = {}
        """Samples of the smallest microbatch that is ruled out, by `mesh_key`."""

    def add(self, row: int) -> None:
        key, micro = mesh_key(self._grid[row]), int(self._grid[row]["micro"])
        self._least[key] = min(micro, self._least.get(key, micro))

    def __contains__(self, row: int) -> bool:
        config = self._grid[row]
        return int(config["micro"]) >= self._least.get(mesh_key(config), float("inf"))
