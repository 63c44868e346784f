"""Divide one dim of a module over tp: as a whole, piece by piece, or with shared kv heads.

If code outside the module sees the shards, no head may be divided. Projections fused in one weight
are sharded one by one. If there are fewer kv heads than ranks, neighbouring ranks compute the same
kv head.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshplan.assign.base.types import Preset
from meshplan.errors import Origin, Problem
from meshplan.layout.layout import Piece
from meshplan.layout.styles import Style, parse_packed
from meshplan.model.graph import ModelGraph, ModuleInfo, TensorInfo


def share_out(
    graph: ModelGraph, info: ModuleInfo, style: Style, preset: Preset, size: int, tp: int
) -> tuple[Piece, ...] | Problem:
    """Return how tp divides a dim of this size: its pieces, or () to shard the dim as a whole.

    If the style gathers the output in the module, every division is possible, because no code sees
    the shards. If the division is impossible, return the problem.

    Args:
        graph: The model.
        info: The module.
        style: The style, which determines the dim.
        preset: The style's name as stated, and the reason.
        size: Size of the dim.
        tp: Number of ranks of tp.
    """
    if "S(-1)" not in (style.input[0], style.output[1]):
        return ()
    if style.name == "packed_colwise":
        return _packed(info, preset, size, tp)
    if info.packed > 1 and style.cut_dim == "out":
        return Problem(
            f"{info.fqn} ({info.type}) fuses {info.packed} projections in one weight, and "
            f"'{preset.word}' would cut across them",
            preset.reason.origin,
            "use packed_colwise",
        )
    heads = size // info.head_dim if info.head_dim else 0
    if heads and size % heads == 0 and tp % heads == 0 and heads < tp and style.cut_dim == "out":
        shared = any(n % tp == 0 for n in _heads_beside(graph, info))
        alike = sum(n == heads for n in _heads_beside(graph, info))
        if shared and alike == 1:  # `info` and one sibling: they are the key and value projections.
            return (Piece(size, heads),)
    if heads and heads % tp:
        return Problem(
            f"{info.fqn}: {heads} heads of {info.head_dim} do not divide by tp {tp}",
            preset.reason.origin,
            divisor_fix(heads, tp, "q, k, v and the output projection"),
        )
    if size % tp:
        return Problem(
            f"{info.fqn}: its dim '{style.cut_dim}' of size {size} does not divide by tp {tp}",
            preset.reason.origin,
            divisor_fix(size, tp, "this module and its counterparts"),
        )
    return ()


def _heads_beside(graph: ModelGraph, info: ModuleInfo) -> Iterator[int]:
    """Yield the number of heads of each other projection of the same attention module."""
    for other in graph.children(info.fqn.rpartition(".")[0]):
        if other.fqn != info.fqn and other.head_dim == info.head_dim:
            width = out_width(graph, other)
            if width is not None:
                yield width // (info.head_dim or 1)


def out_width(graph: ModelGraph, info: ModuleInfo) -> int | None:
    """Return the size of the output dim of a projection; None for other modules."""
    weight = next((t for t in graph.owned(info.fqn) if "out" in t.dims), None)
    return weight.shape[weight.dims.index("out")] if weight is not None else None


def _packed(info: ModuleInfo, preset: Preset, size: int, tp: int) -> tuple[Piece, ...] | Problem:
    """Return the pieces of a fused weight, each of which is sharded separately, or the problem."""
    origin = preset.reason.origin
    _, stated = parse_packed(preset.word)
    sizes = stated or info.pieces
    if len(stated) == 1:
        sizes = (size // stated[0],) * stated[0]
    if not sizes:
        return Problem(
            f"the plan does not state which projections {info.fqn} ({info.type}) fuses",
            origin,
            "write the number of equal pieces, packed_colwise(3), or their sizes, "
            "'packed_colwise(4096, 1024, 1024)', or use colwise if the module fuses none",
        )
    if sum(sizes) != size:
        total = f"the sum of {' and '.join(map(str, sizes))}"
        what = f"divisible into {stated[0]} equal pieces" if len(stated) == 1 else total
        return Problem(
            f"{info.fqn}: its output dim of size {size} is not {what}",
            origin,
            f"state pieces that add up to {size}",
        )
    pieces = []
    for number, piece in enumerate(sizes):
        unit = info.head_dim if info.head_dim and piece % info.head_dim == 0 else 1
        count = piece // unit
        # Keys and values are the last two pieces, equal in size and smaller than the queries.
        is_kv = len(sizes) == 3 and number and sizes[1] == sizes[2] < sizes[0] and unit > 1
        if count % tp and not (is_kv and tp % count == 0):
            noun = f"{count} heads of {unit}" if unit > 1 else f"a piece of size {piece}"
            return Problem(
                f"{info.fqn}: {noun} {'do' if unit > 1 else 'does'} not divide by tp {tp}",
                origin,
                divisor_fix(count, tp, "this module and its counterparts"),
            )
        pieces.append(Piece(piece, min(count, tp)))
    return tuple(pieces)


def are_equal(pieces: tuple[Piece, ...], tp: int) -> bool:
    """Return True if one packed `Layout` can express the division.

    This requires two or more equal pieces, with a different part of them for each rank.
    """
    return len(set(pieces)) == 1 and pieces[0].parts == tp and len(pieces) > 1


def divisor_fix(size: int, tp: int, whole: str) -> str:
    """Return a fix: the largest smaller tp that divides `size`, or to leave `whole` out of tp."""
    divisor = max((d for d in range(1, tp) if size % d == 0), default=1)
    return f"use tp: {divisor}" if divisor > 1 else f"leave {whole} out of tp together"


def pieces_cut_twice(tensor: TensorInfo, dim: int, origin: Origin | None) -> Problem:
    """Return the problem of a plan in which dp_shard shards a dim whose pieces tp shards."""
    return Problem(
        f"{tensor.fqn}: tp shards each piece of dim {dim}, so dp_shard must shard another dim",
        origin,
        f"use S({1 - dim})",
    )
