"""Private names of torch for FSDP2's offloading, each wrapped with the reason for its use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from meshplan.runtime.base.host_copies import MemorySide, crossing_to


@contextmanager
def units_cross() -> Iterator[None]:
    """Make FSDP2 copy offloaded shards and gradients even if host and device are the same memory.

    In that case torch's `.to` returns its argument. Private, because the two places where FSDP2
    calls it are: the inputs of an all-gather, and the creation of a DTensor from a reduced
    gradient, which directly follows the copy.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    kind: Any = FSDPParam
    group: Any = _fsdp_param_group
    inputs, make, reduce = kind.all_gather_inputs, kind.to_sharded_dtensor, group.foreach_reduce
    is_reducing = False

    def copied_inputs(param: Any) -> list[torch.Tensor]:
        data = getattr(param, "_sharded_param_data", None)
        if not param.offload_to_cpu or param.sharded_state.name != "SHARDED" or data is None:
            given: list[torch.Tensor] = inputs.fget(param)
            return given
        with crossing_to(MemorySide.DEVICE):
            param._sharded_param_data = data.clone()
        try:
            given = inputs.fget(param)
        finally:
            param._sharded_param_data = data
        return given

    def copied_gradient(param: Any, tensor: torch.Tensor) -> Any:
        if is_reducing and param.offload_to_cpu:
            with crossing_to(MemorySide.HOST):
                tensor = tensor.clone()
        return make(param, tensor)

    def reducing(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_reducing
        is_reducing = True
        try:
            return reduce(*args, **kwargs)
        finally:
            is_reducing = False

    kind.all_gather_inputs = property(copied_inputs)
    kind.to_sharded_dtensor, group.foreach_reduce = copied_gradient, reducing
    try:
        yield
    finally:
        kind.all_gather_inputs, kind.to_sharded_dtensor = inputs, make
        group.foreach_reduce = reduce
