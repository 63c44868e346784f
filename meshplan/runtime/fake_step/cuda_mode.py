"""A mode in which a step on CPU tensors allocates what the same step allocates on another device.

Each kind of difference has its own remedy: operators that save other tensors (`cuda_kernels`),
operators with a workspace (`cuda_workspace`), optimizers that update all parameters at once, their
step counts, which stay on the host, and streams, which the allocator keeps apart.
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
        inside: Returns the sizes in bytes of what an operator allocates and frees internally.
        stream: Returns the number of the current stream.
        has_host: If True, host memory is separate from the device's: small tensors of optimizers,
            and what a plan offloads, are on the host.
    """

    inside: Callable[[Any, Any, Any], tuple[int, ...]]
    stream: Callable[[], int]
    has_host: bool


def _nothing(func: Any, args: Any, out: Any) -> tuple[int, ...]:
    return ()


AS_IT_IS: Final = Behaviour(_nothing, lambda: 0, has_host=False)
"""The behaviour of real tensors, and of fake ones that stand for tensors of this machine."""


@contextmanager
def behaving_as(device: str, *, offloads: bool = False) -> Iterator[Behaviour]:
    """Make CPU tensors behave like those of a device inside the context.

    Args:
        device: "cpu", "cuda" (one of compute capability 8.0 or later), or a name of `hardware`.
        offloads: If True, some parameters are on the host; torch then updates all of them one by
            one.
    """
    if device == CPU:
        yield AS_IT_IS
        return
    with ExitStack() as stack:
        stack.enter_context(operators_replaced(replaced(kernels_of(device))))
        stack.enter_context(units_cross() if offloads else optimizers_at_once())
        yield Behaviour(taken_inside, _Streams().number, has_host=True)


class _Streams:
    """Numbers for the placeholder streams that torch returns for CPU tensors."""

    def __init__(self) -> None:
        self._known: list[Any] = [torch.cpu.current_stream()]

    def number(self) -> int:
        """Return the number of the current stream; 0 is the stream that was current at first."""
        now = torch.cpu.current_stream()
        for number, stream in enumerate(self._known):
            if stream is now:
                return number
        self._known.append(now)
        return len(self._known) - 1
