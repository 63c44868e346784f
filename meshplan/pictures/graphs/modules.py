"""The model's modules as a graph of data flow: equal modules folded, coloured by stage or layout.

Arrows come from a recorded forward, from the model's config, or from an outline without the inside
of blocks. Without any of these, modules are drawn in definition order, without arrows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from meshplan.errors import PlanError
from meshplan.memory.decoder.microbatch import MicrobatchSpec, tape_of
from meshplan.memory.decoder.sizes import shape_of
from meshplan.model.flow import Call, Flow, Op, Ref, Value
from meshplan.model.graph import ModelGraph
from meshplan.pictures.base.words import counted
from meshplan.pictures.graphs.arrows import Box, Item, Links, Reader
from meshplan.pictures.graphs.tree import Folded, folded, group_of, sizes_of, title_of
from meshplan.plan.plan import Plan
from meshplan.spec.match import fold

_MOST_BOXES: Final = 18
_MOST_OF_ROOT: Final = 14
SEVERAL: Final = "several of these"


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """The facts that `draw_graph` draws.

    Args:
        model: Name of the model.
        by: Meaning of the colours: "stage" or "layout".
        boxes: Boxes in the order of execution; in the order of definition if `source` is "".
        links: Arrows as pairs of box numbers, by the number of their frame; -1 for no frame.
        source: Source of the data flow: "recorded" for a recorded forward, "config" for the model's
            config, "outline" for an outline without the inside of blocks, "" if it is not known.
        num_idle: Number of boxes left out because their modules do not run and have no parameters.
        groups: All stages or layouts, as text.
        num_modules: Number of modules of the model.
        num_params: Number of parameters of the model.
        num_stages: Number of stages; 0 without a pipeline.
    """

    model: str
    by: str
    boxes: tuple[Box, ...]
    links: Mapping[int, Links]
    source: str
    num_idle: int = 0
    groups: tuple[str, ...]
    num_modules: int
    num_params: int
    num_stages: int = 0

    @property
    def title(self) -> str:
        """The picture's title: the answer in one sentence."""
        return title_of(self)

    @property
    def alt(self) -> str:
        """The picture's alt text, for readers who cannot see it."""
        arrows = "arrows along the data flow" if self.source else "in order of definition"
        modules = counted(sum(not box.is_meeting for box in self.boxes), "box", "boxes")
        return (
            f"The modules of {self.model} in {modules}, identical ones folded, {arrows}, "
            f"coloured by {self.by}: {'; '.join(self.groups[:6]) or 'nothing'}."
        )


def module_graph(plan: Plan) -> Graph:
    """Return the boxes, arrows and colours for a plan's modules."""
    graph, stages = plan.graph, plan.assignment.stages
    sources = {"recorded": graph.flow, "config": None, "outline": graph.outline}
    if graph.flow is None:
        sources["config"] = layout_flow(graph)
    source = next((name for name, each in sources.items() if each is not None), "")
    flow = sources.get(source)
    own = {fqn: group_of(plan, fqn) for fqn in graph.modules}
    root = folded(plan, own)
    items = _chosen(root, plan, {call.module for call in flow.calls} if flow else None)
    sizes = sizes_of(graph)
    numbers = {id(item): number for number, item in enumerate(items)}
    boxes = [_box(item, plan, own, sizes, numbers) for item in items]
    links: Mapping[int, Links] = {}
    if flow is not None:
        boxes, links = Reader(flow, items, boxes).read()
    num_idle = len(items) - sum(not box.is_meeting for box in boxes)
    groups = dict.fromkeys(name for name in own.values() if name)
    if stages is not None:
        groups = dict.fromkeys(f"stage {number}" for number in range(stages.num))
    return Graph(
        model=graph.name,
        by="stage" if stages is not None else "layout",
        boxes=tuple(boxes),
        links=links,
        source=source,
        num_idle=num_idle,
        groups=tuple(groups),
        num_modules=len(graph.modules),
        num_params=graph.num_params,
        num_stages=stages.num if stages is not None else 0,
    )


def _chosen(root: Folded, plan: Plan, called: set[str] | None) -> list[Item]:
    """Return the items to draw: the tree of modules from the top, as deep as `_MOST_BOXES` allows.

    Of identical blocks, one is opened.

    Args:
        root: The tree, with equal modules folded.
        plan: The plan.
        called: Fqns of modules that the data flow names; None if it is not known.
    """
    if not root.children:
        return [Item(root, plan.graph.name, 0)]
    items = [_item(kid, "", 1) for kid in root.children]
    if plan.graph.owned(""):
        items.insert(0, Item(root, plan.graph.name, 1, is_itself=True))
    if len(items) > _MOST_OF_ROOT:
        hidden = items[_MOST_OF_ROOT - 2 : -1]
        rest = Folded([fqn for item in hidden for fqn in item.node.fqns], ["modules"],
                      [item.node for item in hidden])  # fmt: skip
        items[_MOST_OF_ROOT - 2 : -1] = [Item(rest, f"… {len(hidden):,} more", 1)]
    opened: list[tuple[object, ...]] = []
    depth = 1
    while any(item.depth >= depth for item in items):
        at = [item for item in items if item.depth == depth and not item.is_itself]
        kinds: dict[tuple[object, ...], list[Item]] = {}
        for item in at:
            if _may_open(item, plan, called):
                kinds.setdefault(_shape(item.node), []).append(item)
        # Modules without a forward, such as ModuleList, are opened first, while there is space.
        for shape, alike in sorted(kinds.items(), key=lambda kind: _has_forward(kind[1][0], plan)):
            if shape in opened:
                continue
            if any(map(_repeats, alike)):
                alike = alike[:1]
            more = sum(len(_opened(item, plan)) - 1 + _repeats(item) for item in alike)
            if len(items) + more > _MOST_BOXES:
                continue
            opened.append(shape)
            for item in alike:
                place = items.index(item)
                inside = _opened(item, plan)
                item.is_frame = _repeats(item)
                items[place : place + 1] = [item, *inside] if item.is_frame else inside
        depth += 1
    return items


