"""The effect of each operation on dims: which it iterates over together, and which it mixes.

An operation can be sharded along a factor if its result at one index of the factor depends on its
arguments at the same index only. A factor for which this is not known is blocked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from meshplan.model.dims.linker import Linker, argument, base_name, positions
from meshplan.model.dims.shaping import SHAPING
from meshplan.model.flow import UPDATE, Op

Handler = Callable[[Linker, int, Op], None]

ALONG: Final = frozenset(
    (
        "_to_copy", "alias", "detach", "clone", "copy_", "lift_fresh", "native_dropout",
        "bernoulli", "bernoulli_", "masked_fill", "masked_fill_", "fill_", "zero_",
        "contiguous", "dropout", "zeros_like", "ones_like", "full_like", "empty_like",
        "rand_like", "randn_like", "polar", "complex", "real", "imag",
    )
)  # fmt: skip
"""Elementwise operations that torch does not tag as pointwise."""

UNIFORM: Final = frozenset(
    (
        "zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty",
        "scalar_tensor", "empty_strided", "new_empty_strided",
    )
)  # fmt: skip
"""Operations that create a tensor whose elements are all equal, or uninitialized."""

REDUCED: Final[Mapping[str, int]] = MappingProxyType(
    dict.fromkeys(
        (
            "sum", "mean", "amax", "amin", "argmax", "argmin", "var", "std", "var_mean",
            "std_mean", "logsumexp", "any", "all", "prod", "max", "min", "median", "nanmean",
            "nansum", "count_nonzero",
        ), 1,
    )
    | {"linalg_vector_norm": 2, "norm": 2}
)  # fmt: skip
"""Operations that reduce over dims, and the index of the argument that names these dims."""

MIXES_ALONG: Final[Mapping[str, int]] = MappingProxyType(
    {
        "_softmax": 1, "_log_softmax": 1, "softmax": 1, "log_softmax": 1, "_safe_softmax": 1,
        "cumsum": 1, "cumprod": 1, "cummax": 1, "cummin": 1, "logcumsumexp": 1, "sort": 1,
        "argsort": 1, "topk": 2, "flip": 1, "roll": 2, "_weight_norm_interface": 2, "glu": 1,
    }
)  # fmt: skip
"""Operations that mix elements along dims and keep these dims, and the index of the argument that
names them.
"""

_NO_DEFAULT_DIM: Final = {"topk": -1, "sort": -1, "argsort": -1, "glu": -1}


def link(linker: Linker, number: int, op: Op) -> None:
    """Set the dims of an operation's results, and link them with the dims of its arguments."""
    name = base_name(op)
    if op.name == UPDATE:
        _update(linker, op)
    elif name in UNIFORM:
        for value in op.outputs:
            linker.fresh(value)
    elif name in SHAPING:
        SHAPING[name](linker, op)
    elif name.startswith("_scaled_dot_product_"):
        _attention(linker, number, op)
    elif name in _TABLE:
        _TABLE[name](linker, number, op)
    elif name in REDUCED:
        _reduce(linker, op, name)
    elif name in MIXES_ALONG:
        _mixes_along(linker, op, name)
    elif (op.is_pointwise or name in ALONG) and op.inputs:
        _along(linker, op, name)
    else:
        linker.block_all(op, f"meshplan has no sharding rule for {name}")


def _along(linker: Linker, op: Op, name: str) -> None:
    dims = linker.broadcast(
        linker.all_of(op), f"{name} combines dims that are split into different factors"
    )
    for value in op.outputs:
        shape = linker.flow.values[value].shape
        if len(shape) == len(dims) and shape == tuple(linker.factors.size(d) for d in dims):
            linker.give(value, dims)
        else:
            reason = f"{name} returns another shape than its inputs broadcast to"
            linker.block(dims, reason)
            linker.fresh(value, reason)


def _update(linker: Linker, op: Op) -> None:
    """Keep the dims of a tensor that was written through another view of its memory."""
    linker.give(op.outputs[0], linker.of(op.args[0]))


def _matrix_product(linker: Linker, number: int, op: Op) -> None:
    """Link the dims of (..., m, k) x (..., k, n), with an optional addend."""
    name = base_name(op)
    first = 1 if name in ("addmm", "baddbmm", "addbmm") else 0
    left, right = linker.of(op.args[first]), linker.of(op.args[first + 1])
    reason = f"{name} combines dims that are split into different factors"
    batch = left[:-2]
    for one, other in zip(batch, right[:-2], strict=True):
        linker.factors.unify(one, other, reason)
    linker.factors.unify(left[-1], right[-2], reason)
    linker.summed[number] = left[-1]
    out = (*batch, left[-2], right[-1])
    if first:
        shape = tuple(linker.factors.size(d) for d in out)
        linker.broadcast([(out, shape), linker.of_shape(op.args[0])], reason)
    linker.give(op.outputs[0], out)


def _vector_product(linker: Linker, number: int, op: Op) -> None:
    """Link the dims of (m, k) x (k,), or of (k,) x (k,)."""
    left, right = linker.of(op.args[0]), linker.of(op.args[1])
    linker.factors.unify(
        left[-1], right[0], f"{base_name(op)} combines dims that are split into different factors"
    )
    linker.summed[number] = left[-1]
    linker.give(op.outputs[0], left[:-1])


def _embedding(linker: Linker, number: int, op: Op) -> None:
    weight, index = linker.of(op.args[0]), linker.of(op.args[1])
    linker.factors.block(weight[0], "its rows are looked up by index")
    linker.give(op.outputs[0], (*index, weight[1]))


