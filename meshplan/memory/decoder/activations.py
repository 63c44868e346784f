"""Activation functions of a feed-forward, as ops.

Source: transformers 5.23, activations.py.
"""

from __future__ import annotations

from meshplan.memory.tape.op import Grad
from meshplan.memory.tape.ops import TapeBuilder


def activate(w: TapeBuilder, x: int, name: str) -> int:
    """Append an activation function and return its output.

    Args:
        w: The builder to append to.
        x: Input of the function.
        name: Op of the function, as in `Shape.activation`.
    """
    if name != "gelu_new":
        return w.unary(name, x)
    size, half = w.size(x), w.scale(x)
    cube = w.row(
        "pow", (x,), size, keeps=(x,), workspace_backward_bytes=2 * size, grads=(Grad(x, size),)
    )
    inner = w.add(x, w.scale(cube))
    activated = w.shift(w.unary("tanh", w.scale(inner), keeps_out=True))
    out = w.mul(half, activated)
    w.touch(x)
    return out
