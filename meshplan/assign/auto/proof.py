"""Prove that a set of regions gives the values and gradients of one process.

Forward: outside of styled modules, every operation must work position by position along the sharded
dim classes. The input and output of each styled module must be sharded as its style requires.

Backward: where an operation combines a sharded value with a whole value, each rank's gradient of
the whole value is a partial sum ("part"). A styled module sums the gradient of its input over tp,
and the gradient of a parameter can be summed too. If a partial sum reaches any other place, it
would be used as the full gradient, so the regions are refuted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from meshplan.assign.auto.regions import FlowUses, Region
from meshplan.model.dims.factors import Factor
from meshplan.model.dims.linker import base_name
from meshplan.model.dims.operations import UNIFORM
from meshplan.model.flow import UPDATE, Call, Op

_FLOATS = ("float32", "bfloat16", "float16", "float64", "complex64", "complex128")
_WHOLE, _PART = 1, 2


class Refuted(Exception):
    """The error that a set of regions would not compute what one process computes, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionProof:
    """The demands of a set of regions on replicated parameters.

    Args:
        summed: Fqns of replicated parameters whose gradients must be summed over tp.
        summed_modules: Fqns of replicated projections for which the gradients of both the weights
            and the input must be summed over tp.
    """

    summed: tuple[str, ...] = ()
    summed_modules: tuple[str, ...] = ()


@dataclass(slots=True)
class _GradientStates:
    """The gradient of each value id: whole (`_WHOLE`), a partial sum (`_PART`), or both."""

    gradient: dict[int, int] = field(default_factory=dict)
    summed_modules: dict[str, bool] = field(default_factory=dict)

    def add(self, value: int, state: int) -> None:
        self.gradient[value] = self.gradient.get(value, 0) | state


def prove(
    flow_uses: FlowUses, regions: Iterable[Region], gathered: Mapping[str, str]
) -> RegionProof:
    """Prove that sharding these regions gives the values and gradients of one process.

    Args:
        flow_uses: The recorded forward.
        regions: The regions to shard.
        gathered: Modules whose style has a whole input and output (vocab), by fqn.

    Returns:
        The demands of the regions on replicated parameters.

    Raises:
        Refuted: There is no proof; the message names the place and the reason.
    """
    regions = tuple(regions)
    names = [*gathered, *(fqn for region in regions for fqn in region.words)]
    if len(set(names)) != len(names):
        raise Refuted("two dims would shard the same module")
    walk = _BackwardWalk(flow_uses, regions, gathered)
    walk.forward()
    return walk.backward()


def summed_beside(
    flow_uses: FlowUses,
    regions: Iterable[Region],
    gathered: Mapping[str, str],
    proof: RegionProof,
    parts: frozenset[int],
    entering: frozenset[int],
) -> tuple[str, ...]:
    """Return parameters whose gradients become partial sums if the sequence is sharded as well.

    Args:
        flow_uses: The recorded forward.
        regions: The sharded regions.
        gathered: Modules with the style vocab, by fqn.
        proof: The proof without sequence sharding, whose requirements must still be met.
        parts: Ids of values of which every rank has a shard of the sequence.
        entering: Ids of whole values that are sliced where they enter a module; backward gathers
            the gradients of the slices.

    Returns:
        The fqns of the parameters that are not yet in `proof.summed`.

    Raises:
        Refuted: A gradient would be partly whole and partly a partial sum.
    """
    walk = _BackwardWalk(flow_uses, tuple(regions), gathered)
    walk.entering = entering
    for value in (*parts, *entering):
        walk.is_cut[value] = True
    after = walk.backward()
    if set(after.summed_modules) != set(proof.summed_modules):
        raise Refuted("replicated projections would need other gradient reductions")
    if not set(proof.summed) <= set(after.summed):
        raise Refuted("replicated parameters would need other gradient reductions")
    return tuple(fqn for fqn in after.summed if fqn not in proof.summed)


