"""Find stages that are equal except for the names of their modules, by comparing their tapes.

Everything that the player of a tape reads is compared. Names are compared by pattern only: the
player depends on which names are equal, not on what they are.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from meshplan.memory.stages.tape import StageTape
from meshplan.memory.tape.split_backward import Order


@dataclass(frozen=True, slots=True)
class StageSignature:
    """The content of a stage's tape, with the names taken out.

    Args:
        shape: A key of the tape without names. Two tapes with equal keys become equal if the n-th
            of `names` of one is replaced by the n-th of the other.
        names: Names of modules, units and parameters, each once, in order of occurrence.
    """

    shape: Hashable
    names: tuple[str, ...]


def outline_of(part: StageTape, order: Order | None = None) -> StageSignature:
    """Return the signature of a stage.

    Args:
        part: The tape of the stage.
        order: Maps (module, parameter) to the position of the parameter in the stage's module; None
            for a backward that is not split, which does not depend on that position.
    """
    tape = part.tape
    assert not tape.grad_from, "no gradient of a pipeline stage is made elsewhere"
    names = {"": 0}
    """Ids by name. The root's "" has the same id in all stages."""

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
    relayout = tuple(
        (number, name(fqn), size) for (number, fqn), size in tape.relayout_bytes.items()
    )
    read = [(row.module, fqn) for row in tape.rows for fqn, _ in row.parameters]
    shape = (
        rows,
        units,
        relayout,
        tuple(fqn in tape.relaid_at_once for _, fqn in read),
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
