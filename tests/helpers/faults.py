"""One fault on one rank of a training job in real processes, and what every rank tells of it.

A job trains the tests' Llama for some steps, by `train_step` or by hand, and asks for the state
dict in the end. One rank meets with something; all others should end soon, naming it.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import os
import re
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Final

import torch
import torch.distributed as dist

import meshplan
from meshplan.runtime.watch import watchdog
from tests.helpers import models
from tests.helpers.pool import ENVIRONMENT, forkserver

STEPS: Final = 4
START_TIMEOUT_S: Final = 120.0
HANG_S: Final = 30.0
"""How long after a fault a rank that says nothing counts as hanging."""

PLANS: Final[dict[str, Any]] = {
    "ddp": lambda world: {"strategy": "ddp"},
    "full_shard": lambda world: {"strategy": "full_shard"},
    "hybrid": lambda world: {"mesh": {"dp_replicate": 2, "dp_shard": world // 2}},
    "tp": lambda world: {"mesh": {"tp": min(world, 4)}, "rules": models.tp_rules("own_llama")},
    "tp x full_shard": lambda world: {
        "mesh": {"dp_shard": world // 2, "tp": 2},
        "rules": models.tp_rules("own_llama"),
    },
    "pp": lambda world: {
        "mesh": {"pp": 2, "dp_replicate": world // 2},
        "pipeline": {"schedule": "1F1B", "microbatches": 2},
    },
    "pp x full_shard": lambda world: {
        "mesh": {"pp": 2, "dp_shard": world // 2},
        "pipeline": {"schedule": "1F1B", "microbatches": 2},
    },
}


class Mishap(Exception):
    """What goes wrong in a user's code, of a type that nobody else knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One job and its fault.

    Attributes:
        kind: What happens.
        where: At which place of a step.
        plan: A key of `PLANS`.
        by_hand: Whether the loop is written by hand.
        world: How many ranks there are.
        culprit: The rank on which it happens.
        step: In which step, from 0.
        holds_store: Whether rank 0 serves the store, as without torchrun.
        in_haste: Whether the watchdogs look more often than in earnest.
    """

    kind: str
    where: str = ""
    plan: str = "full_shard"
    by_hand: bool = False
    world: int = 2
    culprit: int = 1
    step: int = 1
    holds_store: bool = False
    in_haste: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a rank: how it ended, its words, and how long after the fault."""

    how: str
    text: str
    seconds: float


def run(case: Case) -> dict[int, Outcome]:
    """Every rank's end; one that was stopped or killed has none."""
    os.environ.update(ENVIRONMENT)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(not case.holds_store)
    store = None
    if not case.holds_store:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks: dict[Connection, int] = {}
    processes: list[BaseProcess] = []
    context = forkserver()
    handle, path = tempfile.mkstemp(prefix="port-")
    os.close(handle)
    for rank in range(case.world):
        here, there = context.Pipe()
        port = store.port if store is not None else path
        process = context.Process(target=_rank, args=(case, rank, port, there), daemon=True)
        process.start()
        there.close()
        ranks[here] = rank
        processes.append(process)
    try:
        return _collect(case, ranks)
    finally:
        for process in processes:
            process.kill()
            process.join()
        os.unlink(path)
        del store


def _collect(case: Case, ranks: dict[Connection, int]) -> dict[int, Outcome]:
    out: dict[int, Outcome] = {}
    fault = 0.0
    deadline = time.monotonic() + START_TIMEOUT_S
    open_ends = dict(ranks)
    while len(out) < case.world and time.monotonic() < deadline:
        for ready in wait(list(open_ends), 0.2):
            assert isinstance(ready, Connection)
            rank = open_ends[ready]
            try:
                kind, text, at = ready.recv()
            except (EOFError, ConnectionResetError):
                del open_ends[ready]
                out.setdefault(rank, Outcome("died", "", time.monotonic() - fault))
                continue
            if kind == "fault":
                fault = at
                deadline = fault + HANG_S
            else:
                out[rank] = Outcome(kind, text, at - (fault or at))
        is_stopped = case.kind == "stop" and case.culprit not in out
        if is_stopped and len(out) == case.world - 1:
            break
    for rank in range(case.world):
        if rank not in out and not (case.kind == "stop" and rank == case.culprit):
            out[rank] = Outcome("hangs", "", HANG_S)
    return out


def _rank(case: Case, rank: int, port: int | str, connection: Connection) -> None:
    os.environ.update(ENVIRONMENT, TORCHELASTIC_USE_AGENT_STORE=str(not case.holds_store))
    torch.set_num_threads(1)
    if case.in_haste:
        hurry()
    threading.excepthook = lambda told: os.write(2, str(told.exc_value).encode())
    is_path = isinstance(port, str)
    store = _own_store(port, rank) if is_path else dist.TCPStore("127.0.0.1", port)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=case.world,
        timeout=datetime.timedelta(seconds=HANG_S * 4),
    )
    _wait_for_all(case, rank, store)
    try:
        text = _Program(case, rank, connection).run()
    except BaseException as error:
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            sys.excepthook(type(error), error, error.__traceback__)
        connection.send(("error", said.getvalue(), time.monotonic()))
        raise SystemExit(1) from None
    connection.send(("ended", text, time.monotonic()))


