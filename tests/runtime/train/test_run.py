"""`Run`: a record of every step, rows that survive a crash, and a summary of all ranks.

Which seeded bug would this catch? Phases that overlap or miss a part of the step, a wait for a
collective that counts as computation (of DDP's reducer, of FSDP2, of DTensor, of a pipeline), a
patch of torch that outlives the step, rows twice after
a load, a summary of rank 0 alone, a callback on every rank, or a run that an error leaves open.
"""

from __future__ import annotations

import csv
import json
import sys
import time
import types

import numpy as np
import pytest
import torch
import torch.distributed as dist

import meshplan
from meshplan.errors import ApplyError
from tests.helpers.stated import (
    BATCH,
    DIM,
    LAYOUTS,
    SEQ_LEN,
    VOCAB,
    Job,
    next_token_loss,
    plan_of,
)
from tests.runtime.train.test_dataloader import Tokens, wrapped


class Counts(meshplan.Callback):
    def __init__(self):
        self.steps, self.summary = [], None

    def on_step(self, record):
        self.steps.append(record)

    def on_end(self, summary):
        self.summary = summary


def recorded(layout, folder):
    job, counts = Job(plan_of(layout)), Counts()
    with meshplan.Run(folder, job.model, callbacks=("csv", counts)) as run:
        with pytest.raises(ApplyError, match="before the first step"):
            run.log(lr=1.0)
        begun = time.perf_counter()
        losses = []
        for number in range(4):
            losses += job.train(1)
            run.log(lr=job.scheduler.get_last_lr()[0])
            if number == 2:
                time.sleep(0.4)
                run.log(accuracy=0.5)
        seconds = time.perf_counter() - begun
        with pytest.raises(ApplyError, match="recorded in"):
            meshplan.Run(folder, job.model)
    job.train(1)  # Not recorded: the run was closed.
    return losses, seconds, counts.steps, counts.summary


def by_route(collectives):
    found = {}
    for each in collectives:
        key = each["kind"], *each["axes"]
        found[key] = found.get(key, 0) + each["bytes"]
    return found


@pytest.mark.parametrize("layout", ["full_shard", "pp"])
def test_every_step_is_recorded_once(pool, tmp_path, layout):
    world = LAYOUTS[layout].world
    ranks = pool(world).run(recorded, layout, tmp_path)
    losses, seconds, steps, summary = ranks[0]
    assert all(not other_steps for _, _, other_steps, _ in ranks[1:])
    assert [record.step for record in steps] == [1, 2, 3, 4]
    assert [record.loss for record in steps] == losses
    assert [dict(record.values).keys() for record in steps] == [
        {"lr"}, {"lr"}, {"lr", "accuracy"}, {"lr"},
    ]  # fmt: skip
    for record in steps:
        assert record.seconds == pytest.approx(sum(record.phases.values()))
        assert min(record.phases["forward"], record.phases["backward"]) > 0
    assert steps[3].phases["data"] >= 0.4  # The loop slept before this step.
    assert sum(record.seconds for record in steps) == pytest.approx(seconds, abs=0.3)
    with open(tmp_path / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["loss"]) for row in rows] == losses
    assert [row["accuracy"] for row in rows] == ["", "", "0.5", ""]
    assert json.loads((tmp_path / "run.json").read_text()) == summary
    assert summary["steps"] == {"first": 1, "last": 4, "timed": 2}  # Not the one that was counted.
    if layout == "full_shard":
        assert by_route(summary["predicted"]["collectives"]) == by_route(summary["collectives"])
    assert summary["ranks"] == len(summary["peak_bytes"]) == world


def watched(layout, folder, **fields):
    """What is counted of a step on this rank, and timed of its modules."""
    job = Job(plan_of(layout) | fields)
    with meshplan.Run(folder, job.model, profile_step=3) as run:
        job.train(6)
    return run._flops.model_flops, run._flops.recomputed_flops, run._modules


