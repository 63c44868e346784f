"""Private names of torch for fake tensors and fake process groups, each wrapped in a function.

Like `private`, for code that traces a model without values, memory or other ranks.
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
from torch.distributed.tensor import DTensor


def fake_mode(*, leaves_open: bool = False) -> AbstractContextManager[object]:
    """Return a mode under which new tensors have shapes and dtypes, but neither values nor memory.

    Private, although `torch.export` and `torch.compile` build on it; there is no public name.

    Args:
        leaves_open: If True, sizes that depend on values, such as those of `nonzero`, become
            symbolic; if False, an operator with such a size raises.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    shapes = ShapeEnv(allow_scalar_outputs=False) if leaves_open else None
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=shapes)


def fake_like(mode: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor of the same shape, strides and dtype; a parameter for a parameter.

    The result equals that of an operator under the mode, which takes several times as long: a model
    has thousands of tensors.
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
    """Silence the traceback that fake tensors log before they raise, for expected errors."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def is_fake(tensor: torch.Tensor) -> bool:
    """Return True if a tensor was made under `fake_mode`, which no public name reveals."""
    return isinstance(tensor, FakeTensor)


@contextmanager
def meshes_outside_fakes() -> Iterator[None]:
    """Let a DeviceMesh be created while tensors are fake, though it reads the values of its ranks.

    FSDP2 creates one of the data axes and tp inside `fully_shard`.
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
    """Open a fake process group in which this process is one rank of many and sends nothing.

    Private: torch keeps this backend, which its own tests rely on, out of the public names.
    DTensor's propagation cache refers to the first mesh it saw, and an equal mesh of the next rank
    would get that mesh's groups. So the cache is cleared at the end.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        # As torch.distributed.tensor.debug does, whose import takes torch.compile's two seconds.
        dispatcher: Any = DTensor._op_dispatcher
        dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
        core: Any = torch._C
        core._clear_DTensor_sharding_propagator_cache()


@contextmanager
def fakes_unnoticed() -> Iterator[None]:
    """Keep transformers from treating fake tensors as a sign of compilation.

    While a compiler traces, transformers builds masks that could be needed. It detects this with
    a function of its own, which is replaced inside the `with` block.
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
    """Return (operator, reason) for an error of fake tensors that cannot run it, else None.

    The reason is "number" (the result depends on values), "shape" (its shape does) or "rule" (the
    operator has no rule for fake tensors). These errors have private types, and messages that only
    their authors understand.
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
