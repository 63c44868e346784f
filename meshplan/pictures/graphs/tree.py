"""The model's modules as a tree, with equal modules folded, coloured by stage or by layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from meshplan.model.graph import ModelGraph
from meshplan.pictures.base.words import counted
from meshplan.plan.plan import Plan
from meshplan.spec.match import fold
from meshplan.units import format_count

_MOST_ROWS: Final = 48
NOTHING: Final = "no parameters of its own"


class Coloured(Protocol):
    """The fields that `Tree` and `Graph` share."""

    @property
    def model(self) -> str: ...
    @property
    def by(self) -> str: ...
    @property
    def groups(self) -> tuple[str, ...]: ...
    @property
    def num_modules(self) -> int: ...
    @property
    def num_params(self) -> int: ...
    @property
    def num_stages(self) -> int: ...


def title_of(found: Coloured) -> str:
    """Return the title of a `Tree` or `Graph`: number of modules, and their stages or layouts."""
    many = counted(found.num_modules, "module")
    size = f"{format_count(found.num_params)} parameters"
    if not found.groups:
        return f"{found.model}: {many}, no parameters"
    if found.by == "stage":
        return f"{found.model}: {many} of {size} in {counted(found.num_stages, 'stage')}"
    if len(found.groups) == 1:
        return f"{found.model}: {many} of {size}, all laid out as {found.groups[0]}"
    return f"{found.model}: {many} of {size}, in {len(found.groups)} layouts"


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """A row of the tree: equal modules with the same parent, or with equal parents.

    Args:
        name: Name relative to the parent's row, folded: "{0..31}".
        depth: Depth in the tree; 0 for the root.
        type: Class names.
        num_modules: Number of modules.
        num_params: Parameters of all these modules, including their submodules.
        group: Stage or layout that colours the row, as text; "" if it has neither.
        parent: Number of the parent's row; -1 for the root.
        num_hidden: Number of rows of its submodules that are left out.
    """

    name: str
    depth: int
    type: str
    num_modules: int
    num_params: int
    group: str
    parent: int
    num_hidden: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """The facts of the text version of the picture "graph".

    Args:
        model: Name of the model.
        by: Meaning of the colours: "stage" or "layout".
        rows: Rows in definition order.
        groups: All stages or layouts in the rows, as text.
        num_modules: Number of modules of the model.
        num_params: Number of parameters of the model.
        num_stages: Number of stages; 0 without a pipeline.
    """

    model: str
    by: str
    rows: tuple[ModuleRow, ...]
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
        return (
            f"The modules of {self.model} as a tree in {counted(len(self.rows), 'row')}, "
            f"identical ones folded, coloured by {self.by}: "
            f"{'; '.join(self.groups[:6]) or 'nothing'}."
        )


@dataclass(slots=True)
class Folded:
    """A node of the folded tree: equal modules with the same parent, or with equal parents.

    Attributes:
        fqns: Fqns of the modules.
        types: Class names of the modules.
        children: Nodes of the submodules.
    """

    fqns: list[str]
    types: list[str]
    children: list[Folded] = field(default_factory=list)


def module_tree(plan: Plan) -> Tree:
    """Return the tree of a plan's modules."""
    graph, stages = plan.graph, plan.assignment.stages
    by = "stage" if stages is not None else "layout"
    own = {fqn: group_of(plan, fqn) for fqn in graph.modules}
    sizes = sizes_of(graph)
    root = folded(plan, own)
    rows = _cut(list(_rows(root, graph, own, sizes)))
    groups = dict.fromkeys(row.group for row in rows if row.group)
    return Tree(
        model=graph.name,
        by=by,
        rows=tuple(rows),
        groups=tuple(groups),
        num_modules=len(graph.modules),
        num_params=graph.num_params,
        num_stages=stages.num if stages is not None else 0,
    )


def folded(plan: Plan, own: Mapping[str, str]) -> Folded:
    """Return the model's tree with equal modules folded.

    Args:
        plan: The plan.
        own: Text by fqn, such as the layout; modules with different texts are not folded together.
    """
    kids: dict[str, list[str]] = {}
    for fqn in plan.graph.modules:
        if fqn:
            kids.setdefault(fqn.rpartition(".")[0], []).append(fqn)
    return fold_tree([""], plan.graph, kids, own)


def group_of(plan: Plan, fqn: str) -> str:
    """Return the stages of a module, or the layouts of its own parameters, as text."""
    stages = plan.assignment.stages
    placed = [plan.assignment.tensors[t.fqn] for t in plan.graph.owned(fqn) if not t.is_buffer]
    if stages is None:
        layouts = dict.fromkeys(p.stored.spell(plan.mesh).replace("R", "whole") for p in placed)
        return ", ".join(layouts)
    places = sorted({stage for p in placed for stage in stages.tensors[p.info.fqn]})
    return "stage " + " and ".join(map(str, places)) if places else ""


