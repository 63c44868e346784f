"""A context in which a step on CPU tensors allocates what the same step allocates on a GPU.

Five differences are emulated. Some operators save other tensors on CUDA (`cuda_kernels`), and some
allocate a workspace (`cuda_workspace`). Optimizers update all parameters at once (foreach). Their
step counts are on the host. And the caching allocator keeps memory of different streams apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch

from meshplan.runtime.fake_step.cuda_kernels import kernels_of, replaced
from meshplan.runtime.fake_step.cuda_workspace import taken_inside
from meshplan.runtime.torch_private.offload import units_cross
from meshplan.runtime.torch_private.ops import operators_replaced, optimizers_at_once

CPU: Final = "cpu"


@dataclass(frozen=True, slots=True)
class Behaviour:
    """The properties of a device that a memory tracker depends on.

    Args:
        inside: Maps (operator, positional arguments, results) to the size in bytes of each buffer
            that the operator allocates and frees internally.
        stream: Returns the number of the current stream.
        has_host: If True, host memory is separate from device memory. The step counts of optimizers
            and the tensors that a plan offloads are then on the host.
    """

    inside: Callable[[Any, Any, Any], tuple[int, ...]]
    stream: Callable[[], int]
    has_host: bool


def _nothing(func: Any, args: Any, out: Any) -> tuple[int, ...]:
    return ()


AS_IT_IS: Final = Behaviour(_nothing, lambda: 0, has_host=False)
"""The behaviour of real tensors, and of fake tensors that emulate no other device."""


@contextmanager
def behaving_as(device: str, *, offloads: bool = False) -> Iterator[Behaviour]:
    """Make CPU tensors behave like those of a device inside the context.

    Args:
        device: "cpu", "cuda" (a GPU of compute capability 8.0 or later), or a name of
            `layout.hardware`.
        offloads: If True, some parameters are on the host. torch's optimizers then update all
            parameters one by one, as they do for CPU tensors.

    Yields:
        The properties of the device that a memory tracker needs.
    """
    if device == CPU:
        yield AS_IT_IS
        return
    with ExitStack() as stack:
        stack.enter_context(operators_replaced(replaced(kernels_of(device))))
        stack.enter_context(units_cross() if offloads else optimizers_at_once())
        yield Behaviour(taken_inside, _Streams().number, has_host=True)


class _Streams:
    """Numbers the placeholder streams that `torch.cpu` returns, in the order of their first use."""

    def __init__(self) -> None:
        self._known: list[Any] = [torch.cpu.current_stream()]

    def number(self) -> int:
        """Return the number of the current stream; 0 is the one that was current at the start."""
        now = torch.cpu.current_stream()
        for number, stream in enumerate(self._known):
            if stream is now:
                return number
        self._known.append(now)
        return len(self._known) - 1
