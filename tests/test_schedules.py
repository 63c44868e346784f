"""Schedules as data: every step once, nothing before what it needs, no two ranks stuck."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

import pytest

from meshplan.schedules import SCHEDULES, Action, Schedule, actions, forward_only

CASES = [
    (row, ranks, virtual, count)
    for row in SCHEDULES.values()
    for ranks in (1, 2, 3, 4)
    for virtual in ([row.virtual] if row.virtual else [2, 3])
    for count in range(1, 14)
    if not row.problem(ranks, count)
]


def rendezvous(orders: Sequence[Sequence[Action]], row: Schedule, last: int) -> None:
    """Play on ranks that block at every send and receive until the other side is there."""
    left = [deque(order) for order in orders]
    done: set[tuple[str, int, int]] = set()
    ranks = len(orders)

    def peer(action: Action) -> tuple[int, Action]:
        up = action.kind in ("SEND_F", "RECV_B")
        other = {"SEND_F": "RECV_F", "RECV_F": "SEND_F", "SEND_B": "RECV_B", "RECV_B": "SEND_B"}
        stage = action.stage + 1 if up else action.stage - 1
        return row.rank_of(stage, ranks), Action(other[action.kind], stage, action.microbatch)

    while any(left):
        moved = False
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


def test_activations_held_at_once_are_those_of_the_schedule():
    def held(name: str, ranks: int, virtual: int, count: int) -> list[int]:
        out = []
        for order in actions(SCHEDULES[name], ranks, virtual, count):
            now = most = 0
            for action in order:
                now += (action.kind == "F") - (action.kind in "BW")
                most = max(most, now)
            out.append(most)
        return out

    assert held("GPipe", 4, 1, 8) == [8] * 4
    assert held("1F1B", 4, 1, 8) == [4, 3, 2, 1]
    assert max(held("ZBVZeroBubble", 4, 2, 16)) <= 8
    assert max(held("DualPipeV", 4, 2, 16)) <= 9
