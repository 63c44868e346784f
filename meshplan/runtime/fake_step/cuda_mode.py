"""A step on CPU tensors that allocates what the same step allocates on another device.

The kinds of difference, each with its own remedy: operators that save other tensors (`kernels`),
operators that take memory for themselves (`inside`), optimizers that take all parameters at once,
their counters, which stay on the host, and streams, which the allocator keeps apart.
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
    """What the writer of a log must know of the device.

    Args:
        inside: Sizes in bytes of what an operator allocates and frees inside itself.
        stream: The number of the stream that runs now.
        has_host: The host's memory is another: small tensors of optimizers are there, and what a
            plan offloads.
    """

    inside: Callable[[Any, Any, Any], tuple[int, ...]]
    stream: Callable[[], int]
    has_host: bool


def _nothing(func: Any, args: Any, out: Any) -> tuple[int, ...]:
    return ()


AS_IT_IS: Final = Behaviour(_nothing, lambda: 0, has_host=False)
"""Of real tensors, and of fakes that stand for tensors of this machine."""


@contextmanager
def behaving_as(device: str, *, offloads: bool = False) -> Iterator[Behaviour]:
    """Inside, CPU tensors are treated as those of a device.

    Args:
        device: "cpu", "cuda" (one of compute capability 8.0 or later), or a name of `hardware`.
        offloads: Some parameters lie on the host: torch then takes all of them one by one.
    """
    if device == CPU:
        yield AS_IT_IS
        return
    with ExitStack() as stack:
        stack.enter_context(operators_replaced(replaced(kernels_of(device))))
        stack.enter_context(units_cross() if offloads else optimizers_at_once())
        yield Behaviour(taken_inside, _Streams().number, has_host=True)


class _Streams:
    """The streams that torch gives CPU tensors for form's sake, told apart."""

    def __init__(self) -> None:
        self._known: list[Any] = [torch.cpu.current_stream()]

    def number(self) -> int:
        """Of the one that runs now; 0 is the one of this moment."""
        now = torch.cpu.current_stream()
        for number, stream in enumerate(self._known):
            if stream is now:
                return number
        self._known.append(now)
        return len(self._known) - 1
