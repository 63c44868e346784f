"""Autograd's bookkeeping in plain Python: a list of operations played forward and in reverse.

An operation is a row of data: what it reads and makes, what it keeps for backward, what it takes
in passing. Playing rows gives the storages' births and deaths as eager torch has them: outputs are
born, inputs end at their last use unless something keeps them, backward runs the rows in reverse,
gradients that meet are summed, what was kept ends once it has been used. Which rows a model is made
of, `memory.rows` and `memory.blocks` know.

Source: torch 2.13, csrc/autograd/engine.cpp (`evaluate_function`: gradients of inputs are there
before that of the output goes, then what was kept goes) and input_buffer.cpp (sums);
utils/checkpoint.py (recomputation stops at the last tensor that something keeps).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from meshplan.memory.log import Event, EventLog, Storage, Term
from meshplan.memory.terms import settle
from meshplan.memory.work import Mark, Moment, Work

_FORWARD, _LOSS, _BACKWARD = 1, 2, 3
_PHASES: Final = ("before", "forward", "loss", "backward")


class Grad(NamedTuple):
    """The gradient of one input, as the operation's backward makes it.

    Attributes:
        value: The input.
        nbytes: Of the new tensor; 0 where it lies in the memory of the output's gradient.
    """

    value: int
    nbytes: int


class Row(NamedTuple):
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


@dataclass(slots=True)
class Span:
    """Neighbouring rows that are recomputed together, or not at all.

    Attributes:
        end: The row after the last one.
        recompute: Whether backward runs them forward once more.
        keeps_chosen: Whether it is spared the rows that are `is_kept`.
    """

    start: int
    end: int
    recompute: bool = False
    keeps_chosen: bool = False


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
        outlive: Of the values that the training loop holds, those it holds through backward.
    """

    rows: list[Row] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    base: list[int] = field(default_factory=list)
    before: dict[int, Term] = field(default_factory=dict)
    last_use: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    units: list[tuple[str, int, int]] = field(default_factory=list)
    loss_start: int = -1
    outlive: set[int] = field(default_factory=set)

    def value(self, nbytes: int, of: int | None = None) -> int:
        """A new value; `of` names the one that it is a view of."""
        number = len(self.nbytes)
        self.nbytes.append(nbytes)
        self.base.append(number if of is None else self.base[of])
        self.last_use.append(len(self.rows))
        return number

    def add(self, row: Row) -> None:
        """Run an operation next."""
        self.rows.append(row)
        for value in row.reads:
            self.touch(value)
        for value in row.makes:
            self.touch(value)

    def touch(self, value: int) -> None:
        """A frame holds the value until here."""
        base = self.base[value]
        self.last_use[base] = max(self.last_use[base], len(self.rows) - 1)

    def hold(self, value: int, *, outlives: bool = False) -> None:
        """The training loop holds the value until the last row has run, or backward has."""
        self.last_use[self.base[value]] = len(self.rows)
        if outlives:
            self.outlive.add(self.base[value])


def play(tape: Tape, *, sums_in_place: bool = False) -> Work:
    """One microbatch, from what is there before to the end of backward.

    Args:
        sums_in_place: Whether gradients that meet are added up in the memory of the first, as torch
            does when nothing watches it; under a dispatch mode each sum is a new tensor.
    """
    return Player(tape, sums_in_place).work()


