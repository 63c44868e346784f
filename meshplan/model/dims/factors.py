"""Dims as products of factors, and a union-find of the factors that are equal.

A dim of 64 that code views as (8, 8) is the product of two factors, outermost first. Two dims that
an operation iterates over together consist of equal factors. Which operations do so is defined in
`operations` and `shaping`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

Factor = int
Dim = tuple[Factor, ...]
"""Factors of a dim, outermost first; () for a dim of size 1."""


class Factors:
    """The factors of all dims of a flow: which are equal, divided further, or not to be sharded."""

    def __init__(self) -> None:
        self._parent: list[int] = []
        self._size: list[int] = []
        self._parts: list[tuple[int, int] | None] = []
        self._blocked: list[str] = []

    def new(self, size: int, blocked: str = "") -> Dim:
        """Return a dim of this size that is one new factor, equal to no other yet; () for size 1.

        `blocked` says why the factor cannot be sharded; "" if it can.
        """
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
        """Return why this factor cannot be sharded; "" if it can."""
        return self._blocked[self._find(factor)]

    def leaves(self, dim: Iterable[Factor]) -> Dim:
        """Return a dim's undivided factors, in order, each by the representative of its class."""
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
        """Record why these factors cannot be sharded; an earlier reason is kept."""
        for leaf in self.leaves(dim):
            self._blocked[leaf] = self._blocked[leaf] or reason

    def unify(self, left: Dim, right: Dim, reason: str) -> None:
        """Make the factors of two dims equal: an operation iterates over both, index by index.

        Factors of different sizes are divided until their sizes agree.

        Args:
            left, right: The dims.
            reason: Reason recorded for the remaining factors, if they cannot be made equal.
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
        """Return the dims of sizes `sizes` that result from a view of `dims`.

        Args:
            dims: The dims before the view.
            sizes: The sizes after the view; their product is the same.
            reason: Reason recorded for factors that the view divides unevenly.
        """
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
            # No product of leading factors is this size: give up on all dims up to the next place
            # at which the old and the new shape have a common boundary.
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
        """Remove the leading factors whose product is `size` from `rest`, and return them.

        Divides the last of them if necessary. If that is not possible, return None.
        """
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
