"""Pipeline schedules: the order in which each rank computes and sends, as plain lists.

A schedule defines which rank runs which stage, whether the backward is split into input and weight
gradients, and the order of each rank's compute steps. `actions` inserts the sends and receives that
this order requires. How long a stage takes does not matter here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Final, Literal

from meshplan.shown import shown

Kind = Literal["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B"]


@shown
@dataclass(frozen=True, slots=True)
class Action:
    """One step of a rank.

    Args:
        kind: F is the forward, B the backward, I the part of the backward that computes gradients
            of the inputs, W the part that computes gradients of the weights. SEND_F and SEND_B send
            the result of a forward or backward of `stage`; RECV_F and RECV_B receive the input of a
            forward or backward of `stage`.
        stage: The stage that the step belongs to.
        microbatch: Index of the microbatch, from 0.
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One pipeline schedule.

    Args:
        name: The name in a plan, which is torch's.
        is_v: If True, rank r of P ranks has stages r and 2P-1-r; else r, r + P, r + 2P, ...
        virtual: Stages per rank that the schedule needs; None if it needs two or more.
        splits_backward: If True, weight gradients are computed in a separate step, W.
        order: Function (rank, ranks, stages per rank, microbatches) -> the compute steps of the
            rank.
        in_turn: If True, each forward after the warm-up is followed by a backward, so that more
            microbatches do not raise the peak memory.
        problem: Function (ranks, microbatches) -> why the schedule cannot run this number of
            microbatches; "" if it can.
    """

    name: str
    is_v: bool = False
    virtual: int | None = 1
    splits_backward: bool = False
    order: Callable[[int, int, int, int], Iterator[Action]]
    in_turn: bool = False
    problem: Callable[[int, int], str] = lambda ranks, count: ""

    def rank_of(self, stage: int, ranks: int) -> int:
        """Return the position along pp of the rank that has a stage."""
        if self.is_v and stage >= ranks:
            return 2 * ranks - 1 - stage
        return stage % ranks


def _gpipe(rank: int, ranks: int, virtual: int, count: int) -> Iterator[Action]:
    """GPipe: all forwards, then all backwards.

    Source: Huang et al. 2019 (GPipe), section 2.
    """
    for kind in ("F", "B"):
        yield from (Action(kind, rank, m) for m in range(count))


def _breadth_first(rank: int, ranks: int, virtual: int, count: int) -> Iterator[Action]:
    """Breadth-first: all forwards stage by stage, then all backwards in reverse stage order.

    Source: Lamy-Poirier 2023 (breadth-first pipeline parallelism), section 4.
    """
    stages = [rank + ranks * chunk for chunk in range(virtual)]
    yield from (Action("F", s, m) for s in stages for m in range(count))
    yield from (Action("B", s, m) for s in reversed(stages) for m in range(count))


def _alternating(rank: int, ranks: int, virtual: int, count: int) -> Iterator[Action]:
    """1F1B, plain or interleaved: warm up with forwards, then alternate a forward and a backward.

    Source: Narayanan et al. 2021 (Megatron-LM), section 2.2.
    """
    forwards, backwards = _rounds(rank, ranks, virtual, count)
    if virtual == 1:
        warmup = ranks - 1 - rank
    else:
        warmup = (virtual - 1) * round_size(ranks, count) + 2 * (ranks - 1 - rank)
    warmup = min(warmup, len(forwards))
    yield from (Action("F", s, m) for s, m in forwards[:warmup])
    for (stage, m), (back, n) in zip(forwards[warmup:], backwards, strict=False):
        yield Action("F", stage, m)
        yield Action("B", back, n)
    yield from (Action("B", s, m) for s, m in backwards[len(forwards) - warmup :])


def _zero_bubble(rank: int, ranks: int, virtual: int, count: int) -> Iterator[Action]:
    """Interleaved zero bubble: like `_alternating`, with weight gradients where a rank would wait.

    Source: Qi et al. 2023 (zero bubble), section 3 (ZB-H1), on interleaved stages.
    """
    forwards, backwards = _rounds(rank, ranks, virtual, count)
    warmup = (virtual - 1) * round_size(ranks, count) + (ranks - 1 - rank)
    warmup = min(warmup, len(forwards))
    waiting: list[tuple[int, int]] = []
    yield from (Action("F", s, m) for s, m in forwards[:warmup])
    for number, (stage, m) in enumerate(backwards):
        is_filling = warmup + number < len(forwards)
        if is_filling:
            yield Action("F", *forwards[warmup + number])
        yield Action("I", stage, m)
        waiting.append((stage, m))
        if len(waiting) > rank or not is_filling:
            yield Action("W", *waiting.pop(0))
    yield from (Action("W", s, m) for s, m in waiting)


def round_size(ranks: int, count: int) -> int:
    """Return how many microbatches a rank runs through one of its stages before its next stage."""
    return count // max(1, count // ranks)


def _rounds(
    rank: int, ranks: int, virtual: int, count: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return a rank's forwards and its backwards in an interleaved schedule, in order.

    Returns:
        Two lists of (stage, microbatch).
    """
    size = round_size(ranks, count)
    forwards, backwards = [], []
    for begin in range(0, count, size):
        for chunk in range(virtual):
            for m in range(begin, min(begin + size, count)):
                forwards.append((rank + ranks * chunk, m))
                backwards.append((rank + ranks * (virtual - 1 - chunk), m))
    return forwards, backwards


