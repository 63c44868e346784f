"""Count the work of tape ops: kernels, FLOPs, bytes moved and sent, in forward and backward.

A product of an m x k and a k x n matrix takes 2mnk FLOPs, and its backward is two such products.
Attention is taken to be causal; its backward takes five products, its forward two. Every other op
reads its inputs from the device's memory and writes its outputs there.

Source: Dao 2023 (FlashAttention-2), section 3.1, for attention; `memory.tape.ops` for saved values.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from meshplan.cost.tallies import WorkCounts, summed
from meshplan.kernels import ATTENTION_BACKWARD, attention_flops
from meshplan.memory.log.events import Term
from meshplan.memory.log.microbatch import HookKind
from meshplan.memory.tape.tape import RecomputeSpan, Tape, TapeOp, play

_PRODUCTS: Final = frozenset({"mm", "grouped_mm", "bmm", "column", "row"})
"""Names of ops that are matrix products. The factor is a parameter (mm), one parameter per group of
rows (grouped_mm) or another activation (bmm); column and row are nanotron's products with a
collective inside."""
_FOUR: Final = 4  # Bytes of an int32, and of a float32.
_ATTENTION: Final = frozenset({"attention", "bmm"})
"""Names of ops whose FLOPs count as attention."""
_SENT: Final = {
    "all_gather": ("gather", "gather"),
    "reduce_scatter": ("gather", "gather"),
    "all_reduce": ("all_reduce", ""),
    "all_reduce_back": ("", "all_reduce"),
    "gather_sequence": ("gather", "gather"),
    "scatter_sequence": ("gather", "gather"),
    "cut_sequence": ("", "gather"),
    "end_sequence": ("gather", ""),
}
"""(collective of its forward, collective of its backward), by name of an op; "" for none."""
_SUMMED: Final = frozenset({"amax", "stack"})
"""Ops of a vocabulary-parallel loss whose results are summed over ranks.

Source: `runtime.apply.loss.vocab_parallel_loss`."""


def is_chosen(row: TapeOp) -> bool:
    """Return True if meshplan's selective recomputation saves the results of an op."""
    return row.is_kept


@dataclass(frozen=True, slots=True)
class TapeSection:
    """Work and memory of a section of a tape: of a block, or of the ops before or after the blocks.

    All numbers are for the number of samples of the tape.

    Args:
        name: Fqn of the block; outside the blocks, of the module with the largest parameter.
        is_block: True for a block, False for a section before or after the blocks.
        numels: Elements on this rank of each parameter that no earlier section reads.
        forward, backward: Work without recomputation.
        recompute: Work of recomputation in backward, by index into `grid.RECOMPUTE`.
        saved_bytes: Bytes saved from forward to backward, by index into `grid.RECOMPUTE`.
        transient_bytes: Highest number of bytes that forward or backward needs beyond
            `saved_bytes`, by index into `grid.RECOMPUTE`.
        boundary_bytes: Bytes of the results that ops of later sections read and that get a gradient
            there.
        context_bytes: Bytes of the keys and values of attention.
        exchanged_bytes: Bytes of queries, keys, values and the output of attention.
        scores_flops: FLOPs of attention.
        expert_numel: Elements of the experts' parameters.
        num_experts: Experts on this rank; 0 without experts.
    """

    name: str
    is_block: bool
    numels: tuple[int, ...]
    forward: WorkCounts
    backward: WorkCounts
    recompute: tuple[WorkCounts, WorkCounts, WorkCounts]
    saved_bytes: tuple[int, int, int]
    transient_bytes: tuple[int, int, int]
    boundary_bytes: int
    context_bytes: int
    exchanged_bytes: int
    scores_flops: float
    expert_numel: int
    num_experts: int


