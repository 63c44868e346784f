"""Known values of fake tensors that depend on sizes only: positions, masks, tables.

Models read such values to choose a branch: does the mask hide any token, are several sequences
packed into one? A fake tensor would raise, or lead to another branch. Small tensors are therefore
also computed for real, if they depend only on sizes, constants and inputs with known values.

In the optimizer step any other value that code reads, such as a norm or a step count, is 1:
optimizers only scale their updates by these values, so memory does not depend on them.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from meshplan.runtime.base.pytree import given_to
from meshplan.runtime.torch_private.fake_results import Results
from meshplan.runtime.torch_private.fakes import is_fake
from meshplan.runtime.torch_private.modes import Watching, answer_device
from meshplan.runtime.torch_private.private import without_modes
from meshplan.runtime.trace.bounds import picked

MOST_NUMBERS: Final = 1 << 20
"""Most elements of a tensor whose values are kept."""

_ANSWERS: Final = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
_GROUPED: Final = torch.ops.aten._grouped_mm.default
_NAMES: Final = (
    "arange", "ones", "zeros", "full", "scalar_tensor", "lift_fresh", "eye", "linspace",
)  # fmt: skip
_MAKERS: Final = tuple(getattr(torch.ops.aten, name) for name in _NAMES)
"""Operators whose results are known even if no argument is a tensor."""


class ConstantPropagation(Watching):
    """A dispatch mode that tracks the known values of fake tensors; enter it inside a fake mode.

    Args:
        mode: The fake mode, whose results of operators are then cached; None for no cache.
    """

    def __init__(self, mode: Any = None) -> None:
        super().__init__()
        self._results = None if mode is None else Results(mode)
        self._real = WeakTensorKeyDictionary()
        self._ids: set[int] = set()
        """Ids of all tensors that were ever in `_real`: a fast test before the slow lookup."""
        self._phase = ""

    def hear(self, phase: str) -> None:
        """Note that a phase of the training step begins, such as "forward" or "step"."""
        self._phase = phase

    def know(self, fake: torch.Tensor, real: torch.Tensor) -> None:
        """Attach the values of `real` to `fake`, unless `real` is on meta or too large to keep."""
        if real.numel() <= MOST_NUMBERS and not real.is_meta:
            with without_modes():
                self._keep(fake, real.detach().clone())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (device := answer_device(func, args)) is not None:
            return device
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        kwargs = kwargs or {}
        if func is _GROUPED and args[0].dtype != torch.bfloat16:
            return _grouped(func, args, kwargs)
        tensors = given_to((args, kwargs))
        is_known = all(self._knows(t) or not is_fake(t) for t in tensors) and (
            bool(tensors) or func.overloadpacket in _MAKERS
        )
        if not is_known and func in _ANSWERS[:1] and self._phase == "step":
            return _one(args[0].dtype)
        if not is_known:
            if func._schema.is_mutable:
                self._forget_written(func, args)
            out = picked(func, args, kwargs)
            if out is not NotImplemented:
                return out
            results = self._results
            return func(*args, **kwargs) if results is None else results.of(func, args, kwargs)
        is_free = _has_free_shape(func) and any(map(is_fake, tensors))
        out = None if is_free or func in _ANSWERS else func(*args, **kwargs)
        if any(t.numel() > MOST_NUMBERS for t in tree_leaves(out) if isinstance(t, torch.Tensor)):
            self._forget_written(func, args)
            return out
        with without_modes():
            real_args, real_kwargs = tree_map_only(
                torch.Tensor, lambda t: self._real.get(t, t), (args, kwargs)
            )
            real = func(*real_args, **real_kwargs)
        if func in _ANSWERS:
            return real
        out = self._like(real) if is_free else out
        for fake, number in zip(tree_leaves(out), tree_leaves(real), strict=True):
            if isinstance(fake, torch.Tensor) and number.numel() <= MOST_NUMBERS:
                self._keep(fake, number)
        return out

    def _knows(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._ids and tensor in self._real

    def _keep(self, fake: torch.Tensor, real: torch.Tensor) -> None:
        self._ids.add(id(fake))
        self._real[fake] = real

    def _forget_written(self, func: Any, args: tuple[Any, ...]) -> None:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written and isinstance(value, torch.Tensor):
                self._real.pop(value, None)

    @staticmethod
    def _like(real: Any) -> Any:
        return tree_map_only(torch.Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype), real)


def _grouped(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """Return the result of a grouped matmul on fakes of any dtype.

    torch's fake implementation accepts only bfloat16, so the operator runs on casts.
    """

    def narrow(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor

    out: torch.Tensor = func(*tree_map_only(torch.Tensor, narrow, args), **kwargs)
    return out.to(args[0].dtype)


def _one(dtype: torch.dtype) -> bool | int | float:
    if dtype == torch.bool:
        return True
    return 1.0 if dtype.is_floating_point else 1


def _has_free_shape(func: Any) -> bool:
    """Return True if the shape of the result depends on values, as for `nonzero`."""
    return torch.Tag.dynamic_output_shape in func.tags
