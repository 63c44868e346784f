"""One microbatch of one stage whose backward is run in two halves, played by itself.

What crosses an edge may be held by the graph as well as by who sends or received it: the log tells
when the graph, or who called the first half, lets go of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshplan.memory.log.microbatch import HookKind
from meshplan.memory.stages.microbatch import StagePlayer, StageWork, play_stage, played
from meshplan.memory.stages.tape import StageTape
from meshplan.memory.tape.op import RecomputeSpan
from meshplan.memory.tape.split_backward import Order, SplitBackward, WeightGroup, split_backward_of


def play_split_backward(part: StageTape, order: Order, *, sums_in_place: bool) -> StageWork:
    """One microbatch of a stage; without a `turn` where the first half has nothing to do.

    Raises:
        PlanError: As of `split_backward_of`.
    """
    halves = split_backward_of(part.tape, part.received, order)
    if halves is None:
        return play_stage(part, sums_in_place=sums_in_place)
    return played(part, _SplitBackwardPlayer(part, sums_in_place, halves))


class _SplitBackwardPlayer(StagePlayer):
    """Plays forward, then the first half, then the second."""

    def __init__(self, part: StageTape, sums_in_place: bool, halves: SplitBackward) -> None:
        super().__init__(part, sums_in_place)
        self._halves = halves
        self._joins = {number for group in halves.groups for number in group.joins}
        self._noted: dict[int, list[int]] = {}
        """By a row at which weights join, the storages of the gradients that came to it."""
        self._ending: dict[int, list[int]] = {}
        """By group, what crossed an edge and lives as long."""
        self._held_until: dict[int, list[int]] = {}
        for number in reversed(range(len(halves.until))):
            self._held_until.setdefault(halves.until[number], []).append(number)

    def _run_backward(self, spans: Sequence[RecomputeSpan]) -> None:
        assert not any(span.recompute or span.on_host for span in spans)
        for number in reversed(range(len(self._tape.rows))):
            self._is_loss = 0 <= self._tape.loss_start <= number
            if number == self._tape.loss_start - 1:
                self._mark(HookKind.BEFORE_BACKWARD, "")
            self._begin_unit(number)
            self._back_to_inputs(number)
            self._end_unit(number)
        self._mark(HookKind.END_OF_BACKWARD, "")
        self._is_loss = False
        for storage in self._seeds:
            self._drop(storage)
        self._let_go(-1)
        sent = {*self._part.sent}
        for value in self._tape.outlive - sent:
            self._drop(self._env.pop(value))
        for storage in self.given:
            self._drop(storage)
        # Where gradients of what was received are added up, the graph holds it, and them.
        for value, storage, gradient in zip(
            self._part.received, self.received, self.returned, strict=True
        ):
            rows = zip(self._tape.rows, self._halves.until, strict=True)
            uses = (until for row, until in rows if any(g.value == value for g in row.grads))
            last = max(uses, default=-1)
            self._ending.setdefault(last, []).extend((storage, gradient))
        self._end_received(-1)
        self.turn = len(self._events), len(self._marks)
        self._second_half()

    def _back_to_inputs(self, number: int) -> None:
        """The backward of one row, but for its weights; what it keeps it keeps."""
        row = self._tape.rows[number]
        given = [self._grads.pop(value) for value in row.makes if value in self._grads]
        if number in self._joins:
            self._noted[number] = given
            for storage in given:
                self._hold(storage)
        is_own = bool(given) and not row.parameters and self._halves.flowing[number]
        took = self._born(row.takes_back, row) if is_own and row.takes_back else None
        flowing = [grad for grad in row.grads if given and grad.value in self._halves.flows]
        made = self._passed_on(number, flowing, given)
        if took is not None:
            self._drop(took)
        for storage in given:
            self._drop(storage)
        for value, storage in made:
            self._accumulate(value, storage, row)
        self._note_given(number)

    def _second_half(self) -> None:
        """Weights, group by group: what one made and noted is there until the next is under way."""
        before: WeightGroup | None = None
        for place, group in enumerate(self._halves.groups):
            if before is not None:
                self._end_group(before, place - 1)
            self._back_to_weights(group)
            if before is not None:
                self._take(before)
            before = group
        if before is not None:
            self._take(before)
            self._end_group(before, len(self._halves.groups) - 1)

    def _back_to_weights(self, group: WeightGroup) -> None:
        """The rows of a group, as far as its weights go, last first; what they kept ends."""
        for number in group.rows:
            row = self._tape.rows[number]
            if number in group.joins:
                given = self._noted[number]
                for storage in given:
                    self._hold(storage)
            else:
                given = [self._grads.pop(value) for value in row.makes if value in self._grads]
            assert given, f"no gradient came to {row.op} of {row.module}"
            is_own = bool(row.parameters) or not self._halves.flowing[number]
            took = self._born(row.takes_back, row) if is_own and row.takes_back else None
            own = [(fqn, size, self._gradient(fqn, size, number)) for fqn, size in row.parameters]
            others = [grad for grad in row.grads if grad.value not in self._halves.flows]
            made = self._passed_on(number, others, given)
            if took is not None:
                self._drop(took)
            for storage in (*given, *self._kept.pop(number, ())):
                self._drop(storage)
            for fqn, size, storage in own:
                self._add_gradient(fqn, size, storage, number)
            for value, storage in made:
                self._accumulate(value, storage, row)

    def _take(self, group: WeightGroup) -> None:
        """Its gradients are the weights', or were added to those; nothing else holds them now."""
        for fqn in group.parameters:
            self._ready[fqn] = len(self._events)

    def _end_group(self, group: WeightGroup, place: int) -> None:
        for number in group.joins:
            for storage in self._noted.pop(number):
                self._drop(storage)
        self._let_go(place)
        self._end_received(place)

    def _end_received(self, place: int) -> None:
        for storage in self._ending.pop(place, ()):
            self._drop(storage)

    def _let_go(self, place: int) -> None:
        """The group was the last that held the operations below it."""
        for number in self._held_until.pop(place, ()):
            for storage in self._kept.pop(number, ()):
                self._drop(storage)
