"""Index a microbatch trace for the replay, once for all plans."""

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
"""Hook points that belong to the phase that begins at their event. All others belong to the phase
that ends there."""


class Act(NamedTuple):
    """An action of the wrappers during a microbatch.

    Attributes:
        event: Index of the event before which the action happens.
        enters: If True, the action belongs to the phase that begins at the event.
        kind: Kind of the hook point at which a unit acts; None for the assignment of a complete
            gradient, and for the beginning of backward.
        fqn: Fqn of the unit, or of the parameter whose gradient is assigned.
        at: Suffix of the stage, such as "@stage3"; "" without a pipeline.
        storage: Storage of the assigned gradient; -1 for other actions.
        size: Bytes of the assigned gradient.
        in_backward: True if backward is running at the hook point.
    """

    event: int
    enters: bool
    kind: HookKind | None
    fqn: str = ""
    at: str = ""
    storage: int = -1
    size: int = 0
    in_backward: bool = False


class Prepared:
    """A microbatch trace, indexed for the replay.

    Attributes:
        log: The log of the trace.
        hook_points: The hook points of the trace.
        gradients: Storage of each parameter's gradient, by name; of several gradients the first.
        arrivals: For each gradient: (index of the event before which it is complete, name of the
            parameter, storage, bytes).
        grad_relayout: Redistributions of gradients, as in the trace.
        host: Changes of host memory, as in the trace.
        losses: Bytes of the loss, by storage.
        before: Events that allocate what exists before the microbatch.
        forgotten: Storages that exist before the microbatch and are freed in it: tensors that the
            model kept from the previous microbatch.
        kept: Storages that the model keeps for the next microbatch, in the place of `forgotten`.
    """

    def __init__(self, trace: MicrobatchTrace) -> None:
        self.log: EventLog = trace.log
        self.hook_points: tuple[HookPoint, ...] = trace.hook_points
        changes = trace.log.changes
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
        num_before = trace.num_before
        if num_before is None:
            num_before = sum(not phase for _, _, phase in changes)
        self.before: tuple[Change, ...] = changes[:num_before]
        existing = {storage for _, storage, _ in self.before}
        unlisted = {storage for fqn, storage in trace.gradients.items() if fqn not in trace.ready}
        births: dict[int, int] = {}
        for number, (_, storage, _) in enumerate(changes if unlisted else ()):
            if storage in unlisted:
                births.setdefault(storage, number)
        self.gradients = trace.gradients
        # A gradient that `ready` does not list is complete right after its birth.
        self.arrivals = [
            (trace.ready.get(fqn, births.get(s, 0) + 1), fqn, s, live.get(s, 0))
            for fqn, s in trace.gradients.items()
        ]
        self.arrivals += [
            (event, fqn, s, live.get(s, 0)) for event, fqn, s in trace.later_gradients
        ]
        self.grad_relayout = trace.grad_relayout
        self.host = trace.host
        self.losses = {s: live[s] for s in trace.losses if s in live}
        self.forgotten = tuple(s for s in ended if s in existing)
        own = {s for _, _, s, _ in self.arrivals} | self.losses.keys() | existing
        self.kept = tuple(s for s in live if s not in own)
        sizes = {storage: delta for delta, storage, _ in self.before}
        self._is_steady = [sizes[s] for s in self.forgotten] == [live[s] for s in self.kept]

    def check_repeats(self) -> None:
        """Check that the tensors that the model keeps for the next microbatch keep their sizes.

        Raises:
            PlanError: The sizes change, so microbatches are not equal.
        """
        if not self._is_steady:
            what = "the tensors that the model keeps for the next microbatch change in size"
            raise PlanError(Problem(what, fix="trace the step with meshplan estimate --tier 3"))

    @property
    def num_events(self) -> int:
        """Number of events of the trace."""
        return len(self.log.changes)

    @cached_property
    def gradients_at(self) -> Mapping[str, Mapping[str, int]]:
        """`gradients` by the suffix of the stage, then by fqn."""
        return _by_place(self.gradients)

    @cached_property
    def grad_relayout_at(self) -> Mapping[str, Mapping[str, tuple[tuple[int, int], ...]]]:
        """`grad_relayout` by the suffix of the stage, then by fqn."""
        return _by_place(self.grad_relayout)

    @cached_property
    def ends(self) -> Counter[str]:
        """Number of `END_OF_BACKWARD` hook points, by the suffix of the stage.

        This may be less than the number of backwards, because summarised microbatches may have no
        hook points.
        """
        hook_points = (
            point for point in self.hook_points if point.kind == HookKind.END_OF_BACKWARD
        )
        return Counter(apart(point.unit)[1] for point in hook_points)

    @cached_property
    def first_made_in_backward(self) -> int:
        """Index of the first event in backward that allocates a storage."""
        backward = self.log.phases.index("backward")
        return next(
            number for number, (delta, _, phase) in enumerate(self.log.changes)
            if phase == backward and delta > 0
        )  # fmt: skip

    @cached_property
    def acts(self) -> tuple[Act, ...]:
        """All actions in order; at the same event, gradients are assigned before hook points."""
        acts = [
            Act(event, False, None, *apart(name), storage, size)
            for event, name, storage, size in self.arrivals
        ]
        acts += [
            Act(
                event, kind in _BEGINNING, kind, *apart(unit),
                in_backward=self._is_in_backward(event),
            )
            for event, kind, unit in self.hook_points
        ]  # fmt: skip
        acts.append(Act(self.first_made_in_backward, False, None))
        return tuple(sorted(acts, key=_EVENT))

    def _is_in_backward(self, event: int) -> bool:
        """Return True if the event before the one with this index is in a backward phase."""
        phase = self.log.changes[event - 1][2] if event else 0
        return self.log.phases[phase] == "backward"


def _by_place(items: Mapping[str, _T]) -> dict[str, dict[str, _T]]:
    """Return the items in a dict of dicts: by the suffix of the stage, then by fqn."""
    out: dict[str, dict[str, _T]] = {}
    for name, value in items.items():
        fqn, at = apart(name)
        out.setdefault(at, {})[fqn] = value
    return out


def apart(name: str) -> tuple[str, str]:
    """Return (fqn, suffix) of a name that may end in the suffix of a stage, such as "@stage3"."""
    fqn, at, stage = name.partition(AT_STAGE)
    return fqn, at + stage
