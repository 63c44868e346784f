"""Ranks that meet in a store before the first collective: all of them, or the same error on each.

Which seeded bug would this catch? A rank that waits for another for ever, or longer than rank 0;
an error on one rank only; a second rank 1 that overwrites the first.
"""

from __future__ import annotations

import itertools
import re
import socket
import threading
from dataclasses import replace
from datetime import timedelta

import pytest

from meshplan.errors import ApplyError
from meshplan.launch.environment import LaunchedRank
from meshplan.runtime.base import join as module
from meshplan.runtime.base.join import contradictions, device_index, join

TIMEOUT = timedelta(seconds=1)


@pytest.fixture
def launched(monkeypatch):
    """A function that gives a rank of a job of this test."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    # Every thread is a process that joins its first group.
    monkeypatch.setattr(module, "_joins", itertools.repeat(0))
    monkeypatch.setattr(module, "_SLACK_S", 2.0)
    monkeypatch.setattr(module, "_READ_S", 1.0)
    for name in ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    return lambda rank, world: LaunchedRank(
        launcher="SLURM", rank=rank, world_size=world, local_rank=rank, local_world_size=world,
        host="localhost", port=port, world_size_variable="SLURM_NTASKS",
        local_rank_variable="SLURM_LOCALID", start="start the ranks with srun",
    )  # fmt: skip


def joined(ranks, timeout=TIMEOUT, places=None):
    """The error of each rank, "" for none, after each has joined in a thread."""
    said, stores = [None] * len(ranks), []

    def run(number):
        try:
            stores.append(join(ranks[number], (places or {}).get(number, ""), timeout))
            said[number] = ""
        except ApplyError as error:
            said[number] = str(error)

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(len(ranks))]
    for each in threads:
        each.start()
    for each in threads:
        each.join(20)
    assert None not in said
    return said


def test_all_ranks_join(launched):
    assert joined([launched(rank, 4) for rank in range(4)], timedelta(seconds=20)) == [""] * 4


def test_a_missing_rank_is_named_on_every_rank(launched):
    said = joined([launched(rank, 4) for rank in (0, 1, 3)])
    assert len(set(said)) == 1
    assert "SLURM_NTASKS: rank 2 of 4 did not join within 1 s\n    fix: see if" in said[0]


def test_no_rank_0(launched):
    for said in joined([launched(rank, 3) for rank in (1, 2)]):
        assert re.search(r"MASTER_ADDR: rank [12] of 3 got no answer of rank 0 at localhost", said)


def test_ranks_of_jobs_of_two_sizes(launched):
    ranks = [launched(0, 2), launched(1, 3), launched(2, 3)]
    for said in joined(ranks, timedelta(seconds=20)):
        assert "SLURM_NTASKS: it is 2 on rank 0 but 3 on rank" in said


def test_a_rank_that_the_job_of_rank_0_lacks(launched):
    ranks = [launched(0, 2), launched(1, 2), launched(2, 3)]
    said = joined(ranks, timedelta(seconds=20))
    assert said[:2] == ["", ""]
    assert "SLURM_NTASKS: it is 2 on rank 0 but 3 on rank 2" in said[2]


def test_two_processes_of_one_rank(launched):
    ranks = [launched(rank, 3) for rank in (0, 1, 1)]
    for said in joined(ranks, timedelta(seconds=20)):
        assert "two processes are rank 1" in said


def test_a_port_that_another_program_has(launched):
    with socket.socket() as other:
        other.bind(("localhost", 0))
        other.listen()
        rank = replace(launched(0, 2), port=other.getsockname()[1])
        (said,) = joined([rank])
    assert "MASTER_PORT: rank 0 cannot open port" in said


def test_two_ranks_on_one_device(launched):
    rank = launched(0, 3)
    entries = [
        {"rank": 0, "world_size": 3, "host": "a", "place": "0,1/0"},
        {"rank": 1, "world_size": 3, "host": "b", "place": "0,1/0"},
        {"rank": 2, "world_size": 3, "host": "b", "place": "0,1/0"},
    ]
    (problem,) = contradictions(entries, rank)
    assert str(problem).startswith("SLURM_LOCALID: ranks 1 and 2 use the same device of b")
    assert not list(contradictions([entry | {"place": ""} for entry in entries], rank))


def test_the_device_of_a_rank(launched, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert device_index(None, 1) == 0
    assert device_index(launched(1, 4), 2) == 1
    assert device_index(launched(3, 4), 1) == 0  # srun --gpus-per-task=1
    with pytest.raises(ApplyError, match="SLURM_LOCALID: 3 has no device: this process sees 2, by"):
        device_index(launched(3, 4), 2)
    with pytest.raises(ApplyError, match="LOCAL_RANK: 1 has no device: this process sees 1"):
        device_index(replace(launched(1, 2), local_rank_variable="LOCAL_RANK"), 1)
