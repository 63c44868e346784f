"""Weights for the losses of a step's parts, so that their mean is the loss of one process.

A part is one microbatch on one rank of dp_replicate, dp_shard and cp. The gradients of all parts
are averaged: over microbatches by `train_step`, over ranks by FSDP2 or DDP. The result is the
gradient of the global batch only if the plain mean of the parts' losses is the loss of the global
batch. Each part's loss is therefore weighted, depending on what the loss function returns:

- a mean over samples (`loss: mean` in the plan): the loss is unchanged, since all parts have
  equally many samples.
- a sum (`loss: sum`): the loss is multiplied by the number of parts.
- a mean over tokens (`loss: tokens`): the loss is multiplied by the part's share of all tokens and
  by the number of parts. All tokens are counted before the first forward.
- a pair (sum, count): the sum is divided by a number that is the same on all ranks. The total count
  is known only after the last part; all gradients are then multiplied by one factor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from numbers import Real
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshplan.errors import ApplyError, Problem
from meshplan.layout.mesh import GRADIENT_AXES
from meshplan.plan.plan import Plan
from meshplan.runtime.apply.loss.lazy_logits import LazyLogits
from meshplan.runtime.base.batch_agreement import num_samples
from meshplan.runtime.base.fake_mode import is_fake_execution
from meshplan.runtime.base.mesh import device, reduce_along, submesh
from meshplan.runtime.base.pytree import tensors_in

IGNORED: Final = -100
"""Target that torch's cross-entropy ignores by default."""
PAIR: Final = (
    "let loss_fn return (sum, count): the summed loss, and the number of elements in that sum"
)
"""The fix that error messages about `loss_fn` suggest."""


_IN_STEP: Final[ContextVar[bool]] = ContextVar("in_step", default=False)


@contextmanager
def weighing() -> Iterator[None]:
    """Mark the code inside as part of `train_step`, which weights the loss function's results."""
    token = _IN_STEP.set(True)
    try:
        yield
    finally:
        _IN_STEP.reset(token)


def is_weighed() -> bool:
    """Return True inside of `weighing`, that is in `train_step`, which weights losses itself."""
    return _IN_STEP.get()


@dataclass(slots=True)
class History:
    """Observations about a model's loss function, forwards and batches in its steps so far.

    Attributes:
        steps: Number of calls of `train_step`.
        returns_count: True if `loss_fn` returns (sum, count); None before the first step.
        divisor: If `loss_fn` returns (sum, count): the number that the sum is divided by before
            backward, to keep gradients in the range of half precision; 0 until the first step
            has ended.
        asks_values: True if forwards read tensor values that depend on the batch.
        is_doubtful: True if ranks got the same samples when they were last compared, in a step
            other than the first. Once may be chance; twice in a row is an error.
    """

    steps: int = 0
    returns_count: bool | None = None
    divisor: float = 0.0
    asks_values: bool = False
    is_doubtful: bool = False


def num_parts(plan: Plan) -> int:
    """Return the number of parts whose gradients are averaged in one step."""
    stages = plan.assignment.stages
    microbatches = plan.accumulate * (stages.microbatches if stages is not None else 1)
    return microbatches * plan.mesh.size(*GRADIENT_AXES)


def token_targets(targets: Any) -> list[torch.Tensor]:
    """Return the integer tensors among the targets, except scalars; dim 0 is the samples."""
    kinds = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    return [t for _, t in tensors_in(targets) if t.ndim and t.dtype in kinds]


def tokens_by_sample(targets: Any) -> torch.Tensor | None:
    """Count, for each sample, the targets that are not -100.

    Returns:
        The counts on the CPU, of shape (samples,); None unless `token_targets` finds exactly one
        tensor.
    """
    found = token_targets(targets)
    if len(found) != 1:
        return None
    return (found[0] != IGNORED).reshape(len(found[0]), -1).sum(1).cpu()


