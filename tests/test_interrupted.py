"""Ctrl-C ends a job on all ranks within seconds, and leaves whole files and no process behind.

Which seeded bug would this catch? A rank that waits for an interrupted one, workers of a loader
that outlive it, a traceback of each rank, a summary of a run or a state that is cut off.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from meshplan.runtime.watch.uncaught import show_uncaught
from meshplan.state.folder import find_state, steps_in

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "tests/helpers/interrupted.py"
PLAN = {"version": 1, "strategy": "full_shard", "mesh": {"dp_shard": 2},
        "input": {"shape": [2, 8], "dtype": "int64"}}  # fmt: skip
START_S, END_S = 150, 60
"""So long a job may take to start and to end on a machine with much else to do."""


def interrupt(folder, *words):
    """Start a job in a session of its own, press Ctrl-C, and return (its exit code, its stderr)."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
               "CUDA_VISIBLE_DEVICES": ""}  # fmt: skip
    with open(folder / "err", "w+") as err:
        job = subprocess.Popen(
            [sys.executable, "-m", "meshplan", *map(str, words)], cwd=folder, env=environ,
            stderr=err, stdout=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            wait_until(lambda: len(list(folder.glob("ready-*"))) == 2 or job.poll() is not None)
            assert job.poll() is None, (folder / "err").read_text()[-3000:]
            os.killpg(job.pid, signal.SIGINT)
            job.wait(END_S)
            wait_until(lambda: not processes_of(folder), END_S)
        finally:
            for pid in processes_of(folder):
                os.kill(pid, signal.SIGKILL)
    return job.returncode, (folder / "err").read_text()


def wait_until(is_so, limit_s=START_S):
    end = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.1)


def processes_of(folder):
    """The processes that have this folder in their command line: launchers, ranks and workers."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder) in (each / "cmdline").read_bytes().decode():
                found.append(int(each.name))
        except OSError:  # It has ended meanwhile.
            continue
    return found


@pytest.mark.wide
@pytest.mark.torchrun
@pytest.mark.parametrize("what", ["run", "workers", "predict", "generate", "save", "local"])
def test_a_job_ends_and_leaves_nothing_half_done(tmp_path, what):
    plan = tmp_path / "plan.yaml"
    plan.write_text(yaml.safe_dump(PLAN))
    nodes = ["--local", "--nodes", 2, "--gpus-per-node", 1] if what == "local" else []
    code, err = interrupt(tmp_path, "launch", "-f", plan, *nodes, SCRIPT, what, plan, tmp_path)
    assert code
    # Each launcher of torch has a traceback of its own, the ranks have none.
    launchers = 2 if nodes else 1
    assert err.count("Traceback (most recent call last)") <= launchers, err
    assert "[rank" not in err
    assert err.count("interrupted\n    at ") == launchers, err
    if what in ("run", "workers", "local"):
        found = json.loads((tmp_path / "run/run.json").read_text())
        assert found["failure"].startswith("KeyboardInterrupt")
        rows = (tmp_path / "run/metrics.csv").read_text().splitlines()
        assert len(rows) == 1 + found["steps"]["last"]
    if what == "save":
        states = tmp_path / "states"
        assert find_state(states, None)[1].step == steps_in(states)[0] >= 3


def test_the_ranks_of_a_node_say_it_once(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    shown = []
    for rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            show_uncaught(error, lambda *given: shown.append(given))
    (first, second) = capsys.readouterr().err.splitlines()
    assert first == "interrupted"
    assert "raise KeyboardInterrupt" in second
    monkeypatch.setenv("MESHPLAN_TRACEBACK", "1")
    show_uncaught(KeyboardInterrupt(), lambda *given: shown.append(given))
    assert len(shown) == 1
