"""`EMA`: moving averages of the weights, sharded and saved like the optimizer's states."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final
from weakref import WeakSet

import torch
from torch import nn

from meshplan.errors import ApplyError, Problem
from meshplan.runtime.apply.data.data import reshard_units
from meshplan.runtime.apply.pipeline.module import PipelinedModule
from meshplan.runtime.apply.wrap import applied
from meshplan.runtime.base.mesh import local_of

STATE: Final = "ema"
"""Key of the average in the optimizer's state of a parameter."""

_averaging: Final[WeakSet[torch.optim.Optimizer]] = WeakSet()
"""The optimizers that have an EMA: two would share `STATE`."""


class EMA:
    """Exponential moving averages of a model's weights, updated after each optimizer step.

    `torch.optim.swa_utils.AveragedModel` copies the model, which a sharded model cannot be. Here
    each average stands in the optimizer's state of its parameter, in float32: it is sharded as the
    parameter is, and `meshplan.save` and `load` carry it from one plan to another. It takes 4 bytes
    for each element of a shard, which the estimate of a plan does not contain.

    The first step sets the average to the weights after it. Each later one sets it to
    `decay * average + (1 - decay) * weights`. Buffers are not averaged.

    Args:
        model: The module that `parallelize` returned.
        optimizer: An optimizer of its parameters.
        decay: From 0 to 1: how much of the average stays at each step.

    Raises:
        ApplyError: The decay is not between 0 and 1, or the optimizer has an EMA already.

    Example:
        >>> ema = meshplan.EMA(model, optimizer, decay=0.999)
        >>> with ema.averaged():
        ...     loss = meshplan.eval_step(model, inputs, targets, loss_fn)
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, decay: float = 0.999
    ) -> None:
        applied(model)
        if not 0 <= decay <= 1:
            raise ApplyError(Problem(f"the decay of an EMA is {decay}, but must be from 0 to 1"))
        if optimizer in _averaging:
            raise ApplyError(Problem("this optimizer has an EMA already", fix="use that one"))
        _averaging.add(optimizer)
        self.decay = decay
        self._model, self._optimizer = model, optimizer
        optimizer.register_step_pre_hook(self._check)
        optimizer.register_step_post_hook(self._update)

    def _check(self, *_: Any) -> None:
        if applied(self._model).is_averaged:
            raise ApplyError(
                Problem(
                    "the optimizer stepped while the model has its averaged weights",
                    fix="end the block `with ema.averaged()` before the next step",
                )
            )

    @torch.no_grad()
    def _update(self, *_: Any) -> None:
        for parameter in self._parameters():
            state = self._optimizer.state[parameter]
            own = local_of(parameter.detach())
            if STATE in state:
                local_of(state[STATE]).lerp_(own.float(), 1 - self.decay)
            elif parameter.grad is not None:
                # Not before the first step: Adam takes a state that is not empty for its own.
                state[STATE] = parameter.detach().to(torch.float32, copy=True)

    def _parameters(self) -> list[nn.Parameter]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    @contextmanager
    @torch.no_grad()
    def averaged(self) -> Iterator[None]:
        """Give the model its averaged weights inside the `with` block, and its own ones back after.

        Inside, evaluate, predict, or write the averages with `save_pretrained`. No further copy of
        the weights is made: averages and weights change places.

        Raises:
            ApplyError: No step was taken yet, so that there are no averages.
        """
        known = [p for p in self._parameters() if STATE in self._optimizer.state.get(p, {})]
        if not known:
            what = "there are no averaged weights before the first optimizer step"
            raise ApplyError(Problem(what, fix="train a step first, or load a state that has them"))
        self._exchange(known)
        state = applied(self._model)
        state.is_averaged = True
        try:
            yield
        finally:
            state.is_averaged = False
            self._exchange(known)

    def _exchange(self, parameters: list[nn.Parameter]) -> None:
        if not isinstance(self._model, PipelinedModule):
            reshard_units(self._model, applied(self._model).plan)  # Gathered copies would stay.
        for parameter in parameters:
            average = local_of(self._optimizer.state[parameter][STATE])
            own = local_of(parameter.detach())
            before = own.to(average.dtype, copy=True)
            own.copy_(average)
            average.copy_(before)
