"""Choose the dim classes to shard: all that can be proved correct, the largest first."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from meshplan.assign.auto.numbers import NotTheSame, Rehearsals
from meshplan.assign.auto.proof import Refuted, RegionProof, prove
from meshplan.assign.auto.regions import FlowUses, NoRegion, Region, find_region
from meshplan.model.dims.factors import Factor
from meshplan.model.graph import pattern_of


@dataclass(slots=True)
class CutChoice:
    """The dim classes to shard, and why the others are not sharded.

    Attributes:
        regions: Regions that are proved to be correct together.
        gathered: Modules with the style vocab: {fqn: "vocab"}.
        proof: What these regions and modules require of other parameters.
        attributes: Local values of attributes, by (module, name).
        refused: For dim classes that no operation blocks but that are not sharded, the reason.
        uncut: For embeddings that cannot have the style vocab, the reason, by module fqn.
    """

    regions: tuple[Region, ...] = ()
    gathered: dict[str, str] = field(default_factory=dict)
    proof: RegionProof = field(default_factory=RegionProof)
    attributes: dict[tuple[str, str], int] = field(default_factory=dict)
    refused: dict[Factor, str] = field(default_factory=dict)
    uncut: dict[str, str] = field(default_factory=dict)


def choose(
    flow_uses: FlowUses, size: int, may_cut: Callable[[str], bool], rehearsals: Rehearsals
) -> CutChoice:
    """Return the regions of a recorded forward that are proved to be correct together.

    Args:
        flow_uses: The recorded forward.
        size: Number of ranks of tp.
        may_cut: Function that returns True if the plan lets `auto` decide about a module.
        rehearsals: Runs of the model on local shapes.
    """
    out = CutChoice()
    candidates = _candidates(flow_uses, size, may_cut, out)
    while True:
        # Dropping a region can invalidate the proof of another one, so prove the rest again.
        kept: list[Region] = []
        for kind in _kinds(candidates):
            kept += _prove_kind(flow_uses, kept, kind, out)
        out.regions, out.attributes = _rehearse(tuple(kept), rehearsals, out)
        if len(out.regions) == len(kept):
            break
        candidates = list(out.regions)
    out.gathered = _vocabulary(flow_uses, out, may_cut)
    out.proof = prove(flow_uses, out.regions, out.gathered)
    return out


def _candidates(
    flow_uses: FlowUses, size: int, may_cut: Callable[[str], bool], out: CutChoice
) -> list[Region]:
    found = []
    for factor in flow_uses.by_factor:
        if factor in flow_uses.classes.blocked:
            continue
        try:
            region = find_region(flow_uses, factor)
        except NoRegion as error:
            out.refused[factor] = str(error)
            continue
        if region.size % size:
            what = f"its {region.size} heads or features do not divide by tp {size}"
            out.refused[factor] = what
        elif not all(may_cut(fqn) for fqn in (*region.words, *owners_of(region.parts))):
            out.refused[factor] = "a rule places a module that would be sharded with it"
        else:
            found.append(region)
    return sorted(found, key=lambda r: -r.num_elements)


def owners_of(parameters: Iterable[str]) -> list[str]:
    return [fqn.rpartition(".")[0] for fqn in parameters]


def _kinds(regions: Iterable[Region]) -> list[list[Region]]:
    """Return the regions in groups; regions of a group differ only in layer numbers."""
    found: dict[object, list[Region]] = {}
    for region in regions:
        key = (region.size, frozenset((pattern_of(m), w) for m, w in region.words.items()))
        found.setdefault(key, []).append(region)
    return list(found.values())


def _prove_kind(
    flow_uses: FlowUses, kept: list[Region], kind: list[Region], out: CutChoice
) -> list[Region]:
    """Return the regions of the group `kind` that can be sharded in addition to all in `kept`.

    The group is tried as a whole, then region by region. `out.refused` receives the reason for each
    region that cannot be sharded.
    """
    try:
        prove(flow_uses, (*kept, *kind), {})
        return kind
    except Refuted as error:
        if len(kind) == 1:
            out.refused[kind[0].factor] = str(error)
            return []
    added: list[Region] = []
    for region in kind:
        added += _prove_kind(flow_uses, [*kept, *added], [region], out)
    return added


def _rehearse(
    regions: tuple[Region, ...], rehearsals: Rehearsals, out: CutChoice
) -> tuple[tuple[Region, ...], dict[tuple[str, str], int]]:
    """Return the regions whose rehearsal succeeds, and the local values of attributes.

    All regions are rehearsed together. If that fails, they are added group by group.
    """
    if not regions:
        return (), {}
    try:
        return regions, rehearsals.find(regions, {})
    except NotTheSame:
        kept: tuple[Region, ...] = ()
        attributes: dict[tuple[str, str], int] = {}
        for kind in _kinds(regions):
            try:
                attributes = rehearsals.find((*kept, *kind), attributes)
                kept = (*kept, *kind)
            except NotTheSame as error:
                where = rehearsals.flow_uses.flow.calls[error.difference.call].module
                for region in kind:
                    out.refused[region.factor] = (
                        f"on one rank of tp, {where or 'the model'} would not run the operations "
                        f"of one process: {error}"
                    )
        return kept, attributes


def _vocabulary(
    flow_uses: FlowUses, out: CutChoice, may_cut: Callable[[str], bool]
) -> dict[str, str]:
    """Return the modules to shard over the vocabulary: token embeddings and output projections.

    Returns:
        {fqn: "vocab"}.
    """
    graph, flow = flow_uses.graph, flow_uses.flow
    taken = {fqn for r in out.regions for fqn in r.words}
    found: dict[str, str] = {}
    rows: set[int] = set()
    for fqn, info in graph.modules.items():
        if info.kind != "embedding" or fqn not in flow_uses.calls or fqn in taken:
            continue
        weight = next((t for t in graph.owned(fqn) if len(t.shape) == 2), None)
        if weight is None or weight.fqn not in flow_uses.values:
            continue
        owners = flow_uses.owners(weight)
        more = next((m for o in owners if (m := _cannot_gather(flow_uses, o, taken))), "")
        inputs = {v for c in flow_uses.calls[fqn] for _, v in c.inputs}
        is_token = any(
            flow.values[v].origin == "input" or _from_input(flow_uses, v) for v in inputs
        )
        if more:
            out.uncut[fqn] = more
        elif not is_token or weight.shape[0] <= weight.shape[1]:
            out.uncut[fqn] = "its table has few rows, or is not indexed by tokens"
        elif not all(may_cut(owner) for owner in owners):
            out.uncut[fqn] = "a rule places a module that would be sharded with it"
        elif flow_uses.used_outside(weight, owners):
            out.uncut[fqn] = f"{weight.fqn} is used outside of its module's forward"
        elif _proves(flow_uses, out, {**found, **dict.fromkeys(owners, "vocab")}):
            found |= dict.fromkeys(owners, "vocab")
            rows.add(weight.shape[0])
        else:
            out.uncut[fqn] = "its input or output is combined with sharded values"
    for fqn, info in graph.modules.items():
        if info.kind != "linear" or fqn in taken or fqn in found or fqn not in flow_uses.calls:
            continue
        weight = next((t for t in graph.owned(fqn) if len(t.shape) == 2), None)
        if (
            weight is None
            or weight.shape[0] not in rows
            or not _reaches_outputs(flow_uses, weight.fqn)
        ):
            continue
        shared = any(
            len(t.names) > 1 and _is_shared(flow_uses, t.fqn, fqn) for t in graph.owned(fqn)
        )
        if not (shared or _cannot_gather(flow_uses, fqn, taken)) and may_cut(fqn) and (
            not flow_uses.used_outside(weight, {fqn})
            and _proves(flow_uses, out, {**found, fqn: "vocab"})
        ):  # fmt: skip
            found[fqn] = "vocab"
    return found


def _cannot_gather(flow_uses: FlowUses, fqn: str, taken: set[str]) -> str:
    info = flow_uses.graph.modules[fqn]
    if info.kind not in ("embedding", "linear"):
        return f"its weight is also used by {fqn}, which is neither a linear nor an embedding"
    if fqn in taken:
        return f"its weight is already sharded by the style of {fqn}"
    more = flow_uses.does_more(info)
    return f"the forward of {fqn} also runs {more}" if more else ""


def _is_shared(flow_uses: FlowUses, tensor: str, fqn: str) -> bool:
    """Return True if code outside of the module also uses a tensor of the module."""
    return flow_uses.used_outside(flow_uses.graph.tensors[tensor], {fqn})


def _proves(flow_uses: FlowUses, out: CutChoice, gathered: dict[str, str]) -> bool:
    try:
        prove(flow_uses, out.regions, gathered)
    except Refuted:
        return False
    return True


def _from_input(flow_uses: FlowUses, value: int) -> bool:
    """Return True if the elements of a value are those of a model input, perhaps rearranged."""
    flow = flow_uses.flow
    for _ in range(64):
        if flow.values[value].origin == "input":
            return True
        number = flow.producer(value)
        if number is None or not flow.ops[number].inputs:
            return False
        if flow.ops[number].name.split(".")[1] not in _SAME_NUMBERS:
            return False
        value = flow.ops[number].inputs[0]
    return False


_SAME_NUMBERS = frozenset(
    (
        "view", "_unsafe_view", "reshape", "alias", "detach", "clone", "_to_copy", "unsqueeze",
        "squeeze", "expand", "slice", "select", "where", "masked_fill", "transpose", "clamp",
        "new_zeros", "copy_",
    )
)  # fmt: skip
"""Operations that turn token ids into token ids: views, copies, or some ids replaced."""


def _reaches_outputs(flow_uses: FlowUses, weight: str) -> bool:
    """Return True if an output of the model has a dim that corresponds to the rows of a weight."""
    rows = flow_uses.classes.dims[flow_uses.values[weight]][0]
    return any(
        set(rows) & flow_uses.classes.factors_of(value) for _, value in flow_uses.flow.outputs
    )
