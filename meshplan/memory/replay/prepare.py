"""Read what the replay needs off a microbatch trace, once for all plans."""

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
"""Hook points that belong to the phase that begins there; all others to the one that ends."""


class Act(NamedTuple):
    """An action of the wrappers during a microbatch.

    Attributes:
        event: Index of the event before which it happens.
        enters: If True, it belongs to the phase that begins at the event.
        moment: The hook point at which a unit acts; None where a gradient is complete, or where
            backward begins.
        fqn: Fqn of the unit or the parameter.
        at: Suffix of its stage, such as "@stage3"; "" where a rank has one stage only.
        storage: Storage of the gradient; -1 if there is none.
        size: Bytes of the gradient.
        in_backward: True if backward is running.
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
    """A microbatch trace, indexed for the replay.

    Attributes:
        log: The log of the trace.
        marks: The hook points of the trace.
        gradients: Storage of the gradient, or of the first one, by parameter.
        arrivals: (event before which it is complete, parameter, storage, bytes) of each gradient.
        settling: Relayouts of gradients, as in the trace.
        host: Changes of host memory, as in the trace.
        losses: Bytes of the loss, by storage.
        before: Events that allocate what exists before the microbatch.
        forgotten: Storages that exist before the microbatch and end in it: what the model kept from
            the microbatch before.
        kept: Storages that take the place of `forgotten` for the next microbatch.
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
        # A gradient is complete when it is made, unless the trace says otherwise.
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
        """Check that what the model keeps from one microbatch to the next does not change its size.

        Raises:
            PlanError: The size changes.
        """
        if not self._is_steady:
            what = "what the model keeps from one microbatch to the next is not always as large"
            raise PlanError(Problem(what, fix="trace the step with meshplan estimate --tier 3"))

    @property
    def num_events(self) -> int:
        """Number of events of the trace."""
        return len(self.log.changes)

    @cached_property
    def gradients_at(self) -> Mapping[str, Mapping[str, int]]:
        """`gradients` by stage, each with the names inside of the stage."""
        return _by_place(self.gradients)

    @cached_property
    def settling_at(self) -> Mapping[str, Mapping[str, tuple[tuple[int, int], ...]]]:
        """`settling` by stage, each with the names inside of the stage."""
        return _by_place(self.settling)

    @cached_property
    def ends(self) -> Counter[str]:
        """Number of backwards that are marked, by the suffix of their stage.

        Summarised microbatches may have no mark.
        """
        marks = (mark for mark in self.marks if mark.moment == HookKind.END_OF_BACKWARD)
        return Counter(apart(mark.unit)[1] for mark in marks)

    @cached_property
    def first_made_in_backward(self) -> int:
        """Index of the event that makes the first storage of backward."""
        backward = self.log.phases.index("backward")
        return next(
            number for number, (delta, _, phase) in enumerate(self.log.changes)
            if phase == backward and delta > 0
        )  # fmt: skip

    @cached_property
    def acts(self) -> tuple[Act, ...]:
        """All actions in order. At the same event gradients come before hook points."""
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
        """Return True if backward is running at a hook point that ends something."""
        phase = self.log.changes[event - 1][2] if event else 0
        return self.log.phases[phase] == "backward"


def _by_place(items: Mapping[str, _T]) -> dict[str, dict[str, _T]]:
    """Return the items by the suffix of their stage and by fqn."""
    out: dict[str, dict[str, _T]] = {}
    for name, value in items.items():
        fqn, at = apart(name)
        out.setdefault(at, {})[fqn] = value
    return out


def apart(name: str) -> tuple[str, str]:
    """Return (fqn, suffix) of a name that may end in the suffix of a stage, such as "@stage3"."""
    fqn, at, stage = name.partition(AT_STAGE)
    return fqn, at + stage
