"""Detection of parameters used outside the forward of the unit that gathers them.

Such a use sees this rank's shard only. Most of them raise deep inside torch, but not all: the
largest element of a shard is a number like any other. So during the first forward, and the first
loss, every operation that reads a sharded parameter is rejected by name. Differentiating is
rejected as well: units free what they gathered, and a second derivative would read freed memory.
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
"""Attributes and methods allowed on a sharded parameter, as they answer for the whole tensor."""


_DIFFERENTIATE: Final = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)


class OutsideUse(TorchFunctionMode):
    """A mode that rejects computations with a parameter that no unit has gathered.

    Attributes:
        has_units: True if the plan uses units of sharding.
        lying: (fqn, unit) of each sharded parameter, by the `id` of the parameter.
    """

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        super().__init__()
        self.has_units = plan.assignment.wrapper == "units"
        # Gathered parameters are other objects, so the sharded ones only occur where no unit
        # gathers them. With a pipeline, a rank has only some of the parameters.
        live = dict(model.named_parameters(remove_duplicate=False))
        units = plan.assignment.units
        self.lying = {
            id(live[fqn]): (fqn, placed.unit)
            for fqn, placed in plan.assignment.tensors.items()
            if placed.unit is not None and placed.unit in units and fqn in live
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DIFFERENTIATE and (self.has_units or kwargs.get("create_graph")):
            raise ApplyError(_problem_of_gradients(func.__name__))
        if _name(func) not in _FACTS:
            for value in (*args, *kwargs.values()):
                for each in value if isinstance(value, tuple | list) else (value,):
                    if id(each) in self.lying and isinstance(each, nn.Parameter):
                        raise ApplyError(_problem(*self.lying[id(each)], _name(func)))
        return func(*args, **kwargs)


def _name(func: Any) -> str:
    """Return the name of a method; for the getter of a property, the name of the property."""
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
    """Raise if a custom training loop differentiates with `create_graph`, in any step.

    What ranks of tp exchange counts as constant in the graph of the gradient, so the second
    derivative would be silently wrong.
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
            if tensor.grad_fn is not None:  # A leaf, such as a parameter, would keep the hook.
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
    """Return a context that rejects such uses in a loss; create it while no unit is gathered."""
    is_at_work = plan.assignment.wrapper == "units" and plan.assignment.stages is None
    return OutsideUse(model, plan) if is_at_work else nullcontext()


def watch_first_forward(model: nn.Module, plan: Plan) -> None:
    """Reject the first forward if it uses a sharded parameter, before anything is updated."""
    has_units = plan.assignment.wrapper == "units"
    if not (has_units or plan.mesh.size("tp") > 1):
        return
    watch = OutsideUse(model, plan)
    begun: list[bool] = []  # A list instead of removing hooks, which is impossible while they run.

    def look(*_: Any) -> None:
        live = {} if begun else dict(model.named_parameters(remove_duplicate=False))
        for fqn, _unit in watch.lying.values() if live else ():
            if id(live.get(fqn)) not in watch.lying:
                raise ApplyError(_problem_of_others(fqn))

    def begin(*_: Any) -> None:
        if not begun:
            begun.append(True)
            watch.__enter__()

    def end(*_: Any) -> None:
        if begun == [True]:
            watch.__exit__(None, None, None)
            begun.append(False)

    model.register_forward_pre_hook(look, prepend=True)  # Before the outermost unit gathers.
    model.register_forward_pre_hook(begin)
    model.register_forward_hook(end, always_call=True)
