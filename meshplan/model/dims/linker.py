"""Helpers for the handlers of operations: look up the dims of arguments, link and set dims."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from meshplan.model.dims.factors import Dim, Factor, Factors
from meshplan.model.flow import Flow, Op, Ref, Value, refs

Dims = tuple[Dim, ...]


class Linker:
    """The dims of the values of a flow, while its operations are processed in order.

    Attributes:
        dims: Dims of each value, by value id.
        summed: The dim that a matrix product sums over, by index of the operation.
    """

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.factors = Factors()
        self.dims: dict[int, Dims] = {}
        self.summed: dict[int, Dim] = {}
        for value in flow.values:
            if value.origin != "op":
                self.fresh(value.id)

    def value(self, item: Any) -> Value:
        assert isinstance(item, Ref), f"{item} is not a tensor"
        return self.flow.values[item.value]

    def of(self, item: Any) -> Dims:
        """Return the dims of a tensor argument."""
        return self.dims[self.value(item).id]

    def fresh(self, value: int, blocked: str = "") -> Dims:
        """Give a value new dims, linked to no other yet, and return them; see `Factors.new`."""
        shape = self.flow.values[value].shape
        self.dims[value] = tuple(self.factors.new(size, blocked) for size in shape)
        return self.dims[value]

    def give(self, value: int, dims: Iterable[Dim]) -> None:
        """Set the dims of an operation's result."""
        self.dims[value] = tuple(dims)
        sizes = tuple(self.factors.size(d) for d in self.dims[value])
        assert sizes == self.flow.values[value].shape, (sizes, self.flow.values[value])

    def block(self, dims: Iterable[Dim], reason: str) -> None:
        for dim in dims:
            self.factors.block(dim, reason)

    def block_all(self, op: Op, reason: str) -> None:
        """Block all dims of the inputs and outputs of an operation that has no sharding rule."""
        for value in op.inputs:
            self.block(self.dims[value], reason)
        for value in op.outputs:
            self.fresh(value, reason)

    def broadcast(self, tensors: Sequence[tuple[Dims, tuple[int, ...]]], reason: str) -> Dims:
        """Link the dims of tensors that are broadcast together, and return the result's dims.

        Args:
            tensors: (dims, shape) of each tensor.
            reason: Reason recorded for dims whose factors cannot be made equal.
        """
        ndim = max(len(shape) for _, shape in tensors)
        out: list[Dim] = [()] * ndim
        for dims, shape in tensors:
            for place, dim in enumerate(dims, ndim - len(shape)):
                if not dim:
                    continue
                if out[place]:
                    self.factors.unify(out[place], dim, reason)
                else:
                    out[place] = dim
        return tuple(out)

    def of_shape(self, item: Any) -> tuple[Dims, tuple[int, ...]]:
        return self.of(item), self.value(item).shape

    def all_of(self, op: Op) -> list[tuple[Dims, tuple[int, ...]]]:
        """Return (dims, shape) of every tensor argument of an operation."""
        found = (*refs(op.args), *refs(tuple(op.kwargs.values())))
        return [(self.dims[v], self.flow.values[v].shape) for v in found]

    def leaves(self, dims: Iterable[Dim]) -> frozenset[Factor]:
        return frozenset(leaf for dim in dims for leaf in self.factors.leaves(dim))


def argument(op: Op, place: int, name: str, default: Any = None) -> Any:
    """Return an argument that was passed at position `place` or as keyword `name`."""
    return op.args[place] if place < len(op.args) else op.kwargs.get(name, default)


def base_name(op: Op) -> str:
    """Return the operator without namespace and overload: "mm" of "aten.mm.default"."""
    return op.name.split(".")[1] if "." in op.name else op.name


def positions(item: Any, ndim: int) -> tuple[int, ...]:
    """Return the indices from 0 of the dims that an int, a list of ints or None (all) names."""
    if item is None or item == () or item == []:
        return tuple(range(ndim))
    items = item if isinstance(item, tuple | list) else (item,)
    return tuple(i % ndim if ndim else 0 for i in items)
