"""The ops that shard the sequence over tp, and gather it again (sequence parallelism).

torch's collectives gather and scatter along dim 0, so tensors sharded along dim 1, the sequence,
are copied to another memory layout. With one sample, the gathered tensor has the right layout
already.

Source: `runtime.trace.sp_boundary`; torch 2.13, distributed/_functional_collectives.py
(`all_gather_single`, `reduce_scatter_single`) and distributed/tensor/placement_types.py.
"""

from __future__ import annotations

from meshplan.memory.tape.op import Grad
from meshplan.memory.tape.ops import TapeBuilder


def gather(w: TapeBuilder, x: int, tp: int) -> int:
    """Append an all-gather of the sequence over `tp` ranks; the gradient is reduce-scattered."""
    whole = w.size(x) * tp
    out = w.row(
        "gather_sequence", (x,), whole, workspace_backward_bytes=whole, is_sent=True,
        grads=(Grad(x, w.size(x)),),
    )  # fmt: skip
    out = _contiguous(w, out)
    w.tape.sums_apart.add(out)  # Styled modules use it as a DTensor.
    return out


def scatter(w: TapeBuilder, x: int, tp: int) -> int:
    """Append a reduce-scatter along the sequence over `tp` ranks; the gradient is all-gathered."""
    whole = w.size(x)
    return w.row(
        "scatter_sequence",
        (x,),
        whole // tp,
        workspace_bytes=whole,
        workspace_backward_bytes=_copy_bytes(w, whole),
        is_sent=True,
        is_kept="mm" in w.saves,
        grads=(Grad(x, whole),),
    )


def cut(w: TapeBuilder, x: int, tp: int) -> int:
    """Append a copy of this rank's shard of the sequence; the gradient is all-gathered."""
    whole = w.size(x)
    return w.row(
        "cut_sequence",
        (x,),
        whole // tp,
        workspace_backward_bytes=_copy_bytes(w, whole),
        grads=(Grad(x, whole),),
    )


def end(w: TapeBuilder, x: int, tp: int) -> int:
    """Append the all-gather that ends the sequence-parallel region; the gradient is sliced.

    All ranks go on with the same tensor, so their gradients are equal and are not summed.
    """
    whole = w.size(x) * tp
    out = w.row("end_sequence", (x,), whole, is_sent=True, grads=(Grad(x, w.size(x)),))
    return _contiguous(w, out)


def _contiguous(w: TapeBuilder, x: int) -> int:
    return x if w.samples == 1 else w.shift(x, "cat")


def _copy_bytes(w: TapeBuilder, nbytes: int) -> int:
    """Return the bytes of the copy to another memory layout; 0 for one sample."""
    return nbytes if w.samples > 1 else 0
