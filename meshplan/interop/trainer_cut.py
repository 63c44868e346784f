"""Cut a Trainer's batch for a pipeline, where a sample may be several rows.

A batch of TRL's DPOTrainer or RewardTrainer has all chosen answers, then all rejected ones: each
part of it needs the same samples of both halves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from meshplan.errors import ApplyError, Problem
from meshplan.interop.trainer_beside import MOST, CalledBeside, ForwardBeside
from meshplan.interop.trainer_call import drawing_nothing
from meshplan.interop.trainer_loss import is_loss, loss_of, replaced
from meshplan.runtime.apply.pipeline.module import PipelinedModule
from meshplan.runtime.base.batch import part_of
from meshplan.runtime.base.pytree import tensors_in


@dataclass(frozen=True)
class BatchCut:
    """The way to cut the batches of a Trainer, and what its loss needs of the other stages.

    Args:
        blocks: Number of equal blocks of rows, of which each has one row of every sample, in the
            same order; 1 if samples that belong together are next to each other.
        beside: Forwards that the loss runs beside the one of the model which it is given.
        is_of_rows: True if the loss needs no value of the model's output but those that have a row
            for each sample, so that it can be computed for some of the samples.
    """

    blocks: int = 1
    beside: tuple[ForwardBeside, ...] = ()
    is_of_rows: bool = False

    def ordered(self, value: Any, rows: int, count: int, *, back: bool = False) -> Any:
        """Return a batch with its rows in the order in which a pipeline cuts them.

        Args:
            value: The batch, or an output for it. Tensors with other numbers of rows, such as one
                for each sample, stay as they are.
            rows: Number of rows of the batch.
            count: Number of parts into which the pipeline cuts it.
            back: If True, return what is in this order as it was.

        Raises:
            ApplyError: The samples do not divide into the parts.
        """
        if self.blocks == 1:
            return value
        samples = rows // self.blocks
        if samples % count:
            what = (
                f"a batch of {samples} samples, each of {self.blocks} rows, does not divide into "
            )
            what += f"{count} microbatches"
            raise ApplyError(Problem(what, fix=f"use a multiple of {count} samples"))
        order = torch.arange(rows).reshape(self.blocks, count, -1).transpose(0, 1).flatten()
        if back:
            order = order.argsort()

        def take(tensor: torch.Tensor) -> torch.Tensor:
            is_cut = tensor.ndim and len(tensor) == rows
            return tensor[order.to(tensor.device)] if is_cut else tensor

        return tree_map_only(torch.Tensor, take, value)  # Outputs keep their class.

    def samples(self, value: Any, rows: int, size: int, places: list[int]) -> Any:
        """Return some samples of a batch, or of a part of one, or of an output for it.

        Args:
            value: The batch or the output.
            rows: Number of rows of the batch.
            size: Number of samples of the batch.
            places: Places of the samples among them; one may be there several times.
        """
        each = rows // self.blocks // size  # Rows of a sample in a block.

        def take(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.ndim or len(tensor) not in (size, rows):
                return tensor
            if len(tensor) == size:
                return tensor[places]
            return tensor.unflatten(0, (self.blocks, size, each))[:, places].flatten(0, 2)

        return tree_map_only(torch.Tensor, take, value)


def num_rows(batch: Any) -> int:
    """Return the number of rows of a batch: the most that any tensor has along dim 0."""
    return max((len(tensor) for _, tensor in tensors_in(batch) if tensor.ndim), default=0)


def find_cut(
    model: PipelinedModule,
    batch: Mapping[str, Any],
    call: Any,
    samples: int,
    compute: Callable[..., torch.Tensor],
) -> BatchCut:
    """Find how to cut a Trainer's batches, by its loss for the first one; call it on all ranks.

    All stages run the forward once without gradients. On the last one, the loss for the whole batch
    is compared with those of its parts, with random values added to the output: losses of pairs are
    equal for any pairs while a model is its own reference.

    Args:
        model: The pipelined model.
        batch: The first batch, labels included.
        call: The inputs of the model among it.
        samples: Number of samples of a full batch.
        compute: Maps (output, batch, call, forwards beside, their outputs) to the loss, of a part
            as it counts in the mean of all parts.
    """
    count, rows = model.pipeline.microbatches, num_rows(batch)
    with drawing_nothing():
        output = _forward(model, lambda: model.eval_step(call))
    beside: list[ForwardBeside] = []
    outputs: list[Any] = []
    source = dist.get_global_rank(model.group, model.pipeline.rank_of(model.pipeline.num - 1))
    while True:
        box: list[Any] = [None]
        if model.has_output:
            try:
                with drawing_nothing(), torch.enable_grad():  # As the step does.
                    compute(output, batch, call, beside, outputs, is_search=True)
            except CalledBeside as called:
                box = [called.forward]
            except Exception:
                # The step itself computes the loss, and raises on all ranks.
                box = [None]
        dist.broadcast_object_list(box, src=source, group=model.group)
        if box[0] is None or len(beside) == MOST:
            break
        one: ForwardBeside = box[0]
        with drawing_nothing():
            outputs.append(_forward(model, lambda one=one: one.run(model, batch, call)))  # type: ignore[misc]
        beside.append(one)
    most = rows // samples if samples and rows % samples == 0 else 1
    box = [(1, False)]
    if model.has_output:
        whole = (batch, call, beside, outputs)
        with drawing_nothing(), torch.no_grad():
            blocks = 1
            if most > 1:
                noisy = tree_map_only(torch.Tensor, _noisy, output)
                blocks = _blocks(most, noisy, whole, rows, count, compute)
            box = [(blocks, _is_of_rows(output, whole, compute))]
    dist.broadcast_object_list(box, src=source, group=model.group)
    return BatchCut(box[0][0], tuple(beside), box[0][1])


def _is_of_rows(output: Any, whole: tuple[Any, ...], compute: Callable[..., torch.Tensor]) -> bool:
    """Return True if the loss can be computed without the model's own loss."""
    if not is_loss(loss_of(output)):
        return True
    try:
        compute(replaced(output, None), *whole)
    except Exception:  # It may use the loss in any way.
        return False
    return True


def _forward(model: PipelinedModule, run: Callable[[], Any]) -> Any:
    """Run a forward in evaluation mode, which writes no statistics."""
    model.eval()
    try:
        with torch.no_grad():
            return run()
    finally:
        model.train()


def _noisy(tensor: torch.Tensor) -> torch.Tensor:
    """Return floats with random numbers added, in a precision in which sums can be compared."""
    if not tensor.is_floating_point():
        return tensor
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
    return tensor + noise.to(tensor.device)  # Of two dtypes, in the wider one.


def _blocks(
    most: int,
    output: Any,
    whole: tuple[Any, ...],
    rows: int,
    count: int,
    compute: Callable[..., torch.Tensor],
) -> int:
    """Return into how many blocks of rows the losses of a batch's parts add up to its loss."""
    batch, call, beside, outputs = whole
    try:
        expected = compute(output, *whole).double()
        for blocks in (1, most):
            given = BatchCut(blocks).ordered((output, batch, call, outputs), rows, count)
            parts = []
            for number in range(count):
                cut = partial(part_of, count=count, number=number, name="microbatches")
                out, *part, others = tree_map_only(torch.Tensor, cut, given)
                parts.append(compute(out, *part, beside, others).double())
            if torch.isclose(torch.stack(parts).mean(), expected, rtol=1e-5, atol=1e-7):
                return blocks
    except (ApplyError, RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        return 1  # The step itself raises it.
    return 1
