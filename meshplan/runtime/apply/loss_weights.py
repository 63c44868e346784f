"""The loss of one process from the losses of a step's parts.

A part is one microbatch of one rank that sees samples or tokens of its own. The gradients of all
parts are averaged: those of microbatches by `train_step`, those of ranks by the wrappers. That is
the gradient of the whole batch only if the loss is. So the loss of each part is weighed here, by
what the plan says that the loss function returns, such that the plain mean over all parts is the
loss over the global batch:

- `loss: mean`: as it is. Parts hold equally many samples.
- `loss: sum`: times the number of parts.
- `loss: tokens`: times the part's share of all tokens, times the number of parts. All tokens are
  counted before the first forward.
- a function that returns (sum, count): the sum, divided by a number that is the same everywhere.
  The total count is known after the last part; gradients are multiplied then, once.
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
from meshplan.runtime.apply.lazy_logits import LazyLogits
from meshplan.runtime.base.batch_agreement import num_samples
from meshplan.runtime.base.fake_mode import is_fake_execution
from meshplan.runtime.base.mesh import device, reduce_along, submesh
from meshplan.runtime.base.pytree import tensors_in

IGNORED: Final = -100
"""The target that torch's cross-entropy leaves out."""
PAIR: Final = (
    "let loss_fn return (sum, count): the sum over what it was given, and how many that were"
)


_IN_STEP: Final[ContextVar[bool]] = ContextVar("in_step", default=False)


@contextmanager
def weighing() -> Iterator[None]:
    """Inside, `train_step` weighs what the loss function returns."""
    token = _IN_STEP.set(True)
    try:
        yield
    finally:
        _IN_STEP.reset(token)


def is_weighed() -> bool:
    """Whether this runs inside of `train_step`, which weighs losses itself."""
    return _IN_STEP.get()


@dataclass(slots=True)
class History:
    """What the steps of a model have shown so far.

    Attributes:
        steps: Calls of `train_step`.
        returns_count: Whether `loss_fn` returns (sum, count); None before the first step.
        divisor: What such a sum is divided by before its backward, so that gradients keep the
            size that half precision can hold; 0 until the first such step has ended.
        asks_values: Whether forwards ask tensors for numbers that depend on the batch.
        is_doubtful: Whether ranks were given the same samples in a step that is not the first,
            which may be chance once.
    """

    steps: int = 0
    returns_count: bool | None = None
    divisor: float = 0.0
    asks_values: bool = False
    is_doubtful: bool = False


def num_parts(plan: Plan) -> int:
    """The parts whose gradients are averaged in one step."""
    stages = plan.assignment.stages
    microbatches = plan.accumulate * (stages.microbatches if stages is not None else 1)
    return microbatches * plan.mesh.size(*GRADIENT_AXES)


def token_targets(targets: Any) -> list[torch.Tensor]:
    """The tensors of whole numbers with samples along dim 0 among the targets."""
    kinds = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    return [t for _, t in tensors_in(targets) if t.ndim and t.dtype in kinds]


def tokens_by_sample(targets: Any) -> torch.Tensor | None:
    """How many targets of each sample are not -100; None if it is not clear which they are.

    Shape: (samples,), on the CPU.
    """
    found = token_targets(targets)
    if len(found) != 1:
        return None
    return (found[0] != IGNORED).reshape(len(found[0]), -1).sum(1).cpu()


