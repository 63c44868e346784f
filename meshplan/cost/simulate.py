"""Simulate a pipeline step action by action, to check the closed forms of `cost.pipeline`.

Ranks run the compute actions of their schedule in order, each as soon as its inputs have arrived.
Sends overlap with computation and with each other, and all take equally long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshplan.layout.schedules import Action, Schedule, actions


@dataclass(frozen=True, slots=True)
class Interval:
    """A compute action of a rank, with its begin and end in seconds from the begin of the step."""

    rank: int
    action: Action
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """The result of simulating one step.

    Args:
        seconds: Seconds until the last rank is done.
        busy_s: For each rank, the seconds in which it computes.
        spans: The intervals of all compute actions. Those of one rank are in order.
    """

    seconds: float
    busy_s: tuple[float, ...]
    spans: tuple[Interval, ...] = ()

    @property
    def idle_share(self) -> float:
        """The fraction of the time of all ranks together in which they do not compute."""
        return 1 - sum(self.busy_s) / (len(self.busy_s) * self.seconds)


def simulate(
    schedule: Schedule,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    *,
    ranks: int,
    microbatches: int,
    crossing_s: float = 0.0,
) -> SimulatedStep:
    """Return the result of simulating one step of a schedule.

    Args:
        schedule: The pipeline schedule.
        forward_s, backward_s: For each stage in the order of the model, the seconds of one
            microbatch. Each half of a split backward takes half of `backward_s`.
        ranks: Ranks along pp, of which the number of stages is a multiple.
        microbatches: Microbatches of the step.
        crossing_s: Seconds from the end of an action until its result is on another rank.
    """
    virtual = len(forward_s) // ranks
    orders = [
        [step for step in row if step.kind in "FBIW"]
        for row in actions(schedule, ranks, virtual, microbatches)
    ]
    costs = {
        "F": forward_s,
        "B": backward_s,
        "I": [each / 2 for each in backward_s],
        "W": [each / 2 for each in backward_s],
    }
    last = len(forward_s) - 1
    done: dict[tuple[str, int, int], float] = {}
    clock, busy, at = [0.0] * ranks, [0.0] * ranks, [0] * ranks
    spans: list[Interval] = []
    while any(at[rank] < len(orders[rank]) for rank in range(ranks)):
        before = sum(at)
        for rank, order in enumerate(orders):
            while at[rank] < len(order):
                step = order[at[rank]]
                # Stages wait for "B", or for "I", the half that computes gradients of inputs.
                kind = "F" if step.kind == "F" else "B"
                beside = step.stage + (-1 if kind == "F" else 1)
                begin = clock[rank]
                if step.kind != "W" and 0 <= beside <= last:
                    arrived = done.get((kind, beside, step.microbatch))
                    if arrived is None:
                        break
                    is_far = schedule.rank_of(beside, ranks) != rank
                    begin = max(begin, arrived + crossing_s * is_far)
                seconds = costs[step.kind][step.stage]
                clock[rank] = begin + seconds
                spans.append(Interval(rank, step, begin, clock[rank]))
                busy[rank] += seconds
                if step.kind != "W":
                    done[kind, step.stage, step.microbatch] = clock[rank]
                at[rank] += 1
        assert sum(at) > before, f"{schedule.name} deadlocks"
    return SimulatedStep(max(clock), tuple(busy), tuple(spans))