def _wait_for_all(case: Case, rank: int, store: dist.Store) -> None:
    """Let the culprit go on when all others are out of `init_process_group`.

    In there torch waits for the store by itself, and nothing of meshplan runs that could tell.
    """
    store.add("begun", 1)
    while rank == case.culprit and store.add("begun", 0) < case.world:
        time.sleep(0.01)


def hurry() -> None:
    """Let the watchdog of this process look more often."""
    watchdog.TICK_S, watchdog.STILL_S, watchdog.STOPPED_S = 0.1, 0.5, 0.5


def _own_store(path: str, rank: int) -> dist.Store:
    """A store that rank 0 serves, whose port the others read in a file."""
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        with open(path, "w") as file:
            file.write(f"{store.port}\n")
        return store
    while True:
        with open(path) as file:
            if (text := file.read()).endswith("\n"):
                return dist.TCPStore("127.0.0.1", int(text))
        time.sleep(0.01)


class _Program:
    """The script of one rank."""

    def __init__(self, case: Case, rank: int, connection: Connection) -> None:
        self.case, self.rank, self.connection = case, rank, connection
        self.is_culprit = rank == case.culprit
        self.step = -1

    def happens(self, where: str) -> bool:
        """Whether the fault is here; tells the parent so."""
        case = self.case
        is_before = case.kind == "configuration" or where in ("start", "guard")
        step = -1 if is_before else case.step
        is_here = self.is_culprit and where == case.where and self.step == step
        if is_here:
            self.connection.send(("fault", "", time.monotonic()))
        return is_here

    def mishap(self, where: str) -> None:
        """Die, stop or raise, if that is the fault and this is the place."""
        if self.case.kind not in ("kill", "stop", "raise") or not self.happens(where):
            return
        if self.case.kind == "raise":
            raise Mishap(f"in {where}")
        os.kill(os.getpid(), signal.SIGKILL if self.case.kind == "kill" else signal.SIGSTOP)

    def loss(self, output: Any, targets: torch.Tensor) -> torch.Tensor:
        self.mishap("loss")
        if self.case.kind in ("kill", "stop", "raise") and self.case.where == "backward":
            output = _Backward.apply(output, self)
        out = models.loss(output, targets)
        return out * float("nan") if self.case.kind == "nan" and self.happens("loss") else out

    def run(self) -> str:
        case = self.case
        plan = {"version": 1, **PLANS[case.plan](case.world)}
        if self.happens("plan"):
            plan["activation_checkpointing"] = "full"
        seed = 7 if self.happens("seed") else 0
        torch.manual_seed(seed)
        self.mishap("start")
        with meshplan.guarded():
            dist.barrier()
            self.mishap("guard")
        name = "gpt2" if self.happens("model") else "own_llama"
        model = meshplan.parallelize(models.build(name, seed), plan)
        root = next(iter(model.stages.values())) if hasattr(model, "stages") else model
        root = root.module if hasattr(root, "module") else root
        root.layers[0].register_forward_pre_hook(lambda *unused: self.mishap("model"))
        sgd = models.optimizer(model)
        sgd.register_step_pre_hook(lambda *unused: self.mishap("optimizer"))
        for self.step in range(STEPS):
            if self.happens("leave"):
                return "left"
            if self.happens("end of loop"):
                break
            self.mishap("data")
            batch = meshplan.local_batch(model, models.batch("own_llama", self.step))
            if self.happens("size"):
                batch = tuple(part[:1] for part in batch)
            self.other_verb(model, batch)
            self.train(model, sgd, *batch)
        self.mishap("state")
        meshplan.full_state_dict(model)
        return "trained"

    def other_verb(self, model: torch.nn.Module, batch: Any) -> None:
        if self.happens("full_state_dict"):
            meshplan.full_state_dict(model)
        if self.happens("barrier"):
            dist.barrier()
        if self.happens("evaluation"):
            model.eval()
            with torch.no_grad():
                if hasattr(model, "eval_step"):
                    model.eval_step(batch[0])
                else:
                    model(batch[0])
            model.train()

    def train(
        self, model: Any, sgd: torch.optim.Optimizer, inputs: torch.Tensor, targets: torch.Tensor
    ) -> None:
        if not self.case.by_hand:
            meshplan.train_step(model, sgd, inputs, targets, self.loss)
            return
        if hasattr(model, "stages"):
            model.step(inputs, targets, self.loss)
        else:
            self.loss(model(inputs), targets).backward()
        sgd.step()
        sgd.zero_grad()


class _Backward(torch.autograd.Function):
    """The identity, in whose backward the fault is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, program: _Program) -> torch.Tensor:
        ctx.program = program
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.program.mishap("backward")
        return gradient, None


def names(text: str, rank: int) -> bool:
    """Whether a text speaks of a rank, alone or in a row."""
    rows = re.findall(r"ranks? ((?:\d+, )*\d+(?: and \d+)?)", text)
    return any(str(rank) in re.findall(r"\d+", row) for row in rows)
