"""Logits that are not computed yet: how to compute them, and for which tokens.

A `LazyLogits` has the shape and dtype of the logits and no memory. It records what losses do with
logits before cross-entropy: select tokens, flatten them and cast. Every other operation raises an
error that names it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import Any, Final

import torch
import torch.nn.functional as F

from meshplan.errors import ApplyError, Problem
from meshplan.runtime.checks.outside import name_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """A cross-entropy to be computed in chunks.

    Args:
        target: The class of each scored token, in the order of `index`.
        index: Positions of the scored tokens in the head's input, whose dims except the last are
            flattened; None for all tokens in order.
        dtype: Dtype of the loss.
        ignore_index: Targets of this value contribute nothing.
        smoothing: Label smoothing.
        is_mean: If True, average over the tokens that are not ignored; else sum.
    """

    target: torch.Tensor
    index: torch.Tensor | None
    dtype: torch.dtype
    ignore_index: int
    smoothing: float
    is_mean: bool


Take = Callable[[Scores], torch.Tensor]
"""A function that computes the loss of a requested cross-entropy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """Logits after the selections, reshapes and casts that were recorded so far.

    Args:
        hidden: Input of the head.
        take: Computes the loss.
        num_classes: Size of the dim of classes.
        dtype: Dtype of the logits after casts.
        lead: Shape of the logits without the dim of classes.
        index: The position of each token in `hidden`, whose dims except the last are flattened; a
            tensor of shape `lead`. None for all tokens in order.
        place: Position of the dim of classes in the shape.
    """

    hidden: torch.Tensor
    take: Take
    num_classes: int
    dtype: torch.dtype
    lead: tuple[int, ...]
    index: torch.Tensor | None
    place: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the logits, with the dim of classes."""
        return (*self.lead[: self.place], self.num_classes, *self.lead[self.place :])

    def numbers(self) -> torch.Tensor:
        """Return `index`, as a tensor of shape `lead` even if it is None."""
        if self.index is not None:
            return self.index
        count = math.prod(self.lead)
        return torch.arange(count, device=self.hidden.device).view(self.lead)


class LazyLogits(torch.Tensor):
    """A tensor without memory that stands for logits not computed yet."""

    _view: _View

    @staticmethod
    def of(hidden: torch.Tensor, num_classes: int, dtype: torch.dtype, take: Take) -> LazyLogits:
        """Return the logits that a head is to compute from `hidden`.

        Args:
            hidden: Input of the head.
            num_classes: Number of classes.
            dtype: Dtype of the logits.
            take: Called to compute the loss when cross-entropy is called on the logits.

        Shape: hidden (..., width).
        """
        lead = tuple(hidden.shape[:-1])
        view = _View(hidden=hidden, take=take, num_classes=num_classes, dtype=dtype, lead=lead,
                     index=None, place=len(lead))  # fmt: skip
        return _made(view)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (F.cross_entropy, torch.nn.functional.cross_entropy):
            return _cross_entropy(*args, **kwargs)
        rule = _RULES.get(func)
        if rule is not None and isinstance(args[0], LazyLogits):
            found = rule(args[0]._view, *args[1:], **kwargs)
            if found is not None:
                return _made(found)
        elif func is torch.Tensor.register_hook:
            return args[0]._view.hidden.register_hook(*args[1:], **kwargs)
        elif name_of(func) in _FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        raise ApplyError(_refused(name_of(func)))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise ApplyError(_refused(str(func)))

    # Tracers flatten tensor subclasses into their inner tensors. There are none here.

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return [], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> LazyLogits:
        raise ApplyError(_refused("torch.compile"))

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        view = self._view
        return f"logits of {list(view.shape)} that the loss computes in chunks"


def _made(view: _View) -> LazyLogits:
    out = torch.Tensor._make_wrapper_subclass(
        LazyLogits,
        view.shape,
        dtype=view.dtype,
        device=view.hidden.device,
        requires_grad=view.hidden.requires_grad and torch.is_grad_enabled(),
    )
    out._view = view
    return out


_FACTS: Final = frozenset((
    "shape", "dtype", "device", "requires_grad", "ndim", "dim", "is_leaf", "layout", "grad",
    "grad_fn", "size", "numel", "nelement", "is_floating_point", "is_complex", "is_cuda", "is_cpu",
    "is_meta", "is_sparse", "is_quantized", "is_nested", "itemsize", "nbytes", "element_size",
    "get_device", "__hash__", "__repr__", "__len__", "ndimension", "is_contiguous", "stride",
    "retains_grad", "_base", "output_nr", "_version", "is_inference", "is_signed",
))  # fmt: skip
"""Attributes and methods that can be answered without computing the logits."""


def _refused(operation: str) -> Problem:
    return Problem(
        f"'{operation}' needs all logits at once, but loss_chunks computes them in chunks",
        fix="let the loss only index, reshape or cast the logits before "
        "torch.nn.functional.cross_entropy, or leave loss_chunks out",
    )


# Operations that are recorded. Each returns the new view, or None if the arguments ask for
# something that cannot be recorded.


def _cast(view: _View, dtype: Any = None, *more: Any, **options: Any) -> _View | None:
    """Record `to` or `type`: a change of dtype, or the device that the logits are on already."""
    if isinstance(dtype, torch.Tensor):
        dtype = dtype.dtype
    if isinstance(dtype, str | torch.device):
        is_there = torch.device(dtype) == view.hidden.device
        rest = [*more, *options.values()]
        return view if is_there and not rest else None
    named = {key: value for key, value in options.items() if value}
    given = named.pop("dtype", dtype)
    if more or named or not isinstance(given, torch.dtype):
        return None
    return replace(view, dtype=given)


def _same(view: _View, *options: Any, **named: Any) -> _View | None:
    return view if not options and not named else None


def _reshape(view: _View, *shape: Any, **named: Any) -> _View | None:
    """Record a reshape of the tokens that keeps the classes in the last dim."""
    sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    if named or isinstance(sizes, torch.dtype) or view.place != len(view.lead) or not sizes:
        return None
    *lead, last = sizes
    count = math.prod(view.lead)
    if last == -1 and -1 not in lead and math.prod(lead) == count:
        last = view.num_classes
    if last != view.num_classes:
        return None
    if -1 in lead:
        rest = math.prod(size for size in lead if size != -1)
        lead[lead.index(-1)] = count // rest if rest else 0
    if math.prod(lead) != count:
        return None
    index = None if view.index is None else view.index.reshape(lead)
    return replace(view, lead=tuple(lead), index=index, place=len(lead))


def _flatten(view: _View, start_dim: int = 0, end_dim: int = -1) -> _View | None:
    num = len(view.shape)
    start, end = start_dim % num, end_dim % num
    if start > end or end >= num - 1:
        return view if start == end else None
    merged = math.prod(view.shape[start : end + 1])
    return _reshape(view, *view.shape[:start], merged, *view.shape[end + 1 :])


def _permuted(view: _View, order: tuple[int, ...]) -> _View:
    place = order.index(view.place)
    tokens = [dim - (dim > view.place) for dim in order if dim != view.place]
    is_same = tokens == sorted(tokens)
    index = view.index if is_same else view.numbers()
    if index is not None:
        index = index.permute(tokens)
    return replace(view, lead=tuple(view.lead[dim] for dim in tokens), index=index, place=place)


def _transpose(view: _View, dim0: int, dim1: int) -> _View:
    num = len(view.shape)
    order = list(range(num))
    first, second = dim0 % num, dim1 % num
    order[first], order[second] = second, first
    return _permuted(view, tuple(order))


def _permute(view: _View, *dims: Any) -> _View:
    given = dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims
    return _permuted(view, tuple(dim % len(view.shape) for dim in given))


def _choose(view: _View, item: Any) -> _View | None:
    """Record indexing of tokens by integers and slices."""
    items = list(item) if isinstance(item, tuple) else [item]
    if any(not isinstance(each, int | slice | EllipsisType) or isinstance(each, bool)
           for each in items):  # fmt: skip
        return None
    num = len(view.shape)
    if Ellipsis in items:
        at = items.index(Ellipsis)
        items[at : at + 1] = [slice(None)] * (num - len(items) + 1)
    items += [slice(None)] * (num - len(items))
    if len(items) != num or items[view.place] != slice(None):
        return None
    if all(each == slice(None) for each in items):
        return view
    place = view.place - sum(isinstance(each, int) for each in items[: view.place])
    del items[view.place]
    index = view.numbers()[tuple(items)]
    return replace(view, lead=tuple(index.shape), index=index, place=place)


_RULES: Final[Mapping[Any, Callable[..., _View | None]]] = {
    torch.Tensor.to: _cast,
    torch.Tensor.type: _cast,
    torch.Tensor.float: lambda view: replace(view, dtype=torch.float32),
    torch.Tensor.double: lambda view: replace(view, dtype=torch.float64),
    torch.Tensor.contiguous: _same,
    torch.Tensor.view: _reshape,
    torch.Tensor.reshape: _reshape,
    torch.reshape: _reshape,
    torch.Tensor.flatten: _flatten,
    torch.flatten: _flatten,
    torch.Tensor.transpose: _transpose,
    torch.transpose: _transpose,
    torch.Tensor.permute: _permute,
    torch.permute: _permute,
    torch.Tensor.__getitem__: _choose,
}
"""Maps a torch function to the function above that records it."""


def _cross_entropy(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Compute `F.cross_entropy` of lazy logits through their `take`.

    Raises:
        ApplyError: An option cannot be computed in chunks, or the target has another shape.
    """
    stated = {"weight": weight, "size_average": size_average, "reduce": reduce}
    refused = [name for name, value in stated.items() if value is not None]
    if not isinstance(input, LazyLogits) or isinstance(target, LazyLogits):
        raise ApplyError(_refused("cross_entropy with these logits as the target"))
    view = input._view
    if target.is_floating_point():
        refused.append("class probabilities as the target")
    if reduction not in ("mean", "sum"):
        refused.append(f"reduction='{reduction}', only with 'mean' or 'sum'")
    if refused:
        raise ApplyError(
            Problem(
                f"loss_chunks does not support cross_entropy with {refused[0]}",
                fix="change that argument, or leave loss_chunks out",
            )
        )
    place = 1 if len(view.shape) > 1 else 0
    if view.place != place or tuple(target.shape) != view.lead:
        shapes = f"logits of {list(view.shape)} and targets of {list(target.shape)}"
        what = f"loss_chunks: cross_entropy was given {shapes}, with classes along dim {view.place}"
        fix = f"pass logits with the classes along dim {place}, and one target per token"
        raise ApplyError(Problem(what, fix=fix))
    index = None if view.index is None else view.index.flatten()
    return view.take(
        Scores(target=target, index=index, dtype=view.dtype, ignore_index=ignore_index,
               smoothing=label_smoothing, is_mean=reduction == "mean")
    )  # fmt: skip
