"""The ranks of a job meet in a store before the first collective, and find out who is missing.

Each rank writes into the store what it is. Rank 0 reads all of it and writes one verdict, which
every rank reads: the job is whole, or the same problem for all. torch alone would leave each rank
with a time-out of its own, which names no rank.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist

from meshplan.errors import ApplyError, Origin, Problem
from meshplan.launch.environment import LaunchedRank

_POLL_S: Final = 0.05
"""Seconds between two looks of rank 0 into the store."""
_SLACK_S: Final = 10.0
"""Seconds that the other ranks wait longer than rank 0, for its verdict."""
_READ_S: Final = 3.0
"""Seconds that rank 0 stays after a problem, so that ranks that are a little late read it too: the
store ends with rank 0."""
_MOST_NAMED: Final = 8
"""Ranks that a message names."""

_joins = itertools.count()
"""Number of groups that this process has joined; all ranks join the same ones in turn."""


def device_index(launched: LaunchedRank | None, num_devices: int) -> int:
    """Return the index of this rank's device among those that this process sees.

    Raises:
        ApplyError: The machine has more ranks than devices.
    """
    index = launched.local_rank if launched is not None else 0
    if index < num_devices:
        return index
    assert launched is not None
    if num_devices == 1 and launched.local_rank_variable != "LOCAL_RANK":
        return 0  # As with srun --gpus-per-task=1, where each task sees its own device only.
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    what = f"{index} has no device: this process sees {num_devices}"
    what += f", by CUDA_VISIBLE_DEVICES={seen}" if seen is not None else ""
    fix = f"start {num_devices} ranks on each machine, or let each see as many devices as ranks"
    raise ApplyError(Problem(what, Origin(launched.local_rank_variable), fix))


def join(launched: LaunchedRank, place: str, timeout: timedelta) -> dist.Store:
    """Return the store of the job, once every rank has joined it.

    Args:
        launched: This rank.
        place: This rank's device on its machine; "" for the CPU.
        timeout: Longest time to wait for the other ranks.

    Raises:
        ApplyError: A rank is missing, or the ranks contradict each other. All ranks raise the same.
    """
    # torchrun's store outlives its ranks. After a restart it still has the addresses of the ranks
    # before, to which gloo would connect. Therefore all keys of a group have a prefix of their own.
    attempt = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{next(_joins)}"
    store = dist.PrefixStore(f"meshplan/group/{attempt}", _connect(launched, timeout))
    entry = {
        "rank": launched.rank,
        "world_size": launched.world_size,
        "host": socket.gethostname(),
        "place": place,
    }
    try:
        if store.add(f"join/taken/{launched.rank}", 1) > 1:
            what = f"two processes are rank {launched.rank}, the second on {entry['host']}"
            _decide(store, launched, [Problem(what, fix=f"{launched.start}, once")])
        else:
            store.set(f"join/rank/{launched.rank}", json.dumps(entry))
            store.add("join/count", 1)
            if launched.rank == 0:
                _judge(store, launched, timeout)
        store.wait(["join/verdict"], timeout + timedelta(seconds=_SLACK_S))
        verdict = json.loads(store.get("join/verdict"))
    except dist.DistError as error:
        raise ApplyError(_no_answer(launched, timeout)) from error
    problems = [
        Problem(what, Origin(variable) if variable else None, fix)
        for what, variable, fix in verdict["problems"]
    ] or list(_other_size(launched, verdict["world_size"]))
    if problems:
        if _serves(launched):
            time.sleep(_READ_S)
        raise ApplyError(problems)
    return store


def _serves(launched: LaunchedRank) -> bool:
    """Return True if this process serves the store: rank 0, unless torchrun does."""
    return launched.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _connect(launched: LaunchedRank, timeout: timedelta) -> dist.Store:
    """Return a connection to the store, which rank 0 serves unless torchrun does."""
    is_server = _serves(launched)
    try:
        return dist.TCPStore(
            launched.host, launched.port, launched.world_size, is_server, timeout,
            wait_for_workers=False, multi_tenant=True,
        )  # fmt: skip
    except (dist.DistError, RuntimeError) as error:
        if is_server:
            what = f"rank 0 cannot open port {launched.port} on {launched.host}: "
            what += str(error).splitlines()[0]
            fix = "end the other job on this port, or set another MASTER_PORT for every rank; "
            fix += "MASTER_ADDR must be the machine of rank 0"
            raise ApplyError(Problem(what, Origin("MASTER_PORT"), fix)) from error
        raise ApplyError(_no_answer(launched, timeout)) from error


def _no_answer(launched: LaunchedRank, timeout: timedelta) -> Problem:
    what = f"rank {launched.rank} of {launched.world_size} got no answer of rank 0 at "
    what += f"{launched.host}:{launched.port} within {timeout.total_seconds():.0f} s"
    fix = "see the log of rank 0, and if it was started; MASTER_ADDR and MASTER_PORT must name its "
    return Problem(what, Origin("MASTER_ADDR"), f"{fix}machine and a port that is open")


def _judge(store: dist.Store, launched: LaunchedRank, timeout: timedelta) -> None:
    """Read what every rank is, as it comes, and write the verdict; called by rank 0."""
    deadline = time.monotonic() + timeout.total_seconds()
    entries: dict[int, dict[str, Any]] = {}
    missing = set(range(launched.world_size))
    while missing and not store.check(["join/verdict"]):
        if store.add("join/count", 0) > len(entries):
            for rank in [each for each in missing if store.check([f"join/rank/{each}"])]:
                missing.remove(rank)
                entries[rank] = json.loads(store.get(f"join/rank/{rank}"))
            if problems := list(contradictions(entries.values(), launched)):
                return _decide(store, launched, problems)
        elif time.monotonic() > deadline:
            problem = _missing(missing, launched, timeout)
            return _decide(store, launched, [problem])
        else:
            time.sleep(_POLL_S)
    _decide(store, launched, [])


def _decide(store: dist.Store, launched: LaunchedRank, problems: Iterable[Problem]) -> None:
    """Write the verdict, unless there is one."""
    told = [(each.what, each.origin.file if each.origin else "", each.fix) for each in problems]
    verdict = {"world_size": launched.world_size, "problems": told}
    store.compare_set("join/verdict", "", json.dumps(verdict))


def contradictions(
    entries: Iterable[Mapping[str, Any]], launched: LaunchedRank
) -> Iterator[Problem]:
    """Yield a problem for each rank that has another world size, or another rank's device."""
    rank_at: dict[tuple[str, str], int] = {}
    for entry in entries:
        rank, size = entry["rank"], entry["world_size"]
        if size != launched.world_size:
            what = f"it is {launched.world_size} on rank {launched.rank} but {size} on rank {rank}"
            yield Problem(what, Origin(launched.world_size_variable), launched.start)
        at = entry["host"], entry["place"]
        other = rank_at.setdefault(at, rank) if entry["place"] else rank
        if other != rank:
            what = f"ranks {other} and {rank} use the same device of {entry['host']}"
            fix = "give each rank of a machine its own LOCAL_RANK, counting from 0"
            yield Problem(what, Origin(launched.local_rank_variable), fix)


def _other_size(launched: LaunchedRank, world_size: int) -> Iterator[Problem]:
    """Yield the problem of a rank that does not count in the job of rank 0."""
    if world_size != launched.world_size:
        what = f"it is {world_size} on rank 0 but {launched.world_size} on rank {launched.rank}"
        yield Problem(what, Origin(launched.world_size_variable), launched.start)


def _missing(missing: Iterable[int], launched: LaunchedRank, timeout: timedelta) -> Problem:
    what = f"{_spell(sorted(missing))} of {launched.world_size} did not join within "
    what += f"{timeout.total_seconds():.0f} s"
    fix = f"see if they were started, and their logs; {launched.world_size_variable} is "
    fix += f"{launched.world_size}, and as many processes must be started: {launched.start}"
    return Problem(what, Origin(launched.world_size_variable), fix)


def _spell(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    named = ", ".join(map(str, ranks[:_MOST_NAMED]))
    return f"ranks {named}" + (f" and {len(ranks) - _MOST_NAMED} more" * (len(ranks) > _MOST_NAMED))
