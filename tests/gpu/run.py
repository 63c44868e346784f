"""One call of `python -m tests.gpu`: its rows, its deadline, and the processes it starts."""

from __future__ import annotations

import json
import multiprocessing
import os
import queue
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]


@dataclass
class Run:
    """One call of the command: its device, its deadline and what it has found so far.

    Args:
        device: "cpu" or "cuda".
        gpu: Name of the GPU in meshplan's table; "" for a CPU.
        size: Size of the models, `full` or `tiny`.
        memory_jobs: Most models whose memory is measured at the same time.
        out: The JSON file.
        deadline: When to stop, in seconds of `time.monotonic`.
        head: What was measured on: device, versions.
    """

    device: str
    gpu: str
    size: str
    memory_jobs: int
    out: Path
    deadline: float
    head: dict[str, Any]
    rows: dict[str, list[Row]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def memory_bytes(self) -> float:
        """Bytes of the device that runs at the same time may use together."""
        if self.device == "cpu":
            return float("inf")
        import torch

        return 0.92 * torch.cuda.mem_get_info()[1]

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    def note(self, section: str, row: Row) -> None:
        """Write a row to the file and print it."""
        with self._lock:
            self.rows.setdefault(section, []).append(row)
            self.out.parent.mkdir(parents=True, exist_ok=True)
            self.out.write_text(json.dumps({**self.head, "sections": self.rows}, indent=1) + "\n")
            print(f"{section}: {line_of(row)}", flush=True)


class Room:
    """Memory that several runs share; a run waits until its part is free.

    Args:
        size: Bytes in all.
    """

    def __init__(self, size: float) -> None:
        self._size = self._free = size
        self._changed = threading.Condition()

    @contextmanager
    def of(self, size: float) -> Iterator[None]:
        """Hold a part of the memory inside the `with` block."""
        part = min(size, self._size)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= part)
            self._free -= part
        try:
            yield
        finally:
            with self._changed:
                self._free += part
                self._changed.notify_all()


class Workers:
    """Processes that call one function after another, so that each imports torch only once.

    Args:
        num: Number of processes.
        cuda: If False, they see no GPU.
    """

    def __init__(self, num: int, *, cuda: bool = True) -> None:
        self._cuda = cuda
        self._free: queue.Queue[tuple[Any, Any] | None] = queue.Queue()
        for _ in range(num):
            self._free.put(None)  # Started when it is needed.

    def call(self, function: Callable[..., Any], *args: Any, seconds: float) -> Any:
        """Call a function of a module in a free process.

        Returns:
            Its result, or a string that says how it failed. A process that is stopped or has died
            is replaced.
        """
        begin = time.monotonic()
        worker = self._free.get()
        left = seconds - (time.monotonic() - begin)
        if left <= 0:
            self._free.put(worker)
            return "stopped: no time was left"
        process, connection = worker or self._start()
        worker = None
        try:
            connection.send((function, args))
            if not connection.poll(left):
                return "stopped: no time was left"
            answer = connection.recv()
            worker = process, connection
            return answer
        except (EOFError, OSError):
            process.join()
            return f"the process died with exit code {process.exitcode}"
        finally:
            if worker is None:
                process.kill()
                process.join()
            self._free.put(worker)

    def _start(self) -> tuple[Any, Any]:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(target=_work, args=(there, self._cuda), daemon=True)
        process.start()
        there.close()
        return process, here

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        """End the processes. All calls must have returned."""
        while not self._free.empty():
            if (worker := self._free.get()) is not None:
                worker[0].kill()
                worker[0].join()


def _work(connection: Any, cuda: bool) -> None:
    warnings.simplefilter("ignore")
    if not cuda:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    while True:
        try:
            function, args = connection.recv()
        except EOFError:
            return
        try:
            answer = function(*args)
        except BaseException:
            answer = traceback.format_exc()
        connection.send(answer)


def apart(function: Callable[..., Any], *args: Any, seconds: float, cuda: bool = True) -> Any:
    """Call a function in a process of its own; return its result, or a string with the failure.

    Args:
        function: A function of a module.
        args: Its arguments.
        seconds: When to kill the process.
        cuda: If False, the process sees no GPU.
    """
    with Workers(1, cuda=cuda) as workers:
        return workers.call(function, *args, seconds=seconds)


def stream(function: Callable[..., Any], *args: Any, seconds: float) -> Iterator[Any]:
    """Call `function(send, *args)` in a process of its own and yield what it sends.

    If the process dies or does not end in time, the last value is a string that says so.
    """
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_streamed, args=(send, function, args))
    process.start()
    send.close()
    deadline = time.monotonic() + seconds
    try:
        while receive.poll(max(0.0, deadline - time.monotonic())):
            yield receive.recv()
        yield "stopped: no time was left"
    except EOFError:
        process.join()
        if process.exitcode:
            yield f"the process died with exit code {process.exitcode}"
    finally:
        process.kill()
        process.join()


def _streamed(send: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    warnings.simplefilter("ignore")
    try:
        function(send.send, *args)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    send.close()
    os._exit(0)


def outcome(found: Any) -> Row:
    """Return the part of a row that says what `apart` returned: a result, or why there is none."""
    return {"error": found} if isinstance(found, str) else {"measured": found}


def line_of(row: Row) -> str:
    """Return a row in one line: what was predicted, what was measured, how far they are apart."""
    if "error" in row:
        return f"{row['name']}: {row['error'].strip().splitlines()[-1][:300]}"
    if "skipped" in row:
        return f"{row['name']}: skipped, {row['skipped']}"
    told, real = row.get("predicted", {}), row.get("measured", {})
    words = []
    for key, value in real.items():
        if key in told and isinstance(value, int | float):
            off = f" ({100 * (told[key] / value - 1):+.2f} %)" if value else ""
            words.append(f"{key} {told[key]:,.6g} / {value:,.6g}{off}")
        elif isinstance(value, int | float):
            words.append(f"{key} {value:,.6g}")
    return f"{row['name']}: {'; '.join(words)}"
