"""Count how often FSDP2 gathers and reduces each unit in one step, by replaying `wrappers.fsdp`.

Backward is assumed to visit the calls of the forward in reverse. A unit with a missing gradient
reduces zeros, because `runtime.apply.data.gradients` fills them in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from meshplan.assign import Unit
from meshplan.model.graph import is_inside
from meshplan.plan.plan import Plan
from meshplan.traffic.forward import Forward
from meshplan.wrappers.fsdp import Units, UnitState


@dataclass(frozen=True, slots=True)
class Passes:
    """The passes over the microbatches of one step.

    Args:
        order: One letter per pass: "F" for a forward, "B" for a backward that needs the parameters.
        splits: If True, the schedule splits backwards into halves (I and W). Parameters then stay
            gathered, and gradients are reduced once, after all backwards.
        reduces_at_end: If True, the step ends with the reduction of gradients. False for a pipeline
            stage that no gradient reaches, unless backwards are split.
    """

    order: tuple[str, ...]
    splits: bool = False
    reduces_at_end: bool = True


@dataclass(frozen=True, slots=True)
class _HookEvent:
    """One event of a forward: a unit's call begins or ends, or a recomputed module's call ends.

    Args:
        kind: "enter" if a unit's call begins, "leave" if it ends, "redo" for a recomputed module.
        units: Fqn of the unit; for "redo", fqns of all units that the recomputation runs.
        needs_grad: True if backward computes a gradient of the unit's inputs ("enter") or outputs
            ("leave"); always True for "redo".
    """

    kind: Literal["enter", "leave", "redo"]
    units: tuple[str, ...]
    needs_grad: bool


@dataclass(slots=True, eq=False, kw_only=True)
class _CountedUnit(UnitState):
    """The state of a unit, and the number of its gathers and reductions.

    Attributes:
        gathers: Number of all-gathers.
        reductions: For each backward, how often the unit's gradients were ready to be reduced.
    """

    gathers: int = 0
    reductions: list[int] = field(default_factory=list)


class _Counts:
    """`Actions` that count the gathers and reductions of each unit."""

    def gather(self, unit: _CountedUnit) -> None:
        unit.gathers += 1

    def reduce(self, unit: _CountedUnit) -> None:
        unit.reductions[-1] += 1

    def _count_nothing(self, *_: _CountedUnit) -> None:
        """Do nothing, since this action sends nothing."""

    wait = end_forward = free = keep_fewer = take_gradients = end_step = _count_nothing


@dataclass(frozen=True, slots=True)
class UnitUse:
    """The gathers and reductions of a unit in one step.

    Args:
        gathers: Number of all-gathers.
        reductions: For each backward, how often the unit's gradients are ready to be reduced.
    """

    gathers: int
    reductions: tuple[int, ...]


def uses_of_units(plan: Plan, forward: Forward | None, passes: Passes) -> Mapping[str, UnitUse]:
    """Return the gathers and reductions of every unit that has parameters, by fqn.

    Args:
        plan: The plan of the model, or of one pipeline stage.
        forward: A recorded forward; None assumes that each unit is called once, with gradients.
        passes: The passes of one step.
    """
    owners = {placed.unit for placed in plan.assignment.tensors.values()}
    units = {fqn: unit for fqn, unit in plan.assignment.units.items() if fqn in owners}
    out: dict[str, UnitUse] = {}
    for root in _roots(plan.assignment.units):
        inside = {fqn: unit for fqn, unit in units.items() if is_inside(fqn, root)}
        events = _events(plan, inside, forward) if forward else _once(inside)
        out |= dict(_Play(inside, events, passes).uses())
    return out


def _roots(units: Mapping[str, Unit]) -> list[str]:
    """Return fqns of the units inside no other unit. FSDP2 prefetches within each separately."""
    return [u for u in units if not any(o != u and is_inside(u, o) for o in units)]


def _once(units: Mapping[str, Unit]) -> list[_HookEvent]:
    """Return the events of a forward that calls each unit once, in the order of the plan."""
    out: list[_HookEvent] = []
    for fqn in units:  # Inner units come first.
        first = next((n for n, e in enumerate(out) if is_inside(e.units[0], fqn)), len(out))
        out.insert(first, _HookEvent("enter", (fqn,), fqn != ""))
        out.append(_HookEvent("leave", (fqn,), True))
    return out


def _events(plan: Plan, units: Mapping[str, Unit], forward: Forward) -> list[_HookEvent]:
    """Return the events of a recorded forward, in order."""
    found: list[tuple[int, int, _HookEvent]] = []
    recomputed = plan.assignment.recompute
    for call in forward.calls:
        has_gradient = any(tensor.needs_grad for tensor in call.outputs)
        if call.fqn in units:
            is_fed = any(tensor.needs_grad for tensor in call.inputs)
            found.append((call.begin, 0, _HookEvent("enter", (call.fqn,), is_fed)))
            found.append((call.end, 1, _HookEvent("leave", (call.fqn,), has_gradient)))
        if call.fqn in recomputed and has_gradient:
            # Recomputation runs until the last tensor that autograd saved.
            last = max((save for save in forward.saves if save < call.end), default=0)
            rerun = tuple(
                inner.fqn
                for inner in forward.calls
                if inner.fqn in units and call.begin < inner.begin < min(last, call.end)
            )
            found.append((call.end, 0, _HookEvent("redo", rerun, True)))
    return [event for _, _, event in sorted(found, key=lambda item: item[:2])]


def _runs(order: Sequence[str]) -> Iterator[tuple[Sequence[str], int]]:
    """Split an order of passes into runs; yield (passes of one round, number of rounds).

    A run is a number of forwards that are each followed by a backward, or of forwards (one in each
    round), or of backwards (all in a single round).

    >>> [(*run, times) for run, times in _runs("FFFBFBB")]
    [('F', 2), ('F', 'B', 2), ('B', 1)]
    """
    at = 0
    while at < len(order):
        pairs = 0
        while tuple(order[at + 2 * pairs : at + 2 * pairs + 2]) == ("F", "B"):
            pairs += 1
        if pairs:
            yield order[at : at + 2], pairs
            at += 2 * pairs
            continue
        kind, begin = order[at], at
        while at < len(order) and order[at] == kind and tuple(order[at : at + 2]) != ("F", "B"):
            at += 1
        if kind == "F":
            yield order[begin:at][:1], at - begin
        else:
            yield order[begin:at], 1


class _Play:
    """Simulates two steps and counts the second, which equals all later ones."""

    def __init__(
        self, units: Mapping[str, Unit], events: Sequence[_HookEvent], passes: Passes
    ) -> None:
        self._units = Units(
            (
                _CountedUnit(fqn=fqn, has_params=True, reshards=bool(unit.reshard_after_forward))
                for fqn, unit in units.items()
            ),
            _Counts(),
        )
        self._states = tuple(self._units.states.values())
        self._events, self._passes = events, passes

    def uses(self) -> Iterator[tuple[str, UnitUse]]:
        """Yield (fqn of a unit, its use in a step), after a first step, which may differ."""
        self._step()
        for unit in self._states:
            unit.gathers, unit.reductions = 0, []
        self._step()
        for unit in self._states:
            yield unit.fqn, UnitUse(unit.gathers, tuple(unit.reductions))

    def _step(self) -> None:
        """Simulate one step."""
        order = self._passes.order
        last = max((n for n, kind in enumerate(order) if kind == "B"), default=len(order))
        for run, times in _runs(order[:last]):
            self._repeat(run, times)
        if last < len(order):
            self._backward(is_last=not self._passes.splits)
            self._repeat(order[last + 1 :], 1)
        if self._passes.splits and self._passes.reduces_at_end:
            # With split backwards, gradients are reduced once, after all backwards.
            for unit in self._states:
                unit.reductions, unit.reshards_after_backward = [0], True
            self._units.end_of_backward(is_last=True)

    def _repeat(self, run: Sequence[str], times: int) -> None:
        """Simulate a run: `times` rounds of the passes in `run`.

        Once two rounds begin in the same state, the others are counted by multiplication. The state
        includes whether `Units.order` is empty: nothing precedes the first unit of the first round,
        so its backward prefetches nothing.
        """
        begun: object = None
        before: list[tuple[int, int, int]] = []
        for done in range(times):
            now = [
                (bool(self._units.order), u.phase, u.sharding, u.is_gathering) for u in self._states
            ]
            if now == begun:
                self._add(before, times - done)
                return
            begun = now
            before = [
                (u.gathers, len(u.reductions), len(u.forward_positions)) for u in self._states
            ]
            before.append((0, 0, len(self._units.order)))
            for kind in run:
                if kind == "F":
                    self._forward()
                else:
                    self._backward(is_last=False)

    def _add(self, before: Sequence[tuple[int, int, int]], times: int) -> None:
        """Repeat the counts of one round, those since `before`, another `times` times."""
        *each, (_, _, ran) = before
        repeated = self._units.order[ran:]
        for unit, (gathers, reductions, positions) in zip(self._states, each, strict=True):
            unit.gathers += (unit.gathers - gathers) * times
            unit.reductions += unit.reductions[reductions:] * times
            if left := unit.forward_positions[positions:]:
                later = [len(repeated) * number for number in range(1, times + 1)]
                unit.forward_positions += [position + more for more in later for position in left]
        self._units.order += repeated * times

    def _forward(self) -> None:
        """Simulate the hooks of one forward."""
        for event in self._events:
            for fqn in event.units if event.kind != "redo" else ():
                if event.kind == "enter":
                    self._units.before_forward(fqn)
                else:
                    self._units.after_forward(fqn, in_backward=False)

    def _backward(self, *, is_last: bool) -> None:
        """Simulate the hooks of one backward, with the events of the forward in reverse."""
        # As in `runtime.apply.data.data.set_gradient_sync`: units that are not resharded after
        # forward stay gathered until the last backward. If backwards are split, all units do.
        for unit in self._states:
            unit.reshards_after_backward = (is_last or unit.reshards) and not self._passes.splits
            unit.reductions.append(0)
        for event in reversed(self._events):
            for fqn in event.units if event.needs_grad else ():
                if event.kind == "redo":
                    self._units.before_forward(fqn)
                    self._units.after_forward(fqn, in_backward=True)
                elif event.kind == "leave":
                    self._units.before_backward(fqn)
                else:
                    self._units.after_backward(fqn)
        self._units.end_of_backward(is_last=is_last)
