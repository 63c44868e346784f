"""Ranks that wait in vain are told so within seconds; a slow rank is waited for."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import meshplan
from meshplan.runtime.watch import guard, sockets, watchdog
from meshplan.runtime.watch.verdict import verdict
from tests.helpers import faults, models

SLOW_S = 1.5
"""How long a rank keeps the others waiting: several times what a watchdog in haste needs."""

TIMEOUT_S = 100.0
SECONDS = 10.0
"""Within which every other rank has ended."""

CASES = [
    (
        faults.Case(kind="uneven", where="end of loop", plan="tp", in_haste=True),
        r"rank 1 waits in full_state_dict \(faults.py:\d+ in run\) after train_step 1, but rank 0 "
        r"is in train_step 2\n.*fix: call full_state_dict on every rank, and give every rank",
    ),
    (
        faults.Case(kind="uneven", where="end of loop", by_hand=True, in_haste=True),
        r"in a deadlock: rank 0 in all_gather_[a-z_]+ \(faults.py:\d+ in train, forward 2\), "
        r"rank 1 in full_state_dict 1 \(faults.py:\d+ in run\)",
    ),
    (
        faults.Case(kind="verb", where="barrier", plan="ddp", by_hand=True, in_haste=True),
        r"in a deadlock: rank 0 in [a-z_ ]+ \(faults.py:\d+ in train, forward 2\), rank 1 in "
        r"barrier \(faults.py:\d+ in other_verb, forward 1\)",
    ),
    (
        faults.Case(kind="verb", where="evaluation", culprit=0, by_hand=True, in_haste=True),
        r"rank 0 waits to begin a forward in evaluation \(faults.py:\d+ in other_verb\) after "
        r"forward 1, but rank 1 is in forward 2\n.*fix: run evaluation on every rank",
    ),
    (
        faults.Case(kind="verb", where="evaluation", plan="pp", in_haste=True),
        r"rank 1 waits to begin a forward in evaluation .*, but rank 0 is in train_step 2",
    ),
    (
        faults.Case(kind="uneven", where="leave", by_hand=True, in_haste=True),
        r"rank 1 has ended after forward 1, but rank 0 is in forward 2\n.*same number of batches",
    ),
    (
        faults.Case(kind="stop", where="loss", plan="pp", in_haste=True),
        r"rank 1 is stopped \(process \d+, .*\) and does not answer, while rank 0 waits",
    ),
    (
        faults.Case(kind="stop", where="data", culprit=0, holds_store=True, in_haste=True),
        r"rank 0 is stopped .* while rank 1 waits for it in train_step 2",
    ),
    (  # The others may not even have a connection to the store that their watchdogs may use.
        faults.Case(kind="stop", where="start", culprit=0, holds_store=True, in_haste=True),
        r"rank 0 is stopped .* while rank 1 waits for it in (faults.py:\d+ in run|barrier)",
    ),
    (  # Nor have their watchdogs read in the store which process is whose.
        faults.Case(kind="stop", where="guard", culprit=0, holds_store=True, in_haste=True),
        r"rank 0 is stopped .* while rank 1 waits for it in parallelize 1",
    ),
    (
        faults.Case(kind="kill", where="state", step=3, in_haste=True),
        r"rank 0 waits in full_state_dict 1 for rank 1, which died or was killed",
    ),
]


@pytest.mark.parametrize(
    ("case", "words"),
    CASES,
    ids=[f"{c.kind}-{c.where}-{c.plan}".replace(" ", "_") for c, _ in CASES],
)
def test_who_waits_in_vain_is_told_why(case, words):
    ends = faults.run(case)
    gone = {case.culprit} if case.kind in ("kill", "stop") or case.where == "leave" else set()
    for rank in set(range(case.world)) - gone:
        told = ends[rank].text.replace(f"[rank{rank}]: ", "")
        assert ends[rank].how == "error", ends
        assert ends[rank].seconds < SECONDS
        assert faults.re.search(words, told), told


def introduced() -> list[int]:
    """The ranks whose processes are known before any watchdog's thread has come to do anything."""
    with mock.patch.object(watchdog.Watchdog, "run", return_value=None), meshplan.guarded():
        dist.barrier()
        assert guard._watchdog is not None
        guard._watchdog._beside.meet()
        return sorted(guard._watchdog._beside)


