"""Private names of torch for dispatch modes that watch every operator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

_DEVICE: Final = torch.ops.prim.device.default


class Watching(TorchDispatchMode):
    """A dispatch mode whose `__torch_dispatch__` torch does not wrap in `torch._disable_dynamo`.

    The wrapper keeps torch.compile from tracing into the mode. It costs as much as an operator on
    fake tensors, and nothing is compiled while our modes are active. Private, because the flag is
    a temporary one of torch.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class _UndrawnOnMeta(Watching):
    """Skips drawing normal numbers into meta tensors, which have no values.

    torch computes the shapes of `normal_` in Python, and imports torch.compile for it first.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.normal_.default and args[0].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))


@contextmanager
def built_on(device: torch.device) -> Iterator[None]:
    """Make the device the default of all tensors that are created inside the `with` block."""
    undrawn = _UndrawnOnMeta() if device.type == "meta" else nullcontext()
    with device, undrawn:
        yield


def answer_device(func: Any, args: Any) -> torch.device | None:
    """Return the device of a fake tensor if `func` is `prim.device`; None for other operators.

    A mode calls this first, because autograd asks for the device several times per gradient, and
    torch passes the question through every active mode. Private, because the device that a fake
    tensor stands for is a private attribute (meta while torch runs the tensor's meta kernel).

    Args:
        func: The operator that a mode was called with.
        args: The operator's positional arguments.
    """
    if func is not _DEVICE or not isinstance(args[0], FakeTensor):
        return None
    fake: Any = args[0]
    return torch.device("meta") if fake.fake_mode.in_kernel_invocation else fake.fake_device
