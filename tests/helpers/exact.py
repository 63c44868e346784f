"""One training step twice: with real processes, and imagined without memory; byte by byte."""

from __future__ import annotations

import gc
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import nn

import meshplan
from meshplan.memory import EventLog, StateBytes, state_bytes
from meshplan.runtime.fake_step.optimizers import OPTIMIZERS
from tests.helpers import models

Figures = dict[str, tuple[int, int]]
"""By phase: most bytes at once, bytes at the end."""


def optimizer(model: nn.Module, name: str) -> torch.optim.Optimizer:
    """One that takes the parameters one by one, or all at once where they are of one kind."""
    is_uniform = len({type(p.data) for p in model.parameters()}) == 1
    if name == "default":  # As the user of torch gets it.
        return torch.optim.AdamW(model.parameters(), lr=1e-3)
    if name in ("muon", "adafactor", "adamw_fused", "lion"):
        return OPTIMIZERS[name][0](list(model.parameters()))
    make: Any
    make = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "adam": torch.optim.Adam,
                 "rmsprop": torch.optim.RMSprop, "adagrad": torch.optim.Adagrad}[name]  # fmt: skip
    return make(model.parameters(), lr=1e-3, foreach=is_uniform)


def measured(model_name: str, plan: Mapping[str, Any], how: str, num_steps: int) -> Figures:
    """Of this rank's steps from the second on, in a real job.

    gloo's threads may let go of a tensor late, the later the busier the machine, so what a step
    needs is the least of several. More steps never make up for a buffer that is freed late in each.
    """
    from meshplan.runtime.base.batch import mapped
    from meshplan.runtime.fake_step.step import watch_steps

    inputs, targets = models.batch(model_name, 0)
    example = inputs if isinstance(inputs, dict) else (inputs,)
    model = meshplan.parallelize(models.build(model_name), dict(plan), example_inputs=example)
    # Of its own, as a loader gives it, and not a view of all ranks' samples.
    batch = mapped(meshplan.local_batch(model, (inputs, targets)), torch.clone)
    gc.collect()
    gc.disable()
    try:
        logs = watch_steps(model, optimizer(model, how), *batch, models.loss, num_steps)
    finally:
        gc.enable()
    return least_of(logs)


def least_of(logs: Sequence[EventLog]) -> Figures:
    """By phase, the least of several steps."""
    return {
        name: (
            min(log.by_phase[name][0] for log in logs),
            min(log.by_phase[name][1] for log in logs),
        )
        for name in logs[0].by_phase
    }


def profiled(model_name: str, plan: Mapping[str, Any], num_steps: int) -> tuple[int, int, int]:
    """(peak by the log, peak by torch's profiler, largest single allocation) of a real step.

    The least of each, as in `measured`.
    """
    from meshplan.runtime.fake_step.step import watch_steps

    model = meshplan.parallelize(models.build(model_name), dict(plan))
    batch = meshplan.local_batch(model, models.batch(model_name, 0))
    gc.collect()
    gc.disable()
    try:
        logs = watch_steps(
            model, optimizer(model, "adamw"), *batch, models.loss, num_steps, _profile
        )
    finally:
        gc.enable()
    peaks = [
        log.by_phase["before"][0] + max(accumulate(changes, initial=0))
        for log, changes in zip(logs, _profiled, strict=True)
    ]
    largest = max(max(changes) for changes in _profiled)
    _profiled.clear()
    return min(log.peak.live_bytes for log in logs), min(peaks), largest


_profiled: list[list[int]] = []


@contextmanager
def _profile(step: int) -> Iterator[None]:
    """Keep what torch's allocator says of every step after the first, in order."""
    if step == 0:
        yield
        return
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        yield
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    _profiled.append([e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())])


def imagined(
    model_name: str, plan: Mapping[str, Any], how: str, world: int, rank: int, device: str = "cpu"
) -> Any:
    """(`EventLog`, `StateBytes`) of one rank, in a process without a group; or what it raised."""
    warnings.simplefilter("ignore")
    try:
        return _imagined(model_name, plan, how, world, rank, device)
    except Exception:
        return traceback.format_exc()


def _imagined(
    model_name: str, plan: Mapping[str, Any], how: str, world: int, rank: int, device: str
) -> tuple[EventLog, StateBytes]:
    from meshplan.runtime.fake_step.step import fake_step
    from tests.helpers.replayed import decided

    model, found, batch = decided(model_name, plan, world)
    log = fake_step(
        model, found, *batch, models.loss, lambda wrapped: optimizer(wrapped, how), rank, device
    )
    words = {"default": "adamw"}
    return log, state_bytes(found.assignment, words.get(how, how), rank)
