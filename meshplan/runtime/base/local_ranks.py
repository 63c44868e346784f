"""Ranks on this machine: real processes that communicate over gloo, as under torchrun on CPUs.

The processes are forked from a server process that has imported torch, so that eight of them start
in tenths of a second. No process outlives the run: all are killed when a rank raises or dies, when
no rank sends anything for two minutes (longer, if a rank announced long work), on Ctrl-C, and when
this process dies.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Final

import torch
import torch.distributed as dist

from meshplan.errors import ApplyError, MeshplanError, Problem

SILENCE_S: Final = 120.0
"""Seconds without a message from any rank before all ranks are ended."""
_PATIENCE: Final = 10.0
"""Factor by which announced work may take longer than expected: the machine may be busy."""
_COLLECTIVE_LIMIT: Final = timedelta(days=1)
"""Longest wait of a rank for the others. Far above every silence, after which ranks are ended."""
_GRACE_S: Final = 1.0
"""Seconds in which other ranks may still report after a failure: theirs may be the cause of it."""

_PRELOAD: Final = (
    "torch.distributed.tensor.parallel",
    "torch.distributed.fsdp",
    "torch.nn.parallel",
    "torch._dynamo",
)

Send = Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class Work:
    """A message of a rank about what it does next, so that the others are given the time for it.

    Args:
        what: The work, as in "a step in one process".
        seconds: The expected seconds.
    """

    what: str
    seconds: float


@dataclass(frozen=True, slots=True)
class _Rank:
    process: BaseProcess
    connection: Connection


def prepare() -> None:
    """Start the process that ranks are forked from, which imports torch in the background.

    `run_ranks` does this itself; an earlier call only saves time.
    """
    # Starting the resource tracker unblocks SIGINT, so it must start before the signal is blocked.
    resource_tracker.ensure_running()
    # The fork server inherits the blocked signal, so Ctrl-C cannot interrupt its imports halfway.
    # In this process a Ctrl-C stays pending until the signal mask is restored.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        multiprocessing.get_context("forkserver").set_forkserver_preload(list(_PRELOAD))
        multiprocessing.forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run_ranks(
    world: int, per_node: int, function: Callable[..., Any], *args: Any
) -> Generator[tuple[int, Any], None, None]:
    """Run `function(send, *args)` on every rank of a new process group.

    Args:
        world: Number of ranks.
        per_node: Number of ranks that count as one node.
        function: A function of an importable module. It is called with torch.distributed
            initialised; each value that it passes to `send` is yielded here. Before work that may
            take minutes, it sends a `Work`.
        args: Further arguments of `function`, which are pickled.

    Yields:
        Pairs (rank, value sent), in the order of arrival, until every rank has returned.

    Raises:
        ApplyError: A rank raised or died, or no rank sent anything for `SILENCE_S` seconds, and
            for 10 times the seconds of the work that the ranks announced last.
    """
    prepare()
    # This process serves the store of the rendezvous: port 0 lets the system choose a free port,
    # and the store survives the death of any rank.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    ranks: list[_Rank] = []
    try:
        for rank in range(world):
            here, there = context.Pipe()
            environment = _environment(rank, world, per_node, store.port)
            process = context.Process(
                target=_work, args=(there, environment, function, args), daemon=True
            )
            process.start()
            there.close()
            ranks.append(_Rank(process, here))
        yield from _listen(ranks)
    finally:
        for each in ranks:
            each.process.kill()
        for each in ranks:
            each.process.join()
            each.connection.close()


def _listen(ranks: list[_Rank]) -> Iterator[tuple[int, Any]]:
    by_connection = {each.connection: number for number, each in enumerate(ranks)}
    failures: dict[int, Problem] = {}
    works: dict[int, Work] = {}
    deadline = time.monotonic() + SILENCE_S
    while by_connection:
        remaining = deadline - time.monotonic()
        ready = wait(list(by_connection), max(0.0, remaining))
        if not ready:
            break
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = by_connection[connection]
            try:
                kind, value = connection.recv()
            except (EOFError, ConnectionResetError):
                ranks[rank].process.join()
                kind, value = "died", ranks[rank].process.exitcode
            if kind == "sent":
                if isinstance(value, Work):
                    works[rank] = value
                yield rank, value
                continue
            del by_connection[connection]
            works.pop(rank, None)
            if kind != "returned":
                failures[rank] = _problem(rank, kind, value)
        if failures:
            deadline = min(deadline, time.monotonic() + _GRACE_S)
        else:
            deadline = time.monotonic() + _silence_s(works)
    if failures:
        # The death of a rank makes the collectives of the others raise, so a death is reported
        # rather than an error, and else the failure of the lowest rank.
        raise ApplyError(
            min(failures.items(), key=lambda item: ("died" not in item[1].what, item[0]))[1]
        )
    if by_connection:
        silent = ", ".join(map(str, sorted(by_connection.values())))
        what = f"ranks {silent} sent no result for {_silence_s(works):.0f} s"
        if works:
            rank, work = max(works.items(), key=lambda item: item[1].seconds)
            what += f"; rank {rank} began {work.what}, which was to take {work.seconds:.1f} s"
        raise ApplyError(Problem(what))


def _silence_s(works: Mapping[int, Work]) -> float:
    """Return the seconds for which all ranks may be silent, by the last announcement of each."""
    return max([SILENCE_S, *(_PATIENCE * work.seconds for work in works.values())])


def _problem(rank: int, kind: str, value: Any) -> Problem:
    if kind == "died":
        how = signal.Signals(-value).name if value and value < 0 else f"exit code {value}"
        fix = "free host memory, which probably ran out" if value == -signal.SIGKILL else ""
        return Problem(f"rank {rank} died ({how})", None, fix)
    return Problem(f"rank {rank} {value}")


def _environment(rank: int, world: int, per_node: int, port: int) -> dict[str, str]:
    """Return the environment variables of a rank: torchrun's, and those that select the CPU."""
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "lo")
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank % per_node),
        "LOCAL_WORLD_SIZE": str(per_node),
        "GROUP_RANK": str(rank // per_node),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": loopback,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


def _work(
    connection: Connection,
    environment: dict[str, str],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """Run one rank and send its values or error to the parent; the main function of its process."""
    begin_child()
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        _join()
        function(lambda value: connection.send(("sent", value)), *args)
        connection.send(("returned", None))
    except MeshplanError as error:
        connection.send(("raised", f"refused:\n{error}"))
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{os.path.basename(frame.filename)}:{frame.lineno}"
        connection.send(("raised", f"raised {type(error).__name__}: {error} ({place})"))
    with contextlib.suppress(OSError, EOFError):
        connection.recv()  # Wait to be killed: other ranks may still use the process group.


def _join() -> None:
    """Join the process group through the store that the parent process serves."""
    timeout = timedelta(seconds=SILENCE_S)
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(host, port, timeout=timeout)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=_COLLECTIVE_LIMIT
    )


def begin_child() -> None:
    """Make this child process end with its parent, ignore Ctrl-C and print to stderr.

    What a model prints goes to stderr, because stdout is reserved for the parent's results.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # The parent may have closed stderr.
        os.dup2(2, 1)
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
