"""The same runs by several estimators, beside what was measured: one table.

    python -m tests.bench.side_by_side [CASE ...] > tests/bench/side_by_side.md

Published runs of torchtitan on H100 (peak active), and small models whose live bytes are counted in
real gloo processes. Every estimator gets what it can take: a model, or its number of
parameters and of devices.

- textbook: `formulas.full_shard`, 16 bytes a parameter over all devices.
- DeepSpeed: `estimate_zero3_model_states_mem_needs` (deepspeed/runtime/zero/stage3.py, without
  offload): 4 bytes for each parameter of the largest layer, and 18 for each of its share. The
  formula is repeated here, because the package is built against CUDA.
- accelerate: `accelerate estimate-memory`, the column for training with Adam; it knows no devices.
  Needs `pip install accelerate`.
- FSDPMemTracker: `torch.distributed._tools`, of the second step, in its fake mode. Of the first
  step it also counts what DTensor tries out on tensors as large as all ranks' together.
- meshplan: `imagine_step`.
"""

from __future__ import annotations

import multiprocessing
import sys
import types
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib.machinery import ModuleSpec
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshplan.runtime.base.batch import mapped
from meshplan.textbook.formulas import full_shard
from tests.bench import cuda_figures
from tests.bench.llama import KeepsPrediction, Llama, loss
from tests.helpers import exact, models
from tests.runtime.fake_step.test_memory_exact import CASES as SMALL

PUBLISHED = ("7B full", "7B selective")
COUNTED = ("full_shard", "full_shard, bf16")
_COLUMNS = ("textbook", "DeepSpeed", "accelerate", "FSDPMemTracker", "meshplan")
_UNITS = {2**30: "GiB", 2**20: "MiB"}


def published_model(name: str) -> nn.Module:
    case = cuda_figures.CASES[name]
    kinds = {"selective": "ops", "full": "full"}
    return Llama(case.shape, recompute=kinds[case.recompute])


def parameters(model: nn.Module) -> tuple[int, int]:
    """(all, most in one layer)."""
    layers = (sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules())
    return sum(p.numel() for p in model.parameters()), max(layers)


def by_accelerate(model: nn.Module) -> float:
    """Bytes to train it with Adam in float32."""
    timm = types.ModuleType("timm")  # Not needed, and asks for torchvision.
    timm.__spec__ = ModuleSpec("timm", None)
    sys.modules["timm"] = timm
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    total, _ = calculate_maximum_sizes(model)
    return max(estimate_training_usage(total, "float32").values())


def tensors(inputs: Any) -> tuple[torch.Tensor, ...]:
    return tuple(inputs.values()) if isinstance(inputs, dict) else (inputs,)


def by_tracker(name: str) -> float:
    """Peak bytes of the second step by torch's FSDPMemTracker."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    warnings.simplefilter("ignore")
    is_published = name in PUBLISHED
    if is_published:
        case = cuda_figures.CASES[name]
        ranks, halves = case.ranks, True
    else:
        which, ranks, plan, *_ = SMALL[name]
        halves = "precision" in plan
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    mesh = init_device_mesh("cpu", (ranks,))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if halves else None
    options: dict[str, Any] = {"mesh": mesh} | ({"mp_policy": policy} if policy else {})
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = published_model(name) if is_published else models.build(which)
        layers = model.layers if hasattr(model, "layers") else model.model.layers
        for layer in (*layers, model):
            fully_shard(layer, **options)
        model.set_force_sum_reduction_for_comms(True)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        compute: Callable[..., torch.Tensor]
        if is_published:
            inputs = torch.zeros(case.batch, case.shape.seq_len, dtype=torch.long)
            targets, compute = inputs.clone(), KeepsPrediction() if case.keeps_prediction else loss
        else:
            inputs, targets = mapped(models.batch(which, 0), lambda t: t.chunk(ranks)[0])
            compute = models.loss
        tracker = FSDPMemTracker(model, optimizer)
        tracker.track_inputs((*tensors(inputs), targets))
        for _ in range(2):
            with (
                tracker
            ):  # Which forgets the peak of the first step, and what DTensor tries out in it.
                compute(models.call(model, inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
            tracker.reset_mod_stats()
        peak = tracker.get_tracker_snapshot("peak")
    return max(of_device["Total"] for of_device in peak.values())


def by_meshplan(name: str) -> Any:
    """Peak bytes of the second step."""
    warnings.simplefilter("ignore")
    if name in PUBLISHED:
        return cuda_figures.predicted(cuda_figures.CASES[name])[0] * 2**30
    which, ranks, plan, *_ = SMALL[name]
    return exact.imagined(which, plan, "adamw", ranks, 0)[0].peak.live_bytes


def apart(function: Callable[..., Any], *args: Any) -> Any:
    """In a process of its own: what it answers, or the kind of error."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        try:
            return executor.submit(function, *args).result()
        except Exception as error:
            print(f"{function.__name__}{args}: {error}", file=sys.stderr)
            return f"fails ({type(error).__name__})"


def truth_of(name: str) -> float:
    """In bytes: published, or counted in real processes."""
    if name in PUBLISHED:
        return (cuda_figures.CASES[name].active_gib or 0) * 2**30
    from tests.helpers.pool import Pool

    which, ranks, plan, *_ = SMALL[name]
    pool = Pool(ranks)
    try:
        steps = pool.run(exact.measured, which, plan, "adamw", 4)
    finally:
        pool.close()
    return max(most for most, _ in steps[0].values())


def row(name: str) -> list[str]:
    truth = truth_of(name)
    is_published = name in PUBLISHED
    with torch.device("meta" if is_published else "cpu"):
        model = published_model(name) if is_published else models.build(SMALL[name][0])
    ranks = cuda_figures.CASES[name].ranks if is_published else SMALL[name][1]
    whole, largest = parameters(model)
    values = (
        sum(full_shard(whole, ranks, 1).values()),
        4 * largest + 18 * whole // ranks,
        apart(by_accelerate, model),
        apart(by_tracker, name),
        apart(by_meshplan, name),
    )
    unit = 2**30 if is_published else 2**20
    what = "counted live"
    if is_published:
        what, name = "active", f"Llama {name}"
    cells = [f"{name}, {ranks} ranks", f"{truth / unit:.2f} {_UNITS[unit]} {what}"]
    for value in values:
        if isinstance(value, str):
            cells.append(value)
        else:
            cells.append(f"{value / unit:.2f} ({100 * (value / truth - 1):+.1f} %)")
    return cells


def main(names: list[str]) -> None:
    print("# The same runs by several estimators\n")
    print("Made by `python -m tests.bench.side_by_side`; what each column is stands there.\n")
    print("| run | measured |", " | ".join(_COLUMNS), "|")
    print("|---" * (2 + len(_COLUMNS)) + "|")
    for name in names or (*COUNTED, *PUBLISHED):
        print("|", " | ".join(row(name)), "|", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
