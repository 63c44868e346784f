"""Axes that borrow the ranks of another axis: `ep: 2 in dp_shard`.

Experts are distributed over ranks that read different samples, so ep takes its ranks from the axis
over which the rest of the model is sharded. `assign` finds the modules that have experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from meshplan.errors import PlanError, Problem
from meshplan.layout.mesh import Loan
from meshplan.spec.spec import Borrow, Spec

LENDER: Final = "dp_shard"


def expert_loans(spec: Spec, sizes: Mapping[str, int]) -> tuple[Loan, ...]:
    """Return the loan of ep as a tuple of one, checked against the mesh; () without ep.

    Args:
        spec: The plan.
        sizes: The size of each mesh axis that is not borrowed.

    Raises:
        PlanError: ep is stated as a separate axis, or borrows from an axis that cannot lend ranks.
    """
    stated = spec.mesh.get("ep") if isinstance(spec.mesh, Mapping) else None
    if stated is None:
        return ()
    if stated == 1 and LENDER in sizes:
        return (Loan("ep", 1, LENDER),)
    origin = spec.origin("mesh.ep")
    size = stated.size if isinstance(stated, Borrow) else stated
    write = f"write ep: {size} in {LENDER}"
    if LENDER not in sizes:
        write = f"write mesh: {{{LENDER}: N, ep: {size} in {LENDER}}}"
    if not isinstance(stated, Borrow):
        what = f"ep is not a separate mesh axis: it borrows the ranks of {LENDER}"
        raise PlanError(Problem(what, origin, write))
    if stated.within != LENDER:
        what = f"ep cannot borrow ranks from {stated.within}, only from {LENDER}"
        raise PlanError(Problem(what, origin, write))
    if sizes[LENDER] % stated.size:
        what = f"{stated.size} does not divide {LENDER}: {sizes[LENDER]}"
        raise PlanError(Problem(what, origin, f"write a divisor of {sizes[LENDER]}"))
    return (Loan("ep", stated.size, LENDER),)
