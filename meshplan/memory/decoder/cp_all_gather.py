"""Causal attention of a rank's chunks of the sequence to keys and values of the whole, as ops.

The ranks of cp all-gather keys and values. Each chunk of queries attends to all keys up to the end
of the chunk. The first chunk uses the plain causal kernel, all others an explicit mask. Ranks have
different chunks, and so masks of different sizes. The device decides which kernel supports a mask.

Source: `runtime.apply.context.attention._causal` and `runtime.apply.context.parts`, line by line;
torch 2.13, aten/native/transformers/attention.cpp, `convert_boolean_attn_mask` and
`preprocess_mask`, and cuda/sdp_utils.cpp, `select_sdp_backend`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from meshplan import kernels
from meshplan.layout.dtypes import DTYPE_BYTES
from meshplan.memory.decoder.attention import attend
from meshplan.memory.decoder.sizes import shape_of
from meshplan.memory.tape.op import Grad
from meshplan.memory.tape.ops import TapeBuilder
from meshplan.plan.plan import Plan

_ID: Final = 8
_FP32: Final = 4
_ROW: Final = 16
"""Columns of a mask for memory-efficient attention are padded to a multiple of this."""
CUDNN: Final = frozenset({"h100", "h200", "gh200", "h800", "h20", "b200", "gb200", "b300", "gb300"})
"""Devices on which torch prefers cuDNN for attention, which supports masks with grouped queries."""
_MOST_CUDNN: Final = 128
"""Maximum features of one head that cuDNN's kernel supports."""


@dataclass(frozen=True, slots=True)
class SequenceChunks:
    """The chunks of a sequence that one rank has.

    Args:
        chunks: Numbers of this rank's chunks.
        num: Number of all chunks.
        pads: If True, the rows of masks are padded to a multiple of 16 columns.
    """

    chunks: tuple[int, ...]
    num: int
    pads: bool = False


def gathered_of(plan: Plan, rank: int, *, is_cuda: bool, device: str) -> SequenceChunks | None:
    """Return the chunks of a rank; None if keys and values are not all-gathered."""
    context, size = plan.assignment.context, plan.mesh.size("cp")
    if context is None or context.attention != "all_gather":
        return None
    place = plan.mesh.index(rank, ("cp",))
    pads = is_cuda and not _takes_cudnn(plan, device)
    return SequenceChunks(context.chunks(size, place), context.num_chunks(size), pads)


def unmasked(plan: Plan, *, is_cuda: bool, device: str) -> Iterator[str]:
    """Yield a description of the plan's attention if no fused kernel computes it under a mask."""
    context = plan.assignment.context
    if context is None or context.attention != "all_gather" or not is_cuda:
        return
    shape = shape_of(plan.graph)
    if shape.heads != shape.kv_heads and not _takes_cudnn(plan, device):
        yield "attention of grouped queries under a mask, for which there is no fused kernel"


def takes_masks(device: str) -> bool:
    """Return True if the device computes attention as fast under a mask as without one."""
    return not CUDNN.isdisjoint(device.lower().split("-"))


def _takes_cudnn(plan: Plan, device: str) -> bool:
    tensors = plan.assignment.tensors.values()
    (size,) = {DTYPE_BYTES[p.compute_dtype] for p in tensors if not p.info.is_buffer}
    head = shape_of(plan.graph).head_dim
    fits = head <= _MOST_CUDNN and not head % 8
    return size == 2 and fits and takes_masks(device)


def lay(w: TapeBuilder, x: int) -> int:
    """Return a view of `x` by heads, whose gradient is copied to the memory layout of `x`."""
    return w.slice(x, w.size(x))


