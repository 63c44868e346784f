"""What is reserved for the step of a rank, workspaces included."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

from meshplan.memory.allocator import Reserve, reserve
from meshplan.memory.driver import with_workspaces
from meshplan.memory.log import EventLog
from meshplan.spec import Spec

_STREAM = attrgetter("stream")


@dataclass(frozen=True, slots=True)
class Held:
    """The log of a rank's step, workspaces included, and what is reserved for it."""

    log: EventLog
    reserve: Reserve


class Holding:
    """What is reserved for one log after another; what has the same events is played once.

    Args:
        device: A name of `hardware`.
        spec: Of the plan, which says what allocator there is.
    """

    def __init__(self, device: str, spec: Spec) -> None:
        self._device, self._grows = device, spec.allocator == "expandable"
        self._known: list[tuple[EventLog, Reserve]] = []

    def of(self, log: EventLog) -> Held:
        """Of a log without workspaces."""
        whole = with_workspaces(log, self._device)
        found = next((held for known, held in self._known if _do_the_same(known, log)), None)
        if found is None:
            found = reserve(whole, expandable=self._grows)
            self._known.append((log, found))
        return Held(whole, found)


def _do_the_same(one: EventLog, other: EventLog) -> bool:
    """Whether an allocator sees no difference.

    Logs that differ do so soon: to compare them takes less than to hash either.
    """
    if len(one.changes) != len(other.changes) or one.changes != other.changes:
        return False
    return [*map(_STREAM, one.storages)] == [*map(_STREAM, other.storages)]
