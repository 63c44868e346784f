"""Check that data ranks are given different samples, and as many samples as the plan states.

If a loop forgets `local_batch`, or a sampler is made for too few ranks, several ranks train on the
same samples: the loss falls, but the batch is smaller than it seems. Ranks compare digests of their
samples to find this. The digests are sent in an all-reduce that the step makes anyway.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

from meshplan.errors import Problem
from meshplan.layout.mesh import DATA_AXES
from meshplan.plan.plan import Plan
from meshplan.runtime.base.batch_agreement import SAMPLER, num_samples
from meshplan.runtime.base.digest import digest, elements, is_marked
from meshplan.runtime.base.mesh import local_of
from meshplan.runtime.base.pytree import tensors_in

_ENOUGH_BITS: Final = 20
"""Batches that contain fewer bits of information than this may be equal by chance, such as a few
labels out of two classes."""
_FEW: Final = 256
"""About how many elements of a tensor are read to estimate how much information it can contain."""


def compares_ranks(plan: Plan) -> bool:
    """Return True if data ranks must receive different samples, which they then compare."""
    return plan.num_data_ranks > 1 and not plan.spec.batch.per_rank


def number_of(batch: Any, *, is_whole: bool) -> int:
    """Return a digest of a batch's contents: an integer above 0 that float64 represents exactly.

    Args:
        batch: Any pytree of tensors.
        is_whole: If True, every element counts; else about 1024 of each tensor.
    """
    here, there = digest(batch, is_whole=is_whole)
    return 1 + here + (0 if there is None else int(there))


def slots(number: int, plan: Plan) -> list[int]:
    """Return a list with one entry per data rank: `number` for this data rank, 0 for the others.

    The maximum of each entry over all ranks gives the numbers of all data ranks.
    """
    found = [0] * plan.num_data_ranks
    # Ranks along cp have different parts of the same samples, so only the first sets its number.
    if plan.mesh.index(dist.get_rank(), ("cp",)) == 0:
        found[plan.mesh.index(dist.get_rank(), DATA_AXES)] = number
    return found


def repeated_axis(digests: Sequence[float], plan: Plan) -> str | None:
    """Return the data axis along which all ranks were given the same samples; None if none is.

    Two of many ranks may draw the same samples by chance. If all ranks along an axis have the same
    samples, it is a mistake.

    Args:
        digests: Digest of the samples of each data rank, as from `number_of`.
        plan: The plan that the model runs under.
    """
    names = [name for name in plan.mesh.names if name in DATA_AXES]
    for axis in names:
        inner = math.prod(plan.mesh.size(name) for name in names[names.index(axis) + 1 :])
        size = plan.mesh.size(axis)
        same = all(
            number == digests[at - at // inner % size * inner] for at, number in enumerate(digests)
        )
        if size > 1 and same:
            return axis
    return None


def is_distinctive(batch: Any) -> bool:
    """Return True if an equal batch on another rank can only be a mistake.

    Return False if `local_batch` cut the batch, if all its samples are equal, or if they contain so
    little information that two batches may be equal by chance.
    """
    if is_marked(batch):
        return False
    found = (t for _, t in tensors_in(batch) if elements(t, is_whole=False) is not None)
    tensors = [local_of(tensor.detach()) for tensor in found]
    are_alike = all(_has_equal_rows(tensor) for tensor in tensors if tensor.ndim)
    return not are_alike and sum(map(_bits, tensors)) >= _ENOUGH_BITS


def _has_equal_rows(tensor: torch.Tensor) -> bool:
    return len(tensor) > 1 and bool((tensor == tensor[:1]).all())


def _bits(tensor: torch.Tensor) -> float:
    """Return an upper bound of a tensor's information in bits: elements * log2(distinct elements).

    Distinct elements are counted in a sample of about 256 elements.
    """
    flat = tensor.reshape(-1)
    few = flat[:: max(1, flat.numel() // _FEW)].tolist()
    return flat.numel() * math.log2(len(set(few)) or 1)


def same_samples(axis: str, samples: int, plan: Plan) -> Problem:
    """Return the problem of ranks that were given the same samples.

    Args:
        axis: The data axis along which all ranks were given the same samples.
        samples: Number of samples that each rank was given.
        plan: The plan that the model runs under.
    """
    other = next(rank for rank in range(plan.mesh.world_size) if plan.mesh.index(rank, (axis,)))
    return Problem(
        f"ranks 0 and {other} were given the same {samples} samples, like all ranks along {axis}"
        f"{_planned(plan)}: each of these ranks must be given different samples",
        plan.spec.origin("batch"),
        f"split the global batch with meshplan.local_batch(model, batch), or {SAMPLER}; set batch: "
        "{per_rank: true} if ranks are meant to train on the same samples",
    )


def _planned(plan: Plan) -> str:
    if plan.micro is None:
        return ""
    own, ranks = plan.micro * plan.accumulate, plan.num_data_ranks
    return f", but the plan's batch of {own * ranks} has {own} for each of {ranks} data ranks"


def note_size(batch: Any, plan: Plan, *, may_be_micro: bool = False) -> None:
    """Warn, on rank 0, if this rank was given more or fewer samples than the plan states.

    Args:
        batch: The rank's inputs and targets.
        plan: The plan that the model runs under.
        may_be_micro: If True, the batch is that of one forward in a custom training loop. It may be
            one microbatch, and its tensors may have the samples along dim 1.
    """
    if plan.micro is None or dist.get_rank() != 0:
        return
    wanted, given, ranks = plan.micro * plan.accumulate, num_samples(batch), plan.num_data_ranks
    sizes = {given}
    if may_be_micro:
        first = next((t for _, t in tensors_in(batch) if t.ndim), None)
        sizes = set() if first is None else set(first.shape[:2])
    if not given or wanted in sizes or (may_be_micro and plan.micro in sizes):
        return
    each = f" on each of {ranks} data ranks, {given * ranks} in all" if ranks > 1 else ""
    planned = f"{wanted}, {wanted * ranks} in all" if ranks > 1 else f"{wanted}"
    problem = Problem(
        f"a step was given {given} samples{each}, but the plan states {planned}: its estimates "
        "are for the stated batch",
        plan.spec.origin("batch"),
        f"pass all {wanted * ranks} samples of a step to meshplan.local_batch(model, batch), or "
        f"state batch: {{global: {given * ranks}}}",
    )
    warnings.warn(str(problem), stacklevel=2)


class Given:
    """A digest of all inputs between two optimizer steps in a custom training loop.

    The inputs of all models in the process go into one digest. One model alone may rightly get the
    same inputs on all ranks, such as a text tower that encodes class names, while another model
    gets different samples.
    """

    def __init__(self) -> None:
        self._number = 0
        self._is_distinctive = False
        self._is_cut = False

    def add(self, batch: Any) -> None:
        """Add the inputs of one more forward to the digest."""
        self._number = (self._number * 31 + number_of(batch, is_whole=True)) % (1 << 40)
        self._is_distinctive |= is_distinctive(batch)
        self._is_cut |= is_marked(batch)

    def repeated_axis(
        self, plan: Plan, group: dist.ProcessGroup, device: torch.device
    ) -> str | None:
        """Return the data axis along which all ranks were given the same inputs; None if none.

        All ranks of `group` must call this.

        Args:
            plan: The plan that the model runs under.
            group: Process group of the data axes and cp.
            device: Device of the tensor that is sent.
        """
        is_open = self._is_cut or not self._is_distinctive
        values = [int(is_open), *slots(1 + self._number, plan)]
        both = torch.tensor(values, dtype=torch.float64, device=device)
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
        found, *digests = both.tolist()
        return None if found else repeated_axis(digests, plan)