def attend_to_gathered(
    w: TapeBuilder, q: int, k: int, v: int, head_dim: int, seq_len: int, own: SequenceChunks, ranks:
    int, *, is_fused: bool,
) -> int:  # fmt: skip
    """Append attention of this rank's queries to the keys and values of all ranks.

    Args:
        w: The builder to append to.
        q, k, v: This rank's queries, keys and values.
        head_dim: Features of one head.
        seq_len: Tokens of the whole sequence.
        own: Chunks of the sequence that this rank has.
        ranks: Number of ranks of cp.
        is_fused: If True, a fused kernel computes the first chunk, which needs no mask.
    """
    keys, values = (_gather(w, x, own, ranks) for x in (k, v))
    parts, length = len(own.chunks), seq_len // own.num
    made: list[int] = []
    mask: tuple[int, ...] = ()
    pieces = w.chunk(q, *[w.size(q) // parts] * parts)
    for number, piece in zip(own.chunks, pieces, strict=True):
        share = (number + 1, own.num)
        near, far = (_up_to(w, x, *share) for x in (keys, values))
        if not number:
            out = attend(w, piece, near, far, head_dim, length, is_fused=is_fused)
        else:
            out, mask = _masked(w, piece, near, far, head_dim, length, number + 1, own, mask)
        made.append(out)
    whole = w.cat(*made)
    w.touch(keys, values, *mask)
    return w.shift(whole, "clone")


def _gather(w: TapeBuilder, x: int, own: SequenceChunks, ranks: int) -> int:
    """Append an all-gather of all ranks' chunks, joined in order; backward reverses both steps."""
    size = w.size(x)
    whole = size * ranks
    # With several chunks per rank, backward joins the chunks of each rank before it stacks all.
    stacked = 2 * whole - size if len(own.chunks) > 1 else whole
    return w.row(
        "all_gather",
        (x,),
        whole,
        workspace_bytes=whole,
        workspace_backward_bytes=stacked,
        grads=(Grad(x, size),),
    )


def _up_to(w: TapeBuilder, x: int, stop: int, num: int) -> int:
    """Return a view of the first `stop` of `num` chunks of `x`, or `x` itself for all chunks."""
    return x if stop == num else w.slice(x, w.size(x) // num * stop)


def _masked(
    w: TapeBuilder, q: int, k: int, v: int, head_dim: int, length: int, stop: int, own:
    SequenceChunks,
    before: tuple[int, ...],
) -> tuple[int, tuple[int, ...]]:  # fmt: skip
    """Append attention of one chunk of queries under a mask.

    Args:
        w: The builder to append to.
        q: The chunk's queries.
        k, v: Keys and values up to the end of the chunk.
        head_dim: Features of one head.
        length: Tokens of a chunk.
        stop: Number of chunks up to the end of this one.
        own: Chunks of the sequence that this rank has.
        before: (rows, mask) of the previous chunk; () if there is none.

    Returns:
        (output, (rows, mask)). The caller's Python frame references the indices of the rows and the
        mask made from them until the next chunk's exist.
    """
    columns = length * stop
    rows = w.row("arange", (), length * _ID)
    w.touch(*before[:1])
    mask = w.row("ge", (rows,), length * columns, workspace_bytes=columns * _ID)
    w.touch(*before[1:])
    bias = w.row("where", (mask,), length * columns * w.element_bytes,
                 workspace_bytes=length * columns if w.is_cuda else 0)  # fmt: skip
    if own.pads and columns % _ROW:
        padded = columns + -columns % _ROW
        bias = w.row("pad", (bias,), length * padded * w.element_bytes)
    heads = (w.size(q) // length) // (w.size(k) // columns)
    workspace_backward_bytes, figures = 0, None
    if w.is_cuda:
        each = w.size(q) // (length * head_dim * w.element_bytes)
        figures = each * kernels.round_up(length, 32) if own.pads else None
        size = w.element_bytes
        workspace = (
            kernels.efficient_backward(each, length, columns, head_dim, head_dim, size)
            if own.pads
            else kernels.flash_backward(each, length, columns, head_dim, size, is_grouped=False)
        )
        # If heads of queries share keys, the kernel makes gradients of keys and values for each.
        workspace_backward_bytes = sum(workspace) + (2 * heads * w.size(k) if heads > 1 else 0)
    out = w.attention(
        q,
        k,
        v,
        heads,
        head_dim,
        workspace_backward_bytes=workspace_backward_bytes,
        bias=bias,
        figures=figures,
    )
    return out, (rows, mask)
