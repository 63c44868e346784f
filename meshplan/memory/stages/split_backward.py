"""Play one microbatch of one stage whose backward is split in two halves.

A tensor that crosses a stage boundary may be referenced by the autograd graph and by its sender or
receiver. The log of the stage frees such a tensor when the graph, or the caller of the first half,
drops its reference.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshplan.memory.log.microbatch import HookKind
from meshplan.memory.stages.microbatch import StagePlayer, StageWork, play_stage, played
from meshplan.memory.stages.tape import StageTape
from meshplan.memory.tape.op import RecomputeSpan
from meshplan.memory.tape.split_backward import Order, SplitBackward, WeightGroup, split_backward_of


def play_split_backward(part: StageTape, order: Order, *, sums_in_place: bool) -> StageWork:
    """Play one microbatch of a stage with its backward split, and return its work.

    `turn` of the result is None if no received value needs a gradient: the first half then does
    nothing.

    Args:
        part: The tape of the stage.
        order: Maps (module, parameter) to a sort key, by which the second half orders weights.
        sums_in_place: If True, several gradients of one value are added up in place; see
            `tape.play`.

    Raises:
        PlanError: A weight is used twice, or the stage sends a value computed from weights alone.
    """
    halves = split_backward_of(part.tape, part.received, order)
    if halves is None:
        return play_stage(part, sums_in_place=sums_in_place)
    return played(part, _SplitBackwardPlayer(part, sums_in_place, halves))


class _SplitBackwardPlayer(StagePlayer):
    """Plays forward, then the first half of backward, then the second."""

    def __init__(self, part: StageTape, sums_in_place: bool, halves: SplitBackward) -> None:
        super().__init__(part, sums_in_place)
        self._halves = halves
        self._joins = {number for group in halves.groups for number in group.joins}
        self._noted: dict[int, list[int]] = {}
        """For each op at which weights join a path to an input, storages of the gradients that
        arrived at the op."""
        self._ending: dict[int, list[int]] = {}
        """For each group, storages that crossed a boundary and live until the group is done."""
        self._held_until: dict[int, list[int]] = {}
        """For each group, ops whose saved values it is the last to keep alive; -1 for no group."""
        for number in reversed(range(len(halves.until))):
            self._held_until.setdefault(halves.until[number], []).append(number)

    def _run_backward(self, spans: Sequence[RecomputeSpan]) -> None:
        assert not any(span.recompute or span.on_host for span in spans)
        for number in reversed(range(len(self._tape.rows))):
            self._is_loss = 0 <= self._tape.loss_start <= number
            if number == self._tape.loss_start - 1:
                self._add_hook_point(HookKind.BEFORE_BACKWARD, "")
            self._begin_unit(number)
            self._back_to_inputs(number)
            self._end_unit(number)
        self._add_hook_point(HookKind.END_OF_BACKWARD, "")
        self._is_loss = False
        self._drop_all(self._seeds)
        self._free_saved(-1)
        sent = {*self._part.sent}
        for value in self._tape.outlive - sent:
            self._drop(self._env.pop(value))
        self._drop_all(self.given)
        # The `AccumulateGrad` node of a received value references the value and its gradient.
        for value, storage, gradient in zip(
            self._part.received, self.received, self.returned, strict=True
        ):
            rows = zip(self._tape.rows, self._halves.until, strict=True)
            uses = (until for row, until in rows if any(g.value == value for g in row.grads))
            last = max(uses, default=-1)
            self._ending.setdefault(last, []).extend((storage, gradient))
        self._end_received(-1)
        self.second_half = len(self._events), len(self._hook_points)
        self._second_half()

    def _back_to_inputs(self, number: int) -> None:
        """Compute the gradients of one op's inputs, not of its weights; its saved values stay."""
        row = self._tape.rows[number]
        given = [self._grads.pop(value) for value in row.makes if value in self._grads]
        if number in self._joins:
            self._noted[number] = given
            for storage in given:
                self._reference(storage)
        is_own = bool(given) and not row.parameters and self._halves.flowing[number]
        flowing = [grad for grad in row.grads if given and grad.value in self._halves.flows]
        workspace_bytes = row.workspace_backward_bytes if is_own else 0
        _, made = self._made(number, (), flowing, given, workspace_bytes)
        self._drop_all(given)
        self._add_up(number, (), made)
        self._note_given(number)

    def _second_half(self) -> None:
        """Compute the gradients of weights, group by group.

        The gradients that a group computed and stored stay referenced until the next group has run.
        """
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
        """Compute the gradients of a group's weights: run its ops' backward, last op first.

        The values that these ops saved are freed.
        """
        for number in group.rows:
            row = self._tape.rows[number]
            if number in group.joins:
                given = self._noted[number]
                for storage in given:
                    self._reference(storage)
            else:
                given = [self._grads.pop(value) for value in row.makes if value in self._grads]
            assert given, f"no gradient came to {row.op} of {row.module}"
            is_own = bool(row.parameters) or not self._halves.flowing[number]
            others = [grad for grad in row.grads if grad.value not in self._halves.flows]
            workspace_bytes = row.workspace_backward_bytes if is_own else 0
            own, made = self._made(number, row.parameters, others, given, workspace_bytes)
            self._drop_all((*given, *self._kept.pop(number, ())))
            self._add_up(number, own, made)

    def _take(self, group: WeightGroup) -> None:
        """Record that the gradients of the group are assigned to their parameters now."""
        for fqn in group.parameters:
            self._ready[fqn] = len(self._events)

    def _end_group(self, group: WeightGroup, place: int) -> None:
        for number in group.joins:
            self._drop_all(self._noted.pop(number))
        self._free_saved(place)
        self._end_received(place)

    def _end_received(self, place: int) -> None:
        self._drop_all(self._ending.pop(place, ()))

    def _free_saved(self, place: int) -> None:
        """Free the saved values of the ops that this group was the last to keep alive."""
        for number in self._held_until.pop(place, ()):
            self._drop_all(self._kept.pop(number, ()))
