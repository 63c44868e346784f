"""Handlers of operators in training loops for which DTensor raises, or answers wrongly.

Under tp, parameters that no style shards stay plain tensors; under tp with FSDP, parameters are on
two meshes. torch's fused and foreach optimizers, its clipping and its GradScaler pass all of them
to one operator, and DTensor raises for such lists. Each position of the lists is independent of the
others, so the operator runs once for the positions of each mesh, and once for the plain tensors.

All of this is private, because DTensor has no public way to register what an operator does with
tensors of several meshes. Its table of handlers is asked before it looks at the arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from meshplan.errors import ApplyError, Problem
from meshplan.runtime.torch_private.view_writes import (
    set_values,
    writing_operators,
    written_through,
    written_whole,
)

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

_PREFIXES: Final = ("_foreach_", "_fused_ad", "_fused_sgd", "_amp_foreach_")
_ELEMENTWISE: Final = ("aten::_fused_ad", "aten::_fused_sgd", "aten::_foreach_copy_")
"""Operators that update every element by itself, for which DTensor has rules for some only."""


@functools.cache
def handle_operators_of_loops() -> None:
    """Register the handlers of this module, and let `.data` of DTensors be assigned."""
    handlers = _handlers()
    for op in _list_operators():
        handlers[op] = functools.partial(_split, handlers.get(op))
    handlers[torch.ops.aten._local_scalar_dense.default] = _number
    handlers[torch.ops.aten.mul_.Tensor] = _scaled
    handlers[torch.ops.aten.index_put_.default] = _masked
    handlers[torch.ops.aten.stack.default] = _stacked
    for op in (torch.ops.aten.eye.out, torch.ops.aten.eye.m_out):
        handlers[op] = _identity
    for op in writing_operators():
        handlers[op] = functools.partial(_written, handlers.get(op))
    # A property of the class hides that of torch.Tensor, whose setter changes nothing.
    setattr(DTensor, "data", property(torch.Tensor.data.__get__, _assign))  # noqa: B010


def _handlers() -> dict[Any, Handler]:
    found: dict[Any, Handler] = DTensor._op_dispatcher._custom_op_handlers
    return found


def _list_operators() -> Iterator[Any]:
    for name in torch._C._dispatch_get_all_op_names():
        _, _, rest = name.partition("aten::")
        if rest.startswith(_PREFIXES):
            packet, _, overload = rest.partition(".")
            yield getattr(getattr(torch.ops.aten, packet), overload or "default")


def _split(known: Handler | None, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator once for each mesh that the tensors of its lists are on.

    Args:
        known: What DTensor does with this operator; None if nothing out of the ordinary.
        op: The operator.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    lists = [value for value in (*args, *kwargs.values()) if _is_list(value)]
    length = max(map(len, lists), default=0)
    meshes = [_mesh_of([each[i] for each in lists if each]) for i in range(length)]
    groups = list(dict.fromkeys(meshes))
    if len(groups) < 2:
        return _of_one_mesh(known, op, args, kwargs)
    out: list[Any] = [None] * length
    for mesh in groups:
        own = [i for i in range(length) if meshes[i] == mesh]

        def part(value: Any, own: list[int] = own) -> Any:
            if _is_list(value):
                return [value[i] for i in own] if value else value
            return value.full_tensor() if isinstance(value, DTensor) else value

        given = tuple(map(part, args)), {name: part(value) for name, value in kwargs.items()}
        done = op(*given[0], **given[1]) if mesh is None else _of_one_mesh(known, op, *given)
        if isinstance(done, list | tuple):
            for i, each in zip(own, done, strict=True):
                out[i] = each
    if out[0] is None:
        return None
    return _whole(out) if all(not each.ndim for each in out) else out


def _is_list(value: Any) -> bool:
    """Return True for a list with an entry for each tensor, also for an empty one."""
    return isinstance(value, list | tuple)


def _mesh_of(values: list[Any]) -> DeviceMesh | None:
    return next((value.device_mesh for value in values if isinstance(value, DTensor)), None)


def _of_one_mesh(
    known: Handler | None, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if op._schema.name.startswith(_ELEMENTWISE):
        lists = [value for value in (*args, *kwargs.values()) if _is_list(value) and value]
        if all(_are_alike(each) for each in zip(*lists, strict=True)):
            own = {name: _local(value) for name, value in kwargs.items()}
            return op(*map(_local, args), **own)
    return _as_before(known, op, args, kwargs)


def _are_alike(values: tuple[Any, ...]) -> bool:
    """Return True if the DTensors among some values have one layout, without pending sums."""
    layouts = {value.placements for value in values if isinstance(value, DTensor)}
    return len(layouts) < 2 and not any(isinstance(p, Partial) for each in layouts for p in each)


def _local(value: Any) -> Any:
    if _is_list(value):
        return [_local(each) for each in value]
    return value._local_tensor if isinstance(value, DTensor) else value


def _as_before(
    known: Handler | None, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run an operator on DTensors as if no handler of this module were registered."""
    if known is not None:
        return known(op, args, kwargs)
    handlers = _handlers()
    own = handlers.pop(op)
    try:
        return op(*args, **kwargs)
    finally:
        handlers[op] = own


