"""Samples on which forwards are compared, the same samples on every rank."""

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
"""Number of samples from which on a microbatch may be cut in two."""
LITTLE: Final = 1 << 13
"""A microbatch of more elements and at least `ENOUGH` samples is cut in two. A smaller microbatch
is joined with others, at least one, up to this number of elements together."""
_MUCH: Final = 1 << 25
"""Most elements of a microbatch that is still sent to every rank."""

WHOLE, FIRST, LAST, FIRST_AGAIN, LAST_AGAIN = range(5)
"""The runs of a comparison: indices into `Samples.inputs` and `Samples.targets`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Samples in parts of equal size, arranged for five runs of the model.

    Attributes:
        inputs: Inputs of the five runs: all parts (`WHOLE`), the first part, the last part, then
            the first part repeated and the last part repeated, each `parts` times (`FIRST_AGAIN`
            and `LAST_AGAIN`).
        targets: Targets of the same five runs.
        size: Number of samples in each part.
        parts: Number of parts.
    """

    inputs: tuple[Any, ...]
    targets: tuple[Any, ...]
    size: int
    parts: int

    def rows(self, run: int, which: int) -> slice:
        """Return the rows of one part in the output of a run.

        Args:
            run: `WHOLE`, `FIRST`, `LAST`, `FIRST_AGAIN` or `LAST_AGAIN`.
            which: 0 for the first part of the run's samples, 1 for the last.
        """
        there = self.size if run in (FIRST, LAST) else self.size * self.parts
        start = (there - self.size) * which
        return slice(start, start + self.size)


def samples_of(
    batch: tuple[Any, Any], size: int, plan: Plan, *, most: int, turn: int
) -> Samples | None:
    """Return microbatches of several ranks, the same on every rank; all ranks must call this.

    With the same samples the model behaves the same on all ranks: if it raises, it raises on all of
    them, and no rank waits in a collective. A large microbatch is cut into two parts, so that no
    forward is larger than in training. Small microbatches are joined, each as one part.

    Args:
        batch: Inputs and targets of this rank.
        size: Number of samples of a microbatch.
        plan: The plan that the model runs under.
        most: Highest number of parts to join.
        turn: The first microbatch is that of data rank `turn` modulo the number of data ranks, so
            that later comparisons begin with other ranks.

    Returns:
        The samples, or None if they cannot be compared: not all tensors have the samples along dim
        0, a microbatch is too large to send, or there are less than two parts of equal shapes.
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
    given = [_broadcast_samples(place, batch, each * size, plan) for place in places]
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


def _broadcast_samples(
    place: int, batch: tuple[Any, Any], samples: int, plan: Plan
) -> tuple[Any, Any]:
    """Return the first samples of one data rank's batch; all ranks must call this.

    Along cp each rank gets its part of the sequences.

    Args:
        place: Number of the data rank.
        batch: Inputs and targets of this rank.
        samples: Number of samples.
        plan: The plan that the model runs under.
    """
    own = plan.mesh.index(dist.get_rank(), ("cp",))
    # A broadcast needs all ranks, so each rank also takes part in those of other parts along cp.
    parts = [_broadcast_part(at, place, batch, samples, plan) for at in range(plan.mesh.size("cp"))]
    return parts[own]


def _broadcast_part(
    part: int, place: int, batch: tuple[Any, Any], samples: int, plan: Plan
) -> tuple[Any, Any]:
    """Return one cp rank's part of the first samples of a data rank; all ranks must call this."""
    copies = [axis for axis in plan.mesh.names if axis not in (*DATA_AXES, "cp")]
    at = (place, part, 0)
    ranks = range(dist.get_world_size())
    places = ([plan.mesh.index(rank, axes) for axes in (DATA_AXES, ("cp",), copies)]
              for rank in ranks)  # fmt: skip
    source = next((rank for rank, its in enumerate(places) if tuple(its) == at), 0)

    def here(tensor: torch.Tensor) -> torch.Tensor:
        # Clone, because pickle would send the whole storage of a view.
        return (tensor[:samples] if tensor.ndim else tensor).detach().clone().cpu()

    message: list[Any] = [mapped(batch, here) if dist.get_rank() == source else None]
    dist.broadcast_object_list(message, src=source)
    found: tuple[Any, Any] = message[0]
    return found


def _joined(given: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    """Return the samples of several ranks as one batch, on this rank's device.

    Ranks whose tensors have other shapes or dtypes than the first rank's are left out.

    Args:
        given: (inputs, targets) of each rank.
    """
    tensors = [[tensor for _, tensor in tensors_in(item)] for item in given]
    shapes = [[(t.shape[1:], t.dtype) for t in each] for each in tensors]
    alike = [each for each, own in zip(tensors, shapes, strict=True) if own == shapes[0]]
    both = iter(
        torch.cat(parts) if parts[0].ndim else parts[0] for parts in zip(*alike, strict=True)
    )
    joined: tuple[Any, Any] = mapped(given[0], lambda tensor: next(both).to(device()))
    return joined


def largest(*values: float) -> list[float]:
    """Return the maximum over all ranks of each value; all ranks must call this.

    A flag (False or True) becomes 1 if it is True on any rank, else 0.
    """
    maxima = torch.tensor(values, dtype=torch.float64, device=device())
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
    found: list[float] = maxima.tolist()
    return found
