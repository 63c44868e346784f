"""Private names of torch for dispatch modes, each wrapped with the reason for its use.

Like `private`, for code that watches every operator.
"""

from __future__ import annotations

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


def device_told(func: Any, args: Any) -> torch.device | None:
    """Return the device of a fake tensor if an operator asks for just that; None otherwise.

    Autograd asks several times per gradient, and torch answers through every active mode. The
    device is a private attribute of the fake tensor.
    """
    if func is not _DEVICE or not isinstance(args[0], FakeTensor):
        return None
    fake: Any = args[0]
    return torch.device("meta") if fake.fake_mode.in_kernel_invocation else fake.fake_device