def test_a_rank_may_be_stopped_as_soon_as_it_has_begun(pool):
    """Its process is known by then: those that wait for it see that it is stopped."""
    pool(2).close()
    assert pool(2).run(introduced) == [[0, 1]] * 2
    pool(2).close()


def sleep() -> None:
    """A slow loader, or a checkpoint being written."""
    time.sleep(SLOW_S)


def hold_the_interpreter() -> None:
    """Work in C that lets no other thread of this process run, its watchdog neither."""
    began = time.monotonic()
    while time.monotonic() - began < SLOW_S:
        sorted(str(number) for number in range(400_000))


def wait_for_a_thread() -> None:
    """A save in the background that is waited for."""
    thread = threading.Thread(target=sleep)
    thread.start()
    thread.join()


def stop_a_moment() -> None:
    """SIGSTOP, and SIGCONT before the others give up."""
    watchdog.STOPPED_S = SLOW_S * 2
    pid = os.getpid()
    if os.fork() == 0:
        time.sleep(SLOW_S)
        os.kill(pid, signal.SIGCONT)
        os._exit(0)
    os.kill(pid, signal.SIGSTOP)


def slow_rank(plan: dict[str, Any], business: Callable[[], None], where: str) -> str:
    """What the ranks say of one among them that is busy for long."""
    faults.hurry()
    watchdog.STOPPED_S = SLOW_S * 2
    is_slow = dist.get_rank() == dist.get_world_size() - 1
    model = meshplan.parallelize(models.build("own_llama"), {"version": 1, **plan})
    sgd = models.optimizer(model)

    def loss(output: Any, targets: torch.Tensor) -> torch.Tensor:
        if is_slow and where == "loss":
            business()
        return models.loss(output, targets)

    for _ in range(2):
        batch = meshplan.local_batch(model, models.batch("own_llama", 0))
        if is_slow and where == "data":
            business()
        meshplan.train_step(model, sgd, *batch, loss)
    if is_slow and where == "state":
        business()
    meshplan.full_state_dict(model)
    if is_slow and where == "barrier":
        business()
    dist.barrier()
    with meshplan.guarded():
        return "went on"


PP = {"mesh": {"pp": 2}, "pipeline": {"schedule": "1F1B", "microbatches": 2}}


@pytest.mark.parametrize(
    ("plan", "business", "where"),
    [
        ({"strategy": "full_shard"}, sleep, "data"),
        ({"strategy": "ddp"}, wait_for_a_thread, "barrier"),
        ({"strategy": "full_shard"}, hold_the_interpreter, "state"),
        pytest.param(PP, sleep, "loss", marks=pytest.mark.wide),
        ({"strategy": "ddp"}, stop_a_moment, "data"),
    ],
)
def test_a_slow_rank_is_waited_for(pool, plan, business, where):
    assert pool(2).run(slow_rank, plan, business, where, timeout=TIMEOUT_S) == ["went on"] * 2
    pool(2).close()


