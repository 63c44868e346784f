"""What one rank of tp would run, recorded without it: the question and the answer, as data.

`assign` asks which modules take and leave parts; `runtime.trace.rehearse` runs the model once on
shapes alone, each of those modules as one rank sees it from outside. Refuses to judge.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from meshplan.model.flow import Flow


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """The model as one rank would run it.

    Args:
        size: Ranks of tp.
        takes_part: Modules whose input is a part, cut along its last dim.
        leaves_part: Modules whose output is.
        parts: Parameters of which the rank holds a part, by fqn: the dim that is cut.
        attributes: Numbers that a module's code reads, by (module, attribute): their local value.
        cut: (module, path of an argument) where a part of the sequence, the second dim, enters in
            place of all of it; without a path, where what leaves is cut.
        gathered: The same where all of it takes the place of a part.
    """

    size: int
    takes_part: frozenset[str] = frozenset()
    leaves_part: frozenset[str] = frozenset()
    parts: Mapping[str, int] = field(default_factory=dict)
    attributes: Mapping[tuple[str, str], int] = field(default_factory=dict)
    cut: frozenset[tuple[str, str | None]] = frozenset()
    gathered: frozenset[tuple[str, str | None]] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """The rehearsal raised.

    Args:
        module: The innermost module that was running.
        num_ops: Operations that had run.
        text: The error's first line.
    """

    module: str
    num_ops: int
    text: str


Rehearse = Callable[[Rehearsal], Flow | Stopped]
"""Runs a rehearsal of the model that a flow was recorded from."""
