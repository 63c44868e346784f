"""Private names of torch for operators and optimizers, each wrapped with the reason for its use.

Like `private`, for code that replaces operators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from inspect import signature
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement


def below_autograd() -> AbstractContextManager[Any]:
    """Run operators below autograd: autograd does not record them, DTensor and fake modes still do.

    Private, because torch means it for its own kernels.
    """
    guard: AbstractContextManager[Any] = torch._C._AutoDispatchBelowAutograd()
    return guard


@contextmanager
def operators_replaced(kernels: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Replace aten operators of CPU tensors, together with their autograd, by other functions.

    Args:
        kernels: The functions, by name and overload of the operator ("name.overload").

    `torch.library.Library` is public, but removing what it has registered is not.
    """
    library = torch.library.Library("aten", "IMPL")
    try:
        for name, kernel in kernels.items():
            library.impl(name, kernel, "AutogradCPU")
        yield
    finally:
        library._destroy()


def set_allocator_settings(settings: str) -> None:
    """Apply settings to CUDA's caching allocator that the environment would give before it starts.

    Private: torch 2.13 plans to move the function, and deprecates the name of older versions.
    """
    setter = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (setter or torch.cuda.memory._set_allocator_settings)(settings)


@contextmanager
def optimizers_at_once() -> Iterator[None]:
    """Make optimizers use their foreach implementation on the CPU by default, as they do on CUDA.

    Private: torch decides by lists of devices and of tensor types, each imported into two modules.
    A fake parameter is of neither type that it stands for, so FakeTensor is added to the types.
    """
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    modules: tuple[Any, ...] = (optimizer, _foreach_utils)
    devices, types = "_get_foreach_kernels_supported_devices", "_foreach_supported_types"
    before = [(getattr(module, devices), list(getattr(module, types))) for module in modules]
    for module, (ask, known) in zip(modules, before, strict=True):
        setattr(module, devices, lambda ask=ask: [*ask(), "cpu"])
        setattr(module, types, [*known, FakeTensor])
    try:
        yield
    finally:
        for module, (ask, known) in zip(modules, before, strict=True):
            setattr(module, devices, ask)
            setattr(module, types, known)


def as_dtensor(
    local: torch.Tensor, mesh: DeviceMesh, lies: Placement, gradient: Placement
) -> DTensor:
    """Make a DTensor of each rank's local tensor, with a given placement of its gradient.

    torch 2.12 added the argument for this to `DTensor.from_local`. Before that, only the backward
    is written out here, because what 2.11 does itself sums the ranks' gradients.
    """
    if "grad_placements" in signature(DTensor.from_local).parameters:
        return DTensor.from_local(local, mesh, [lies], run_check=False, grad_placements=[gradient])
    laid: DTensor = _FromLocal.apply(local, mesh, lies, gradient)
    return laid


class _FromLocal(torch.autograd.Function):
    """`DTensor.from_local` with a given placement of the gradient."""

    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, mesh: DeviceMesh, lies: Placement, gradient: Placement
    ) -> DTensor:
        ctx.laid = mesh, gradient
        return DTensor.from_local(local.view_as(local), mesh, [lies], run_check=False)

    @staticmethod
    def backward(ctx: Any, given: DTensor) -> tuple[torch.Tensor, None, None, None]:
        mesh, gradient = ctx.laid
        return given.redistribute(mesh, [gradient]).to_local(), None, None, None


@contextmanager
def around_propagation(context: AbstractContextManager[Any]) -> Iterator[None]:
    """Make DTensor enter a context while it computes the shape of a result on global tensors.

    DTensor does so once per operator, on tensors without memory that have the size of all ranks'
    shards together. Private, because no public name lies between an operator of DTensors and the
    operators it runs on their shards.
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    propagator: Any = ShardingPropagator
    before = propagator._propagate_tensor_meta_non_cached

    def within(self: Any, *args: Any, **kwargs: Any) -> Any:
        with context:
            return before(self, *args, **kwargs)

    propagator._propagate_tensor_meta_non_cached = within
    try:
        yield
    finally:
        propagator._propagate_tensor_meta_non_cached = before
