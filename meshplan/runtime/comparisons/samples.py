"""Samples to compare forwards on: a microbatch, and other samples next to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist

from meshplan.layout.mesh import DATA_AXES
from meshplan.plan.plan import Plan
from meshplan.runtime.base.batch import mapped
from meshplan.runtime.base.batch_agreement import num_samples
from meshplan.runtime.base.mesh import device
from meshplan.runtime.base.pytree import opaque_in, shape_of, tensors_in
from meshplan.runtime.comparisons.cutting import cut

ENOUGH: Final = 8
LITTLE: Final = 1 << 13
"""Elements from which on a microbatch of at least `ENOUGH` samples is cut in two. A smaller one is
joined with other microbatches, as many as have so many elements together, and at least one."""
_MUCH: Final = 1 << 25
"""Elements of a microbatch that is too large to be sent to every rank."""

WHOLE, FIRST, LAST, FIRST_AGAIN, LAST_AGAIN = range(5)
"""Indices into `Samples.inputs` and `Samples.targets`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Some samples, in parts of one size.

    Attributes:
        inputs: Inputs of five runs: all samples, the first part, the last part, and each of these
            two parts repeated as often as there are parts.
        targets: Targets of the same five runs.
        size: Number of samples of a part.
        parts: Number of parts.
    """

    inputs: tuple[Any, ...]
    targets: tuple[Any, ...]
    size: int
    parts: int

    def rows(self, run: int, which: int) -> slice:
        """Return the rows of the first part (0) or the last one (1) in the output of a run."""
        there = self.size if run in (FIRST, LAST) else self.size * self.parts
        start = (there - self.size) * which
        return slice(start, start + self.size)


def samples_of(
    batch: tuple[Any, Any], size: int, plan: Plan, *, most: int, turn: int
) -> Samples | None:
    """Return microbatches of several ranks, the same on every rank; collective over all ranks.

    As all ranks run the same samples, the model behaves equally on all of them: if it raises, it
    does so on all ranks, and none is left in a collective. A large microbatch is cut in two, so
    that no forward is larger than one of the training.

    Args:
        batch: Inputs and targets of this rank.
        size: Number of samples of a microbatch.
        plan: The plan that the model runs under.
        most: The most parts.
        turn: Number of the data rank whose microbatch comes first, modulo the number of data ranks.

    Returns:
        The samples, or None if there is nothing to compare: samples do not lie along dim 0 of all
        tensors, there is only one, or microbatches differ in more than values.
    """
    tensors = [tensor for _, tensor in tensors_in(batch)]
    is_odd = any(opaque_in(shape_of(batch, lambda tensor: 0))) or any(t.is_nested for t in tensors)
    numel = sum(tensor.numel() for tensor in tensors) * size // max(1, num_samples(batch))
    elements, cannot_be_cut = map(int, largest(numel, is_odd or not numel))
    if cannot_be_cut or elements > _MUCH:
        return None
    is_cut = size >= ENOUGH and elements > LITTLE
    wanted = 1 if is_cut else max(2, min(most, LITTLE // elements))
    ranks = plan.mesh.size(*DATA_AXES)
    each = -(-wanted // ranks)
    places = [(turn + n) % ranks for n in range(-(-wanted // each))]
    given = [_told_by(place, batch, each * size, plan) for place in places]
    whole = _joined(given)
    parts = 2 if is_cut else min(wanted, num_samples(whole) // size)
    size = size // 2 if is_cut else size
    first, behind = list(range(size)), size * parts
    last = list(range(behind - size, behind))
    rows: list[list[int]] = [list(range(behind)), first, last, first * parts, last * parts]
    found = [cut(item, num_samples(whole), rows, is_output=False) for item in whole]
    inputs, targets = found
    if parts < 2 or inputs is None or targets is None:
        return None
    return Samples(inputs=tuple(inputs), targets=tuple(targets), size=size, parts=parts)


def _told_by(place: int, batch: tuple[Any, Any], samples: int, plan: Plan) -> tuple[Any, Any]:
    """Return a data rank's first samples on every rank; along cp, each gets its part of them."""
    own = plan.mesh.index(dist.get_rank(), ("cp",))
    # Every rank must take part in all broadcasts.
    told = [_told_to(at, place, batch, samples, plan) for at in range(plan.mesh.size("cp"))]
    return told[own]


def _told_to(
    part: int, place: int, batch: tuple[Any, Any], samples: int, plan: Plan
) -> tuple[Any, Any]:
    """Return one part of the sequence of a data rank's first samples on every rank."""
    copies = [axis for axis in plan.mesh.names if axis not in (*DATA_AXES, "cp")]
    at = (place, part, 0)
    ranks = range(dist.get_world_size())
    places = ([plan.mesh.index(rank, axes) for axes in (DATA_AXES, ("cp",), copies)]
              for rank in ranks)  # fmt: skip
    source = next((rank for rank, its in enumerate(places) if tuple(its) == at), 0)

    def here(tensor: torch.Tensor) -> torch.Tensor:
        # Clone, because a view would be sent with its whole base.
        return (tensor[:samples] if tensor.ndim else tensor).detach().clone().cpu()

    told: list[Any] = [mapped(batch, here) if dist.get_rank() == source else None]
    dist.broadcast_object_list(told, src=source)
    found: tuple[Any, Any] = told[0]
    return found


def _joined(given: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    """Join the samples of those whose tensors differ from the first one's in values only."""
    tensors = [[tensor for _, tensor in tensors_in(item)] for item in given]
    shapes = [[(t.shape[1:], t.dtype) for t in each] for each in tensors]
    alike = [each for each, own in zip(tensors, shapes, strict=True) if own == shapes[0]]
    both = iter(
        torch.cat(parts) if parts[0].ndim else parts[0] for parts in zip(*alike, strict=True)
    )
    joined: tuple[Any, Any] = mapped(given[0], lambda tensor: next(both).to(device()))
    return joined


def largest(*values: float) -> list[float]:
    """Return the largest of each value over all ranks; a flag is 1 if it is set on some rank."""
    told = torch.tensor(values, dtype=torch.float64, device=device())
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    found: list[float] = told.tolist()
    return found
