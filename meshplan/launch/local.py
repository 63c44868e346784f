"""All launchers of a job on this machine, one for each node that it stands for."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Final

_POLL_S: Final = 0.05
_PATIENCE_S: Final = 15.0
"""Seconds in which the other launchers may end by themselves after one has failed."""
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def free_port() -> int:
    """Return a port of this machine that is free now."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port: int = probe.getsockname()[1]
    return port


def run_launchers(
    command: Sequence[str], environments: Sequence[Mapping[str, str]], grace_s: float
) -> int:
    """Start one launcher for each environment, and wait until all have ended.

    Signals to this process are passed on to the launchers. If one launcher fails, the others are
    ended too. No launcher outlives this call.

    Args:
        command: The command line of every launcher.
        environments: The environment of each.
        grace_s: Seconds between SIGTERM and SIGKILL of the ranks.

    Returns:
        The exit code of the launcher that failed first; 0 if none failed.
    """
    launchers: list[subprocess.Popen[bytes]] = []
    failed = 0
    try:
        with _passing_on(launchers):
            for environment in environments:
                # In a session of its own, so that a Ctrl-C comes once, from this process.
                launchers.append(
                    subprocess.Popen(command, env=dict(environment), start_new_session=True)
                )
            failed_at: float | None = None
            while None in (codes := [each.poll() for each in launchers]):
                failed = failed or next(filter(None, codes), 0)
                if failed and failed_at is None:
                    failed_at = time.monotonic()
                if failed_at is not None and time.monotonic() - failed_at > _PATIENCE_S:
                    break
                time.sleep(_POLL_S)
            failed = failed or next(filter(None, codes), 0)
    finally:
        _end(launchers, grace_s + _PATIENCE_S)
    return failed if failed >= 0 else 128 - failed


@contextmanager
def _passing_on(launchers: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Pass signals that this process gets on to the launchers that run."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        for each in launchers:
            if each.poll() is None:
                each.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(launchers: Sequence[subprocess.Popen[bytes]], patience_s: float) -> None:
    """End the launchers that still run; each ends its ranks before it goes."""
    for each in launchers:
        if each.poll() is None:
            each.terminate()
    deadline = time.monotonic() + patience_s
    for each in launchers:
        try:
            each.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            each.kill()
            each.wait()