class Reading:
    """Reads a tape section by section: the ops before the blocks, each block, the ops after them.

    Args:
        tape: The tape of one microbatch.
        seq_len: Number of keys that the last token attends to.
        element_bytes: Bytes per element of the compute dtype.
        keeps: Returns True if selective recomputation saves the results of an op.
    """

    def __init__(
        self,
        tape: Tape,
        seq_len: int,
        element_bytes: int,
        *,
        keeps: Callable[[TapeOp], bool] = is_chosen,
    ) -> None:
        self._tape, self._seq_len, self._element_bytes = tape, seq_len, element_bytes
        rows = [row._replace(is_kept=keeps(row)) for row in tape.rows]
        first, last = tape.units[0][1], tape.units[-1][2]
        units = [("", 0, first), *tape.units, ("", last, len(rows))]
        self._units = [unit for unit in units if unit[1] < unit[2]]
        # `_memory` finds each section by a distinct name; those outside the blocks have none.
        marked = [(f"@{n}", start, end) for n, (_, start, end) in enumerate(self._units)]
        self._marked = replace(tape, rows=rows, units=marked, spans=[])
        self._readers = Counter(grad.value for row in rows for grad in row.grads)

    def places(self) -> list[TapeSection]:
        """Return the sections in order: before the blocks, each block, after them."""
        memory = [self._memory(recompute) for recompute in range(3)]
        seen: set[str] = set()
        out = []
        for number, (name, start, end) in enumerate(self._units):
            forward, backward, recompute = self._work_of(name, start, end)
            parameters = self._parameters(start, end)
            attentions = [row for row in self._tape.rows[start:end] if row.op == "attention"]
            stacks = [row for row in self._tape.rows[start:end] if row.op == "grouped_mm"]
            numels = tuple(b // self._element_bytes for f, b in parameters.items() if f not in seen)
            seen |= parameters.keys()
            out.append(
                TapeSection(
                    name=name or self._owner(start, end),
                    is_block=bool(name), numels=numels,
                    forward=forward, backward=backward, recompute=recompute,
                    saved_bytes=tuple(h[number][0] for h in memory),  # type: ignore[arg-type]
                    transient_bytes=tuple(h[number][1] for h in memory),  # type: ignore[arg-type]
                    boundary_bytes=self._boundary(start, end),
                    context_bytes=sum(self._sizes(row.reads[1:]) for row in attentions),
                    exchanged_bytes=sum(
                        self._sizes((*row.reads, row.makes[0])) for row in attentions
                    ),
                    scores_flops=sum(map(self._flops, attentions)),
                    expert_numel=sum(
                        nbytes // self._element_bytes
                        for row in stacks for _, nbytes in row.parameters
                    ),
                    num_experts=self._num_groups(stacks[0]) if stacks else 0,
                )
            )  # fmt: skip
        return out

    def _parameters(self, start: int, end: int) -> dict[str, int]:
        """Return the bytes on this rank of each parameter that these ops read, by fqn."""
        tape = self._tape
        return {
            fqn: tape.relayout_bytes.get((n, fqn), nbytes)
            for n in range(start, end)
            for fqn, nbytes in tape.rows[n].parameters
        }

    def _owner(self, start: int, end: int) -> str:
        """Return the module of the op with the largest parameter among these ops; "" if none."""
        rows = [row for row in self._tape.rows[start:end] if row.parameters]
        return max(rows, key=lambda row: row.parameters[0][1]).module if rows else ""

    # Work

    def _work_of(
        self, name: str, start: int, end: int
    ) -> tuple[WorkCounts, WorkCounts, tuple[WorkCounts, WorkCounts, WorkCounts]]:
        """Return the work of a section in forward, in backward, and of its recomputation.

        Args:
            name: Fqn of the block; "" outside of the blocks.
            start, end: Number of its first op, and of the op after its last one.
        """
        rows = range(start, end)
        recompute = self._recompute(start, end) if name else (WorkCounts(),) * 3
        forward, backward = map(self._forward, rows), map(self._backward, rows)
        return summed(forward), summed(backward), recompute

    def _size(self, value: int) -> int:
        """Return the bytes of a value of the tape."""
        return self._tape.nbytes[value]

    def _sizes(self, values: tuple[int, ...]) -> int:
        return sum(map(self._size, values))

    def _flops(self, row: TapeOp) -> float:
        """Return the FLOPs of an op in forward; 0 unless it is a product or attention."""
        if row.flops:
            return row.flops
        size = _FOUR if self._tape.in_float32 & {*row.makes} else self._element_bytes
        if row.op == "attention":
            both = self._size(row.reads[0]) + self._size(row.makes[0])
            return attention_flops(both // size, self._seq_len, is_causal=True)
        if row.op not in _PRODUCTS:
            return 0.0
        # mnk follows from the numbers of elements: (mk)(kn)(mn) is its square.
        if row.op == "bmm":
            sizes = (*map(self._size, row.reads[:2]), self._size(row.makes[0]))
            count = max(sizes) // size // self._seq_len**2
        else:
            sizes, count = (self._given(row), self._weight(row), self._made(row)), 1
            if row.op == "grouped_mm":  # Each input row is multiplied by the weight of one group.
                count = self._num_groups(row)
        return 2.0 * math.sqrt(math.prod(each // size for each in sizes) / count)

    def _num_groups(self, row: TapeOp) -> int:
        """Return the groups of a grouped product, which reads an int32 tensor of their ends."""
        return self._size(row.reads[1]) // _FOUR

    def _weight(self, row: TapeOp) -> int:
        """Return the bytes of a product's weight, a parameter or a value made from a parameter."""
        is_made = row.op == "mm" and len(row.reads) > 1
        return self._size(row.reads[1]) if is_made else row.parameters[0][1]

    def _given(self, row: TapeOp) -> int:
        """Return the bytes of a product's input, after its all-gather if there is one."""
        return max(
            self._size(row.reads[0]), row.workspace_backward_bytes if row.op == "column" else 0
        )

    def _made(self, row: TapeOp) -> int:
        """Return the bytes of a product's output, before its reduce-scatter if there is one."""
        return max(self._size(row.makes[0]), row.workspace_bytes if row.op == "row" else 0)

    def _is_view(self, row: TapeOp) -> bool:
        """Return True if all outputs of an op are views."""
        return all(self._tape.base[value] != value for value in row.makes)

    def _has_own_kernel(self, row: TapeOp) -> bool:
        """Return True for an op that a compiler does not fuse with others."""
        apart = {*_PRODUCTS, *_SENT, "attention", "all_to_all", "embedding"}
        return bool(row.flops) or row.is_sent or row.op in apart

    def _fused(self, row: TapeOp, direction: int) -> WorkCounts:
        """Count the collectives inside a product of nanotron's ("column" or "row").

        A column product gathers its input, and a row product in backward the output's gradient,
        while the part that this rank has is multiplied. In backward a column product gathers the
        input again, which it did not save, while it computes the input's gradient, and
        reduce-scatters this gradient while it computes the weight's. A row product reduce-scatters
        its output, which nothing hides.

        Source: huggingface/nanotron, parallel/tensor_parallel/functional.py, with asynchronous
        communication, which is its default for reduce-scatters.

        Args:
            row: The op.
            direction: 0 for forward, 1 for backward.
        """
        if row.op == "column" and row.workspace_backward_bytes:
            times, size, own = 1 + direction, self._given(row), self._size(row.reads[0])
        elif row.op == "row" and row.workspace_bytes:
            times, size, own = 1, self._made(row), self._size(row.makes[0])
        else:
            return WorkCounts()
        is_column = row.op == "column"
        # In backward a column product has all of its input's gradient to compute meanwhile.
        flops = self._flops(row) * (1.0 if is_column and direction else own / size)
        overlapped = ((float(size), flops),) * (times if is_column or direction else 0)
        return WorkCounts(gathers=times, gather_bytes=float(times * size), overlapped=overlapped)

    def _exchanged(self, row: TapeOp, direction: int) -> WorkCounts:
        """Count an op's all-to-alls along ep. Backward (direction 1) first scales gradients."""
        values = row.makes if direction else row.reads
        count, size = len(values), float(self._sizes(values))
        if direction:
            return WorkCounts(count, moved_bytes=2 * size, all_to_alls=count, all_to_all_bytes=size)
        return WorkCounts(all_to_alls=count, all_to_all_bytes=size)

    def _sent(self, row: TapeOp, direction: int) -> WorkCounts:
        """Count the collectives of an op in forward (direction 0) or backward (1)."""
        if row.op == "all_to_all":
            return self._exchanged(row, direction)
        kind = _SENT[row.op][direction]
        if row.op == "all_gather" and row.workspace_bytes and direction:
            kind = ""  # All ranks have the same gradient, so backward slices it and sends nothing.
        size = float(self._size(row.makes[0]))
        if kind == "gather":  # Count the whole tensor, which is the output or the input.
            size = max(size, float(self._size(row.reads[0])))
        if kind == "gather":
            return WorkCounts(gathers=1, gather_bytes=size)
        return WorkCounts(all_reduces=1, all_reduce_bytes=size) if kind else WorkCounts()

    def _is_made(self, number: int) -> bool:
        """Return True if an earlier op makes the gradients that this op's backward returns."""
        return any(row == number for row, _ in self._tape.grad_from)

    def _forward(self, number: int) -> WorkCounts:
        """Return the work of an op in forward, given its number."""
        row = self._tape.rows[number]
        if row.is_sent:
            return self._sent(row, 0)
        if row.flops:
            moved = self._sizes((*row.reads, *row.makes))
            return self._work(row, 1, moved, row.weight_bytes)
        if (row.makes and self._is_view(row)) or self._is_made(number):
            return WorkCounts()
        # An op without outputs writes into its first input.
        made = self._sizes(row.makes or row.reads[:1]) + 2 * row.workspace_bytes
        if row.op == "embedding":  # Only the rows of the table that are looked up are read.
            return WorkCounts(kernels=1, moved_bytes=self._sizes(row.reads) + 2 * made)
        weights = sum(nbytes for _, nbytes in row.parameters)
        if row.op in _PRODUCTS and row.parameters:
            work = self._work(row, 1, self._given(row) + self._made(row), weights)
            return work.plus(self._fused(row, 0))
        work = self._work(row, 1, self._sizes(row.reads) + made, weights)
        if row.op in _SUMMED:
            sent = WorkCounts(all_reduces=1, all_reduce_bytes=float(self._size(row.makes[0])))
            return work.plus(sent)
        return work

    def _work(
        self, row: TapeOp, kernels: int, moved: float, weights: float, times: float = 1.0
    ) -> WorkCounts:
        """Return the work of an op without collectives.

        Args:
            row: The op.
            kernels: Number of kernels.
            moved: Bytes of activations that are read and written.
            weights: Bytes of parameters that are read, and of their gradients that are written.
            times: Factor on the FLOPs of forward.
        """
        flops = times * self._flops(row)
        if flops:
            attention = flops if row.op in _ATTENTION else 0.0
            return WorkCounts(kernels, flops, attention, moved, 0.0, weights)
        return WorkCounts(kernels, 0.0, 0.0, 0.0, moved, weights)

    def _backward(self, number: int) -> WorkCounts:
        """Return the work of an op in backward, given its number."""
        row = self._tape.rows[number]
        if not row.grads and not row.parameters:
            return WorkCounts()
        added = self._added(row)
        if self._is_made(number):  # Backward only multiplies each saved gradient by a number.
            new, weights = self._size(row.keeps[0]), self._size(row.keeps[1])
            return WorkCounts(2, moved_bytes=2 * new, weight_bytes=2 * weights).plus(added)
        if row.is_sent or row.op in _SENT:
            return self._sent(row, 1).plus(added)
        given, new = self._size(row.makes[-1]), sum(grad.nbytes for grad in row.grads)
        weights = sum(nbytes for _, nbytes in row.parameters)
        if row.op == "embedding":  # Backward fills zeros and adds the tokens' gradients.
            return WorkCounts(2, moved_bytes=3 * given, weight_bytes=weights).plus(added)
        if row.op in _PRODUCTS:
            kernels, whole = 2 + (len(row.parameters) > 1), self._given(row)
            moved = kernels * self._made(row) + 2 * whole
            if not row.parameters:
                moved = 2 * given + self._sizes(row.keeps) + new
            work = self._work(row, kernels, moved, 2 * weights, 2.0)
            return work.plus(self._fused(row, 1)).plus(added)
        if not new and not row.parameters:
            return added
        given = self._sizes(row.makes) if row.op == "split" else self._size(row.makes[0])
        moved = given + self._sizes(row.keeps) + new + 2 * row.workspace_backward_bytes
        kernels = 1 + bool(row.parameters)
        return self._work(row, kernels, moved, 2 * weights, ATTENTION_BACKWARD).plus(added)

    def _added(self, row: TapeOp) -> WorkCounts:
        """Count the sums of gradients of values that several ops read.

        They count at the first op in forward order that reads the value.
        """
        out = WorkCounts()
        for grad in row.grads:
            times = self._readers.pop(grad.value, 0) - 1
            if times > 0:
                size = max(grad.nbytes, self._size(grad.value))
                out = out.plus(WorkCounts(kernels=times, moved_bytes=3.0 * times * size))
        return out

    def _recompute(self, start: int, end: int) -> tuple[WorkCounts, WorkCounts, WorkCounts]:
        """Return the work of recomputing a section, by index into `grid.RECOMPUTE`."""
        runs = self._recomputed(start, end)
        chosen = [n for n in runs if not self._marked.rows[n].is_kept]
        return (
            WorkCounts(),
            summed(self._forward(n) for n in chosen),
            summed(self._forward(n) for n in runs),
        )

    def _recomputed(self, start: int, end: int) -> list[int]:
        """Return the ops that recomputation of a section runs, by number.

        It stops at the last tensor that is saved for backward.
        """
        rows = self._marked.rows
        last = max((n for n in range(start, end) if rows[n].keeps), default=start)
        runs = [n for n in range(start, last) if rows[n].makes]
        if set(rows[last].keeps) & set(rows[last].makes):
            runs.append(last)
        return runs

    def _boundary(self, start: int, end: int) -> int:
        """Return the bytes of a section's results that get a gradient from later sections."""
        tape = self._tape
        made = {v for row in tape.rows[start:end] for v in row.makes}
        read = {g.value for row in tape.rows[end:] for g in row.grads}
        return sum(tape.nbytes[value] for value in made & read)

    # Memory

    def _memory(self, recompute: int) -> list[tuple[int, int]]:
        """Return (saved, transient) bytes of each section, from playing the tape.

        `recompute` is the kind of recomputation, an index into `grid.RECOMPUTE`.
        """
        spans = [
            RecomputeSpan(start, end, recompute=True, keeps_chosen=recompute == 1)
            for name, start, end in self._units
            if name and recompute
        ]
        work = play(replace(self._marked, spans=spans), sums_in_place=True)
        made = enumerate(work.log.storages)
        # Gradients of parameters are excluded: they are neither saved nor transient activations.
        states = {*work.gradients.values(), *(n for n, s in made if s.term == Term.GRADIENTS)}
        live, lives, born = 0, [0], dict[int, int]()
        at = {(point.unit, point.kind): point.event for point in work.hook_points}
        names = [f"@{n}" for n in range(len(self._units))]
        end = at[names[-1], HookKind.BEFORE_BACKWARD]
        kept: dict[int, int] = {}
        for number, (delta, storage, _) in enumerate(work.log.changes):
            is_state = storage in states
            live += 0 if is_state else delta
            lives.append(live)
            # A section has saved those of its new storages that are left when backward begins.
            if number < end and not is_state:
                born.setdefault(storage, number)
                kept[storage] = kept.get(storage, 0) + delta
        begins = [at[name, HookKind.BEFORE_FORWARD] for name in names]
        # Count each storage for the section in which it was made.
        saved = [0] * len(names)
        for storage, number in born.items():
            if number >= begins[0]:
                saved[bisect_right(begins, number) - 1] += kept[storage]
        out, before = [], lives[begins[0]]
        for number, name in enumerate(names):
            before += saved[number]
            ahead = lives[begins[number]] + saved[number]
            passes = (HookKind.BEFORE_FORWARD, HookKind.AFTER_FORWARD, ahead), (
                HookKind.BEFORE_BACKWARD, HookKind.AFTER_BACKWARD, before
            )  # fmt: skip
            more = [max(lives[at[name, a] : at[name, b] + 1]) - beside for a, b, beside in passes]
            out.append((saved[number], max(0, *more)))
        return out
