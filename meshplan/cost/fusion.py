"""Count what compiled blocks read and write in the device's memory.

`torch.compile` leaves matrix products, attention and collectives to their own kernels, and makes
one kernel of the elementwise operators and reductions between two of them. Such a kernel reads each
value that it did not make once, and writes what others read: another kernel of the same pass, or a
product. What only backward reads is not written: backward makes it again from what it reads anyway.

Operators belong to one kernel if equally many products are on the longest way to them, whatever the
order in which eager mode runs them.

Attention that is written in plain PyTorch counts as written, though Inductor may know it by sight
and put torch's fused attention in its place.

Source: torch 2.13, _inductor/scheduler.py (`can_fuse`: nodes that read or write the same values),
_functorch/partitioners.py (`min_cut_rematerialization_partition`: what is cheap to compute is not
saved). `tests/cost/test_fusion.py` compares the bytes with those that Inductor counts.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple


class Access(NamedTuple):
    """Memory that an operator reads or writes.

    Attributes:
        value: The storage, by any key.
        part: The view of it, by any key.
        nbytes: Bytes of the view.
    """

    value: Hashable
    part: Hashable
    nbytes: float


class CompiledPass(NamedTuple):
    """The code that is compiled together.

    Attributes:
        block: The compiled block.
        phase: "forward", "again" for its recomputation, or "backward".
    """

    block: str
    phase: str


class _Kernel(NamedTuple):
    """A fused kernel.

    Attributes:
        code: What it is a part of.
        depth: Products on the longest way to it, in this pass.
    """

    code: CompiledPass
    depth: int


class FusedTraffic:
    """Takes operators in the order in which they run, and counts the traffic of fused kernels."""

    def __init__(self) -> None:
        self._made: dict[Hashable, _Kernel] = {}
        """For each value, the kernel that makes it, or that may be the first to read it."""
        self._unwritten: dict[Hashable, float] = {}
        """Bytes of the results of fused kernels that nothing has needed in memory so far."""
        self._inlined: set[Hashable] = set()
        """Values that follow from no other: constants, masks, random numbers. Kernels make them
        where they need them."""
        self._read: dict[_Kernel, set[Hashable]] = {}
        """Memory that each kernel has read, as (value, part)."""

    def fuse(
        self, code: CompiledPass, reads: Sequence[Access], makes: Iterable[Access]
    ) -> tuple[float, float]:
        """Add an operator to its kernel; return the (kernels, bytes) that this adds.

        Args:
            code: The pass that runs.
            reads: What the operator reads.
            makes: What it writes in eager mode.
        """
        if all(each.value in self._inlined for each in reads):
            for value, _, nbytes in makes:
                self._inlined.add(value)
                self._unwritten[value] = nbytes
            return 0.0, 0.0
        kernel = _Kernel(code, self._depth(code, (each.value for each in reads)))
        begun = float(kernel not in self._read)
        known, moved = self._read.setdefault(kernel, set()), 0.0
        for value, part, nbytes in reads:
            if value in self._inlined:
                continue
            maker = self._made.get(value)
            if value in self._unwritten and maker is not None:
                is_made_again = maker.code.block == code.block and maker.code != code
                if maker == kernel or is_made_again:
                    continue
                moved += self._unwritten.pop(value)
            if (value, part) not in known:
                known.add((value, part))
                moved += nbytes
        for value, _, nbytes in makes:
            self._inlined.discard(value)
            self._made[value] = kernel
            self._unwritten[value] = nbytes
        return begun, moved

    def run(
        self, code: CompiledPass, reads: Sequence[Hashable], makes: Iterable[Hashable] = ()
    ) -> float:
        """Run an operator that is a kernel of its own; return the bytes written for it.

        Args:
            code: The pass that runs.
            reads: The values that the operator reads.
            makes: The values that it makes.
        """
        after = _Kernel(code, self._depth(code, reads) + 1)
        written = sum(self._unwritten.pop(value, 0.0) for value in reads)
        for value in makes:
            self._made[value] = after
            self._inlined.discard(value)
            self._unwritten.pop(value, None)
        return written

    def _depth(self, code: CompiledPass, values: Iterable[Hashable]) -> int:
        makers = (self._made.get(value) for value in values)
        return max((each.depth for each in makers if each and each.code == code), default=0)
