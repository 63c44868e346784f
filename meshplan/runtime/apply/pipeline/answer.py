"""The output of the last stage on every rank along pp."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshplan.errors import ApplyError, Problem
from meshplan.runtime.base.mesh import device
from meshplan.runtime.base.pytree import fill, opaque_in, tensors_in


def told_to_all(
    output: Any, form: Any, group: dist.ProcessGroup, *, is_source: bool, source: int
) -> Any:
    """Give each rank of a group what one of them has.

    Args:
        output: What the source has; not looked at elsewhere.
        form: The form of it, which all ranks know.
        source: The global rank that has it.

    Raises:
        ApplyError: Something in it cannot be made again on another rank.
    """
    for kind in opaque_in(form):
        raise ApplyError(
            Problem(
                f"the model returns a {kind}, which ranks that do not run the last stage cannot "
                "make",
                fix="call model.eval_step(inputs), whose output stays on the ranks of the last "
                "stage (model.has_output)",
            )
        )
    tensors = [tensor.contiguous() for _, tensor in tensors_in(output)] if is_source else []
    metas: list[Any] = [[(tuple(t.shape), t.dtype) for t in tensors]]
    dist.broadcast_object_list(metas, src=source, group=group)
    if not is_source:
        tensors = [torch.empty(shape, dtype=dtype, device=device()) for shape, dtype in metas[0]]
    for tensor in tensors:
        dist.broadcast(tensor, src=source, group=group)
    found: Iterator[torch.Tensor] = iter(tensors)
    return output if is_source else fill(form, lambda _: next(found))


def as_inputs(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The arguments of a call as one value: a tuple, or a mapping where some have names."""
    if not kwargs:
        return args
    signature = inspect.signature(model.forward)
    named = dict(signature.bind(*args, **kwargs).arguments)
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            named |= named.pop(parameter.name, {})
        elif parameter.kind is parameter.VAR_POSITIONAL and parameter.name in named:
            raise ApplyError(
                Problem(
                    f"a pipelined model is called with arguments for *{parameter.name} and with "
                    "keywords at once",
                    fix="give all arguments in one of the two ways",
                )
            )
    return named
