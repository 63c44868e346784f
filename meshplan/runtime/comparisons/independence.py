"""Check that samples do not affect each other, by forwards with other samples and with fewer.

A rank computes on some of the samples. Its results are those of one process only if the model's
output for a sample does not depend on the others, as it does with statistics of a batch, a stopping
rule over all samples, or logits of every pair. So before an update the model runs again, in
evaluation mode and without gradients, with some samples exchanged for others. Sizes and kernels
stay the same, so a model that processes samples one by one returns the same values to the last bit.
If it does not, a forward with different rounding shows how large the effect of rounding may be.
Norms with running statistics are independent in evaluation mode: in training they do what they do
under DistributedDataParallel, which `check` reports.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshplan.errors import Problem
from meshplan.plan.plan import Plan
from meshplan.runtime.apply.loss.lazy_logits import LazyLogits
from meshplan.runtime.apply.loss.loss_mode import loss_mode
from meshplan.runtime.apply.parameters.randomness import undisturbed
from meshplan.runtime.apply.pipeline.module import PipelinedModule
from meshplan.runtime.apply.wrap import own_module
from meshplan.runtime.base.batch import as_arguments
from meshplan.runtime.base.mesh import device_type, local_of
from meshplan.runtime.base.pytree import fill, opaque_in, shape_of, tensors_in
from meshplan.runtime.checks.dry_run import dry_run
from meshplan.runtime.checks.tp_replicas import coarsest_dtype
from meshplan.runtime.comparisons.asking import LossFn, ask, refuse_alone, uncompiled
from meshplan.runtime.comparisons.halves import (
    Three,
    loss_problem,
    three_from,
    three_of_parts,
    told_by,
)
from meshplan.runtime.comparisons.samples import (
    FIRST,
    FIRST_AGAIN,
    LAST,
    LAST_AGAIN,
    WHOLE,
    Samples,
    largest,
)
from meshplan.runtime.watch.stack import user_line

KERNELS, _HALF = (1e-5, 1e-3), 0.1
"""Relative differences of outputs that other kernels, for another number of samples, may cause:
`KERNELS` has a small and the largest one in single precision, `_HALF` is for half precision
[Empirical]."""

_ROUNDINGS, _ROUNDINGS_OF_HALF, _OTHER_KERNELS = 10, 3, 100
"""Factors by which a difference must exceed that of rounding once more not to be due to rounding.

