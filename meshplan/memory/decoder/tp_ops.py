"""Modules that tp shards, as ops: local computation, with collectives on inputs and outputs.

Two tables follow `styles.STYLES`. `_ENTERS` has the (layout outside, layout computed with) pairs of
inputs for which there are ops, `_LEAVES` the pairs of outputs. A style with other pairs raises a
`PlanError` that names the style.

Source: `runtime.apply.tensor_parallel.tensor_parallel`, whose hooks these ops model; torch 2.13,
distributed/tensor/_redistribute.py and placement_types.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from meshplan.errors import PlanError, Problem
from meshplan.layout.layout import Piece
from meshplan.layout.styles import GATHERED, LOGITS, Style
from meshplan.memory.decoder.sp_boundary import gather, scatter
from meshplan.memory.tape.op import Grad, TapeOp
from meshplan.memory.tape.ops import TapeBuilder
from meshplan.model.graph import pattern_of

_ID: Final = 8
_WHOLE: Final = "R"
_PARTS: Final = "S(1)"
STREAM_NORMS: Final = (
    "input_layernorm", "post_attention_layernorm", "norm", "ln_1", "ln_2", "ln_f",
)  # fmt: skip
"""Norms over a token's features, which can be computed on a shard of the sequence."""
HEAD_NORMS: Final = ("q_norm", "k_norm")
"""Norms over a head's features, which can be computed on a shard of the heads."""


@dataclass(frozen=True, slots=True)
class TpPlanOnTape:
    """The tensor-parallel styles of a model's modules.

    Args:
        tp: Number of ranks over which styles shard.
        styles: Style of each module, by fqn, or by fqn with `*` for the numbers of blocks.
        pieces: Projections fused in each module that has several, by fqn.
        whole: Parameters of such modules that every rank stores whole, to compute with its rows
            only.
        added: Parameters that the model's code combines with shards, so that each rank computes a
            partial sum of their gradients.
        has_stream: If True, activations between the styled modules of blocks are sharded along the
            sequence.
        ends: If True, that sharding ends after the last block; otherwise at the input of the head.
    """

    tp: int = 1
    styles: Mapping[str, Style] = field(default_factory=dict)
    pieces: Mapping[str, tuple[Piece, ...]] = field(default_factory=dict)
    whole: frozenset[str] = frozenset()
    added: frozenset[str] = frozenset()
    has_stream: bool = False
    ends: bool = False

    def of(self, fqn: str) -> Style | None:
        """Return the style of a module; None if tp does not shard it."""
        if self.tp == 1:
            return None
        return self.styles.get(fqn) or self.styles.get(pattern_of(fqn))

    def of_any_block(self) -> TpPlanOnTape:
        """Return the plan with every style also listed for blocks of any number.

        This requires that blocks made of the same modules have the same styles.
        """
        return replace(
            self,
            styles={pattern_of(f): style for f, style in self.styles.items()} | {**self.styles},
            pieces={pattern_of(f): pieces for f, pieces in self.pieces.items()} | {**self.pieces},
            whole=self.whole | {*map(pattern_of, self.whole)},
            added=self.added | {*map(pattern_of, self.added)},
        )

    def pieces_of(self, fqn: str) -> tuple[Piece, ...]:
        """Return the projections fused in a module; () if the module is a single projection."""
        return self.pieces.get(fqn) or self.pieces.get(pattern_of(fqn), ())

    def is_whole(self, parameter: str) -> bool:
        """Return True if tp leaves the parameter unsharded."""
        return parameter in self.whole or pattern_of(parameter) in self.whole

    def check(self) -> Iterator[Problem]:
        """Yield a problem for each style or parameter that there are no ops for."""
        reported: set[str] = set()
        for fqn, style in self.styles.items() if self.tp > 1 else ():
            known = self.spelled(style.input) in _ENTERS and self.spelled(style.output) in _LEAVES
            known = known and not style.gradient and style.kind != "mha"
            if style.kind == "norm":
                known = known and fqn.rpartition(".")[2] in HEAD_NORMS
            if not known and style != LOGITS and style.name not in reported:
                reported.add(style.name)
                yield Problem(f"the style '{style.name}' (of {fqn})")
        norms = (*HEAD_NORMS, *STREAM_NORMS) if self.has_stream else HEAD_NORMS
        for fqn in self.added if self.tp > 1 else ():
            if fqn.split(".")[-2] not in norms:
                yield Problem(f"{fqn}, which the model's code combines with sharded tensors")
                return

    def adds_up(self, fqn: str) -> bool:
        """Return True if each rank computes a partial sum of the gradients of the norm `fqn`."""
        added = {f"{fqn}.weight", pattern_of(f"{fqn}.weight")}
        return self.of(fqn) is not None or not added.isdisjoint(self.added)

    def spelled(self, flow: tuple[str, str]) -> tuple[str, str]:
        """Return a pair of layouts with "outside" replaced by "R", or "S(1)" with `has_stream`."""
        outside = _PARTS if self.has_stream else _WHOLE
        first, second = (outside if word == "outside" else word for word in flow)
        return first, second


