"""Compare a rehearsal with the recorded forward: equal operations, on local shapes.

Operations are compared one by one. Both must have the same name, be in the same module, and read
the corresponding values. Every shape must be the recorded shape with the sharded dims divided by
the number of ranks. Number arguments must be equal, except that sizes of a sharded dim are divided.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

from meshplan.assign.auto.regions import FlowUses, Region
from meshplan.model.dims.factors import Factor
from meshplan.model.dims.linker import argument, base_name, positions
from meshplan.model.flow import UPDATE, Flow, Op, Ref
from meshplan.model.rehearsal import Stopped

_SPELLS_SHAPE: Final = frozenset(
    (
        "view", "_unsafe_view", "reshape", "expand", "zeros", "ones", "full", "empty",
        "new_zeros", "new_ones", "new_full", "new_empty", "split", "split_with_sizes",
        "empty_strided", "new_empty_strided", "repeat", "view_copy",
    )
)  # fmt: skip
"""Operations whose integer arguments only determine the result's shape, which is compared too."""


_SAME_NUMBERS: Final = frozenset(("clone", "alias", "detach", "contiguous", "lift_fresh"))
"""Operations whose result equals their input. They are skipped, because the strides decide whether
torch runs them, and strides differ on local shapes.
"""

_VIEWS: Final = frozenset(("view", "_unsafe_view", "reshape", "_reshape_alias", "expand"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first difference between a rehearsal and the recorded forward.

    Args:
        call: Id of the module call in the recorded forward.
        at: Number of recorded operations before the difference.
        text: Description of the difference.
    """

    call: int
    at: int
    text: str


def compare(
    flow_uses: FlowUses,
    regions: tuple[Region, ...],
    size: int,
    rehearsed: Flow | Stopped,
    on_parts: frozenset[int] = frozenset(),
) -> Divergence | None:
    """Return the first difference between the recorded forward and a rehearsal; None if none.

    Args:
        flow_uses: The recorded forward.
        regions: The regions that are sharded in the rehearsal.
        size: Number of ranks of tp.
        rehearsed: The forward that the rehearsal recorded, or the error that stopped it.
        on_parts: Indices of the operations that work on a shard of the sequence, which is dim 1.
    """
    return _RehearsalComparison(flow_uses, regions, size, on_parts).run(rehearsed)


class _RehearsalComparison:
    def __init__(
        self, flow_uses: FlowUses, regions: tuple[Region, ...], size: int, on_parts: frozenset[int]
    ) -> None:
        self.flow_uses, self.flow, self.size = flow_uses, flow_uses.flow, size
        self.cut = frozenset(r.factor for r in regions)
        styled = {fqn for r in regions for fqn in r.words}
        self.on_parts = on_parts
        self.parts = {v for n in on_parts for v in self.flow.ops[n].outputs}
        self.whole: set[int] = set()
        for call in self.flow.calls:
            if call.module in styled:
                self.whole |= {v for op in self.flow.ops[slice(*call.ops)] for v in op.outputs}
        self.pairs: dict[int, int] = {}
        self.rehearsed = flow_uses.flow
        self.sources: dict[int, dict[int, int]] = {id(flow_uses.flow): {}}

    def run(self, rehearsed: Flow | Stopped) -> Divergence | None:
        if isinstance(rehearsed, Stopped):
            return self._stopped(rehearsed)
        self.rehearsed = rehearsed
        self.sources[id(rehearsed)] = {}
        by_name = {(v.origin, v.name): v.id for v in self.flow.values if v.name}
        for value in rehearsed.values:
            if value.name and (value.origin, value.name) in by_name:
                self.pairs[value.id] = by_name[value.origin, value.name]
        mine = [op for op in enumerate(self.flow.ops) if not self._returns_input(op[1], self.flow)]
        theirs = [op for op in rehearsed.ops if not self._returns_input(op, rehearsed)]
        at = other_at = 0
        while at < len(mine) and other_at < len(theirs):
            (number, op), other = mine[at], theirs[other_at]
            text = self._operation(number, op, other)
            if not text:
                at, other_at = at + 1, other_at + 1
            elif self._changes_nothing(op, self.flow):
                at += 1
            elif self._changes_nothing(other, rehearsed):
                other_at += 1
            else:
                return Divergence(call=op.call, at=number, text=f"{base_name(op)}: {text}")
        while at < len(mine) and self._changes_nothing(mine[at][1], self.flow):
            at += 1
        while other_at < len(theirs) and self._changes_nothing(theirs[other_at], rehearsed):
            other_at += 1
        if at < len(mine) or other_at < len(theirs):
            number, op = mine[at] if at < len(mine) else (len(self.flow.ops), self.flow.ops[-1])
            return Divergence(call=op.call, at=number, text="more or fewer operations run")
        returned = tuple(
            (path, self.pairs.get(self._source(v, rehearsed))) for path, v in rehearsed.outputs
        )
        wanted = tuple((path, self._source(v, self.flow)) for path, v in self.flow.outputs)
        if returned != wanted:
            return Divergence(call=0, at=len(self.flow.ops), text="the model returns other tensors")
        return None

    def _returns_input(self, op: Op, flow: Flow) -> bool:
        """Return True if an operation returns its input; also record this for `_source`."""
        if base_name(op) not in _SAME_NUMBERS or len(op.outputs) != 1 or len(op.inputs) != 1:
            return False
        self.sources[id(flow)][op.outputs[0]] = self._source(op.inputs[0], flow)
        return True

    def _changes_nothing(self, op: Op, flow: Flow) -> bool:
        """Return True if an operation can be skipped: a view into the same shape, or an update."""
        if op.name == UPDATE:
            return True  # An operation that reads the result is compared itself, and then differs.
        if base_name(op) not in _VIEWS or len(op.inputs) != 1:
            return False
        if flow.values[op.inputs[0]].shape != flow.values[op.outputs[0]].shape:
            return False
        self.sources[id(flow)][op.outputs[0]] = self._source(op.inputs[0], flow)
        return True

    def _source(self, value: int, flow: Flow) -> int:
        """Return the value that `value` is a copy of, through all skipped operations."""
        found = self.sources[id(flow)]
        while value in found:
            value = found[value]
        return value

    def _stopped(self, rehearsed: Stopped) -> Divergence:
        at = min(rehearsed.num_ops, len(self.flow.ops) - 1)
        calls = (c.id for c in self.flow.around(self.flow.ops[at].call))
        found = next((c for c in calls if self.flow.calls[c].module == rehearsed.module), None)
        if found is None:
            found = next((c.id for c in self.flow.calls if c.module == rehearsed.module), 0)
        return Divergence(call=found, at=rehearsed.num_ops, text=rehearsed.text)

    def _operation(self, number: int, op: Op, other: Op) -> str:
        """Return how an operation differs from its counterpart; "" if it does not."""
        views = {base_name(op), base_name(other)} <= _VIEWS - {"expand"}
        if (op.name != other.name and not views) or len(op.outputs) != len(other.outputs):
            return f"{base_name(other)} runs instead"
        if self.flow.calls[op.call].module != self.rehearsed.calls[other.call].module:
            return "runs in another module"
        text = self._same((op.args, dict(op.kwargs)), (other.args, dict(other.kwargs)), op)
        if text:
            return text
        for mine, theirs in zip(op.outputs, other.outputs, strict=True):
            self.pairs[theirs] = mine
            shape, dtype = self.rehearsed.values[theirs].shape, self.rehearsed.values[theirs].dtype
            if shape != self._local(mine) or dtype != self.flow.values[mine].dtype:
                wanted = f"{self.flow.values[mine].dtype} {list(self._local(mine))}"
                return f"returns {dtype} {list(shape)} where a rank needs {wanted}"
        if base_name(op) == "slice":
            return self._slice(number, op, other)
        return ""

    def _same(self, mine: Any, theirs: Any, op: Op) -> str:
        if isinstance(mine, Ref) and isinstance(theirs, Ref):
            return self._same_value(mine.value, theirs.value)
        if isinstance(mine, dict) and isinstance(theirs, dict) and mine.keys() == theirs.keys():
            parts = ((mine[key], theirs[key]) for key in mine)
            return next((t for a, b in parts if (t := self._same(a, b, op))), "")
        if isinstance(mine, tuple | list) and isinstance(theirs, tuple | list):
            if len(mine) != len(theirs):
                return "gets more or fewer arguments"
            items = zip(mine, theirs, strict=True)
            return next((t for a, b in items if (t := self._same(a, b, op))), "")
        if type(mine) is type(theirs) and (mine == theirs or (mine != mine and theirs != theirs)):
            return ""
        spells = base_name(op) in _SPELLS_SHAPE or base_name(op) == "slice"
        if spells and type(mine) is int and type(theirs) is int and theirs * self.size == mine:
            return ""
        return f"gets {theirs} where one process gets {mine}"

    def _same_value(self, mine: int, theirs: int) -> str:
        mine, theirs = self._source(mine, self.flow), self._source(theirs, self.rehearsed)
        one, other = self.flow.values[mine], self.rehearsed.values[theirs]
        if one.origin == other.origin == "constant" and theirs not in self.pairs:
            if (one.shape, one.dtype, one.digest) != (other.shape, other.dtype, other.digest):
                return "reads another constant"
            self.pairs[theirs] = mine
        if self.pairs.get(theirs) != mine:
            return "reads another tensor"
        return ""

    def _slice(self, number: int, op: Op, other: Op) -> str:
        """Return how the range of a slice differs from the local range; "" if it does not."""
        value = op.inputs[0]
        shape = self.flow.values[value].shape
        dim = positions(argument(op, 1, "dim", 0), len(shape))[0]
        ways = self._ways(self.flow_uses.classes.dims[value][dim])
        ways *= self.size if dim == 1 and number in self.on_parts else 1
        local = shape[dim] // ways

        def ends(which: Op, size: int) -> tuple[int, int]:
            first, last = argument(which, 2, "start") or 0, argument(which, 3, "end")
            last = size if last is None else last
            first = max(first + size, 0) if first < 0 else min(first, size)
            return first, (last + size if last < 0 else min(last, size))

        mine, theirs = ends(op, shape[dim]), ends(other, local)
        if tuple(n * ways for n in theirs) != mine:
            return f"takes the range {list(theirs)} where a rank needs {[n // ways for n in mine]}"
        return ""

    def _local(self, value: int) -> tuple[int, ...]:
        """Return the shape that a recorded value has on one rank."""
        shape = self.flow.values[value].shape
        if value in self.whole:
            return shape
        dims = self.flow_uses.classes.dims[value]
        local = [n // self._ways(dim) for n, dim in zip(shape, dims, strict=True)]
        if value in self.parts and len(local) > 1:
            local[1] //= self.size
        return tuple(local)

    def _ways(self, dim: tuple[Factor, ...]) -> int:
        return math.prod(self.size for f in dim if f in self.cut)