class Weights:
    """Weights for the losses of one step's parts (defined in the module's docstring).

    Args:
        plan: The plan of the model.
        mesh: The live DeviceMesh.
        history: Observations from the model's earlier steps; updated by this one.
        batch: (inputs, targets) of this rank for the step.

    Attributes:
        parts: Number of parts whose gradients are averaged.
        count: Sum of the counts that the loss function has returned in this step; None if none.

    Raises:
        ApplyError: With `loss: tokens`, the targets are not a single integer tensor.
    """

    def __init__(self, plan: Plan, mesh: DeviceMesh, history: History, batch: Any) -> None:
        self._plan, self._mesh, self._history = plan, mesh, history
        self._kind = plan.spec.loss
        self.parts = num_parts(plan)
        self.count: torch.Tensor | None = None
        # A loss function that returned no count before never does, and needs no divisor.
        is_alone = history.returns_count is False
        self._divisor = history.divisor or (1.0 if is_alone else self._first_divisor(batch))
        self._tokens: torch.Tensor | None = None
        self._total = 0
        if self._kind == "tokens" and not is_fake_execution():
            self._tokens = tokens_by_sample(batch[1])
            if self._tokens is None:
                raise ApplyError(uncounted(batch[1], plan))
            total = self._tokens.sum().double().to(device())
            self._reduce(total, dist.ReduceOp.SUM)
            self._total = int(total)

    def _first_divisor(self, batch: Any) -> float:
        """Return the divisor of sums while no count is known yet, equal on all data ranks."""
        microbatches = self.parts // self._plan.mesh.size(*GRADIENT_AXES)
        if not self._plan.spec.precision.scales_loss or is_fake_execution():
            # All ranks have equally many samples; else `mean_over_ranks` refuses the batch.
            return max(1.0, num_samples(batch) / microbatches)
        # float16 can hold the gradients of means, but not those of sums over many tokens.
        size = max((t.numel() for _, t in tensors_in(batch[1])), default=1)
        largest = torch.tensor(size / microbatches, dtype=torch.float64, device=device())
        self._reduce(largest, dist.ReduceOp.MAX)
        return max(1.0, float(largest))

    def _reduce(self, value: torch.Tensor, op: dist.ReduceOp.RedOpType) -> None:
        if self._plan.mesh.size(*GRADIENT_AXES) > 1:
            group = submesh(self._mesh, GRADIENT_AXES, flat=True).get_group()
            dist.all_reduce(value, op=op, group=group)

    def marked(self, targets: Any) -> Any:
        """Return (targets, tokens per sample), to be split into microbatches together."""
        return (targets, self._tokens)

    def weigh(self, given: Any, output: Any, tokens: torch.Tensor | None) -> torch.Tensor:
        """Weight a part's loss, so that the mean over all parts is the loss of the global batch.

        Args:
            given: Return value of the loss function.
            output: The model output that it was computed from.
            tokens: Counted tokens of each of the part's samples, shape (samples,); used with
                `loss: tokens` only.

        Returns:
            The weighted loss, a tensor of one element.

        Raises:
            ApplyError: The loss function returned neither a loss nor (sum, count).
        """
        is_pair = isinstance(given, tuple | list)
        self._note(is_pair)
        if is_pair:
            return self._of_sum(*pair_of(given))
        if not isinstance(given, torch.Tensor):
            raise ApplyError(not_a_loss(given))
        loss = given
        if self._kind == "mean" or is_fake_execution():
            return loss
        wide = loss.to(torch.promote_types(loss.dtype, torch.float32))
        if self._kind == "sum":
            return wide * self.parts
        assert tokens is not None
        num = int(tokens.sum())
        # The mean over no tokens is NaN, and so would be its gradients.
        return wide * (num * self.parts / self._total) if num else zero_of(output, loss)

    def _note(self, is_pair: bool) -> None:
        """Record what the loss function returns; raise if that changes between steps."""
        if is_pair and self._kind != "mean":
            raise ApplyError(
                Problem(
                    f"loss_fn returns (sum, count), but the plan states loss: {self._kind}",
                    self._plan.spec.origin("loss"),
                    "leave loss out of the plan: (sum, count) already defines the mean",
                )
            )
        if self._history.returns_count not in (None, is_pair):
            kinds = ("a loss alone", "(sum, count)")
            before, now = kinds if is_pair else kinds[::-1]
            raise ApplyError(
                Problem(
                    f"loss_fn returned {before} in earlier steps, but {now} in this step",
                    fix="return (sum, count) in all steps or in none",
                )
            )
        self._history.returns_count = is_pair

    def _of_sum(self, total: torch.Tensor, count: Any) -> torch.Tensor:
        counted = torch.as_tensor(count, dtype=torch.float64, device=total.device).detach()
        self.count = counted if self.count is None else self.count + counted
        # A loss function may divide by the count and multiply again, which gives NaN for 0.
        total = torch.where(counted == 0, torch.zeros_like(total), total)
        return total.to(torch.promote_types(total.dtype, torch.float32)) / self._divisor

    def agree(self) -> None:
        """Share the counts of the last pipeline stage with the other stages."""
        stages = self._plan.assignment.stages
        if stages is None or is_fake_execution():
            return
        # After the first step, every stage knows whether the loss function returns counts.
        if not self._history.steps:
            flag = torch.tensor(float(bool(self._history.returns_count)), device=device())
            reduce_along(flag, self._mesh, ("pp",), dist.ReduceOp.MAX)
            self._history.returns_count = bool(flag)
        if self._history.returns_count:
            own = torch.zeros((), dtype=torch.float64, device=device())
            own = own if self.count is None else self.count.to(device())
            reduce_along(own, self._mesh, ("pp",), dist.ReduceOp.SUM)
            self.count = own

    def factor(self, total: float | None) -> float:
        """Return the factor that gradients and the mean loss of the parts must be multiplied by.

        It is 1 unless the loss function returns (sum, count).

        Args:
            total: The count over the global batch; None if the loss function returns no counts.

        Raises:
            ApplyError: The total is negative or not finite.
        """
        if total is None:
            return 1.0
        if not math.isfinite(total) or total < 0:
            raise ApplyError(
                Problem(f"the counts that loss_fn returned add up to {total}", fix=PAIR)
            )
        # The divisor of the next step makes its sums about as large as means.
        self._history.divisor = max(1.0, total / self.parts)
        # Sums were divided by `_divisor` and averaged over `parts`; the mean divides by `total`.
        return self._divisor * self.parts / total if total else 0.0


