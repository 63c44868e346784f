"""Workspace memory of CUDA operators: allocated inside the operator, and freed before it returns.

No tensor shows it, but the allocator counts it. The table `_ROWS` has a function for each operator,
which computes the sizes as the operator does. Workspaces that libraries choose at run time (cuDNN's
convolutions) are not included, because only the libraries know their sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch

from meshplan.memory.decoder.attention import efficient_backward
from meshplan.runtime.trace.bounds import taken_to_pick

_ops: Final[Any] = torch.ops.aten
_INDEXING: Final = frozenset(
    {_ops.index.Tensor, _ops.index_put_.default, _ops.index_put.default,
     _ops._index_put_impl_.default}
)  # fmt: skip
_ROWS_PER_THREAD: Final = 10
_FEW_ROWS: Final = 3072
"""Constants of Embedding.cu: rows that one thread sums, and the most indices that are not sorted.
"""
_SORTED_IN_PLACE: Final = 4096


def taken_inside(func: Any, args: Any, out: Any) -> tuple[int, ...]:
    """Return the sizes in bytes of what an operator allocates in addition to its results."""
    row = _ROWS.get(func)
    own = row(args, out) if row is not None else ()
    return (*own, *taken_to_pick(args)) if func in _INDEXING else own


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _flash_backward(args: Any, out: Any) -> tuple[int, ...]:
    """Source: flash_api.cpp, `mha_bwd`: sums of rows, a gradient in float32, repeated heads."""
    _, query, key, *_ = args
    batch, heads, rows, head = query.shape
    rounded = _up(head, 32 if head <= 128 else 64)
    sums = 4 * batch * heads * _up(rows, 128)
    repeated = batch * heads * key.shape[2] * head * key.element_size()
    is_grouped = heads != key.shape[1]
    return (sums, sums * rounded, *([repeated] * 2 if is_grouped else []))


def _efficient_backward(args: Any, out: Any) -> tuple[int, ...]:
    _, query, key, value, *_ = args
    batch, heads, rows, head = query.shape
    return efficient_backward(
        batch * heads, rows, key.shape[2], head, value.shape[-1], query.element_size()
    )


def _embedding_backward(args: Any, out: Any) -> tuple[int, ...]:
    """Source: Embedding.cu, EmbeddingBackwardKernel.cu: indices sorted, rows summed apart."""
    gradient, indices, rows, *_ = args
    count, width = indices.numel(), gradient.shape[-1]
    if count <= _FEW_ROWS:
        return ()
    each = indices.element_size() * count
    segments = min(count, rows)
    parts = count // _ROWS_PER_THREAD + segments
    summed = 4 if gradient.dtype in (torch.float16, torch.bfloat16) else gradient.element_size()
    # Sorted indices and their original positions; ends of segments, their parts and offsets.
    small = indices.element_size() * segments
    return (each, each, small, small, small, indices.element_size() * parts, summed * parts * width)


def _put_and_add(args: Any, out: Any) -> tuple[int, ...]:
    """Source: Indexing.cu, `index_put_with_sort_kernel`: indices joined, sorted, and sort's own."""
    target, indices, _, *accumulate = args
    if not accumulate or not accumulate[0]:
        return ()
    given = [index for index in indices if index is not None]
    shape = torch.broadcast_shapes(*(index.shape for index in given))
    before = next(n for n, index in enumerate(indices) if index is not None)
    sliced = 1
    for size in target.shape[:before]:
        sliced *= size
    each = 8 * torch.Size(shape).numel() * sliced
    return (each,) * 5


def _sort(args: Any, out: Any) -> tuple[int, ...]:
    """Return the index array and the second copies of keys and indices that a long 1-d sort needs.

    Source: Sort.cu: up to 4096 in place; one list's indices counted, keys and indices twice.
    """
    x, *_ = args
    count = x.numel()
    if count <= _SORTED_IN_PLACE or x.ndim != 1:
        return ()
    return (8 * count, x.element_size() * count, 8 * count)


_ROWS: Final[Mapping[Any, Callable[[Any, Any], tuple[int, ...]]]] = MappingProxyType(
    {
        _ops._scaled_dot_product_flash_attention_backward.default: _flash_backward,
        _ops._scaled_dot_product_cudnn_attention_backward.default: _flash_backward,
        _ops._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
        _ops.embedding_dense_backward.default: _embedding_backward,
        _ops.sort.default: _sort,
        _ops.sort.stable: _sort,
        _ops.index_put_.default: _put_and_add,
        _ops.index_put.default: _put_and_add,
        _ops._index_put_impl_.default: _put_and_add,
    }
)
