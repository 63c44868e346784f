"""Find values of a forward sharded along the sequence over tp, among those sent between stages."""

from __future__ import annotations

from dataclasses import replace

from meshplan.model.flow import Flow
from meshplan.plan.plan import Plan
from meshplan.traffic.forward import TensorUse


class SequenceCuts:
    """The values that are sharded along the sequence under `sequence_parallel`."""

    def __init__(self, plan: Plan, flow: Flow) -> None:
        self.flow, self.tp = flow, plan.mesh.size("tp")
        self.is_on = plan.assignment.sequence_parallel and self.tp > 1
        self._known: dict[int, bool | None] = {}
        self._whole: set[int] = set()
        """Whole values at a boundary: inputs to be sliced, and outputs that are gathered."""
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
        """Return a value as each rank of tp holds it; None if that is not known."""
        shape = self.shape(value, whole.shape)
        return None if shape is None else replace(whole, shape=shape)

    def shape(self, value: int, whole: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the shape of a value as each rank of tp holds it; None if that is not known."""
        if not self.is_on or value in self._whole:
            return whole
        if self._is_cut(value) is not True:
            return None
        before, length, *after = whole
        return before, -(-length // self.tp), *after

    def _is_cut(self, value: int) -> bool | None:
        """Return True if a value is sharded; None if that is not known.

        Pointwise operations on sharded values give sharded values; other operations give None.
        """
        if value not in self._known:
            place = self.flow.producer(value)
            op = None if place is None else self.flow.ops[place]
            self._known[value] = None
            if op is not None and op.is_pointwise:
                found = [self._is_cut(v) for v in op.inputs if self._is_activation(v)]
                self._known[value] = True if found and all(found) else None
        return self._known[value]

    def _is_activation(self, value: int) -> bool:
        return self.flow.values[value].origin in ("op", "input")
