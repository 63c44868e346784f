"""Nothing hangs under a pipeline whose stages talk, nor where a rank itself holds the store."""

from __future__ import annotations

import datetime
import gc
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import meshplan
from meshplan.runtime.watch import guard
from tests.helpers import models
from tests.runtime.watch.test_guard import SECONDS, Mishap, loss_that_fails, total_of_ranks

PLAN = {
    "version": 1,
    "mesh": {"pp": 2, "dp_shard": 2},
    "pipeline": {"schedule": "1F1B", "microbatches": 2},
}


def failing_stage(where: str, culprits: tuple[int, ...], good_steps: int) -> Any:
    """(type, text, seconds) of what a step raises when a stage fails on the culprits."""
    guard.GRACE_S = 1.0 if len(culprits) == 1 else 10.0
    model = meshplan.parallelize(models.build("own_llama"), PLAN)
    sgd = models.optimizer(model)
    batch = meshplan.local_batch(model, models.batch("own_llama", 0))
    for _ in range(good_steps):
        meshplan.train_step(model, sgd, *batch, models.loss)
    is_culprit = dist.get_rank() in culprits

    def fail(*_: Any) -> None:
        raise Mishap(f"in {where}")

    if is_culprit and where == "forward":
        stage = next(iter(model.stages.values()))
        stage.layers[0].register_forward_pre_hook(fail)

    loss = loss_that_fails(where, fail) if is_culprit else models.loss

    began = time.monotonic()
    try:
        meshplan.train_step(model, sgd, *batch, loss)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "", "nothing was raised", 0.0


@pytest.mark.parametrize(
    ("where", "culprit", "good_steps"),
    [("forward", 0, 0), ("loss", 3, 1), ("backward", 2, 1)],
)
def test_a_failure_on_one_rank_of_a_stage_is_told_to_all(pool, where, culprit, good_steps):
    results = pool(4).run(failing_stage, where, (culprit,), good_steps, timeout=SECONDS)
    pool(4).close()
    for rank, (kind, text, seconds) in enumerate(results):
        assert seconds < SECONDS / 2
        assert kind == ("Mishap" if rank == culprit else "ApplyError")
        if rank != culprit:
            assert f"rank {culprit} failed: Mishap: in {where}" in text


def test_a_failure_on_all_ranks_of_a_stage_leaves_the_group_alive(pool):
    results = pool(4).run(failing_stage, "loss", (2, 3), 1, timeout=SECONDS)
    for rank, (kind, text, _) in enumerate(results):
        assert kind == ("Mishap" if rank in (2, 3) else "ApplyError")
        assert "Mishap: in loss" in text or text == "in loss"
    assert pool(4).run(total_of_ranks) == [6.0] * 4


def failing_holder() -> str:
    """What is told where the rank that fails serves the store, and goes at once."""
    guard.GRACE_S = 2.0
    box: list[Any] = [None]
    own = None
    if dist.get_rank() == 0:
        own = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        box = [own.port]
    dist.broadcast_object_list(box)
    with meshplan.guarded():
        pass
    wait = datetime.timedelta(seconds=5)
    guard._job.store = own or dist.TCPStore("127.0.0.1", box[0], timeout=wait)
    guard._job.groups = -1
    told = ""
    try:
        with meshplan.guarded():
            if dist.get_rank() == 0:
                raise Mishap("of the holder")
            dist.all_reduce(torch.zeros(1))
    except (Mishap, meshplan.ApplyError) as error:
        told = str(error)
    guard._job.store, own = None, None
    gc.collect()
    return told


def test_the_rank_that_holds_the_store_tells_the_others_before_it_goes(pool):
    results = pool(4).run(failing_holder, timeout=SECONDS)
    pool(4).close()
    assert results[0] == "of the holder"
    for text in results[1:]:
        assert "rank 0 failed: Mishap: of the holder" in text
