"""Real processes for the tests: one persistent pool of gloo ranks per world size.

`Pool(4).run(function, *args)` calls a module-level function on four ranks that have a process
group already, and returns their four results. Workers come from a forkserver that imported
torch once, so a pool starts in tenths of a second and a job costs about a millisecond.

An exception, a death or a time-out on any rank fails the job with the story of every rank; the
workers are then killed and the next job starts fresh ones. Workers never outlive the tests.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import multiprocessing.context
import os
import pickle
import random
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

TIMEOUT_S = 60.0
START_TIMEOUT_S = 120.0
GRACE_S = 1.0
"""How long the other ranks may still report after the first one failed."""
JOBS_PER_WORKER = 40
"""A job leaves about 15 sockets and 9 threads per device mesh behind; fresh workers have none."""

PRELOAD = (
    "torch.distributed.tensor.parallel",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "torch.nn.parallel",
    "torch.distributed.pipelining",
    "transformers.models.llama.modeling_llama",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.t5.modeling_t5",
    "transformers.models.vit.modeling_vit",
    "networkx",
    "meshplan.runtime.parallelize",
    "meshplan.runtime.fake_step.step",
    "torch.profiler",
    "pytest",
    "tests.helpers.parity",
)
"""What most jobs import, themselves or with the file of the test that they stand in."""
ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
DIED = "died with exit code "


def forkserver() -> multiprocessing.context.ForkServerContext:
    """Where processes of tests start from: it has imported already what they need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    return context


class PoolError(AssertionError):
    """A job failed on at least one rank; the message tells what each rank did."""


@dataclass
class Worker:
    """One rank as the parent sees it."""

    process: BaseProcess
    connection: Connection
    stack: Path

    def where(self) -> str:
        """The Python stack the process stands in now, "" if it does not answer."""
        self.stack.write_text("")
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid or 0, signal.SIGUSR1)
        deadline = time.monotonic() + 5.0
        # Frame by frame it is written: whole when the outermost one, or the cut, is there.
        whole = ("in <module>\n", "...\n")
        while not self.stack.read_text().endswith(whole) and time.monotonic() < deadline:
            time.sleep(0.02)
        return self.stack.read_text()


class Pool:
    """`world` processes that run one job at a time, all of them together.

    Args:
        world: Number of ranks.
        grace_s: Seconds that the other ranks have to end by themselves after one has failed.
    """

    def __init__(self, world: int, grace_s: float = GRACE_S) -> None:
        self.world, self.grace_s = world, grace_s
        self._workers: list[Worker] = []
        self._jobs = 0

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT_S, **kwargs: Any
    ) -> list[Any]:
        """Call `function(*args, **kwargs)` on every rank.

        Args:
            function: A module-level function of an importable module. `torch.distributed` is
                initialised, torch's random seed is 0, there is one thread.
            timeout: Seconds until ranks that have not answered are killed.

        Returns:
            What each rank returned, by rank.

        Raises:
            PoolError: If a rank raised, died, or did not answer in time.
        """
        job = pickle.dumps((function, args, kwargs))
        if self._jobs >= JOBS_PER_WORKER:
            self.close()
        try:
            if not self._workers:
                self._start()
            self._jobs += 1
            for worker in self._workers:
                # A rank that is already dead is told by its silence.
                with contextlib.suppress(OSError):
                    worker.connection.send_bytes(job)
            return self._collect(f"{function.__module__}.{function.__qualname__}", timeout)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kill the workers, whatever they are doing."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.connection.close()
            worker.stack.unlink()
        self._workers, self._jobs = [], 0

    def _start(self) -> None:
        from torch.distributed import TCPStore

        os.environ.update(ENVIRONMENT)
        context = forkserver()
        # The parent serves the rendezvous: no port is guessed and no rank's death takes it along.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.world):
            here, there = context.Pipe()
            handle, stack = tempfile.mkstemp(prefix=f"rank{rank}-")
            os.close(handle)
            process = context.Process(
                target=_work,
                args=(rank, self.world, self._store.port, there, stack),
                daemon=True,
            )
            process.start()
            there.close()
            self._workers.append(Worker(process, here, Path(stack)))
        self._collect("the start of the pool", START_TIMEOUT_S)

    def _collect(self, name: str, timeout: float) -> list[Any]:
        """Wait for one answer per rank; raise if any of them is not a result."""
        ranks = {worker.connection: rank for rank, worker in enumerate(self._workers)}
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        began = time.monotonic()
        deadline = began + timeout
        while ranks and (remaining := deadline - time.monotonic()) > 0:
            for ready in wait(list(ranks), remaining):
                assert isinstance(ready, Connection)
                rank = ranks.pop(ready)
                try:
                    is_result, value = pickle.loads(ready.recv_bytes())
                except (EOFError, ConnectionResetError):
                    self._workers[rank].process.join()
                    code = self._workers[rank].process.exitcode
                    stack = self._workers[rank].stack.read_text()
                    is_result, value = False, f"{DIED}{code}\n{stack}"
                (results if is_result else failures)[rank] = value
            if failures:
                deadline = min(deadline, time.monotonic() + self.grace_s)
                if not ranks:
                    break
        if failures or ranks:
            waited = time.monotonic() - began
            hung = {rank: self._workers[rank].where() for rank in ranks.values()}
            raise PoolError(_story(name, self.world, waited, failures, hung))
        return [results[rank] for rank in range(self.world)]


