"""A pipeline step, action by action: what the closed forms of `cost.pipeline` are checked against.

Ranks do the compute steps of their schedule in order, each as soon as what it needs is there;
sends and receives run beside them and take the same time each. Refuses to know what a stage
computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshplan.layout.schedules import Action, Schedule, actions


@dataclass(frozen=True, slots=True)
class Interval:
    """One compute step of a rank, from when to when."""

    rank: int
    action: Action
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """One step.

    Args:
        seconds: Until the last rank is done.
        busy_s: By rank, how long it computed.
        spans: All compute steps; those of a rank in order.
    """

    seconds: float
    busy_s: tuple[float, ...]
    spans: tuple[Interval, ...] = ()

    @property
    def idle_share(self) -> float:
        """Of the time of all ranks."""
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
    """How long a schedule takes.

    Args:
        forward_s, backward_s: Of each stage, in the order of the model; a backward that is split
            takes half for each part.
        ranks: Along pp; stages are a multiple of it.
        crossing_s: From the end of a step to its result being on another rank.
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
        assert sum(at) > before, f"{schedule.name} waits for itself"
    return SimulatedStep(max(clock), tuple(busy), tuple(spans))
