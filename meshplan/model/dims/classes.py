"""Compute the classes of dims of a whole flow."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from meshplan.model.dims.factors import Dim, Factor
from meshplan.model.dims.linker import Linker
from meshplan.model.dims.operations import link
from meshplan.model.flow import Flow


@dataclass(frozen=True, slots=True, kw_only=True)
class DimClasses:
    """The dims of all values of a flow as products of factors.

    Dims that an operation iterates over together have equal factors.

    Args:
        flow: The forward that was analysed.
        dims: For each value id, its dims in order; a dim is the tuple of its factors, outermost
            first, () for a dim of size 1.
        sizes: Size of each factor.
        blocked: For each factor that cannot be sharded, the reason.
        summed: For each matrix product, by index of the operation, the factors that it sums over.
    """

    flow: Flow
    dims: tuple[tuple[Dim, ...], ...]
    sizes: Mapping[Factor, int]
    blocked: Mapping[Factor, str]
    summed: Mapping[int, Dim]

    def sizes_of(self, dim: Dim) -> int:
        """Return the product of the sizes of these factors, such as those of a dim."""
        return math.prod(self.sizes[factor] for factor in dim)

    def factors_of(self, value: int) -> frozenset[Factor]:
        """Return the factors of all dims of a value."""
        return frozenset(factor for dim in self.dims[value] for factor in dim)


def classify(flow: Flow) -> DimClasses:
    """Return the classes of dims that follow from the operations of a flow."""
    linker = Linker(flow)
    for number, op in enumerate(flow.ops):
        link(linker, number, op)
    factors = linker.factors
    for value, found in linker.dims.items():
        leaves = [leaf for dim in found for leaf in factors.leaves(dim)]
        twice = [leaf for leaf in set(leaves) if leaves.count(leaf) > 1]
        origin = flow.values[value].origin
        factors.block(twice, "one of its dims occurs twice in a tensor")
        if origin in ("buffer", "constant", "input"):
            factors.block(
                leaves, f"it shares a dim with {_a_name(flow, value)}, which is not sharded"
            )
    dims = tuple(tuple(factors.leaves(dim) for dim in linker.dims[v.id]) for v in flow.values)
    used = {leaf for value in dims for dim in value for leaf in dim}
    return DimClasses(
        flow=flow,
        dims=dims,
        sizes=MappingProxyType({leaf: factors.size((leaf,)) for leaf in used}),
        blocked=MappingProxyType({leaf: why for leaf in used if (why := factors.blocked(leaf))}),
        summed=MappingProxyType({n: factors.leaves(dim) for n, dim in linker.summed.items()}),
    )


def _a_name(flow: Flow, value: int) -> str:
    found = flow.values[value]
    kind = {"buffer": "the buffer", "input": "the input"}.get(found.origin, "a constant")
    return f"{kind} {found.name}".strip()
