"""Derive styles for `tp_plan: auto`, each with its reason, from a recorded forward."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from meshplan.assign.auto.choose import CutChoice, choose, owners_of
from meshplan.assign.auto.known import SUMMED, KnownCuts, known, listed
from meshplan.assign.auto.known_stream import known_stream
from meshplan.assign.auto.numbers import Rehearsals
from meshplan.assign.auto.proof import Refuted
from meshplan.assign.auto.regions import NO_PAIR, FlowUses, Region
from meshplan.assign.auto.sequence import find_stream
from meshplan.assign.auto.stream import PARTS, Stream, crossings
from meshplan.assign.base.cascade import Cascade
from meshplan.assign.base.missing_axis import without_tp
from meshplan.assign.base.types import LocalUse, Preset, Reason, SequenceBoundary, Stages
from meshplan.errors import Origin, Problem
from meshplan.layout.layout import Piece
from meshplan.layout.mesh import Mesh
from meshplan.model.dims import classify
from meshplan.model.graph import ModelGraph, pattern_of
from meshplan.model.rehearsal import Rehearser
from meshplan.spec.spec import AUTO, Rule, Spec

_FIELD = "place.tp"
_EP_FIELD = "place.ep"
_ADDED = (
    "auto: replicated, with an output used on sharded values only and gradients all-reduced over tp"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """The result of `tp_plan: auto`.

    Args:
        preset: Styles by module fqn, for `assign_tp`.
        uses: Layouts of parameters that code combines with sharded values, by fqn.
        added: For each replicated projection whose gradients are summed over tp, the reason, by
            module fqn.
        attributes: Local values of attributes from which code computes shapes, by (module, name).
        problems: Reasons why nothing could be derived.
        notes: Notes on which modules are replicated, and why.
        stream: Where activations are sharded along the sequence; None without sequence_parallel.
        results: For each module, by fqn, and each of its calls, the sharded dim of each result,
            None for a whole one.
    """

    preset: Mapping[str, Preset] = field(default_factory=dict)
    uses: Mapping[str, LocalUse] = field(default_factory=dict)
    added: Mapping[str, Reason] = field(default_factory=dict)
    attributes: Mapping[tuple[str, str], int] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    notes: tuple[Problem, ...] = ()
    stream: Stream | None = None
    results: Mapping[str, tuple[tuple[int | None, ...], ...]] = field(default_factory=dict)

    @property
    def crossings(self) -> tuple[SequenceBoundary, ...]:
        """The places where activations are sharded along the sequence, or gathered."""
        return () if self.stream is None else tuple(crossings(self.stream))


def derive(
    spec: Spec, graph: ModelGraph, cascade: Cascade, mesh: Mesh, rehearse: Rehearser | None
) -> Derived:
    """Return the styles of all modules that the plan leaves to `auto`."""
    origin = _asked(spec)
    if origin is not None and "tp" not in mesh.names and spec.tp_plan == AUTO:
        return Derived(problems=(without_tp(origin),))
    if origin is None or mesh.size("tp") == 1:
        return Derived()
    if spec.sequence_parallel and (other := _stated_otherwise(spec)):
        return Derived(problems=(_no_stream(spec, other),))

    def may_cut(module: str) -> bool:
        stated = cascade.inherited(module, _FIELD)
        if any(cascade.param(t, _FIELD) for t in graph.owned(module)):
            return False
        spread = cascade.inherited(module, _EP_FIELD)
        if spread is not None and spread.value != "R":
            return False  # ep decides about modules with experts.
        return spec.tp_plan == AUTO if stated is None else stated.value == AUTO

    size = mesh.size("tp")
    if graph.flow is None and graph.tp_derived:
        found = _from_known(known(graph, size, may_cut), size, origin)
        if not spec.sequence_parallel or found.problems:
            return found
        try:
            return _with_stream(spec, graph, found, known_stream(graph, found.preset))
        except Refuted as error:
            return Derived(problems=(_no_stream(spec, str(error)),))
    if graph.flow is None or rehearse is None:
        return Derived(problems=(_no_flow(origin),))
    choosing = (size, spec.tp_plan, tuple(map(_decides, spec.rules)))
    saying = (spec.sequence_parallel, spec.loss_parallel, origin, spec.origin("sequence_parallel"))

    def proved() -> Derived:
        return _proved(spec, graph, size, may_cut, rehearse, choosing, origin)

    return rehearse.once(graph, (*choosing, *saying), proved)


def _decides(rule: Rule) -> Hashable:
    """Return what a rule says on which modules `auto` may shard: all that `may_cut` reads of it.

    The cascade notes which rules were read. `assign_tp` and `assign_ep` read the same statements,
    so no rule counts as overridden if `may_cut` is not asked again.
    """
    return rule.match, rule.place.get("tp"), rule.place.get("ep")


def _proved(
    spec: Spec,
    graph: ModelGraph,
    size: int,
    may_cut: Callable[[str], bool],
    rehearse: Rehearser,
    choosing: Hashable,
    origin: Origin,
) -> Derived:
    """Return the styles that the recorded forward of a model implies.

    Args:
        spec: The plan.
        graph: The model, with its recorded forward.
        size: Number of ranks of tp.
        may_cut: Function that returns True if the plan lets `auto` decide about a module.
        rehearse: Runs the model on local shapes.
        choosing: All that the choice of regions depends on besides the graph and the rehearsals.
        origin: Place in the plan that states `auto`.
    """

    def chosen() -> tuple[FlowUses, CutChoice]:
        assert graph.flow is not None
        flow = graph.flow
        uses = rehearse.once(graph, "uses", lambda: FlowUses(graph, classify(flow)))
        return uses, choose(uses, size, may_cut, Rehearsals(uses, rehearse, size))

    flow_uses, choice = rehearse.once(graph, choosing, chosen)
    rehearsals = Rehearsals(flow_uses, rehearse, size)
    whole = _whole(flow_uses, choice, may_cut)
    if not choice.regions and not choice.gathered:
        alone = [] if spec.sequence_parallel else projections(flow_uses, size, may_cut)
        return _by_themselves(alone, whole, size, origin)
    preset = _preset(flow_uses, choice, size)
    reasons = {
        fqn: Preset("R", Reason(f"auto: replicated, since {why}")) for fqn, why in whole.items()
    }
    out = Derived(
        preset=MappingProxyType({**reasons, **preset}),
        uses=MappingProxyType(_uses(choice)),
        added=MappingProxyType(dict.fromkeys(choice.proof.summed_modules, Reason(_ADDED))),
        attributes=MappingProxyType(choice.attributes),
        notes=tuple(_notes(whole, origin)),
        results=_results(flow_uses, choice),
    )
    if not spec.sequence_parallel:
        return out
    try:
        stream = find_stream(flow_uses, choice, rehearsals)
        found = _with_stream(spec, graph, out, stream)
        return replace(found, results=_results(flow_uses, choice, stream.values))
    except Refuted as error:
        return Derived(problems=(_no_stream(spec, str(error)),))


def _with_stream(spec: Spec, graph: ModelGraph, found: Derived, stream: Stream) -> Derived:
    """Return `found` with the sharding of the sequence added.

    Raises:
        Refuted: The plan has loss_parallel, but the sequence is gathered before the head.
    """
    words = {fqn: found.preset[fqn].word for fqn in sorted(stream.whole) if fqn in found.preset}
    heads = [
        f for f, word in words.items() if word == "vocab" and graph.modules[f].kind == "linear"
    ]
    if spec.loss_parallel and heads:
        raise Refuted(f"{heads[0]} takes the whole sequence, which loss_parallel does not support")
    uses = dict(found.uses) | {fqn: LocalUse(None, PARTS) for fqn in stream.summed}
    others = [fqn for fqn, word in words.items() if word != "vocab"]
    notes = (*found.notes, *([_other_sequences(spec, others)] if others else []))
    return replace(found, uses=MappingProxyType(uses), stream=stream, notes=notes)


def _other_sequences(spec: Spec, modules: Sequence[str]) -> Problem:
    """Return the note that lists styled modules on which sequence_parallel has no effect."""
    patterns = list(dict.fromkeys(map(pattern_of, modules)))
    more = f" and {len(patterns) - 4} more" if len(patterns) > 4 else ""
    return Problem(
        "sequence_parallel shards one sequence of this model; these compute on others, or on all "
        f"positions, as without it: {', '.join(patterns[:4])}{more}",
        spec.origin("sequence_parallel"),
        "ignore this note, or give every tp style by rule",
    )


def cut_inside(spec: Spec, derived: Derived, stages: Stages | None) -> list[Problem]:
    """Return a problem if a stage boundary is inside a module of `derived.crossings`."""
    opened = set(stages.opened) if stages is not None else set()
    found = next((c.module for c in derived.crossings if c.module in opened), None)
    if found is None:
        return []
    why = f"a stage boundary lies inside {found}, where shards of the sequence begin or end"
    return [_no_stream(spec, why)]


def _stated_otherwise(spec: Spec) -> str:
    """Return which statement of the plan sets a style other than auto; "" if there is none."""
    if spec.tp_plan != AUTO:
        return f"tp_plan is '{spec.tp_plan}', and only some rules state tp: auto"
    words = (rule.place.get("tp") for rule in spec.rules)
    other = next((word for word in words if word not in (None, AUTO, "R")), None)
    return f"a rule states tp: {other}" if other is not None else ""


def _no_stream(spec: Spec, why: str) -> Problem:
    return Problem(
        f"auto cannot prove sequence_parallel correct for this model: {why}",
        spec.origin("sequence_parallel"),
        "remove sequence_parallel, or give every tp style by rule",
    )


def _from_known(found: KnownCuts, size: int, origin: Origin) -> Derived:
    """Return what is known of a model without a recorded forward as a `Derived`."""
    if found.unknown:
        what = f"auto needs the live model to see {found.unknown}"
        fix = "give the model itself with --model PKG.MOD:FN, or use tp_plan: hf"
        return Derived(problems=(Problem(what, origin, fix),))
    if not found.preset:
        return Derived(problems=(_nothing(found.whole, size, origin),))
    whole = {
        fqn: Preset("R", Reason(f"auto: replicated, since {why}"))
        for fqn, why in found.whole.items()
    }
    return Derived(
        preset=MappingProxyType({**whole, **found.preset}),
        uses=MappingProxyType(found.uses),
        attributes=MappingProxyType(found.attributes),
        notes=tuple(_notes(found.whole, origin)),
    )


def _asked(spec: Spec) -> Origin | None:
    """Return the place in the plan that states `auto` for tp; None if there is none."""
    if spec.tp_plan == AUTO:
        return spec.origin("tp_plan")
    at = next((r.index for r in spec.rules if r.place.get("tp") == AUTO), None)
    return None if at is None else spec.origin(f"rules[{at}].place.tp")


def _no_flow(origin: Origin) -> Problem:
    return Problem(
        "auto derives tp styles from a recorded forward, and there is no live model",
        origin,
        "give the model itself with --model PKG.MOD:FN, or call parallelize",
    )


def _nothing(whole: Mapping[str, str], size: int, origin: Origin) -> Problem:
    folded = _folded(whole)
    shown = "; ".join(f"{where or 'the model'} ({why})" for where, why in folded[:3])
    shown = f": {shown}" if shown else ""
    return Problem(
        f"auto finds no pair of projections to shard over tp {size}{shown}",
        origin,
        f"use those {size} ranks for dp_shard instead of tp",
    )


def _by_themselves(
    found: Sequence[str], whole: Mapping[str, str], size: int, origin: Origin
) -> Derived:
    """Return styles that shard the projections `found` one by one, each gathering its output."""
    nothing = _nothing(whole, size, origin)
    if not found:
        return Derived(problems=(nothing,))
    others = {fqn: why for fqn, why in whole.items() if fqn not in found}
    reason = Reason("auto: sharded without a partner; its output is all-gathered")
    preset = {
        fqn: Preset("R", Reason(f"auto: replicated, since {why}")) for fqn, why in others.items()
    }
    preset |= {fqn: Preset("colwise_gather_output", reason, is_proved=True) for fqn in found}
    names = listed(dict.fromkeys(map(pattern_of, found)))
    note = Problem(
        f"{nothing.what}; projections sharded one by one, each output all-gathered: {names}",
        origin,
        nothing.fix,
    )
    return Derived(preset=MappingProxyType(preset), notes=(note,))


def _pieces(flow_uses: FlowUses, region: Region, fqn: str, size: int) -> tuple[Piece, ...]:
    """Return the equal pieces of a packed projection's output; () if it is not packed."""
    count = region.pieces.get(fqn)
    if count is None:
        return ()
    widths = (
        flow_uses.classes.sizes_of(dim)
        for tensor in flow_uses.graph.owned(fqn)
        if tensor.fqn in flow_uses.values
        for dim in flow_uses.classes.dims[flow_uses.values[tensor.fqn]]
        if region.factor in dim
    )
    return (Piece(next(widths) // count, size),) * count


def _preset(flow_uses: FlowUses, choice: CutChoice, size: int) -> dict[str, Preset]:
    out: dict[str, Preset] = {}
    for region in choice.regions:
        for fqn, word in region.words.items():
            reason = Reason(f"auto: {_why(flow_uses, region, fqn)}")
            pieces = _pieces(flow_uses, region, fqn, size)
            out[fqn] = Preset(word, reason, is_proved=True, pieces=pieces)
    for fqn in choice.gathered:
        is_table = flow_uses.graph.modules[fqn].kind == "embedding"
        why = "its rows are the vocabulary" if is_table else "it scores the vocabulary"
        out[fqn] = Preset("vocab", Reason(f"auto: {why}"), is_proved=True)
    return out


def _why(flow_uses: FlowUses, region: Region, fqn: str) -> str:
    """Return the reason for a style, such as "its 8 heads pair with o_proj"."""
    opens = region.words[fqn] != "rowwise"
    partners = [m for m, w in region.words.items() if (w == "rowwise") == opens]
    around = fqn.split(".")
    near = max(_common(around, m.split(".")) for m in partners)
    names = dict.fromkeys(
        m.rpartition(".")[2] for m in partners if _common(around, m.split(".")) == near
    )
    return f"its {_counted(flow_uses, region, fqn)} pair with {listed(names)}"


def _counted(flow_uses: FlowUses, region: Region, fqn: str) -> str:
    """Return the number of what is sharded: "8 heads", or "128 features" if there are no heads."""
    classes = flow_uses.classes
    dims = (d for t in flow_uses.graph.owned(fqn) for d in classes.dims[flow_uses.values[t.fqn]])
    dim = next(d for d in dims if region.factor in d)
    behind = dim[dim.index(region.factor) :]
    # A factor that an operation mixes or sums over is inside a head. If there is none, as for v,
    # whose features are never mixed, the last factor is taken as the features of a head.
    inside = [i for i, f in enumerate(behind) if f in classes.blocked or f in flow_uses.summed]
    first = min((i for i in inside if i), default=max(len(behind) - 1, 1))
    count = classes.sizes_of(behind[:first])
    word = "heads" if behind[first:] else "features"
    fused = f"{region.pieces[fqn]} x " if fqn in region.pieces else ""
    return f"{fused}{count} {word}"


def _common(one: list[str], other: list[str]) -> int:
    same = (a == b for a, b in zip(one, other, strict=False))
    return next((i for i, s in enumerate(same) if not s), min(len(one), len(other)))


def _results(
    flow_uses: FlowUses, choice: CutChoice, shards: Container[int] = ()
) -> Mapping[str, tuple[tuple[int | None, ...], ...]]:
    """Return the sharded dim of each result of each call, by module.

    Args:
        flow_uses: The recorded forward.
        choice: The chosen regions.
        shards: Ids of the values that are sharded along the sequence, which is dim 1.
    """
    cut, dims = {region.factor for region in choice.regions}, flow_uses.classes.dims

    def of(value: int) -> int | None:
        inner = next((number for number, dim in enumerate(dims[value]) if cut & {*dim}), None)
        return 1 if value in shards else inner

    calls = {
        fqn: [[of(v) for _, v in c.outputs] for c in cs] for fqn, cs in flow_uses.calls.items()
    }
    return MappingProxyType({fqn: tuple(map(tuple, found)) for fqn, found in calls.items()})


def _uses(choice: CutChoice) -> dict[str, LocalUse]:
    parts = {
        fqn: LocalUse(dim, Reason("auto: it shares a dim with sharded projections"))
        for region in choice.regions
        for fqn, dim in region.parts.items()
    }
    return parts | {fqn: LocalUse(None, SUMMED) for fqn in choice.proof.summed}


def _whole(flow_uses: FlowUses, choice: CutChoice, may_cut: object) -> dict[str, str]:
    """Return why modules with matrices are replicated, by module fqn."""
    cut = {fqn for r in choice.regions for fqn in (*r.words, *owners_of(r.parts))}
    cut |= {*choice.gathered, *choice.proof.summed_modules, *owners_of(choice.proof.summed)}
    out: dict[str, str] = {}
    for fqn in flow_uses.graph.modules:
        matrices = [t for t in flow_uses.graph.owned(fqn) if len(t.shape) > 1 and not t.is_buffer]
        if fqn in cut or not matrices or not callable(may_cut) or not may_cut(fqn):
            continue
        if any(flow_uses.owners(t) & cut for t in matrices):
            continue
        out[fqn] = choice.uncut.get(fqn) or _reason(flow_uses, choice, [t.fqn for t in matrices])
    return out


def _reason(flow_uses: FlowUses, choice: CutChoice, tensors: list[str]) -> str:
    """Return why none of the dim classes of these tensors is sharded.

    The reason of a class that was tried is preferred.
    """
    factors = [
        factor
        for name in tensors
        if name in flow_uses.values
        for dim in flow_uses.classes.dims[flow_uses.values[name]]
        for factor in dim
    ]
    if not factors:
        return "the recorded forward does not use it"
    tried = [choice.refused[f] for f in factors if f in choice.refused]
    blocked = [flow_uses.classes.blocked[f] for f in factors if f in flow_uses.classes.blocked]
    specific = [why for why in tried if why != NO_PAIR]
    if specific:
        return specific[0]
    chosen = {r.factor for r in choice.regions}
    if any(f in chosen for f in factors):
        return "its other dim is sharded already"
    return (*blocked, *tried, NO_PAIR)[0]


def _folded(whole: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return pairs (fqn with `*` for numbers, reason), each once."""
    return list(dict.fromkeys((pattern_of(fqn), why) for fqn, why in whole.items()))


def _notes(whole: Mapping[str, str], origin: Origin) -> Iterable[Problem]:
    """Yield one note that lists all replicated modules with their reasons, if there are any."""
    folded = _folded(whole)
    if folded:
        shown = "; ".join(f"{where or 'the model'} ({why})" for where, why in folded[:4])
        more = f"; and {len(folded) - 4} more" if len(folded) > 4 else ""
        yield Problem(
            f"auto keeps replicated over tp: {shown}{more}",
            origin,
            "state a style by rule, or ignore this note",
        )


_SHARE = 2
"""These projections must have at least 1 in this many of the model's trainable elements; with fewer
tp is not worth its ranks.
"""


def projections(flow_uses: FlowUses, size: int, may_cut: Callable[[str], bool]) -> list[str]:
    """Return the fqns of projections to shard along their output; [] if they have too few elements.

    Sharding one by one is for models without a pair: each output is all-gathered. The input and
    output of such a module are whole, so no operation of the rest of the forward has to be known:
    shapes may depend on values, and operations may have no sharding rule. But each projection costs
    an all-gather, while a pair of projections costs one all-reduce.

    Args:
        flow_uses: The recorded forward.
        size: Number of ranks of tp.
        may_cut: Function that returns True if the plan lets `auto` decide about a module.
    """
    graph = flow_uses.graph
    found = [fqn for fqn in graph.modules if _can_be_cut(flow_uses, fqn, size) and may_cut(fqn)]
    cut = sum(t.numel for fqn in found for t in graph.owned(fqn) if t.trainable)
    total = sum(t.numel for t in graph.parameters if t.trainable)
    return found if found and _SHARE * cut >= total else []


def _can_be_cut(flow_uses: FlowUses, fqn: str, size: int) -> bool:
    info, tensors = flow_uses.graph.modules[fqn], flow_uses.graph.owned(fqn)
    if info.kind not in ("linear", "conv1d") or fqn not in flow_uses.calls:
        return False
    weight = next((t for t in tensors if t.fqn == f"{fqn}.weight" and "out" in t.dims), None)
    if weight is None or weight.shape[weight.dims.index("out")] % size or flow_uses.does_more(info):
        return False
    return not any(len(t.names) > 1 or flow_uses.used_outside(t, {fqn}) for t in tensors)
