"""Compare losses on one batch joined from a few samples of each microbatch and of some data ranks.

The halves of one microbatch show little about a loss in two cases: if the microbatch has only one
or two samples, and if all samples of a microbatch contain equal numbers of the tokens that the loss
is a mean over, as in batches sorted by length. So outputs of several microbatches and ranks are
joined to one batch, as one process would have it, and the losses of its halves are compared.
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from meshplan.errors import Problem
from meshplan.layout.mesh import DATA_AXES, GRADIENT_AXES
from meshplan.plan.plan import Plan
from meshplan.runtime.apply.loss.lazy_logits import LazyLogits
from meshplan.runtime.apply.loss.loss_weights import IGNORED, num_parts
from meshplan.runtime.base.mesh import device, gathered
from meshplan.runtime.base.pytree import fill, shape_of, tensors_in
from meshplan.runtime.comparisons.asking import LossFn
from meshplan.runtime.comparisons.cutting import cut, is_parameter
from meshplan.runtime.comparisons.halves import loss_problem, three_of
from meshplan.runtime.comparisons.samples import ENOUGH

_RANKS: Final = 4
"""Number of data ranks whose samples are compared."""
_ELEMENTS: Final = 1 << 16
"""Highest number of elements that a rank keeps: they are copied to the host and sent to every
rank."""


class FewSamples:
    """Keeps outputs of some samples of this rank, and checks the loss on the samples of all ranks.

    Args:
        plan: The plan that the model runs under.
        samples: Number of samples of a microbatch.
    """

    def __init__(self, plan: Plan, samples: int) -> None:
        self._plan, self._samples = plan, samples
        self._parts = min(ENOUGH, num_parts(plan) // plan.mesh.size(*GRADIENT_AXES))
        self._each = min(samples, ENOUGH // self._parts)
        """Number of samples of each microbatch that are kept."""
        self._kept: list[list[torch.Tensor]] = []
        self._form: Any = None
        self._is_on = True

    def keep(self, output: Any, targets: Any) -> None:
        """Keep the output and targets of a microbatch's first samples, if they are small enough.

        If they are not, or cannot be cut, nothing is kept of any microbatch.
        """
        room = ENOUGH - self._each * len(self._kept)
        if not self._is_on or room <= 0:
            return
        tensors = [tensor for _, tensor in tensors_in((output, targets))]
        is_odd = any(isinstance(tensor, LazyLogits | DTensor) for tensor in tensors)
        size = sum(tensor.numel() for tensor in tensors) // max(1, self._samples)
        self._each = max(1, min(self._each, _ELEMENTS // (self._parts * max(1, size))))
        part = [slice(0, min(room, self._each))]
        own = None if is_odd else cut(output, self._samples, part, is_output=True, like=targets)
        wanted = None if is_odd else cut(targets, self._samples, part, is_output=False)
        if own is None or wanted is None or size * self._each > _ELEMENTS:
            self._is_on = False
            self._kept.clear()
            return
        self._form, found = _split((own[0], wanted[0]))
        self._kept.append(found)

    def problem(self, loss_fn: LossFn, *, may_call: bool) -> tuple[Problem | None, bool]:
        """Compare the loss of all kept samples with those of their halves; all ranks must call it.

        Args:
            loss_fn: The user's loss function.
            may_call: If True, this rank may call the loss function outside of the training.

        Returns:
            (problem, is_mean). `problem` is that of the lowest rank with one, or None. `is_mean` is
            True if the loss is certainly a mean over samples: the halves contain unequal numbers of
            tokens or unmasked elements, and still average to the loss.
        """
        plan = self._plan
        others = [name for name in plan.mesh.names if name not in (*DATA_AXES, "cp", "pp")]
        rank = dist.get_rank()
        # Along cp, each rank checks its own part of the sequence of all samples.
        part = plan.mesh.index(rank, ("cp",))
        is_sender = plan.mesh.index(rank, DATA_AXES) < _RANKS and not plan.mesh.index(rank, others)
        every = [
            tensors
            for other, kept in enumerate(gathered(self._kept if is_sender else []))
            for tensors in kept
            if plan.mesh.index(other, ("cp",)) == part
        ]
        can_compare = bool(self._kept) and may_call
        own = self._of(every, loss_fn) if can_compare else (None, False)
        answers = gathered(own)
        problems = (problem for problem, _ in answers if problem is not None)
        return next(problems, None), any(is_mean for _, is_mean in answers)

    def _of(self, every: list[list[torch.Tensor]], loss_fn: LossFn) -> tuple[Problem | None, bool]:
        shapes = {tuple(tensor.shape[1:] for tensor in tensors) for tensors in every}
        if len(every) < 2 or len(shapes) > 1:
            return None, False
        is_mean = False
        # If both halves have equally many tokens, a mean over samples and a mean over tokens agree.
        # So also compare halves of the samples sorted by their number of tokens.
        by_amount = sorted(every, key=_amount)
        is_sorted = [*map(_amount, every)] == [*map(_amount, by_amount)]
        for each in [every] if is_sorted else [every, by_amount]:
            joined = [_joined(parts) for parts in map(list, zip(*each, strict=True))]
            output, targets = fill(self._form, joined.__getitem__)
            samples = next(t.shape[0] for t in joined if t.ndim and not is_parameter(t))
            three = three_of(loss_fn, output, targets, None, samples)
            if three is None:
                continue
            problem = three.confirms(loss_problem(three, self._plan))
            if problem is not None:
                return problem, False
            halves = three.first, three.second
            amounts = {(half.tokens, half.masked) for half in halves}
            is_finite = all(math.isfinite(half.loss) for half in (three.whole, *halves))
            is_mean |= len(amounts) > 1 and is_finite and self._plan.spec.loss == "mean"
        return None, is_mean and self._plan.assignment.context is None


def _amount(tensors: list[torch.Tensor]) -> int:
    return sum(int(((tensor != 0) & (tensor != IGNORED)).sum()) for tensor in tensors)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    if is_parameter(parts[0]):
        return nn.Parameter(parts[0].detach().to(device()))
    return (torch.cat(parts) if parts[0].ndim else parts[0]).to(device())


def _split(item: Any) -> tuple[Any, list[torch.Tensor]]:
    """Split a nested value into its structure and its tensors, copied to the host."""
    found: list[torch.Tensor] = []

    def place(tensor: torch.Tensor) -> int:
        # Clone, because pickle would send the whole storage of a view.
        copy = tensor.detach().clone().cpu()
        # Pickle keeps the type, which shows on other ranks too that no sample has the tensor.
        found.append(nn.Parameter(copy) if is_parameter(tensor) else copy)
        return len(found) - 1

    return shape_of(item, place), found
