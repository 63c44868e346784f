"""Private torch names of operators and optimizers, each behind a function with the reason.

As `private`, for what takes the place of operators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch


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


@contextmanager
def around_propagation(context: AbstractContextManager[Any]) -> Iterator[None]:
    """Let DTensor open a context wherever it computes with tensors as large as all ranks' together.

    It does so once for each operator, on tensors without memory, to learn the shape of a result.
    Private: torch means the name for a lock of its own tests.
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    propagator: Any = ShardingPropagator
    before = propagator._fake_mode_lock
    propagator._fake_mode_lock = context
    try:
        yield
    finally:
        propagator._fake_mode_lock = before
