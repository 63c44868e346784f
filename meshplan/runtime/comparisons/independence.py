"""Check that the model's output for a sample does not depend on the other samples of the batch.

A rank computes on some of the samples only. Its results are those of one process only if samples do
not affect each other. They do with batch statistics, a stopping rule over all samples, or logits of
every pair of samples. So before an update the model runs again, in evaluation mode and without
gradients, with some samples exchanged for others. Sizes and kernels stay the same, so a model that
processes samples one by one returns the same values to the last bit. If the values differ, another
forward with slightly different rounding shows how large the effect of rounding may be.

Norms with running statistics pass this check, because samples do not affect each other in
evaluation mode. In training they behave as under DistributedDataParallel, and `meshplan check`
reports that.
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
    value_of_call,
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
"""Relative differences of outputs that may be due to rounding between runs with different numbers
of samples, whose kernels differ [Empirical]. In single precision, `KERNELS` has the difference that
is never questioned and the largest possible one; `_HALF` is both in half precision."""

_ROUNDINGS, _ROUNDINGS_OF_HALF, _OTHER_KERNELS = 10, 3, 100
"""A difference that exceeds the measured effect of rounding by more than this factor is not due to
rounding [Empirical].

The first two are for runs of equal size, in single and half precision. Their kernels may still have
different sizes and add up in a different order, if samples are routed to experts. In half precision
sums are accumulated in single precision, so the factor is smaller. The last one is for runs of
different sizes."""

_TF32: Final = 2.0**-11
"""Relative precision of the factors of a float32 matrix multiplication on accelerators (TF32)."""
_COMPARED: Final = 1 << 22
"""About how many elements of an output are compared."""

_Pair = tuple[tuple[int, int], tuple[int, int]]
"""Two places with the same samples, each as (run, 0 for the run's first part or 1 for its last)."""

SAME_SIZE: Final[tuple[_Pair, ...]] = (
    ((WHOLE, 0), (FIRST_AGAIN, 0)),
    ((WHOLE, 1), (LAST_AGAIN, 1)),
    ((FIRST_AGAIN, 0), (FIRST_AGAIN, 1)),
)
FEWER: Final[tuple[_Pair, ...]] = (((WHOLE, 0), (FIRST, 0)), ((WHOLE, 1), (LAST, 0)))


@dataclass(frozen=True, slots=True)
class SampleFindings:
    """The findings of `compare_forwards` about a model.

    Attributes:
        mixes: True if the output for a sample depends on the other samples.
        problem: Why the losses of parts do not combine to the loss of all samples; None if they do
            or were not compared.
        asks_values: True if the forward reads tensor values (`.item()`) that change with the
            samples. Samples may then affect each other in some batches only, so that later steps
            must be checked too.
    """

    mixes: bool = False
    problem: Problem | None = None
    asks_values: bool = False


def compare_forwards(
    model: nn.Module, plan: Plan, samples: Samples, loss_fn: LossFn | None, *, asks_fewer: bool
) -> SampleFindings | None:
    """Run the model on different selections of samples and compare; all ranks must call this.

    Args:
        model: The parallelized model.
        plan: The plan that the model runs under.
        samples: The samples to run on.
        loss_fn: Also compare the losses of the first and the last part with that of all samples,
            computed by this function; None to compare outputs only.
        asks_fewer: If True, also run on each of these two parts alone.

    Returns:
        The findings, or None if nothing can be concluded: the forward is random, or raises for
        such samples.
    """
    dtype = _dtype(plan)
    changed: list[bool] = []
    inner = own_module(model)
    reads: dict[int, _TensorReads] = {}
    kept, outputs = _KeptOutputs(), dict[int, Any]()

    def run(part: int) -> list[torch.Tensor]:
        args, kwargs = as_arguments(samples.inputs[part])
        # A pipeline needs no such mode: its stages send whole outputs to each other.
        is_pipelined = isinstance(inner, PipelinedModule)
        mode = nullcontext() if is_pipelined else loss_mode(plan, is_trial=True)
        with in_evaluation(inner), undisturbed(changed), mode, _TensorReads() as reads[part]:
            output = inner(*args, **kwargs)
        if loss_fn is not None and part in (WHOLE, FIRST, LAST):
            outputs[part] = output
        return kept.of(output)

    found: dict[int, list[torch.Tensor]] = {}
    # The user's code may raise for these samples; `found` then stays empty.
    with trying(plan):
        found |= {part: run(part) for part in (WHOLE, FIRST_AGAIN, LAST_AGAIN)}
    if largest(not found or any(changed))[0]:
        return None
    # A read value that differs between two selections of samples, or between two reads of one line,
    # may decide a branch or end a loop.
    asks_values = reads[WHOLE].values != reads[FIRST_AGAIN].values or reads[WHOLE].has_changed
    if asks_fewer or loss_fn is not None:
        # A model may accept only the full number of samples and raise for fewer.
        with trying(plan):
            found |= {part: run(part) for part in (FIRST, LAST)}
    among_as_many = _largest_distance(found, samples, SAME_SIZE)
    among_fewer = _largest_distance(found, samples, FEWER)
    is_single = torch.finfo(dtype).bits >= 32
    floor, ceiling = KERNELS if is_single else (_HALF, _HALF)
    worst = largest(among_as_many, among_fewer)
    # If outputs differ, compare the difference with that of a forward with different rounding.
    if worst[0] or worst[1] > floor:
        rounding = math.inf
        with trying(plan), _perturbed_rounding(inner):
            perturbed = found | {FIRST_AGAIN: run(WHOLE)}
            rounding = _largest_distance(perturbed, samples, SAME_SIZE[:1])
        most = max(floor, min(ceiling, _OTHER_KERNELS * rounding))
        if rounding > ceiling:
            most = math.inf  # The model amplifies rounding too much to compare runs of two sizes.
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
    """Ignore errors inside the `with` block if all ranks have one there.

    All ranks run the user's code on the same samples, so all of them raise. Along cp each rank has
    another part of the samples, so one rank may raise while others wait for it in a collective.
    Under cp the ranks therefore ask each other, and an error that not all of them have is raised.
    """
    try:
        yield
    except Exception as error:
        if plan.assignment.context is not None:
            refuse_alone(error)


def _three(
    loss_fn: LossFn, outputs: Mapping[int, Any], samples: Samples, dtype: torch.dtype
) -> Three | None:
    """Return the losses of all samples and of the two parts; None if they cannot be compared.

    If possible all three losses are computed from slices of one output, that of all samples: then
    rounding in the model does not matter. The outputs of the parts show how to slice. If that is
    not possible, such as for a model that returns its loss, the outputs of three runs are used.

    Args:
        loss_fn: The user's loss function.
        outputs: Outputs of the runs `WHOLE`, `FIRST` and `LAST`.
        samples: The samples of the runs, in two parts.
        dtype: The coarsest dtype of the forwards.
    """
    targets = samples.targets[: LAST + 1]
    pieces = [_piece(outputs[WHOLE], outputs[part], part) for part in (FIRST, LAST)]
    if None not in pieces:
        return three_of_parts(loss_fn, (outputs[WHOLE], *pieces), targets)
    values = []
    try:
        for part in (WHOLE, FIRST, LAST):
            values.append(value_of_call(ask(loss_fn, outputs[part], targets[part]), targets[part]))
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
    """Return the slice of an output that belongs to one part of the samples; None if it is unclear.

    A tensor with the same shape and values in both outputs belongs to no sample, such as a
    parameter that the model returns. It is kept whole.

    Args:
        whole: Output of the model for all samples.
        like: Output of the model for this part alone, which shows the sizes.
        part: `FIRST` or `LAST`.
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
    parts = iter(taken)
    form = shape_of(whole, lambda _: next(parts))
    return None if any(opaque_in(form)) else fill(form)


class _KeptOutputs:
    """Takes the tensors to compare from outputs, so that outputs with KV caches can be freed."""

    def __init__(self) -> None:
        self._steps: dict[int, int] = {}

    def of(self, output: Any) -> list[torch.Tensor]:
        """Return the tensors of an output to compare.

        Of a large tensor some columns are copied, the same columns in every run.
        """
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

    The code may branch on such a value. Integers are not recorded, because they are usually sizes,
    such as the number of tokens of an expert.

    Attributes:
        values: Pairs (line of the user's code that read a value, repr of the value).
    """

    def __init__(self) -> None:
        super().__init__()
        self.values: set[tuple[str, str]] = set()

    @property
    def has_changed(self) -> bool:
        """True if one line read two different values, as the condition of a loop does."""
        return len({line for line, _ in self.values}) < len(self.values)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._local_scalar_dense.default and type(given) in (bool, float):
            self.values.add((user_line(), repr(given)))
        return given


@contextmanager
def _perturbed_rounding(model: nn.Module) -> Iterator[None]:
    """Change each innermost module's output by a rounding error inside the `with` block."""

    def perturbed(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or isinstance(tensor, LazyLogits) or not tensor.numel():
            return tensor
        step = torch.finfo(tensor.dtype).eps
        if device_type() != "cpu" and tensor.dtype == torch.float32:
            step = _TF32
        waves = torch.sin(tensor.double() * 1e4).to(tensor.dtype)
        # Clamp, so that values with bounds, such as probabilities, stay inside them.
        return (tensor + tensor * (step * waves)).clamp(*torch.aminmax(tensor))

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        form = shape_of(output, perturbed)
        return output if any(opaque_in(form)) else fill(form)

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
    """Yield the modules that run on this rank; with a pipeline, those inside its stages' units."""
    if not isinstance(model, PipelinedModule):
        yield from model.modules()
        return
    for stage, part in model.stages.items():
        for unit in {unit for unit, place in model.pipeline.units if place == stage}:
            yield from part.get_submodule(unit).modules()


@contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """Make forwards of a model dry runs without compilation inside the `with` block.

    A pipelined model also gets a dry run of its skeleton, whose forward it records.
    """
    with (
        uncompiled(),
        dry_run(model),
        dry_run(model.skeleton) if isinstance(model, PipelinedModule) else nullcontext(),
    ):
        yield


def _dtype(plan: Plan) -> torch.dtype:
    """Return the dtype with the largest rounding error in which forwards compute."""
    kind = device_type()
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    dtype = coarsest_dtype(plan)
    # float32 on an accelerator counts as bfloat16: matrix multiplications may use fewer bits (TF32)
    # and add up in an order that depends on sizes.
    return torch.bfloat16 if kind != "cpu" and dtype == torch.float32 else dtype


def _largest_distance(
    found: Mapping[int, Sequence[torch.Tensor]], samples: Samples, pairs: Sequence[_Pair]
) -> float:
    """Return the largest relative distance between outputs for the same samples.

    Return infinity if an output has an entry per pair of samples, and 0 if nothing is comparable.

    Args:
        found: Run -> tensors of its output.
        samples: The samples of the runs.
        pairs: The places with the same samples.
    """
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
                    # A dim that differs may be padded to the longest sample. If its sizes are
                    # the numbers of samples, the output has an entry per pair of samples.
                    as_pairs = samples.size, samples.size * samples.parts
                    is_of_pairs = as_pairs in zip(right.shape[1:], left.shape[1:], strict=True)
                    largest_yet = math.inf if is_of_pairs else largest_yet
    return largest_yet


def _samples_dim(whole: Sequence[int], fewer: Sequence[int] | None, samples: Samples) -> int | None:
    """Return the dim of an output that counts samples, 0 or 1; None if it is not clear.

    Args:
        whole: Shape of the output for all samples.
        fewer: Shape of the output for the first part alone; None if it did not run.
        samples: The samples of the runs.
    """
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
