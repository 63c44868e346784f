"""Rejection of calls that bypass the wrapped model; each error names the call to use instead.

A submodule that is called directly has only shards of its parameters under FSDP2, and under
DistributedDataParallel the gradients of such a call are not averaged. A copy of the model shares
hooks with the original. A cast contradicts the plan. If a norm of sharded parameters is added to
the loss, torch cannot compute the gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from meshplan.errors import ApplyError, Problem
from meshplan.layout.mesh import GRADIENT_AXES
from meshplan.model.graph import is_inside
from meshplan.plan.plan import Plan
from meshplan.runtime.checks.dry_run import in_dry_run
from meshplan.runtime.torch_private.private import running_node

_ALLOWED: Final[ContextVar[nn.Module | None]] = ContextVar("allowed", default=None)


@contextmanager
def allowing_calls_of(part: nn.Module) -> Iterator[None]:
    """Let a submodule be called from outside in the `with` block, which gathers its parameters."""
    token = _ALLOWED.set(part)
    try:
        yield
    finally:
        _ALLOWED.reset(token)


def count_calls(module: nn.Module) -> tuple[Callable[[], bool], list[RemovableHandle]]:
    """Return what tells if a call of a module runs, and the handles of the hooks that count."""
    depth = 0

    def enter(*_: Any) -> None:
        nonlocal depth
        depth += 1

    def leave(*_: Any) -> None:
        nonlocal depth
        depth -= 1

    # `enter` must run even if another pre-hook raises, because `leave` is always called.
    entering = module.register_forward_pre_hook(enter, prepend=True)
    return lambda: depth > 0, [entering, module.register_forward_hook(leave, always_call=True)]


def refuse_calls_of_parts(model: nn.Module, wrapped: nn.Module, plan: Plan) -> None:
    """Register hooks that reject a call of a submodule from outside the model's own forward.

    Args:
        model: The user's module.
        wrapped: The module to call instead: `model` itself or DistributedDataParallel around it.
        plan: The plan applied to the model.
    """
    wrapper = plan.assignment.wrapper
    if wrapper == "none" or plan.mesh.size(*GRADIENT_AXES) == 1:
        return
    is_running, _ = count_calls(wrapped)

    def look(fqn: str, is_gathered: bool) -> Callable[..., None]:
        def refuse(module: nn.Module, *_: Any) -> None:
            # Recomputation in backward and dry runs of the checks call submodules directly.
            is_from_backward = running_node() is not None
            if is_running() or is_from_backward or in_dry_run() or module is _ALLOWED.get():
                return
            if wrapper == "ddp" and torch.is_grad_enabled():
                raise ApplyError(_unaveraged(fqn))
            if wrapper == "units" and not is_gathered:
                raise ApplyError(_in_parts(fqn))

        return refuse

    if wrapped is not model:
        model.register_forward_pre_hook(look("", is_gathered=False), prepend=True)
    units, chunked = plan.assignment.units, plan.assignment.chunked_loss
    for fqn, child in _called(model):
        if chunked is not None and is_inside(chunked.head, fqn):
            continue  # The chunked loss calls the head outside the model's forward.
        owners = {
            placed.unit
            for placed in plan.assignment.tensors.values()
            if is_inside(placed.info.fqn, fqn) and placed.unit in units
        }
        gathers = all(owner is not None and is_inside(owner, fqn) for owner in owners)
        child.register_forward_pre_hook(look(fqn, is_gathered=gathers), prepend=True)


def _called(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield (fqn, module) of the outermost submodules that have parameters and can be called.

    ModuleList and ModuleDict cannot be called, so the modules inside them are yielded.
    """
    for name, child in model.named_children():
        fqn = f"{prefix}{name}"
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _called(child, f"{fqn}.")
        elif next(child.parameters(), None) is not None:
            yield fqn, child


def refuse_copies_and_casts(wrapped: nn.Module) -> None:
    """Make the wrapped model reject copies, pickling and changes of its dtype or device."""
    apply = wrapped._apply

    def checked(function: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        for dtype, device in {(p.dtype, p.device) for p in wrapped.parameters()}:
            probe = torch.empty(0, dtype=dtype, device=device)
            changed = function(probe)
            if (changed.dtype, changed.device) != (dtype, device):
                raise ApplyError(_cast(dtype, changed.dtype, changed.device))
        return apply(function, *args, **kwargs)

    def refuse(*_: Any) -> NoReturn:
        raise ApplyError(_copy())

    own = vars(wrapped)
    own["_apply"] = checked
    own["__deepcopy__"] = own["__copy__"] = own["__reduce_ex__"] = refuse


@functools.cache
def explain_mixed_losses() -> None:
    """Make `DTensor.backward` explain what to do if torch cannot compute the gradient of a loss.

    The sum of a plain loss and a norm of sharded parameters is a DTensor. Its gradient is a DTensor
    as well, and the backward operators of the plain loss do not accept a DTensor. Torch's own error
    only names one of these operators.
    """

    def backward(loss: DTensor, *args: Any, **kwargs: Any) -> None:
        with explaining_mixed_losses():
            torch.Tensor.backward(loss, *args, **kwargs)

    setattr(DTensor, "backward", backward)  # noqa: B010  (mypy takes a method for final)


@contextmanager
def explaining_mixed_losses() -> Iterator[None]:
    """Explain torch's error about the gradient of a sum of a plain and a sharded tensor."""
    try:
        yield
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise ApplyError(_mixed()) from error


def _mixed() -> Problem:
    return Problem(
        "the loss is a DTensor: a value computed from sharded parameters was added to a plain "
        "tensor, and torch cannot compute the gradient of the sum",
        fix="make each value that was computed from a parameter plain before it is added to "
        "another: penalty.full_tensor() if isinstance(penalty, DTensor) else penalty",
    )


def _unaveraged(fqn: str) -> Problem:
    return Problem(
        f"model.module{f'.{fqn}' if fqn else ''} was called directly instead of "
        "through DistributedDataParallel: its gradients would not be averaged over the ranks",
        fix="call the module that parallelize returned, and let its forward choose which "
        "submodules run; to evaluate this submodule alone, call it under torch.no_grad()",
    )


def _in_parts(fqn: str) -> Problem:
    return Problem(
        f"'{fqn}' was called directly, outside the model's forward, where each rank holds only a "
        "shard of its parameters",
        fix="call the module that parallelize returned, and let its forward choose which "
        f"submodules run, or add a rule {{match: '{fqn}', unit: true}}",
    )


def _cast(dtype: torch.dtype, to: torch.dtype, device: torch.device) -> Problem:
    return Problem(
        f"the model's {dtype} tensors cannot be converted to {to} on {device}: the plan sets the "
        "dtype and device of every tensor",
        fix="set precision in the plan (bf16-mixed, bf16-true), or convert the model before "
        "parallelize",
    )


def _copy() -> Problem:
    return Problem(
        "a parallelized model cannot be copied or pickled: a copy would share its hooks and "
        "process groups",
        fix="save meshplan.full_state_dict(model); for a moving average, parallelize a second "
        "model with the same plan, which shards its parameters identically: for e, p in "
        "zip(average.parameters(), model.parameters()): e.data.lerp_(p.data, 0.01)",
    )
