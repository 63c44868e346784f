"""Workspace of CUDA operators in a fake step, by `kernels` from the arguments' shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch

from meshplan import kernels
from meshplan.runtime.trace.bounds import taken_to_pick

_ops: Final[Any] = torch.ops.aten
_INDEXING: Final = frozenset(
    {_ops.index.Tensor, _ops.index_put_.default, _ops.index_put.default,
     _ops._index_put_impl_.default}
)  # fmt: skip


def taken_inside(func: Any, args: Any, out: Any) -> tuple[int, ...]:
    """Return the size in bytes of each buffer that an operator allocates and frees internally."""
    row = _ROWS.get(func)
    own = row(args, out) if row is not None else ()
    return (*own, *taken_to_pick(args)) if func in _INDEXING else own


def _flash_backward(args: Any, out: Any) -> tuple[int, ...]:
    _, query, key, *_ = args
    batch, heads, rows, head_dim = query.shape
    return kernels.flash_backward(
        batch * heads, rows, key.shape[2], head_dim, key.element_size(),
        is_grouped=heads != key.shape[1],
    )  # fmt: skip


def _efficient_backward(args: Any, out: Any) -> tuple[int, ...]:
    _, query, key, value, *_ = args
    batch, heads, rows, head_dim = query.shape
    return kernels.efficient_backward(
        batch * heads, rows, key.shape[2], head_dim, value.shape[-1], query.element_size()
    )


def _embedding_backward(args: Any, out: Any) -> tuple[int, ...]:
    gradient, indices, vocab, *_ = args
    return kernels.embedding_backward(
        indices.numel(), vocab, gradient.shape[-1],
        index_bytes=indices.element_size(), element_bytes=gradient.element_size(),
    )  # fmt: skip


def _softmax_backward(args: Any, out: Any) -> tuple[int, ...]:
    gradient, output, *_ = args
    dtype = torch.promote_types(gradient.dtype, output.dtype)
    return kernels.softmax_backward(output.numel() * dtype.itemsize)


def _put_and_add(args: Any, out: Any) -> tuple[int, ...]:
    target, indices, _, *accumulate = args
    if not accumulate or not accumulate[0]:
        return ()
    given = [index for index in indices if index is not None]
    shape = torch.broadcast_shapes(*(index.shape for index in given))
    before = next(n for n, index in enumerate(indices) if index is not None)
    # torch linearises the indices together with the dims before the first indexed one.
    return kernels.index_add(torch.Size(shape).numel() * math.prod(target.shape[:before]))


def _sort(args: Any, out: Any) -> tuple[int, ...]:
    x, *_ = args
    return kernels.sort(x.numel(), x.element_size()) if x.ndim == 1 else ()


_ROWS: Final[Mapping[Any, Callable[[Any, Any], tuple[int, ...]]]] = MappingProxyType(
    {
        _ops._scaled_dot_product_flash_attention_backward.default: _flash_backward,
        _ops._scaled_dot_product_cudnn_attention_backward.default: _flash_backward,
        _ops._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
        _ops.embedding_dense_backward.default: _embedding_backward,
        _ops._softmax_backward_data.default: _softmax_backward,
        _ops.sort.default: _sort,
        _ops.sort.stable: _sort,
        _ops.index_put_.default: _put_and_add,
        _ops.index_put.default: _put_and_add,
        _ops._index_put_impl_.default: _put_and_add,
    }
)
