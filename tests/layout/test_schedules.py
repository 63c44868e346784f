"""Schedules as data: every step once, nothing before what it needs, no two ranks stuck."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

import pytest

from meshplan.layout.schedules import (
    SCHEDULES,
    Action,
    Schedule,
    actions,
    forward_only,
    num_to_simulate,
)

CASES = [
    (row, ranks, virtual, count)
    for row in SCHEDULES.values()
    for ranks in (1, 2, 3, 4)
    for virtual in ([row.virtual] if row.virtual else [2, 3])
    for count in range(1, 14)
    if not row.problem(ranks, count)
]


def rendezvous(orders: Sequence[Sequence[Action]], row: Schedule, last: int) -> int:
    """Play on ranks that block at every send and receive until the other side is there.

    Returns:
        In how many turns, in each of which every rank takes one action if it can.
    """
    turns = 0
    left = [deque(order) for order in orders]
    done: set[tuple[str, int, int]] = set()
    ranks = len(orders)

    def peer(action: Action) -> tuple[int, Action]:
        up = action.kind in ("SEND_F", "RECV_B")
        other = {"SEND_F": "RECV_F", "RECV_F": "SEND_F", "SEND_B": "RECV_B", "RECV_B": "SEND_B"}
        stage = action.stage + 1 if up else action.stage - 1
        return row.rank_of(stage, ranks), Action(other[action.kind], stage, action.microbatch)

    while any(left):
        moved, turns = False, turns + 1
        for rank, queue in enumerate(left):
            if not queue:
                continue
            action = queue[0]
            if "_" in action.kind:
                other, wanted = peer(action)
                if left[other] and left[other][0] == wanted:
                    assert other != rank
                    left[other].popleft()
                    queue.popleft()
                    for each in (action, wanted):
                        done.add((each.kind, each.stage, each.microbatch))
                    moved = True
                continue
            need(action, done, row, ranks, last)
            kind = "B" if action.kind == "I" else action.kind
            done.add((kind, action.stage, action.microbatch))
            queue.popleft()
            moved = True
        assert moved, [str(queue[0]) if queue else "" for queue in left]
    return turns


def need(
    action: Action, done: set[tuple[str, int, int]], row: Schedule, ranks: int, last: int
) -> None:
    """Everything that a compute step reads was made here or has arrived."""
    stage, m = action.stage, action.microbatch
    rank = row.rank_of(stage, ranks)
    if action.kind == "F" and stage:
        is_here = row.rank_of(stage - 1, ranks) == rank
        assert (("F", stage - 1, m) if is_here else ("RECV_F", stage, m)) in done
    if action.kind in "BI":
        assert ("F", stage, m) in done
        if stage < last:
            is_here = row.rank_of(stage + 1, ranks) == rank
            assert (("B", stage + 1, m) if is_here else ("RECV_B", stage, m)) in done
    if action.kind == "W":
        assert ("B", stage, m) in done


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_step_runs_once_and_nobody_waits_forever(name):
    for row, ranks, virtual, count in (case for case in CASES if case[0].name == name):
        orders = actions(row, ranks, virtual, count)
        last = ranks * virtual - 1
        for rank, order in enumerate(orders):
            found = Counter(str(action) for action in order)
            assert max(found.values()) == 1
            for stage in range(last + 1):
                kinds = Counter(a.kind for a in order if a.stage == stage)
                expected = count if row.rank_of(stage, ranks) == rank else 0
                assert kinds["F"] == kinds["B"] + kinds["I"] == expected
                assert kinds["W"] == kinds["I"] <= (count if row.splits_backward else 0)
        rendezvous(orders, row, last)
        rendezvous(forward_only(row, ranks, virtual), row, last)


def test_a_schedule_that_waits_for_itself_would_be_seen():
    row = SCHEDULES["1F1B"]
    first, second = (list(order) for order in actions(row, 2, 1, 2))
    assert [str(action) for action in first[3:5]] == ["0SEND_F1", "0RECV_B0"]
    first[3], first[4] = first[4], first[3]
    with pytest.raises(AssertionError, match="0RECV_B0"):
        rendezvous((first, second), row, 1)


def test_one_forward_one_backward_is_what_its_name_says():
    computes = [
        " ".join(str(a) for a in order if "_" not in a.kind)
        for order in actions(SCHEDULES["1F1B"], 2, 1, 3)
    ]
    assert computes == ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]


def held(name: str, ranks: int, virtual: int, count: int) -> list[int]:
    out = []
    for order in actions(SCHEDULES[name], ranks, virtual, count):
        now = most = 0
        for action in order:
            now += (action.kind == "F") - (action.kind in "BW")
            most = max(most, now)
        out.append(most)
    return out


def test_activations_held_at_once_are_those_of_the_schedule():
    assert held("GPipe", 4, 1, 8) == [8] * 4
    assert held("1F1B", 4, 1, 8) == [4, 3, 2, 1]
    assert max(held("ZBVZeroBubble", 4, 2, 16)) <= 8
    assert max(held("DualPipeV", 4, 2, 16)) <= 9
    assert held("Interleaved1F1B", 4, 2, 8) == [11, 9, 7, 5]
    for ranks in (2, 3, 4):
        assert held("InterleavedZeroBubble", ranks, 2, 4 * ranks) == [2 * ranks] * ranks
        assert held("ZBVZeroBubble", ranks, 2, 4 * ranks) == [2 * ranks] * ranks
        assert held("DualPipeV", ranks, 2, 4 * ranks) == [2 * ranks + 1] * ranks


def ticks(row: Schedule, ranks: int, virtual: int, count: int) -> tuple[int, int]:
    """(a step's, of them those that the busiest rank computes), each compute step being one."""
    orders = [
        [a for a in order if "_" not in a.kind] for order in actions(row, ranks, virtual, count)
    ]
    left, last, tick = [deque(order) for order in orders], ranks * virtual - 1, 0
    done: dict[tuple[str, int, int], int] = {}
    while any(left):
        for queue in filter(None, left):
            kind, stage, m = queue[0].kind, queue[0].stage, queue[0].microbatch
            needs = {"F": [("F", stage - 1, m)] if stage else [], "W": [("B", stage, m)]}.get(
                kind, [("F", stage, m), *([("B", stage + 1, m)] if stage < last else [])]
            )
            if all(done.get(need, tick) < tick for need in needs):
                done["B" if kind == "I" else kind, stage, m] = tick
                queue.popleft()
        tick += 1
    return tick, max(map(len, orders))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_rank_waits_no_longer_than_the_papers_say(ranks):
    def waits(name: str, virtual: int) -> int:
        step, own = ticks(SCHEDULES[name], ranks, virtual, 4 * ranks)
        return step - own

    assert waits("GPipe", 1) == waits("1F1B", 1) == waits("Interleaved1F1B", 2) == 2 * (ranks - 1)
    assert waits("InterleavedZeroBubble", 2) == ranks - 1
    assert waits("ZBVZeroBubble", 2) <= ranks


@pytest.mark.parametrize("name", ["ZBVZeroBubble", "InterleavedZeroBubble"])
def test_ranks_that_block_wait_little_for_each_other(name):
    """A microbatch is six computes and about as many sends and receives of a rank."""
    row = SCHEDULES[name]
    few, many = (rendezvous(actions(row, 4, 2, count), row, 7) for count in (16, 32))
    assert (many - few) / 16 <= 11


@pytest.mark.parametrize("row", SCHEDULES.values(), ids=lambda row: row.name)
def test_a_forward_alone_goes_through_every_stage(row):
    virtual = row.virtual or 2
    orders = forward_only(row, 3, virtual)
    stages = [(rank, a.stage) for rank, order in enumerate(orders) for a in order if a.kind == "F"]
    assert sorted(stages, key=lambda each: each[1]) == [
        (row.rank_of(stage, 3), stage) for stage in range(3 * virtual)
    ]


@pytest.mark.parametrize("row", SCHEDULES.values(), ids=lambda row: row.name)
def test_a_few_microbatches_tell_what_a_rank_ever_holds(row):
    for ranks in (2, 3, 4):
        virtual, count = row.virtual or 2, 8 * ranks
        few = num_to_simulate(row, ranks, count)
        assert (few < count) == row.in_turn
        assert held(row.name, ranks, virtual, few) == held(row.name, ranks, virtual, count)
        odd = count + 1
        if not row.problem(ranks, odd):
            few = num_to_simulate(row, ranks, odd)
            assert held(row.name, ranks, virtual, few) == held(row.name, ranks, virtual, odd)


def test_dual_pipe_v_is_that_of_its_source():
    computes = [
        " ".join(str(a) for a in order if "_" not in a.kind)
        for order in actions(SCHEDULES["DualPipeV"], 2, 2, 4)
    ]
    assert computes == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3",
        "1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3",
    ]
