"""Units inside other units, such as a block's experts: when gradients of their inputs are summed.

FSDP2 passes a unit's inputs through an autograd function, whose backward reduces the unit's
gradients. Other ops may read the same inputs. So the gradients that the unit returns for its inputs
are added to those from other ops after the reduction, not before.

Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param_group.py,
`RegisterPostBackwardFunction`.
"""

from __future__ import annotations

from meshplan.memory.tape.op import Tape


class NestedUnits:
    """Gradients that are put aside while the backward of a nested unit runs.

    Args:
        tape: The tape, in which units may be inside other units.
    """

    def __init__(self, tape: Tape) -> None:
        self._given: dict[int, tuple[int, set[int]]] = {}
        """For the last op of a nested unit: (first op of the unit, values made outside of the unit
        that it reads)."""
        self._waiting: dict[int, dict[int, int]] = {}
        """For the first op of a unit whose backward runs: the gradients put aside, by value."""
        for _, start, end in tape.units:
            if any(s <= start and end <= e and (s, e) != (start, end) for _, s, e in tape.units):
                rows = tape.rows[start:end]
                made = {value for row in rows for value in row.makes}
                self._given[end - 1] = start, {v for r in rows for v in r.reads} - made

    def begin(self, number: int, grads: dict[int, int]) -> None:
        """Put aside the gradients of a unit's inputs that exist when the unit's backward begins.

        Args:
            number: The op whose backward is next; nothing happens unless it ends a nested unit.
            grads: Gradients by value, from which those put aside are removed.
        """
        if number in self._given:
            start, given = self._given[number]
            self._waiting[start] = {v: grads.pop(v) for v in sorted(given) if v in grads}

    def end(self, number: int, grads: dict[int, int]) -> list[tuple[int, int]]:
        """Restore the gradients that were put aside, when the unit's backward has ended.

        Args:
            number: The op whose backward was last; nothing happens unless it begins a nested unit.
            grads: Gradients by value, in which the unit's own are replaced by those restored.

        Returns:
            (value, gradient) of the unit's own gradients, to be added to the restored ones.
        """
        waiting = self._waiting.pop(number, {})
        own = [(value, grads.pop(value)) for value in waiting if value in grads]
        grads.update(waiting)
        return own
