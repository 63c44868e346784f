"""`find_batch_size`: the largest microbatch that fits, and not one sample more.

Which seeded bug would this catch? A bisection that ends one too low, sizes that do not divide the
global batch or the pipeline's microbatches, and a step out of memory that is not believed.
"""

from __future__ import annotations

import pytest

import meshplan
from meshplan.errors import PlanError
from tests.planner.test_planner import LLAMA, job

__all__ = ["job"]

STATED = {"mesh": {"dp_shard": 8}, "strategy": "full_shard",
          "batch": {"micro": 1, "seq_len": 1024},
          "hardware": {"gpus_per_node": 8, "memory": "12GiB"}}  # fmt: skip


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


def fits(path, size):
    settings = [f"batch.micro={size}", "batch.global="]
    return meshplan.estimate_memory(path, settings, fixes=False).fits


@pytest.mark.parametrize("fields", [{}, {"activation_checkpointing": "full"}])
def test_one_sample_more_does_not_fit(job, fields):
    path = job(LLAMA, **(STATED | fields))
    found = meshplan.find_batch_size(path)
    assert found.micro > 1
    assert found.peak_bytes <= found.limit_bytes == 12 * 2**30
    assert fits(path, found.micro)
    assert not fits(path, found.micro + 1)
    assert len(found.tried) < 30
    half = meshplan.find_batch_size(path, most=found.micro - 1)
    assert half.micro == found.micro - 1


def test_sizes_divide_the_global_batch_and_the_pipeline(job):
    batch = {"micro": 1, "global": 8 * 60, "seq_len": 1024}
    path = job(LLAMA, **(STATED | {"batch": batch}))
    most = meshplan.find_batch_size(path, ["batch.global="]).micro
    assert meshplan.find_batch_size(path).micro == max(
        size for size in range(1, most + 1) if 60 % size == 0
    )
    pipeline = {"mesh": {"pp": 2, "dp_shard": 4}, "pipeline": {"microbatches": 3}}
    path = job(LLAMA, **(STATED | pipeline | {"batch": {"micro": 3, "seq_len": 1024}}))
    assert meshplan.find_batch_size(path, most=20).micro % 3 == 0


def test_a_step_out_of_memory_is_believed(job):
    path, taken = job(LLAMA, **STATED), []
    most = meshplan.find_batch_size(path).micro

    def step(size):
        taken.append(size)
        if size > most - 2:
            raise OutOfMemoryError

    found = meshplan.find_batch_size(path, step=step)
    assert taken == [most, most - 1, most - 2]
    assert found.micro == most - 2

    def broken(size):
        raise RuntimeError("another error")

    with pytest.raises(RuntimeError, match="another error"):
        meshplan.find_batch_size(path, step=broken)


def test_what_cannot_be_answered_says_why(job):
    with pytest.raises(PlanError, match="not even a microbatch of 1 fits"):
        meshplan.find_batch_size(job(LLAMA, **STATED), ["hardware.memory=1GiB"])
    pipeline = {"mesh": {"pp": 2, "dp_shard": 4}, "pipeline": {"microbatches": 3}}
    batch = {"batch": {"micro": 3, "global": 32, "seq_len": 1024}}
    with pytest.raises(PlanError, match="no microbatch of at most"):
        meshplan.find_batch_size(job(LLAMA, **(STATED | pipeline | batch)), ["batch.micro="])
