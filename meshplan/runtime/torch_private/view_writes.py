"""Writes through views of sharded tensors, such as `weight.data[0].zero_()` or `weight[2:5] *= 3`.

A view that cuts through a sharded dim is gathered by DTensor, so that it has memory of its own, and
what is written into it is lost without a word. Here the write happens in the whole tensor, through
the same view, and each rank takes its shard of the result: what one process would have. All ranks
call it, as they do every operator of DTensors.

This is private, because views know how to be made again only in C++, and DTensor has no public way
to register what an operator does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor, Partial, distribute_tensor

_LISTS: Final = ("aten::_foreach_", "aten::_fused_", "aten::_amp_")


def writing_operators() -> Iterator[Any]:
    """Yield every operator that writes values into its first argument."""
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith("aten::") or name.startswith(_LISTS):
            continue
        packet, _, overload = name.removeprefix("aten::").partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        written = op._schema.arguments[:1]
        is_writing = written and written[0].alias_info and written[0].alias_info.is_write
        if is_writing and written[0].name == "self" and torch.Tag.inplace_view not in op.tags:
            yield op


def written_through(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Write into the tensor of which the first argument is a view, if it is a gathered copy.

    Returns:
        True if the operator is done; False if the view has the memory of its tensor, or is none.
    """
    view = args[0]
    if not isinstance(view, DTensor) or not view._is_view() or not view.numel():
        return False
    base = view._base
    if not isinstance(base, DTensor) or _memory(view) == _memory(base):
        return False
    if any(isinstance(each, Partial) for each in base.placements):
        return False
    with torch.no_grad():
        whole = base.detach().full_tensor()
        part = view._view_func_unsafe(whole)
        op(part, *map(_full, args[1:]), **{name: _full(value) for name, value in kwargs.items()})
        for tensor, values in ((base, whole), (view, part)):
            set_values(tensor, values)
    return True


def written_whole(op: Any, args: tuple[Any, ...]) -> bool:
    """Copy or fill with the values of a plain tensor, which are those of the whole DTensor.

    Returns:
        True if the operator is done; False if it is another one, or has other arguments.
    """
    if op not in (torch.ops.aten.copy_.default, torch.ops.aten.fill_.Tensor):
        return False
    tensor, values = args[:2]
    if not isinstance(tensor, DTensor) or isinstance(values, DTensor) or values.requires_grad:
        return False
    if any(isinstance(each, Partial) for each in tensor.placements):
        return False
    with torch.no_grad():
        set_values(tensor, values.to(tensor.device, tensor.dtype).expand(tensor.shape))
    return True


def set_values(tensor: DTensor, values: torch.Tensor) -> None:
    """Set a DTensor without pending sums to values that every rank has as a whole."""
    own = distribute_tensor(values, tensor.device_mesh, tensor.placements, src_data_rank=None)
    tensor._local_tensor.copy_(own._local_tensor)


def _memory(tensor: DTensor) -> int:
    return tensor._local_tensor.untyped_storage().data_ptr()


def _full(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_full(each) for each in value]
    return value.detach().full_tensor() if isinstance(value, DTensor) else value