def groups_of_their_own() -> str:
    """Two pairs of ranks that have nothing to do with each other, and differ for long."""
    faults.hurry()
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    with meshplan.guarded():
        dist.barrier()
    for _ in range(3 if rank < 2 else 5):
        dist.all_reduce(torch.ones(1), group=pairs[rank // 2])
    if rank == 3:
        sleep()
    dist.barrier(group=pairs[rank // 2])
    dist.barrier()
    with meshplan.guarded():
        return "went on"


def collectives_of_a_thread() -> str:
    """A thread of one rank brings about what the main threads of the others wait for."""
    faults.hurry()
    side = dist.new_group()
    with meshplan.guarded():
        dist.barrier()

    def meet_late() -> None:
        dist.barrier(group=side)
        sleep()
        dist.barrier(group=side)

    if dist.get_rank() == 0:
        thread = threading.Thread(target=meet_late)
        thread.start()
        dist.barrier()
        thread.join()
    else:
        time.sleep(0.5)
        dist.barrier(group=side)
        dist.barrier(group=side)
        dist.barrier()
    with meshplan.guarded():
        return "went on"


def batches_of_a_thread() -> str:
    """A thread of one rank reads for long, and then sends what the others wait for."""
    faults.hurry()
    side = dist.new_group()
    with meshplan.guarded():
        dist.barrier()

    def read_and_send() -> None:
        sleep()
        dist.broadcast(torch.ones(1), 0, group=side)

    if dist.get_rank() == 0:
        thread = threading.Thread(target=read_and_send)
        thread.start()
        dist.barrier()
        thread.join()
    else:
        dist.broadcast(torch.ones(1), 0, group=side)
        dist.barrier()
    with meshplan.guarded():
        return "went on"


@pytest.mark.parametrize(
    "program", [groups_of_their_own, collectives_of_a_thread, batches_of_a_thread]
)
def test_programs_whose_ranks_differ_are_let_alone(pool, program):
    assert pool(4).run(program, timeout=TIMEOUT_S) == ["went on"] * 4
    pool(4).close()


def left_by_a_group() -> list[str]:
    """Threads of meshplan that are left once the group has gone."""
    faults.hurry()
    with meshplan.guarded():
        dist.barrier()
    dist.destroy_process_group()
    deadline = time.monotonic() + SECONDS
    while (left := _own_threads()) and time.monotonic() < deadline:
        time.sleep(watchdog.TICK_S)
    return left


def _own_threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("meshplan")]


def test_a_group_that_is_destroyed_leaves_no_thread(pool):
    assert pool(2).run(left_by_a_group, timeout=TIMEOUT_S) == [[], []]
    pool(2).close()


def evaluated_alone() -> list[float]:
    """Losses of two models in turn, of which rank 0 evaluates the one that it has whole."""
    out = []
    for strategy in ("ddp", "full_shard"):
        model = meshplan.parallelize(
            models.build("own_llama"), {"version": 1, "strategy": strategy}
        )
        sgd = models.optimizer(model)
        inputs, targets = meshplan.local_batch(model, models.batch("own_llama", 0))
        for _ in range(3):
            out.append(meshplan.train_step(model, sgd, inputs, targets, models.loss))
            if strategy == "full_shard" or dist.get_rank() == 0:
                model.eval()
                with torch.no_grad():
                    model(inputs)
                model.train()
        meshplan.full_state_dict(model)
    return out


def test_one_rank_may_evaluate_a_model_that_it_has_whole(pool):
    first, second = pool(2).run(evaluated_alone, timeout=TIMEOUT_S)
    assert first == second


def paused() -> str:
    faults.hurry()
    watchdog.STOPPED_S = 1.0
    with meshplan.guarded():
        dist.barrier()
    for _ in range(60):
        dist.barrier()
        time.sleep(0.05)
    with meshplan.guarded():
        return "went on"


def test_a_job_that_is_paused_and_continued_goes_on(pool):
    pool(2).run(dist.get_rank)
    first, second = (worker.process.pid for worker in pool(2)._workers)

    def pause() -> None:
        """Stop both, so that the first sees the second stopped for as long as it is itself."""
        os.kill(second, signal.SIGSTOP)
        time.sleep(0.3)
        os.kill(first, signal.SIGSTOP)
        time.sleep(2.5)
        os.kill(first, signal.SIGCONT)
        time.sleep(0.2)
        os.kill(second, signal.SIGCONT)

    timer = threading.Timer(1.0, pause)
    timer.start()
    try:
        assert pool(2).run(paused, timeout=TIMEOUT_S) == ["went on"] * 2
    finally:
        timer.join()
        pool(2).close()


def waiting_while_bytes_move() -> tuple[str, float]:
    """What two ranks are told that wait in different collectives, and how late."""
    faults.hurry()
    with meshplan.guarded():
        dist.barrier()
    began = time.monotonic()

    def moving(*unused: Any) -> sockets.Connections:
        return sockets.Connections(int(1000 * min(time.monotonic() - began, SLOW_S)), 0, 1)

    watchdog.traffic = moving
    try:
        with meshplan.guarded():
            if dist.get_rank():
                dist.barrier()
            else:
                dist.all_reduce(torch.ones(1))
    except meshplan.ApplyError as error:
        return str(error), time.monotonic() - began
    return "nothing was raised", 0.0


def test_ranks_that_wait_for_slow_connections_are_let_alone(pool):
    results = pool(2).run(waiting_while_bytes_move, timeout=TIMEOUT_S)
    pool(2).close()
    for text, seconds in results:
        assert "rank 0 in all_reduce (test_watch.py:" in text
        assert "rank 1 in barrier (test_watch.py:" in text
        assert seconds > SLOW_S


def read_slowly() -> None:
    """Read data until the others complain, and a little longer."""
    while guard._job.store.add(guard._job.group_key("notices"), 0) == 0:
        time.sleep(0.05)
    time.sleep(0.5)


def warned() -> list[str]:
    """What is logged on each rank while one of them is slow."""
    faults.hurry()
    watchdog.WARN_S = 0.6
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())
    logging.getLogger("meshplan").addHandler(handler)
    with meshplan.guarded():
        dist.barrier()
    if dist.get_rank() == 1:
        read_slowly()
    dist.barrier()
    return texts


def test_a_long_wait_names_who_is_missing_and_where(pool):
    first, second = pool(2).run(warned, timeout=TIMEOUT_S)
    pool(2).close()
    assert second == []
    assert len(first) == 1
    assert "1 of 2 ranks have waited" in first[0]
    assert "rank 0 in barrier (test_watch.py:" in first[0]
    assert "rank 1 is missing: outside meshplan's functions, at test_watch.py:" in first[0]
    assert "in read_slowly, called from test_watch.py:" in first[0]


def says(**more: Any) -> dict[str, Any]:
    base = {"size": 2, "running": "train_step 3", "last": "train_step 2", "where": "", "waits": "x"}
    return {**base, "groups": [[[0, 1], 7]], **more}


def test_nothing_is_certain_of_a_group_that_others_do_not_know():
    other = says(running="full_state_dict 1")
    assert verdict({0: says(), 1: other}) is not None
    for foreign in ([0, 1, 2], [0]):
        own = says(groups=[[[0, 1], 7], [foreign, 1]])
        is_known = foreign == [0]  # A group of this rank alone.
        assert (verdict({0: own, 1: other}) is None) is not is_known
    assert verdict({0: says(groups=[[[0, 1], 7], [[0, 1], 1]]), 1: other}) is not None
    assert verdict({0: says(groups=[[[1], 1]]), 1: other}) is None


def test_equal_ranks_are_not_said_to_wait_in_vain():
    assert verdict({0: says(), 1: says()}) is None
    assert verdict({0: says(), 1: says(groups=[[[0, 1], 8]])}) is not None


@pytest.mark.parametrize(("steady_s", "is_told"), [(0.0, False), (2 * watchdog.STOPPED_S, True)])
def test_a_rank_that_has_died_is_told_of_once_nothing_moves_for_long(steady_s, is_told):
    """Until then a connection may break, or the rank that ended may have said why."""
    given_up: list[object] = []
    beside = mock.MagicMock()
    beside.__iter__.return_value = iter([1])
    beside.stopped_since.return_value = None
    meeting = mock.Mock(ranks=(0, 1))
    dog = mock.Mock(
        _job=mock.Mock(progress=mock.Mock(verb="train_step", meeting=meeting)), _beside=beside,
        _steady_since=100.0 - steady_s, _can_be_certain=lambda: False, _end_group=given_up.append,
    )  # fmt: skip
    watchdog.Watchdog._look_at_processes(dog, 100.0)
    assert given_up == ([dog._died(1)] if is_told else [])


def test_what_is_under_way_between_ranks_is_seen():
    server = socket.create_server(("127.0.0.1", 0))
    one = socket.create_connection(server.getsockname())
    two, _ = server.accept()
    with server, one, two:
        ends = {d: e for d, e in sockets.own_ends().items() if d in (one.fileno(), two.fileno())}
        table = json.dumps(list(ends.values()))
        quiet = sockets.traffic([table])
        assert quiet is not None
        assert (quiet.num, quiet.waiting_bytes) == (2, 0)
        one.sendall(b"x" * 1000)
        under_way = sockets.traffic([table])
        assert under_way.waiting_bytes >= 1000
        assert two.recv(1000) == b"x" * 1000
        arrived = sockets.traffic([table])
        assert (arrived.moved_bytes - quiet.moved_bytes, arrived.waiting_bytes) == (2000, 0)
        assert not sockets.is_cut_off(table, table)
    assert sockets.is_cut_off(table, table)