def _may_open(item: Item, plan: Plan, called: set[str] | None) -> bool:
    if not item.node.children or item.name.startswith("…"):
        return False
    if item.frame is not None and len(item.node.fqns) > len(item.frame.node.fqns):
        return False
    if _repeats(item):
        return True
    if called is None or not _has_forward(item, plan):
        return True
    if plan.graph.owned(item.node.fqns[0]):
        return False  # The module computes with its own tensors between its submodules.
    return any(fqn in called for kid in item.node.children for fqn in kid.fqns)


def _repeats(item: Item) -> bool:
    """Return True if the item stands for several modules and may become a frame that shows one."""
    return item.frame is None and len(item.node.fqns) > 1


def _has_forward(item: Item, plan: Plan) -> bool:
    return plan.graph.modules[item.node.fqns[0]].has_forward


def _shape(node: Folded) -> tuple[object, ...]:
    """Return the nested class names of a node and all nodes below it; equal for equal branches."""
    return (tuple(node.types), tuple(_shape(kid) for kid in node.children))


def _opened(item: Item, plan: Plan) -> list[Item]:
    """Return an item for the module's own tensors, if it has any, and items for its submodules."""
    is_frame = _repeats(item)
    frame = item if is_frame else item.frame
    before = "" if is_frame else f"{item.name}."
    out = [_item(kid, before, item.depth + 1, frame) for kid in item.node.children]
    if plan.graph.owned(item.node.fqns[0]):
        name = "itself" if is_frame else item.name
        out.insert(0, Item(item.node, name, item.depth + 1, frame, is_itself=True))
    return out


def _item(node: Folded, before: str, depth: int, frame: Item | None = None) -> Item:
    lasts = list(dict.fromkeys(fqn.rpartition(".")[2] for fqn in node.fqns))
    return Item(node, before + ", ".join(fold(lasts)), depth, frame)


def _box(
    item: Item,
    plan: Plan,
    own: Mapping[str, str],
    sizes: Mapping[str, int],
    numbers: Mapping[int, int],
) -> Box:
    fqns = item.node.fqns
    below = [] if item.is_itself else list(_below(item.node))
    groups = dict.fromkeys(own[fqn] for fqn in (*fqns, *below) if own[fqn])
    size = sum(sizes[fqn] for fqn in fqns)
    if item.is_itself:
        owned = {t.fqn: t.numel for fqn in fqns for t in plan.graph.owned(fqn) if not t.is_buffer}
        size = sum(owned.values())
    return Box(
        name=item.name,
        type=", ".join(item.node.types),
        num_modules=len(fqns),
        num_params=size,
        group=next(iter(groups)) if len(groups) == 1 else SEVERAL if groups else "",
        frame=numbers[id(item.frame)] if item.frame is not None else -1,
        is_frame=item.is_frame,
        num_below=0 if item.is_frame else len(below) // _times(item),
    )


def _times(item: Item) -> int:
    """Return the number of repeats of the frame around the item."""
    return 1 if item.frame is None else len(item.frame.node.fqns)


def _below(node: Folded) -> Iterator[str]:
    for kid in node.children:
        yield from kid.fqns
        yield from _below(kid)


_ANY: Final = MicrobatchSpec(batch=1, seq_len=16, element_bytes=2)
"""Arbitrary sizes, because the data flow does not depend on them."""


def layout_flow(graph: ModelGraph) -> Flow | None:
    """Return the data flow of a forward without its loss; None without a config of known family."""
    if not graph.config:
        return None
    try:
        tape = tape_of(shape_of(graph), _ANY)
    except PlanError:
        return None
    values = [Value(id=n, shape=(), dtype="", origin="op") for n in range(len(tape.nbytes))]
    known: dict[str, int] = {}
    calls = [Call(id=0, module="", parent=None, inputs=(), outputs=(), ops=(0, 0))]
    places = {"": 0}
    ops = []
    for row in tape.rows[: tape.loss_start]:
        if row.module not in places:
            places[row.module] = len(calls)
            calls.append(
                Call(id=len(calls), module=row.module, parent=0, inputs=(), outputs=(), ops=(0, 0))
            )
        for fqn, _ in row.parameters:
            if fqn not in known:
                known[fqn] = len(values)
                values.append(
                    Value(id=len(values), shape=(), dtype="", origin="parameter", name=fqn)
                )
        reads = (*row.reads, *(known[fqn] for fqn, _ in row.parameters))
        ops.append(
            Op(
                name=row.op,
                args=tuple(map(Ref, reads)),
                kwargs={},
                outputs=row.makes,
                call=places[row.module],
            )
        )
    return Flow(values=tuple(values), ops=tuple(ops), calls=tuple(calls))
