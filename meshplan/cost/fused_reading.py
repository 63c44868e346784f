"""Count the work of tape ops whose blocks are compiled, one by one, with `torch.compile`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable

from meshplan.cost.fusion import Access, CompiledPass, FusedTraffic
from meshplan.cost.reading import Reading
from meshplan.cost.tallies import WorkCounts
from meshplan.memory.tape.tape import TapeOp

_FORWARD, _AGAIN, _BACKWARD = (
    CompiledPass("", phase) for phase in ("forward", "again", "backward")
)


class FusedReading(Reading):
    """Reads a tape section by section, with fused kernels in the blocks.

    Products, attention and collectives cost what they cost in eager mode. So does all that is
    outside of the blocks, which is not compiled.
    """

    _fuses_sums = False

    def _work_of(
        self, name: str, start: int, end: int
    ) -> tuple[WorkCounts, WorkCounts, tuple[WorkCounts, WorkCounts, WorkCounts]]:
        if not name:
            return super()._work_of(name, start, end)
        traffic, runs = FusedTraffic(), self._recomputed(start, end)
        chosen = [number for number in runs if not self._marked.rows[number].is_kept]
        forward = self._fused_forward(traffic, _FORWARD, range(start, end))
        read_later = {self._tape.base[v] for row in self._tape.rows[end:] for v in row.reads}
        forward = forward.plus(_moved(traffic.run(_FORWARD, sorted(read_later))))
        self._fuses_sums = True
        backward = self._fused_backward(traffic, start, end)
        self._fuses_sums = False
        selective, full = (
            self._fused_forward(FusedTraffic(), _AGAIN, each) for each in (chosen, runs)
        )
        return forward, backward, (WorkCounts(), selective, full)

    def _is_nothing(self, row: TapeOp) -> bool:
        """Return True for an op without a kernel: a view of what it reads."""
        return bool(row.makes) and self._is_view(row) and not row.flops

    def _fused_forward(
        self, traffic: FusedTraffic, code: CompiledPass, numbers: Iterable[int]
    ) -> WorkCounts:
        out = WorkCounts()
        for number in numbers:
            row, work = self._tape.rows[number], self._forward(number)
            if self._has_own_kernel(row):
                reads, makes = ([*map(self._base, each)] for each in (row.reads, row.makes))
                out = out.plus(work).plus(_moved(traffic.run(code, reads, makes)))
            elif not self._is_nothing(row):
                made = row.makes or row.reads[:1]
                kernels, moved = traffic.fuse(
                    code, [*map(self._access, row.reads)], map(self._access, made)
                )
                out = out.plus(
                    WorkCounts(kernels, moved_bytes=moved, weight_bytes=work.weight_bytes)
                )
        return out

    def _fused_backward(self, traffic: FusedTraffic, start: int, end: int) -> WorkCounts:
        """Return the work of a block's backward; the sums of gradients are fused, too."""
        gradients: dict[int, list[Hashable]] = defaultdict(list)
        """The parts whose sum is the gradient of a value, by the value."""
        sizes: dict[Hashable, float] = {}
        out = WorkCounts()

        def given(value: int) -> list[Hashable]:
            """Return the parts of the gradient of a value that an op of the block has made."""
            base = self._base(value)
            parts = gradients.pop(base, None) or [("given", base)]
            for part in parts:
                sizes.setdefault(part, self._size(value))
            return parts

        def access(part: Hashable) -> Access:
            return Access(part, None, sizes[part])

        def summed(parts: list[Hashable], value: int) -> Hashable:
            """Add the parts up in a fused kernel, if there are several."""
            nonlocal out
            if len(parts) == 1:
                return parts[0]
            whole = ("sum", self._base(value))
            sizes[whole] = self._size(value)
            kernels, moved = traffic.fuse(_BACKWARD, [*map(access, parts)], [access(whole)])
            out = out.plus(WorkCounts(kernels, moved_bytes=moved))
            return whole

        for number in reversed(range(start, end)):
            row = self._tape.rows[number]
            if not (row.grads or row.parameters) or self._is_nothing(row):
                continue
            work, makes = self._backward(number), [v for v in row.makes if self._base(v) == v]
            if self._has_own_kernel(row):
                reads = [summed(given(value), value) for value in makes]
                reads += map(self._base, row.keeps)
                new = [("grad", number, self._base(grad.value)) for grad in row.grads]
                for part, grad in zip(new, row.grads, strict=True):
                    sizes[part] = grad.nbytes or self._size(grad.value)
                    gradients[self._base(grad.value)].append(part)
                out = out.plus(work).plus(_moved(traffic.run(_BACKWARD, reads, new)))
                continue
            parts = [part for value in makes for part in given(value)]
            made: list[Access] = []
            for grad in row.grads:
                if not grad.nbytes:  # The output's gradient is the input's, too.
                    gradients[self._base(grad.value)] += parts
                    continue
                part = ("grad", number, self._base(grad.value))
                sizes[part] = grad.nbytes
                made.append(access(part))
                gradients[self._base(grad.value)].append(part)
            if made or row.parameters:
                accesses = [*map(access, parts), *map(self._access, row.keeps)]
                kernels, moved = traffic.fuse(_BACKWARD, accesses, made)
                out = out.plus(
                    WorkCounts(kernels, moved_bytes=moved, weight_bytes=work.weight_bytes)
                )
        # What earlier sections receive is summed and written.
        left = [summed(parts, value) for value, parts in gradients.items()]
        return out.plus(_moved(traffic.run(_BACKWARD, left)))

    def _access(self, value: int) -> Access:
        return Access(self._base(value), value, self._size(value))

    def _base(self, value: int) -> int:
        return self._tape.base[value]

    def _added(self, row: TapeOp) -> WorkCounts:
        return WorkCounts() if self._fuses_sums else super()._added(row)


def _moved(nbytes: float) -> WorkCounts:
    """Return the work of writing so many bytes."""
    return WorkCounts(moved_bytes=nbytes)
