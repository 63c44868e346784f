"""Find what a pipeline must send: the values of a recorded forward that live across its cuts.

A stage runs the whole forward, except for the module calls that belong to other stages; such a call
is a unit. Code between units (glue) runs in every stage. So a stage has to receive those outputs of
earlier units that its own units depend on, directly or through glue, and nothing else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from meshplan.model.flow import AttributeWrite, Call, Flow
from meshplan.model.graph import is_inside


@dataclass(frozen=True, slots=True)
class Bond:
    """The requirement that the units with indices `first` to `last` are in one stage, and why."""

    first: int
    last: int
    why: str


@dataclass(slots=True)
class Need:
    """The dependencies of one consumer, such as a unit or the model's output.

    Attributes:
        values: Needed outputs of other units: the index of the unit that made it, by value id.
        leaks: Pairs (value id, index of a unit) of needed values that the unit made but did not
            return.
        random: Indices of the glue operations it depends on that draw random numbers.
        reads: Names of the parameters and buffers that it reads, itself or through glue.
    """

    values: dict[int, int] = field(default_factory=dict)
    leaks: set[tuple[int, int]] = field(default_factory=set)
    random: set[int] = field(default_factory=set)
    reads: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True, kw_only=True)
class Relay:
    """The values that stages send to the next stage, and the tensors that each stage needs.

    Args:
        crossing: For each cut between two stages, the value ids that are sent; the first cut is
            between stages 0 and 1.
        reads: For each stage, the names of the parameters and buffers that it reads.
    """

    crossing: tuple[tuple[int, ...], ...]
    reads: tuple[frozenset[str], ...]


def unit_calls(flow: Flow, opened: Iterable[str], free: Iterable[str] = ()) -> tuple[Call, ...]:
    """Return the calls that are units, in execution order.

    These are the outermost calls of modules that are not in `opened`. An opened module that calls
    no other module is still a unit.

    Args:
        flow: The recorded forward.
        opened: Fqns of modules that are divided into the calls inside them.
        free: Fqns of modules whose calls are glue instead of units.
    """
    wanted, glue = set(opened), set(free)
    children: dict[int | None, list[Call]] = {}
    for call in flow.calls:
        children.setdefault(call.parent, []).append(call)

    def visit(call: Call) -> Iterator[Call]:
        inside = children.get(call.id, [])
        if call.parent is None or (call.module in wanted and inside):
            for child in inside:
                yield from visit(child)
        elif call.module not in glue:
            yield call

    return tuple(visit(flow.calls[0]))


def stages_of(calls: Iterable[Call], planned: Iterable[tuple[str, int]]) -> list[int | None]:
    """Return the stage of each call: the n-th call of a module gets its n-th planned stage.

    Calls of the module after the last planned one get the last planned stage.

    Args:
        calls: The calls of units, in execution order.
        planned: Pairs (module, stage) in execution order, one for each call in the forward for
            which the stages were chosen.

    Returns:
        Stages in the order of `calls`, never decreasing; None for a module that is not planned.
    """
    waiting: dict[str, list[int]] = {}
    for module, stage in planned:
        waiting.setdefault(module, []).append(stage)
    out: list[int | None] = []
    reached = 0
    for call in calls:
        found = waiting.get(call.module)
        if found:
            reached = max(reached, found.pop(0) if len(found) > 1 else found[0])
        out.append(reached if found else None)
    return out


_OPEN: Final = frozenset(
    ("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount")
)
"""Names of aten operators whose output size depends on the values of their input."""


class UnitFlow:
    """A recorded forward, divided into units and the glue between them.

    Args:
        flow: The recorded forward.
        units: Module calls in execution order, none of which is inside another.
    """

    def __init__(self, flow: Flow, units: Sequence[Call]) -> None:
        self.flow, self.units = flow, tuple(units)
        self._owner: list[int | None] = [None] * len(flow.ops)
        self._returned: list[set[int]] = []
        # Tensors that a module returns without computing them, such as its own parameter.
        self._maker_of_returned: dict[int, int] = {}
        for number, call in enumerate(self.units):
            self._owner[call.ops[0] : call.ops[1]] = [number] * (call.ops[1] - call.ops[0])
            self._returned.append({value for _, value in call.outputs})
            given = {value for _, value in call.inputs}
            for _, value in call.outputs:
                is_made = flow.producer(value) is not None or flow.values[value].origin == "input"
                if not is_made and value not in given:
                    self._maker_of_returned.setdefault(value, number)
        self._find_writes()
        self.needs = [self._need(self._reads_of(n), n) for n in range(len(self.units))]
        self.output_need = self._need([value for _, value in flow.outputs], None)
        self.control_need = self._need(self._controls(), None)
        left = [value for value in self._left_by_glue() if value is not None]
        self._left_need = self._need(left, None)

    def _find_writes(self) -> None:
        """Set `written` (overwritten values), and by new value the writing unit and first value."""
        self.written: set[int] = set()
        self._rewritten: dict[int, int] = {}
        self._first: dict[int, int] = {}
        for place, op in enumerate(self.flow.ops):
            owner = self._owner[place]
            for old, new in zip(op.mutates, op.rewrites, strict=True):
                self.written.add(old)
                self._first[new] = self._first.get(old, old)
                if owner is not None and self._maker(old) != owner:
                    self._rewritten[new] = owner

    def _maker(self, value: int) -> int | None:
        """Return the index of the unit that made a value; None if no unit did."""
        if value in self._maker_of_returned:
            return self._maker_of_returned[value]
        place = self.flow.producer(value)
        return None if place is None else self._owner[place]

    def _reads_of(self, number: int) -> list[int]:
        first, behind = self.units[number].ops
        return [value for op in self.flow.ops[first:behind] for value in op.inputs]

    def _controls(self) -> list[int]:
        """Return the value ids that glue converts to Python numbers, as `if x.sum() > 0` does."""
        return [
            value
            for place, op in enumerate(self.flow.ops)
            if self._owner[place] is None and not op.outputs
            for value in op.inputs
        ]

    def _need(self, values: Iterable[int], consumer: int | None) -> Need:
        out, seen, waiting = Need(), set[int](), list(values)
        while waiting:
            value = waiting.pop()
            if value in seen:
                continue
            seen.add(value)
            info, place, maker = self.flow.values[value], self.flow.producer(value), None
            maker = self._maker(value)
            if maker is not None:
                if maker == consumer:
                    continue
                if value in self._returned[maker] and value not in self._rewritten:
                    out.values[value] = maker
                else:
                    out.leaks.add((value, maker))
            elif place is None:
                if info.origin in ("parameter", "buffer"):
                    out.reads.add(info.name)
            else:
                op = self.flow.ops[place]
                waiting.extend(op.inputs)
                if op.is_random:
                    out.random.add(place)
        if consumer is not None:
            for value in self._reads_of(consumer):
                if self.flow.values[value].origin in ("parameter", "buffer"):
                    out.reads.add(self.flow.values[value].name)
        return out

    def free(self) -> set[str]:
        """Return the fqns of modules that every stage can run for itself from the model's inputs.

        Such a module, for example a rotary embedding, reads no parameter and no output of another
        unit, draws no random numbers and writes to no tensor that it did not make.
        """
        bound: set[str] = set()
        for number, call in enumerate(self.units):
            need = self.needs[number]
            ops = self.flow.ops[call.ops[0] : call.ops[1]]
            reads = (self.flow.values[value] for op in ops for value in op.inputs)
            if (
                need.values
                or need.leaks
                or need.random
                or any(op.is_random for op in ops)
                or any(self._maker(old) != number for op in ops for old in op.mutates)
                or any(value.origin == "parameter" for value in reads)
                or any(value in self._maker_of_returned for _, value in call.outputs)
            ):
                bound.add(call.module)
        return {call.module for call in self.units} - bound

    def bonds(self) -> Iterator[Bond]:
        """Yield a bond for every reason why two units cannot be in different stages."""
        last = len(self.units) - 1
        consumers = [*enumerate(self.needs), (last, self.output_need)]
        for number, need in consumers:
            for value, maker in sorted(need.leaks):
                first, behind = sorted((maker, number))
                yield Bond(first, behind, self._leak(value, maker))
        drawn = defaultdict[int, list[int]](list)
        for number, need in consumers:
            for op in need.random:
                drawn[op].append(number)
        for op, users in drawn.items():
            name = self.flow.ops[op].name.removeprefix("aten.")
            yield Bond(
                min(users),
                max(users),
                f"'{self._around(op)}' draws random numbers between its modules ({name}), and each "
                "stage would draw different ones",
            )
        control = self.control_need
        for maker in control.values.values():
            why = f"the model's control flow reads the output of '{self._name(maker)}'"
            yield Bond(0, maker, why)
        for value, maker in sorted(control.leaks):
            yield Bond(0, maker, self._leak(value, maker))
        if control.random:
            yield Bond(0, last, "the model's control flow depends on random numbers")
        yield from self._size_bonds(consumers)
        yield from self._state_bonds()

    def _size_bonds(self, consumers: Iterable[tuple[int, Need]]) -> Iterator[Bond]:
        """Yield bonds for sizes that depend on data: stages fix the shapes that they send once."""
        open_sizes = self._open_sizes()
        for number, need in consumers:
            for value, maker in sorted(need.values.items()) if open_sizes else ():
                if value in open_sizes and maker != number:
                    first, behind = sorted((maker, number))
                    yield Bond(
                        first,
                        behind,
                        f"'{self._name(maker)}' returns a tensor whose size depends on its data",
                    )

    def _open_sizes(self) -> dict[int, set[int]]:
        """Return, by value id, the sizes in the value's shape that depend on the data.

        Sizes are compared by number only, so another dim of the same size counts too. This may
        forbid a cut that would work, but never allows one that would not.
        """
        out: dict[int, set[int]] = {}
        for op in self.flow.ops:
            masks = [v for v in op.inputs[1:] if self.flow.values[v].dtype == "bool"]
            selects = bool(masks) and op.name == "aten.index.Tensor"
            if selects or op.name.split(".")[1] in _OPEN:
                found = set(self.flow.values[op.outputs[0]].shape[:1])
            else:
                found = set[int]().union(*(out.get(value, ()) for value in op.inputs))
            for value in op.outputs if found else ():
                if kept := found & {*self.flow.values[value].shape}:
                    out[value] = kept
        return out

    def _state_bonds(self) -> Iterator[Bond]:
        """Yield bonds between units that write buffers and attributes and units that read them."""
        last = len(self.units) - 1
        writers, readers = defaultdict[int, set[int]](set), defaultdict[int, set[int]](set)
        between: set[int] = set()
        for place, op in enumerate(self.flow.ops):
            owner = self._owner[place]
            for value in op.inputs:
                first = self._first.get(value, value)
                if self._is_state(first) and owner is not None:
                    readers[first].add(owner)
                elif self._is_state(first):
                    between.add(first)
            for old in op.mutates:
                first = self._first.get(old, old)
                if not self._is_state(first):
                    continue
                if owner is not None:
                    writers[first].add(owner)
                    continue
                need = self._need(op.outputs, None)
                if need.values or need.leaks or need.random:
                    what = "writes what its modules computed into a buffer or an attribute"
                    yield Bond(0, last, f"'{self._around(place)}' {what}")
        for first, units in writers.items():
            users, name = units | readers[first], self.flow.values[first].name or "an attribute"
            why = f"'{self._name(min(units))}' writes {name}, which is also used elsewhere"
            yield Bond(0, last, why) if first in between else Bond(min(users), max(users), why)
        for change in self.flow.changes:
            yield from self._change_bonds(change)

    def _change_bonds(self, change: AttributeWrite) -> Iterator[Bond]:
        """Yield bonds between units that compute an attribute and units that read it next time."""
        if change.new is None:
            return
        need = self._need([change.new], None)
        makers = {*need.values.values(), *(maker for _, maker in need.leaks)}
        if not makers and not need.random:
            return  # Only glue computes the value, so every stage sets the same one.
        owners = {n for n, call in enumerate(self.units) if is_inside(change.module, call.module)}
        users = makers | owners
        made = {value for unit in owners for value in self._returned[unit]}
        for number in owners:
            known = self.needs[number].values.keys() | made
            if {m for _, m in need.leaks} <= owners and need.values.keys() <= known:
                users = set(owners)  # The owners themselves have all that the value depends on.
        users |= {n for n in range(len(self.units)) if change.old in self._reads_of(n)}
        is_between = any(
            self._owner[place] is None and change.old in op.inputs
            for place, op in enumerate(self.flow.ops)
        )
        is_everywhere = is_between or not owners or need.random
        first, last = (0, len(self.units) - 1) if is_everywhere else (min(users), max(users))
        who = f"'{change.module}'" if change.module else "the model"
        what = f"stores in '{change.name}' what its modules computed, for the next forward"
        yield Bond(first, last, f"{who} {what}")

    def keeps_state(self) -> bool:
        """Return True if glue writes a buffer or attribute that the next forward can read."""
        return bool(self._left_by_glue())

    def _left_by_glue(self) -> list[int | None]:
        """Return the value ids that glue, which every stage runs, leaves in buffers and attributes.

        None stands for an attribute that is set to something other than a tensor.
        """
        modules = [call.module for call in self.units]
        changed = [
            change.new
            for change in self.flow.changes
            if not any(is_inside(change.module, module) for module in modules)
        ]
        return changed + [
            new
            for place, op in enumerate(self.flow.ops)
            for old, new in zip(op.mutates, op.rewrites, strict=True)
            if self._owner[place] is None and self._is_state(self._first.get(old, old))
        ]

    def _is_state(self, value: int) -> bool:
        return self.flow.values[value].origin in ("parameter", "buffer", "constant")

    def _leak(self, value: int, maker: int) -> str:
        if value in self._rewritten:
            return f"'{self._name(maker)}' writes in place into a tensor that is used after it"
        return f"a tensor made inside '{self._name(maker)}' is used outside, but not returned"

    def _name(self, unit: int) -> str:
        return self.units[unit].module

    def _around(self, op: int) -> str:
        return self.flow.calls[self.flow.ops[op].call].module or "the model"

    def relay(self, stages: Sequence[int], count: int) -> Relay:
        """Return the values that are sent across each cut, and the tensors that each stage reads.

        The stages must satisfy all bonds.

        Args:
            stages: Stage of each unit, in execution order, never decreasing.
            count: Number of stages.
        """
        until: dict[int, int] = {}
        reads: list[set[str]] = [set() for _ in range(count)]
        for stage, need in (*zip(stages, self.needs, strict=True), (count - 1, self.output_need)):
            reads[stage] |= need.reads
            for value in need.values:
                until[value] = max(until.get(value, 0), stage)
        for names in reads:
            names |= self.control_need.reads | self._left_need.reads
        until |= dict.fromkeys(self.control_need.values, count - 1)
        made = {v: stages[m] for v in until if (m := self._maker(v)) is not None}
        return Relay(
            crossing=tuple(
                tuple(sorted(v for v in until if made[v] <= cut < until[v]))
                for cut in range(count - 1)
            ),
            reads=tuple(map(frozenset, reads)),
        )
