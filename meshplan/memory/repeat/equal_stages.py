"""Which stages do the same but for the names of their modules, told from their rows.

Playing sees nothing of a tape but what is compared here, and of names only which are the same.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from meshplan.memory.stages.tape import StageTape
from meshplan.memory.tape.split_backward import Order


@dataclass(frozen=True, slots=True)
class StageSignature:
    """All of a stage's tape, with its names apart.

    Args:
        shape: Where it is equal, so are the tapes, once one's names are put for the other's.
        names: Of modules, units and parameters, each once, as they come.
    """

    shape: Hashable
    names: tuple[str, ...]


def outline_of(part: StageTape, order: Order | None = None) -> StageSignature:
    """The outline of a stage.

    Args:
        order: Where the stage's module has its parameters, if that matters.
    """
    tape = part.tape
    assert not tape.handed, "what a stage of a pipeline does not do"
    names = {"": 0}
    """The root's, which is the same in all."""

    def name(of: str) -> int:
        return names.setdefault(of, len(names))

    rows = tuple(
        [
            (row.op, name(row.module), *row[2:6], tuple([(name(f), n) for f, n in row.parameters]),
             *row[7:])
            for row in tape.rows
        ]
    )  # fmt: skip
    units = tuple((name(fqn), start, end) for fqn, start, end in tape.units)
    laid = tuple((number, name(fqn), size) for (number, fqn), size in tape.laid.items())
    read = [(row.module, fqn) for row in tape.rows for fqn, _ in row.parameters]
    shape = (
        rows,
        units,
        laid,
        tuple(fqn in tape.lays_itself for _, fqn in read),
        tuple(sorted(range(len(read)), key=lambda n: order(*read[n]))) if order else None,
        *(tuple(each) for each in (tape.nbytes, tape.base, tape.last_use)),
        tuple(tape.before.items()),
        tuple(
            (s.start, s.end, s.recompute, s.keeps_chosen, s.given, s.on_host, s.enters)
            for s in tape.spans
        ),
        tape.loss_start,
        tape.logits,
        frozenset(tape.outlive),
        frozenset(tape.sums_apart),
        part.received,
        part.sent,
    )
    return StageSignature(shape, tuple(names))
