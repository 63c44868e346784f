"""Samples that look at one another: a forward of half a batch beside one of all of it.

A rank computes on some of the samples. That is what one process does with them only if what the
model makes of a sample does not depend on the others: statistics of a batch, a stopping rule that
asks all of them, logits of every pair. So before the first update the model runs again on all
samples of a microbatch and on each half, in evaluation and without gradients. Norms that follow
the statistics of training are independent then: what they do in training is what
DistributedDataParallel does, and `check` says it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase

from meshplan.errors import Problem
from meshplan.plan import Plan
from meshplan.runtime.applied import own_module
from meshplan.runtime.aside import aside
from meshplan.runtime.batch import as_arguments
from meshplan.runtime.checks.halves import (
    LossFn,
    cut,
    loss_problem,
    three_from,
    undisturbed,
    value_of,
)
from meshplan.runtime.loss import take_loss
from meshplan.runtime.loss_mode import loss_mode
from meshplan.runtime.mesh import device_type
from meshplan.runtime.nest import tensors_in
from meshplan.runtime.pending import Pending
from meshplan.runtime.pipeline.module import PipelinedModule
from meshplan.runtime.selftest import coarsest_dtype

_SINGLE, _HALF = 1e-3, 0.1
"""Relative differences of a sample's output that other kernels for another number of samples do
not make [Empirical]."""


@dataclass(frozen=True, slots=True)
class Found:
    """What forwards of halves told.

    Attributes:
        mixes: Whether outputs of samples depend on the other samples.
        problem: Of the loss.
    """

    mixes: bool = False
    problem: Problem | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Halves:
    """A microbatch, and each half of it.

    Attributes:
        inputs: Of all samples, of the first half and of the second.
        targets: Likewise.
        half: Samples of a half.
    """

    inputs: tuple[Any, ...]
    targets: tuple[Any, ...]
    half: int


def halves_of(inputs: Any, targets: Any, samples: int) -> Halves | None:
    """A microbatch and its halves; None where samples do not lie along dim 0 of all tensors."""
    half = samples // 2
    if not half:
        return None
    parts = [slice(0, 2 * half), slice(0, half), slice(half, 2 * half)]
    found = cut(inputs, samples, parts, is_output=False)
    wanted = cut(targets, samples, parts, is_output=False)
    if found is None or wanted is None:
        return None
    return Halves(inputs=tuple(found), targets=tuple(wanted), half=half)


def compare_forwards(
    model: nn.Module, plan: Plan, halves: Halves, loss_fn: LossFn | None
) -> Found | None:
    """Run the model on a microbatch and on its halves; all ranks together.

    Args:
        loss_fn: Whose losses are compared too; None for outputs only.

    Returns:
        None where nothing can be told: the forward is random, or does not take fewer samples.
    """
    outputs: list[Any] = []
    values = []
    changed: list[bool] = []
    inner = own_module(model)
    try:
        with _in_evaluation(inner), undisturbed(changed):
            for inputs, targets in zip(halves.inputs, halves.targets, strict=True):
                args, kwargs = as_arguments(inputs)
                with loss_mode(plan) if loss_fn is not None else nullcontext():
                    outputs.append(inner(*args, **kwargs))
                    if loss_fn is not None:
                        values.append(value_of(take_loss(loss_fn, outputs[-1], targets), targets))
    except Exception:  # The user's code may raise anything when it gets fewer samples.
        return None
    if changed[0]:
        return None
    if _apart(outputs[0], outputs[1], halves.half, _dtype(plan)):
        return Found(mixes=True)
    told = [value for value in values if value is not None]
    if len(told) < 3:
        return Found()
    floats = [t for _, t in tensors_in(outputs[0]) if t.is_floating_point()]
    terms = [t for t in floats if not isinstance(t, Pending)]
    return Found(problem=loss_problem(three_from(told, terms, _dtype(plan)), plan))


@contextmanager
def _in_evaluation(model: nn.Module) -> Iterator[None]:
    """Run a model aside; of a pipeline also the forward that it records."""
    with (
        aside(model),
        aside(model.skeleton) if isinstance(model, PipelinedModule) else nullcontext(),
    ):
        yield


def _dtype(plan: Plan) -> torch.dtype:
    """The coarsest dtype that forwards compute with."""
    kind = device_type()
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    dtype = coarsest_dtype(plan)
    # Accelerators multiply float32 with fewer bits (TF32), in the order that a size suggests.
    return torch.bfloat16 if kind != "cpu" and dtype == torch.float32 else dtype


def _apart(whole: Any, part: Any, half: int, dtype: torch.dtype) -> bool:
    """Whether the outputs of the first samples depend on what else is in the batch."""
    pairs = list(zip(tensors_in(whole), tensors_in(part), strict=False))
    for (_, full), (_, own) in pairs:
        if isinstance(full, Pending) or not full.is_floating_point() or not full.ndim:
            continue
        full, own = _local(full), _local(own)
        if full.ndim != own.ndim or own.shape[0] != half or full.shape[0] != 2 * half:
            continue
        if full.shape[1:] != own.shape[1:]:
            # Another length may be that of the longest sample; all pairs of samples are no length.
            twice = tuple(2 * n if n == half else n for n in own.shape[1:])
            if twice == tuple(full.shape[1:]):
                return True
            continue
        tolerance = _HALF if torch.finfo(dtype).bits < 32 else _SINGLE
        if _median_difference(full[:half], own) > tolerance:
            return True
    return False


def _median_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Of samples, the relative distance: routing may tip over for a few by rounding alone."""
    a, b = (t.detach().reshape(len(t), -1).double() for t in (a, b))
    size = torch.maximum(a.norm(dim=1), b.norm(dim=1))
    share = torch.where(size > 0, (a - b).norm(dim=1) / size, 0.0)
    return float(torch.nan_to_num(share).median()) if share.numel() else 0.0


