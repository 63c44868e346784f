"""Find the attributes from which code computes shapes: `view(b, s, self.num_heads, self.head_dim)`.

On one rank of tp they must have their local values. Rehearsals show which attributes these are.
If a rehearsal diverges from the recorded forward, the candidates are attributes of the
surrounding modules whose value is a size of a sharded dim class. They are divided by tp, as few of
them as possible, until the rehearsal runs the recorded operations. If a wrong attribute is divided,
the rehearsal diverges.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from meshplan.assign.auto.comparison import Divergence, compare
from meshplan.assign.auto.regions import FlowUses, Region
from meshplan.assign.auto.stream import Stream
from meshplan.model.graph import is_inside
from meshplan.model.rehearsal import Rehearsal, Rehearser, Stopped

_LEVELS: Final = 3
"""Number of modules around the diverging operation, innermost first, whose attributes are tried."""

_MAX_TRIES: Final = 30
"""Maximum number of rehearsals of one set of regions."""

_MAX_TRIES_OF_ALL: Final = 90
"""Maximum number of rehearsals of a model; each takes as long as recording its forward."""

_MAX_TOGETHER: Final = 2

Attributes = Mapping[tuple[str, str], int]


class NotTheSame(Exception):
    """The error that a rehearsal diverges, whichever attributes are divided.

    Attributes:
        difference: The divergence to report.
    """

    def __init__(self, difference: Divergence) -> None:
        super().__init__(difference.text)
        self.difference = difference


@dataclass(slots=True)
class Rehearsals:
    """Runs rehearsals of one model, up to a maximum number.

    Args:
        flow_uses: The recorded forward.
        rehearse: Runs a rehearsal.
        size: Number of ranks of tp.
        tries: Number of rehearsals in the current call of `find`.
        before: Number of rehearsals in earlier calls of `find`.
        clue: The divergence of the last rehearsal of this call that ran to its end, or None.
    """

    flow_uses: FlowUses
    rehearse: Rehearser
    size: int
    tries: int = 0
    before: int = 0
    clue: Divergence | None = None

    def find(self, regions: Iterable[Region], known: Attributes) -> dict[tuple[str, str], int]:
        """Return the attributes' local values with which one rank runs the recorded operations.

        Args:
            regions: The regions to shard.
            known: Local values found before, by (module, name).

        Returns:
            All local values, `known` included, by (module, name).

        Raises:
            NotTheSame: No such values were found.
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

    def run(self, regions: tuple[Region, ...], attributes: Attributes) -> Divergence | None:
        """Return the divergence of a rehearsal with these local values; None if there is none."""
        self.tries += 1
        rehearsed = self.rehearse(self._rehearsal(regions, attributes))
        found = compare(self.flow_uses, regions, self.size, rehearsed)
        if not isinstance(rehearsed, Stopped):
            self.clue = found  # More informative than the divergence of a rehearsal that stopped.
        return found

    def rehearse_stream(
        self, regions: tuple[Region, ...], attributes: Attributes, stream: Stream
    ) -> Divergence | None:
        """Return the divergence of a rehearsal with the sequence sharded too; None if none."""
        own = self._rehearsal(regions, attributes)
        opening = own.leaves_part | stream.taking
        gathered = {(m, "") for m in opening - stream.inside - stream.whole}
        rehearsed = self.rehearse(
            replace(
                own,
                cut=frozenset((*stream.cuts, *((m, None) for m in own.takes_part - stream.whole))),
                gathered=frozenset((*stream.gathers, *gathered, *((m, None) for m in stream.ends))),
            )
        )
        return compare(self.flow_uses, regions, self.size, rehearsed, stream.ops)

    def _rehearsal(self, regions: tuple[Region, ...], attributes: Attributes) -> Rehearsal:
        """Return the rehearsal of these regions, without sharding of the sequence."""
        words = {fqn: word for r in regions for fqn, word in r.words.items()}
        return Rehearsal(
            size=self.size,
            takes_part=frozenset(m for m, w in words.items() if w == "rowwise"),
            leaves_part=frozenset(m for m, w in words.items() if w != "rowwise"),
            parts={fqn: dim for r in regions for fqn, dim in r.parts.items()},
            attributes=attributes,
        )

    def _repair(
        self, regions: tuple[Region, ...], found: Attributes, difference: Divergence
    ) -> tuple[dict[tuple[str, str], int], Divergence | None] | None:
        """Divide the fewest attributes with which the rehearsal diverges later, or not at all.

        Returns:
            (local values, divergence with them or None); None if no attributes help.
        """
        suspects = self._suspects(regions, found, difference)
        for count in range(1, _MAX_TOGETHER + 1):
            for chosen in itertools.combinations(suspects, count):
                if self.tries >= min(_MAX_TRIES, _MAX_TRIES_OF_ALL - self.before):
                    return None
                local = dict(found)
                for module, name in chosen:
                    for other in self._equal_modules(regions, module, name):
                        value = self.flow_uses.graph.modules[other].numbers[name]
                        local.setdefault((other, name), value // self.size)
                after = self.run(regions, local)
                if after is None or after.at > difference.at:
                    return local, after
        return None

    def _suspects(
        self, regions: tuple[Region, ...], found: Attributes, difference: Divergence
    ) -> list[tuple[str, str]]:
        sizes = self._sizes(regions)
        graph, flow = self.flow_uses.graph, self.flow_uses.flow
        around = [c.module for c in itertools.islice(flow.around(difference.call), _LEVELS)]
        # Also try modules that are never called, but whose projections are.
        touched = (fqn.rpartition(".")[0] for r in regions for fqn in r.words)
        within = (fqn for fqn in touched if is_inside(fqn, around[0]))
        return [
            (module, name)
            for module in dict.fromkeys((*around, *within))
            for name, value in graph.modules[module].numbers.items()
            if value in sizes and (module, name) not in found
        ]

    def _sizes(self, regions: Iterable[Region]) -> set[int]:
        """Return the sizes of the sharded factors, alone and multiplied by adjacent factors."""
        out: set[int] = set()
        for region in regions:
            for name in self.flow_uses.by_factor[region.factor]:
                for dim in self.flow_uses.classes.dims[self.flow_uses.values[name]]:
                    if region.factor in dim:
                        at = dim.index(region.factor)
                        for first in range(at + 1):
                            for last in range(at + 1, len(dim) + 1):
                                size = 1
                                for factor in dim[first:last]:
                                    size *= self.flow_uses.classes.sizes[factor]
                                out.add(size)
        return {size for size in out if size % self.size == 0}

    def _equal_modules(self, regions: tuple[Region, ...], module: str, name: str) -> list[str]:
        """Return the fqns of modules of the same type and value that contain sharded modules."""
        info = self.flow_uses.graph.modules[module]
        value = info.numbers[name]
        touched = {fqn for r in regions for fqn in (*r.words, *r.parts)}
        return [
            m.fqn
            for m in self.flow_uses.graph.modules.values()
            if m.qualified_type == info.qualified_type
            and m.numbers.get(name) == value
            and (m.fqn == module or any(fqn.startswith(m.fqn + ".") for fqn in touched))
        ]
