"""Private torch names of fake tensors and of groups of fakes, each behind a function.

As `private`, for what traces a model without numbers, memory or other ranks.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh


def fake_mode(*, leaves_open: bool = False) -> AbstractContextManager[object]:
    """Tensors made inside have shapes and dtypes, but neither numbers nor memory.

    Private, yet what `torch.export` and `torch.compile` rest on; there is no public name.

    Args:
        leaves_open: Whether sizes that depend on numbers, as those of `nonzero`, are left open;
            else an operator that gives such a size raises.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    shapes = ShapeEnv(allow_scalar_outputs=False) if leaves_open else None
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=shapes)


def fake_like(mode: Any, tensor: torch.Tensor) -> torch.Tensor:
    """A fake tensor of the same shape, strides and dtype, a parameter where that is one.

    What an operator would make under the mode, which takes several times as long: a model has
    thousands of tensors.
    """
    shape, stride = tuple(tensor.shape), tensor.stride()
    with torch._C._DisableTorchDispatch():
        meta = torch.empty_strided(shape, stride, dtype=tensor.dtype, device="meta")
    fake: Any = FakeTensor(mode, meta, torch.device("cpu"))
    if isinstance(tensor, torch.nn.Parameter):
        fake.requires_grad_(tensor.requires_grad)
        fake._is_param = True
    return fake


@contextmanager
def quiet_fakes() -> Iterator[None]:
    """Fake tensors log a traceback before they raise; what is expected to raise is not news."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor was made under `fake_mode`; no public name tells."""
    return isinstance(tensor, FakeTensor)


@contextmanager
def meshes_outside_fakes() -> Iterator[None]:
    """Let DeviceMesh be made while tensors are fake: it looks at the numbers of its ranks.

    FSDP2 makes one of the data axes and tp inside `fully_shard`.
    """
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    init = DeviceMesh.__init__

    def plain_init(self: DeviceMesh, *args: Any, **kwargs: Any) -> None:
        with unset_fake_temporarily():
            init(self, *args, **kwargs)

    DeviceMesh.__init__ = plain_init
    try:
        yield
    finally:
        DeviceMesh.__init__ = init


@contextmanager
def group_of_fakes(rank: int, world_size: int) -> Iterator[None]:
    """A process group in which this process stands for one rank of many, and nothing is sent.

    Private: torch keeps this backend, which its own tests rest on, out of the public names. What
    DTensor has worked out holds the mesh that it was asked for first, and an equal mesh of the next
    rank would be handed that one's groups.
    """
    from torch.distributed.tensor import debug
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        clear: Any = debug
        clear._clear_sharding_prop_cache()


@contextmanager
def fakes_unnoticed() -> Iterator[None]:
    """Let transformers take fake tensors for what they stand for, and not for a compilation.

    It builds masks whenever a compiler traces, since those could be needed, and asks a name of its
    own for it.
    """
    utils: Any = sys.modules.get("transformers.utils.import_utils")
    if utils is None:
        yield
        return
    ask = utils.is_fake_tensor
    utils.is_fake_tensor = lambda tensor: False
    try:
        yield
    finally:
        utils.is_fake_tensor = ask


def untraceable(error: BaseException) -> tuple[str, str] | None:
    """(the operator, why fakes cannot run it: "number", "shape" or "rule"), None for other errors.

    What fake tensors raise has private names and messages that only its makers understand.
    """
    from torch._subclasses import fake_tensor

    for kind, why in (
        (fake_tensor.DataDependentOutputException, "number"),
        (fake_tensor.DynamicOutputShapeException, "shape"),
        (fake_tensor.UnsupportedOperatorException, "rule"),
    ):
        if isinstance(error, kind):
            return str(error.func), why
    text = str(error)
    if "There was no fake impl registered for" in text:
        return text.partition("registered for ")[2].partition(".\n")[0].partition(". This")[
            0
        ], "rule"
    if isinstance(error, NotImplementedError) and "Could not run '" in text:
        return text.partition("Could not run '")[2].partition("'")[0], "rule"
    if ".numpy() is not supported for tensor subclasses" in text:
        return "numpy()", "number"
    return None
