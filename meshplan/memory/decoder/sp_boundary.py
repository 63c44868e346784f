"""The ops at which a sequence is sharded over tp, and put together again.

Torch gathers and scatters along the first dim, and copies to a new layout what is sharded along the
second. With one sample, what was gathered has the right layout already.

Source: `runtime.trace.sp_boundary`; torch 2.13, distributed/_functional_collectives.py
(`all_gather_single`, `reduce_scatter_single`) and distributed/tensor/placement_types.py.
"""

from __future__ import annotations

from meshplan.memory.tape.op import Grad
from meshplan.memory.tape.ops import TapeBuilder


def gather(w: TapeBuilder, x: int, tp: int) -> int:
    """All-gather the sequence; its gradient is reduce-scattered."""
    whole = w.size(x) * tp
    out = w.row(
        "gather_sequence", (x,), whole, workspace_backward_bytes=whole, is_sent=True,
        grads=(Grad(x, w.size(x)),),
    )  # fmt: skip
    out = _laid_out(w, out)
    w.tape.sums_apart.add(out)  # It enters styled modules as a DTensor.
    return out


def scatter(w: TapeBuilder, x: int, tp: int) -> int:
    """Reduce-scatter along the sequence; its gradient is all-gathered."""
    whole = w.size(x)
    return w.row(
        "scatter_sequence",
        (x,),
        whole // tp,
        workspace_bytes=whole,
        workspace_backward_bytes=_laid(w, whole),
        is_sent=True,
        is_kept="mm" in w.saves,
        grads=(Grad(x, whole),),
    )


def cut(w: TapeBuilder, x: int, tp: int) -> int:
    """Copy this rank's part of the sequence; its gradient is all-gathered."""
    whole = w.size(x)
    return w.row(
        "cut_sequence",
        (x,),
        whole // tp,
        workspace_backward_bytes=_laid(w, whole),
        grads=(Grad(x, whole),),
    )


def end(w: TapeBuilder, x: int, tp: int) -> int:
    """All-gather the sequence where the sequence-parallel region ends; its gradient is sliced.

    All ranks continue with the same tensor, so no gradients are summed.
    """
    whole = w.size(x) * tp
    out = w.row("end_sequence", (x,), whole, is_sent=True, grads=(Grad(x, w.size(x)),))
    return _laid_out(w, out)


def _laid_out(w: TapeBuilder, x: int) -> int:
    return x if w.samples == 1 else w.shift(x, "cat")


def _laid(w: TapeBuilder, nbytes: int) -> int:
    """Bytes of the tensor before it is copied to another layout; 0 for one sample."""
    return nbytes if w.samples > 1 else 0
