"""Tasks in processes of their own: results in order, errors as they were, and none left behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from meshplan.errors import ApplyError, PlanError, Problem
from meshplan.runtime.base.subprocess_pool import run_in_subprocesses


def lingering(number: int) -> tuple[int, int]:
    """Leaves a thread behind that keeps its process from ending by itself."""
    threading.Thread(target=time.sleep, args=(60,)).start()
    return number, os.getpid()


def failing(how: str, noted: str) -> None:
    """Notes its process and waits, or fails once another one waits."""
    path = Path(noted)
    if how == "wait":
        path.write_text(str(os.getpid()))
        time.sleep(60)
    while not path.exists() or not path.read_text():
        time.sleep(0.01)
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    raise PlanError([Problem("no such plan")]) if how == "refuse" else KeyError("a")


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_no_process_outlives_its_task() -> None:
    told = run_in_subprocesses(lingering, [(number,) for number in range(3)], most=2)
    assert [number for number, _ in told] == [0, 1, 2]
    assert not any(is_running(pid) for _, pid in told)


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ("refuse", PlanError, "no such plan"),
        ("raise", ApplyError, "KeyError: 'a'"),
        ("die", ApplyError, "died (SIGKILL)"),
    ],
)
def test_a_task_that_fails_ends_them_all(
    how: str,
    error: type[Exception],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)  # Both run at once on any machine.
    noted = tmp_path / "pid"
    with pytest.raises(error) as caught:
        run_in_subprocesses(failing, [("wait", str(noted)), (how, str(noted))], most=2)
    assert words in str(caught.value)
    assert not is_running(int(noted.read_text()))
