"""Functions that use private names of torch for fake tensors and fake process groups.

They serve code that traces a model without values, without memory and without other ranks.
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
    """Return a FakeTensorMode: new tensors have shapes and dtypes, but neither values nor memory.

    Private, because torch has no public name for the mode, although `torch.export` and
    `torch.compile` build on it.

    Args:
        leaves_open: If True, sizes that depend on values, such as those of `nonzero`, become
            symbolic; if False, an operator whose result has such a size raises.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    shapes = ShapeEnv(allow_scalar_outputs=False) if leaves_open else None
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=shapes)


def fake_like(mode: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor of the same shape, strides and dtype, on the CPU.

    The result counts as an `nn.Parameter` if `tensor` is one. `torch.empty_strided` under the mode
    gives an equal tensor, but takes several times as long, and a model has thousands of tensors.

    Args:
        mode: The FakeTensorMode that the result belongs to.
        tensor: The tensor to imitate.
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
    """Silence the traceback that FakeTensorMode logs before it raises, for expected errors."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def is_fake(tensor: torch.Tensor) -> bool:
    """Return True if a tensor is a FakeTensor, whose class has no public name."""
    return isinstance(tensor, FakeTensor)


@contextmanager
def meshes_outside_fakes() -> Iterator[None]:
    """Let a DeviceMesh be created inside a fake mode, although it reads values of its rank tensor.

    `fully_shard` creates such a mesh, of the data axes and tp, when it wraps DTensor parameters.
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
    """Open a process group of the "fake" backend, as one rank of `world_size`; it sends nothing.

    At the end, DTensor's cache of sharding propagation is cleared. The cache refers to the first
    mesh it saw, so the next simulated rank, with an equal mesh, would get the groups of this rank.
    The hook that prints "[rank0]:" before each line of a traceback is removed, too: torch adds one
    with every group, and leaves it there when the group is destroyed.

    Private, because torch means the backend for its own tests.

    Args:
        rank: The rank that this process plays.
        world_size: Number of ranks.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook
        # As torch.distributed.tensor.debug does, whose import takes torch.compile's two seconds.
        dispatcher: Any = DTensor._op_dispatcher
        dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
        core: Any = torch._C
        core._clear_DTensor_sharding_propagator_cache()


@contextmanager
def fakes_unnoticed() -> Iterator[None]:
    """Make transformers run on fake tensors as on real ones, not as under a compiler.

    transformers takes fake tensors as a sign that a compiler traces, and then also builds attention
    masks that a real run skips. Inside the `with` block its check, `is_fake_tensor`, returns False.
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
    """Return (operator, reason) if an error means that fake tensors cannot run an operator.

    The reason is "number" (the result depends on the values of a tensor), "shape" (the shape of the
    result does) or "rule" (torch has no fake implementation of the operator). For any other error,
    return None.

    Private, because the errors have private types, and their messages are not for users.
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
