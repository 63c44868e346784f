"""The pool tells which rank failed and how, never hangs, and works again afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.helpers.pool import JOBS_PER_WORKER, Pool, PoolError

ROOT = Path(__file__).resolve().parent.parent


def rank_and_sum(value: int) -> tuple[int, float]:
    total = torch.tensor(float(value + dist.get_rank()))
    dist.all_reduce(total)
    return dist.get_rank(), total.item()


def draw() -> float:
    return torch.rand(()).item()


def process_id() -> int:
    return os.getpid()


def raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"bad luck on {rank}")
    dist.barrier()


def raise_everywhere() -> None:
    raise ValueError("the same everywhere")


def sleep_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(60)


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def return_a_lambda() -> object:
    return lambda: None


def works(pool: Pool) -> bool:
    return pool.run(rank_and_sum, 1) == [(0, 3.0), (1, 3.0)]


@pytest.fixture
def pair(pool):
    return pool(2)


def test_results_come_back_by_rank(pair):
    assert pair.run(rank_and_sum, value=10) == [(0, 21.0), (1, 21.0)]


def test_every_job_starts_from_the_same_seed_in_the_same_processes(pair):
    pair.close()  # Else these may be the jobs after which processes are started anew.
    first, ids = pair.run(draw), pair.run(process_id)
    assert first == pair.run(draw)
    assert ids == pair.run(process_id)
    assert len(set(ids)) == 2


def test_a_raising_rank_is_named_first_and_the_waiting_one_shows_where_it_waits(pair):
    with pytest.raises(PoolError) as error:
        pair.run(raise_on, 1)
    head, _, rest = str(error.value).partition("--- rank 1:\n")
    assert head == "tests.test_pool.raise_on failed on 2 ranks\n"
    failure, _, hang = rest.partition("--- rank 0 hung, killed after 1.")
    assert failure.endswith("ValueError: bad luck on 1\n")
    assert "in raise_on" in hang
    assert works(pair)


def test_equal_failures_are_told_once(pair):
    with pytest.raises(PoolError) as error:
        pair.run(raise_everywhere)
    assert str(error.value).count("ValueError: the same everywhere") == 1
    assert sum(f"--- ranks {names}:" in str(error.value) for names in ("0, 1", "1, 0")) == 1


def test_a_hanging_rank_is_killed_in_time_and_shows_where_it_hung(pair):
    assert works(pair)
    began = time.monotonic()
    with pytest.raises(PoolError, match=r"rank 0 hung, killed after 1\.\d s") as error:
        pair.run(sleep_on, 0, timeout=1.0)
    assert time.monotonic() - began < 10
    assert "in sleep_on" in str(error.value)
    assert "rank 1" not in str(error.value)
    assert works(pair)


def test_a_killed_rank_is_told_by_its_exit_code(pair):
    with pytest.raises(PoolError, match="--- rank 1:\ndied with exit code -9"):
        pair.run(die_on, 1)
    assert works(pair)


def test_what_cannot_be_pickled_fails_without_a_hang(pair):
    with pytest.raises(PoolError, match="return_a_lambda"):
        pair.run(return_a_lambda)
    with pytest.raises((AttributeError, TypeError), match=r"pickle|local object"):
        pair.run(lambda: None)
    assert works(pair)


def test_old_workers_are_replaced(pair):
    ids = pair.run(process_id)
    for _ in range(JOBS_PER_WORKER):
        last = pair.run(process_id)
    assert set(ids).isdisjoint(last)


@pytest.mark.parametrize(
    "how", [pytest.param(signal.SIGINT, marks=pytest.mark.wide), signal.SIGKILL]
)
def test_workers_end_with_their_parent(how):
    script = textwrap.dedent(
        """
        from tests.helpers.pool import Pool
        from tests.test_pool import process_id, sleep_on
        if __name__ == "__main__":
            pool = Pool(2)
            print(*pool.run(process_id), flush=True)
            pool.run(sleep_on, 0)
        """
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert parent.stdout is not None
    workers = [int(word) for word in parent.stdout.readline().split()]
    time.sleep(0.2)
    parent.send_signal(how)
    parent.wait(timeout=10)
    deadline = time.monotonic() + 5
    while (alive := [pid for pid in workers if is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(workers) == 2
    assert not alive


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")  # where there is one, a zombie counts as dead
    return not (stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z")
