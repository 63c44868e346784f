"""Dims of operations that only move elements: views, transposes, slices, joins, look-ups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from meshplan.model.dims.factors import Dim
from meshplan.model.dims.linker import Dims, Linker, argument, base_name, positions
from meshplan.model.flow import Op


def _view(linker: Linker, op: Op) -> None:
    shape = linker.flow.values[op.outputs[0]].shape
    reason = "a view regroups one of its dims unevenly"
    linker.give(op.outputs[0], linker.factors.regroup(linker.of(op.args[0]), shape, reason))


def _transpose(linker: Linker, op: Op) -> None:
    dims = list(linker.of(op.args[0]))
    if base_name(op) == "t":
        dims.reverse()
    else:
        one, other = (positions(a, len(dims))[0] for a in op.args[1:3])
        dims[one], dims[other] = dims[other], dims[one]
    linker.give(op.outputs[0], dims)


def _permute(linker: Linker, op: Op) -> None:
    dims = linker.of(op.args[0])
    linker.give(op.outputs[0], (dims[i] for i in positions(op.args[1], len(dims))))


def _unsqueeze(linker: Linker, op: Op) -> None:
    dims = list(linker.of(op.args[0]))
    dims.insert(op.args[1] % (len(dims) + 1), ())
    linker.give(op.outputs[0], dims)


def _squeeze(linker: Linker, op: Op) -> None:
    dims, shape = linker.of_shape(op.args[0])
    at = positions(argument(op, 1, "dim"), len(shape))
    kept = (dim for d, dim in enumerate(dims) if d not in at or shape[d] != 1)
    linker.give(op.outputs[0], kept)


def _expand(linker: Linker, op: Op) -> None:
    """Give each expanded dim a new factor, because its elements are repetitions."""
    dims = linker.of(op.args[0])
    shape = linker.flow.values[op.outputs[0]].shape
    old: Dims = ((),) * (len(shape) - len(dims)) + dims
    new = (dim or linker.factors.new(size) for dim, size in zip(old, shape, strict=True))
    linker.give(op.outputs[0], new)


def _repeat(linker: Linker, op: Op) -> None:
    """Add a new outer factor, the number of repetitions, to each dim."""
    dims, repeats = linker.of(op.args[0]), tuple(op.args[1])
    old: Dims = ((),) * (len(repeats) - len(dims)) + dims
    new = ((*linker.factors.new(n), *dim) for dim, n in zip(old, repeats, strict=True))
    linker.give(op.outputs[0], new)


def _select(linker: Linker, op: Op) -> None:
    dims = list(linker.of(op.args[0]))
    at = positions(argument(op, 1, "dim", 0), len(dims))[0]
    linker.factors.block(dims.pop(at), f"{base_name(op)} picks indices of one of its dims")
    for value in op.outputs:  # unbind has several outputs
        linker.give(value, dims)


def _pieces(linker: Linker, op: Op, dim: int, cuts: list[tuple[int, int]]) -> None:
    """Set the dims of outputs that are slices of one dim of an input.

    If the slices are equal parts of the dim, it is the product of a blocked outer factor, which
    selects the part, and an inner factor, which each output has. Otherwise the dim is blocked.

    Args:
        linker: The dims so far.
        op: The operation.
        dim: The dim that is sliced.
        cuts: Range (start, stop) of each output.
    """
    dims = list(linker.of(op.args[0]))
    size = linker.factors.size(dims[dim])
    lengths = {stop - start for start, stop in cuts}
    length = next(iter(lengths))
    even = len(lengths) == 1 and 0 < length < size and size % length == 0
    even = even and all(start % length == 0 for start, _ in cuts)
    inner: Dim | None = None
    if even:
        outer, inner = linker.factors.regroup(
            [dims[dim]], [size // length, length], "a slice splits one of its dims unevenly"
        )
        linker.factors.block(outer, "the pieces of one of its dims are used separately")
    for value, (start, stop) in zip(op.outputs, cuts, strict=True):
        kept: Dim
        if stop - start == size:
            kept = dims[dim]
        elif inner is not None:
            kept = inner
        else:
            reason = "a slice takes a part of one of its dims"
            linker.factors.block(dims[dim], reason)
            kept = linker.factors.new(stop - start, reason)
        linker.give(value, [*dims[:dim], kept, *dims[dim + 1 :]])


def _slice(linker: Linker, op: Op) -> None:
    shape = linker.value(op.args[0]).shape
    dim = positions(argument(op, 1, "dim", 0), len(shape))[0]
    size = shape[dim]
    start, stop, step = (
        argument(op, 2, "start"), argument(op, 3, "end"), argument(op, 4, "step", 1),
    )  # fmt: skip
    start = 0 if start is None else min(max(start + size if start < 0 else start, 0), size)
    stop = size if stop is None else min(max(stop + size if stop < 0 else stop, start), size)
    if step == 1:
        _pieces(linker, op, dim, [(start, stop)])
        return
    reason = "a slice with a step reads one of its dims"
    dims = list(linker.of(op.args[0]))
    linker.factors.block(dims[dim], reason)
    dims[dim] = linker.factors.new(linker.flow.values[op.outputs[0]].shape[dim], reason)
    linker.give(op.outputs[0], dims)


def _split(linker: Linker, op: Op) -> None:
    shape = linker.value(op.args[0]).shape
    dim = positions(argument(op, 2, "dim", 0), len(shape))[0]
    cuts, start = [], 0
    for value in op.outputs:
        length = linker.flow.values[value].shape[dim]
        cuts.append((start, start + length))
        start += length
    _pieces(linker, op, dim, cuts)


def _join(linker: Linker, op: Op) -> None:
    """Set the dims of a cat: equal inputs share an inner factor, unequal ones are blocked."""
    parts = [linker.of_shape(item) for item in op.args[0]]
    shape = linker.flow.values[op.outputs[0]].shape
    filled = [(dims, sizes) for dims, sizes in parts if len(sizes) == len(shape)]
    if len(filled) != len(parts):  # torch.cat accepts an empty (0,) for historical reasons.
        linker.block_all(op, "cat joins tensors of different numbers of dims")
        return
    dim = positions(argument(op, 1, "dim", 0), len(shape))[0]
    reason = "cat combines dims that are split into different factors"
    without = [((*d[:dim], (), *d[dim + 1 :]), s) for d, s in parts]
    out = list(linker.broadcast(without, reason))
    if len(parts) == 1:
        out[dim] = parts[0][0][dim]
    elif len({sizes[dim] for _, sizes in parts}) == 1:
        first = parts[0][0][dim]
        for dims, _ in parts[1:]:
            linker.factors.unify(first, dims[dim], reason)
        out[dim] = (
            *linker.factors.new(len(parts), "cat joins pieces along one of its dims"),
            *first,
        )
    else:
        reason = "cat joins unequal pieces along one of its dims"
        linker.block((dims[dim] for dims, _ in parts), reason)
        out[dim] = linker.factors.new(shape[dim], reason)
    linker.give(op.outputs[0], out)


def _stack(linker: Linker, op: Op) -> None:
    parts = [linker.of_shape(item) for item in op.args[0]]
    out = list(linker.broadcast(parts, "stack combines dims that are split into different factors"))
    at = argument(op, 1, "dim", 0) % (len(out) + 1)
    out.insert(at, linker.factors.new(len(parts), "stack joins tensors along one of its dims"))
    linker.give(op.outputs[0], out)


def _index(linker: Linker, op: Op) -> None:
    """Set the dims of x[..., indices, ...]: indexed dims are blocked, the other dims are kept."""
    dims = linker.of(op.args[0])
    indices = tuple(op.args[1])
    picked = [place for place, item in enumerate(indices) if item is not None]
    if any(linker.value(indices[p]).dtype in ("bool", "uint8") for p in picked):
        linker.block_all(op, "it is indexed by a boolean mask")
        return
    linker.block((dims[p] for p in picked), "one of its dims is indexed by a tensor")
    numbers = linker.broadcast(
        [linker.of_shape(indices[p]) for p in picked],
        "indexing combines dims that are split into different factors",
    )
    rest = [dim for place, dim in enumerate(dims) if place not in picked]
    together = picked == list(range(picked[0], picked[-1] + 1))
    at = picked[0] if together else 0
    linker.give(op.outputs[0], [*rest[:at], *numbers, *rest[at:]])


def _index_select(linker: Linker, op: Op) -> None:
    dims = list(linker.of(op.args[0]))
    at = positions(op.args[1], len(dims))[0]
    linker.factors.block(dims[at], "one of its dims is indexed by a tensor")
    dims[at] = (*linker.of(op.args[2]), ())[0]
    linker.give(op.outputs[0], dims)


def _gather(linker: Linker, op: Op) -> None:
    """Block the dim along which gather picks; link the other dims where their sizes are equal."""
    dims, shape = linker.of_shape(op.args[0])
    index, wanted = linker.of_shape(op.args[2])
    at = positions(op.args[1], len(shape))[0]
    reason = "one of its dims is indexed by a tensor"
    for place, (one, other) in enumerate(zip(dims, index, strict=True)):
        if place != at and shape[place] == wanted[place]:
            linker.factors.unify(one, other, reason)
        else:
            linker.block((one, other), reason)
    linker.give(op.outputs[0], index)


def _pad(linker: Linker, op: Op) -> None:
    dims, shape = linker.of_shape(op.args[0])
    after = linker.flow.values[op.outputs[0]].shape
    amounts = tuple(op.args[1])
    padded = {len(shape) - 1 - i // 2 for i, amount in enumerate(amounts) if amount}
    reason = "padding shifts one of its dims"
    linker.block((dims[d] for d in padded), reason)
    linker.give(op.outputs[0], (
        linker.factors.new(after[d], reason) if d in padded else dim for d, dim in enumerate(dims)
    ))  # fmt: skip


def _triangle(linker: Linker, op: Op) -> None:
    dims = linker.of(op.args[0])
    linker.block(dims[-2:], f"{base_name(op)} masks two of its dims by position")
    linker.give(op.outputs[0], dims)


SHAPING: Final[Mapping[str, Callable[[Linker, Op], None]]] = MappingProxyType(
    dict.fromkeys(("view", "_unsafe_view", "reshape", "_reshape_alias", "view_copy"), _view)
    | dict.fromkeys(("transpose", "t", "transpose_"), _transpose)
    | dict.fromkeys(("select", "unbind"), _select)
    | dict.fromkeys(("split", "split_with_sizes"), _split)
    | dict.fromkeys(("tril", "triu"), _triangle)
    | {
        "permute": _permute, "unsqueeze": _unsqueeze, "squeeze": _squeeze, "expand": _expand,
        "repeat": _repeat, "slice": _slice, "cat": _join, "stack": _stack, "index": _index,
        "index_select": _index_select, "gather": _gather, "constant_pad_nd": _pad,
    }
)  # fmt: skip
