"""`predict`: what a model says about every sample of a dataset, in the dataset's order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshplan.errors import ApplyError, Problem
from meshplan.layout.mesh import DATA_AXES
from meshplan.runtime.apply.context.batch import has_sequence, sequence_length
from meshplan.runtime.apply.context.parts import Parts
from meshplan.runtime.apply.wrap import Applied, applied
from meshplan.runtime.base.batch import as_arguments, chunked, mapped
from meshplan.runtime.base.batch_agreement import num_samples
from meshplan.runtime.base.mesh import device, gather_into, gathered, submesh
from meshplan.runtime.base.pytree import fill, shape_of
from meshplan.runtime.trace.side_effects import randomness_kept
from meshplan.runtime.train.dataloader import (
    check_ranks,
    length_of,
    on_this_rank,
    share_of_rank,
)
from meshplan.runtime.train.epoch_reader import EpochReader
from meshplan.runtime.train.evaluation import evaluation_mode
from meshplan.runtime.watch.guard import guarded


@guarded("predict")
def predict(
    model: nn.Module,
    dataset: Any,
    *,
    inputs: Callable[[Any], Any] | None = None,
    take: Callable[[Any], Any] | None = None,
    batch_size: int | None = None,
    num_workers: int = 0,
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> Any:
    """Return the model's outputs for all samples of a dataset, in its order. All ranks call it.

    The model runs in evaluation mode without gradients, and each module is in its own mode again
    afterwards. Samples that fill up the last batch are not in the result.

    Args:
        model: The module that `parallelize` returned.
        dataset: A map-style dataset, or an iterable one, as for `dataloader`.
        inputs: Picks the model's inputs from a batch of the dataset, such as
            `lambda batch: batch[0]` for samples that are (inputs, targets). None if the batch is
            the inputs.
        take: Picks what to keep of an output for the whole sequence of this rank's samples: a
            tensor, or a tuple, list or mapping of tensors, with the samples along dim 0. None to
            keep all of it.
        batch_size: Samples that all ranks process at once; None for the plan's `batch`.
        num_workers: Number of processes that read samples.
        collate_fn: Makes a batch of a list of samples; None for torch's.

    Returns:
        What `take` returns, with all samples along dim 0, in CPU memory, equal on every rank.

    Raises:
        ApplyError: The dataset has no samples, the kept values are not tensors with one entry for
            each sample, or their other dims differ from batch to batch or from rank to rank.

    Example:
        >>> classes = meshplan.predict(
        ...     model, test, inputs=lambda batch: batch[0], take=lambda logits: logits.argmax(-1)
        ... )
    """
    state = applied(model)
    plan = state.given
    share, length = share_of_rank(plan, batch_size, drop_last=False), length_of(dataset)
    check_ranks({"dataset": length, "batch_size": share.batch_size})
    reader = EpochReader(dataset, length, {0: share}, False, 0, num_workers, collate_fn)
    kept: list[Any] = []
    batches, start = reader.batches(0, 0), 0
    with torch.no_grad(), evaluation_mode(model):
        while True:
            with randomness_kept():
                block, batch = next(batches, (None, None))
            if block is None:
                break
            whole = batch if inputs is None else inputs(batch)
            own = _outputs(model, state, whole, take)
            every, num = _of_all_ranks(own, state), block.end - start
            kept.append(mapped(every, partial(_first, num)))
            start = block.end
    if not kept:
        raise ApplyError(Problem("the dataset has no samples to predict"))
    return _joined(kept)


def _first(num: int, tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:num]


def _outputs(
    model: nn.Module, state: Applied, inputs: Any, take: Callable[[Any], Any] | None
) -> Any:
    """Return what is kept of the outputs for this rank's samples, in the plan's microbatches."""
    samples, count = num_samples(inputs), state.given.accumulate
    kept = []
    for part in chunked(inputs, count):
        args, kwargs = as_arguments(on_this_rank(part, state.plan))
        output = _with_whole_sequence(model(*args, **kwargs), part, state)
        output = output if take is None else take(output)
        _check_kept(output, samples // count)
        kept.append(output)
    return _joined(kept)


def _with_whole_sequence(output: Any, inputs: Any, state: Applied) -> Any:
    """Return an output with the tokens of all ranks along cp, for inputs of the whole sequence."""
    context = state.plan.assignment.context
    if context is None:
        return output
    parts = Parts.of(context, state.mesh)
    own = sequence_length(inputs, state.plan.spec.batch.seq_len) // parts.size

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        return parts.gather(tensor, 1) if has_sequence(tensor, own) else tensor

    # Unlike `mapped`, this keeps the type of a transformers output.
    return fill(shape_of(output, whole))


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of everything in nested tuples, lists and mappings, as `mapped` does."""
    items: Iterable[tuple[Any, Any]]
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, tuple | list):
        items = enumerate(value)
    else:
        yield path, value
        return
    for key, item in items:
        yield from _leaves(item, f"{path}.{key}" if path else str(key))


