"""`PlannedPrecision`: backward, clipping and the optimizer's step as a plan needs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.plugins.precision import Precision

from meshplan.errors import ApplyError, Problem
from meshplan.runtime.train.gradient_scale import clip_grad_norm_, clip_grad_value_
from meshplan.runtime.watch.guard import guarded

if TYPE_CHECKING:
    from meshplan.interop.lightning.strategy import MeshplanStrategy


class PlannedPrecision(Precision):
    """Lightning's precision plugin for a plan.

    The dtypes are those that the plan's wrappers use; nothing is cast here.

    Args:
        strategy: The strategy that uses it.
        word: Lightning's name of the precision.
    """

    def __init__(self, strategy: MeshplanStrategy, word: str) -> None:
        self.precision = word
        self._strategy = strategy

    def pre_backward(self, tensor: torch.Tensor, module: Any) -> torch.Tensor:
        """Weight the loss of this rank's samples before backward."""
        if not self._strategy.step.is_pipelined:
            tensor = self._strategy.step.weigh(tensor)
        return super().pre_backward(tensor, module)

    def backward(self, tensor: Any, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Run backward; with pipeline stages it has run, and its gradients are put into place."""
        if self._strategy.step.is_pipelined:
            self._strategy.step.release()
        else:
            super().backward(tensor, model, optimizer, *args, **kwargs)

    def optimizer_step(
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run forward and backward of the last microbatch, and the optimizer's step."""
        strategy = self._strategy
        if isinstance(optimizer, torch.optim.LBFGS):
            what = "LBFGS evaluates the loss several times in each step, on whole parameters"
            raise ApplyError(Problem(what, fix="use another optimizer, such as torch.optim.AdamW"))
        with guarded("optimizer_step"):
            with strategy.microbatch(is_last=True):
                result = closure()
            if strategy.step.before_step(optimizer):
                self._after_closure(model, optimizer)
                strategy.step.take(lambda: optimizer.step(**kwargs))
            strategy.step.finish()
        return result

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """Clip by the norm over all meshes and pipeline stages."""
        self._strategy.step.before_step(optimizer)
        clip_grad_norm_(self._strategy.network, clip_val)

    def clip_grad_by_value(self, optimizer: Any, clip_val: float) -> None:
        """Clamp each element of the gradients."""
        self._strategy.step.before_step(optimizer)
        clip_grad_value_(self._strategy.network, clip_val)
