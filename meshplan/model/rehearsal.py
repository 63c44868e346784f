"""Request and result of a rehearsal: a run of the model on local shapes, as one rank of tp.

`assign` decides which modules read and return shards, and requests the run.
`runtime.trace.rehearse` runs the model once on fake tensors, in which the inputs and outputs of
those modules have local shapes, and returns the recorded forward, which `assign` then checks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from meshplan.model.flow import Flow
from meshplan.model.graph import ModelGraph

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """The request to run the model as one rank of tp.

    Args:
        size: Number of ranks of tp.
        takes_part: Fqns of modules whose input is sharded along its last dim.
        leaves_part: Fqns of modules whose output is sharded along its last dim.
        parts: The sharded dim of each sharded parameter, by fqn.
        attributes: Values to set on attributes for the run, by (module, attribute), such as the
            local number of heads.
        cut: Pairs (module, path of an argument) of arguments to replace by a shard of the sequence,
            which is dim 1; with path None, the module's output is replaced.
        gathered: Pairs (module, path) of arguments whose shard of the sequence is to be replaced by
            the whole sequence; with path None, the output.
    """

    size: int
    takes_part: frozenset[str] = frozenset()
    leaves_part: frozenset[str] = frozenset()
    parts: Mapping[str, int] = field(default_factory=dict)
    attributes: Mapping[tuple[str, str], int] = field(default_factory=dict)
    cut: frozenset[tuple[str, str | None]] = frozenset()
    gathered: frozenset[tuple[str, str | None]] = frozenset()

    @property
    def key(self) -> tuple[Hashable, ...]:
        """A value that is equal for equal rehearsals, and can be hashed."""
        parts, attributes = frozenset(self.parts.items()), frozenset(self.attributes.items())
        places = self.takes_part, self.leaves_part, self.cut, self.gathered
        return self.size, parts, attributes, *places


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """The error that ended a rehearsal.

    Args:
        module: Fqn of the innermost module that was running.
        num_ops: Number of operations that had run before the error.
        text: The error's first line.
    """

    module: str
    num_ops: int
    text: str


class Rehearser:
    """Runs rehearsals of one live model, and keeps what was derived with them.

    A search decides hundreds of plans for one model, which differ in few ways that matter for tp.

    Args:
        run: Function that runs a rehearsal: it returns the recorded forward, or the error that the
            model's code raised.
    """

    def __init__(self, run: Callable[[Rehearsal], Flow | Stopped]) -> None:
        self._run = run
        self._known: dict[Hashable, Flow | Stopped] = {}
        # With the graph itself, so that no other graph gets its id while the result is kept.
        self._derived: dict[Hashable, tuple[ModelGraph, Any]] = {}

    def __call__(self, what: Rehearsal) -> Flow | Stopped:
        """Return the result of a rehearsal; equal ones run once."""
        if what.key not in self._known:
            self._known[what.key] = self._run(what)
        return self._known[what.key]

    def once(self, graph: ModelGraph, key: Hashable, derive: Callable[[], T]) -> T:
        """Return `derive()`, which is called once for each graph and key.

        Args:
            graph: The graph of the model.
            key: All that the result depends on besides the graph and the rehearsals.
            derive: Derives the result, which nobody may change.
        """
        found = self._derived.get((id(graph), key))
        if found is None:
            found = self._derived[id(graph), key] = graph, derive()
        result: T = found[1]
        return result
