"""Find the numbers that code writes into shapes: `view(b, s, self.num_heads, self.head_dim)`.

One rank must see its own count there. Rehearsals show which attributes these are: where a rehearsal
diverges, numbers of the surrounding modules that are sizes of the sharded classes are divided,
fewest first, until the program is the same. A number that was divided wrongly shows in the
comparison.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from meshplan.assign.auto.comparison import Divergence, compare
from meshplan.assign.auto.regions import FlowUses, Region
from meshplan.assign.auto.stream import Stream
from meshplan.model.graph import is_inside
from meshplan.model.rehearsal import Rehearsal, Rehearse, Stopped

_LEVELS: Final = 3
"""Levels outwards from the op that diverged in which its numbers may be found."""

_MAX_TRIES: Final = 30
"""Maximum number of rehearsals of one set of regions."""

_MAX_TRIES_OF_ALL: Final = 90
"""Maximum number of rehearsals of a model: each takes as long as recording it."""

_MAX_TOGETHER: Final = 2

Numbers = Mapping[tuple[str, str], int]


class NotTheSame(Exception):
    """A rehearsal that diverges whatever is divided.

    Attributes:
        difference: The first divergence.
    """

    def __init__(self, difference: Divergence) -> None:
        super().__init__(difference.text)
        self.difference = difference


@dataclass(slots=True)
class Rehearsals:
    """Rehearsals of one model, with a limit on their number.

    Args:
        places: The recorded flow.
        rehearse: Runs one rehearsal.
        size: Ranks of tp.
        tries: Rehearsals of the present set of regions.
        before: Rehearsals before that.
        clue: The divergence of the last rehearsal that ran to its end; None if none did.
    """

    places: FlowUses
    rehearse: Rehearse
    size: int
    tries: int = 0
    before: int = 0
    clue: Divergence | None = None

    def find(self, regions: Iterable[Region], known: Numbers) -> dict[tuple[str, str], int]:
        """Find local values of numbers with which one rank runs the program of one process.

        Args:
            regions: The regions to shard.
            known: Numbers that are local already.

        Raises:
            NotTheSame: There are none.
        """
        regions = tuple(regions)
        found = dict(known)
        self.before, self.tries, self.clue = self.before + self.tries, 0, None
        difference = self.run(regions, found)
        while difference is not None:
            better = self._repair(regions, found, difference)
            if better is None:
                raise NotTheSame(self.clue or difference)
            found, difference = better
        return found

    def run(self, regions: tuple[Region, ...], numbers: Numbers) -> Divergence | None:
        """Return the divergence of a rehearsal with these local numbers; None if there is none."""
        self.tries += 1
        words = {fqn: word for r in regions for fqn, word in r.words.items()}
        twin = self.rehearse(
            Rehearsal(
                size=self.size,
                takes_part=frozenset(m for m, w in words.items() if w == "rowwise"),
                leaves_part=frozenset(m for m, w in words.items() if w != "rowwise"),
                parts={fqn: dim for r in regions for fqn, dim in r.parts.items()},
                attributes=numbers,
            )
        )
        found = compare(self.places, regions, self.size, twin)
        if not isinstance(twin, Stopped):
            self.clue = found  # It ran to its end, so it is more informative than one that stopped.
        return found

    def rehearse_stream(
        self, regions: tuple[Region, ...], numbers: Numbers, stream: Stream
    ) -> Divergence | None:
        """Return the divergence of a rehearsal whose modules also see shards of the sequence."""
        words = {fqn: word for r in regions for fqn, word in r.words.items()}
        closing = frozenset(m for m, w in words.items() if w == "rowwise")
        opening = {m for m, w in words.items() if w != "rowwise"} | stream.taking
        gathered = {(m, "") for m in opening - stream.inside - stream.whole}
        twin = self.rehearse(
            Rehearsal(
                size=self.size,
                takes_part=closing,
                leaves_part=frozenset(m for m, w in words.items() if w != "rowwise"),
                parts={fqn: dim for r in regions for fqn, dim in r.parts.items()},
                attributes=numbers,
                cut=frozenset((*stream.cuts, *((m, None) for m in closing))),
                gathered=frozenset((*stream.gathers, *gathered, *((m, None) for m in stream.ends))),
            )
        )
        return compare(self.places, regions, self.size, twin, stream.ops)

    def _repair(
        self, regions: tuple[Region, ...], found: Numbers, difference: Divergence
    ) -> tuple[dict[tuple[str, str], int], Divergence | None] | None:
        """Divide the fewest numbers around a divergence that let the rehearsal get further."""
        suspects = self._suspects(regions, found, difference)
        for count in range(1, _MAX_TOGETHER + 1):
            for chosen in itertools.combinations(suspects, count):
                if self.tries >= min(_MAX_TRIES, _MAX_TRIES_OF_ALL - self.before):
                    return None
                local = dict(found)
                for module, name in chosen:
                    for twin in self._alike(regions, module, name):
                        value = self.places.graph.modules[twin].numbers[name]
                        local.setdefault((twin, name), value // self.size)
                after = self.run(regions, local)
                if after is None or after.at > difference.at:
                    return local, after
        return None

    def _suspects(
        self, regions: tuple[Region, ...], found: Numbers, difference: Divergence
    ) -> list[tuple[str, str]]:
        sizes = self._sizes(regions)
        graph, flow = self.places.graph, self.places.flow
        around = [c.module for c in itertools.islice(flow.around(difference.call), _LEVELS)]
        # Modules that are not called themselves, but whose projections are.
        touched = (fqn.rpartition(".")[0] for r in regions for fqn in r.words)
        held = (fqn for fqn in touched if is_inside(fqn, around[0]))
        return [
            (module, name)
            for module in dict.fromkeys((*around, *held))
            for name, value in graph.modules[module].numbers.items()
            if value in sizes and (module, name) not in found
        ]

    def _sizes(self, regions: Iterable[Region]) -> set[int]:
        """Collect sizes that code may use for a sharded class: alone, or with adjacent factors."""
        out: set[int] = set()
        for region in regions:
            for name in self.places.by_factor[region.factor]:
                for dim in self.places.classes.dims[self.places.values[name]]:
                    if region.factor in dim:
                        at = dim.index(region.factor)
                        for first in range(at + 1):
                            for last in range(at + 1, len(dim) + 1):
                                size = 1
                                for factor in dim[first:last]:
                                    size *= self.places.classes.sizes[factor]
                                out.add(size)
        return {size for size in out if size % self.size == 0}

    def _alike(self, regions: tuple[Region, ...], module: str, name: str) -> list[str]:
        """Find modules of the same type with the same number, around regions of their own."""
        info = self.places.graph.modules[module]
        value = info.numbers[name]
        touched = {fqn for r in regions for fqn in (*r.words, *r.parts)}
        return [
            m.fqn
            for m in self.places.graph.modules.values()
            if m.qualified_type == info.qualified_type
            and m.numbers.get(name) == value
            and (m.fqn == module or any(fqn.startswith(m.fqn + ".") for fqn in touched))
        ]
