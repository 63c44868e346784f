"""The ranks that the loss of a Trainer sees: those that have samples of their own.

Ranks along tp and pp have the same samples as others, and along pp the last stage alone computes
the loss. Inside of a loss, the Trainer's Accelerator therefore counts, gathers and reduces over the
data ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from meshplan.errors import ApplyError, Problem
from meshplan.interop.own_loop import reduction_of
from meshplan.interop.trainer_batches import Rest
from meshplan.layout.mesh import DATA_AXES
from meshplan.runtime.apply.wrap import applied
from meshplan.runtime.base.mesh import gather_into, objects_along, submesh
from meshplan.runtime.train.step import data_rank


class LossRanks:
    """The Accelerator of a Trainer inside of a loss; notes what the loss reads of it.

    Args:
        accelerator: The Trainer's Accelerator.
        model: The module that `parallelize` returned.
        rest: Returns what is known of the batch, if it is the last one of an epoch and filled up;
            None for any other batch. Ranks without samples that count are then left out.

    Attributes:
        is_read: True if the last loss read the number of ranks, by which the Trainer multiplies it.
        is_counted: True if the last loss was divided by a number of items that the caller counted.
        is_inside: True while a loss is computed.
        is_exchanged: True if a loss gathered or reduced since `alone` began.
    """

    def __init__(self, accelerator: Any, model: nn.Module, rest: Callable[[], Rest | None]) -> None:
        self.is_read = self.is_counted = self.is_inside = self.is_exchanged = False
        self._accelerator, self._kind = accelerator, type(accelerator)
        state = applied(model)
        self._mesh, self._rest = state.mesh, rest
        self._is_cut = state.plan.assignment.stages is not None
        self.num = data_rank(model).num_replicas
        # From the innermost axis to the outermost: ranks are in the order of their samples.
        axes = [axis for axis in reversed(state.plan.mesh.axes) if axis.name in DATA_AXES]
        self._axes = [axis.name for axis in axes if axis.size > 1]
        self._is_alone = False
        self._counted = _counted(self, self._kind)

    def __enter__(self) -> LossRanks:
        self.is_read, self.is_inside = False, True
        self._accelerator.__class__ = self._counted
        return self

    def __exit__(self, *error: object) -> None:
        self.is_inside = False
        self._accelerator.__class__ = self._kind

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Compute losses inside, of which each gathers as if all ranks had this rank's values."""
        self._is_alone, self.is_exchanged = True, False
        try:
            yield
        finally:
            self._is_alone = False

    def stacked(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of every data rank, along a new dim 0."""
        self.is_exchanged = True
        every = tensor.detach().contiguous()[None]
        if self._is_alone:
            return every.expand(self.num, *tensor.shape)
        for axis in self._axes:
            group = submesh(self._mesh, (axis,)).get_group()
            whole = every.new_empty(dist.get_world_size(group), *every.shape)
            gather_into(whole, every, group)
            every = whole.flatten(0, 1)
        return every

    def values(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of every data rank that has samples, along a new dim 0."""
        return self.stacked(tensor)[: self._num_with_samples]

    @property
    def _num_with_samples(self) -> int:
        rest = self._rest()
        return self.num if rest is None else rest.ranks_with_samples

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the rows of every data rank's tensor; a tensor without dims is one row."""
        if not tensor.ndim:
            return self.values(tensor)
        if self._rest() is None:
            return self.stacked(tensor).flatten(0, 1)
        # In the last batch, each rank has the samples that count.
        sizes = self.stacked(torch.tensor(len(tensor), device=tensor.device)).tolist()
        missing = tensor.new_zeros(max(sizes) - len(tensor), *tensor.shape[1:])
        every = self.values(torch.cat((tensor.detach(), missing)))
        return torch.cat([own[:size] for own, size in zip(every, sizes, strict=False)])

    def objects(self, value: Iterable[Any]) -> list[Any]:
        """Return the items of every data rank's collection of objects."""
        self.is_exchanged = True
        every = [value] * self.num
        if not self._is_alone:
            every = objects_along(value, self._mesh, self._axes)
        return [each for own in every[: self._num_with_samples] for each in own]

    def cut(self, found: Any) -> Any:
        """Return gathered rows without those that only fill up the last batch of an epoch."""
        rest = self._rest()
        return found if rest is None else found[: rest.left]

    def refuse_if_cut(self, name: str) -> None:
        """Raise if a pipeline's last stage alone computes the loss.

        Raises:
            ApplyError: It does.
        """
        if self._is_cut:
            what = f"compute_loss calls accelerator.{name}, for which all ranks would have to call "
            what += "it, but of a pipeline only the last stage does"
            fix = "use accelerator.gather, gather_for_metrics or reduce, or a plan without pp"
            raise ApplyError(Problem(what, fix=fix))


def _counted(noted: LossRanks, kind: Any) -> type:
    """Return the class that an Accelerator has inside of a loss."""
    from accelerate.utils.operations import recursively_apply

    def over(function: Callable[[torch.Tensor], torch.Tensor], values: Any) -> Any:
        return recursively_apply(function, values, error_on_other_type=True)

    class Counted(kind):
        @property
        def num_processes(self) -> int:
            noted.is_read = True
            return noted.num

        def gather(self, tensor: Any) -> Any:
            return over(noted.rows, tensor)

        def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
            leaves = tree_leaves(input_data)
            if use_gather_object or not all(isinstance(each, torch.Tensor) for each in leaves):
                return noted.cut(noted.objects(input_data))

            # What has no dims is a value of each rank.
            return over(lambda t: noted.cut(noted.rows(t)) if t.ndim else noted.rows(t), input_data)

        def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
            reduced = reduction_of(reduction)
            return over(lambda t: reduced(noted.values(t)), tensor)

        def pad_across_processes(self, *args: Any, **kwargs: Any) -> Any:
            noted.refuse_if_cut("pad_across_processes")
            return super().pad_across_processes(*args, **kwargs)

        def wait_for_everyone(self) -> None:
            noted.refuse_if_cut("wait_for_everyone")
            super().wait_for_everyone()

    return Counted
