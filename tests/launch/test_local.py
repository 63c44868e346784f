"""Several launchers on one machine: none outlives the others, and signals reach all of them."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from meshplan.launch import local
from meshplan.launch.local import run_launchers

BASH = ["bash", "-c"]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(local, "_PATIENCE_S", 0.3)


def test_each_launcher_has_its_environment(tmp_path):
    environments = [{"NAME": str(tmp_path / name)} for name in ("a", "b")]
    assert run_launchers([*BASH, 'echo > "$NAME"'], environments, 1) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}


@pytest.mark.parametrize("other", ["sleep 60", "trap '' TERM; while true; do sleep 0.1; done"])
def test_a_launcher_that_fails_ends_the_others(other):
    script = f'if [ "$FAILS" ]; then exit 7; fi; {other}'
    began = time.monotonic()
    environ = {"PATH": os.environ["PATH"]}
    assert run_launchers([*BASH, script], [environ, environ | {"FAILS": "1"}], 0.3) == 7
    assert time.monotonic() - began < 10


def test_a_signal_reaches_every_launcher(tmp_path):
    script = 'trap \'echo > "$NAME"; exit 0\' TERM; echo > "$NAME.up"; while :; do sleep 0.05; done'
    environments = [{"NAME": str(tmp_path / n), "PATH": os.environ["PATH"]} for n in ("a", "b")]

    def stop():
        while len(list(tmp_path.glob("*.up"))) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    threading.Thread(target=stop, daemon=True).start()
    assert run_launchers([*BASH, script], environments, 1) == 0
    assert {path.name for path in tmp_path.iterdir()} >= {"a", "b"}
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_launcher_that_was_killed_has_the_exit_code_of_shells():
    assert run_launchers([*BASH, "kill -KILL $$"], [{}], 1) == 128 + signal.SIGKILL
