"""Count how often FSDP2 gathers and reduces each unit in one step, by simulating its rules.

Backward visits the calls of a forward in reverse. Before a unit's own backward it gathers the unit,
and starts to gather the one that ran before it, whether or not backward gets there.

Source: torch 2.13, FSDPParamGroup: pre_forward, post_forward, pre_backward, _backward_prefetch,
post_backward; FSDPState._root_post_backward_final_callback. Reduction: `runtime.apply.gradients`,
which lets a unit with a missing gradient reduce zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from meshplan.assign import Unit
from meshplan.model.graph import is_inside
from meshplan.plan.plan import Plan
from meshplan.traffic.forward import Forward


@dataclass(frozen=True, slots=True)
class Passes:
    """The passes over the microbatches of one step.

    Args:
        order: "F" for a forward and "B" for a backward that needs the parameters, in order.
        splits: If True, backwards are split in halves: parameters stay gathered and gradients
            unreduced until all are done.
        settles: If True, gradients are settled after the last backward, or after what replaces it.
    """

    order: tuple[str, ...]
    splits: bool = False
    settles: bool = True


@dataclass(frozen=True, slots=True)
class _HookEvent:
    """One hook of a forward: a unit's call begins or ends, or a recomputed module's call ends.

    Args:
        kind: "enter" and "leave" of a unit, or "redo" of a recomputed module.
        units: The unit; for a recomputation, all units that it runs.
        needs_grad: True if a gradient arrives for the inputs (enter) or outputs (leave).
    """

    kind: Literal["enter", "leave", "redo"]
    units: tuple[str, ...]
    needs_grad: bool


@dataclass(slots=True)
class _UnitParameters:
    """State of the parameters of one unit in FSDP2.

    Attributes:
        reshards: True if the unit is resharded after forward.
        phase: The last hook that ran.
        is_whole: True if the parameters are gathered.
        is_coming: True if an all-gather is in progress.
        places: Positions of the unit in the order of forwards, one for each forward whose backward
            is outstanding.
        gathers: Number of all-gathers.
        reductions: For each backward, the number of times its gradients were ready to be reduced.
    """

    reshards: bool
    phase: Literal["", "forward", "pre", "post"] = ""
    is_whole: bool = False
    is_coming: bool = False
    places: list[int] = field(default_factory=list)
    gathers: int = 0
    reductions: list[int] = field(default_factory=list)

    def begin_gather(self) -> None:
        if not self.is_whole and not self.is_coming:
            self.gathers += 1
            self.is_coming = True

    def gather(self) -> None:
        self.begin_gather()
        self.is_whole, self.is_coming = True, False


@dataclass(frozen=True, slots=True)
class UnitUse:
    """The gathers and reductions of a unit in one step.

    Args:
        gathers: Number of all-gathers.
        reductions: For each backward, the number of times its gradients are ready to be reduced.
    """

    gathers: int
    reductions: tuple[int, ...]


def uses_of_units(plan: Plan, forward: Forward | None, passes: Passes) -> Mapping[str, UnitUse]:
    """Count the gathers and reductions of every unit that has parameters.

    Args:
        forward: A recorded forward; None assumes that each unit is called once, with gradients.
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
    """List the units that are in no other one; each of them orders what is inside it by itself."""
    return [u for u in units if not any(o != u and is_inside(u, o) for o in units)]


def _once(units: Mapping[str, Unit]) -> list[_HookEvent]:
    """Build the events of a forward that calls each unit once, in the order of the plan."""
    out: list[_HookEvent] = []
    for fqn in units:  # Inner units come first.
        first = next((n for n, e in enumerate(out) if is_inside(e.units[0], fqn)), len(out))
        out.insert(first, _HookEvent("enter", (fqn,), fqn != ""))
        out.append(_HookEvent("leave", (fqn,), True))
    return out


def _events(plan: Plan, units: Mapping[str, Unit], forward: Forward) -> list[_HookEvent]:
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
            again = tuple(
                inner.fqn
                for inner in forward.calls
                if inner.fqn in units and call.begin < inner.begin < min(last, call.end)
            )
            found.append((call.end, 0, _HookEvent("redo", again, True)))
    return [event for _, _, event in sorted(found, key=lambda item: item[:2])]


