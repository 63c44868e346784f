"""Private names of torch for dispatch modes, each wrapped with the reason for its use.

Like `private`, for code that watches every operator.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

_DEVICE: Final = torch.ops.prim.device.default


class Watching(TorchDispatchMode):
    """A dispatch mode that torch calls without a check for its compiler.

    torch wraps the code of a mode in such a check, which costs as much as an operator on fake
    tensors itself, and no compiler runs here. Private, because torch plans to settle this for all
    modes one day.
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


def device_told(func: Any, args: Any) -> torch.device | None:
    """Return the device of a fake tensor if an operator asks for just that; None otherwise.

    Autograd asks several times per gradient, and torch answers through every active mode. The
    device is a private attribute of the fake tensor.
    """
    if func is not _DEVICE or not isinstance(args[0], FakeTensor):
        return None
    fake: Any = args[0]
    return torch.device("meta") if fake.fake_mode.in_kernel_invocation else fake.fake_device
