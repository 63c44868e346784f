"""Private torch names of operators and optimizers, each behind a function with the reason.

As `private`, for what takes the place of operators.
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
    """Run operators as if autograd did not see them, DTensor and fakes still do.

    Private, because torch means it for its own kernels.
    """
    guard: AbstractContextManager[Any] = torch._C._AutoDispatchBelowAutograd()
    return guard


@contextmanager
def operators_replaced(kernels: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Let other functions compute aten operators of CPU tensors, above their autograd.

    Args:
        kernels: By name and overload.

    `torch.library.Library` is public, and how to take what it has registered back is not.
    """
    library = torch.library.Library("aten", "IMPL")
    try:
        for name, kernel in kernels.items():
            library.impl(name, kernel, "AutogradCPU")
        yield
    finally:
        library._destroy()


def set_allocator_settings(settings: str) -> None:
    """Tell CUDA's allocator what the environment would tell it before it starts.

    Private: torch 2.13 means to move it, and has deprecated the name that older ones have.
    """
    setter = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (setter or torch.cuda.memory._set_allocator_settings)(settings)


@contextmanager
def optimizers_at_once() -> Iterator[None]:
    """Let optimizers take all CPU parameters at once unless told otherwise, as on CUDA.

    Private: torch asks lists of devices and of types for it, under a name in each of two modules. A
    parameter that is fake is of neither type that it stands for.
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
    """A DTensor of what each rank holds, whose gradient comes back laid as `gradient` says.

    torch 2.12 gave `DTensor.from_local` the argument for it. Private before only in that the
    backward is written out; what 2.11 does itself adds up the ranks' gradients.
    """
    if "grad_placements" in signature(DTensor.from_local).parameters:
        return DTensor.from_local(local, mesh, [lies], run_check=False, grad_placements=[gradient])
    laid: DTensor = _FromLocal.apply(local, mesh, lies, gradient)
    return laid


class _FromLocal(torch.autograd.Function):
    """`DTensor.from_local` with the layout of the gradient."""

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
    """Let DTensor open a context wherever it computes with tensors as large as all ranks' together.

    It does so once for each operator, on tensors without memory, to learn the shape of a result.
    Private: no public name lies between an operator of DTensors and those that it stands for.
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
