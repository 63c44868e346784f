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
    """Every dim of every value, as factors that are equal where dims are iterated over together.

    Args:
        flow: The forward that was analysed.
        dims: Factors of each dim, outermost first, by value id; () for a dim of size 1.
        sizes: Size of each factor.
        blocked: Reason why a factor cannot be sharded, for those that cannot.
        summed: Factors that a matrix product sums over, by index of the operation.
    """

    flow: Flow
    dims: tuple[tuple[Dim, ...], ...]
    sizes: Mapping[Factor, int]
    blocked: Mapping[Factor, str]
    summed: Mapping[int, Dim]

    def sizes_of(self, dim: Dim) -> int:
        """Return the size of a dim, or of a part of one."""
        return math.prod(self.sizes[factor] for factor in dim)

    def factors_of(self, value: int) -> frozenset[Factor]:
        """Return all factors of a value."""
        return frozenset(factor for dim in self.dims[value] for factor in dim)


def classify(flow: Flow) -> DimClasses:
    """Apply the effect of every operation of a flow on dims, and return the classes."""
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
