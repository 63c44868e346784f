"""Shorten a tree of modules: equal branches whose names differ only in numbers share a row."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from meshplan.spec.match import fold

_NUMBERS = re.compile(r"\{([0-9]+)[0-9.,]*\}")


@dataclass(frozen=True, slots=True)
class Entry:
    """A module or a tensor, with its columns.

    Args:
        fqn: Fqn of the module or tensor.
        is_module: If True, this is a module, and entries with its fqn as prefix are its children.
        cells: Texts of the columns after the name.
    """

    fqn: str
    is_module: bool
    cells: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TreeLine:
    """One line of the tree.

    Args:
        depth: Depth in the tree; 0 for the root.
        name: Name relative to the parent's line, folded: "{0..31}".
        cells: Texts of the columns after the name.
    """

    depth: int
    name: str
    cells: tuple[str, ...]


@dataclass(slots=True)
class _TreeNode:
    name: str
    entry: Entry
    children: list[_TreeNode] = field(default_factory=list)


def fold_tree(entries: Iterable[Entry]) -> list[TreeLine]:
    """Return the lines of a tree, with equal branches folded.

    Two branches are equal if they have the same cells and the same names below their own.

    Args:
        entries: The root module (fqn "") first, then parents before their children.

    >>> rows = fold_tree([
    ...     Entry("", True, ("Net",)),
    ...     Entry("layers.0.w", False, ("cut",)), Entry("layers.1.w", False, ("cut",)),
    ...     Entry("layers.2.w", False, ("whole",)),
    ... ])
    >>> [(row.depth, row.name, *row.cells) for row in rows]
    [(0, '(model)', 'Net'), (1, 'layers.{0,1}.w', 'cut'), (1, 'layers.2.w', 'whole')]
    """
    root = _grow(entries)
    shapes: dict[tuple[object, ...], int] = {}
    return list(_rows(root, "(model)", 0, shapes, _number(root, shapes)))


def _grow(entries: Iterable[Entry]) -> _TreeNode:
    """Return the root of the tree; each entry becomes a child of the innermost module around it."""
    modules: dict[str, _TreeNode] = {}
    for entry in entries:
        node = _TreeNode(entry.fqn, entry)
        around = entry.fqn
        while modules and around not in modules:
            around = around.rpartition(".")[0]
        if modules:
            node.name = entry.fqn[len(around) :].removeprefix(".")
            modules[around].children.append(node)
        if entry.is_module:
            modules[entry.fqn] = node
    return modules[""]


def _number(node: _TreeNode, shapes: dict[tuple[object, ...], int]) -> dict[int, int]:
    """Return a number for each node, by `id(node)`; equal branches have the same number.

    Args:
        node: The root of the branch.
        shapes: Numbers of the branches that were seen so far; new ones are added.
    """
    out: dict[int, int] = {}
    todo = [(node, False)]
    while todo:
        here, is_done = todo.pop()
        if not is_done:
            todo += [(here, True), *((child, False) for child in here.children)]
            continue
        below = tuple((child.name, out[id(child)]) for child in here.children)
        shape = (here.entry.is_module, here.entry.cells, below)
        out[id(here)] = shapes.setdefault(shape, len(shapes))
    return out


def _rows(
    node: _TreeNode,
    name: str,
    depth: int,
    shapes: dict[tuple[object, ...], int],
    of: dict[int, int],
) -> Iterator[TreeLine]:
    yield TreeLine(depth, name, node.entry.cells)
    groups: dict[int, dict[str, _TreeNode]] = {}
    for child in node.children:
        groups.setdefault(of[id(child)], {})[child.name] = child
    order = {child.name: number for number, child in enumerate(node.children)}
    folded = [
        (order[first], pattern, group[first])
        for group in groups.values()
        for pattern in fold(group)
        for first in [_NUMBERS.sub(r"\1", pattern)]
    ]
    for _, pattern, child in sorted(folded, key=lambda item: item[0]):
        yield from _rows(child, pattern, depth + 1, shapes, of)
