"""The tp axis: collect the style of each module, and check that it can be applied there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from meshplan.assign.base.cascade import Cascade, Stated
from meshplan.assign.base.missing_axis import no_axis
from meshplan.assign.base.pieces import are_equal, divisor_fix, out_width, share_out
from meshplan.assign.base.tensor_cuts import TensorCut, TensorParallel
from meshplan.assign.base.types import LocalAttribute, Preset, Reason, StyleUse
from meshplan.assign.tensor_parallel.pairs import check_pairs, check_shared, check_tied
from meshplan.errors import Origin, Problem
from meshplan.layout.layout import Layout, Piece
from meshplan.layout.mesh import Mesh
from meshplan.layout.styles import (
    PLANNED_STYLES,
    WEIGHT_DIMS,
    Style,
    dims_of,
    kinds_of,
    parse_placement,
    style_for,
)
from meshplan.model.graph import ModelGraph, ModuleInfo, TensorInfo
from meshplan.model.heads import ROLES, role
from meshplan.spec.match import any_number
from meshplan.spec.spec import AUTO, Spec

_FIELD = "place.tp"


def assign_tp(
    spec: Spec,
    graph: ModelGraph,
    cascade: Cascade,
    mesh: Mesh,
    preset: Mapping[str, Preset] = MappingProxyType({}),
) -> TensorParallel:
    """Return the styles from rules and `preset`, each checked, with the layouts that they imply.

    Args:
        spec: The plan.
        graph: The model.
        cascade: The rules of the plan, matched against the model.
        mesh: The mesh.
        preset: Styles from `tp_plan`, by module fqn. They are overridden by a rule that matches the
            module, and by a rule that states `R` for a module around it.
    """
    out = TensorParallel()
    by_rules = dict(cascade.modules_with(_FIELD))
    if "tp" not in mesh.names:
        by_rule = {s.rule.index: s for s in by_rules.values()}
        for tensor in graph.parameters:
            found = cascade.param(tensor, _FIELD)
            if found:
                by_rule[found.rule.index] = found
        out.problems += [no_axis("tp", mesh, spec.origin(s.path)) for s in by_rule.values()]
        return out
    stated = {fqn: _stated_preset(spec, s) for fqn, s in by_rules.items() if s.value != AUTO}
    for fqn, entry in preset.items():
        around = cascade.inherited(fqn, _FIELD)
        if fqn not in stated and (around is None or around.value != "R"):
            stated[fqn] = entry
    for fqn in graph.modules:
        if fqn in stated:
            info = graph.modules[fqn]
            _assign_module(graph, mesh, info, stated[fqn], out, spec.sequence_parallel)
    for tensor in graph.parameters:
        found = cascade.param(tensor, _FIELD)
        if found:
            _assign_param(graph, tensor, _stated_preset(spec, found), out)
    order: dict[Origin | None, int] = {spec.origin(s.path): s.rule.index for s in by_rules.values()}
    out.problems.sort(key=lambda problem: order.get(problem.origin, len(spec.rules)))
    proved = {fqn for fqn, entry in stated.items() if entry.is_proved}
    check_tied(graph, mesh, out, proved)
    check_pairs(mesh, out, proved)
    check_shared(graph, mesh, out, proved)
    local_attributes(graph, mesh, out)
    is_off = spec.tp_plan == "none" and not any("tp" in rule.place for rule in spec.rules)
    if mesh.size("tp") > 1 and is_off:
        out.problems.append(
            Problem(
                f"the tp axis of size {mesh.size('tp')} shards nothing: "
                "no rule places a module on tp",
                spec.origin("mesh.tp"),
                f"set tp_plan: auto{_first_rule(graph)}, or remove tp from the mesh",
            )
        )
    return out


def _first_rule(graph: ModelGraph) -> str:
    """Return ", or add rules such as …" with a linear layer of the blocks; "" if there is none."""
    linear = [fqn for fqn, info in graph.modules.items() if info.kind == "linear"]
    inside = [fqn for fqn in linear if fqn.startswith(tuple(f"{b}." for b in graph.blocks()))]
    for fqn in (inside or linear)[:1]:
        return f", or add rules such as {{match: '{any_number(fqn)}', place: {{tp: colwise}}}}"
    return ""


def _stated_preset(spec: Spec, statement: Stated) -> Preset:
    """Return the statement of a rule as a `Preset`."""
    return Preset(str(statement.value), Reason(statement.text, spec.origin(statement.path)))


def _assign_module(
    graph: ModelGraph,
    mesh: Mesh,
    info: ModuleInfo,
    entry: Preset,
    out: TensorParallel,
    sequence_parallel: bool,
) -> None:
    word, reason = entry.word, entry.reason
    if word in PLANNED_STYLES:
        return  # Reported by `not_yet`.
    owned = [t for t in graph.owned(info.fqn) if not t.is_buffer]
    if word == "R":
        for tensor in owned:
            whole = Layout.whole(len(tensor.shape))
            _record(out, tensor, TensorCut(whole, False, reason))
        return
    style = style_for(word, info.kind)
    if style is None:
        dim = parse_placement(word)
        if dim is not None and owned and info.kind not in ("linear", "conv1d", "embedding"):
            for tensor in owned:
                _cut_param(graph, tensor, dim, reason, out)
            return
        out.report(_cannot_take(graph, info, entry))
        return
    pieces: tuple[Piece, ...] | Problem = entry.pieces
    if style.cut_dim and not entry.is_proved:
        pieces = _share_out(graph, mesh, info, style, entry, sequence_parallel)
    if isinstance(pieces, Problem):
        out.report(pieces)
        return
    out.styles[info.fqn] = StyleUse(style, "tp", reason, pieces, is_proved=entry.is_proved)
    if info.kind == "mha":
        for tensor, layout in multihead_cuts(graph, info, mesh.size("dp_shard")):
            _record(out, tensor, TensorCut(layout, False, reason))
    else:
        _cut(graph, mesh, info, out.styles[info.fqn], out)


def _dims(tensor: TensorInfo, owner: ModuleInfo) -> tuple[str, ...]:
    """Return the names of a tensor's dims in the module `owner`.

    A tied tensor belongs to several modules, and its dims may have another name in each.
    """
    names = {n.rpartition(".")[0]: n.rpartition(".")[2] for n in tensor.names}
    leaf = next(names[m] for m in (owner.fqn, *owner.aliases) if m in names)
    return dims_of(owner.kind, leaf, len(tensor.shape))


def _cannot_take(graph: ModelGraph, info: ModuleInfo, entry: Preset) -> Problem:
    word = entry.word
    name = info.fqn or "the root module"
    dim = parse_placement(word)
    if dim is not None and info.kind in WEIGHT_DIMS:
        ndim = len(WEIGHT_DIMS[info.kind])
        what = f"the weight of {name} has {ndim} dims, so it has no dim {dim}"
        return Problem(what, entry.reason.origin, f"use S(0) to S({ndim - 1})")
    kinds = kinds_of(word) or ("linear", "conv1d", "embedding")
    below = [
        m.fqn
        for m in graph.modules.values()
        if m.kind in kinds and (not info.fqn or m.fqn.startswith(info.fqn + "."))
    ]
    origin = entry.reason.origin
    if origin is not None and origin.path == "tp_plan":
        # Such as a projection with adapters of peft around it, of which the model's plan knows
        # nothing: what adds up inside needs styles that fit together.
        fix = "use tp_plan: auto, which follows the recorded forward"
    elif below:
        fix = f"match a module that can, such as '{below[0]}'"
    else:
        fix = "remove the placement, or state 'R'"
    a = "an" if kinds[0][0] in "aeiou" else "a"
    return Problem(
        f"'{word}' cannot be applied to {name} ({info.type}): it needs {a} {_either(kinds)} module",
        origin,
        fix,
    )


def _either(words: tuple[str, ...]) -> str:
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _share_out(
    graph: ModelGraph,
    mesh: Mesh,
    info: ModuleInfo,
    style: Style,
    entry: Preset,
    sequence_parallel: bool,
) -> tuple[Piece, ...] | Problem:
    """Return how tp divides the dim that the style shards; see `pieces.share_out`."""
    if info.kind == "mha":
        tp = mesh.size("tp")
        return multihead_pieces(graph, info, entry, tp, sequence_parallel=sequence_parallel)
    dim = style.cut_dim or ""
    # A bias alone is not enough: its dim is that of a weight which is computed elsewhere.
    ndim = len(WEIGHT_DIMS.get(info.kind, (dim,)))
    owned = (t for t in graph.owned(info.fqn) if len(t.shape) >= ndim)
    weight = next((t for t in owned if dim in _dims(t, info)), None)
    if weight is None:
        return Problem(
            f"{info.fqn} ({info.type}) has no parameter with a dim '{dim}': its weight is "
            "computed from other parameters (as by weight_norm)",
            entry.reason.origin,
            "leave this module out of tp, or use tp_plan: auto, which follows the recorded forward",
        )
    size = weight.shape[_dims(weight, info).index(dim)]
    return share_out(graph, info, style, entry, size, mesh.size("tp"))


def _cut(
    graph: ModelGraph, mesh: Mesh, info: ModuleInfo, use: StyleUse, out: TensorParallel
) -> None:
    """Set the layouts of a module's parameters on tp under its style.

    A weight of equal pieces gets a packed layout, if dp_shard can shard its other dim. Any other
    weight in pieces is replicated, and so are biases of modules with pieces: each rank computes
    with its own rows, and the gradients are summed over tp.
    """
    tp, dim, reason = mesh.size("tp"), use.style.cut_dim, use.reason
    for tensor in graph.owned(info.fqn):
        if tensor.is_buffer:
            continue
        layout, dims, why = Layout.whole(len(tensor.shape)), _dims(tensor, info), reason
        at = dims.index(dim) if dim in dims else None
        if at is not None and not use.pieces:
            layout = layout.cut("tp", at)
        elif at is not None and tp > 1:
            others = [size for d, size in enumerate(tensor.shape) if d != at]
            if others and are_equal(use.pieces, tp) and others[0] % mesh.size("dp_shard") == 0:
                layout = layout.cut("tp", at, len(use.pieces))
            else:
                sizes = "+".join(str(piece.size) for piece in use.pieces)
                why = Reason(f"{reason.text}, whole: each rank takes its part of {sizes}",
                             reason.origin)  # fmt: skip
        _record(out, tensor, TensorCut(layout, False, why))


def _assign_param(
    graph: ModelGraph, tensor: TensorInfo, entry: Preset, out: TensorParallel
) -> None:
    word, reason = entry.word, entry.reason
    dim = parse_placement(word)
    if word == "R":
        whole = Layout.whole(len(tensor.shape))
        out.cuts[tensor.fqn] = TensorCut(whole, False, reason)
    elif dim is not None:
        _cut_param(graph, tensor, dim, reason, out)
    else:
        out.report(Problem(
            f"'{word}' is a style for modules, not a placement of one parameter",
            reason.origin,
            "use S(0), S(1) or R, or match the module instead",
        ))  # fmt: skip


def _cut_param(
    graph: ModelGraph, tensor: TensorInfo, dim: int, reason: Reason, out: TensorParallel
) -> None:
    """Set the layout S(d) of a parameter, which is all-gathered each time its module runs."""
    owner = graph.modules[graph.first_name(tensor.module)]
    if not owner.has_forward:
        out.report(Problem(
            f"{tensor.fqn} cannot be sharded by tp: {owner.type} is never called, so tp has "
            "no call at which to gather the parameter",
            reason.origin,
            "remove the placement on tp",
        ))  # fmt: skip
        return
    if not -len(tensor.shape) <= dim < len(tensor.shape):
        out.report(no_dim(tensor, dim, reason.origin))
        return
    layout = Layout.whole(len(tensor.shape)).cut("tp", dim)
    _record(out, tensor, TensorCut(layout, True, reason))


def no_dim(tensor: TensorInfo, dim: int, origin: Origin | None) -> Problem:
    """Return the problem of a placement S(dim) on a parameter that has no such dim."""
    ndim = len(tensor.shape)
    fix = "use S(0)" if ndim == 1 else f"use S(0) to S({ndim - 1})"
    return Problem(
        f"{tensor.fqn} has shape {list(tensor.shape)}, which has no dim {dim}",
        origin,
        fix if ndim else "use R: a scalar cannot be sharded",
    )


def _record(out: TensorParallel, tensor: TensorInfo, cut: TensorCut) -> None:
    """Set the layout of a parameter; report a tied one that another module lays out differently."""
    before = out.cuts.get(tensor.fqn)
    if before is not None and before.layout != cut.layout:
        out.report(Problem(
            f"{tensor.fqn} and {tensor.aliases[0] if tensor.aliases else tensor.fqn} are one "
            f"tensor, but {before.reason} states {before.layout} and this rule {cut.layout}",
            cut.reason.origin,
            "give both the same placement",
        ))  # fmt: skip
        return
    out.cuts[tensor.fqn] = cut


def sequence_problems(spec: Spec, mesh: Mesh) -> Iterator[Problem]:
    """Yield the problems of `sequence_parallel` that follow from the mesh and the batch."""
    if not spec.sequence_parallel:
        return
    parts = mesh.size("cp", "tp")
    if mesh.size("tp") == 1:
        yield Problem(
            "'sequence_parallel' has no effect without a tp axis",
            spec.origin("sequence_parallel"),
            "add tp to the mesh, or remove sequence_parallel",
        )
    if (spec.batch.seq_len or 0) % parts:
        yield Problem(
            f"a sequence of {spec.batch.seq_len} does not divide by "
            f"{' x '.join(mesh.present(('cp', 'tp')))} {parts}, but sequence_parallel shards it",
            spec.origin("batch.seq_len"),
            f"use a multiple of {parts}",
        )


def local_attributes(graph: ModelGraph, mesh: Mesh, out: TensorParallel) -> None:
    """Add to `out` the local attributes of modules with projections that are sharded by heads.

    Once the projections are sharded, `view(b, s, self.num_heads, self.head_dim)` runs on the heads
    of one rank, so `num_heads` must be the number of these. An attribute is changed only if its
    name has a role in `heads.ROLES` and its value is what this role has in the sharded projections.
    """
    tp = mesh.size("tp")
    by_parent: dict[str, list[tuple[int, int]]] = {}
    for fqn, use in out.styles.items():
        info = graph.modules[fqn]
        width = out_width(graph, info)
        if width is None or use.style.output[1] != "S(-1)":
            continue
        if info.kind == "conv1d" and use.pieces and tp > 1:
            local = sum(piece.part for piece in use.pieces)
            out.attributes.append(LocalAttribute(fqn, "nf", width, local))
        if info.head_dim:
            around = by_parent.setdefault(fqn.rpartition(".")[0], [])
            around += _heads(info, use, width, tp)
    for fqn, heads in by_parent.items():
        if tp > 1 and heads:
            out.attributes += _localized(graph.modules[graph.first_name(fqn)], heads)


def _heads(info: ModuleInfo, use: StyleUse, width: int, tp: int) -> Iterator[tuple[int, int]]:
    """Yield (number of heads, number of heads on one rank) of each projection in a weight."""
    assert info.head_dim is not None
    for piece in use.pieces or (Piece(width, tp),):
        # A fused weight may have pieces that are no heads, such as a gate; skip these.
        if piece.part % info.head_dim == 0 and piece.size % piece.parts == 0:
            yield piece.size // info.head_dim, piece.part // info.head_dim


def _localized(info: ModuleInfo, heads: list[tuple[int, int]]) -> Iterator[LocalAttribute]:
    (queries, own_queries), (keys, own_keys) = max(heads), min(heads)
    head_dim = role(info.sizes, "head_dim") or 0
    expected = {
        "heads": (queries, own_queries),
        "kv_heads": (keys, own_keys),
        "groups": (queries // keys, own_queries // own_keys),
        "width": (queries * head_dim, own_queries * head_dim),
    }
    for name, value in info.sizes.items():
        whole, local = expected.get(ROLES[name], (value, value))
        if value == whole != local:
            yield LocalAttribute(info.fqn, name, whole, local)


def multihead_pieces(
    graph: ModelGraph, info: ModuleInfo, preset: Preset, tp: int, *, sequence_parallel: bool
) -> tuple[Piece, ...] | Problem:
    """Return the three pieces q, k and v, each with all heads, or why tp cannot divide them."""
    origin = preset.reason.origin
    heads, head_dim = role(info.sizes, "heads") or 0, role(info.sizes, "head_dim") or 0
    if any(t.fqn.endswith(".bias_k") or t.fqn == "bias_k" for t in graph.owned(info.fqn)):
        what = f"{info.fqn} adds a bias to its keys (add_bias_kv), which tp cannot shard"
        return Problem(f"{what} in this version", origin, "leave this module out of tp")
    if sequence_parallel and tp > 1:
        what = f"{info.fqn} is a {info.type}, which cannot run under sequence_parallel"
        return Problem(f"{what} in this version", origin, "remove sequence_parallel")
    if heads % tp:
        return Problem(
            f"{info.fqn}: {heads} heads of {head_dim} do not divide by tp {tp}",
            origin,
            divisor_fix(heads, tp, "this module"),
        )
    return (Piece(heads * head_dim, tp),) * 3


def multihead_cuts(
    graph: ModelGraph, info: ModuleInfo, dp_shard: int
) -> Iterator[tuple[TensorInfo, Layout]]:
    """Yield (parameter, layout on tp) for each parameter of a module that is sharded by heads.

    The forward of nn.MultiheadAttention reads the weights of its projections, `out_proj` included,
    without calling these modules, so a style on them would have no effect. One style therefore
    covers the whole module: q, k and v are sharded along the output dim, separately if they are
    fused in one weight, and `out_proj` along its input dim.

    Biases are replicated, and so is a fused weight whose dim 1 does not divide by dp_shard: tp
    shards dim 0 in pieces, so dp_shard would have to shard dim 1.
    """
    for tensor in graph.owned(info.fqn):
        layout = Layout.whole(len(tensor.shape))
        if tensor.fqn.endswith("in_proj_weight") and tensor.shape[1] % dp_shard == 0:
            layout = layout.cut("tp", 0, 3)
        elif tensor.fqn.endswith(("q_proj_weight", "k_proj_weight", "v_proj_weight")):
            layout = layout.cut("tp", 0)
        yield tensor, layout
    for tensor in graph.owned(f"{info.fqn}.out_proj" if info.fqn else "out_proj"):
        layout = Layout.whole(len(tensor.shape))
        yield tensor, layout.cut("tp", 1) if len(tensor.shape) == 2 else layout
