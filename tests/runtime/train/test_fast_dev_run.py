"""A fast development run: a few batches of everything, and nothing that stays or is overwritten.

Which seeded bug would this catch? Epochs that go on, evaluation that ends with the training, a
state in the real folder, a real state that is not found, ranks that write to different folders, a
folder that stays, numbers that reach a service, and a script that loops for ever.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

import meshplan
from meshplan.errors import ApplyError
from meshplan.launch.environment import FAST_DEV_RUN
from meshplan.runtime.train import fast_dev_run
from meshplan.runtime.train.callbacks import TensorBoardWriter
from tests.helpers.stated import Job, next_token_loss, plan_of

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setenv(FAST_DEV_RUN, "2")
    monkeypatch.setattr(fast_dev_run, "_folders", {})
    monkeypatch.setattr(fast_dev_run, "_announced", set())


def step(job, batch):
    return meshplan.train_step(job.model, job.optimizer, *batch, next_token_loss)


def test_training_ends_after_the_batches_and_evaluation_goes_on(short, capfd):
    job = Job(plan_of("one"))
    assert len(job.loader) == 2
    trained = [step(job, batch) for _ in range(3) for batch in job.loader]
    assert len(trained) == 2
    assert job.loader.epoch == 3
    unseen = Job(plan_of("one")).loader
    for _ in range(3):
        assert len(list(unseen)) == 2
    assert capfd.readouterr().err.count("fast development run: loaders end after 2 batches") == 1


def test_a_script_that_counts_steps_ends(short):
    job, taken = Job(plan_of("one")), []

    def train():
        while len(taken) < 100:
            taken.extend(step(job, batch) for batch in job.loader)

    with pytest.raises(SystemExit) as end:
        train()
    assert (end.value.code, len(taken)) == (0, 2)


def test_states_and_records_are_read_back_and_removed(short, tmp_path, monkeypatch):
    removed = []
    monkeypatch.setattr(
        fast_dev_run.atexit, "register", lambda *args, **named: removed.append((args, named))
    )
    job, states = Job(plan_of("one")), tmp_path / "states"
    monkeypatch.delenv(FAST_DEV_RUN)
    meshplan.save(states, job.model, job.optimizer, step=7)
    monkeypatch.setenv(FAST_DEV_RUN, "2")
    before = sorted(tmp_path.rglob("*"))
    assert meshplan.load(states, job.model, job.optimizer).step == 7
    with meshplan.Run(tmp_path / "run", job.model, callbacks=["csv", TensorBoardWriter()]):
        step(job, next(iter(job.loader)))
    saved = meshplan.save(states, job.model, job.optimizer, step=7, keep=1)
    assert saved.parent != states
    # A later epoch, in which no step is taken, saves the same step again.
    assert meshplan.save(states, job.model, job.optimizer, step=7, keep=1) == saved
    assert meshplan.load(states, job.model, job.optimizer).folder == saved
    assert not (tmp_path / "run").exists()
    assert list(tmp_path.glob("fast-dev-run-*/run/run.json"))
    for (remove, *args), named in removed:
        remove(*args, **named)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_number_that_is_none(monkeypatch):
    job = Job(plan_of("one"))
    for text in ("0", "-1", "yes"):
        monkeypatch.setenv(FAST_DEV_RUN, text)
        with pytest.raises(ApplyError, match="no number of batches"):
            next(iter(job.loader))


@pytest.mark.wide
@pytest.mark.torchrun
def test_a_whole_script_leaves_nothing_behind(tmp_path):
    plan = tmp_path / "plan.yaml"
    plan.write_text(yaml.safe_dump({"version": 1, "mesh": {"dp_shard": 2}}))
    done = subprocess.run(
        [sys.executable, "-m", "meshplan", "launch", "-f", plan, "--fast-dev-run", "3",
         "--gpus-per-node", "2", ROOT / "examples/train.py", plan, tmp_path / "out"],
        capture_output=True, text=True, cwd=ROOT, timeout=300, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count("loaders end after 3 batches") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["plan.yaml"]


def test_generators_go_on_as_before(monkeypatch):
    """In earnest, the loop over a loader is what it was without short ones."""
    monkeypatch.delenv(FAST_DEV_RUN, raising=False)
    job = Job(plan_of("one"))
    whole = [inputs for inputs, _ in job.loader]
    assert len(whole) == len(job.loader) == 3
    assert not torch.equal(whole[0], whole[1])