def sizes_of(graph: ModelGraph) -> Mapping[str, int]:
    """Return the number of parameters in each module with its submodules, by fqn.

    A shared parameter counts once per module.
    """
    out = dict.fromkeys(graph.modules, 0)
    for tensor in graph.parameters:
        fqn = tensor.module
        while True:
            out[fqn] = out.get(fqn, 0) + tensor.numel
            if not fqn:
                break
            fqn = fqn.rpartition(".")[0]
    return out


def fold_tree(
    fqns: list[str],
    graph: ModelGraph,
    kids: Mapping[str, Sequence[str]],
    own: Mapping[str, str],
) -> Folded:
    """Return one node for equal modules, with their submodules folded recursively.

    Args:
        fqns: Fqns of the equal modules.
        graph: The model.
        kids: Fqns of the direct submodules, by fqn.
        own: As in `folded`.
    """
    first = fqns[0]
    node = Folded(fqns, list(dict.fromkeys(graph.modules[fqn].type for fqn in fqns)))
    rows = list(zip(*(kids.get(fqn, ()) for fqn in fqns), strict=False)) if first in kids else []
    run: list[tuple[str, ...]] = []
    keys: list[object] = []
    for row in rows:
        key = _key(row[0], graph, kids, own)
        is_number = row[0].rpartition(".")[2].isdigit()
        if run and is_number and keys[-1] == key:
            run[-1] = (*run[-1], *row)
            continue
        run.append(tuple(row))
        keys.append(key if is_number else object())
    node.children = [fold_tree(list(names), graph, kids, own) for names in run]
    return node


def _key(
    fqn: str, graph: ModelGraph, kids: Mapping[str, Sequence[str]], own: Mapping[str, str]
) -> tuple[object, ...]:
    """Return a key that two modules share if they are equal: class, text, and submodules."""
    below = tuple(
        (name.rpartition(".")[2], _key(name, graph, kids, own)) for name in kids.get(fqn, ())
    )
    return (graph.modules[fqn].type, own[fqn], below)


def _rows(
    node: Folded,
    graph: ModelGraph,
    own: Mapping[str, str],
    sizes: Mapping[str, int],
    depth: int = 0,
    parent: int = -1,
    at: list[int] | None = None,
) -> Iterator[ModuleRow]:
    at = at if at is not None else [0]
    number = at[0]
    at[0] += 1
    lasts = list(dict.fromkeys(fqn.rpartition(".")[2] for fqn in node.fqns))
    name = ", ".join(fold(lasts)) if node.fqns[0] else graph.name
    groups = dict.fromkeys(own[fqn] for fqn in node.fqns)
    yield ModuleRow(
        name=name,
        depth=depth,
        type=", ".join(node.types),
        num_modules=len(node.fqns),
        num_params=sum(sizes[fqn] for fqn in node.fqns),
        group=", ".join(filter(None, groups)),
        parent=parent,
    )
    for child in node.children:
        yield from _rows(child, graph, own, sizes, depth + 1, number, at)


def _cut(rows: list[ModuleRow]) -> list[ModuleRow]:
    """Leave out rows, the deepest first, until `_MOST_ROWS` are left; parents count them."""
    most = max((row.depth for row in rows), default=0)
    below: list[dict[str, None]] = [{row.group: None} if row.group else {} for row in rows]
    while len(rows) > _MOST_ROWS and most > 1:
        kept = [n for n, row in enumerate(rows) if row.depth < most]
        numbers = {old: new for new, old in enumerate(kept)}
        hidden = [0] * len(rows)
        for number, row in enumerate(rows):
            if row.depth >= most:
                hidden[row.parent] += 1 + row.num_hidden
                below[row.parent] |= below[number]
        # If all rows that are left out below a row share a colour, the row takes that colour.
        rows = [
            replace(
                rows[n],
                group=next(iter(below[n])) if len(below[n]) == 1 else rows[n].group,
                parent=numbers.get(rows[n].parent, -1),
                num_hidden=rows[n].num_hidden + hidden[n],
            )
            for n in kept
        ]
        below = [below[n] for n in kept]
        most -= 1
    if len(rows) > _MOST_ROWS:
        more = len(rows) - _MOST_ROWS + 1
        rows = [*rows[: _MOST_ROWS - 1], ModuleRow(f"… {more:,} more", 1, "", more, 0, "", 0)]
    return rows
