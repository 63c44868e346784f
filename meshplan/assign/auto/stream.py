"""Data class for where activations are sharded along the sequence over tp."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from meshplan.assign.base.types import Reason, SequenceBoundary

PARTS: Final = Reason(
    "auto: replicated and used on shards of the sequence, with its gradient all-reduced over tp"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """The activations that are sharded along the sequence, and the modules that this affects.

    Args:
        cuts: Pairs (module, path of an argument) of whole arguments that are replaced by the rank's
            shard of the sequence.
        gathers: Pairs (module, path of an argument) of shards that are gathered, because the module
            computes on the whole sequence.
        ends: Fqns of modules whose outputs are shards and are gathered.
        inside: Fqns of styled modules whose input was gathered by a module in `gathers`.
        taking: Fqns of styled modules whose features are not sharded: those with the style vocab,
            and replicated projections with summed gradients.
        whole: Fqns of styled modules whose input is never a shard of the sequence.
        ops: Indices of the operations that compute on shards.
        values: Ids of the values that are shards where modules return them.
        summed: Fqns of parameters that are used on shards, so that each rank has a partial sum of
            their gradients.
    """

    cuts: tuple[tuple[str, str], ...] = ()
    gathers: tuple[tuple[str, str], ...] = ()
    ends: tuple[str, ...] = ()
    inside: frozenset[str] = frozenset()
    taking: frozenset[str] = frozenset()
    whole: frozenset[str] = frozenset()
    ops: frozenset[int] = frozenset()
    values: frozenset[int] = frozenset()
    summed: tuple[str, ...] = ()


def crossings(stream: Stream) -> Iterator[SequenceBoundary]:
    """Yield each place where an activation is sharded along the sequence, or gathered."""
    for module, path in stream.cuts:
        reason = Reason("auto: from here on, each position is computed independently")
        yield SequenceBoundary(module=module, path=path, change="cut", reason=reason)
    for module, path in stream.gathers:
        reason = Reason("auto: it mixes positions of the sequence, or reads its length")
        yield SequenceBoundary(module=module, path=path, change="gather", reason=reason)
    for module in stream.ends:
        reason = Reason("auto: code after it may need the whole sequence")
        yield SequenceBoundary(module=module, path=None, change="gather", reason=reason)