def accumulating(folder):
    """Train 2 epochs of 6 steps, of two microbatches each and then of one; the last is slower."""
    model, found = wrapped("one", batch={"accumulate": 2}), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = meshplan.dataloader(Tokens(48), model, batch_size=8, accumulate={0: 2, 1: 1})
    with meshplan.Run(folder, model, profile_step=8) as run:
        for epoch in range(2):
            for inputs, targets in loader:
                if len(found) == 12:
                    break
                time.sleep(0.2 * epoch)
                loss = meshplan.train_step(model, optimizer, inputs, targets, next_token_loss)
                found.append(loss)
        return run.close()


def test_figures_belong_to_steps_of_one_number_of_microbatches(pool, tmp_path):
    """FLOPs of a step of two microbatches stood beside the seconds of one with a single one."""
    (summary,) = pool(1).run(accumulating, tmp_path)
    assert summary["steps"] == {"first": 1, "last": 12, "timed": 4}  # Of 6, without two.
    assert summary["accumulate"] == 2
    assert summary["phases_s"]["data"] < 0.2
    assert summary["modules"] is None  # Step 8 and later ones have another number.


TOKENS = BATCH * SEQ_LEN
TP_PRODUCTS = 2 * TOKENS * DIM * (2 * 4 * DIM + 2 * 24)
"""FLOPs of a forward in what tp splits: projections of two blocks, and a dense layer."""
OTHER_PRODUCTS = 2 * TOKENS * DIM * (4 + 2 * 3 * 8 + VOCAB)
"""Router, two of four experts for each token, and head."""
SCORES = 2 * 2 * TOKENS * DIM * SEQ_LEN
"""Both products of causal attention in two blocks, of which a half is masked."""


@pytest.mark.parametrize(
    "layout",
    ["packed", *(pytest.param(each, marks=pytest.mark.wide) for each in ("pp", "full_shard"))],
)
def test_flops_are_those_of_the_shapes(pool, tmp_path, layout):
    world = LAYOUTS[layout].world
    ranks = pool(world).run(watched, layout, tmp_path)
    copies = world if layout == "packed" else 1
    forward, attention = TP_PRODUCTS + copies * OTHER_PRODUCTS, SCORES
    # Backward computes two products for each; attention has five in place of two.
    assert sum(flops for flops, _, _ in ranks) == 3 * forward + 3.5 * attention
    assert not any(recomputed for _, recomputed, _ in ranks)


def test_recomputation_is_counted_apart(pool, tmp_path):
    recompute = {"activation_checkpointing": "full"}
    ((flops, recomputed, modules),) = pool(1).run(watched, "one", tmp_path, **recompute)
    assert flops == 3 * (TP_PRODUCTS + OTHER_PRODUCTS) + 3.5 * SCORES
    assert 0 < recomputed < flops / 3
    # Ten of eleven groups, the slowest first; forwards that backward runs again are no calls.
    seconds = [each["forward_s"] for each in modules]
    assert seconds == sorted(seconds, reverse=True)
    assert len(modules) == 10
    (blocks,) = (each for each in modules if each["name"] == "layers.*")
    assert (blocks["modules"], blocks["calls"]) == (2, 2)
    inside = [each for each in modules if each["name"].startswith("layers.*.")]
    assert blocks["forward_s"] > sum(each["forward_s"] for each in inside)


def train_late(layout, folder, pause_s):
    """Train while the last rank is late: what steps took on rank 0, and the summary."""
    job, counts = Job(plan_of(layout)), Counts()
    is_late = dist.get_rank() == dist.get_world_size() - 1
    pauses = ["loss"] * 3 if "pp" in layout else ["loss", "forward", "forward"]

    def pause(where):
        if is_late and where == pauses[0]:
            time.sleep(pause_s)

    def loss_fn(output, targets):
        pause("loss")  # In a pipeline, the last rank alone calls it.
        return next_token_loss(output, targets)

    job.model.register_forward_pre_hook(lambda *_: pause("forward"))
    waits = dist.Work.wait, torch.ops._c10d_functional.wait_tensor._op
    with meshplan.Run(folder, job.model, callbacks=[counts]):
        for inputs, targets in job.loader:
            meshplan.train_step(job.model, job.optimizer, inputs, targets, loss_fn)
            del pauses[0]
    assert waits == (dist.Work.wait, torch.ops._c10d_functional.wait_tensor._op)
    return counts.steps, counts.summary


