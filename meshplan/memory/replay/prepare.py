"""What the replay reads off a work, once for all plans."""

from __future__ import annotations

from functools import cached_property

from meshplan.errors import PlanError, Problem
from meshplan.memory.log import Event, EventLog
from meshplan.memory.work import Mark, Work


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

    def __init__(self, work: Work) -> None:
        self.log: EventLog = work.log
        self.marks: tuple[Mark, ...] = work.marks
        live: dict[int, int] = {}
        births: dict[int, int] = {}
        ended: list[int] = []
        num_before = 0
        for number, (delta, storage, phase) in enumerate(work.log.events):
            num_before += not phase
            size = live.get(storage, 0) + delta
            if size:
                live[storage] = size
                births.setdefault(storage, number)
            else:
                ended.append(storage)
                del live[storage]
        if work.num_before is not None:
            num_before = work.num_before
        self.before: tuple[Event, ...] = work.log.events[:num_before]
        held = {event.storage for event in self.before}
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
        sizes = {event.storage: event.delta for event in self.before}
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
        return len(self.log.events)

    @cached_property
    def first_made_in_backward(self) -> int:
        """The event of the first storage that backward makes."""
        backward = self.log.phases.index("backward")
        return next(
            n for n, event in enumerate(self.log.events)
            if event.phase == backward and event.delta > 0
        )  # fmt: skip

    def is_in_backward(self, mark: Mark) -> bool:
        """Whether backward runs at a mark that ends something."""
        phase = self.log.events[mark.event - 1].phase if mark.event else 0
        return self.log.phases[phase] == "backward"
