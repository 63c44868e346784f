"""Find rules with a placement on an axis that the mesh lacks, an error for every model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from meshplan.errors import Origin, Problem
from meshplan.layout.mesh import SHARD_AXES, Mesh
from meshplan.spec.spec import Spec

_ADD: Final = {
    "tp": "mesh: {dp_shard: 4, tp: 2}",
    "ep": "ep: 2 in dp_shard",
    "dp_shard": "mesh: {dp_shard: 8}",
}
"""Examples of a mesh with each axis, as written in a plan."""


def no_axis(axis: str, mesh: Mesh, origin: Origin | None) -> Problem:
    """Return the problem of a placement on an axis that the mesh lacks."""
    fix = f"add {axis} to the mesh, such as {_ADD[axis]}, or remove the placement"
    return Problem(f"the mesh has no axis {axis} (it has {mesh})", origin, fix)


def without_tp(origin: Origin | None) -> Problem:
    """Return the problem of a `tp_plan` with a mesh that has no tp."""
    fix = "add tp to the mesh, or remove tp_plan"
    return Problem("'tp_plan' has no effect without a tp axis", origin, fix)


def rules_without_axis(spec: Spec, mesh: Mesh) -> Iterator[Problem]:
    """Yield a problem for each placement of a rule on an axis that the mesh lacks.

    Rules are not matched against a model. Optional rules are skipped, because they may match
    nothing, and so is `R`, which needs no axis.
    """
    there = {*mesh.names, *(loan.name for loan in mesh.loans)}
    if mesh.present(SHARD_AXES):  # Parameters placed on dp_shard are sharded over cp, too.
        there.add("dp_shard")
    for rule in spec.rules:
        for axis, word in rule.place.items():
            if axis in _ADD and axis not in there and word != "R" and not rule.optional:
                yield no_axis(axis, mesh, spec.origin(f"rules[{rule.index}].place.{axis}"))
