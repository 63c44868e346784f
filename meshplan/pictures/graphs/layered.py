"""Layered layout of boxes and arrows, in rows from above, so that no arrow crosses a box.

The row of a box is the length of the longest path to it. Within a row, boxes are placed close to
the boxes that they have arrows with, without touching each other. An arrow over several rows
reserves a slot in each row that it passes. Lengths are in the unit of the given sizes.

Source: Sugiyama, Tagawa, Toda, Methods for visual understanding of hierarchical system structures,
IEEE Transactions on Systems, Man, and Cybernetics 11 (1981).
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

_SWEEPS: Final = 8
_LANE: Final = 0.12
"""Width that an arrow takes when it passes through a row."""

Key = Hashable
Link = tuple[Key, Key]
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class LayeredPositions:
    """The positions of boxes and arrows; y grows upward from the lowest row.

    Args:
        width: Width of the whole layout.
        height: Height of the whole layout.
        at: (x, y) of the lower left corner of each box.
        sizes: Width and height of each box, as given.
        paths: Points of each arrow, from its start to its end.
    """

    width: float
    height: float
    at: Mapping[Key, Point]
    sizes: Mapping[Key, tuple[float, float]]
    paths: Mapping[Link, tuple[Point, ...]]


def lay_out(
    sizes: Mapping[Key, tuple[float, float]],
    links: Sequence[Link],
    *,
    most_in_row: int,
    gap: float,
    between: float,
) -> LayeredPositions:
    """Return positions of boxes in rows, and the points of the arrows.

    Args:
        sizes: (width, height) by box, in the order of execution.
        links: Arrows as (from box, to box); arrows to an earlier box of `sizes` are left out.
        most_in_row: Maximum number of boxes in a row; a longer row is split.
        gap: Distance between boxes of a row.
        between: Distance between rows.
    """
    order = {key: n for n, key in enumerate(sizes)}
    links = [(a, b) for a, b in dict.fromkeys(links) if order[a] < order[b]]
    rows: list[list[Key]] = _rows(list(sizes), links, most_in_row)
    place = {key: number for number, row in enumerate(rows) for key in row}
    wide = {key: size[0] for key, size in sizes.items()}
    chains: dict[Link, list[Key]] = {}
    for a, b in links:
        lanes: list[Key] = [(a, b, number) for number in range(place[a] + 1, place[b])]
        for lane in lanes:
            rows[lane[2]].append(lane)  # type: ignore[index]
            wide[lane] = _LANE
        chains[a, b] = [a, *lanes, b]
    steps = [pair for chain in chains.values() for pair in itertools.pairwise(chain)]
    above: dict[Key, list[Key]] = {}
    below: dict[Key, list[Key]] = {}
    for a, b in steps:
        above.setdefault(b, []).append(a)
        below.setdefault(a, []).append(b)
    middle = _middles(rows, wide, above, below, gap)
    left = min((middle[key] - wide[key] / 2 for row in rows for key in row), default=0.0)
    right = max((middle[key] + wide[key] / 2 for row in rows for key in row), default=0.0)
    tall = [max((sizes[key][1] for key in row if key in sizes), default=0.0) for row in rows]
    height = sum(tall) + between * max(len(rows) - 1, 0)
    tops: list[float] = []
    y = height
    for each in tall:
        tops.append(y)
        y -= each + between
    at = {
        key: (
            middle[key] - sizes[key][0] / 2 - left,
            tops[place[key]] - (tall[place[key]] + sizes[key][1]) / 2,
        )
        for key in sizes
    }
    paths = {}
    for link, chain in chains.items():
        points: list[Point] = []
        for key in chain:
            x = middle[key] - left
            row = place[key] if key in place else key[2]  # type: ignore[index]
            top, bottom = tops[row], tops[row] - tall[row]
            if key == link[0]:
                points += [(x, at[key][1]), (x, bottom)]
            elif key == link[1]:
                points += [(x, top), (x, at[key][1] + sizes[key][1])]
            else:
                points += [(x, top), (x, bottom)]
        paths[link] = tuple(dict.fromkeys(points))
    return LayeredPositions(right - left, height, at, sizes, paths)


def _rows(keys: Sequence[Key], links: Sequence[Link], most: int) -> list[list[Key]]:
    """Return the boxes of each row; rows of more than `most` boxes are split."""
    depth = dict.fromkeys(keys, 0)
    into: dict[Key, list[Key]] = {}
    for a, b in links:
        into.setdefault(b, []).append(a)
    for key in keys:
        depth[key] = max((depth[a] + 1 for a in into.get(key, ())), default=0)
    out: dict[Key, list[Key]] = {}
    for a, b in links:
        out.setdefault(a, []).append(b)
    for key in reversed(keys):
        # Move a box without inputs down, into the row above the first box that reads it.
        if key not in into and key in out:
            depth[key] = min(depth[b] for b in out[key]) - 1
    rows: list[list[Key]] = [[] for _ in range(max(depth.values(), default=-1) + 1)]
    for key in keys:
        rows[depth[key]].append(key)
    return [row[at : at + most] for row in rows for at in range(0, len(row), most)]


def _middles(
    rows: Sequence[list[Key]],
    wide: Mapping[Key, float],
    above: Mapping[Key, Sequence[Key]],
    below: Mapping[Key, Sequence[Key]],
    gap: float,
) -> dict[Key, float]:
    """Return x of the centre of each box, and sort each row in place from left to right.

    Args:
        rows: Boxes of each row.
        wide: Width of each box.
        above: Boxes in the row above that a box has arrows from.
        below: Boxes in the row below that a box has arrows to.
        gap: Distance between boxes of a row.
    """
    middle: dict[Key, float] = {}
    for row in rows:
        _place(row, dict.fromkeys(row, 0.0), wide, gap, middle)
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        near = above if down else below
        for row in rows if down else rows[::-1]:
            wanted = {
                key: sum(middle[n] for n in near[key]) / len(near[key])
                if near.get(key)
                else middle[key]
                for key in row
            }
            row.sort(key=wanted.__getitem__)
            _place(row, wanted, wide, gap, middle)
    return middle


def _place(
    row: Sequence[Key],
    wanted: Mapping[Key, float],
    wide: Mapping[Key, float],
    gap: float,
    middle: dict[Key, float],
) -> None:
    """Set `middle`, the x of each box's centre, close to the x in `wanted` but without overlap."""
    rightward: list[float] = []
    for number, key in enumerate(row):
        least = wanted[key]
        if number:
            before = row[number - 1]
            least = max(least, rightward[-1] + (wide[before] + wide[key]) / 2 + gap)
        rightward.append(least)
    leftward: list[float] = []
    for number, key in enumerate(reversed(row)):
        most = wanted[key]
        if number:
            after = row[len(row) - number]
            most = min(most, leftward[-1] - (wide[after] + wide[key]) / 2 - gap)
        leftward.append(most)
    # Positions of both passes keep the gaps, so the means of both keep them too.
    for key, one, other in zip(row, rightward, reversed(leftward), strict=True):
        middle[key] = (one + other) / 2