def _check_kept(output: Any, samples: int) -> None:
    """Raise if an output has anything but tensors with one entry for each sample."""
    for path, leaf in _leaves(output):
        place = f" at {path}" if path else ""
        if not isinstance(leaf, torch.Tensor):
            what = f"the output has a {type(leaf).__name__}{place}, which is not a tensor"
        elif leaf.ndim == 0 or len(leaf) != samples:
            what = (
                f"the output has a tensor of shape {list(leaf.shape)}{place}, but {samples} samples"
            )
        else:
            continue
        fix = "keep only tensors with the samples along dim 0: take=lambda output: output.logits"
        raise ApplyError(Problem(what, fix=fix))


def _of_all_ranks(own: Any, state: Applied) -> Any:
    """Return the samples of all data ranks, in CPU memory."""
    ranks = state.plan.num_data_ranks
    if ranks == 1:
        return mapped(own, lambda tensor: tensor.detach().cpu())
    group = submesh(state.mesh, DATA_AXES, flat=True).get_group()
    _check_shapes(own, group)

    def gathered(tensor: torch.Tensor) -> torch.Tensor:
        own = tensor.detach().to(device())  # NCCL sends nothing from host memory.
        every = own.new_empty((ranks, *own.shape))
        gather_into(every, own, group)
        return every.flatten(0, 1).cpu()

    return mapped(own, gathered)


def _check_shapes(own: Any, group: dist.ProcessGroup) -> None:
    """Raise on all ranks if their outputs differ in shape or dtype."""
    forms = gathered(_form(own), group)
    for other in forms:
        if other != forms[0]:
            raise ApplyError(_differ(forms[0], other))


def _joined(kept: list[Any]) -> Any:
    """Concatenate the tensors of several values of the same structure along dim 0."""
    first = [(path, dtype, dims) for path, dtype, (_, *dims) in _form(kept[0])]
    for other in kept[1:]:
        form = [(path, dtype, dims) for path, dtype, (_, *dims) in _form(other)]
        if form != first:
            raise ApplyError(_differ(_form(kept[0]), _form(other)))
    every = zip(*([leaf for _, leaf in _leaves(value)] for value in kept), strict=True)
    joined = iter([torch.cat(tensors) for tensors in every])
    return mapped(kept[0], lambda _: next(joined))


def _form(value: Any) -> list[tuple[str, str, list[int]]]:
    """Return (path, dtype, shape) of every tensor."""
    return [(path, str(leaf.dtype), list(leaf.shape)) for path, leaf in _leaves(value)]


def _differ(one: Any, other: Any) -> Problem:
    """Return the problem of two outputs that cannot be joined."""
    a, b = next(
        (pair for pair in zip(one, other, strict=False) if pair[0] != pair[1]), (one, other)
    )
    return Problem(
        f"outputs for different samples have different shapes, {a} and {b}",
        fix="pad all samples to one length in collate_fn, or keep a part that has the same shape "
        "for all of them: take=lambda output: output.logits[:, -1]",
    )
