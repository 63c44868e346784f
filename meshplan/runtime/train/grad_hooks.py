"""Hooks on finished gradients, which are reduced over all microbatches, ranks and pipeline stages.

`Tensor.register_hook` sees only the gradient of one microbatch on one rank, or is never called, if
an FSDP unit computes with a gathered copy of the parameter. A hook of `register_grad_hook` is
called once per step, after the last backward and before clipping, with this rank's shard of the
finished gradient. Hooks that `Tensor.register_hook` put on parameters of FSDP units are called in
the same way.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from meshplan.errors import ApplyError, Problem
from meshplan.plan.plan import Plan
from meshplan.runtime.apply.wrap import applied, own_module
from meshplan.runtime.base.mesh import without_partial
from meshplan.runtime.base.module_state import is_users
from meshplan.runtime.base.optimizer_steps import before_steps, is_due

GradHook = Callable[[torch.Tensor], torch.Tensor | None]


@dataclass(slots=True, weakref_slot=True)
class _GradHooks:
    """The hooks of one model, and the parameters whose hooks ran since the last optimizer step."""

    plan: Plan
    params: dict[str, list[nn.Parameter]]
    """The parameters by name. Several pipeline stages of one rank may each have a copy."""
    by_name: dict[str, OrderedDict[int, GradHook]] = field(default_factory=dict)
    """The hooks by name of their parameter, then by the id of their handle."""
    called: set[str] = field(default_factory=set)
    """Names of the parameters whose hooks were called since the last optimizer step."""
    steps: int = 0
    """Number of optimizer steps begun."""


_by_model: weakref.WeakKeyDictionary[nn.Module, _GradHooks] = weakref.WeakKeyDictionary()


def register_grad_hook(model: nn.Module, name: str, hook: GradHook) -> RemovableHandle:
    """Call a function with the gradient of a parameter, once in every optimizer step.

    The gradient is that of the global batch, and is clipped afterwards. If the rank has only a
    shard of the parameter, the gradient is a DTensor, whose norm and sum cover all shards. A rank
    whose pipeline stages lack the parameter never calls the hook.

    Args:
        model: The module that `parallelize` returned.
        name: The parameter's name in the model as it was before `parallelize`.
        hook: Called with the gradient; a return value other than None replaces the gradient.

    Returns:
        A handle whose `remove()` unregisters the hook.

    Raises:
        ApplyError: The model has no parameter of this name.
    """
    hooks = _hooks_of(model)
    known = {n for p in hooks.plan.assignment.tensors.values() for n in p.info.names}
    if name not in known:
        raise ApplyError(
            Problem(
                f"the model has no parameter {name}",
                fix="use a name that named_parameters() returned before parallelize",
            )
        )
    first = next(f for f, p in hooks.plan.assignment.tensors.items() if name in p.info.names)
    own = hooks.by_name.setdefault(first, OrderedDict())
    handle = RemovableHandle(own)
    own[handle.id] = hook
    return handle


def call_grad_hooks(model: nn.Module) -> None:
    """Call all hooks that were not called since the last step. The gradients must be finished."""
    hooks = _by_model.get(model)
    if hooks is None:
        return
    for name, own in hooks.by_name.items():
        if name in hooks.called:
            continue
        hooks.called.add(name)
        for param in hooks.params.get(name, ()):
            for hook in tuple(own.values()) if param.grad is not None else ():
                param.grad = without_partial(param.grad)
                changed = hook(param.grad)
                if changed is not None:
                    param.grad = changed


def watch_torch_hooks(model: nn.Module, plan: Plan) -> None:
    """Call pending hooks before each optimizer step, and take over or refuse torch's own hooks.

    Args:
        model: The module that `parallelize` returns.
    """
    params: dict[str, list[nn.Parameter]] = {}
    for name, param in own_module(model).named_parameters():
        params.setdefault(name.partition("@")[0], []).append(param)
    hooks = _by_model[model] = _GradHooks(plan, params)
    weak, weak_hooks = weakref.ref(model), weakref.ref(hooks)

    def look(optimizer: torch.optim.Optimizer) -> None:
        # A strong reference would keep the parameters of a deleted model in memory.
        own, hooks = weak(), weak_hooks()
        if own is None or hooks is None:
            return
        optimized = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not any(id(found[0]) in optimized for found in hooks.params.values()):
            return
        hooks.steps += 1
        if not hooks.by_name and not is_due(hooks.steps):
            return
        mine = {name for name, found in hooks.params.items() if id(found[0]) in optimized}
        if is_due(hooks.steps):
            for name in mine:
                _take_over(name, hooks)
        call_grad_hooks(own)
        hooks.called -= mine

    weakref.finalize(model, before_steps(look))

    def forget_calls(*_: Any) -> None:
        if torch.is_grad_enabled():  # `look` did not run if fp16 overflow skipped the last step.
            hooks.called.clear()

    model.register_forward_pre_hook(forget_calls)


def _take_over(name: str, hooks: _GradHooks) -> None:
    """Move torch's hooks on a parameter of an FSDP unit, which torch never calls, to `hooks`.

    Raises:
        ApplyError: The parameter has a hook that torch does call, but with the gradient of only a
            part of the batch.
    """
    placed = hooks.plan.assignment.tensors[name]
    is_sharded = placed.unit is not None and hooks.plan.assignment.wrapper == "units"
    for param in hooks.params[name]:
        # FSDP2 puts hooks on a unit's outputs, one of which may be a parameter.
        hooked = (param._backward_hooks or {}).items()
        found = {key: hook for key, hook in hooked if is_users(hook)}
        if is_sharded:
            hooks.by_name.setdefault(name, OrderedDict()).update(found)
            param._backward_hooks = None
        elif found and hooks.plan.num_parts > 1:
            raise ApplyError(_partial_problem(name))
        # FSDP2 calls these with the reduced gradient, in the backward of each microbatch.
        is_whole = is_sharded and hooks.plan.num_microbatches == 1
        later = (param._post_accumulate_grad_hooks or {}).values()
        if hooks.plan.num_parts > 1 and not is_whole and any(map(is_users, later)):
            raise ApplyError(_partial_problem(name))


def _hooks_of(model: nn.Module) -> _GradHooks:
    """Return the hooks of a model; raise ApplyError if it is not parallelized."""
    applied(model)
    return _by_model[model]


def _partial_problem(name: str) -> Problem:
    """Return the problem of a torch hook that would get only a part of a gradient."""
    return Problem(
        f"{name} has a gradient hook, which torch calls with a partial gradient: it covers only "
        "one rank's samples or one microbatch",
        fix=f"use meshplan.register_grad_hook(model, {name!r}, hook), which is called once per "
        "step with the gradient of the global batch",
    )
