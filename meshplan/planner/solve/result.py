"""What a search finds, and what it knows of each row on the way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshplan.planner.solve.config import Candidate


@dataclass(frozen=True, slots=True)
class ReplayedMemory:
    """What the memory room says of a candidate.

    Attributes:
        fits: Whether all ranks do.
        excess_bytes: What the stage that is worst off holds above `linear_bytes`.
        why: Why it cannot be, where it cannot; it then does not fit.
        result: Whatever the measuring made, for those who asked for it.
        is_of_row: Whether other answers of the row hold as much above their linear figures.
    """

    fits: bool
    excess_bytes: float = 0.0
    why: str = ""
    result: object = None
    is_of_row: bool = True


class Guess(NamedTuple):
    """What somebody says of a candidate before it is measured.

    Attributes:
        excess_bytes: What a rank may hold above its linear figures.
        is_over: Whether it surely holds more than it may.
    """

    excess_bytes: float
    is_over: bool = False


@dataclass(slots=True)
class SearchResult:
    """What a search came to.

    Attributes:
        best: The fastest that fits; None where nothing does.
        lower_s: No row is faster than this.
        near: Candidates of all rows that may come within the slack, not measured, fastest first.
        refused: By row, why the memory room could not tell it.
        excess: By row, what its last answer really held above the linear figures.
        num_solved, num_measured: How much work it was.
        given_up: Rows whose answers were measured too often.
        is_whole: Whether the search came to its end, and was not ended.
        unoffloaded_s: Seconds of the fastest that fits with nothing on the host that the plan does
            not state there; infinite where nothing does.
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
        """How much faster something in the space may be, as a share of the answer."""
        return 1.0 if self.best is None else max(0.0, 1 - self.lower_s / self.best.seconds)


@dataclass(slots=True)
class NodeState:
    """What is known of a row.

    Attributes:
        capacity: Bytes for its next answer, by the linear figures.
        fits_up_to, over_from: What fitted and what did not, likewise.
        seconds: Of the last answer that failed.
        halved: How often what lies between was looked at.
        looks: How often nothing of the row was nearly as fast as its bound.
        is_of_row: Whether what answers held more is the same for all.
        sure_capacity: Where `capacity` rests on a guess, the one that does not.
        guesses: How many there were.
        hoped: Seconds of its answer that waits.
        guessed: Bytes above the linear figures, by the last one.
        doubted: The same where that was too little to go by.
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
    """Rows of one key hold the more, the larger their microbatches are.

    A pipeline that has fewer microbatches than ranks keeps fewer of them: those are apart.
    """
    names = (
        "pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "virtual", "mode", "schedule",
        "offload", "loss_chunks",
    )  # fmt: skip
    enough = config["pp"] * (2 if config["virtual"] > 1 else 1)
    few = int(config["microbatches"]) if config["microbatches"] < enough else 0
    return (*(int(config[name]) for name in names), few, int(config["microbatches"] > 1))


class RuledOut:
    """Rows of which not even the smallest answer fits, and those that hold more than they do."""

    def __init__(self, grid: NDArray[np.void]) -> None:
        self._grid = grid
        self._least: dict[tuple[int, ...], int] = {}
        """By mesh and mode, samples of the smallest microbatch that is out."""

    def add(self, row: int) -> None:
        key, micro = mesh_key(self._grid[row]), int(self._grid[row]["micro"])
        self._least[key] = min(micro, self._least.get(key, micro))

    def __contains__(self, row: int) -> bool:
        config = self._grid[row]
        return int(config["micro"]) >= self._least.get(mesh_key(config), float("inf"))
