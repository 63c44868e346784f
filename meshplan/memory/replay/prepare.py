"""What the replay reads off a work, once for all plans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from operator import itemgetter
from typing import Final, NamedTuple, TypeVar

from meshplan.errors import PlanError, Problem
from meshplan.memory.log.events import Change, EventLog
from meshplan.memory.log.microbatch import AT_STAGE, HookKind, HookPoint, MicrobatchTrace

_T = TypeVar("_T")
_EVENT: Final = itemgetter(0)
_BEGINNING: Final = (HookKind.BEFORE_FORWARD, HookKind.BEFORE_BACKWARD)
"""When a mark belongs to the phase that it begins rather than to the one that it ends."""


class Act(NamedTuple):
    """What wrappers do while a work is done.

    Attributes:
        event: Before which.
        enters: Whether it belongs to the phase that begins there.
        moment: When a unit acts; None where a gradient is there, or backward begins.
        fqn: Of the unit, or of the parameter.
        at: The stage that it is of, where a rank has several.
        storage: Of the gradient; -1 where there is none.
        size: Its bytes.
        in_backward: Whether backward runs.
    """

    event: int
    enters: bool
    moment: HookKind | None
    fqn: str = ""
    at: str = ""
    storage: int = -1
    size: int = 0
    in_backward: bool = False


class Prepared:
    """A work, read.

    Attributes:
        log: Of the work.
        marks: Of the work.
        gradients: By parameter, the storage of its gradient, or of the first one.
        arrivals: (event before which it is there, parameter, storage, bytes) of each gradient.
        settling: Of the work.
        host: Of the work.
        losses: Bytes of the storages of the loss.
        before: The events of what is there before.
        forgotten: Storages that are there before and end: what the model keeps from the last time.
        kept: What takes their place.
    """

    def __init__(self, work: MicrobatchTrace) -> None:
        self.log: EventLog = work.log
        self.marks: tuple[HookPoint, ...] = work.marks
        changes = work.log.changes
        live: dict[int, int] = {}
        ended: list[int] = []
        for delta, storage, _ in changes:
            if storage not in live:
                live[storage] = delta
            elif size := live[storage] + delta:
                live[storage] = size
            else:
                ended.append(storage)
                del live[storage]
        num_before = work.num_before
        if num_before is None:
            num_before = sum(not phase for _, _, phase in changes)
        self.before: tuple[Change, ...] = changes[:num_before]
        held = {storage for _, storage, _ in self.before}
        unsaid = {storage for fqn, storage in work.gradients.items() if fqn not in work.ready}
        births: dict[int, int] = {}
        for number, (_, storage, _) in enumerate(changes if unsaid else ()):
            if storage in unsaid:
                births.setdefault(storage, number)
        self.gradients = work.gradients
        self.arrivals = [
            (work.ready.get(fqn, births.get(s, 0) + 1), fqn, s, live.get(s, 0))
            for fqn, s in work.gradients.items()
        ]
        self.arrivals += [(event, fqn, s, live.get(s, 0)) for event, fqn, s in work.again]
        self.settling = work.settling
        self.host = work.host
        self.losses = {s: live[s] for s in work.losses if s in live}
        self.forgotten = tuple(s for s in ended if s in held)
        own = {s for _, _, s, _ in self.arrivals} | self.losses.keys() | held
        self.kept = tuple(s for s in live if s not in own)
        sizes = {storage: delta for delta, storage, _ in self.before}
        self._is_steady = [sizes[s] for s in self.forgotten] == [live[s] for s in self.kept]

    def check_repeats(self) -> None:
        """What the model keeps from one time to the next is always as large.

        Raises:
            PlanError: It is not.
        """
        if not self._is_steady:
            what = "what the model keeps from one microbatch to the next is not always as large"
            raise PlanError(Problem(what, fix="trace the whole step instead"))

    @property
    def num_events(self) -> int:
        """Of the work."""
        return len(self.log.changes)

    @cached_property
    def gradients_at(self) -> Mapping[str, Mapping[str, int]]:
        """`gradients` of each stage, by its own names."""
        return _by_place(self.gradients)

    @cached_property
    def settling_at(self) -> Mapping[str, Mapping[str, tuple[tuple[int, int], ...]]]:
        """`settling` of each stage, by its own names."""
        return _by_place(self.settling)

    @cached_property
    def ends(self) -> Counter[str]:
        """Of each stage, how many backwards are marked: of a told pipeline not every one is."""
        marks = (mark for mark in self.marks if mark.moment == HookKind.END_OF_BACKWARD)
        return Counter(apart(mark.unit)[1] for mark in marks)

    @cached_property
    def first_made_in_backward(self) -> int:
        """The event of the first storage that backward makes."""
        backward = self.log.phases.index("backward")
        return next(
            number for number, (delta, _, phase) in enumerate(self.log.changes)
            if phase == backward and delta > 0
        )  # fmt: skip

    @cached_property
    def acts(self) -> tuple[Act, ...]:
        """All that wrappers do, in order: gradients before marks where they come at once."""
        acts = [
            Act(event, False, None, *apart(name), storage, size)
            for event, name, storage, size in self.arrivals
        ]
        acts += [
            Act(
                event, moment in _BEGINNING, moment, *apart(unit),
                in_backward=self._is_in_backward(event),
            )
            for event, moment, unit in self.marks
        ]  # fmt: skip
        acts.append(Act(self.first_made_in_backward, False, None))
        return tuple(sorted(acts, key=_EVENT))

    def _is_in_backward(self, event: int) -> bool:
        """Whether backward runs at a mark that ends something."""
        phase = self.log.changes[event - 1][2] if event else 0
        return self.log.phases[phase] == "backward"


def _by_place(items: Mapping[str, _T]) -> dict[str, dict[str, _T]]:
    """What is said of each stage, by fqn."""
    out: dict[str, dict[str, _T]] = {}
    for name, value in items.items():
        fqn, at = apart(name)
        out.setdefault(at, {})[fqn] = value
    return out


def apart(name: str) -> tuple[str, str]:
    """(fqn, where) of a name that may tell its stage."""
    fqn, at, stage = name.partition(AT_STAGE)
    return fqn, at + stage
