"""Operations as data: an op states what it reads, makes and saves; a tape is a list of ops.

`memory.tape.tape` plays the ops to find the storages that they allocate and free.
`memory.tape.ops` and `memory.decoder.blocks` write the ops of a model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from meshplan.memory.log.events import Term


class Grad(NamedTuple):
    """The gradient of one input, as the backward of the op makes it.

    Attributes:
        value: Number of the input value.
        nbytes: Bytes of the new tensor; 0 if the gradient shares the memory of the output's
            gradient.
    """

    value: int
    nbytes: int


class TapeOp(NamedTuple):
    """One operation of the forward.

    Attributes:
        op: Name of the operation.
        module: Fqn of the module that runs the op.
        reads: Values that the op reads, by number.
        makes: Values that the op makes.
        keeps: Values saved for the op's backward.
        grads: Gradients of those inputs that require one.
        parameters: (fqn, bytes of the gradient) of each parameter that the op reads.
        workspace_bytes: Bytes of workspace while the op runs forward.
        workspace_backward_bytes: Bytes of workspace while the op's backward runs.
        is_sent: If True, a collective writes the op's outputs.
        is_kept: If True, selective recomputation saves the op's outputs.
        flops: FLOPs of a matrix product whose weight is not in `parameters`, because another op
            makes the weight's gradient.
        weight_bytes: Bytes of that weight, and of other data that the op reads or writes regardless
            of the batch.
    """

    op: str
    module: str
    reads: tuple[int, ...]
    makes: tuple[int, ...] = ()
    keeps: tuple[int, ...] = ()
    grads: tuple[Grad, ...] = ()
    parameters: tuple[tuple[str, int], ...] = ()
    workspace_bytes: int = 0
    workspace_backward_bytes: int = 0
    is_sent: bool = False
    is_kept: bool = False
    flops: float = 0.0
    weight_bytes: int = 0


@dataclass(slots=True)
class RecomputeSpan:
    """Consecutive ops that are recomputed or offloaded together, such as those of a block.

    Attributes:
        start: Number of the first op.
        end: Number of the op after the last one.
        recompute: If True, backward runs the ops' forward once more.
        keeps_chosen: If True, the outputs of ops with `is_kept` are saved rather than recomputed.
        given: Values that the span is called with in addition to those that its ops read.
        on_host: If True, the values that the span saves for backward are kept in host memory; with
            `recompute`, this applies to `enters` only.
        enters: First value that the span is called with; -1 for none.
    """

    start: int
    end: int
    recompute: bool = False
    keeps_chosen: bool = False
    given: tuple[int, ...] = ()
    on_host: bool = False
    enters: int = -1


@dataclass(slots=True)
class Tape:
    """All ops in forward order, and the values they read and make.

    Attributes:
        rows: All ops; the number of an op is its index in this list.
        nbytes: Bytes of every value, by the value's number.
        base: For every value, the value whose memory it shares: itself, unless it is a view.
        before: Term of each value that exists before forward.
        last_use: For every value, the op after which forward drops its last reference; `len(rows)`
            if the training loop drops it, before backward.
        spans: Recomputed or offloaded spans.
        units: (fqn, first op, op after the last one) of every FSDP unit except the root.
        loss_start: First op of the loss. The last op of the tape makes the loss itself.
        logits: Value that the model returns and the loss is computed from.
        outlive: Values that the training loop references until backward is done.
        relayout_bytes: For each (op, fqn of a parameter) where the op makes the parameter's
            gradient in another layout than the parameter's: bytes of the gradient once it is
            redistributed.
        relaid_at_once: Fqns of parameters that no unit reduces: their gradients are redistributed
            as soon as they exist.
        sums_apart: Values whose gradients are never added up in place: each sum is a new tensor.
        grad_from: For each (op, value that it reads or fqn of a parameter) whose gradient forward
            has computed: the value, saved by the op, that is this gradient.
        in_float32: Values made by matrix products in float32, if the compute dtype is narrower.
    """

    rows: list[TapeOp] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    base: list[int] = field(default_factory=list)
    before: dict[int, Term] = field(default_factory=dict)
    last_use: list[int] = field(default_factory=list)
    spans: list[RecomputeSpan] = field(default_factory=list)
    units: list[tuple[str, int, int]] = field(default_factory=list)
    loss_start: int = -1
    logits: int = -1
    outlive: set[int] = field(default_factory=set)
    relayout_bytes: dict[tuple[int, str], int] = field(default_factory=dict)
    relaid_at_once: set[str] = field(default_factory=set)
    sums_apart: set[int] = field(default_factory=set)
    grad_from: dict[tuple[int, int | str], int] = field(default_factory=dict)
    in_float32: set[int] = field(default_factory=set)

    def value(self, nbytes: int, of: int | None = None) -> int:
        """Add a value of `nbytes` and return its number; with `of`, add a view of that value."""
        number = len(self.nbytes)
        self.nbytes.append(nbytes)
        self.base.append(number if of is None else self.base[of])
        self.last_use.append(len(self.rows))
        return number

    def add(self, row: TapeOp) -> None:
        """Append an op, and extend the lifetimes of the values that it reads and makes."""
        self.rows.append(row)
        now = len(self.rows) - 1
        base, last_use = self.base, self.last_use
        for value in (*row.reads, *row.makes):
            value = base[value]
            if last_use[value] < now:
                last_use[value] = now

    def lay(self, fqn: str, nbytes: int) -> None:
        """Note that the last op makes a gradient in another layout than its parameter's.

        Args:
            fqn: Fqn of the parameter.
            nbytes: Bytes of the gradient once it has the parameter's layout.
        """
        self.relayout_bytes[len(self.rows) - 1, fqn] = nbytes

    def touch(self, value: int) -> None:
        """Extend a value's lifetime to the last op so far: a Python frame still references it."""
        base = self.base[value]
        if self.last_use[base] < len(self.rows) - 1:
            self.last_use[base] = len(self.rows) - 1

    def hold(self, value: int, *, outlives: bool = False) -> None:
        """Keep a value, which the training loop references, until the last op of forward has run.

        With `outlives`, keep it until backward is done.
        """
        self.last_use[self.base[value]] = len(self.rows)
        if outlives:
            self.outlive.add(self.base[value])

    def last_kept(self, span: RecomputeSpan) -> int:
        """Return the number of the last op in a span that saves a value for backward."""
        return max(n for n in range(span.start, span.end) if self.rows[n].keeps)

    def dying(self) -> list[list[int]]:
        """Return, for each op, the base values whose last reference in forward is dropped after it.

        The list has one more entry: values that the training loop drops before backward.
        """
        out: list[list[int]] = [[] for _ in range(len(self.rows) + 1)]
        for value, base in enumerate(self.base):
            if value == base and value not in self.before:
                out[self.last_use[value]].append(value)
        return out

    def parts(self) -> Iterable[RecomputeSpan]:
        """Yield the spans in order, and as further spans the ranges of ops between them."""
        done = 0
        for span in sorted(self.spans, key=lambda s: s.start):
            if span.start > done:
                yield RecomputeSpan(done, span.start)
            yield span
            done = span.end
        if done < len(self.rows):
            yield RecomputeSpan(done, len(self.rows))

    def called_with(self, span: RecomputeSpan) -> dict[int, None]:
        """Return the base values that a span reads but does not make, and those in its `given`.

        They are the keys of a dict, in order; the dict's values are None.
        """
        made: set[int] = set()
        out: dict[int, None] = {}
        for row in self.rows[span.start : span.end]:
            out |= {self.base[value]: None for value in row.reads if self.base[value] not in made}
            made |= {self.base[value] for value in row.makes}
        return out | {self.base[value]: None for value in span.given}
