"""The parts of a model that work on shards of the sequence, as data."""

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
    """The parts of a model that work on shards of the sequence.

    Args:
        cuts: (module, path of an argument) where a whole sequence enters and each rank goes on
            with its shard.
        gathers: (module, path of an argument) where shards enter and are gathered, since the module
            works on the whole sequence.
        ends: Modules whose outputs are shards and are gathered there.
        inside: Styled modules that read the input of a module in `gathers`.
        taking: Styled modules that take a whole sequence and leave no features sharded: heads.
        whole: Styled modules outside of the stream.
        ops: Operations on shards, by number.
        summed: Parameters used on shards, of whose gradients each rank has a partial sum.
    """

    cuts: tuple[tuple[str, str], ...] = ()
    gathers: tuple[tuple[str, str], ...] = ()
    ends: tuple[str, ...] = ()
    inside: frozenset[str] = frozenset()
    taking: frozenset[str] = frozenset()
    whole: frozenset[str] = frozenset()
    ops: frozenset[int] = frozenset()
    summed: tuple[str, ...] = ()


def crossings(stream: Stream) -> Iterator[SequenceBoundary]:
    """Yield the boundaries of the sequence sharding."""
    for module, path in stream.cuts:
        reason = Reason("auto: from here on, each position is computed independently")
        yield SequenceBoundary(module=module, path=path, change="cut", reason=reason)
    for module, path in stream.gathers:
        reason = Reason("auto: it mixes positions of the sequence, or reads its length")
        yield SequenceBoundary(module=module, path=path, change="gather", reason=reason)
    for module in stream.ends:
        reason = Reason("auto: what follows may need the whole sequence")
        yield SequenceBoundary(module=module, path=None, change="gather", reason=reason)