def _stretches(order: Sequence[str]) -> Iterator[tuple[Sequence[str], int]]:
    """Split the order into runs: forwards each followed by its backward, forwards, backwards.

    >>> [(*stretch, times) for stretch, times in _stretches("FFFBFBB")]
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
    """Simulate steps until a step equals the next one."""

    def __init__(
        self, units: Mapping[str, Unit], events: Sequence[_HookEvent], passes: Passes
    ) -> None:
        self._groups = {f: _UnitParameters(bool(u.reshard_after_forward)) for f, u in units.items()}
        self._events, self._passes = events, passes
        self._order: list[_UnitParameters] = []
        self._gives_back = True

    def uses(self) -> Iterator[tuple[str, UnitUse]]:
        """Yield (unit, its use in a step), after a first step that leaves the usual state."""
        self._step()
        for group in self._groups.values():
            group.gathers, group.reductions = 0, []
        self._step()
        for fqn, group in self._groups.items():
            yield fqn, UnitUse(group.gathers, tuple(group.reductions))

    def _step(self) -> None:
        order = self._passes.order
        last = max((n for n, kind in enumerate(order) if kind == "B"), default=len(order))
        for stretch, times in _stretches(order[:last]):
            self._repeat(stretch, times)
        if last < len(order):
            self._backward(is_last=not self._passes.splits)
            self._repeat(order[last + 1 :], 1)
        if self._passes.splits and self._passes.settles:
            for group in self._groups.values():
                group.is_whole = False
                group.reductions = [1]
            self._forget()

    def _repeat(self, stretch: Sequence[str], times: int) -> None:
        """Simulate these passes `times` times; once two rounds begin in the same state, multiply.

        The order that a backward looks up is what the forwards of its own run have left, except in
        the first one, before which nothing ran.
        """
        groups = self._groups.values()
        begun: object = None
        before: list[tuple[int, int, int]] = []
        for done in range(times):
            now = [(bool(self._order), g.phase, g.is_whole, g.is_coming) for g in groups]
            if now == begun:
                self._add(before, times - done)
                return
            begun = now
            before = [(g.gathers, len(g.reductions), len(g.places)) for g in groups]
            before.append((0, 0, len(self._order)))
            for kind in stretch:
                if kind == "F":
                    self._forward()
                else:
                    self._backward(is_last=False)

    def _add(self, before: Sequence[tuple[int, int, int]], times: int) -> None:
        """Count what was done since `before` another `times` times."""
        *each, (_, _, ran) = before
        again = self._order[ran:]
        for group, (gathers, reductions, places) in zip(self._groups.values(), each, strict=True):
            group.gathers += (group.gathers - gathers) * times
            group.reductions += group.reductions[reductions:] * times
            if left := group.places[places:]:
                later = [len(again) * number for number in range(1, times + 1)]
                group.places += [place + more for more in later for place in left]
        self._order += again * times

    def _forward(self) -> None:
        for event in self._events:
            for group in (self._groups[fqn] for fqn in event.units):
                if event.kind == "enter":
                    group.phase = "forward"
                    group.gather()
                elif event.kind == "leave":
                    group.is_whole = not group.reshards
                    group.places.append(len(self._order))
                    self._order.append(group)
                    group.phase = ""

    def _backward(self, *, is_last: bool) -> None:
        # As in `runtime.apply.data.set_gradient_sync`: what is not resharded after forward stays
        # gathered until the last backward.
        self._gives_back = is_last
        for group in self._groups.values():
            group.reductions.append(0)
        for event in reversed(self._events):
            if not event.needs_grad:
                continue
            for group in (self._groups[fqn] for fqn in event.units):
                if event.kind == "redo":
                    group.gather()
                    group.phase = ""
                elif event.kind == "leave":
                    self._before(group)
                else:
                    self._after(group)
        for group in self._groups.values():
            if group.phase != "post":
                self._after(group)
            group.phase = ""
        if is_last:
            self._forget()

    def _before(self, group: _UnitParameters) -> None:
        if group.phase == "pre":
            return
        group.phase = "pre"
        group.gather()
        place = group.places.pop() if group.places else 0
        if place > 0:
            self._order[place - 1].begin_gather()

    def _after(self, group: _UnitParameters) -> None:
        group.phase = "post"
        group.reductions[-1] += 1
        gives_back = (self._gives_back or group.reshards) and not self._passes.splits
        group.is_whole = group.is_whole and not gives_back

    def _forget(self) -> None:
        self._order.clear()
        for group in self._groups.values():
            group.is_coming = False
            group.places.clear()
