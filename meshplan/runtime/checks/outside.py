"""Detection of parameters used outside the forward of the FSDP unit that gathers them.

Code outside that forward sees this rank's shard only. Most operations then raise deep inside torch,
but some give a wrong number, such as the largest element of a parameter. So during the first
forward and the first loss, every operation that reads a sharded parameter is rejected, and the
error names the parameter and the operation. Computing gradients inside the forward or the loss is
rejected as well: units free gathered parameters, and a second derivative would read freed memory.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from meshplan.errors import ApplyError, Problem
from meshplan.plan.plan import Plan
from meshplan.runtime.base.pytree import tensors_in

_FACTS: Final = frozenset((
    "shape", "dtype", "device", "requires_grad", "requires_grad_", "ndim", "dim", "is_leaf",
    "layout", "grad", "grad_fn", "size", "numel", "nelement", "is_floating_point", "is_complex",
    "is_cuda", "is_cpu", "is_meta", "is_mps", "is_xpu", "is_sparse", "is_quantized",
    "is_contiguous", "is_nested", "is_shared", "itemsize", "nbytes", "element_size", "stride",
    "get_device", "type", "names", "data_ptr", "storage_offset", "retains_grad", "output_nr",
    "_version", "name", "is_inference", "is_signed", "register_hook", "__hash__", "__repr__",
    "__format__", "__len__", "ndimension", "is_pinned", "is_mkldnn", "volatile",
))  # fmt: skip
"""Attributes and methods that are safe on a sharded parameter: mostly facts about the whole tensor,
such as its shape."""


_DIFFERENTIATE: Final = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)


class OutsideUse(TorchFunctionMode):
    """A torch function mode that rejects computations with a parameter that no unit has gathered.

    Attributes:
        has_units: True if the plan uses FSDP units.
        sharded: (fqn, fqn of its unit) of each sharded parameter, by the `id` of the parameter.
    """

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        super().__init__()
        self.has_units = plan.assignment.wrapper == "units"
        # A gathered parameter is another object than the sharded one, so a sharded one in an
        # argument was not gathered. With a pipeline, a rank has only some of the parameters.
        live = dict(model.named_parameters(remove_duplicate=False))
        units = plan.assignment.units
        self.sharded = {
            id(live[fqn]): (fqn, placed.unit)
            for fqn, placed in plan.assignment.tensors.items()
            if placed.unit is not None and placed.unit in units and fqn in live
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DIFFERENTIATE and (self.has_units or kwargs.get("create_graph")):
            raise ApplyError(_problem_of_gradients(func.__name__))
        if name_of(func) not in _FACTS:
            for value in (*args, *kwargs.values()):
                for each in value if isinstance(value, tuple | list) else (value,):
                    if id(each) in self.sharded and isinstance(each, nn.Parameter):
                        raise ApplyError(_problem(*self.sharded[id(each)], name_of(func)))
        return func(*args, **kwargs)


def name_of(func: Any) -> str:
    """Return the name of a function that torch intercepted; of a property, not of its `__get__`."""
    name = getattr(func, "__name__", str(func))
    owner = getattr(func, "__self__", None)
    return getattr(owner, "__name__", name) if name == "__get__" else name


def _problem(fqn: str, unit: str, operation: str) -> Problem:
    inside = f"the forward of '{unit}'" if unit else "the forward of the model"
    fix = "use the optimizer's weight_decay for a penalty on weights"
    if unit:
        fix = (
            f"set unit: false for '{unit}', which leaves its parameters to the enclosing unit "
            f"(needed for a block whose forward the model does not call), or {fix}"
        )
    return Problem(
        f"{fqn} is used by '{operation}' outside {inside}, where each rank holds only a shard",
        fix=fix,
    )


def _problem_of_gradients(operation: str) -> Problem:
    return Problem(
        f"the forward or the loss calls '{operation}', but units free their parameters after the "
        "forward and reduce gradients in every backward, and the collectives of tp can be "
        "differentiated only once: second derivatives would be lost",
        fix=_OTHER_STRATEGY,
    )


def refuse_second_derivatives(model: nn.Module, plan: Plan) -> None:
    """Register a hook that raises if a gradient of the output is computed with `create_graph=True`.

    Such a gradient can be differentiated again. With tp, the graph of the gradient treats what the
    collectives of tp return as constant, so the second derivative would be silently wrong. With
    FSDP2, the parameters it needs have been freed.
    """
    if plan.assignment.wrapper != "units" and plan.mesh.size("tp") == 1:
        return

    def look(gradient: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            raise ApplyError(
                Problem(
                    "a gradient of the model's output is computed with create_graph=True, but its "
                    "derivative would be wrong or fail: units have freed their parameters by "
                    "then, and the collectives of tp can be differentiated only once",
                    fix=_OTHER_STRATEGY,
                )
            )

    def watch(module: nn.Module, args: Any, output: Any) -> None:
        for _, tensor in tensors_in(output):
            if tensor.grad_fn is not None:  # A hook on a leaf would outlive the step.
                tensor.register_hook(look)

    model.register_forward_hook(watch)


_OTHER_STRATEGY: Final = "use strategy: ddp, without tp"


def _problem_of_others(fqn: str) -> Problem:
    return Problem(
        f"the parameter {fqn} was replaced by another tensor for this forward (as "
        "torch.func.functional_call does), but units gather the original parameter: the "
        "replacement would not be used, and nothing would be trained",
        fix="use strategy: ddp, or call the model with its own parameters",
    )


def guard_loss(model: nn.Module, plan: Plan) -> AbstractContextManager[object]:
    """Return a context manager in which a loss function may not use sharded parameters.

    Without FSDP units, or with pipeline stages, it does nothing. Call this function while no unit
    is gathered, because it records which parameter objects are the sharded ones.
    """
    is_at_work = plan.assignment.wrapper == "units" and plan.assignment.stages is None
    return OutsideUse(model, plan) if is_at_work else nullcontext()


def watch_first_forward(model: nn.Module, plan: Plan) -> None:
    """Register hooks that make the first forward raise if it uses a sharded parameter directly.

    The first forward also raises if a parameter was replaced by another tensor, as
    `torch.func.functional_call` does.
    """
    has_units = plan.assignment.wrapper == "units"
    if not (has_units or plan.mesh.size("tp") > 1):
        return
    watch = OutsideUse(model, plan)
    # [] before the first forward, [True] inside it, [True, False] after it. The hooks stay, because
    # a hook cannot be removed while it runs.
    begun: list[bool] = []

    def look(*_: Any) -> None:
        live = {} if begun else dict(model.named_parameters(remove_duplicate=False))
        for fqn, _unit in watch.sharded.values() if live else ():
            if id(live.get(fqn)) not in watch.sharded:
                raise ApplyError(_problem_of_others(fqn))

    def begin(*_: Any) -> None:
        if not begun and not torch.compiler.is_compiling():
            begun.append(True)
            watch.__enter__()

    def end(*_: Any) -> None:
        if begun == [True]:
            watch.__exit__(None, None, None)
            begun.append(False)

    model.register_forward_pre_hook(look, prepend=True)  # Before the outermost unit gathers.
    model.register_forward_pre_hook(begin)
    model.register_forward_hook(end, always_call=True)
