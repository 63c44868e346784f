"""A step with blocks that a compiler really compiled, counted by torch's own profiler."""

from __future__ import annotations

import gc
import warnings
from itertools import accumulate
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

import meshplan
from meshplan.memory.answer.assemble import least_of
from meshplan.runtime.base.held_bytes import live_bytes
from tests.helpers import exact, models


def measured(name: str, plan: dict[str, Any], size: int) -> int:
    """Most bytes at once of a step after the first ones, of this rank."""
    warnings.simplefilter("ignore")
    model = meshplan.parallelize(models.build(name), plan)
    batch = meshplan.local_batch(model, models.batch(name, 0, size))
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        meshplan.train_step(model, adam, *batch, models.loss)
    inputs = sum(t.nbytes for t in tree_leaves(batch) if isinstance(t, torch.Tensor))
    before = live_bytes(model, adam).total_bytes + inputs
    gc.collect()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        meshplan.train_step(model, adam, *batch, models.loss)
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    return before + max(accumulate(changes, initial=0))


def foretold(name: str, plan: dict[str, Any], size: int, world: int) -> tuple[int, int, int]:
    """(least, most) of the same, and the most of the plan without a compiler."""
    from meshplan.runtime.fake_step.step import fake_step
    from tests.helpers.replayed import decided

    warnings.simplefilter("ignore")
    peaks = []
    for each in (plan, plan | {"compile": False}):
        model, found, _ = decided(name, each, world)
        inputs, targets = models.batch(name, 0, size // world)
        log = fake_step(
            model, found, inputs, targets, models.loss, lambda m: exact.optimizer(m, "default")
        )
        if found.assignment.compiled:
            peaks.append(least_of(log, found.assignment.compiled).peak.live_bytes)
        peaks.append(log.peak.live_bytes)
    least, most, plain = peaks
    return least, most, plain
