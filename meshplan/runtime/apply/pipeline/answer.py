"""Parts of `PipelinedModule.forward`: its arguments as one value, its output on every rank."""

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


def broadcast_output(
    output: Any, form: Any, group: dist.ProcessGroup, *, is_source: bool, source: int
) -> Any:
    """Broadcast a pytree of tensors from one rank of a group to all others.

    Args:
        output: The pytree on the source rank; ignored on others.
        form: Pytree structure of the output, known on all ranks.
        group: The ranks that take part, including the source.
        is_source: True on the source rank.
        source: Global rank of the source.

    Returns:
        The pytree, on every rank.

    Raises:
        ApplyError: The output contains an object that other ranks cannot rebuild.
    """
    for kind in opaque_in(form):
        raise ApplyError(
            Problem(
                f"the model returns a {kind}, which ranks that do not run the last stage cannot "
                "rebuild",
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
    """Return the arguments of a call as one value: a tuple, or a mapping if any is a keyword.

    Raises:
        ApplyError: The call has both keywords and arguments for a `*args` parameter.
    """
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
                    "a pipelined model was called with both positional arguments for "
                    f"*{parameter.name} and keyword arguments",
                    fix=f"pass all arguments by position, or none for *{parameter.name}",
                )
            )
    return named