The first two are for runs of one size, in single and half precision: kernels inside may still have
other sizes if samples are routed to experts, and sum in another order; half precision sums in
single. The last one is for runs of two sizes [Empirical]."""

_TF32: Final = 2.0**-11
"""Relative precision to which accelerators round factors of products in single precision."""
_COMPARED: Final = 1 << 22
"""Elements of an output that are compared."""

_Pair = tuple[tuple[int, int], tuple[int, int]]
"""Two (run, 0 for its first part or 1 for its last) with the same samples."""

SAME_SIZE: Final[tuple[_Pair, ...]] = (
    ((WHOLE, 0), (FIRST_AGAIN, 0)),
    ((WHOLE, 1), (LAST_AGAIN, 1)),
    ((FIRST_AGAIN, 0), (FIRST_AGAIN, 1)),
)
FEWER: Final[tuple[_Pair, ...]] = (((WHOLE, 0), (FIRST, 0)), ((WHOLE, 1), (LAST, 0)))


@dataclass(frozen=True, slots=True)
class SampleFindings:
    """The findings of forwards of some samples.

    Attributes:
        mixes: If True, outputs of samples depend on the other samples.
        problem: Problem of the loss; None if there is none.
        asks_values: If True, the forward reads tensor values that other samples change. Its result
            may then be independent for some batches and not for others.
    """

    mixes: bool = False
    problem: Problem | None = None
    asks_values: bool = False


def compare_forwards(
    model: nn.Module, plan: Plan, samples: Samples, loss_fn: LossFn | None, *, asks_fewer: bool
) -> SampleFindings | None:
    """Run the model on some samples and on others; collective over all ranks.

    Args:
        model: The parallelized model.
        plan: The plan that it runs under.
        samples: The samples to run on.
        loss_fn: Loss function whose losses of two parts are compared too; None for outputs only.
        asks_fewer: If True, also run on one part alone.

    Returns:
        The findings, or None if nothing can be concluded: the forward is random, or does not
        accept such samples.
    """
    dtype = _dtype(plan)
    changed: list[bool] = []
    inner = own_module(model)
    asked: dict[int, _TensorReads] = {}
    kept, outputs = _KeptOutputs(), dict[int, Any]()

    def run(part: int) -> list[torch.Tensor]:
        args, kwargs = as_arguments(samples.inputs[part])
        # Stages of a pipeline send whole outputs to each other.
        is_pipelined = isinstance(inner, PipelinedModule)
        mode = nullcontext() if is_pipelined else loss_mode(plan, is_trial=True)
        with in_evaluation(inner), undisturbed(changed), mode, _TensorReads() as asked[part]:
            output = inner(*args, **kwargs)
        if loss_fn is not None and part in (WHOLE, FIRST, LAST):
            outputs[part] = output
        return kept.of(output)

    found: dict[int, list[torch.Tensor]] = {}
    # The user's code may raise anything on other samples.
    with trying(plan):
        found |= {part: run(part) for part in (WHOLE, FIRST_AGAIN, LAST_AGAIN)}
    if largest(not found or any(changed))[0]:
        return None
    # The forward branches on values of the batch, or loops until one meets a condition.
    asks_values = asked[WHOLE].told != asked[FIRST_AGAIN].told or asked[WHOLE].has_changed
    if asks_fewer or loss_fn is not None:
        # A model may require exactly this number of samples.
        with trying(plan):
            found |= {part: run(part) for part in (FIRST, LAST)}
    among_as_many = _largest_distance(found, samples, SAME_SIZE)
    among_fewer = _largest_distance(found, samples, FEWER)
    is_single = torch.finfo(dtype).bits >= 32
    floor, ceiling = KERNELS if is_single else (_HALF, _HALF)
    told = largest(among_as_many, among_fewer)
    # Outputs differ: compare the difference with that of rounding once more.
    if told[0] or told[1] > floor:
        rounding = math.inf
        with trying(plan), _rounded_otherwise(inner):
            again = found | {FIRST_AGAIN: run(WHOLE)}
            rounding = _largest_distance(again, samples, SAME_SIZE[:1])
        most = max(floor, min(ceiling, _OTHER_KERNELS * rounding))
        if rounding > ceiling:
            most = math.inf  # It amplifies rounding so much that another size shows nothing.
        roundings = _ROUNDINGS if is_single else _ROUNDINGS_OF_HALF
        mixes = among_as_many > roundings * rounding or among_fewer > most
        if largest(mixes)[0]:
            return SampleFindings(mixes=mixes, asks_values=asks_values)
    if loss_fn is None or FIRST not in outputs or LAST not in outputs:
        return SampleFindings(asks_values=asks_values)
    with loss_mode(plan, is_trial=True):
        three = _three(loss_fn, outputs, samples, dtype)
    problem = None if three is None else three.confirms(loss_problem(three, plan))
    return SampleFindings(problem=problem, asks_values=asks_values)


@contextmanager
def trying(plan: Plan) -> Iterator[None]:
    """Ignore errors of the user's code on other samples, which all ranks raise together.

    They do because all have the same samples. Along cp each has another part of them, so one rank
    may raise alone while others wait for it; such an error is raised.
    """
    try:
        yield
    except Exception as error:
        if plan.assignment.context is not None:
            refuse_alone(error)


def _three(
    loss_fn: LossFn, outputs: Mapping[int, Any], samples: Samples, dtype: torch.dtype
) -> Three | None:
    """Return the losses of two parts, and of both together.

    They are computed from one output if its parts can be matched with the outputs of parts: that is
    exact, whatever the model rounds. A model that returns its loss is run three times.
    """
    targets = samples.targets[: LAST + 1]
    pieces = [_piece(outputs[WHOLE], outputs[part], part) for part in (FIRST, LAST)]
    if None not in pieces:
        return three_of_parts(loss_fn, (outputs[WHOLE], *pieces), targets)
    values = []
    try:
        for part in (WHOLE, FIRST, LAST):
            values.append(told_by(ask(loss_fn, outputs[part], targets[part]), targets[part]))
    except Exception as error:  # The user's code may not accept fewer samples.
        if any(isinstance(t, LazyLogits) for _, t in tensors_in(outputs[WHOLE])):
            refuse_alone(error)
        return None
    known = [value for value in values if value is not None]
    if len(known) < 3:
        return None
    floats = [t for _, t in tensors_in(outputs[WHOLE]) if t.is_floating_point()]
    return three_from(known, [t for t in floats if not isinstance(t, LazyLogits)], dtype)


def _piece(whole: Any, like: Any, part: int) -> Any:
    """Return the part of an output that belongs to one of two parts of the samples, or None.

    A tensor with the same shape and values as in the output of one part belongs to no sample: it is
    a parameter that the model returns.
    """
    taken: list[torch.Tensor] = []
    tensors = [[tensor for _, tensor in tensors_in(each)] for each in (whole, like)]
    if len(tensors[0]) != len(tensors[1]):
        return None
    for full, own in zip(*tensors, strict=True):
        apart = [d for d, n in enumerate(full.shape) if n != own.shape[d : d + 1].numel()]
        if isinstance(full, LazyLogits | DTensor) or full.ndim != own.ndim or len(apart) > 1:
            return None
        if apart:
            start = 0 if part == FIRST else full.shape[apart[0]] - own.shape[apart[0]]
            taken.append(full.narrow(apart[0], start, own.shape[apart[0]]))
        elif full.shape == own.shape and torch.equal(full, own):
            taken.append(full)
        else:
            return None
    form = shape_of(whole, lambda tensor: 0)
    parts = iter(taken)
    return None if any(opaque_in(form)) else fill(form, lambda _: next(parts))


class _KeptOutputs:
    """Keeps tensors of outputs, and lets go of the outputs with their generation caches."""

    def __init__(self) -> None:
        self._steps: dict[int, int] = {}

    def of(self, output: Any) -> list[torch.Tensor]:
        """Return the tensors to compare; of large ones some columns, the same of each run."""
        found = []
        for number, (_, tensor) in enumerate(tensors_in(output)):
            own = tensor._view.hidden if isinstance(tensor, LazyLogits) else tensor
            own = local_of(own).detach()
            step = self._steps.setdefault(number, -(-own.numel() // _COMPARED))
            is_large = step > 1 and own.ndim > 1
            found.append(own[..., ::step].clone() if is_large else own)
        return found


class _TensorReads(TorchDispatchMode):
    """Records values that Python code reads from tensors: `.item()`, `if tensor:`.

    The code may branch on them. Integers are not recorded: they are sizes, such as the number of
    tokens of an expert.

    Attributes:
        told: (line of the model's code that read a value, the value).
    """

    def __init__(self) -> None:
        super().__init__()
        self.told: set[tuple[str, str]] = set()

    @property
    def has_changed(self) -> bool:
        """True if one line read two values, as the condition of a loop does in the end."""
        return len({line for line, _ in self.told}) < len(self.told)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._local_scalar_dense.default and type(given) in (bool, float):
            self.told.add((user_line(), repr(given)))
        return given


@contextmanager
def _rounded_otherwise(model: nn.Module) -> Iterator[None]:
    """Change the output of each innermost module by as much as rounding it once more may."""

    def shaken(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or isinstance(tensor, LazyLogits) or not tensor.numel():
            return tensor
        step = torch.finfo(tensor.dtype).eps
        if device_type() != "cpu" and tensor.dtype == torch.float32:
            step = _TF32
        waves = torch.sin(tensor.double() * 1e4).to(tensor.dtype)
        # Clamp, so that values with bounds, such as probabilities, stay inside them.
        return (tensor + tensor * (step * waves)).clamp(*torch.aminmax(tensor))

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        tensors = iter([shaken(tensor) for _, tensor in tensors_in(output)])
        form = shape_of(output, lambda tensor: 0)
        return output if any(opaque_in(form)) else fill(form, lambda _: next(tensors))

    handles = [
        module.register_forward_hook(hook)
        for module in _modules_run(model)
        if not any(module.children())
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _modules_run(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that run on this rank; with a pipeline, those of its stages' units."""
    if not isinstance(model, PipelinedModule):
        yield from model.modules()
        return
    for stage, part in model.stages.items():
        for unit in {unit for unit, place in model.pipeline.units if place == stage}:
            yield from part.get_submodule(unit).modules()


@contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """Run a model dry and uncompiled; with a pipeline, also the forward that it records."""
    with (
        uncompiled(),
        dry_run(model),
        dry_run(model.skeleton) if isinstance(model, PipelinedModule) else nullcontext(),
    ):
        yield


def _dtype(plan: Plan) -> torch.dtype:
    """Return the coarsest dtype that forwards compute with."""
    kind = device_type()
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    dtype = coarsest_dtype(plan)
    # Accelerators multiply float32 with fewer bits (TF32), and in an order that depends on sizes.
    return torch.bfloat16 if kind != "cpu" and dtype == torch.float32 else dtype


def _largest_distance(
    found: Mapping[int, Sequence[torch.Tensor]], samples: Samples, pairs: Sequence[_Pair]
) -> float:
    """Return the largest relative distance between outputs of the same samples in two runs."""
    largest_yet = 0.0
    # An output may be a list with one tensor per sample.
    for number in range(min(map(len, found.values()))):
        whole = found[WHOLE][number]
        if not (whole.is_floating_point() or whole.is_complex()):
            continue
        fewer = found[FIRST][number].shape if FIRST in found else None
        dim = _samples_dim(whole.shape, fewer, samples)
        for sides in pairs if dim is not None else ():
            if all(run in found and found[run][number].ndim == whole.ndim for run, _ in sides):
                left, right = (
                    found[run][number].movedim(dim, 0)[samples.rows(run, which)]
                    for run, which in sides
                )
                if left.shape == right.shape:
                    largest_yet = max(largest_yet, _distance(left, right))
                elif FIRST_AGAIN in found and whole.shape == found[FIRST_AGAIN][number].shape:
                    # Another length may be that of the longest sample. The numbers of
                    # samples along a second dim mean that outputs are of pairs.
                    as_pairs = samples.size, samples.size * samples.parts
                    is_of_pairs = as_pairs in zip(right.shape[1:], left.shape[1:], strict=True)
                    largest_yet = math.inf if is_of_pairs else largest_yet
    return largest_yet


def _samples_dim(whole: Sequence[int], fewer: Sequence[int] | None, samples: Samples) -> int | None:
    """Return the dim of an output along which samples lie, 0 or 1; None if it is not clear."""
    dims = [dim for dim, size in enumerate(whole[:2]) if size == samples.size * samples.parts]
    if fewer is not None:
        dims = [dim for dim in dims if fewer[dim : dim + 1] == (samples.size,)]
    elif len(dims) > 1:
        return None  # A sequence may be as long as the number of samples.
    return dims[0] if dims else None


def _distance(left: torch.Tensor, right: torch.Tensor) -> float:
    if torch.equal(left, right):
        return 0.0
    wide = torch.complex128 if left.is_complex() else torch.float64
    left, right = (t.nan_to_num().to(wide) for t in (left, right))
    scale = max(float(left.norm()), float(right.norm()))
    return float((left - right).norm()) / scale if scale else 0.0
