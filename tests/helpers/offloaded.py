"""Offloading with real ranks and imagined ones, the host's memory a part or another one.

On CPU ranks both memories are one. So that the copies count as they do on a GPU, both sides can be
told that the host is apart: FSDP2 then copies where it would, and whoever counts tells the sides.
"""

from __future__ import annotations

import gc
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import meshplan
from meshplan.memory.log.events import EventLog
from meshplan.memory.replay import replay
from meshplan.memory.replay.optimizer import is_uniform
from meshplan.runtime.base.batch import mapped
from meshplan.runtime.fake_step import step
from meshplan.runtime.fake_step.cuda_mode import AS_IT_IS, Behaviour
from meshplan.runtime.torch_private.offload import units_cross
from tests.helpers import exact, models, replayed

Apart = tuple[dict[str, tuple[int, int]], int]
"""(what is exact of the device, by phase; most bytes on the host)"""


@contextmanager
def host_apart(device: str = "cpu", *, offloads: bool = True) -> Iterator[Behaviour]:
    """A CPU whose host has a memory of its own."""
    with units_cross():
        yield Behaviour(lambda func, args, out: (), lambda: 0, has_host=True)


def of(logs: list[EventLog]) -> Apart:
    phases = [_without_flags(log).by_phase for log in logs]
    least = {n: tuple(min(each[n][i] for each in phases) for i in (0, 1)) for n in phases[0]}
    return least, min(log.host_bytes for log in logs)  # type: ignore[return-value]


def _without_flags(log: EventLog) -> EventLog:
    """What `replayed.is_on_host` tells of is of no device."""
    kept = (e for e in log.events if not replayed.is_on_host(log.storages[e.storage]))
    return EventLog(log.storages, tuple(kept), log.phases)


def measured(name: str, plan: Mapping[str, Any], steps: int, *, is_apart: bool) -> Apart:
    """Of this rank's steps in a real job, the least of several as in `exact.measured`."""
    inputs, targets = models.batch(name, 0)
    example = inputs if isinstance(inputs, dict) else (inputs,)
    model = meshplan.parallelize(models.build(name), dict(plan), example_inputs=example)
    batch = mapped(meshplan.local_batch(model, (inputs, targets)), torch.clone)
    gc.collect()
    gc.disable()
    try:
        adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if not is_apart:
            return of(step.watch_steps(model, adam, *batch, models.loss, steps))
        with host_apart() as behaviour:
            return of(
                step.watch_steps(model, adam, *batch, models.loss, steps, behaviour=behaviour)
            )
    finally:
        gc.enable()


def imagined(
    name: str, plan: Mapping[str, Any], world: int, *, is_apart: bool
) -> tuple[Apart, Apart | str] | str:
    """(imagined whole, composed or why not) of rank 0, in a process without a group."""
    warnings.simplefilter("ignore")
    try:
        model, found, batch = replayed.decided(name, plan, world)
        with pytest.MonkeyPatch.context() as patch:
            if is_apart:
                patch.setattr(step, "behaving_as", host_apart)
            log = step.fake_step(
                model, found, *batch, models.loss,
                lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3),
            )  # fmt: skip
        assert AS_IT_IS.has_host is False
        whole = of([log])
        if found.assignment.host_activations:
            return whole, "activations"
        work = replayed.work_of(model, found, batch, 0)
        foreach = is_uniform(found.assignment)
        composed = replay(work, found, "adamw", foreach=foreach, has_host=is_apart)
        return whole, of([composed])
    except Exception:
        return traceback.format_exc()


__all__ = ["exact", "host_apart", "imagined", "measured"]
