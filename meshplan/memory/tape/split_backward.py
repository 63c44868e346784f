"""A backward in two halves: which rows each half runs, and what the first leaves to the second.

The first half gives the gradients of what a stage received, and notes the gradient that comes to
each operation at which a weight joins the way there. The second runs these operations once more,
weight by weight in the order of the module, each as soon as the one before is done. In between
lives all that forward kept below the uppermost of these operations, whether anything still needs it
or not: the graph holds it.

Source: torch 2.13, torch/distributed/pipelining/_backward.py, `get_param_groups`,
`stage_backward_input` and `stage_backward_weight`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshplan.errors import PlanError, Problem
from meshplan.memory.tape.op import Tape

Order = Callable[[str, str], tuple[int, int]]
"""(module of a row, parameter) -> where the stage's module has the parameter."""


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """Weights whose gradients are computed at once.

    Args:
        joins: Rows at which they join what comes from an input, with what the first half noted.
        rows: All rows that give them their gradients, last first; `joins` among them.
        parameters: Their fqns.
    """

    joins: tuple[int, ...]
    rows: tuple[int, ...]
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SplitBackward:
    """How the backward of a stage is split.

    Args:
        flowing: By row, whether the way to an input leads through it.
        flows: Values on that way.
        groups: In the order in which the second half runs them.
        until: By row, the last group that holds what it keeps; -1 for none.
    """

    flowing: tuple[bool, ...]
    flows: frozenset[int]
    groups: tuple[WeightGroup, ...]
    until: tuple[int, ...]


def split_backward_of(tape: Tape, received: Sequence[int], order: Order) -> SplitBackward | None:
    """How a stage's backward is split; None where nothing received needs a gradient.

    Then the first half does nothing, and the second all.

    Raises:
        PlanError: A weight is used twice, or what is sent comes from weights alone.
    """
    flows, flowing = set(received), []
    for row in tape.rows:
        is_on_way = any(grad.value in flows for grad in row.grads)
        flowing.append(is_on_way)
        if is_on_way:
            flows |= {*row.makes}
    if not any(flowing):
        return None
    if not flowing[-1] or any(grad.value not in flows for grad in tape.rows[-1].grads):
        raise _unknown("a stage that sends what comes from its weights alone")
    groups = _groups(tape, flowing, order)
    return SplitBackward(tuple(flowing), frozenset(flows), groups, _until(tape, groups))


def _groups(tape: Tape, flowing: Sequence[bool], order: Order) -> tuple[WeightGroup, ...]:
    """Of every weight, those rows; weights that join at the same row go together."""
    readers: dict[int, list[int]] = {}
    for number, row in enumerate(tape.rows):
        for grad in row.grads:
            readers.setdefault(grad.value, []).append(number)
    found: dict[str, tuple[tuple[int, int], set[int], set[int]]] = {}
    for number, row in enumerate(tape.rows):
        for fqn, _ in row.parameters:
            if fqn in found:
                raise _unknown(f"{fqn}, which a stage uses twice")
            joins, rows, waiting = set[int](), set[int](), [number]
            while waiting:
                at = waiting.pop()
                if at in rows:
                    continue
                rows.add(at)
                if flowing[at]:
                    joins.add(at)
                    continue
                waiting += [n for v in tape.rows[at].makes for n in readers.get(v, ())]
            found[fqn] = (order(row.module, fqn), joins, rows)
    merged: list[tuple[list[str], set[int], set[int]]] = []
    for fqn, (_, joins, rows) in sorted(found.items(), key=lambda item: item[1][0]):
        if not joins:
            continue  # Nothing is computed from it.
        near = [each for each in merged if each[1] & joins]
        if len(near) > 1:
            raise _unknown(f"{fqn}, which joins several others")
        if near:
            near[0][0].append(fqn)
            near[0][1].update(joins)
            near[0][2].update(rows)
        else:
            merged.append(([fqn], joins, rows))
    return tuple(
        WeightGroup(tuple(sorted(joins)), tuple(sorted(rows, reverse=True)), tuple(fqns))
        for fqns, joins, rows in merged
    )


def _until(tape: Tape, groups: Sequence[WeightGroup]) -> tuple[int, ...]:
    """Operations hold those whose gradients follow from theirs; groups hold where they begin."""
    makers = {value: number for number, row in enumerate(tape.rows) for value in row.makes}
    until = [-1] * len(tape.rows)
    for place, group in enumerate(groups):
        for number in group.joins:
            until[number] = max(until[number], place)
    for number in reversed(range(len(tape.rows))):
        for grad in tape.rows[number].grads:
            maker = makers.get(grad.value)
            if maker is not None:
                until[maker] = max(until[maker], until[number])
    return tuple(until)


def _unknown(what: str) -> PlanError:
    return PlanError(
        Problem(
            f"a backward in two halves has no rules for {what}",
            fix="use 1F1B or Interleaved1F1B, or give the model itself (model: entry, with torch)",
        )
    )