def _attention(linker: Linker, number: int, op: Op) -> None:
    """Link the heads of q, k and v; block the sequence and the head dim, which attention mixes."""
    q, k, v = (linker.of(op.args[i]) for i in range(3))
    if len(q) != 4:
        linker.block_all(
            op, "attention gets tensors that are not (batch, heads, sequence, head dim)"
        )
        return
    unlike = "attention combines dims that are split into different factors"
    heads, kv_heads = linker.factors.size(q[1]), linker.factors.size(k[1])
    for tensor in (k, v):
        linker.factors.unify(q[0], tensor[0], unlike)
    linker.factors.unify(k[1], v[1], unlike)
    if heads == kv_heads:
        linker.factors.unify(q[1], k[1], unlike)
    else:
        repeats = linker.factors.new(heads // kv_heads)
        linker.factors.unify(q[1], (*k[1], *repeats), unlike)
    linker.factors.unify(k[2], v[2], unlike)
    scores = (q[0], q[1], q[2], k[2])
    shape = tuple(linker.factors.size(d) for d in scores)
    masks = [m for m in (*op.args[3:], *op.kwargs.values()) if hasattr(m, "value")]
    for mask in masks:
        linker.broadcast([(scores, shape), linker.of_shape(mask)], unlike)
    across = "attention mixes positions of the sequence"
    linker.block((q[2], k[2]), across)
    linker.block((q[3], k[3], v[3]), "attention mixes the features of a head")
    linker.give(op.outputs[0], (q[0], q[1], q[2], v[3]))
    for place, value in enumerate(op.outputs[1:], 1):
        if place == 1 and linker.flow.values[value].shape == shape[:3]:
            linker.give(value, scores[:3])
        else:
            linker.fresh(value, "attention returns it for its own backward")


def _reduce(linker: Linker, op: Op, name: str) -> None:
    dims, shape = linker.of_shape(op.args[0])
    which = argument(op, REDUCED[name], "dim")
    if name in ("max", "min") and len(op.args) > 1 and not isinstance(op.args[1], int):
        linker.block_all(op, f"meshplan has no sharding rule for {name}")
        return
    if isinstance(which, bool):
        which = None
    gone = positions(which, len(shape))
    keeps = linker.flow.values[op.outputs[0]].shape
    linker.block((dims[d] for d in gone), f"{name} reduces over one of its dims")
    left = [() if d in gone else dim for d, dim in enumerate(dims)]
    if len(keeps) != len(shape):
        left = [dim for d, dim in enumerate(left) if d not in gone]
    for value in op.outputs:
        linker.give(value, left)


def _mixes_along(linker: Linker, op: Op, name: str) -> None:
    dims, shape = linker.of_shape(op.args[0])
    which = argument(op, MIXES_ALONG[name], "dim", _NO_DEFAULT_DIM.get(name))
    which = op.kwargs.get("dims", which)
    mixed = positions(which if not isinstance(which, bool) else None, len(shape))
    reason = f"{name} mixes elements along one of its dims"
    linker.block((dims[d] for d in mixed), reason)
    for other in op.inputs[1:]:
        linker.block(linker.dims[other], reason)
    for value in op.outputs:
        after = linker.flow.values[value].shape
        if len(after) != len(shape):
            linker.block(dims, reason)
            linker.fresh(value, reason)
            continue
        linker.give(value, (
            dim if size == left else linker.factors.new(left, reason)
            for dim, size, left in zip(dims, shape, after, strict=True)
        ))  # fmt: skip


def _layer_norm(linker: Linker, number: int, op: Op) -> None:
    """Block the dims that layer norm and RMSNorm reduce, and link the others.

    The arguments are (x, normalized shape, weight, bias, ...).
    """
    dims = linker.of(op.args[0])
    last = len(tuple(op.args[1]))
    reason = "a norm reduces over one of its dims"
    linker.block(dims[-last:], reason)
    for item in op.inputs[1:]:
        linker.block(linker.dims[item], reason)
    linker.give(op.outputs[0], dims)
    for value in op.outputs[1:]:
        sizes = linker.flow.values[value].shape
        kept = [*dims[:-last], *((),) * last][: len(sizes)]
        if sizes == tuple(linker.factors.size(d) for d in kept):
            linker.give(value, kept)
        else:
            linker.fresh(value, reason)


def _samples_only(linker: Linker, number: int, op: Op) -> None:
    """Block all dims except the samples (dim 0): for convolutions and group norms."""
    dims = linker.of(op.args[0])
    reason = f"{base_name(op)} can be sharded along the batch only"
    linker.block(dims[1:], reason)
    for item in op.inputs[1:]:
        linker.block(linker.dims[item], reason)
    for value in op.outputs:
        shape = linker.flow.values[value].shape
        if shape and shape[0] == linker.factors.size(dims[0]):
            rest = (linker.factors.new(size, reason) for size in shape[1:])
            linker.give(value, (dims[0], *rest))
        else:
            linker.fresh(value, reason)


_TABLE: Final[Mapping[str, Handler]] = MappingProxyType(
    dict.fromkeys(("mm", "addmm", "bmm", "baddbmm"), _matrix_product)
    | dict.fromkeys(("mv", "dot"), _vector_product)
    | {"embedding": _embedding}
    | dict.fromkeys(("native_layer_norm", "_fused_rms_norm"), _layer_norm)
    | dict.fromkeys(("convolution", "native_group_norm"), _samples_only)
)
