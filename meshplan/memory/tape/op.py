"""Operations as rows of data: what each reads, makes and keeps, and the tape that they stand on.

What they do to memory, `memory.tape.tape` plays; which rows a model is made of, `memory.tape.ops`
and `memory.decoder.blocks` know.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from meshplan.memory.log.events import Term


class Grad(NamedTuple):
    """The gradient of one input, as the operation's backward makes it.

    Attributes:
        value: The input.
        nbytes: Of the new tensor; 0 where it lies in the memory of the output's gradient.
    """

    value: int
    nbytes: int


class TapeOp(NamedTuple):
    """One operation.

    Attributes:
        op: Its name.
        module: The fqn of the module that runs it.
        reads: Values it reads.
        makes: Values it makes.
        keeps: Values that live until its backward has run.
        grads: Of those inputs that need one.
        parameters: The fqn and the gradient's bytes of each parameter it reads.
        takes: Bytes it takes while it runs forward.
        takes_back: Bytes its backward takes while it runs.
        is_sent: Whether a collective writes what it makes.
        is_kept: Whether recomputation of chosen operations keeps what this one makes.
        flops: Of a product whose weight is not among its parameters, since its gradient is made
            elsewhere.
        weight_bytes: Of that weight, and of what else is read and written whatever the batch.
    """

    op: str
    module: str
    reads: tuple[int, ...]
    makes: tuple[int, ...] = ()
    keeps: tuple[int, ...] = ()
    grads: tuple[Grad, ...] = ()
    parameters: tuple[tuple[str, int], ...] = ()
    takes: int = 0
    takes_back: int = 0
    is_sent: bool = False
    is_kept: bool = False
    flops: float = 0.0
    weight_bytes: int = 0


@dataclass(slots=True)
class RecomputeSpan:
    """Neighbouring rows that are recomputed together, or not at all.

    Attributes:
        end: The row after the last one.
        recompute: Whether backward runs them forward once more.
        keeps_chosen: Whether it is spared the rows that are `is_kept`.
        given: What it is called with beside what its rows read.
        on_host: Whether what it keeps for backward waits on the host.
        enters: The value that it is called with first, of which recomputation keeps a copy there.
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
    """Rows in the order of forward, and the values that they handle.

    Attributes:
        nbytes: Of every value, by its number.
        base: The value in whose memory each one lies; itself, unless it is a view.
        before: Values that are there before forward, with their term.
        last_use: The row after which forward's frames let go of a value; as many as there are rows
            where the training loop lets go of it, before backward.
        units: (fqn, first row, row after the last) of every unit, the root apart.
        loss_start: The first row of the loss; its last row makes the loss itself.
        logits: What the model gives and the loss is computed from.
        outlive: Of the values that the training loop holds, those it holds through backward.
        laid: By a row and a parameter whose gradient it does not lay out as the parameter is, the
            bytes that it has once it is.
        lays_itself: Parameters that no unit reduces: their gradients are laid when they are there.
        sums_apart: Values of which every sum of gradients is a new tensor.
        handed: By a row and what it reads, a value or the fqn of a parameter: the value that it
            keeps and that becomes the gradient.
        in_float32: What products make that are computed in float32, where others are narrower.
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
    laid: dict[tuple[int, str], int] = field(default_factory=dict)
    lays_itself: set[str] = field(default_factory=set)
    sums_apart: set[int] = field(default_factory=set)
    handed: dict[tuple[int, int | str], int] = field(default_factory=dict)
    in_float32: set[int] = field(default_factory=set)

    def value(self, nbytes: int, of: int | None = None) -> int:
        """A new value; `of` names the one that it is a view of."""
        number = len(self.nbytes)
        self.nbytes.append(nbytes)
        self.base.append(number if of is None else self.base[of])
        self.last_use.append(len(self.rows))
        return number

    def add(self, row: TapeOp) -> None:
        """Run an operation next."""
        self.rows.append(row)
        now = len(self.rows) - 1
        base, last_use = self.base, self.last_use
        for value in (*row.reads, *row.makes):
            value = base[value]
            if last_use[value] < now:
                last_use[value] = now

    def lay(self, fqn: str, nbytes: int) -> None:
        """The last row lays out the gradient of this parameter otherwise than the parameter."""
        self.laid[len(self.rows) - 1, fqn] = nbytes

    def touch(self, value: int) -> None:
        """A frame holds the value until here."""
        base = self.base[value]
        if self.last_use[base] < len(self.rows) - 1:
            self.last_use[base] = len(self.rows) - 1

    def hold(self, value: int, *, outlives: bool = False) -> None:
        """The training loop holds the value until the last row has run, or backward has."""
        self.last_use[self.base[value]] = len(self.rows)
        if outlives:
            self.outlive.add(self.base[value])

    def last_kept(self, span: RecomputeSpan) -> int:
        """The last row of a span of which something is kept."""
        return max(n for n in range(span.start, span.end) if self.rows[n].keeps)

    def dying(self) -> list[list[int]]:
        """By row, what forward's frames let go of after it."""
        out: list[list[int]] = [[] for _ in range(len(self.rows) + 1)]
        for value, base in enumerate(self.base):
            if value == base and value not in self.before:
                out[self.last_use[value]].append(value)
        return out

    def parts(self) -> Iterable[RecomputeSpan]:
        """The spans, and what lies between them."""
        done = 0
        for span in sorted(self.spans, key=lambda s: s.start):
            if span.start > done:
                yield RecomputeSpan(done, span.start)
            yield span
            done = span.end
        if done < len(self.rows):
            yield RecomputeSpan(done, len(self.rows))

    def called_with(self, span: RecomputeSpan) -> dict[int, None]:
        """The values, by their base, that a span begins with."""
        made: set[int] = set()
        out: dict[int, None] = {}
        for row in self.rows[span.start : span.end]:
            out |= {self.base[value]: None for value in row.reads if self.base[value] not in made}
            made |= {self.base[value] for value in row.makes}
        return out | {self.base[value]: None for value in span.given}
