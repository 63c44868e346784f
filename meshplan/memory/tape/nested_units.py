"""Units inside of units, such as a block's experts: where their gradients meet others.

FSDP2 calls a unit with what an autograd function of its own hands on, whose backward reduces the
unit's gradients. So what a unit gives back meets the gradients that came from elsewhere after it
was reduced, and not before.

Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param_group.py,
`RegisterPostBackwardFunction`.
"""

from __future__ import annotations

from meshplan.memory.tape.op import Tape


class NestedUnits:
    """The gradients that wait until the units inside of others are done.

    Args:
        tape: Whose units lie inside of each other, or beside.
    """

    def __init__(self, tape: Tape) -> None:
        self._given: dict[int, tuple[int, set[int]]] = {}
        """By the last row of a unit inside of another one, its first, and what it gets."""
        self._waiting: dict[int, dict[int, int]] = {}
        """By the first row of one that runs, gradients from elsewhere, by value."""
        for _, start, end in tape.units:
            if any(s <= start and end <= e and (s, e) != (start, end) for _, s, e in tape.units):
                rows = tape.rows[start:end]
                made = {value for row in rows for value in row.makes}
                self._given[end - 1] = start, {v for r in rows for v in r.reads} - made

    def begin(self, number: int, grads: dict[int, int]) -> None:
        """Backward comes to a unit: what came from elsewhere is put aside."""
        if number in self._given:
            start, given = self._given[number]
            self._waiting[start] = {v: grads.pop(v) for v in sorted(given) if v in grads}

    def end(self, number: int, grads: dict[int, int]) -> list[tuple[int, int]]:
        """It is done: that is back, and (value, gradient) of the unit are to be added."""
        waiting = self._waiting.pop(number, {})
        own = [(value, grads.pop(value)) for value in waiting if value in grads]
        grads.update(waiting)
        return own
