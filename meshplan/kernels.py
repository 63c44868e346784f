"""FLOPs and workspace bytes of GPU operators, computed from the shapes of their inputs.

Workspace is memory that an operator allocates and frees before it returns: no output tensor shows
it, but it counts in the allocator's peak. Each function computes the sizes as the operator's source
code does, for a fake step (`runtime.fake_step`) and for a tape made from a config
(`memory.decoder`). Workspaces whose size a library chooses at run time, such as those of cuDNN's
convolutions, are not included.

Source: torch 2.13, aten/native, in the files that each function names.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

ATTENTION_BACKWARD: Final = 2.5
"""FLOPs of attention's backward relative to its forward: five matrix products instead of two."""

_FP32: Final = 4
_INT64: Final = 8
_NARROW: Final = 128
"""Largest head for which memory-efficient attention keeps dK and dV in registers, in features."""
_WIDTHS: Final = (32, 64, _NARROW)
"""Features for which memory-efficient attention has kernels; a head takes the next larger one."""
_TILE: Final = (128, 64)
"""(queries, keys) of one block of memory-efficient attention's backward for larger heads. Smaller
heads have as many queries in a block as keys, but for the widest in half precision."""
_LOCK: Final = 4
"""Elements stored with each tile of dQ in addition to the gradient: its lock and counter."""
_MOST_SPLITS: Final = 200
_ROWS_PER_THREAD: Final = 10
_FEW_ROWS: Final = 3072
"""Constants of Embedding.cu: `_ROWS_PER_THREAD` rows are summed by one thread; up to `_FEW_ROWS`
indices are not sorted.
"""
_SORTED_IN_PLACE: Final = 4096


def attention_flops(elements: float, keys: int, *, is_causal: bool) -> float:
    """Return the FLOPs of attention's forward: its products QKᵀ and softmax(QKᵀ)V.

    Args:
        elements: Number of elements of the queries plus number of elements of the output.
        keys: Number of keys in one sequence.
        is_causal: If True, half of the products are masked and skipped.
    """
    return 2.0 * elements * keys * (0.5 if is_causal else 1.0)


def flash_backward(
    num: int, rows: int, keys: int, head_dim: int, element_bytes: int, *, is_grouped: bool
) -> tuple[int, ...]:
    """Return the bytes of each tensor of the workspace of flash attention's backward.

    These tensors are the row sums of the softmax's backward, dQ in fp32, and, if query heads share
    key heads, dK and dV once for every query head.

    Args:
        num: Number of samples times number of query heads.
        rows: Number of queries in one sequence.
        keys: Number of keys in one sequence.
        head_dim: Features of one head.
        element_bytes: Bytes of one element of the queries.
        is_grouped: If True, there are fewer key heads than query heads.

    Source: transformers/cuda/flash_attn/flash_api.cpp, `mha_bwd`.
    """
    sums = _FP32 * num * round_up(rows, 128)
    repeated = num * keys * head_dim * element_bytes
    width = round_up(head_dim, 32 if head_dim <= 128 else 64)
    return (sums, sums * width, *([repeated] * 2 if is_grouped else []))