class Weights:
    """Weighs the losses of one step's parts.

    Args:
        plan: Of the model.
        mesh: The live one.
        history: Of the model.
        batch: This rank's inputs and targets of the step.

    Raises:
        ApplyError: `loss: tokens` finds nothing to count.
    """

    def __init__(self, plan: Plan, mesh: DeviceMesh, history: History, batch: Any) -> None:
        self._plan, self._mesh, self._history = plan, mesh, history
        self._kind = plan.spec.loss
        self.parts = num_parts(plan)
        self.count: torch.Tensor | None = None
        # What has returned a loss alone does so in every step, and divides nothing.
        is_alone = history.returns_count is False
        self._divisor = history.divisor or (1.0 if is_alone else self._first_divisor(batch))
        self._tokens: torch.Tensor | None = None
        self._total = 0
        if self._kind == "tokens" and not is_fake_execution():
            self._tokens = tokens_by_sample(batch[1])
            if self._tokens is None:
                raise ApplyError(self._uncounted(batch[1]))
            total = self._tokens.sum().double().to(device())
            self._reduce(total, dist.ReduceOp.SUM)
            self._total = int(total)

    def _first_divisor(self, batch: Any) -> float:
        """What a sum is divided by before counts are known, the same on all data ranks."""
        microbatches = self.parts // self._plan.mesh.size(*GRADIENT_AXES)
        if not self._plan.spec.precision.scales_loss or is_fake_execution():
            # Samples are equal on all ranks, or `mean_over_ranks` refuses the batch.
            return max(1.0, num_samples(batch) / microbatches)
        # float16 holds the gradients of means, and not those of sums over many tokens.
        size = max((t.numel() for _, t in tensors_in(batch[1])), default=1)
        largest = torch.tensor(size / microbatches, dtype=torch.float64, device=device())
        self._reduce(largest, dist.ReduceOp.MAX)
        return max(1.0, float(largest))

    def _reduce(self, value: torch.Tensor, op: dist.ReduceOp.RedOpType) -> None:
        if self._plan.mesh.size(*GRADIENT_AXES) > 1:
            group = submesh(self._mesh, GRADIENT_AXES, flat=True).get_group()
            dist.all_reduce(value, op=op, group=group)

    def _uncounted(self, targets: Any) -> Problem:
        num = len(token_targets(targets))
        found = f"{num} tensors of whole numbers" if num else "no tensor of whole numbers"
        return Problem(
            f"loss: tokens counts the targets that are not {IGNORED}, but {found} "
            f"{'are' if num else 'is'} among the targets",
            self._plan.spec.origin("loss"),
            f"pass the labels, and no other whole numbers, as the targets of train_step; or {PAIR}",
        )

    def marked(self, targets: Any) -> Any:
        """The targets, with the counts of tokens beside them to be cut like them."""
        return (targets, self._tokens)

    def weigh(self, given: Any, output: Any, tokens: torch.Tensor | None) -> torch.Tensor:
        """The loss of a part, such that the mean over all parts is that of the global batch.

        Args:
            given: What the loss function returned.
            output: What it was given.
            tokens: Those of the part, by sample.

        Raises:
            ApplyError: It returned neither a loss nor (sum, count).
        """
        is_pair = isinstance(given, tuple | list)
        self._note(is_pair)
        if is_pair:
            return self._of_sum(*_pair(given))
        if not isinstance(given, torch.Tensor):
            raise ApplyError(
                Problem(
                    f"loss_fn returned a {type(given).__name__}, which is no loss",
                    fix="return the loss alone, a tensor of one element, or (sum, count)",
                )
            )
        loss = given
        if self._kind == "mean" or is_fake_execution():
            return loss
        wide = loss.to(torch.promote_types(loss.dtype, torch.float32))
        if self._kind == "sum":
            return wide * self.parts
        assert tokens is not None
        num = int(tokens.sum())
        # The mean over no token is not a number, and neither would be its gradients.
        return wide * (num * self.parts / self._total) if num else _zero(output, loss)

    def _note(self, is_pair: bool) -> None:
        """Remember what the loss function returns, once for all steps."""
        if is_pair and self._kind != "mean":
            raise ApplyError(
                Problem(
                    f"loss_fn returns (sum, count), and the plan says loss: {self._kind}",
                    self._plan.spec.origin("loss"),
                    "leave loss out: (sum, count) says all",
                )
            )
        if self._history.returns_count not in (None, is_pair):
            before = "(sum, count)" if not is_pair else "a loss alone"
            raise ApplyError(
                Problem(
                    f"loss_fn returned {before} in earlier steps and no longer does, which stages "
                    "without the loss cannot know",
                    fix="return (sum, count) in all steps or in none",
                )
            )
        self._history.returns_count = is_pair

    def _of_sum(self, total: torch.Tensor, count: Any) -> torch.Tensor:
        counted = torch.as_tensor(count, dtype=torch.float64, device=total.device).detach()
        self.count = counted if self.count is None else self.count + counted
        # A mean over nothing, times nothing, is not a number.
        total = torch.where(counted == 0, torch.zeros_like(total), total)
        return total.to(torch.promote_types(total.dtype, torch.float32)) / self._divisor

    def agree(self) -> None:
        """Tell the other stages what the last one has counted."""
        stages = self._plan.assignment.stages
        if stages is None or is_fake_execution():
            return
        if not self._history.steps:  # Later on all know whether there is a count.
            flag = torch.tensor(float(bool(self._history.returns_count)), device=device())
            reduce_along(flag, self._mesh, ("pp",), dist.ReduceOp.MAX)
            self._history.returns_count = bool(flag)
        if self._history.returns_count:
            own = torch.zeros((), dtype=torch.float64, device=device())
            own = own if self.count is None else self.count.to(device())
            reduce_along(own, self._mesh, ("pp",), dist.ReduceOp.SUM)
            self.count = own

    def factor(self, total: float | None) -> float:
        """The number that gradients and the mean over parts are still to be multiplied by.

        Args:
            total: The count over the global batch; None where nothing was counted.
        """
        if total is None:
            return 1.0
        if not math.isfinite(total) or total < 0:
            raise ApplyError(
                Problem(f"the counts that loss_fn returned add up to {total}", fix=PAIR)
            )
        self._history.divisor = max(1.0, total / self.parts)
        return self._divisor * self.parts / total if total else 0.0


def _pair(given: Any) -> tuple[torch.Tensor, Any]:
    total, count = given if len(given) == 2 else (None, None)
    is_number = isinstance(count, Real) and not isinstance(count, bool)
    is_scalar = isinstance(count, torch.Tensor) and count.numel() == 1
    if not isinstance(total, torch.Tensor) or not (is_number or is_scalar):
        raise ApplyError(
            Problem(
                f"loss_fn returned {len(given)} values that are not (sum, count)",
                fix="return the loss alone, or the sum and how many it was taken over, a number "
                "or a tensor of one element",
            )
        )
    return total, count.reshape(()) if isinstance(count, torch.Tensor) else count


def _zero(output: Any, loss: torch.Tensor) -> torch.Tensor:
    """Zero, whose gradients are zeros for all that the output was computed from."""
    found = [
        t.to_local() if isinstance(t, DTensor) else t
        for _, t in tensors_in(output)
        if t.requires_grad and not isinstance(t, LazyLogits)
    ]
    found = [t for t in found if t.ndim] or found or [loss]
    zeros = [torch.nan_to_num(t.flatten().float() * 0.0).sum() for t in found]
    return torch.stack(zeros).sum()
