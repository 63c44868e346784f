"""Find the module that lets samples affect each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from meshplan.errors import Problem
from meshplan.plan.plan import Plan
from meshplan.runtime.apply.loss.lazy_logits import LazyLogits
from meshplan.runtime.apply.parameters.randomness import undisturbed
from meshplan.runtime.apply.pipeline.module import PipelinedModule
from meshplan.runtime.apply.wrap import own_module
from meshplan.runtime.base.batch import as_arguments
from meshplan.runtime.base.mesh import local_of
from meshplan.runtime.base.pytree import tensors_in
from meshplan.runtime.comparisons.independence import (
    FEWER,
    KERNELS,
    SAME_SIZE,
    in_evaluation,
    trying,
)
from meshplan.runtime.comparisons.samples import (
    FIRST,
    FIRST_AGAIN,
    LAST,
    LAST_AGAIN,
    WHOLE,
    Samples,
)

_ALIKE: Final = 1e-6
"""Largest relative difference between the sums of a sample in two rows of one batch that rounding
may cause: a kernel may add up its rows in different orders."""

_Digests = dict[tuple[str, int], tuple[Any, Any]]


def name_mixing(model: nn.Module, plan: Plan, samples: Samples) -> tuple[str, nn.Module] | None:
    """Return the first module that lets samples affect each other.

    The outputs of this module for a sample change with the other samples, but its inputs for the
    sample do not. All ranks must call this function, because it runs the model.

    Returns:
        (fqn, module), or None if no module is found.
    """
    inner = own_module(model)
    parts = inner.stage_modules if isinstance(inner, PipelinedModule) else [inner]
    modules = {name: module for part in parts for name, module in part.named_modules()}
    changed: list[bool] = []
    by_run: dict[int, _Digests] = {}
    for run in (WHOLE, FIRST_AGAIN, LAST_AGAIN, FIRST, LAST):
        digests = by_run[run] = _Digests()
        end = samples.rows(run, 1).stop
        handles = [
            module.register_forward_hook(_digest(name, digests, end), with_kwargs=True)
            for name, module in modules.items()
        ]
        try:
            with trying(plan), in_evaluation(inner), undisturbed(changed):
                args, kwargs = as_arguments(samples.inputs[run])
                inner(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
    for ((one, which), (other, its)), tolerance in (
        *((pair, _ALIKE) for pair in SAME_SIZE),
        *((pair, KERNELS[1]) for pair in FEWER),
    ):
        for call, (taken, given) in by_run[other].items():
            own, here, others = (
                by_run[one].get(call),
                samples.rows(one, which),
                samples.rows(other, its),
            )
            if own is None or all(sums is None for sums in taken):
                continue
            is_fed_alike = _same(own[0], here, taken, others, tolerance)
            if is_fed_alike and not _same(own[1], here, given, others, tolerance):
                return call[0], modules[call[0]]
    return None


def _digest(name: str, digests: _Digests, rows: int) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call = sum(1 for known, _ in digests if known == name)
        digests[name, call] = _sums((args, kwargs), rows), _sums(output, rows)

    return hook


def _sums(item: Any, rows: int) -> list[torch.Tensor | None]:
    """Return two sums per sample for each tensor in a nested value: of elements and of squares.

    The entry of a tensor that does not have its samples along dim 0 is None.

    Args:
        item: Inputs or outputs of a module.
        rows: Number of samples.

    Shape: each (rows, 2)
    """
    out: list[torch.Tensor | None] = []
    for _, tensor in tensors_in(item):
        own = local_of(tensor)
        if not own.ndim or own.shape[0] != rows or isinstance(own, LazyLogits) or own.is_complex():
            out.append(None)
            continue
        flat = own.detach().reshape(rows, -1).double()
        out.append(torch.stack((flat.sum(1), flat.square().sum(1)), 1))
    return out


def _same(
    a: list[torch.Tensor | None],
    here: slice,
    b: list[torch.Tensor | None],
    there: slice,
    tolerance: float,
) -> bool:
    if len(a) != len(b):
        return False
    for one, other in zip(a, b, strict=True):
        if one is None or other is None:
            continue
        left, right = one[here], other[there]
        scale = torch.maximum(left[:, 1:], right[:, 1:]).sqrt().clamp(min=1e-30)
        far = torch.cat(((left - right)[:, :1] / scale, (left - right)[:, 1:] / scale.square()), 1)
        if bool((far.abs() > tolerance).any()):
            return False
    return True


def follows_statistics(module: nn.Module) -> bool:
    """Return True for a norm over the batch (BatchNorm, InstanceNorm).

    Under DistributedDataParallel too, each rank normalises its own samples.
    """
    return isinstance(module, _NormBase)


def mixing_problem(found: tuple[str, nn.Module] | None, plan: Plan) -> Problem:
    """Return the problem of a forward whose samples affect each other.

    Args:
        found: (fqn, module) from `name_mixing`; None if no module was found.
        plan: The plan that the model runs under.
    """
    if found is not None and found[0]:
        name, module = found
        who = f"'{name}' ({type(module).__name__}) gives"
    else:
        who = "the forward of the model gives"
    return Problem(
        f"{who} a sample another output when the other samples of the batch change, but each rank "
        "and microbatch has only some of these samples: the results would differ from those of one "
        "process",
        plan.spec.origin("batch"),
        "gather the samples that the output depends on with meshplan.gather_batch; or set batch: "
        "{per_rank: true} if each rank's batch is meant to be independent",
    )
