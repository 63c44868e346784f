"""Run tasks in subprocesses that are in no torch.distributed process group, a few at a time.

A single task of the command line runs in its own process.

An error that a task raises is raised again in this process. All subprocesses are killed when a
task raises, when a subprocess dies, on Ctrl-C, and when this process dies.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Final

import torch
import torch.distributed as dist

from meshplan.errors import ApplyError, MeshplanError, Problem
from meshplan.own_process import IS_OWN
from meshplan.runtime.base.local_ranks import begin_child, prepare

MOST: Final = 4
"""Default limit of subprocesses at a time: each imports torch and builds a model without storage,
which takes host memory."""


def run_in_subprocesses(
    function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]], *, most: int = MOST
) -> list[Any]:
    """Run `function(*task)` for each task and return the results, in order.

    Args:
        function: A function of an importable module; tasks and results are pickled.
        tasks: The arguments of each call.
        most: Highest number of subprocesses at a time; the number of CPU cores is a limit too.

    Raises:
        MeshplanError: The same error as a task raised, if that was a MeshplanError.
        ApplyError: A task raised any other error, or a subprocess died.
    """
    if len(tasks) == 1 and IS_OWN.get() and not dist.is_initialized():
        return [_run_here(function, tasks[0])]
    prepare()
    context = multiprocessing.get_context("forkserver")
    most = max(1, min(most, os.cpu_count() or 1))
    results: dict[int, Any] = {}
    running: dict[Connection, tuple[int, BaseProcess]] = {}
    waiting = iter(enumerate(tasks))
    try:
        while len(results) < len(tasks):
            while len(running) < most and (task := next(waiting, None)) is not None:
                here, there = context.Pipe(duplex=False)
                process = context.Process(
                    target=_work, args=(there, function, task[1]), daemon=True
                )
                with _nameless_main():
                    process.start()
                there.close()
                running[here] = (task[0], process)
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                number, ended = running[ready]
                results[number] = _receive(ready, ended)
                _end(ready, ended)
                del running[ready]
    finally:
        for connection, (_, left) in running.items():
            _end(connection, left)
    return [results[number] for number in range(len(tasks))]


def _run_here(function: Callable[..., Any], task: tuple[Any, ...]) -> Any:
    """Run one task in this process, with the errors of a subprocess."""
    try:
        return function(*task)
    except MeshplanError:
        raise
    except (Exception, SystemExit) as error:  # The model's own code may raise anything.
        text = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ApplyError(Problem(text)) from None


def _end(connection: Connection, process: BaseProcess) -> None:
    process.kill()
    process.join()
    process.close()
    connection.close()


def _receive(connection: Connection, process: BaseProcess) -> Any:
    try:
        kind, value = connection.recv()
    except (EOFError, ConnectionResetError):
        process.join()
        code = process.exitcode or 0
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        fix = "free host memory, which probably ran out" if code == -signal.SIGKILL else ""
        raise ApplyError(Problem(f"a subprocess of the estimate died ({how})", None, fix)) from None
    if kind == "returned":
        return value
    if kind == "refused":
        error_type, problems = value
        raise error_type(problems)
    raise ApplyError(Problem(value))


def _work(connection: Connection, function: Callable[..., Any], task: tuple[Any, ...]) -> None:
    """Run one task and send its result or error to the parent: a subprocess's main function."""
    begin_child()
    torch.set_num_threads(1)
    message: tuple[str, Any]
    try:
        message = ("returned", function(*task))
    except MeshplanError as error:
        message = ("refused", (type(error), tuple(error.problems)))
    except Exception as error:
        message = ("raised", f"{type(error).__name__}: {error}".partition("\n")[0])
    with contextlib.suppress(OSError):  # The parent no longer listens.
        connection.send(message)


@contextlib.contextmanager
def _nameless_main() -> Iterator[None]:
    """Keep processes started inside the `with` block from importing this process's main script.

    multiprocessing imports the main script in every new process. A script without
    `if __name__ == "__main__"` would run again from the top. The task's function does not need the
    script: pickle finds the function by the name of the module that defines it.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
