"""What operators take on a GPU, by shapes: FLOPs, and workspace that no tensor shows.

Workspace is allocated inside an operator and freed before it returns, so only the allocator sees
it. Each function computes the sizes as the operator's source does, for a fake step
(`runtime.fake_step`) and for a tape made from a config (`memory.decoder`). Workspaces that
libraries choose at run time, as cuDNN's convolutions do, are not included.

Source: torch 2.13, aten/native, in the files that each function names.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

ATTENTION_BACKWARD: Final = 2.5
"""FLOPs of attention's backward relative to its forward: five products instead of two."""

_FP32: Final = 4
_INT64: Final = 8
_NARROW: Final = 128
"""Features of a head up to which the gradients of keys and values stay in registers."""
_TILE: Final = (128, 64)
"""Rows and keys of one block of the kernel for wider heads."""
_LOCK: Final = 4
"""Elements of a tile in addition to the gradient itself."""
_MOST_SPLITS: Final = 200
_ROWS_PER_THREAD: Final = 10
_FEW_ROWS: Final = 3072
"""Constants of Embedding.cu: rows that one thread sums, and the most indices that are not sorted.
"""
_SORTED_IN_PLACE: Final = 4096


def attention_flops(elements: float, keys: int, *, is_causal: bool) -> float:
    """Return the FLOPs of attention's forward: queries by keys, and weights by values.

    Args:
        elements: Elements of the queries and of the output together.
        keys: Keys of one sequence.
        is_causal: If True, half of the products are masked and skipped.
    """
    return 2.0 * elements * keys * (0.5 if is_causal else 1.0)


def flash_backward(
    num: int, rows: int, keys: int, head_dim: int, element_bytes: int, *, is_grouped: bool
) -> tuple[int, ...]:
    """Return the bytes of each tensor of the workspace of flash attention's backward.

    These are sums of rows, the gradient of queries in fp32, and, where several queries share a key,
    the gradients of keys and values for every head of queries.

    Args:
        num: Heads of queries of all samples together.
        rows: Queries of one sequence.
        keys: Keys of one sequence.
        head_dim: Features of one head.
        element_bytes: Bytes of an element of the queries.
        is_grouped: If True, there are fewer heads of keys than of queries.

    Source: transformers/cuda/flash_attn/flash_api.cpp, `mha_bwd`.
    """
    sums = _FP32 * num * _up(rows, 128)
    repeated = num * keys * head_dim * element_bytes
    width = _up(head_dim, 32 if head_dim <= 128 else 64)
    return (sums, sums * width, *([repeated] * 2 if is_grouped else []))


def efficient_backward(
    num: int, rows: int, keys: int, head_dim: int, value_dim: int, element_bytes: int
) -> tuple[int, ...]:
    """Return the bytes of each tensor of the workspace of memory-efficient attention's backward.

    These are sums of rows and, in half precision, gradients in fp32; heads of more than 128
    features also need gradients of keys and values.

    Args:
        num: Heads of all samples together.
        rows: Queries of one sequence.
        keys: Keys of one sequence.
        head_dim: Features of one head of queries and keys.
        value_dim: Features of one head of values.
        element_bytes: Bytes of an element of the queries.

    Source: transformers/cuda/attention_backward.cu, `_efficient_attention_backward`, for how many
    parts keys are split into; mem_eff_attention/kernel_backward.h, `workspace_size`, and
    kernels/cutlassB.h for the sizes of blocks.
    """
    sums = _FP32 * num * _up(rows, 32)
    if element_bytes == _FP32:
        return (sums,)
    if max(head_dim, value_dim) <= _NARROW:
        return (sums, _FP32 * num * _up(rows, 64) * _up(head_dim, 32))
    down, across = _TILE
    splits = max(1, min(-(-keys // across), _MOST_SPLITS // num))
    apart = splits * across * (_up(head_dim, down) + _up(value_dim, down))
    tiles = -(-rows // down) * -(-head_dim // across) * (_LOCK + down * across)
    return (sums, _FP32 * num * (apart + tiles))


def embedding_backward(
    num: int, vocab: int, width: int, *, index_bytes: int = _INT64, element_bytes: int = _FP32
) -> tuple[int, ...]:
    """Return the bytes of each tensor of the workspace of an embedding's backward.

    More than a few indices are sorted, and the rows of each are summed in parts.

    Args:
        num: Number of indices.
        vocab: Rows of the table.
        width: Features of a row.
        index_bytes: Bytes of an index.
        element_bytes: Bytes of an element of the gradient; half precision is summed in fp32.

    Source: cuda/Embedding.cu and cuda/EmbeddingBackwardKernel.cu.
    """
    if num <= _FEW_ROWS:
        return ()
    each, segments = index_bytes * num, min(num, vocab)
    small, parts = index_bytes * segments, num // _ROWS_PER_THREAD + segments
    summed = max(element_bytes, _FP32) * parts * width
    # Sorted indices and their original positions; ends of segments, their parts and offsets.
    return (each, each, small, small, small, index_bytes * parts, summed)


def sort(num: int, element_bytes: int = _INT64) -> tuple[int, ...]:
    """Return the bytes of each tensor of the workspace of sorting one long list.

    These are an index for each element, and second copies of the elements and indices.

    Source: cuda/Sort.cu, `segmented_sort_large_segments`; up to 4096 elements are sorted in place.
    """
    if num <= _SORTED_IN_PLACE:
        return ()
    return (_INT64 * num, element_bytes * num, _INT64 * num)


def index_add(num: int) -> tuple[int, ...]:
    """Return the bytes of each tensor of the workspace of adding rows at `num` indices.

    Indices are joined, sorted with their positions, and sorting has a workspace of its own.

    Source: cuda/Indexing.cu, `index_put_with_sort_kernel`.
    """
    return (_INT64 * num,) * 5


RECURRENT_GATES: Final = MappingProxyType({"lstm": 4, "gru": 3, "rnn": 1})
"""Products that each hidden feature of a recurrent layer is made of, by kind."""
_RECURRENT_KEPT: Final = MappingProxyType({"lstm": 5, "gru": 6, "rnn": 2})
"""Numbers that cuDNN keeps for backward per hidden feature, token and layer.

[Empirical] LSTM and GRU follow from one report (github.com/pytorch/pytorch/issues/2895): four
layers of 320 features keep 736,000,000 and 864,000,000 bytes, which is 5 + 3/4 and 6 + 3/4 numbers
at 25,000 tokens, with the outputs between layers. The report does not state the tokens. A plain RNN
is not in it, and is taken to keep its output and its input product.
"""


def recurrent_buffers(
    kind: str, tokens: int, hidden: int, layers: int, directions: int, *, has_dropout: bool
) -> tuple[int, int]:
    """Return the elements of cuDNN's buffers of a recurrent layer: (kept for backward, workspace).

    The workspace is taken to be a gradient for every gate of all layers, which cuDNN needs at once
    to multiply them with the inputs. Other algorithms of cuDNN take less.

    Args:
        kind: "lstm", "gru" or "rnn".
        tokens: Time steps of all samples together.
        hidden: Features of a hidden state.
        layers: Number of stacked layers.
        directions: 2 if bidirectional, else 1.
        has_dropout: If True, the masks between layers are kept too.
    """
    features = tokens * hidden * directions
    between = (layers - 1) * (2 if has_dropout else 1)
    kept = features * (_RECURRENT_KEPT[kind] * layers + between)
    return kept, features * RECURRENT_GATES[kind] * layers


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