class _BackwardWalk:
    def __init__(
        self,
        flow_uses: FlowUses,
        regions: tuple[Region, ...],
        gathered: Mapping[str, str],
    ) -> None:
        self.flow_uses, self.flow, self.classes = flow_uses, flow_uses.flow, flow_uses.classes
        self.cut, self.gathered = frozenset(r.factor for r in regions), gathered
        self.styled = {fqn: (word, each) for each in regions for fqn, word in each.words.items()}
        dims = self.classes.dims
        self.is_cut = [any(f in self.cut for dim in value for f in dim) for value in dims]
        self.of_classes, self.entering = tuple(self.is_cut), frozenset[int]()
        self.inside: dict[int, Call] = {}
        for call in self.flow.calls:
            if call.module in self.styled or call.module in gathered:
                for number in range(*call.ops):
                    if number in self.inside and self.inside[number] is not call:
                        raise Refuted(f"{call.module} is called inside of another sharded module")
                    self.inside[number] = call
        self.has_gradient = self._with_gradient()

    def _with_gradient(self) -> list[bool]:
        """Return, by value id, True for floating-point values that depend on a parameter."""
        out = [v.origin == "parameter" and v.dtype in _FLOATS for v in self.flow.values]
        for op in self.flow.ops:
            if any(out[v] for v in op.inputs):
                for value in op.outputs:
                    out[value] = self.flow.values[value].dtype in _FLOATS
        return out

    # Forward.

    def forward(self) -> None:
        for call in self.flow.calls:
            if call.module in self.styled:
                self._styled_call(call, *self.styled[call.module])
            elif call.module in self.gathered:
                self._whole(call, (v for _, v in (*call.inputs, *call.outputs)))
        for number, op in enumerate(self.flow.ops):
            if number not in self.inside:
                self._operation(number, op)
        for path, value in self.flow.outputs:
            if self.is_cut[value]:
                shown = f" (as {path})" if path else ""
                raise Refuted(f"the model returns a value that would be sharded{shown}")

    def _operation(self, number: int, op: Op) -> None:
        where = self._where(op)
        summed = [f for f in self.classes.summed.get(number, ()) if f in self.cut]
        if summed:
            raise Refuted(f"{base_name(op)}{where} sums over the dim that would be sharded")
        if any(self.is_cut[v] for v in op.inputs):
            # The results of an operation with a sharded argument must be sharded, too, unless they
            # do not depend on the argument's elements.
            makes = [v for v in op.outputs if not self.is_cut[v]]
            known = base_name(op) in UNIFORM or op.name == UPDATE
            if makes and not known and any(self.flow.values[v].shape for v in makes):
                raise Refuted(f"{base_name(op)}{where} makes unsharded values of sharded ones")

    def _styled_call(self, call: Call, word: str, region: Region) -> None:
        if len(call.inputs) != 1 or len(call.outputs) != 1:
            raise Refuted(f"{call.module} does not take one tensor and return one")
        (_, taken), (_, given) = call.inputs[0], call.outputs[0]
        outer = region.pieces.get(call.module, 1)
        if word == "rowwise":
            self._along_last(call, taken, region.factor, 1)
            self._whole(call, (given,))
        else:
            self._whole(call, (taken,))
            self._along_last(call, given, region.factor, outer)

    def _along_last(self, call: Call, value: int, factor: Factor, outer: int) -> None:
        """Raise `Refuted` unless the value is sharded along its last dim only, by this factor."""
        *others, last = self.classes.dims[value]
        found = [f for dim in others for f in dim if f in self.cut]
        before = 1
        for f in last:
            if f == factor:
                break
            before *= self.classes.sizes[f]
        if found or [f for f in last if f in self.cut] != [factor] or before != outer:
            raise Refuted(
                f"the input or output of {call.module} is not sharded along its features alone"
            )

    def _whole(self, call: Call, values: Iterable[int]) -> None:
        if any(self.is_cut[value] for value in values):
            raise Refuted(f"the input or output of {call.module} would be sharded")

    def _where(self, op: Op) -> str:
        module = self.flow.calls[op.call].module
        return f" in {module}" if module else ""

    # Backward.

    def backward(self) -> RegionProof:
        state = _GradientStates()
        for _, value in self.flow.outputs:
            state.add(value, _WHOLE)
        calls_at = {c.ops[1] - 1: c for c in self.flow.calls if c.ops[1] > c.ops[0]
                    and c.module in (*self.styled, *self.gathered)}  # fmt: skip
        linears = {c.ops[1] - 1: c for c in self.flow.calls if self._can_sum(c)}
        summed_inside: dict[int, Call] = {}
        for number in reversed(range(len(self.flow.ops))):
            op = self.flow.ops[number]
            if number in calls_at:
                self._leave_styled(calls_at[number], state)
            if number in self.inside:
                continue
            if number in linears and number not in summed_inside:
                call = linears[number]
                (_, given) = call.outputs[0]
                is_part = not self.is_cut[given] and state.gradient.get(given) == _PART
                if state.summed_modules.setdefault(call.module, is_part) != is_part:
                    raise Refuted(
                        f"the output of {call.module} meets sharded values in some calls only"
                    )
                if is_part:
                    summed_inside |= dict.fromkeys(range(*call.ops), call)
                    self._add_input(call, state)
            if number in summed_inside:
                continue
            self._step(op, state)
        return self._end(state)

    def _can_sum(self, call: Call) -> bool:
        """Return True for a call of a replicated projection whose gradients could be summed."""
        info = self.flow_uses.graph.modules.get(call.module)
        return (
            info is not None
            and info.kind in ("linear", "conv1d")
            and call.module not in self.styled
            and call.module not in self.gathered
            and call.ops[1] > call.ops[0]
            and len(call.inputs) == 1 == len(call.outputs)
            and not self.of_classes[call.inputs[0][1]]
            and not self.flow_uses.does_more(info)
        )

    def _leave_styled(self, call: Call, state: _GradientStates) -> None:
        """Record that the input of a styled module has a whole gradient, because it is summed.

        Raises:
            Refuted: The gradient of the module's output is a partial sum.
        """
        for _, value in call.outputs:
            if not self.is_cut[value] and state.gradient.get(value, 0) & _PART:
                raise Refuted(
                    f"the output of {call.module} is combined with sharded values, which leaves "
                    "each rank only a part of its gradient"
                )
        self._add_input(call, state)

    def _add_input(self, call: Call, state: _GradientStates) -> None:
        for _, value in call.inputs:
            if self.has_gradient[value] and not self.is_cut[value]:
                state.add(value, _WHOLE)

    def _step(self, op: Op, state: _GradientStates) -> None:
        into = 0
        for value in op.outputs:
            if self.has_gradient[value] and value in self.entering:
                into |= _WHOLE
            elif self.has_gradient[value]:
                into |= _PART if self.is_cut[value] else state.gradient.get(value, 0)
        if into == _WHOLE | _PART:
            raise Refuted(
                f"the output of {base_name(op)}{self._where(op)} is used both with sharded values "
                "and without"
            )
        for value in op.inputs:
            if into and self.has_gradient[value] and not self.is_cut[value]:
                state.add(value, into)

    def _end(self, state: _GradientStates) -> RegionProof:
        summed = []
        modules = tuple(m for m, is_part in state.summed_modules.items() if is_part)
        for name, value in self.flow_uses.values.items():
            found = state.gradient.get(value, 0)
            tensor = self.flow_uses.graph.tensors[name]
            if self.is_cut[value] or not found & _PART:
                continue
            owners = self.flow_uses.owners(tensor)
            if found == _WHOLE | _PART:
                raise Refuted(f"{name} is used both with sharded values and without")
            if (
                len(tensor.names) > 1
                or self.flow_uses.used_outside(tensor, owners)
                or any(owner in self.styled or owner in self.gathered for owner in owners)
            ):
                raise Refuted(f"each rank would get only a part of the gradient of {name}")
            summed.append(name)
        return RegionProof(summed=tuple(summed), summed_modules=modules)