@dataclass(slots=True)
class Entered:
    """Inputs of the styled modules in one parent module, each replicated over tp only once."""

    known: dict[int, int] = field(default_factory=dict)

    def all_reduced(self, w: TapeBuilder, x: int, tp: int) -> int:
        """Return `x`, replicated over tp; its gradients are added up first, then all-reduced."""
        if x not in self.known:
            self.known[x] = w.enter(x, tp)
            # torch does not sum gradients that are DTensors in place.
            w.tape.sums_apart.add(self.known[x])
        return self.known[x]


def _as_it_is(w: TapeBuilder, x: int, tp: int) -> int:
    return x


def _all_gather(w: TapeBuilder, x: int, tp: int) -> int:
    """Append an all-gather of features; the gradient is this rank's slice of the whole one.

    torch gathers along dim 0, and then copies the result to have features in the last dim.
    """
    size = w.size(x) * tp
    return w.row(
        "all_gather", (x,), size, workspace_bytes=size, is_sent=True, grads=(Grad(x, w.size(x)),)
    )


_ENTERS: Final = frozenset(
    {("R", "R"), (GATHERED, "R"), (_PARTS, "R"), ("S(-1)", "S(-1)"), ("S(-2)", "S(-2)")}
)
_LEAVES: Final[Mapping[tuple[str, str], Callable[[TapeBuilder, int, int], int]]] = MappingProxyType(
    {
        ("S(-1)", "S(-1)"): _as_it_is,
        ("S(-2)", "S(-2)"): _as_it_is,
        ("S(-1)", "R"): _all_gather,
        ("P", "R"): TapeBuilder.all_reduce,
        ("P", _PARTS): scatter,
    }
)


def project(
    w: TapeBuilder,
    styled: TpPlanOnTape,
    entered: Entered,
    x: int,
    into: int,
    out: int,
    name: str,
    *,
    bias: bool = False,
    weight: str = "",
) -> int:
    """Append a linear module, with the collectives of its style, and return its output.

    Args:
        w: The builder to append to, at the parent module.
        styled: Styles of the model's modules.
        entered: Inputs of the modules in the same parent that are replicated over tp already.
        x: Input of the module.
        into, out: Input and output features of the whole module.
        name: Name of the layer inside the current module.
        bias: If True, the layer has a bias.
        weight: Fqn of the weight, if the weight belongs to another module.

    Raises:
        PlanError: The features do not divide by tp, or `x` has other shards than the style needs.
    """
    fqn = f"{w.module}.{name}" if w.module else name
    style, tp = styled.of(fqn), styled.tp
    if style is None:
        return w.linear(_of_width(w, x, into, fqn), into, out, name, bias=bias, weight=weight)
    pieces = styled.pieces_of(fqn)
    if style.input[1] == "S(-1)":
        into = _part(into, tp, fqn)
    if style.output[0] == "S(-1)":
        out = sum(piece.part for piece in pieces) or _part(out, tp, fqn)
    enters = styled.spelled(style.input)
    if enters[0] == _PARTS:
        x = gather(w, x, tp)
    x = _of_width(w, x, into, fqn)
    if enters == ("R", "R"):
        x = entered.all_reduced(w, x, tp)
    parts = {}
    for leaf, size in (("weight", into * out), ("bias", out)):
        if styled.is_whole(f"{fqn}.{leaf}"):
            parts[f"{fqn}.{leaf}"] = _own_part(w.at(fqn), leaf, size, pieces)
    # Each rank adds a fraction of the bias, so that the sum over ranks contains the bias once.
    share = out * w.parameter_bytes if bias and style.output[0] == "P" else 0
    y = w.linear(
        x, into, out, name, bias=bias, weight=weight, parts=parts, workspace_bytes=share,
        is_addend=style.output[0] == "P",
    )  # fmt: skip
    if style != LOGITS:
        y = _LEAVES[styled.spelled(style.output)](w, y, tp)
        w.touch(x)  # `Module.__call__` references x until its hooks are done.
    return y


