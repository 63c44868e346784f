"""Cut a model's tape into stages: each has the ops of its own modules and those between modules.

A stage runs the model's own forward, except for the modules that other stages run
(`runtime.apply.pipeline.stage`). In place of such a module's output, the stage has a tensor that it
received from the previous stage, or a placeholder without memory, on which no module of this stage
depends. A stage's forward ends with its last module.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from meshplan.assign.base.types import Stages
from meshplan.errors import PlanError, Problem
from meshplan.memory.log.events import Term
from meshplan.memory.tape.op import Grad, RecomputeSpan, Tape, TapeOp
from meshplan.model.graph import around

_ABSENT = -1
"""Base of a value that the stage does not have: a placeholder, or a view of one."""


@dataclass(frozen=True, slots=True)
class StageTape:
    """The tape of one microbatch in one stage.

    Args:
        tape: Ops of the stage. The last op reads the sent values; in the last stage it makes the
            loss.
        received: Values that the previous stage made; they exist before the stage's ops.
        sent: Values that the next stage receives.
    """

    tape: Tape
    received: tuple[int, ...]
    sent: tuple[int, ...]


class TapeCutter:
    """Cuts a tape into stages: finds the stage of each op and value, and what crosses boundaries.

    Args:
        tape: Tape of the whole model, loss included.
        stages: Stages of the pipeline.
        widening: Ratio of the itemsizes of the stored and the compute dtype. Placeholders for the
            outputs of other stages' modules have the stored dtype. So have the outputs of free
            modules (those that every stage runs), and each unit casts them to the compute dtype
            when it is called. In a stage that receives the input of the first block, free modules
            follow the dtype of that input instead.

    Raises:
        PlanError: A value is used by a later stage than the next one.
    """

    def __init__(self, tape: Tape, stages: Stages, *, widening: int = 1) -> None:
        self.tape, self.stages, self.last = tape, stages, stages.num - 1
        self._widening = widening
        units = dict(stages.units)
        known: dict[str, int | None] = {}
        self.owner: list[int | None] = []
        """The stage that runs each op; None for ops that every stage runs."""
        for row in tape.rows:
            if row.module not in known:
                known[row.module] = next((units[m] for m in around(row.module) if m in units), None)
            self.owner.append(known[row.module])
        self.maker: dict[int, int] = {}
        """The stage that makes each value."""
        self.until: dict[int, int] = {}
        """The last stage that uses each value."""
        self._follow()
        self._received: list[list[int]] = [[] for _ in range(stages.num)]
        self._sent: list[list[int]] = [[] for _ in range(stages.num)]
        """Values received from and sent to the neighbours, for each stage."""
        for value, stage in self.maker.items():
            until = self.until.get(value, stage)
            if until == stage + 1:
                self._sent[stage].append(value)
                self._received[until].append(value)
            elif until > stage:
                what = "the estimate from a config has no rules for a tensor that skips a stage"
                fix = "write model: {entry: PKG.MOD:FN} in the plan, or split the stages elsewhere"
                raise PlanError(Problem(what, stages.reason.origin, fix))
        self._rows_of: list[list[int]] = [[] for _ in range(stages.num)]
        self._everywhere: list[int] = []
        """Ops that each stage runs, and ops that all stages run."""
        for number, owner in enumerate(self.owner):
            (self._everywhere if owner is None else self._rows_of[owner]).append(number)
        self._readers: dict[int, list[int]] = {}
        """Ops that read each value that exists before forward."""
        for number, row in enumerate(tape.rows):
            for value in row.reads:
                if value in tape.before:
                    self._readers.setdefault(value, []).append(number)
        self._spans_of: dict[int | None, list[RecomputeSpan]] = {}
        self._units_of: dict[int | None, list[tuple[str, int, int]]] = {}
        self._relayout_of: dict[int | None, list[tuple[int, str, int]]] = {}
        for span in tape.spans:
            self._spans_of.setdefault(self.owner[span.start], []).append(span)
        for unit in tape.units:
            self._units_of.setdefault(self.owner[unit[1]], []).append(unit)
        for (number, fqn), size in tape.relayout_bytes.items():
            self._relayout_of.setdefault(self.owner[number], []).append((number, fqn, size))
        self._free: dict[str, bool] = {}
        """Cache of `_is_free`, by module."""
        first = min((start for _, start, _ in tape.units), default=0)
        self._begins = {tape.base[value] for row in tape.rows[:first] for value in row.makes}
        """Base values that are made before the first block."""

    def _follow(self) -> None:
        """Find the stage that makes each value, and the last stage that uses it.

        A stage uses a value directly, or through ops between modules, which every stage runs.
        """
        tape = self.tape
        behind: dict[int, set[int]] = {}
        until = self.until
        for number, row in enumerate(tape.rows):
            owner = self.owner[number]
            reads = [tape.base[value] for value in row.reads]
            roots = {root for value in reads for root in behind.get(value, ())}
            if owner is not None or 0 <= tape.loss_start <= number:
                stage = self.last if owner is None else owner
                for root in roots:
                    if until.get(root, 0) <= stage:
                        until[root] = stage
            for value in row.makes:
                base = tape.base[value]
                if base in behind:
                    continue  # A view.
                behind[base] = roots if owner is None else {base}
                if owner is not None:
                    self.maker[base] = owner

    def part(self, stage: int) -> StageTape:
        """Return the tape of one stage, whose values are renumbered in the same order.

        The time is proportional to the number of ops of the stage, not of the model.
        """
        whole, is_last = self.tape, stage == self.last
        own = self._rows_of[stage]
        end = len(whole.rows) if is_last else own[-1] + 1
        kept = sorted((*own, *(number for number in self._everywhere if number < end)))
        received = self._received[stage]
        before = self._before(kept) | dict.fromkeys(received, Term.COMMUNICATION)
        rows = list(self._rows(kept, received))
        spans = self._spans_of.get(stage, [])
        made = {whole.base[v] for row in rows for v in row.makes} | before.keys()
        values = sorted(made.union(*(_handled(row) for row in rows), *map(_called_with, spans)))
        names = {value: number for number, value in enumerate(values)}

        def place(number: int) -> int:
            """Map an op of the whole tape to the last op of the stage at or before it."""
            is_after = number == len(whole.rows)
            return len(kept) if is_after else max(bisect_right(kept, number) - 1, 0)

        out = Tape(
            rows=[_renumbered(row, names) for row in rows],
            nbytes=[whole.nbytes[value] for value in values],
            base=[names[b] if (b := whole.base[v]) in made else _ABSENT for v in values],
            before={names[value]: term for value, term in before.items()},
            last_use=[place(whole.last_use[value]) for value in values],
            units=[
                (fqn, place(start), place(stop - 1) + 1)
                for fqn, start, stop in self._units_of.get(stage, ())
            ],
            loss_start=place(whole.loss_start - 1) + 1 if is_last else len(rows),
            relayout_bytes={
                (place(number), fqn): size for number, fqn, size in self._relayout_of.get(stage, ())
            },
            relaid_at_once=whole.relaid_at_once,
            sums_apart={names[value] for value in whole.sums_apart & names.keys()},
        )
        out.spans = [
            replace(
                span,
                start=place(span.start),
                end=place(span.end - 1) + 1,
                given=tuple(names[value] for value in span.given),
                enters=names.get(span.enters, -1),
            )
            for span in spans
        ]
        sent = tuple(names[value] for value in self._sent[stage])
        if not is_last:
            done = out.value(0)
            grads = tuple(Grad(value, out.nbytes[value]) for value in sent)
            for value in sent:
                out.last_use[value] = len(out.rows) + 1
                out.outlive.add(value)
            out.add(TapeOp("send", "", sent, (done,), grads=grads))
        out.outlive |= {names[value] for value in whole.outlive & made}
        if self._widening > 1 and stage:
            begins = not self._begins.isdisjoint(received)
            _widen(out, (lambda _: False) if begins else self._is_free, self._widening)
        return StageTape(out, tuple(names[value] for value in received), sent)

    def _is_free(self, module: str) -> bool:
        if module not in self._free:
            self._free[module] = any(each in self.stages.free for each in around(module))
        return self._free[module]

    def _before(self, kept: Sequence[int]) -> dict[int, Term]:
        """Return the values that exist before forward with their terms.

        Buffers that only modules of other stages read are left out.
        """
        whole, readers, here = self.tape, self._readers, set(kept)
        return {
            value: term
            for value, term in whole.before.items()
            if term != Term.BUFFERS or value not in readers or not here.isdisjoint(readers[value])
        }

    def _rows(self, kept: Sequence[int], received: Sequence[int]) -> Iterator[TapeOp]:
        """Yield the ops of a stage.

        An op between modules that reads placeholders only has no gradients and saves nothing.
        """
        tape = self.tape
        flows = set(received)
        for number in kept:
            row, is_needed = tape.rows[number], True
            if self.owner[number] is None:
                grads = tuple(grad for grad in row.grads if tape.base[grad.value] in flows)
                is_needed = bool(grads or row.parameters)
                row = row._replace(grads=grads, keeps=row.keeps if is_needed else ())
            if is_needed:
                flows |= {tape.base[value] for value in row.makes}
            yield row


def _handled(row: TapeOp) -> tuple[int, ...]:
    """Return the values that an op reads, makes, saves or has gradients for."""
    return (*row.reads, *row.makes, *row.keeps, *[value for value, _ in row.grads])


def _called_with(span: RecomputeSpan) -> tuple[int, ...]:
    return span.given if span.enters < 0 else (*span.given, span.enters)


def _renumbered(row: TapeOp, names: Mapping[int, int]) -> TapeOp:
    name = names.__getitem__
    return TapeOp(
        row.op,
        row.module,
        tuple(map(name, row.reads)),
        tuple(map(name, row.makes)),
        tuple(map(name, row.keeps)),
        tuple([Grad(name(value), nbytes) for value, nbytes in row.grads]),
        *row[6:],
    )


def _widen(tape: Tape, is_free: Callable[[str], bool], times: int) -> None:
    """Give the outputs of free modules the stored dtype, and insert the casts of the units.

    Values computed from placeholders alone have the placeholders' dtype, which is the stored one.
    Each outermost unit casts the wide values that it reads. A unit inside another one reads these
    casts.

    Args:
        tape: The tape to change.
        is_free: Returns True for modules that every stage runs.
        times: Ratio of the itemsizes of the stored and the compute dtype.
    """
    wide = {
        value
        for row in tape.rows
        if is_free(row.module)
        or (row.reads and all(tape.base[value] == _ABSENT for value in row.reads))
        for value in row.makes
    }
    for value in wide:
        tape.nbytes[value] *= times
    rows, shift, at = tape.rows, 0, 0
    # `moved` maps the number of each op to its number after the casts are inserted.
    moved: list[int] = []
    entered: dict[tuple[int, int], int] = {}
    out: list[TapeOp] = []
    units = sorted(tape.units, key=lambda unit: (unit[1], -unit[2]))
    for fqn, start, end in units:
        if start < at:
            continue
        moved += [n + shift for n in range(at, start)]
        out += rows[at:start]
        read = sorted({v for row in rows[start:end] for v in row.reads if v in wide})
        narrow = {}
        for value in read:
            narrow[value] = cast = tape.value(tape.nbytes[value] // times)
            out.append(TapeOp("_to_copy", fqn, (value,), (cast,)))
        shift += len(read)
        moved += [n + shift for n in range(start, end)]
        out += [_renamed(row, narrow) for row in rows[start:end]]
        for value, cast in narrow.items():
            tape.last_use[cast] = end - 1
            entered[start, value] = cast
        at = end
    moved += [n + shift for n in range(at, len(rows) + 1)]
    out += rows[at:]
    tape.rows = out
    tape.last_use = [moved[min(use, len(rows))] for use in tape.last_use]
    tape.loss_start = moved[tape.loss_start]
    tape.units = [(fqn, moved[start], moved[end - 1] + 1) for fqn, start, end in units]
    tape.relayout_bytes = {
        (moved[number], fqn): size for (number, fqn), size in tape.relayout_bytes.items()
    }
    tape.spans = [
        replace(
            span,
            start=moved[span.start],
            end=moved[span.end - 1] + 1,
            enters=entered.get((span.start, span.enters), span.enters),
        )
        for span in tape.spans
    ]


def _renamed(row: TapeOp, names: Mapping[int, int]) -> TapeOp:
    """Return the op with the values that it reads and saves replaced as in `names`."""
    if not any(value in names for value in (*row.reads, *row.keeps)):
        return row
    return row._replace(
        reads=tuple(names.get(value, value) for value in row.reads),
        keeps=tuple(names.get(value, value) for value in row.keeps),
    )
