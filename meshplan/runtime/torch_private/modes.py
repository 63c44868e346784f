"""Private torch names of dispatch modes, each behind a function or a class with the reason.

As `private`, for what watches every operator.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

_DEVICE: Final = torch.ops.prim.device.default


class Watching(TorchDispatchMode):
    """A mode that torch calls as it is.

    torch wraps what a mode does in a question to its compiler, which costs as much as an operator
    of fakes itself, and which no compiler is here to hear. Private, because torch means to settle
    it for everyone some day.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def device_told(func: Any, args: Any) -> torch.device | None:
    """The device of a fake tensor where an operator asks for just that; None for all others.

    Autograd asks several times for each gradient, and torch answers through every mode that is
    open. The answer is the tensor's own, and private to it.
    """
    if func is not _DEVICE or not isinstance(args[0], FakeTensor):
        return None
    fake: Any = args[0]
    return torch.device("meta") if fake.fake_mode.in_kernel_invocation else fake.fake_device