def name_mixing(model: nn.Module, halves: Halves) -> tuple[str, nn.Module] | None:
    """The first module whose outputs differ with the other samples though its inputs do not.

    Collective, as `compare_forwards` is.
    """
    inner = own_module(model)
    changed: list[bool] = []
    told: list[dict[tuple[str, int], tuple[Any, Any]]] = []
    for inputs in halves.inputs[:2]:
        digests: dict[tuple[str, int], tuple[Any, Any]] = {}
        handles = [
            module.register_forward_hook(_digest(name, digests, halves.half), with_kwargs=True)
            for name, module in inner.named_modules()
        ]
        try:
            with _in_evaluation(inner), undisturbed(changed):
                args, kwargs = as_arguments(inputs)
                inner(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
        told.append(digests)
    whole, part = told
    for (name, call), (taken, given) in part.items():
        if (name, call) not in whole:
            continue
        other_taken, other_given = whole[name, call]
        if _same(taken, other_taken) and not _same(given, other_given):
            return name, inner.get_submodule(name)
    return None


def _digest(
    name: str, digests: dict[tuple[str, int], tuple[Any, Any]], half: int
) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call = sum(1 for known, _ in digests if known == name)
        digests[name, call] = _sums((args, kwargs), half), _sums(output, half)

    return hook


def _sums(item: Any, half: int) -> list[torch.Tensor | None]:
    """Two numbers for each of the first samples, tensor by tensor; None where none lie there."""
    out: list[torch.Tensor | None] = []
    for _, tensor in tensors_in(item):
        own = _local(tensor)
        if not own.ndim or own.shape[0] < half or isinstance(own, Pending) or own.is_complex():
            out.append(None)
            continue
        rows = own[:half].detach().reshape(half, -1).double()
        out.append(torch.stack((rows.sum(1), rows.square().sum(1)), 1))
    return out


def _same(a: list[torch.Tensor | None], b: list[torch.Tensor | None]) -> bool:
    if len(a) != len(b):
        return False
    for left, right in zip(a, b, strict=True):
        if left is None or right is None:
            continue
        scale = torch.maximum(left[:, 1:], right[:, 1:]).sqrt().clamp(min=1e-30)
        if bool((((left - right).abs()[:, :1] / scale) > _SINGLE).any()):
            return False
        squares = (left - right).abs()[:, 1:] / scale.square()
        if bool((squares > _SINGLE).any()):
            return False
    return True


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def follows_statistics(module: nn.Module) -> bool:
    """Whether a module is a norm over the batch, which DistributedDataParallel leaves as it is."""
    return isinstance(module, _NormBase)


def mixing_problem(found: tuple[str, nn.Module] | None, plan: Plan) -> Problem:
    """What is to be said of a forward whose samples look at one another."""
    if found is not None and found[0]:
        name, module = found
        who = f"'{name}' ({type(module).__name__}) gives"
    else:
        who = "the forward of the model gives"
    return Problem(
        f"{who} a sample another output when other samples are beside it, and each rank and "
        "microbatch has some of them only: the numbers would not be those of one process",
        plan.spec.origin("batch"),
        "gather what it looks at with meshplan.gather_batch; or say batch: {per_rank: true}, "
        "where each rank's batch is meant to stand alone",
    )
