"""Peaks of a real allocator beside the predicted ones: rank 0 of many, alone on one device.

The real model and the real wrappers run in a process group of fakes, in which nothing is sent: what
is computed is wrong, and what is allocated is what rank 0 of the job would allocate. The peaks are
read from the second step on. On a CPU the live bytes of tensors are counted instead, and must equal
the prediction to the byte.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from tests.gpu.plans import CASES

_STEPS: Final = 3
"""The first is not like the others; of those the most is taken."""
_COUNTED: Final = {
    "requested_bytes": "requested_bytes.all.peak",
    "allocated_bytes": "allocated_bytes.all.peak",
    "active_bytes": "active_bytes.all.peak",
    "reserved_bytes": "reserved_bytes.all.peak",
}
"""Names of `torch.cuda.memory_stats`."""

Figures = dict[str, float]


def _decided(name: str, size: str) -> tuple[Any, Any, Any, int]:
    """Return (the model on meta, its plan, its `Model`, samples of a rank's step)."""
    import torch

    from meshplan.plan.plan import make_plan
    from meshplan.runtime.trace.ops import record
    from meshplan.runtime.trace.rehearse import rehearser
    from meshplan.runtime.trace.structure import graph_of
    from meshplan.spec.reader import load_spec
    from tests.gpu.models import MODELS

    case = CASES[name]
    given, spec = MODELS[case.model](size), load_spec(dict(case.plan))
    with torch.device("meta"):
        model = given.build()
        inputs, _ = given.batch(4)
        example = tuple(inputs.values()) if isinstance(inputs, dict) else (inputs,)
    flow = record(model, example) if spec.reads_flow else None
    rehearse = rehearser(model, example) if spec.reads_flow else None
    found = make_plan(spec, graph_of(model, flow), world_size=case.world, rehearse=rehearse)
    stages = found.assignment.stages
    passes = found.accumulate * (stages.microbatches if stages is not None else 1)
    return model, found, given, passes * case.samples


def _optimizer(plan: Any) -> Any:
    """Return the function that makes the plan's optimizer from the wrapped model."""
    from meshplan.runtime.fake_step.optimizers import OPTIMIZERS

    make, _ = OPTIMIZERS[plan.spec.optimizer]
    return lambda model: make(list(model.parameters()))


def predicted(name: str, size: str, device: str) -> Figures:
    """Return what `estimate` says of rank 0.

    Args:
        name: A case.
        size: Size of the model.
        device: "cpu", or the name of a GPU.
    """
    import torch

    from meshplan.memory.answer.assemble import least_of
    from meshplan.memory.answer.reserved import ReplayCache
    from meshplan.runtime.fake_step.step import fake_step

    model, found, given, samples = _decided(name, size)
    with torch.device("meta"):
        inputs, targets = given.batch(samples)
    log = fake_step(model, found, inputs, targets, given.loss, _optimizer(found), device=device)
    if device == "cpu":
        return {"live_bytes": log.peak.live_bytes}
    held = ReplayCache(device, found.spec).of(log)
    figures: Figures = {
        "requested_bytes": held.reserve.requested_bytes,
        "allocated_bytes": held.reserve.allocated_bytes,
        "reserved_bytes": held.reserve.reserved_bytes,
        "host_bytes": held.log.host_bytes,
    }
    if found.assignment.compiled:
        least = least_of(log, found.assignment.compiled)
        figures["least_bytes"] = ReplayCache(device, found.spec).of(least).reserve.allocated_bytes
    return figures


@contextmanager
def _real_wrappers() -> Iterator[None]:
    """Let replicas and the compiler be the real ones, as tensors have numbers here."""
    from meshplan.runtime.apply.data import data
    from meshplan.runtime.base import compile as compiling

    asks = data.is_fake_execution, compiling.is_fake_execution
    data.is_fake_execution = compiling.is_fake_execution = lambda: False
    try:
        yield
    finally:
        data.is_fake_execution, compiling.is_fake_execution = asks


def _answered(wrapped: Any) -> None:
    """Make each bucket of DDP its own sum, as a group of fakes ends no sum of a bucket."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    def done(buffer: Any) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(buffer)
        return future

    if isinstance(wrapped, DistributedDataParallel):
        wrapped.register_comm_hook(None, lambda state, bucket: done(bucket.buffer()))


def measured(name: str, size: str, device: str) -> Figures:
    """Return what this rank's steps really take from the second one on.

    Args:
        name: A case.
        size: Size of the model.
        device: "cpu" or "cuda".
    """
    import torch

    from meshplan.runtime.apply.allocator import set_allocator
    from meshplan.runtime.apply.parameters.materialize import InitialValues
    from meshplan.runtime.apply.wrap import applied, apply_plan
    from meshplan.runtime.base.batch_agreement import open_groups
    from meshplan.runtime.base.fake_mode import fake_execution
    from meshplan.runtime.base.mesh import device_mesh
    from meshplan.runtime.fake_step.step import watch_steps
    from meshplan.runtime.torch_private.fakes import group_of_fakes
    from meshplan.runtime.train.step import train_step

    _, found, given, samples = _decided(name, size)
    gc.collect()
    held = 0
    if device == "cuda":
        # What another case has left in this process is not of this one. Only this private function
        # frees the workspaces of cuBLAS.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        held = torch.cuda.memory_reserved()
    set_allocator(found.spec)
    with group_of_fakes(0, found.mesh.world_size), fake_execution(), _real_wrappers():
        mesh = device_mesh(found.mesh)
        open_groups(found, mesh)
        model, inputs, targets = given.start(device, samples)
        wrapped = apply_plan(model, found, mesh, InitialValues())
        applied(wrapped).is_tested = True
        _answered(wrapped)
        optimizer = _optimizer(found)(wrapped)
        if device == "cpu":
            logs = watch_steps(wrapped, optimizer, inputs, targets, given.loss, _STEPS - 1)
            return {"live_bytes": min(log.peak.live_bytes for log in logs)}
        del model
        gc.collect()
        torch.cuda.empty_cache()
        step = partial(train_step, wrapped, optimizer, inputs, targets, given.loss)
        peaks = [_peaks(step) for _ in range(_STEPS)]
        most = {key: max(peak[key] for peak in peaks[1:]) for key in peaks[0]}
        return {**most, "held_before_bytes": held}


def _peaks(step: Any) -> Figures:
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    step()
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    seconds = time.perf_counter() - begin
    return {key: stats[of] for key, of in _COUNTED.items()} | {"seconds": seconds}
