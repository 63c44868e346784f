"""The tp axis: which style each module gets, and whether the module can take it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from meshplan.assign.cascade import Cascade, Stated
from meshplan.assign.types import LocalAttribute, Preset, Reason, StyleUse
from meshplan.errors import Origin, Problem
from meshplan.graph import ModelGraph, ModuleInfo, TensorInfo
from meshplan.layout import Layout
from meshplan.mesh import Mesh
from meshplan.spec import AUTO, Spec
from meshplan.styles import (
    PLANNED_STYLES,
    WEIGHT_DIMS,
    Style,
    dims_of,
    kinds_of,
    parse_placement,
    style_for,
)

_FIELD = "place.tp"


@dataclass(frozen=True, slots=True)
class _Partner:
    """The style that must stand near another, and what is amiss without it."""

    style: str
    what: str
    fix: str
    is_error: bool = False


_PARTNERS: Final[Mapping[str, _Partner]] = {
    "colwise": _Partner(
        "rowwise",
        "leaves its output cut, but no rowwise module near it takes it up",
        "make the projection that consumes it rowwise, or use colwise_gather_output",
    ),
    "rowwise": _Partner(
        "colwise",
        "expects its input cut, but no colwise module near it leaves one",
        "make the projections that feed it colwise, or use rowwise_split_input",
    ),
    # Without parts the sum would count every gradient once per rank, silently.
    "replicated_with_grad_allreduce": _Partner(
        "colwise",
        "adds up gradients of parts, but no colwise module near it leaves parts",
        "make the projections that feed it colwise, or remove the placement",
        is_error=True,
    ),
}


@dataclass(frozen=True, slots=True)
class TensorCut:
    """How tp lays out one parameter, and why."""

    layout: Layout
    gathered: bool
    reason: Reason
    is_local: bool = False


@dataclass(slots=True)
class TensorParallel:
    """The tp side of an assignment: styles by module and cuts by parameter fqn."""

    styles: dict[str, StyleUse] = field(default_factory=dict)
    cuts: dict[str, TensorCut] = field(default_factory=dict)
    attributes: list[LocalAttribute] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)


def assign_tp(
    spec: Spec,
    graph: ModelGraph,
    cascade: Cascade,
    mesh: Mesh,
    preset: Mapping[str, Preset] = MappingProxyType({}),
) -> TensorParallel:
    """Styles from the rules and from the preset under them, checked against their modules.

    Args:
        preset: By module fqn, what `tp_plan` says. A rule on the same module overrides it, and
            so does an `R` on a module around it.
    """
    out = TensorParallel()
    by_rules = dict(cascade.modules_with(_FIELD))
    if "tp" not in mesh.names:
        by_rule = {s.rule.index: s for s in by_rules.values()}
        for tensor in graph.parameters:
            found = cascade.param(tensor, _FIELD)
            if found:
                by_rule[found.rule.index] = found
        out.problems += [_no_axis(spec, s, mesh) for s in by_rule.values()]
        return out
    stated = {fqn: _said(spec, s) for fqn, s in by_rules.items() if s.value != AUTO}
    for fqn, said in preset.items():
        around = cascade.inherited(fqn, _FIELD)
        if fqn not in stated and (around is None or around.value != "R"):
            stated[fqn] = said
    for fqn in graph.modules:
        if fqn in stated:
            _assign_module(graph, mesh, graph.modules[fqn], stated[fqn], out)
    for tensor in graph.parameters:
        found = cascade.param(tensor, _FIELD)
        if found:
            _assign_param(graph, tensor, _said(spec, found), out)
    proved = {fqn for fqn, said in stated.items() if said.is_proved}
    _check_tied(graph, mesh, out, proved)
    _check_pairs(mesh, out, proved)
    if mesh.size("tp") > 1 and spec.tp_plan == "none" and not any("tp" in rule.place for rule in spec.rules):
        out.problems.append(
            Problem(
                f"the axis tp of size {mesh.size('tp')} cuts nothing: "
                "no rule places a module on it",
                spec.origin("mesh.tp"),
                "add rules such as {match: 'layers.*.attn.wq', place: {tp: colwise}}, "
                "or drop the axis",
            )
        )
    return out


def _said(spec: Spec, statement: Stated) -> Preset:
    """What a rule states, in the form in which a preset states it."""
    return Preset(str(statement.value), Reason(statement.text, spec.origin(statement.path)))


def _no_axis(spec: Spec, statement: Stated, mesh: Mesh) -> Problem:
    return Problem(
        f"the mesh has no axis tp (it has {mesh})",
        spec.origin(statement.path),
        "add it to the mesh, such as mesh: {dp_shard: 4, tp: 2}, or remove the placement",
    )


def _assign_module(
    graph: ModelGraph, mesh: Mesh, info: ModuleInfo, said: Preset, out: TensorParallel
) -> None:
    word, reason = said.word, said.reason
    if word in PLANNED_STYLES:
        return  # Refused by `not_yet`.
    if word == AUTO:
        return  # What the data flow says of the modules inside stands in the preset.
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
        _report(out, _cannot_take(graph, info, said))
        return
    checked = said.is_proved or style.cut_dim is None
    if not checked and not _divides(graph, mesh, info, style, said, out):
        return
    out.styles[info.fqn] = StyleUse(style, "tp", reason)
    for tensor in owned:
        layout = Layout.whole(len(tensor.shape))
        dims = _dims(tensor, info)
        if style.cut_dim in dims:
            layout = layout.cut("tp", dims.index(style.cut_dim or ""))
        _record(out, tensor, TensorCut(layout, False, reason))


def _dims(tensor: TensorInfo, owner: ModuleInfo) -> tuple[str, ...]:
    """The dims of a tensor as this owner names them: a tied one has a name per owner."""
    names = {n.rpartition(".")[0]: n.rpartition(".")[2] for n in tensor.names}
    leaf = next(names[m] for m in (owner.fqn, *owner.aliases) if m in names)
    return dims_of(owner.kind, leaf, len(tensor.shape))


def _cannot_take(graph: ModelGraph, info: ModuleInfo, said: Preset) -> Problem:
    word = said.word
    name = info.fqn or "the root module"
    dim = parse_placement(word)
    if dim is not None and info.kind in WEIGHT_DIMS:
        ndim = len(WEIGHT_DIMS[info.kind])
        what = f"the weight of {name} has {ndim} dims, so it has no dim {dim}"
        return Problem(what, said.reason.origin, f"use S(0) to S({ndim - 1})")
    kinds = kinds_of(word) or ("linear", "conv1d", "embedding")
    below = [
        m.fqn
        for m in graph.modules.values()
        if m.kind in kinds and (not info.fqn or m.fqn.startswith(info.fqn + "."))
    ]
    if below:
        fix = f"match a module that can, such as '{below[0]}'"
    else:
        fix = "remove the placement, or state 'R'"
    a = "an" if kinds[0][0] in "aeiou" else "a"
    return Problem(
        f"'{word}' cannot be applied to {name} ({info.type}): it needs {a} {_either(kinds)} module",
        said.reason.origin,
        fix,
    )


def _either(words: tuple[str, ...]) -> str:
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _divides(
    graph: ModelGraph,
    mesh: Mesh,
    info: ModuleInfo,
    style: Style,
    said: Preset,
    out: TensorParallel,
) -> bool:
    """Whether the cut keeps heads whole and pieces equal, as the code around it expects.

    A gathered output may be uneven: nobody sees the pieces.
    """
    tp, cut_dim, word = mesh.size("tp"), style.cut_dim or "", said.word
    weight = next((t for t in graph.owned(info.fqn) if cut_dim in _dims(t, info)), None)
    if weight is None:
        _report(out, Problem(
            f"{info.fqn} ({info.type}) has no parameter with a dim '{cut_dim}': its weight is "
            "computed from others (weight_norm and its likes)",
            said.reason.origin,
            "leave this module out of tp",
        ))  # fmt: skip
        return False
    size = weight.shape[_dims(weight, info).index(cut_dim)]
    pieces_are_seen = "S(-1)" in (style.input[0], style.output[1])
    problem: Problem | None = None
    if info.packed > 1 and pieces_are_seen and cut_dim == "out":
        problem = Problem(
            f"{info.fqn} ({info.type}) fuses {info.packed} projections in one weight, and "
            f"'{word}' would cut across them",
            said.reason.origin,
            "leave this module out (packed_colwise is not available yet in this version)",
        )
    elif pieces_are_seen and info.head_dim and (size // info.head_dim) % tp:
        heads = size // info.head_dim
        problem = Problem(
            f"{info.fqn}: {heads} heads of {info.head_dim} do not divide by tp {tp}",
            said.reason.origin,
            _divisor_fix(heads, tp, "q, k, v and the output projection"),
        )
    elif pieces_are_seen and size % tp:
        problem = Problem(
            f"{info.fqn}: its dim '{cut_dim}' of size {size} does not divide by tp {tp}",
            said.reason.origin,
            _divisor_fix(size, tp, "this module and its counterparts"),
        )
    if problem is None:
        return True
    _report(out, problem)
    return False


def _divisor_fix(size: int, tp: int, whole: str) -> str:
    divisor = max(d for d in range(1, tp) if size % d == 0)
    return f"use tp: {divisor}" if divisor > 1 else f"leave {whole} out of tp together"


def _assign_param(graph: ModelGraph, tensor: TensorInfo, said: Preset, out: TensorParallel) -> None:
    word, reason = said.word, said.reason
    dim = parse_placement(word)
    if word == "R":
        whole = Layout.whole(len(tensor.shape))
        out.cuts[tensor.fqn] = TensorCut(whole, False, reason)
    elif dim is not None:
        _cut_param(graph, tensor, dim, reason, out)
    else:
        _report(out, Problem(
            f"'{word}' is a style for modules, not a placement of one parameter",
            reason.origin,
            "use S(0), S(1) or R, or match the module instead",
        ))  # fmt: skip


def _cut_param(
    graph: ModelGraph, tensor: TensorInfo, dim: int, reason: Reason, out: TensorParallel
) -> None:
    """S(d) on a parameter: stored cut, gathered each time its module runs."""
    owner = graph.modules[graph.first_name(tensor.module)]
    if not owner.has_forward:
        _report(out, Problem(
            f"{tensor.fqn} cannot be cut: {owner.type} is never called itself, so nothing says "
            "when to gather it",
            reason.origin,
            "leave it whole",
        ))  # fmt: skip
        return
    if not -len(tensor.shape) <= dim < len(tensor.shape):
        _report(out, no_dim(tensor, dim, reason.origin))
        return
    layout = Layout.whole(len(tensor.shape)).cut("tp", dim)
    _record(out, tensor, TensorCut(layout, True, reason))


def no_dim(tensor: TensorInfo, dim: int, origin: Origin | None) -> Problem:
    """A parameter is to be cut along a dim that it does not have."""
    ndim = len(tensor.shape)
    fix = "use S(0)" if ndim == 1 else f"use S(0) to S({ndim - 1})"
    return Problem(
        f"{tensor.fqn} has shape {list(tensor.shape)}, which has no dim {dim}",
        origin,
        fix if ndim else "a scalar cannot be cut: use R",
    )


def _record(out: TensorParallel, tensor: TensorInfo, cut: TensorCut) -> None:
    """Note a cut; a tied tensor that is cut twice must be cut alike."""
    before = out.cuts.get(tensor.fqn)
    if before is not None and before.layout != cut.layout:
        _report(out, Problem(
            f"{tensor.fqn} and {tensor.aliases[0] if tensor.aliases else tensor.fqn} are one "
            f"tensor, but {before.reason} says {before.layout} and this says {cut.layout}",
            cut.reason.origin,
            "give both the same placement",
        ))  # fmt: skip
        return
    out.cuts[tensor.fqn] = cut


def _check_tied(graph: ModelGraph, mesh: Mesh, out: TensorParallel, proved: set[str]) -> None:
    """A tied weight that one of its modules computes on in shards must suit the other too."""
    for fqn, cut in out.cuts.items():
        tensor = graph.tensors[fqn]
        if cut.gathered or not cut.layout.axes or mesh.size("tp") == 1:
            continue
        for name in tensor.names:
            module = name.rpartition(".")[0]
            owners = {graph.first_name(n.rpartition(".")[0]) for n in tensor.names}
            if graph.first_name(module) not in out.styles and not owners & proved:
                _report(out, Problem(
                    f"{' and '.join(tensor.names)} are one tensor, but only "
                    f"{_styled(tensor, out)} has a tp style",
                    cut.reason.origin,
                    f"give '{module}' a style that cuts it alike, such as vocab",
                ))  # fmt: skip


def _styled(tensor: TensorInfo, out: TensorParallel) -> str:
    modules = (name.rpartition(".")[0] for name in tensor.names)
    return ", ".join(m for m in modules if m in out.styles)


def _check_pairs(mesh: Mesh, out: TensorParallel, proved: set[str]) -> None:
    """What one module leaves cut, another near it must take up, and the other way round."""
    if mesh.size("tp") == 1:
        return
    inside = _styles_inside(out)
    seen: set[object] = set()
    for fqn, use in out.styles.items():
        name = use.style.name
        partner = _PARTNERS.get(name)
        if partner is None or use.style.kind == "embedding" or use.reason in seen or fqn in proved:
            continue
        # Attention blocks such as BERT's keep q, k, v one level below their output projection.
        around = fqn.rpartition(".")[0]
        levels = (around, around.rpartition(".")[0])
        if any(partner.style in inside.get(level, ()) for level in levels):
            continue
        seen.add(use.reason)
        problem = Problem(f"{fqn} is {name} and {partner.what}", use.reason.origin, partner.fix)
        if partner.is_error:
            _report(out, problem)
        else:
            out.warnings.append(problem)


def _styles_inside(out: TensorParallel) -> dict[str, set[str]]:
    """By module: the styles of everything below it; the root knows its children's only."""
    inside: dict[str, set[str]] = {}
    for fqn, use in out.styles.items():
        parent = fqn.rpartition(".")[0]
        inside.setdefault(parent, set()).add(use.style.name)
        while parent := parent.rpartition(".")[0]:
            inside.setdefault(parent, set()).add(use.style.name)
    return inside


def _report(out: TensorParallel, problem: Problem) -> None:
    """One mistake, one message: a rule that hits 32 layers reports the first."""
    if not any(p.origin == problem.origin for p in out.problems):
        out.problems.append(problem)
