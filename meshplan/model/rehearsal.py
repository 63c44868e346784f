"""A dry run of the model as one rank of tp: the request and its answer, as data.

`assign` decides which modules read and return shards; `runtime.trace.rehearse` runs the model once
on shapes alone, with each of those modules as one rank sees it from outside. Nothing is judged
here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from meshplan.model.flow import Flow


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """The request to run the model as one rank of tp.

    Args:
        size: Number of ranks of tp.
        takes_part: Modules whose input is a shard along its last dim.
        leaves_part: Modules whose output is a shard along its last dim.
        parts: Sharded dim of each parameter of which the rank holds a shard, by fqn.
        attributes: Local values of numbers that a module's code reads, by (module, attribute).
        cut: Pairs (module, path of an argument) where a shard of the sequence, the second dim,
            replaces the whole argument; path None shards the module's output.
        gathered: Pairs (module, path) where the whole sequence replaces a shard.
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
    """The error that ended a rehearsal.

    Args:
        module: The innermost module that was running.
        num_ops: Number of operations that had run.
        text: The error's first line.
    """

    module: str
    num_ops: int
    text: str


Rehearse = Callable[[Rehearsal], Flow | Stopped]
"""Run a rehearsal of the model from which a flow was recorded."""