@pytest.mark.parametrize(
    "layout",
    ["ddp", "pp", *(pytest.param(each, marks=pytest.mark.wide)
                    for each in ("full_shard", "packed", "cp", "zero1", "hybrid", "pp_fsdp_tp"))],
)  # fmt: skip
def test_waiting_for_a_late_rank_is_communication(pool, tmp_path, layout):
    pause = 0.4
    steps, summary = pool(LAYOUTS[layout].world).run(train_late, layout, tmp_path, pause)[0]
    # Each pause is over before rank 0 goes on; it calls each function once a step at least.
    assert min(record.phases["communication"] for record in steps) > 0.9 * pause
    waited = summary["communication_s"]
    assert waited[0] == summary["phases_s"]["communication"]
    if layout != "pp_fsdp_tp":  # Its ranks of one stage are late for each other.
        assert min(waited) == waited[-1]


def interrupted(job, folder):
    with meshplan.Run(folder, job.model, step=2):
        job.train(2)
        raise OSError("no disk")


def going_on(folder):
    job = Job(plan_of("one"))
    with meshplan.Run(folder, job.model):
        job.train(3)
    with pytest.raises(OSError, match="no disk"):
        interrupted(job, folder)
    with meshplan.Run(folder, job.model, step=4) as run:
        job.train(1)
        run.log(accuracy=np.float32(0.5))
        assert run.close()["steps"]["last"] == 5
    with pytest.raises(ApplyError, match="closed already"):
        run.close()


def test_a_run_goes_on_in_the_same_file(tmp_path):
    meshplan_runs = tmp_path / "runs"
    going_on(meshplan_runs)
    with open(meshplan_runs / "metrics.csv", newline="") as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["1", "2", "3", "4", "5"]
    assert json.loads((meshplan_runs / "run.json").read_text())["failure"] == ""


class Failing(meshplan.Callback):
    def on_step(self, record):
        if record.step == 2:
            raise OSError("no disk")


def failed(folder):
    job = Job(plan_of("ddp"))
    try:
        with meshplan.Run(folder, job.model, callbacks=["csv", Failing()]):
            job.train(5)
    except (OSError, ApplyError) as error:
        return str(error)


def test_a_failing_callback_ends_all_ranks_and_is_in_the_file(pool, tmp_path):
    main, other = pool(2).run(failed, tmp_path)
    pool(2).close()
    assert main == "no disk"
    assert "no disk" in other
    assert json.loads((tmp_path / "run.json").read_text())["failure"] == "OSError: no disk"


def test_a_new_run_keeps_the_rows_of_an_earlier_one(tmp_path):
    for _ in range(2):
        job = Job(plan_of("one"))
        with meshplan.Run(tmp_path, job.model):
            job.train(1)
    for name in ("metrics.csv", "metrics.csv.old"):
        with open(tmp_path / name, newline="") as file:
            assert [row["step"] for row in csv.DictReader(file)] == ["1"]


class Fake(types.ModuleType):
    """Stands for wandb: it keeps what it is given."""

    def __init__(self):
        super().__init__("wandb")
        self.logged, self.summary, self.arguments = [], {}, {}

    def init(self, **arguments):
        self.arguments = arguments
        return self

    def log(self, row, step):
        self.logged.append((step, row["loss"]))

    def finish(self):
        self.logged.append("finished")


def test_writers_by_name(tmp_path, monkeypatch):
    job, fake = Job(plan_of("one")), Fake()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with meshplan.Run(tmp_path, job.model, callbacks=["wandb"]):
        (loss,) = job.train(1)
    assert fake.logged == [(1, loss), "finished"]
    assert fake.summary["loss"] == loss
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ApplyError, match="wandb is not installed"):
        meshplan.Run(tmp_path, job.model, callbacks=["wandb"])
    with pytest.raises(ApplyError, match="'cvs' is neither"):
        meshplan.Run(tmp_path, job.model, callbacks=["cvs"])


def test_tensorboard_gets_every_number(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    job = Job(plan_of("one"))
    with meshplan.Run(tmp_path, job.model, callbacks=["tensorboard"]) as run:
        losses = job.train(2)
        run.log(lr=0.5)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [e.value for e in events.Scalars("loss")] == pytest.approx(losses)
    assert [e.step for e in events.Scalars("lr")] == [2]
