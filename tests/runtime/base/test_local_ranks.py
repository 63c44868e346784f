"""The demo's processes: what each failure says, and that nobody is left."""

from __future__ import annotations

import multiprocessing.forkserver
import os
import signal
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch.distributed as dist

from meshplan.errors import ApplyError, PlanError, Problem
from meshplan.runtime.base import local_ranks
from meshplan.runtime.base.local_ranks import Work, run_ranks

Send = Callable[[Any], None]


def who(send: Send, greeting: str) -> None:
    total = [None] * dist.get_world_size()
    dist.all_gather_object(total, os.getpid())
    places = tuple(os.environ[name] for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"))
    send((greeting, dist.get_rank(), *places))
    send(len(set(total)))


def fail(send: Send, how: str) -> None:
    send(os.getpid())
    if dist.get_rank() == 1:
        if how == "dies":
            os._exit(3)
        if how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "refuses":
            raise PlanError(Problem("this does not fit", None, "change it"))
        if how == "raises":
            raise ValueError("out of luck")
    if how in ("dies", "is killed", "raises"):
        dist.barrier()
    if how == "stops working":
        send(Work("a step of the model", 0.5))
    if how in ("is silent", "stops working"):
        time.sleep(60)


def work(send: Send, seconds: float) -> None:
    if dist.get_rank() == 0:
        send(Work("a long sum", seconds))
        time.sleep(seconds)
    dist.barrier()
    send(dist.get_rank())


def test_every_rank_knows_its_place():
    with closing(run_ranks(4, 2, who, "hello")) as messages:
        got = list(messages)
    places = sorted(message for _, message in got if isinstance(message, tuple))
    assert places == [("hello", rank, str(rank % 2), "2", str(rank // 2)) for rank in range(4)]
    assert sorted(rank for rank, message in got if message == 4) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("dies", "meshplan: 1 problem\nrank 1 died (exit code 3)"),
        (
            "is killed",
            "meshplan: 1 problem\nrank 1 died (SIGKILL)\n"
            "    fix: free host memory, which probably ran out",
        ),
        (
            "raises",
            "meshplan: 1 problem\nrank 1 raised ValueError: out of luck (test_local_ranks.py",
        ),
        (
            "refuses",
            "meshplan: 1 problem\nrank 1 refused:\nmeshplan: 1 problem\nthis does not fit\n"
            "    fix: change it",
        ),
        ("is silent", "meshplan: 1 problem\nranks 0, 1 sent no result for 3 s"),
        # Which of the two ranks is named depends on which began last.
        ("stops working", "meshplan: 1 problem\nranks 0, 1 sent no result for 5 s; rank "),
    ],
)
def test_one_bad_rank_ends_all(monkeypatch, how, message):
    is_silent = how in ("is silent", "stops working")
    monkeypatch.setattr(local_ranks, "SILENCE_S", 3.0 if is_silent else 60.0)
    began = time.monotonic()
    pids: list[int] = []
    with pytest.raises(ApplyError) as caught:
        pids.extend(pid for _, pid in run_ranks(2, 2, fail, how) if isinstance(pid, int))
    assert str(caught.value).startswith(message)
    if how == "stops working":
        assert "began a step of the model, which was to take 0.5 s" in str(caught.value)
    assert time.monotonic() - began < 30
    assert len(pids) == 2
    assert not any(is_alive(pid) for pid in pids)


def test_ranks_wait_for_work_that_one_of_them_announces(monkeypatch):
    with closing(run_ranks(2, 2, work, 2.0)) as messages:
        assert next(messages) == (0, Work("a long sum", 2.0))
        monkeypatch.setattr(local_ranks, "SILENCE_S", 0.1)
        assert sorted(messages) == [(0, 0), (1, 1)]


def test_leaving_early_ends_all():
    messages = run_ranks(2, 2, fail, "is silent")
    pids = [next(messages)[1], next(messages)[1]]
    assert all(is_alive(pid) for pid in pids)
    messages.close()
    assert not any(is_alive(pid) for pid in pids)


def is_alive(pid: int) -> bool:
    """Whether the process still runs; one that waits to be reaped does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_an_interrupt_while_ranks_are_prepared_is_not_lost(monkeypatch):
    def interrupted() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)

    monkeypatch.setattr(multiprocessing.forkserver, "ensure_running", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            local_ranks.prepare()
    finally:
        signal.signal(signal.SIGINT, before)
