"""Activation offload: tensors that a module saves for backward are kept in host memory.

Works like `torch.autograd.graph.save_on_cpu`, except that weights stay on the device.
`save_on_cpu` copies a weight once per operation that uses it, and under FSDP2 these copies would
outlive the gathered weights themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from meshplan.memory.tape.offload import LEAST_BYTES
from meshplan.plan.plan import Plan
from meshplan.runtime.base.host_copies import to_device, to_host
from meshplan.runtime.base.mesh import device, local_of


def apply_host_activations(model: nn.Module, plan: Plan) -> None:
    """Wrap the forward of every module whose activations the plan offloads, in place.

    Assumes: `apply_recompute` ran before, so that only the inputs of recomputed modules are saved.
    """
    for fqn in plan.assignment.host_activations:
        module = model.get_submodule(fqn)
        module.forward = kept_on_host(module)


def kept_on_host(module: nn.Module) -> Callable[..., Any]:
    """Return the module's forward, wrapped so that tensors saved for backward go to the host."""
    forward = module.forward

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        stay = {_storage(tensor) for tensor in (*module.parameters(), *module.buffers())}

        def pack(tensor: torch.Tensor) -> torch.Tensor | _HostCopy:
            is_here = tensor.device == device()  # Random seeds are on the host.
            is_small = local_of(tensor).nbytes < LEAST_BYTES
            if _storage(tensor) in stay or is_small or not is_here:
                return tensor
            return _HostCopy(tensor)

        with saved_tensors_hooks(pack, _unpack):
            return forward(*args, **kwargs)

    return run


class _HostCopy:
    """A copy of a tensor in host memory; of a DTensor, its local shard and its layout."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._layout: dict[str, Any] | None = None
        if isinstance(tensor, DTensor):
            self._layout = {
                "device_mesh": tensor.device_mesh,
                "placements": tensor.placements,
                "shape": tensor.shape,
                "stride": tensor.stride(),
            }
        with torch.no_grad():
            self._copy = to_host(local_of(tensor))

    def back(self) -> torch.Tensor:
        """Copy the tensor back to the device and return it."""
        local = to_device(self._copy)
        if self._layout is None:
            return local
        return DTensor.from_local(local, run_check=False, **self._layout)


def _unpack(packed: torch.Tensor | _HostCopy) -> torch.Tensor:
    return packed.back() if isinstance(packed, _HostCopy) else packed


def _storage(tensor: torch.Tensor) -> int:
    """Return an id of a tensor's local storage, equal for all views of the same storage."""
    return local_of(tensor).untyped_storage()._cdata
