"""Private names of torch for operators, optimizers and DTensor, with the reason for their use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from inspect import signature
from typing import Any, Final

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement


def below_autograd() -> AbstractContextManager[Any]:
    """Return a context in which autograd records nothing, while DTensor and fake modes still apply.

    Private, because torch means this guard for its own kernels.
    """
    guard: AbstractContextManager[Any] = torch._C._AutoDispatchBelowAutograd()
    return guard


@contextmanager
def operators_replaced(kernels: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Replace aten operators on CPU tensors, forward and autograd, inside the `with` block.

    Args:
        kernels: The functions to run instead, by name and overload of the operator, for example
            "add.Tensor".

    `torch.library.Library` is public, but the method that removes its registrations is private.
    """
    library = torch.library.Library("aten", "IMPL")
    try:
        for name, kernel in kernels.items():
            library.impl(name, kernel, "AutogradCPU")
        yield
    finally:
        library._destroy()


def set_allocator_settings(settings: str) -> None:
    """Set options of CUDA's caching allocator in a running process.

    Args:
        settings: The options, in the format of the environment variable `PYTORCH_ALLOC_CONF`.

    Private, because torch has no public function for this. torch 2.13 deprecates the private name
    that older versions have.
    """
    setter = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (setter or torch.cuda.memory._set_allocator_settings)(settings)


@contextmanager
def optimizers_at_once() -> Iterator[None]:
    """Make optimizers choose their foreach implementation on the CPU by default, as on CUDA.

    Private, because torch chooses by lists of devices and of tensor types, of which both
    `torch.optim.optimizer` and `torch.utils._foreach_utils` have one. Inside the `with` block "cpu"
    is among the devices. FakeTensor is among the types, because a fake parameter's exact type is
    FakeTensor, not Parameter.
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


_STATES_GRADIENT: Final = "grad_placements" in signature(DTensor.from_local).parameters


def as_dtensor(
    local: torch.Tensor, mesh: DeviceMesh, placement: Placement, gradient: Placement
) -> DTensor:
    """Return a DTensor made of the ranks' local tensors, with a given placement of its gradient.

    torch 2.12 added the argument `grad_placements` to `DTensor.from_local`. For 2.11, whose own
    backward would sum the ranks' gradients, the backward is written out here (`_FromLocal`).

    Args:
        local: This rank's local tensor.
        mesh: A mesh of one dim.
        placement: The placement of the DTensor.
        gradient: The placement that its gradient is redistributed to.
    """
    if _STATES_GRADIENT:
        return DTensor.from_local(
            local, mesh, [placement], run_check=False, grad_placements=[gradient]
        )
    placed: DTensor = _FromLocal.apply(local, mesh, placement, gradient)
    return placed


class _FromLocal(torch.autograd.Function):
    """`DTensor.from_local` whose backward redistributes the gradient to a given placement."""

    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, mesh: DeviceMesh, placement: Placement, gradient: Placement
    ) -> DTensor:
        ctx.layout = mesh, gradient
        return DTensor.from_local(local.view_as(local), mesh, [placement], run_check=False)

    @staticmethod
    def backward(ctx: Any, given: DTensor) -> tuple[torch.Tensor, None, None, None]:
        mesh, gradient = ctx.layout
        return given.redistribute(mesh, [gradient]).to_local(), None, None, None


@contextmanager
def around_propagation(context: AbstractContextManager[Any]) -> Iterator[None]:
    """Make DTensor enter `context` whenever it computes the global shape of an operator's result.

    DTensor does so once per operator and shapes, on fake tensors of the global size. Without a
    context that mutes them, trackers of a step would count those tensors. Private, because torch
    has no public hook between an operator on DTensors and the operators on their shards.
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
