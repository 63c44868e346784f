"""Split a backward in two halves: the ops that each half runs, and what stays alive between them.

The first half computes the gradients of a stage's inputs. It stores the gradient that arrives at
each op where a weight joins a path from an input to the output. The second half runs the backward
of these ops once more to compute the gradients of weights, one group of weights after the other in
the order of the module. Between the halves, all values saved by the ops that lead up to the last of
these ops stay alive, needed or not, because the autograd graph references them.

Source: torch 2.13, torch/distributed/pipelining/_backward.py, `get_param_groups`,
`stage_backward_input` and `stage_backward_weight`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshplan.errors import PlanError, Problem
from meshplan.memory.tape.op import Tape

Order = Callable[[str, str], tuple[int, int]]
"""Maps (module of an op, fqn of a parameter) to a sort key: the parameter's position in the stage's
module."""


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """Weights whose gradients are computed together, because they join a path at the same op.

    Args:
        joins: Ops at which the weights join a path to an input; the first half stores the gradients
            of these ops' outputs.
        rows: All ops that the gradients of the weights pass through, last first, `joins` included.
        parameters: Fqns of the weights.
    """

    joins: tuple[int, ...]
    rows: tuple[int, ...]
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SplitBackward:
    """The split of a stage's backward.

    Args:
        flowing: For each op, True if the gradient of an input of the stage passes through the op.
        flows: Values whose gradient is on a path to an input of the stage.
        groups: Groups in the order in which the second half runs them.
        until: For each op, the last group that keeps the op's saved values alive; -1 for none.
    """

    flowing: tuple[bool, ...]
    flows: frozenset[int]
    groups: tuple[WeightGroup, ...]
    until: tuple[int, ...]


def split_backward_of(tape: Tape, received: Sequence[int], order: Order) -> SplitBackward | None:
    """Return the split of a stage's backward; None if no received value needs a gradient.

    In that case the first half does nothing, and the second half runs all of backward.

    Args:
        tape: The tape of the stage.
        received: Values that the stage receives.
        order: Maps (module, parameter) to a sort key, by which groups are ordered.

    Raises:
        PlanError: A weight is used twice, or the stage sends a value computed from weights alone.
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
        raise _unknown("a stage that sends a value computed from its weights alone")
    groups = _groups(tape, flowing, order)
    return SplitBackward(tuple(flowing), frozenset(flows), groups, _until(tape, groups))


def _groups(tape: Tape, flowing: Sequence[bool], order: Order) -> tuple[WeightGroup, ...]:
    """Return the groups of weights in order; weights that join at the same op form one group."""
    readers: dict[int, list[int]] = {}
    for number, row in enumerate(tape.rows):
        for grad in row.grads:
            readers.setdefault(grad.value, []).append(number)
    found: dict[str, tuple[tuple[int, int], set[int], set[int]]] = {}
    for number, row in enumerate(tape.rows):
        for fqn, _ in row.parameters:
            if fqn in found:
                raise _unknown(f"{fqn}, which a stage uses twice")
            # Walk from the op that reads the weight towards the output. Where the walk meets a path
            # to an input, the weight joins it, and the walk ends.
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
            continue  # The output does not depend on this weight.
        near = [each for each in merged if each[1] & joins]
        if len(near) > 1:
            raise _unknown(f"{fqn}, which joins several groups of weights")
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
    """Return, for each op, the last group that keeps the op's saved values alive; -1 for none.

    A group references its `joins`. In the autograd graph every op references the ops that made its
    inputs, and so keeps their saved values alive.
    """
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
            f"an estimate from the config cannot split the backward of {what}",
            fix="use 1F1B or Interleaved1F1B, or write model: {entry: PKG.MOD:FN} in the plan",
        )
    )
