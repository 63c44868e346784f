"""Find which values that stages of a pipeline exchange are sharded over tp, and how."""

from __future__ import annotations

from dataclasses import replace

from meshplan.model.flow import Flow
from meshplan.plan.plan import Plan
from meshplan.traffic.forward import TensorUse


class SequenceCuts:
    """The values of a recorded forward that are sharded over tp where modules return them.

    `sequence_parallel` shards them along the sequence. Others have a dim that `tp_plan: auto`
    shards, such as the heads of T5's position bias, which its blocks pass on to each other.
    """

    def __init__(self, plan: Plan, flow: Flow) -> None:
        self.flow, self.tp = flow, plan.mesh.size("tp")
        self.is_on = plan.assignment.sequence_parallel and self.tp > 1
        self._known: dict[int, bool | None] = {}
        self._dims: dict[int, int | None] = {}
        """The dim that is sharded of each value that `tp_plan: auto` followed; None if whole."""
        left = {fqn: iter(calls) for fqn, calls in plan.assignment.results.items()}
        for call in flow.calls if self.tp > 1 else ():
            dims = next(left.get(call.module, iter(())), ())
            if len(dims) == len(call.outputs):
                values = (value for _, value in call.outputs)
                self._dims |= dict(zip(values, dims, strict=True))
        self._whole: set[int] = set()
        """Unsharded values at a `SequenceBoundary`: inputs to be sliced, and gathered outputs."""
        for call in flow.calls if self.is_on else ():
            use = plan.assignment.styles.get(call.module)
            if use is not None:
                is_cut = use.style.output[1] == "outside"
                self._known |= {value: is_cut or None for _, value in call.outputs}
        for crossing in plan.assignment.crossings if self.is_on else ():
            for call in (c for c in flow.calls if c.module == crossing.module):
                if crossing.path is None:
                    self._whole |= {value for _, value in call.outputs}
                elif crossing.change == "cut":
                    self._whole |= {v for path, v in call.inputs if path == crossing.path}
        self._known |= dict.fromkeys(self._whole, True)

    def local(self, value: int, whole: TensorUse) -> TensorUse | None:
        """Return `whole` with the shape of one tp rank's shard; None if the sharding is unknown."""
        shape = self.shape(value, whole.shape)
        return None if shape is None else replace(whole, shape=shape)

    def shape(self, value: int, whole: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the shape of a value on each tp rank; None if the sharding is unknown.

        Args:
            value: Id of the value in the flow.
            whole: Its unsharded shape; (batch, sequence, ...) if the sequence is sharded.
        """
        if value in self._dims:
            dim = self._dims[value]
            if dim is None:
                return whole
            return (*whole[:dim], whole[dim] // self.tp, *whole[dim + 1 :])
        if not self.is_on or value in self._whole:
            return whole
        if self._is_cut(value) is not True:
            return None
        before, length, *after = whole
        return before, -(-length // self.tp), *after

    def _is_cut(self, value: int) -> bool | None:
        """Return True if a value is sharded along the sequence; None if that is not known.

        The result of a pointwise operation is sharded if all its inputs are. For other operations
        it is not known.
        """
        if value not in self._known:
            place = self.flow.producer(value)
            op = None if place is None else self.flow.ops[place]
            self._known[value] = None
            if op is not None and op.is_pointwise:
                values = self.flow.values
                found = [self._is_cut(v) for v in op.inputs if values[v].origin in ("op", "input")]
                self._known[value] = True if found and all(found) else None
        return self._known[value]