def _whole(values: list[Any]) -> list[torch.Tensor]:
    """Return scalars, such as norms, as plain tensors with the values of the whole tensors.

    Scalars in one layout are reduced together.
    """
    out = list(values)
    groups: dict[Any, list[int]] = {}
    for i, value in enumerate(values):
        if isinstance(value, DTensor):
            groups.setdefault((value.device_mesh, value.placements), []).append(i)
    for (mesh, placements), own in groups.items():
        local = torch.stack([values[i]._local_tensor for i in own])
        every = DTensor.from_local(local, mesh, placements, run_check=False).full_tensor()
        for i, value in zip(own, every.unbind(), strict=True):
            out[i] = value
    return out


def _number(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the value of a scalar DTensor: the sum, or the norm, of all ranks' parts.

    DTensor's own answer is the part of this rank, such as the norm of its shard.
    """
    value = args[0]
    if any(isinstance(each, Partial) for each in value.placements):
        value = value.redistribute(placements=[Replicate()] * value.device_mesh.ndim)
    return value._local_tensor.item()


def _scaled(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Multiply a tensor in place by a scalar, which may be a DTensor if the tensor is plain.

    Scalars of another mesh are taken too.
    """
    own, factor = args
    is_scalar = isinstance(factor, DTensor) and not factor.ndim
    if is_scalar and _mesh_of([own]) != factor.device_mesh:
        return own.mul_(factor.full_tensor())
    return _as_before(None, op, args, kwargs)


def _stacked(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Stack scalars of several meshes, such as the norms of gradients, as plain tensors."""
    values = args[0]
    is_mixed = len({_mesh_of([value]) for value in values}) > 1
    if is_mixed and not any(value.ndim or value.requires_grad for value in values):
        return op(_whole(values), *args[1:], **kwargs)
    return _as_before(None, op, args, kwargs)


def _masked(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Set elements where a mask is true to one number, which each rank can do with its part."""
    own, indices, number, *others = args
    is_mask = len(indices) == 1 and getattr(indices[0], "dtype", None) is torch.bool
    is_alike = is_mask and _are_alike((own, *indices)) and _mesh_of([own]) == _mesh_of(indices)
    if is_alike and not isinstance(number, DTensor) and number.numel() == 1:
        op(_local(own), _local(indices), number, *others, **kwargs)
        return own
    return _as_before(None, op, args, kwargs)


def _written(known: Handler | None, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Write into a tensor, also if it is a view of a sharded one, or the values are plain."""
    if written_through(op, args, kwargs) or written_whole(op, args):
        return args[0]
    return _as_before(known, op, args, kwargs)


def _identity(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Write an identity matrix. DTensor makes one of the whole size in the memory of each shard."""
    out = kwargs["out"]
    return out.copy_(torch.eye(*args, dtype=out.dtype, device=out.device))


def _assign(parameter: DTensor, value: torch.Tensor) -> None:
    """Copy values into a DTensor's memory, which `parameter.data = value` means.

    torch's own setter leaves the local tensor as it is, without a word. FSDP2 gathers from the
    memory that a shard has, so that another tensor may not take its place.

    Raises:
        ApplyError: The value has another shape or dtype, or is on another device.
    """
    given, has = ((v.shape, v.dtype, v.device) for v in (value, parameter))
    if given != has:
        what = (
            f".data of a sharded parameter of shape {list(has[0])} and {has[1]} on {has[2]} was "
            f"set to a tensor of shape {list(given[0])} and {given[1]} on {given[2]}"
        )
        fix = "assign values of the same shape, dtype and device; precision in the plan sets dtypes"
        raise ApplyError(Problem(what, fix=fix))
    placements = parameter.placements
    with torch.no_grad():
        if not isinstance(value, DTensor):
            set_values(parameter, value)
            return
        if value.placements != placements:
            value = value.redistribute(placements=placements)
        parameter._local_tensor.copy_(_local(value))