def _story(
    name: str, world: int, waited_s: float, failures: dict[int, str], hung: dict[int, str]
) -> str:
    """What every rank did: deaths, then exceptions as they came, equal ones folded, then hangs.

    A rank that died makes the collectives of the others raise: its death is the cause.
    """
    lines = [f"{name} failed on {world} ranks"]
    by_text: dict[str, list[int]] = {}
    for rank, text in sorted(failures.items(), key=lambda item: not item[1].startswith(DIED)):
        by_text.setdefault(text, []).append(rank)
    for text, ranks in by_text.items():
        lines += [f"--- {_name(ranks)}:", text.rstrip()]
    for rank, stack in hung.items():
        lines += [f"--- {_name([rank])} hung, killed after {waited_s:.1f} s:", stack.rstrip()]
    return "\n".join(lines)


def _name(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _work(rank: int, world: int, port: int, connection: Connection, stack: str) -> None:
    """The life of a worker: join the process group, then answer jobs until it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=_die_with_parent, daemon=True).start()
    with open(stack, "a") as file:
        faulthandler.enable(file)  # a crash in compiled code says where Python stood
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=False)
        os.environ.update(
            ENVIRONMENT,
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        _answer(connection, lambda: _join(rank, world, port))
        while True:
            try:
                job = connection.recv_bytes()
            except EOFError:
                return
            _answer(connection, lambda job=job: _do(job))


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _join(rank: int, world: int, port: int) -> None:
    import torch

    torch.set_num_threads(1)
    gc.freeze()  # what the forkserver imported is never garbage: spares 0.1 s a job
    torch.distributed.init_process_group(
        "gloo",
        store=torch.distributed.TCPStore("127.0.0.1", port),
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=TIMEOUT_S),
    )


def _do(job: bytes) -> Any:
    import torch

    gc.collect()  # wrapped models are full of cycles: the last job's would stay until now
    torch.manual_seed(0)
    random.seed()  # anew from the system on every rank, also after a job that seeded it
    function, args, kwargs = pickle.loads(job)
    return function(*args, **kwargs)


def _answer(connection: Connection, call: Callable[[], Any]) -> None:
    try:
        answer = pickle.dumps((True, call()))
    except Exception:
        answer = pickle.dumps((False, traceback.format_exc()))
    connection.send_bytes(answer)