def _own_part(w: TapeBuilder, leaf: str, numel: int, pieces: tuple[Piece, ...]) -> int:
    """Append a concatenation of this rank's rows of every projection fused in a parameter.

    In backward, each slice of rows has a gradient of the whole parameter's size, with zeros
    elsewhere. These gradients are added up, then summed over ranks.
    """
    part, fqn = numel * w.parameter_bytes, f"{w.module}.{leaf}"
    whole = part // sum(p.part for p in pieces) * sum(p.size for p in pieces)
    own = w.row(
        "cat", (), part, parameters=((fqn, whole),),
        workspace_backward_bytes=2 * whole if len(pieces) > 1 else 0,
    )  # fmt: skip
    w.tape.lay(fqn, whole)
    return own


def look_up(
    w: TapeBuilder, styled: TpPlanOnTape, ids: int, vocab: int, width: int, name: str
) -> int:
    """Append an embedding, which tp may shard by rows (vocabulary) or by features.

    If it is sharded by rows, tokens whose row is on another rank give zeros.

    Args:
        w: The builder to append to, at the parent module.
        styled: Styles of the model's modules.
        ids: Token ids.
        vocab, width: Rows and columns of the whole weight.
        name: Name of the embedding inside the current module.
    """
    fqn = f"{w.module}.{name}" if w.module else name
    style, tp = styled.of(fqn), styled.tp
    if style is None:
        return w.embedding(ids, vocab, width, name)
    if style.cut_dim == "vocab":
        found = _own_rows(w, ids, _part(vocab, tp, fqn), width, name)
    else:
        found = w.embedding(ids, vocab, _part(width, tp, fqn), name)
    return _LEAVES[styled.spelled(style.output)](w.at(fqn), found, tp)


def _own_rows(w: TapeBuilder, ids: int, rows: int, width: int, name: str) -> int:
    """Append `runtime.apply.tensor_parallel.local_tensors.look_up_own_rows`; return its output."""
    at, tokens = w.at(f"{w.module}.{name}" if w.module else name), w.size(ids) // _ID
    own = at.row("sub", (ids,), tokens * _ID)
    below, above = (at.row(op, (own,), tokens) for op in ("lt", "ge"))
    elsewhere = at.row("bitwise_or", (below, above), tokens)
    at.write("masked_fill_", own, elsewhere)
    found = w.embedding(own, rows, width, name)
    size = w.size(found)
    out, grads = w.tape.value(size, of=found), (Grad(found, size),)
    w.tape.add(TapeOp("masked_fill_", at.module, (found, elsewhere), (out,), (elsewhere,), grads))
    w.touch(ids, own)
    return out


def _part(size: int, tp: int, fqn: str) -> int:
    """Return a rank's share of a dim of this size; raise a PlanError if shares are unequal."""
    if size % tp:
        what = f"{fqn} would have shards of different sizes: {size} does not divide by tp {tp}"
        entry = "model: {entry: PKG.MOD:FN}"
        fix = f"pad it to a multiple of {tp}, or write {entry} in the plan, to trace it with torch"
        raise PlanError(Problem(what, fix=fix))
    return size // tp


def _of_width(w: TapeBuilder, x: int, width: int, fqn: str) -> int:
    """Return `x`; raise a PlanError if `x` does not have `width` features.

    With another width, the model's code would fail or compute something else.
    """
    if w.size(x) != w.tokens * width * w.element_bytes:
        raise style_mismatch(fqn)
    return x


def style_mismatch(fqn: str) -> PlanError:
    """Return the error for styles of neighbouring modules that do not fit each other."""
    return PlanError(
        Problem(
            f"a tensor that reaches {fqn} is not sharded as its computation expects",
            fix="give its input and output projections tp styles that match, as tp_plan: hf does",
        )
    )
