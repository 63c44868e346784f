"""Optimizer steps on the local tensors of DTensors, which cost the host several times less.

The update of an element depends on this element alone in most optimizers of torch, so a step of
each rank's shards is the step of the whole parameters. Between steps an optimizer has DTensors, in
its groups and in its state, as without this module.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, Final, NamedTuple

import torch
from torch import optim
from torch.distributed.tensor import DTensor, Partial
from torch.optim import optimizer as hooks
from torch.optim.optimizer import register_optimizer_step_pre_hook

from meshplan.runtime.base.optimizer_steps import take_mixed_one_by_one
from meshplan.runtime.base.parallel_models import known_parameters

ELEMENTWISE: Final = frozenset({
    optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad, optim.Adadelta, optim.Adamax, optim.NAdam,
    optim.RAdam, optim.RMSprop, optim.ASGD,
})  # fmt: skip
"""Optimizers that update every element by itself. Subclasses may do more. Rprop's step, whose first
one is on DTensors, has an operator that DTensor does not know."""


@functools.cache
def step_on_local_tensors() -> None:
    """Let optimizers of parallelized models step on local tensors, from their second step on.

    Only optimizers of `ELEMENTWISE` do. A step uses DTensors if something else may look at the
    parameters during it: a closure, or hooks of the optimizer.
    """
    take_mixed_one_by_one()  # Its hook looks at DTensors, and must be called first.
    register_optimizer_step_pre_hook(_before)


def _before(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
    if type(optimizer) not in ELEMENTWISE or torch.compiler.is_compiling():
        return
    if optimizer not in _guards:  # Optimizers of other models stay as they are.
        known = known_parameters()
        every = [p for group in optimizer.param_groups for p in group["params"]]
        is_known = all(id(p) in known for p in every)
        _guards[optimizer] = _Guard(optimizer) if is_known else None
        return
    guard = _guards[optimizer]
    has_closure = any(each is not None for each in (*args[1:], *kwargs.values()))
    if guard and guard.is_inside and not has_closure and _is_alone(optimizer):
        guard.step = _local_step(optimizer)


def _is_alone(optimizer: optim.Optimizer) -> bool:
    """Return True if nothing but the optimizer's own step looks at its parameters from here on.

    Private, because torch does not tell which hooks are registered.
    """
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    last = next(reversed(hooks._global_optimizer_pre_hooks.values()))
    scales = (getattr(optimizer, name, None) for name in ("grad_scale", "found_inf"))
    return (
        not own
        and last is _before
        and not hooks._global_optimizer_post_hooks
        and all(scale is None for scale in scales)
    )


class _Guard:
    """Wraps the `step` of an optimizer, so that DTensors are put back however a step ends.

    The wrapped step refers to the optimizer weakly, as those of learning rate schedulers do: in a
    cycle of references, an optimizer would keep its state until the garbage is collected.

    Attributes:
        is_inside: True while the wrapped step runs.
        step: The step on local tensors that is to be ended; None for a step on DTensors.
    """

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self.is_inside = False
        self.step: _LocalStep | None = None
        inner = vars(optimizer).get("step")  # That of a learning rate scheduler.
        of_class, known = type(optimizer).step, weakref.ref(optimizer)

        def guarded(this: optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            self.is_inside = True
            try:
                return inner(*args, **kwargs) if inner else of_class(this, *args, **kwargs)
            finally:
                self.is_inside = False
                if self.step is not None:
                    self.step.end()
                    self.step = None

        def step(*args: Any, **kwargs: Any) -> Any:
            return guarded(known(), *args, **kwargs)

        whole: Any = functools.wraps(inner or of_class)(step)
        whole.__func__ = guarded  # A scheduler that is made later wraps this, as of a method.
        vars(optimizer)["step"] = whole


_guards: weakref.WeakKeyDictionary[optim.Optimizer, _Guard | None] = weakref.WeakKeyDictionary()
"""Guards of the optimizers that have taken a step; None for those of models without a plan."""


class _LocalStep(NamedTuple):
    """An optimizer that has local tensors in place of its DTensors.

    Attributes:
        optimizer: The optimizer.
        groups: (group, its parameters) as they were.
        pairs: Each parameter that is a DTensor, and the local tensor in its place.
    """

    optimizer: optim.Optimizer
    groups: list[tuple[dict[str, Any], list[torch.Tensor]]]
    pairs: list[tuple[DTensor, torch.Tensor]]

    def end(self) -> None:
        """Put the DTensors back, with the state that the step has made."""
        for group, params in self.groups:
            group["params"] = params
        state = self.optimizer.state
        for param, local in self.pairs:
            local.grad = None
            if (new := state.pop(local, None)) is not None:
                old = state[param]
                old.update({key: _state_of(param, old.get(key), new[key]) for key in new})


def _local_step(optimizer: optim.Optimizer) -> _LocalStep | None:
    """Replace an optimizer's DTensors by local tensors; None if that would not be the same step."""
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return None
    every = [p for group in optimizer.param_groups for p in group["params"]]
    pairs = [(p, p._local_tensor) for p in every if isinstance(p, DTensor)]
    if not pairs or not all(_is_plain(param, local) for param, local in pairs):
        return None
    groups = [(group, group["params"]) for group in optimizer.param_groups]
    state = optimizer.state
    for param, local in pairs:
        gradient = param.grad
        local.grad = gradient._local_tensor if isinstance(gradient, DTensor) else None
        if known := state.get(param):
            state[local] = {key: _local(value) for key, value in known.items()}
    for group, params in groups:
        group["params"] = [_local(param) for param in params]
    return _LocalStep(optimizer, groups, pairs)


def _is_plain(param: DTensor, local: torch.Tensor) -> bool:
    """Return True if a parameter and its gradient are alike, and have values on this rank alone."""
    gradient = param.grad
    if not param.ndim or any(isinstance(each, Partial) for each in param.placements):
        return False
    if not isinstance(gradient, DTensor):
        return gradient is None
    own = gradient._local_tensor
    return gradient.placements == param.placements and (own.shape, own.dtype, own.device) == (
        local.shape, local.dtype, local.device
    )  # fmt: skip


def _local(value: Any) -> Any:
    return value._local_tensor if isinstance(value, DTensor) else value


def _state_of(param: DTensor, old: Any, new: Any) -> Any:
    """Return an entry of a parameter's state, in the parameter's layout if it has its shape."""
    if isinstance(old, DTensor) and old._local_tensor is new:
        return old
    if not isinstance(new, torch.Tensor) or new.shape != param._local_tensor.shape:
        return new
    return DTensor.from_local(
        new, param.device_mesh, param.placements, run_check=False,
        shape=param.shape, stride=param.stride(),
    )  # fmt: skip