def uncounted(targets: Any, plan: Plan) -> Problem:
    """Return the problem of targets in which `loss: tokens` finds no tokens to count."""
    num = len(token_targets(targets))
    found = f"{num} integer tensors" if num else "no integer tensor"
    return Problem(
        f"loss: tokens counts the labels that are not {IGNORED} in the only integer tensor "
        f"among the targets, but the targets contain {found}",
        plan.spec.origin("loss"),
        f"pass the labels as the only integer tensor in the targets of train_step; or {PAIR}",
    )


def not_a_loss(given: Any) -> Problem:
    """Return the problem of a loss function that returned neither a loss nor (sum, count)."""
    return Problem(
        f"loss_fn returned a {type(given).__name__} instead of a loss",
        fix="return the loss as a tensor of one element, or (sum, count)",
    )


def pair_of(given: Any) -> tuple[torch.Tensor, Any]:
    """Return the (sum, count) that a loss function returned; raise ApplyError if it is no such."""
    total, count = given if len(given) == 2 else (None, None)
    is_number = isinstance(count, Real) and not isinstance(count, bool)
    is_scalar = isinstance(count, torch.Tensor) and count.numel() == 1
    if not isinstance(total, torch.Tensor) or not (is_number or is_scalar):
        raise ApplyError(
            Problem(
                f"loss_fn returned {len(given)} values that are not (sum, count)",
                fix="return the loss alone, or the summed loss and the number of elements in that "
                "sum (a number or a tensor of one element)",
            )
        )
    return total, count.reshape(()) if isinstance(count, torch.Tensor) else count


def zero_of(output: Any, loss: torch.Tensor) -> torch.Tensor:
    """Return a zero whose backward gives zero gradients to everything the output depends on."""
    found = [
        t.to_local() if isinstance(t, DTensor) else t
        for _, t in tensors_in(output)
        if t.requires_grad and not isinstance(t, LazyLogits)
    ]
    found = [t for t in found if t.ndim] or found or [loss]
    zeros = [torch.nan_to_num(t.flatten().float() * 0.0).sum() for t in found]
    return torch.stack(zeros).sum()