def efficient_backward(
    num: int, rows: int, keys: int, head_dim: int, value_dim: int, element_bytes: int
) -> tuple[int, ...]:
    """Return the bytes of each tensor of the workspace of memory-efficient attention's backward.

    These tensors are the row sums of the softmax's backward and dQ in fp32, in blocks as large as
    the kernel's tiles, and in half precision, for heads of more than 128 features, also dK and dV.
    In fp32 torch computes the row sums before the kernel, from a product as large as the output.
    That product is freed before dQ is allocated, so the larger of the two moments is returned.

    Args:
        num: Number of samples times number of heads.
        rows: Number of queries in one sequence.
        keys: Number of keys in one sequence.
        head_dim: Features of one head of queries and keys.
        value_dim: Features of one head of values.
        element_bytes: Bytes of one element of the queries.

    Source: transformers/cuda/attention_backward.cu, `_efficient_attention_backward`, for the row
    sums and the number of splits of the keys; mem_eff_attention/kernel_backward.h,
    `workspace_size`, and kernels/cutlassB.h for the sizes of blocks on SM80 and later.
    """
    sums, is_half = _FP32 * num * rows, element_bytes < _FP32
    widest = max(head_dim, value_dim)
    down, across = _TILE
    if widest <= _NARROW:
        width = next(width for width in _WIDTHS if widest <= width)
        down = down if is_half and width == _NARROW else across
        kept = -(-rows // down) * (_LOCK + down * width)
    else:
        kept = -(-rows // down) * -(-head_dim // across) * (_LOCK + down * across)
        if is_half:
            splits = max(1, min(-(-keys // across), _MOST_SPLITS // num))
            kept += splits * across * (round_up(head_dim, down) + round_up(value_dim, down))
    workspace = (sums, _FP32 * num * kept)
    before = () if is_half else (sums, sums, _FP32 * num * rows * value_dim)
    return max(before, workspace, key=sum)


def embedding_backward(
    num: int, vocab: int, width: int, *, index_bytes: int = _INT64, element_bytes: int = _FP32
) -> tuple[int, ...]:
    """Return the bytes of each tensor of the workspace of an embedding's backward.

    Up to 3,072 indices need no workspace. More indices are sorted first, and then the gradient rows
    of each distinct index are summed in parts.

    Args:
        num: Number of indices.
        vocab: Number of rows of the embedding table.
        width: Features of one row.
        index_bytes: Bytes of one index.
        element_bytes: Bytes of one element of the gradient; half precision is summed in fp32.

    Source: cuda/Embedding.cu and cuda/EmbeddingBackwardKernel.cu.
    """
    if num <= _FEW_ROWS:
        return ()
    each, segments = index_bytes * num, min(num, vocab)
    small, parts = index_bytes * segments, num // _ROWS_PER_THREAD + segments
    summed = max(element_bytes, _FP32) * parts * width
    # A segment has the rows of one distinct index. In order: sorted indices, their original
    # positions, three tensors with a number per segment, the offsets of the parts, and their sums.
    return (each, each, small, small, small, index_bytes * parts, summed)


def softmax_backward(num_bytes: int) -> tuple[int]:
    """Return the bytes of the workspace of softmax's backward: the gradient times the output.

    The backward of log-softmax has no workspace.

    Args:
        num_bytes: Bytes of the product of gradient and output.

    Source: cuda/SoftMax.cu, `softmax_backward_cuda_out`.
    """
    return (num_bytes,)


def sort(num: int, element_bytes: int = _INT64) -> tuple[int, ...]:
    """Return the bytes of each tensor of the workspace of sorting `num` elements along one dim.

    These tensors are an index for each element, a second copy of the elements, and a second copy of
    the indices. Up to 4,096 elements are sorted in place, without workspace.

    Source: cuda/Sort.cu, `segmented_sort_large_segments`.
    """
    if num <= _SORTED_IN_PLACE:
        return ()
    return (_INT64 * num, element_bytes * num, _INT64 * num)


def index_add(num: int) -> tuple[int, ...]:
    """Return the bytes of each tensor of the workspace of adding rows at `num` indices.

    Each of the five tensors has one int64 per index: the linear indices, the sorted indices, their
    original positions, and two for the sort itself.

    Source: cuda/Indexing.cu, `index_put_with_sort_kernel`.
    """
    return (_INT64 * num,) * 5


RECURRENT_GATES: Final = MappingProxyType({"lstm": 4, "gru": 3, "rnn": 1})
"""Number of gates per hidden feature of a recurrent layer, by kind."""
_RECURRENT_KEPT: Final = MappingProxyType({"lstm": 5, "gru": 6, "rnn": 2})
"""Number of elements that cuDNN keeps for backward per hidden feature, token and layer, by kind.

[Empirical] LSTM and GRU follow from one report (github.com/pytorch/pytorch/issues/2895): four
layers of 320 features keep 736,000,000 and 864,000,000 bytes. The report does not state the number
of tokens. With 25,000 tokens these are 5 + 3/4 and 6 + 3/4 fp32 elements, where 3/4 is for the
outputs of three of the four layers. The report has no plain RNN: we assume that it keeps its output
and the product of its input with its weight.
"""


def recurrent_buffers(
    kind: str, tokens: int, hidden: int, layers: int, directions: int, *, has_dropout: bool
) -> tuple[int, int]:
    """Return (elements kept for backward, elements of workspace) of a recurrent module in cuDNN.

    We assume that the workspace has the gradients of all gates of all layers at the same time;
    cuDNN then multiplies them with the inputs. Other algorithms of cuDNN need less.

    Args:
        kind: "lstm", "gru" or "rnn".
        tokens: Number of samples times number of time steps.
        hidden: Features of a hidden state.
        layers: Number of stacked layers.
        directions: 2 if bidirectional, else 1.
        has_dropout: If True, the dropout masks between layers are kept too.
    """
    features = tokens * hidden * directions
    between = (layers - 1) * (2 if has_dropout else 1)
    kept = features * (_RECURRENT_KEPT[kind] * layers + between)
    return kept, features * RECURRENT_GATES[kind] * layers


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
