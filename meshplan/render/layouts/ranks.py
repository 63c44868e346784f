"""The mesh as a map: one row per node, one column per device of a node."""

from __future__ import annotations

from collections.abc import Sequence

from meshplan.layout.mesh import Mesh
from meshplan.plan.plan import Plan
from meshplan.render.base.text import columns

_MOST_ROWS = 8
_MOST_COLUMNS = 16
_GAP = "..."


def map_of_ranks(plan: Plan) -> list[str]:
    """Return a title and a map of the ranks.

    The coordinates on an axis are written above the columns if they are the same in every node, and
    before the rows if all ranks of a node share them. Otherwise they follow each rank's number.
    """
    mesh, hardware = plan.mesh, plan.spec.hardware
    world = mesh.world_size
    if hardware is not None:
        per_row, noun = hardware.gpus_per_node, "node"
        where = f"{hardware.nodes} node{'s' if hardware.nodes > 1 else ''} x {per_row}"
    else:
        # Node boundaries are unknown: a row has all ranks of one coordinate on the outermost axis.
        per_row, noun = world // mesh.axes[0].size if len(mesh.axes) > 1 else world, "row"
        where = "nodes not stated"
    num_rows = world // per_row
    steps = _steps(mesh)
    of_column = [
        n for n, (step, size) in steps.items() if size == 1 or per_row % (step * size) == 0
    ]
    of_row = [n for n, (step, _) in steps.items() if n not in of_column and step % per_row == 0]
    mixed = [name for name in steps if name not in of_column and name not in of_row]
    rows, cols = _some(num_rows, _MOST_ROWS), _some(per_row, _MOST_COLUMNS)

    def cell(row: int | None, col: int | None) -> str:
        if row is None or col is None:
            return _GAP
        rank = row * per_row + col
        return ":".join([str(rank), *(str(mesh.coordinates(rank)[name]) for name in mixed)])

    def label(row: int | None) -> str:
        if row is None:
            return ""
        words = [f"{noun} {row}"] if noun == "node" else []
        return ", ".join(
            [*words, *(f"{name} {mesh.coordinates(row * per_row)[name]}" for name in of_row)]
        )

    table = [
        ["", name, *(_GAP if col is None else str(mesh.coordinates(col)[name]) for col in cols)]
        for name in of_column
    ]
    head = "rank" if not mixed else f"rank:{':'.join(mixed)}"
    table += [
        [label(row), head if number == 0 else "", *(cell(row, col) for col in cols)]
        for number, row in enumerate(rows)
    ]
    title = f"mesh {mesh} = {world} rank{'' if world == 1 else 's'} ({where})"
    return [title, *("  " + line for line in columns(table, "<>" + ">" * len(cols)))]


def _steps(mesh: Mesh) -> dict[str, tuple[int, int]]:
    """Return (stride in ranks, size) of each axis, by the axis's name."""
    out, step = {}, mesh.world_size
    for axis in mesh:
        step //= axis.size
        out[axis.name] = step, axis.size
    for loan in mesh.loans:
        step, _ = out[loan.within]
        out[loan.name] = step, loan.size
    return out


def _some(count: int, most: int) -> Sequence[int | None]:
    """Return 0 to count - 1; if these are more than `most`, the first ones, None and the last."""
    if count <= most:
        return range(count)
    return [*range(most - 2), None, count - 1]
