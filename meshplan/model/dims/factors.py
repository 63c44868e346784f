"""Dims as products of factors, and the factors that are the same.

A dim of 64 that code views as (8, 8) is the product of two factors, outermost first. Two
dims that an operation iterates over together consist of the same factors: these are the classes of
a union-find. Operations are defined elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

Factor = int
Dim = tuple[Factor, ...]
"""Factors of a dim, outermost first; () for a dim of size 1."""


class Factors:
    """Every factor of every dim of a flow."""

    def __init__(self) -> None:
        self._parent: list[int] = []
        self._size: list[int] = []
        self._parts: list[tuple[int, int] | None] = []
        self._blocked: list[str] = []

    def new(self, size: int, blocked: str = "") -> Dim:
        """Return a dim with a factor of its own."""
        if size == 1:
            return ()
        self._parent.append(len(self._parent))
        self._size.append(size)
        self._parts.append(None)
        self._blocked.append(blocked)
        return (len(self._parent) - 1,)

    def size(self, dim: Iterable[Factor]) -> int:
        return math.prod(self._size[f] for f in dim)

    def blocked(self, factor: Factor) -> str:
        """Return why this factor cannot be sharded; "" if nothing prevents it."""
        return self._blocked[self._find(factor)]

    def leaves(self, dim: Iterable[Factor]) -> Dim:
        """Return the dim as factors that are not divided further, each as the root of its class."""
        out: list[int] = []
        for factor in dim:
            root = self._find(factor)
            parts = self._parts[root]
            if parts is None:
                out.append(root)
            else:
                out += self.leaves(parts)
        return tuple(out)

    def block(self, dim: Iterable[Factor], reason: str) -> None:
        """Forbid sharding these factors; the first reason is kept."""
        for leaf in self.leaves(dim):
            self._blocked[leaf] = self._blocked[leaf] or reason

    def unify(self, left: Dim, right: Dim, reason: str) -> None:
        """Record that two dims are iterated over together, index by index.

        Args:
            left, right: The dims.
            reason: Message for why neither can be sharded if they have no common factors.
        """
        while True:
            a, b = self.leaves(left), self.leaves(right)
            at = next((i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]),
                      min(len(a), len(b)))  # fmt: skip
            left, right = a[at:], b[at:]
            if not left or not right:
                self.block((*left, *right), reason)
                return
            one, other = left[0], right[0]
            if self._size[one] == self._size[other]:
                self._parent[other] = one
                self._blocked[one] = self._blocked[one] or self._blocked[other]
                continue
            large, small = sorted((one, other), key=lambda f: -self._size[f])
            if self._size[large] % self._size[small]:
                self.block((*left, *right), reason)
                return
            self._split(large, self._size[small])

    def regroup(self, dims: Sequence[Dim], sizes: Sequence[int], reason: str) -> list[Dim]:
        """Return the same elements in the same order as dims of other sizes, as a view does."""
        if 0 in sizes or any(self.size(d) == 0 for d in dims):
            for dim in dims:
                self.block(dim, reason)
            return [self.new(size, reason) for size in sizes]
        rest = [leaf for dim in dims for leaf in self.leaves(dim)]
        out: list[Dim] = []
        wanted = list(sizes)
        while wanted:
            taken = self._take(rest, wanted[0])
            if taken is not None:
                out.append(taken)
                wanted.pop(0)
                continue
            # No factors make up this dim: continue after the next boundary that both shapes have.
            crossed: list[Factor] = []
            have = want = 1
            while not crossed or have != want:
                if want <= have and wanted:
                    want *= wanted[0]
                    out.append(self.new(wanted.pop(0), reason))
                else:
                    crossed.append(rest.pop(0))
                    have *= self._size[crossed[-1]]
            self.block(crossed, reason)
        return out

    def _take(self, rest: list[Factor], size: int) -> Dim | None:
        """Take factors of this size off the front; without any, take nothing and return None."""
        product, count = 1, 0
        while product < size and count < len(rest):
            product *= self._size[rest[count]]
            count += 1
        if product != size:
            last = rest[count - 1]
            before = product // self._size[last]
            if product < size or size % before or self._size[last] % (size // before):
                return None
            self._split(last, size // before)
            rest[:] = self.leaves(rest)
            return self._take(rest, size)
        taken = tuple(rest[:count])
        del rest[:count]
        return taken

    def _split(self, leaf: Factor, outer: int) -> None:
        reason = self._blocked[leaf]
        (first,) = self.new(outer, reason)
        (second,) = self.new(self._size[leaf] // outer, reason)
        self._parts[leaf] = (first, second)

    def _find(self, factor: Factor) -> Factor:
        root = factor
        while self._parent[root] != root:
            root = self._parent[root]
        while self._parent[factor] != root:
            self._parent[factor], factor = root, self._parent[factor]
        return root
