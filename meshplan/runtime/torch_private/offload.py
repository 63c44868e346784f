"""Private names of torch for FSDP2's CPU offload, with the reason for their use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from meshplan.runtime.base.host_copies import MemorySide, crossing_to


@contextmanager
def units_cross() -> Iterator[None]:
    """Make FSDP2 copy offloaded shards and gradients even if host and device are the same memory.

    Without an accelerator, FSDP2's `.to(device)` returns its argument, and a trace on the CPU would
    miss the copies that a GPU needs. Inside the `with` block they are made, and marked with the
    side they are on (`crossing_to`): a shard before its all-gather, a gradient after its reduction.

    Private, because `FSDPParam.all_gather_inputs` and `FSDPParam.to_sharded_dtensor`, where FSDP2
    makes these copies, are private names.
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