def _whole_rounds(ranks: int, count: int) -> str:
    rounds = max(1, count // ranks)
    return f"needs a multiple of {rounds} microbatches" if count % rounds else ""


def _zbv(rank: int, ranks: int, virtual: int, count: int) -> Iterator[Action]:
    """ZB-V: each rank greedily runs input gradients first, then forwards, then weight gradients.

    A rank that has the activations of 2P stage forwards saved starts no new microbatch, and runs
    weight gradients before forwards.

    Source: Qi et al. 2024 (pipeline parallelism with controllable memory), section 4.
    """
    return iter(_play_v(ranks, count)[rank])


def _play_v(ranks: int, count: int) -> list[list[Action]]:
    """Return each rank's compute steps under ZB-V, simulated with steps of equal length."""
    last = 2 * ranks - 1
    done: dict[tuple[str, int, int], int] = {}
    orders: list[list[Action]] = [[] for _ in range(ranks)]
    ahead: list[dict[tuple[str, int], int]] = [{} for _ in range(ranks)]
    tick = 0

    def is_ready(kind: str, stage: int, m: int) -> bool:
        if m >= count:
            return False
        if kind == "F":
            return stage == 0 or done.get(("F", stage - 1, m), tick) < tick
        need = ("F", stage, m) if stage == last else ("I", stage + 1, m)
        return done.get(need, tick) < tick and ("F", stage, m) in done

    while any(len(order) < 6 * count for order in orders):
        for rank in range(ranks):
            near, far = rank, last - rank
            place = ahead[rank]
            in_flight = sum(place.get(("F", s), 0) - place.get(("W", s), 0) for s in (near, far))
            backwards, forwards = [("I", far), ("I", near)], [("F", far), ("F", near)]
            weights = [("W", far), ("W", near)]
            is_full = in_flight >= 2 * ranks
            later = weights + forwards if is_full else forwards + weights
            for kind, stage in backwards + later:
                m = place.get((kind, stage), 0)
                if kind == "W":
                    is_possible = m < place.get(("I", stage), 0)
                elif (kind, stage) == ("F", near) and is_full:
                    is_possible = False
                else:
                    is_possible = is_ready(kind, stage, m)
                if is_possible:
                    place[kind, stage] = m + 1
                    done[kind, stage, m] = tick
                    orders[rank].append(Action(kind, stage, m))  # type: ignore[arg-type]
                    break
        tick += 1
    return orders


def _dual_pipe_v(rank: int, ranks: int, virtual: int, count: int) -> Iterator[Action]:
    """DualPipeV: the eight steps of the published schedule, one after the other.

    Source: DeepSeek-AI 2025 (DualPipe), "cut-in-half" DualPipeV.
    """
    stages = (rank, 2 * ranks - 1 - rank)
    place: dict[tuple[str, int], int] = {}
    waiting: list[tuple[int, int]] = []

    def go(kind: Literal["F", "B", "I"], side: int) -> Action:
        pool = "F" if kind == "F" else "B"
        m = place.get((pool, side), 0)
        place[pool, side] = m + 1
        if kind == "I":
            waiting.append((stages[side], m))
        return Action(kind, stages[side], m)

    after = ranks - 1 - rank
    for _ in range(2 * after):
        yield go("F", 0)
    for _ in range(rank + 1):
        yield go("F", 0)
        yield go("F", 1)
    for _ in range(after):
        yield go("I", 1)
        yield Action("W", *waiting.pop(0))
        yield go("F", 1)
    for _ in range(count - 2 * ranks + rank + 1):
        yield go("F", 0)
        yield go("B", 1)
        yield go("F", 1)
        yield go("B", 0)
    for _ in range(after):
        yield go("B", 1)
        yield go("F", 1)
        yield go("B", 0)
    splits = False
    for number in range(rank + 1):
        is_half = number == (rank + 1) // 2
        splits = splits or (is_half and rank % 2 == 1)
        yield go("I" if splits else "B", 1)
        splits = splits or (is_half and rank % 2 == 0)
        yield go("I" if splits else "B", 0)
    for _ in range(after):
        if waiting:
            yield Action("W", *waiting.pop(0))
        yield go("I", 0)
    yield from (Action("W", s, m) for s, m in waiting)


def _two_per_rank(ranks: int, count: int) -> str:
    return f"needs at least {2 * ranks} microbatches" if count < 2 * ranks else ""


SCHEDULES: Final[Mapping[str, Schedule]] = MappingProxyType(
    {
        row.name: row
        for row in (
            Schedule(name="GPipe", order=_gpipe),
            Schedule(name="1F1B", order=_alternating, in_turn=True),
            Schedule(name="LoopedBFS", virtual=None, order=_breadth_first),
            Schedule(name="Interleaved1F1B", virtual=None, order=_alternating, in_turn=True,
                     problem=_whole_rounds),
            Schedule(name="InterleavedZeroBubble", virtual=None, splits_backward=True,
                     order=_zero_bubble, in_turn=True, problem=_whole_rounds),
            Schedule(name="ZBVZeroBubble", is_v=True, virtual=2, splits_backward=True, order=_zbv,
                     in_turn=True),
            Schedule(name="DualPipeV", is_v=True, virtual=2, splits_backward=True,
                     order=_dual_pipe_v, in_turn=True, problem=_two_per_rank),
        )
    }
)  # fmt: skip


def forward_only(schedule: Schedule, ranks: int, virtual: int) -> tuple[tuple[Action, ...], ...]:
    """Return each rank's actions for the forward of one microbatch through all stages."""
    computes: list[list[Action]] = [[] for _ in range(ranks)]
    for stage in range(ranks * virtual):
        computes[schedule.rank_of(stage, ranks)].append(Action("F", stage, 0))
    return _play(schedule, ranks, virtual, computes)


@lru_cache(maxsize=16)
def actions(
    schedule: Schedule, ranks: int, virtual: int, count: int
) -> tuple[tuple[Action, ...], ...]:
    """Return the actions of each rank in one step, in order.

    Args:
        schedule: The schedule.
        ranks: Number of ranks along pp.
        virtual: Stages per rank.
        count: Number of microbatches.

    Returns:
        One tuple of actions per rank, compute steps, sends and receives. All ranks send and receive
        in one global order, so that no two ranks wait for each other even if sends block.
    """
    computes = [list(schedule.order(rank, ranks, virtual, count)) for rank in range(ranks)]
    return _play(schedule, ranks, virtual, computes)


def num_to_simulate(schedule: Schedule, ranks: int, count: int) -> int:
    """Return how many microbatches to simulate for the peak memory of a step with `count` of them.

    Between the warm-up and the end all microbatches use the same memory, so a few are enough.
    """
    if not schedule.in_turn:
        return count
    if schedule.virtual == 1:
        return min(count, 2 * ranks + 2)
    # Interleaved schedules take microbatches in rounds of `ranks`; a shorter round is different.
    return min(count, 4 * ranks) if count % ranks == 0 else count


def released(
    orders: tuple[tuple[Action, ...], ...], rank: int
) -> Mapping[Action, tuple[Action, ...]]:
    """Return which sends of a rank must have arrived before each of its compute steps.

    The tensors of these sends can be freed there, without waiting for the send. Two facts prove an
    arrival. A gradient received for a microbatch proves that the forward sent for it arrived. A
    forward received from the previous stage, which the stage sent after its backward of microbatch
    m, proves that the gradient sent to it for m arrived.

    Args:
        orders: The actions of all ranks, as returned by `actions`.
        rank: The rank, by its position along pp.

    Returns:
        The SEND_F and SEND_B actions by compute step; steps without any are left out.
    """
    own = set(orders[rank])
    following: dict[tuple[int, int], int] = {}
    for order in orders:
        later: dict[int, int] = {}
        for action in reversed(order):
            if action.kind == "SEND_F":
                later[action.stage] = action.microbatch
            elif action.kind in "BI" and action.stage in later:
                following[action.stage, action.microbatch] = later[action.stage]
    out: dict[Action, list[Action]] = {}
    for action in orders[rank]:
        stage, m = action.stage, action.microbatch
        if action.kind == "SEND_F" and Action("RECV_B", stage, m) in own:
            for kind in ("B", "I"):
                out.setdefault(Action(kind, stage, m), []).append(action)
        elif action.kind == "SEND_B" and (stage - 1, m) in following:
            step = Action("F", stage, following[stage - 1, m])
            out.setdefault(step, []).append(action)
    return MappingProxyType({step: tuple(sends) for step, sends in out.items() if step in own})


def _play(
    schedule: Schedule, ranks: int, virtual: int, computes: list[list[Action]]
) -> tuple[tuple[Action, ...], ...]:
    """Run all ranks' compute steps in rounds, and add a send and a receive for each result."""
    out: list[list[Action]] = [[] for _ in range(ranks)]
    at = [0] * ranks
    have: set[tuple[str, int, int]] = set()
    last = ranks * virtual - 1

    def needs(action: Action) -> list[tuple[str, int, int]]:
        stage, m = action.stage, action.microbatch
        if action.kind == "F":
            return [("F", stage - 1, m)] if stage else []
        if action.kind == "W":
            return [("I", stage, m)]
        return [("F", stage, m)] + ([("B", stage + 1, m)] if stage < last else [])

    while any(at[rank] < len(computes[rank]) for rank in range(ranks)):
        # Choose the ranks that can proceed before any runs: results count from the next round on.
        going = [
            rank
            for rank in range(ranks)
            if at[rank] < len(computes[rank])
            and all(need in have for need in needs(computes[rank][at[rank]]))
        ]
        assert going, f"{schedule.name} deadlocks"
        for rank in going:
            action = computes[rank][at[rank]]
            at[rank] += 1
            out[rank].append(action)
            stage, m = action.stage, action.microbatch
            if action.kind == "W":
                continue
            have.add((action.kind, stage, m))
            if action.kind == "I":
                have.add(("B", stage, m))
            to = stage + 1 if action.kind == "F" else stage - 1
            if not 0 <= to <= last or schedule.rank_of(to, ranks) == rank:
                continue
            sends: Kind = "SEND_F" if action.kind == "F" else "SEND_B"
            receives: Kind = "RECV_F" if action.kind == "F" else "RECV_B"
            out[rank].append(Action(sends, stage, m))
            out[schedule.rank_of(to, ranks)].append(Action(receives, to, m))
    return tuple(map(tuple, out))
