"""Units inside of other units, such as a block's experts: how their gradients are summed.

FSDP2 passes a unit's inputs through an autograd function of its own, whose backward reduces the
unit's gradients. So the gradients that a unit returns for its inputs are added to those from
elsewhere after the reduction, not before.

Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param_group.py,
`RegisterPostBackwardFunction`.
"""

from __future__ import annotations

from meshplan.memory.tape.op import Tape


class NestedUnits:
    """Gradients that are put aside while the backward of a nested unit runs.

    Args:
        tape: Tape whose units may lie inside of each other.
    """

    def __init__(self, tape: Tape) -> None:
        self._given: dict[int, tuple[int, set[int]]] = {}
        """For the last op of a nested unit: (its first op, the values that it reads from
        outside)."""
        self._waiting: dict[int, dict[int, int]] = {}
        """For the first op of a unit whose backward runs: gradients from elsewhere, by value."""
        for _, start, end in tape.units:
            if any(s <= start and end <= e and (s, e) != (start, end) for _, s, e in tape.units):
                rows = tape.rows[start:end]
                made = {value for row in rows for value in row.makes}
                self._given[end - 1] = start, {v for r in rows for v in r.reads} - made

    def begin(self, number: int, grads: dict[int, int]) -> None:
        """Put aside the gradients of a unit's inputs from elsewhere, when its backward begins."""
        if number in self._given:
            start, given = self._given[number]
            self._waiting[start] = {v: grads.pop(v) for v in sorted(given) if v in grads}

    def end(self, number: int, grads: dict[int, int]) -> list[tuple[int, int]]:
        """Restore the gradients that were put aside, when the backward of the unit ends.

        Returns:
            (value, gradient) of the unit's own gradients, to be added to those restored.
        """
        waiting = self._waiting.pop(number, {})
        own = [(value, grads.pop(value)) for value in waiting if value in grads]
        grads.update(waiting)
        return own
