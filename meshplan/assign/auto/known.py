"""Derive `tp_plan: auto` for models that are built from a config, without a recorded forward.

For these the styles are written down family by family (`ModelGraph.tp_derived`), and tests compare
them with the styles that are derived from the recorded forward of the live model. This module
decides which of them the sizes and the rules of the plan allow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from meshplan.assign.base.pieces import out_width
from meshplan.assign.base.types import LocalUse, Preset, Reason
from meshplan.layout.layout import Piece
from meshplan.model.graph import ModelGraph, ModuleInfo

SUMMED = Reason(
    "auto: replicated and used with sharded values, with its gradient all-reduced over tp"
)


@dataclass(slots=True)
class KnownCuts:
    """Modules of a known model that are sharded, and the reasons why others are replicated.

    Attributes:
        preset: Styles by module fqn.
        uses: Layouts of parameters that code combines with sharded values, by fqn.
        attributes: Local values of attributes, by (module, name).
        whole: The reason why a module is replicated, by module fqn.
        unknown: What would have to be known of the live model, as part of a message; "" if nothing.
    """

    preset: dict[str, Preset] = field(default_factory=dict)
    uses: dict[str, LocalUse] = field(default_factory=dict)
    attributes: dict[tuple[str, str], int] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)
    unknown: str = ""


def known(graph: ModelGraph, size: int, may_cut: Callable[[str], bool]) -> KnownCuts:
    """Return the styles of a model whose graph has `tp_derived`.

    Args:
        graph: The model.
        size: Number of ranks of tp.
        may_cut: Function that returns True if the plan lets `auto` decide about a module.
    """
    out = KnownCuts()
    regions: dict[str, dict[str, str]] = {}
    for fqn in graph.modules:
        word = graph.word_of(fqn, graph.tp_derived)
        if word is not None and word != "vocab":
            regions.setdefault(fqn.rpartition(".")[0], {})[fqn] = word
    for around, words in regions.items():
        _take_region(graph, around, words, size, may_cut, out)
    _take_vocabulary(graph, may_cut, out)
    _leave_experts(graph, may_cut, out)
    return out


def _leave_experts(graph: ModelGraph, may_cut: Callable[[str], bool], out: KnownCuts) -> None:
    """Record that experts and their router are replicated, and why."""
    for tensor in graph.parameters:
        if tensor.dims[0] == "expert" and may_cut(tensor.module):
            is_router = len(tensor.shape) == 2
            why = "meshplan has no sharding rule for _grouped_mm"
            out.whole[tensor.module] = (
                "_softmax mixes elements along one of its dims" if is_router else why
            )


def _take_region(
    graph: ModelGraph,
    around: str,
    words: Mapping[str, str],
    size: int,
    may_cut: Callable[[str], bool],
    out: KnownCuts,
) -> None:
    """Add the styles of the projections of one attention or feed-forward; all of them, or none."""
    opening = {m: w for m, w in words.items() if w in ("colwise", "packed_colwise")}
    closing = {m: w for m, w in words.items() if w == "rowwise"}
    counts = {m: _count(graph, graph.modules[m]) for m in opening}
    smallest = min(counts.values())
    if smallest == 1 < max(counts.values()):
        out.unknown = f"how {around} shares one key-value head among all query heads"
    if smallest % size:
        why = f"its {smallest} heads or features do not divide by tp {size}"
    elif not all(may_cut(fqn) for fqn in words):
        why = "a rule places a module that would be sharded with it"
    else:
        why = ""
    if why:
        out.whole |= dict.fromkeys((m for m in (*opening, *closing) if may_cut(m)), why)
        return
    for fqn, word in words.items():
        info = graph.modules[fqn]
        if word == "replicated_with_grad_allreduce":
            out.uses |= {t.fqn: LocalUse(None, SUMMED) for t in graph.owned(fqn)}
            continue
        partners = closing if fqn in opening else opening
        names = listed(dict.fromkeys(m.rpartition(".")[2] for m in partners))
        count = counts.get(fqn, max(counts.values()))
        fused = f"{info.packed} x " if word == "packed_colwise" else ""
        noun = "heads" if info.head_dim else "features"
        reason = Reason(f"auto: its {fused}{count} {noun} pair with {names}")
        pieces = tuple(Piece(n, size) for n in info.pieces) if word == "packed_colwise" else ()
        out.preset[fqn] = Preset(word, reason, is_proved=True, pieces=pieces)
        # GPT-2's code splits the output of its fused projection by the attribute `split_size`.
        if pieces and "split_size" in graph.modules[around].sizes:
            whole = graph.modules[around].sizes["split_size"]
            out.attributes[around, "split_size"] = whole // size


def _count(graph: ModelGraph, info: ModuleInfo) -> int:
    """Return the number of heads of a projection, or of output features if it has no heads."""
    return (out_width(graph, info) or 1) // info.packed // (info.head_dim or 1)


def _take_vocabulary(graph: ModelGraph, may_cut: Callable[[str], bool], out: KnownCuts) -> None:
    """Add the style vocab to the token embedding and to the output projection."""
    tables = [m for m in graph.modules.values() if m.kind == "embedding"]
    rows: set[int] = set()
    for info in tables:
        (weight,) = graph.owned(info.fqn)
        owners = {name.rpartition(".")[0] for name in weight.names}
        is_token = graph.word_of(info.fqn, graph.tp_derived) == "vocab"
        if not is_token or weight.shape[0] <= weight.shape[1]:
            out.whole |= (
                {info.fqn: "its table has few rows, or is not indexed by tokens"}
                if may_cut(info.fqn)
                else {}
            )
        elif not all(may_cut(owner) for owner in owners):
            why = "a rule places a module that would be sharded with it"
            out.whole |= {info.fqn: why} if may_cut(info.fqn) else {}
        else:
            rows.add(weight.shape[0])
            for owner in owners:
                _gather(graph, owner, out)
    for fqn, info in graph.modules.items():
        if info.kind != "linear" or graph.word_of(fqn, graph.tp_derived) != "vocab":
            continue
        if fqn in out.preset or not may_cut(fqn):
            continue
        if graph.owned(fqn)[0].shape[0] in rows:
            _gather(graph, fqn, out)
        elif not any(fqn in (n.rpartition(".")[0] for n in t.names) for i in tables
                     for t in graph.owned(i.fqn)):  # fmt: skip
            out.whole[fqn] = "the token embedding is replicated"


def _gather(graph: ModelGraph, fqn: str, out: KnownCuts) -> None:
    is_table = graph.modules[fqn].kind == "embedding"
    why = "its rows are the vocabulary" if is_table else "it scores the vocabulary"
    out.preset[fqn] = Preset("vocab", Reason(f"auto: {why}"), is_proved=True)


def listed(names: Iterable[str]) -> str:
    """Return names joined as in "q_proj, k_proj and v_proj"."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
