"""Count the bytes that move when training continues under another plan.

Parameters and optimizer state move. Under the new plan each rank needs its shard of every tensor.
The elements that it already has under the old plan stay; the others are sent to it, or read from a
checkpoint. A shard consists of slices along each dim, so the number of elements that two shards
have in common is the product, over dims, of the indices in common.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from meshplan.errors import PlanError, Problem
from meshplan.layout.dtypes import DTYPE_BYTES
from meshplan.layout.layout import Layout
from meshplan.layout.mesh import Mesh
from meshplan.plan.plan import Plan
from meshplan.shown import shown
from meshplan.spec.spec import OPTIMIZER_STATES


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class Reshard:
    """Bytes of parameters and optimizer state that a change of plan moves.

    Args:
        state_bytes: Bytes of the whole model, each tensor counted once.
        needed_bytes: Bytes that the ranks of the new plan need, summed over ranks.
        moved_bytes: Part of `needed_bytes` that the ranks do not have yet, if rank r of both plans
            is on the same device.
        most_bytes: Bytes received by the rank that receives the most.
        most_rank: The rank that receives `most_bytes`.
    """

    state_bytes: int
    needed_bytes: int
    moved_bytes: int
    most_bytes: int
    most_rank: int


@dataclass(frozen=True, slots=True)
class _TensorPlacement:
    """The placement of a tensor in one plan.

    Args:
        stored: Layout of the stored tensor.
        places: Indices along pp of the ranks that have the tensor.
    """

    stored: Layout
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _PieceKind:
    """The properties of a tensor that decide how many of its bytes move.

    Args:
        shape: Shape of the whole tensor.
        element_bytes: Bytes of one element, including its optimizer state.
        old: Placement in the old plan.
        new: Placement in the new plan.
    """

    shape: tuple[int, ...]
    element_bytes: int
    old: _TensorPlacement
    new: _TensorPlacement


def reshard(old: Plan, new: Plan) -> Reshard:
    """Count the bytes that move from one plan to another of the same model and optimizer.

    Padding and the optimizer's step counters, a few bytes per parameter, are not counted.

    Args:
        old: The plan so far.
        new: The plan to continue with.

    Raises:
        PlanError: The plans differ in model, optimizer or stored dtypes, or the optimizer's states
            do not have the shape of their parameters.
    """
    kinds = _kinds(old, new)
    received = [0] * new.mesh.world_size
    needed = 0
    for kind, count in kinds.items():
        size = kind.element_bytes * count
        for rank, (wants, has) in enumerate(_elements(kind, old.mesh, new.mesh)):
            needed += wants * size
            received[rank] += (wants - has) * size
    most = max(range(len(received)), key=received.__getitem__)
    return Reshard(
        state_bytes=sum(math.prod(k.shape) * k.element_bytes * count for k, count in kinds.items()),
        needed_bytes=needed,
        moved_bytes=sum(received),
        most_bytes=received[most],
        most_rank=most,
    )


def _kinds(old: Plan, new: Plan) -> Counter[_PieceKind]:
    """Count the tensors of each kind; raise PlanError if the plans cannot be compared."""
    before, after = old.assignment.tensors, new.assignment.tensors
    optimizer = new.spec.optimizer
    problems = []
    if {f: p.info.shape for f, p in before.items()} != {f: p.info.shape for f, p in after.items()}:
        problems.append(Problem("the two plans are for different models"))
    if old.spec.optimizer != optimizer:
        what = f"the two plans state different optimizers: {old.spec.optimizer} and {optimizer}"
        problems.append(Problem(what))
    if optimizer not in OPTIMIZER_STATES:
        problems.append(Problem(f"the states of {optimizer} do not have their parameters' shapes"))
    if problems:
        raise PlanError(problems)
    out: Counter[_PieceKind] = Counter()
    for fqn, placed in after.items():
        if placed.info.is_buffer:
            continue
        if before[fqn].dtype != placed.dtype:
            dtypes = f"{before[fqn].dtype} and {placed.dtype}"
            raise PlanError(Problem(f"the two plans store '{fqn}' in different dtypes: {dtypes}"))
        states = OPTIMIZER_STATES[optimizer] if placed.info.trainable else 0
        size = DTYPE_BYTES[placed.dtype] * (1 + states)
        out[
            _PieceKind(placed.info.shape, size, _placement_of(old, fqn), _placement_of(new, fqn))
        ] += 1
    return out


def _placement_of(plan: Plan, fqn: str) -> _TensorPlacement:
    stages = plan.assignment.stages
    places: tuple[int, ...] = (0,)
    if stages is not None:
        places = tuple(sorted({stages.rank_of(stage) for stage in stages.tensors[fqn]}))
    return _TensorPlacement(plan.assignment.tensors[fqn].stored, places)


def _elements(kind: _PieceKind, old: Mesh, new: Mesh) -> list[tuple[int, int]]:
    """Return, for each rank of the new mesh, (elements it needs, those of them it already has)."""
    known: dict[tuple[tuple[int, ...], tuple[int, ...] | None], tuple[int, int]] = {}
    out = []
    for rank in range(new.world_size):
        if new.index(rank, ("pp",)) not in kind.new.places:
            out.append((0, 0))
            continue
        at_new = _coordinates(kind.new.stored, new, rank)
        had_shard = rank < old.world_size and old.index(rank, ("pp",)) in kind.old.places
        at_old = _coordinates(kind.old.stored, old, rank) if had_shard else None
        if (at_new, at_old) not in known:
            wanted = kind.new.stored.ranges(kind.shape, new, rank)
            old_ranges = kind.old.stored.ranges(kind.shape, old, rank) if had_shard else None
            known[at_new, at_old] = (
                math.prod(sum(s.stop - s.start for s in each) for each in wanted),
                0 if old_ranges is None else _common(wanted, old_ranges),
            )
        out.append(known[at_new, at_old])
    return out


def _coordinates(layout: Layout, mesh: Mesh, rank: int) -> tuple[int, ...]:
    """Return a rank's coordinates on the axes of a layout; equal coordinates mean equal shards."""
    at = mesh.coordinates(rank)
    return tuple(at.get(axis, 0) for axis in layout.axes)


def _common(one: Sequence[Sequence[slice]], other: Sequence[Sequence[slice]]) -> int:
    """Return the number of elements that two shards of a tensor have in common.

    Args:
        one: Disjoint slices of the first shard, for each dim.
        other: Disjoint slices of the second shard, for each dim.
    """
    return math.prod(
        sum(max(0, min(a.stop, b.stop) - max(a.start, b.start)) for a in left for b in right)
        for left, right in zip(one, other, strict=True)
    )