class Player:
    """Plays a tape, and writes what happens."""

    def __init__(self, tape: Tape, sums_in_place: bool) -> None:
        self._tape, self._sums_in_place = tape, sums_in_place
        self._storages: list[Storage] = []
        self._events: list[Event] = []
        self._marks: list[Mark] = []
        self._gradients: dict[str, int] = {}
        self._sent: set[int] = set()
        self._phase = 0
        self._is_loss = False
        self._sizes: list[int] = []
        self._uses: list[int] = []
        self._env: dict[int, int] = {}
        """By base value, its storage, as forward's frames see it."""
        self._kept: dict[int, list[int]] = {}
        """By row, the storages that it keeps."""
        self._inputs: dict[int, dict[int, int]] = {}
        """By the first row of a recomputed span, what it begins with."""
        self._cached: dict[int, int] = {}
        """By value, its storage that recomputation need not make again."""
        self._grads: dict[int, int] = {}
        """By value, the storage of its gradient."""
        self._dying: list[list[int]] = [[] for _ in range(len(tape.rows) + 1)]
        for value, base in enumerate(tape.base):
            if value == base and value not in tape.before:
                self._dying[tape.last_use[value]].append(value)
        self._starts = {start: unit for unit, start, _ in tape.units}
        self._ends = {end - 1: unit for unit, _, end in tape.units}

    def work(self) -> Work:
        tape = self._tape
        for value, term in tape.before.items():
            self._env[value] = self._born(tape.nbytes[value], Row("", "", ()), term)
        num_before = len(self._storages)
        self._phase = _FORWARD
        self._mark(Moment.BEFORE_FORWARD, "")
        spans = list(_spans(tape))
        for span in spans:
            self._forward(span)
        self._begin_backward()
        for span in reversed(spans):
            self._backward(span)
        for value in tape.outlive:
            self._drop(self._env.pop(value))
        self._mark(Moment.END_OF_BACKWARD, "")
        assert not self._grads, "a gradient reached no operation"
        terms = settle(
            self._storages, self._events, _PHASES, sent=self._sent, num_before=num_before
        )
        log = EventLog(terms, tuple(self._events), _PHASES)
        loss = self._env[tape.rows[-1].makes[0]]
        return Work(log, tuple(self._marks), self._gradients, losses=(loss,))

    # Memory

    def _born(self, nbytes: int, row: Row, term: Term = Term.TEMPORARIES) -> int:
        """A new storage with one use."""
        number = len(self._storages)
        if self._is_loss and term == Term.TEMPORARIES:
            term = Term.LOSS
        self._storages.append(Storage(term, row.op, row.module, _PHASES[self._phase]))
        self._sizes.append(nbytes)
        self._uses.append(1)
        if nbytes:
            self._events.append(Event(nbytes, number, self._phase))
        if row.is_sent:
            self._sent.add(number)
        return number

    def _hold(self, storage: int) -> None:
        self._uses[storage] += 1

    def _drop(self, storage: int) -> None:
        self._uses[storage] -= 1
        if not self._uses[storage] and self._sizes[storage]:
            self._events.append(Event(-self._sizes[storage], storage, self._phase))

    def _mark(self, moment: Moment, unit: str) -> None:
        self._marks.append(Mark(len(self._events), moment, unit))

    # Forward

    def _forward(self, span: Span) -> None:
        tape = self._tape
        if span.recompute:
            inputs = _inputs(tape, span)
            self._inputs[span.start] = held = {value: self._env[value] for value in inputs}
            for storage in held.values():
                self._hold(storage)
        for number in range(span.start, span.end):
            if number == tape.loss_start:
                self._mark(Moment.AFTER_FORWARD, "")
                self._phase, self._is_loss = _LOSS, True
            if number in self._starts:
                self._mark(Moment.BEFORE_FORWARD, self._starts[number])
            row = tape.rows[number]
            self._run(row, self._env)
            if span.keeps_chosen:
                self._cache(row)
            elif not span.recompute:
                self._keep(number, self._env)
            for value in self._dying[number]:
                if value != tape.rows[-1].makes[0]:  # The loop keeps the loss.
                    self._drop(self._env.pop(value))
            if number in self._ends:
                self._mark(Moment.AFTER_FORWARD, self._ends[number])

    def _run(self, row: Row, env: dict[int, int], cached: dict[int, int] | None = None) -> None:
        """Make the row's outputs, or take them from what is cached."""
        took = self._born(row.takes, row) if row.takes else None
        for value in row.makes:
            if self._tape.base[value] == value:
                known = cached.pop(value, None) if cached else None
                env[value] = self._born(self._tape.nbytes[value], row) if known is None else known
        if took is not None:
            self._drop(took)

    def _keep(self, number: int, env: Mapping[int, int]) -> None:
        base = self._tape.base
        kept = [env[base[value]] for value in self._tape.rows[number].keeps]
        for storage in kept:
            self._hold(storage)
        self._kept[number] = kept

    def _cache(self, row: Row) -> None:
        if row.is_kept:
            for value in row.makes:
                storage = self._env[self._tape.base[value]]
                self._hold(storage)
                self._cached[value] = storage

    # Backward

    def _begin_backward(self) -> None:
        """The loss is a scalar whose gradient is one of the same size."""
        loss = self._tape.rows[-1].makes[0]
        self._phase = _BACKWARD
        for value in self._dying[len(self._tape.rows)]:
            if value not in self._tape.outlive:
                self._drop(self._env.pop(value))
        self._grads[loss] = self._born(self._tape.nbytes[loss], self._tape.rows[-1])

    def _backward(self, span: Span) -> None:
        if span.recompute:
            self._recompute(span)
        for number in reversed(range(span.start, span.end)):
            self._is_loss = 0 <= self._tape.loss_start <= number
            if number == self._tape.loss_start - 1:
                self._mark(Moment.BEFORE_BACKWARD, "")
            if number in self._ends:
                self._mark(Moment.BEFORE_BACKWARD, self._ends[number])
            self._back(number)
            if number in self._starts:
                self._mark(Moment.AFTER_BACKWARD, self._starts[number])
        for storage in self._inputs.pop(span.start, {}).values():
            self._drop(storage)

    def _recompute(self, span: Span) -> None:
        """Run forward again up to the last tensor that something keeps."""
        rows = self._tape.rows
        self._is_loss = False
        last = max(n for n in range(span.start, span.end) if rows[n].keeps)
        env = dict(self._inputs[span.start])
        for storage in env.values():
            self._hold(storage)
        for number in range(span.start, last + 1):
            row = rows[number]
            if number < last or set(row.keeps) & set(row.makes):
                self._run(row, env, self._cached)
            self._keep(number, env)
            for value in self._dying[number]:
                if value in env:
                    self._drop(env.pop(value))
        for storage in env.values():
            self._drop(storage)
        for number in range(last, span.end):
            self._kept.setdefault(number, [])
            for value in rows[number].makes:
                if value in self._cached:
                    self._drop(self._cached.pop(value))

    def _back(self, number: int) -> None:
        """The backward of one row: gradients of its inputs, then the end of what it used."""
        row = self._tape.rows[number]
        given = [self._grads.pop(value) for value in row.makes if value in self._grads]
        made: list[tuple[int, int]] = []
        if given:
            took = self._born(row.takes_back, row) if row.takes_back else None
            for fqn, nbytes in row.parameters:
                self._gradient(fqn, nbytes, row)
            for value, nbytes in row.grads:
                if nbytes:
                    made.append((value, self._born(nbytes, row)))
                else:
                    self._hold(given[0])
                    made.append((value, given[0]))
            if took is not None:
                self._drop(took)
        for storage in given:
            self._drop(storage)
        for storage in self._kept.pop(number):
            self._drop(storage)
        for value, storage in made:
            self._accumulate(value, storage, row)

    def _accumulate(self, value: int, storage: int, row: Row) -> None:
        known = self._grads.get(value)
        if known is None:
            self._grads[value] = storage
            return
        if self._sums_in_place and self._uses[known] == 1:
            self._drop(storage)
            return
        self._grads[value] = self._born(max(self._sizes[known], self._sizes[storage]), row)
        self._drop(known)
        self._drop(storage)

    def _gradient(self, fqn: str, nbytes: int, row: Row) -> None:
        """A parameter that two rows read has the sum."""
        number = self._born(nbytes, row, Term.GRADIENTS)
        known = self._gradients.get(fqn)
        if known is None:
            self._gradients[fqn] = number
            return
        if not self._sums_in_place:
            self._gradients[fqn] = self._born(nbytes, row, Term.GRADIENTS)
            self._drop(known)
        self._drop(number)


def _spans(tape: Tape) -> Iterable[Span]:
    """The tape's spans, and what lies between them."""
    done = 0
    for span in sorted(tape.spans, key=lambda s: s.start):
        if span.start > done:
            yield Span(done, span.start)
        yield span
        done = span.end
    if done < len(tape.rows):
        yield Span(done, len(tape.rows))


def _inputs(tape: Tape, span: Span) -> dict[int, None]:
    """The values, by their base, that a span begins with."""
    made: set[int] = set()
    out: dict[int, None] = {}
    for row in tape.rows[span.start : span.end]:
        out |= {tape.base[value]: None for value in row.reads if tape.base[value] not in made}
        made |= {tape.base[value] for value in row.makes}
    return out
