"""Simulate autograd's memory in plain Python: play a list of ops forward, then in reverse.

An op is data: the values that it reads, makes and saves for backward, and the bytes of its
workspace. Playing the ops yields the births and deaths of storages as in eager torch. Outputs are
born, inputs are freed after their last use unless they are saved, backward runs the ops in reverse,
several gradients of one value are summed, and saved values are freed once backward has used them.
`memory.tape.ops` and `memory.decoder.blocks` write the ops of a model.

Source: torch 2.13, csrc/autograd/engine.cpp (`evaluate_function`: gradients of inputs exist before
that of the output is freed, then saved values are freed) and input_buffer.cpp (sums);
utils/checkpoint.py (recomputation stops at the last tensor that is saved).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import Final

from meshplan.memory.log.categories import terms_by_lifetime
from meshplan.memory.log.events import Change, EventLog, Storage, Term
from meshplan.memory.log.microbatch import HookKind, HookPoint, MicrobatchTrace
from meshplan.memory.tape.nested_units import NestedUnits
from meshplan.memory.tape.offload import OffloadedValues
from meshplan.memory.tape.op import Grad, RecomputeSpan, Tape, TapeOp

__all__ = ["Grad", "RecomputeSpan", "Tape", "TapeOp", "play"]

_FORWARD, _LOSS, _BACKWARD = 1, 2, 3
_PHASES: Final = ("before", "forward", "loss", "backward")


def play(tape: Tape, *, sums_in_place: bool = False) -> MicrobatchTrace:
    """Play one microbatch, from the storages that exist before it to the end of backward.

    Args:
        tape: The ops of the microbatch.
        sums_in_place: If True, several gradients of one value are added up in the memory of the
            first, as torch does outside of dispatch modes; otherwise each sum is a new tensor, as
            under a dispatch mode.
    """
    return Player(tape, sums_in_place).trace()


class Player:
    """Plays a tape and records the storages, events and hook points."""

    def __init__(self, tape: Tape, sums_in_place: bool) -> None:
        self._tape, self._sums_in_place = tape, sums_in_place
        self._terms, self._made_by = list[Term](), list[TapeOp]()
        self._born_in, self._ended_in = list[int](), dict[int, int]()
        """For each storage: its term, the op that made it, the phase in which it was born, and the
        phase in which it was freed, if it was."""
        self._events: list[Change] = []
        self._hook_points: list[HookPoint] = []
        self._gradients: dict[str, int] = {}
        self._ready: dict[str, int] = {}
        """Index of the event before which a gradient is complete, by fqn of its parameter."""
        self._other_layout: dict[str, int] = {}
        """Storage of a gradient in another layout than its parameter's, by fqn of the parameter."""
        self._sent: set[int] = set()
        self._phase = 0
        self._is_loss = False
        self._sizes, self._uses = list[int](), list[int]()
        self._env: dict[int, int] = {}
        """Storage of each base value that Python frames of forward still reference."""
        self._kept: dict[int, list[int]] = {}
        """Storages saved by each op."""
        self._inputs: dict[int, dict[int, int]] = {}
        """Storages of the inputs that a recomputed span saves, by value, by the span's first op."""
        self._cached: dict[int, int] = {}
        """Storage of each value that selective recomputation saved instead of recomputing it."""
        self._host = OffloadedValues(tape.nbytes)
        self._grads: dict[int, int] = {}
        """Storage of the gradient of each value."""
        self._seeds: list[int] = []
        """The scaled loss and its gradient, which `backward()` references until it returns."""
        self._dying = tape.dying()
        self._starts = {start: unit for unit, start, _ in tape.units}
        self._ends = {end - 1: unit for unit, _, end in tape.units}
        self._nested = NestedUnits(tape)

    def trace(self) -> MicrobatchTrace:
        tape = self._tape
        for value, term in tape.before.items():
            self._env[value] = self._allocate(tape.nbytes[value], TapeOp("", "", ()), term)
        num_before, self._phase = len(self._terms), _FORWARD
        self._add_hook_point(HookKind.BEFORE_FORWARD, "")
        spans = list(tape.parts())
        for span in spans:
            self._forward(span)
        self._begin_backward()
        self._run_backward(spans)
        assert not self._grads, "a gradient reached no operation"
        log = EventLog(self._all_storages(num_before), tuple(self._events), _PHASES)
        loss = self._env[tape.rows[-1].makes[0]]
        # The remaining gradients are redistributed by their unit after the reduction. The log of
        # the microbatch ends before that, so the trace lists the bytes instead of events.
        grad_relayout = {
            fqn: ((nbytes, -1),)
            for (_, fqn), nbytes in tape.relayout_bytes.items()
            if fqn in self._other_layout
        }
        return MicrobatchTrace(
            log, tuple(self._hook_points), self._gradients, self._ready, (loss,),
            grad_relayout=grad_relayout,
            host=tuple(self._host.changes),
        )  # fmt: skip

    # Memory

    def _allocate(self, nbytes: int, row: TapeOp, term: Term = Term.TEMPORARIES) -> int:
        """Add a storage with one reference and return its number."""
        number, phase = len(self._uses), self._phase
        if self._is_loss and term is Term.TEMPORARIES:
            term = Term.LOSS
        self._terms.append(term)
        self._made_by.append(row)
        self._born_in.append(phase)
        self._sizes.append(nbytes)
        self._uses.append(1)
        if nbytes:
            self._events.append((nbytes, number, phase))
        if row.is_sent:
            self._sent.add(number)
        return number

    def _reference(self, storage: int) -> None:
        self._uses[storage] += 1

    def _drop(self, storage: int) -> None:
        self._uses[storage] = left = self._uses[storage] - 1
        if not left and (size := self._sizes[storage]):
            self._ended_in[storage] = self._phase
            self._events.append((-size, storage, self._phase))

    def _drop_all(self, storages: Iterable[int]) -> None:
        for storage in storages:
            self._drop(storage)

    def _all_storages(self, num_before: int) -> tuple[Storage, ...]:
        """Return all storages with their terms, which follow from their lifetimes."""
        sizes, ended, never = self._sizes, self._ended_in.get, len(_PHASES)
        born = enumerate(self._born_in)
        spans = [(phase, ended(n, never)) if sizes[n] else None for n, phase in born]
        terms = terms_by_lifetime(
            self._terms, spans, _PHASES, sent=self._sent, num_before=num_before
        )
        ops, modules = zip(*((row.op, row.module) for row in self._made_by), strict=True)
        phases = map(_PHASES.__getitem__, self._born_in)
        return tuple(map(Storage._make, zip(terms, ops, modules, phases, repeat(0), strict=False)))

    @property
    def _now(self) -> int:
        return len(self._events)

    def _add_hook_point(self, kind: HookKind, unit: str) -> None:
        self._hook_points.append(HookPoint(self._now, kind, unit))

    # Forward

    def _forward(self, span: RecomputeSpan) -> None:
        tape = self._tape
        if span.recompute:
            inputs = tape.called_with(span)
            # Keys of ops are their numbers, so `~start` is a key that no op has.
            if span.on_host and not self._host.take(~span.start, (span.enters,), self._now):
                del inputs[tape.base[span.enters]]
            self._inputs[span.start] = saved = {value: self._env[value] for value in inputs}
            for storage in saved.values():
                self._reference(storage)
        for number in range(span.start, span.end):
            if number == tape.loss_start:
                self._add_hook_point(HookKind.AFTER_FORWARD, "")
                self._phase, self._is_loss = _LOSS, True
            if number in self._starts:
                self._add_hook_point(HookKind.BEFORE_FORWARD, self._starts[number])
            row = tape.rows[number]
            self._run(row, self._env)
            if span.keeps_chosen:
                self._cache(row)
            elif not span.recompute:
                self._keep(number, self._env, on_host=span.on_host)
            for value in self._dying[number]:
                if value != tape.rows[-1].makes[0]:  # The training loop keeps the loss.
                    self._drop(self._env.pop(value))
            if number in self._ends:
                self._add_hook_point(HookKind.AFTER_FORWARD, self._ends[number])

    def _run(self, row: TapeOp, env: dict[int, int], cached: dict[int, int] | None = None) -> None:
        """Allocate the op's workspace and outputs; take outputs from `cached` if they are there.

        Args:
            row: The op.
            env: Storages by base value, to which the outputs are added.
            cached: Storages of values that need not be recomputed; those used are removed.
        """
        tape = self._tape
        took = self._allocate(row.workspace_bytes, row) if row.workspace_bytes else None
        for value in row.makes:
            if tape.base[value] == value:
                known = cached.pop(value, None) if cached else None
                if known is None:
                    term = Term.LOSS if value == tape.logits else Term.TEMPORARIES
                    known = self._allocate(tape.nbytes[value], row, term)
                env[value] = known
        if took is not None:
            self._drop(took)

    def _keep(self, number: int, env: Mapping[int, int], *, on_host: bool = False) -> None:
        base, keeps = self._tape.base, self._tape.rows[number].keeps
        if on_host:
            keeps = self._host.take(number, keeps, self._now)
        kept = [env[base[value]] for value in keeps]
        for storage in kept:
            self._reference(storage)
        self._kept[number] = kept

    def _cache(self, row: TapeOp) -> None:
        if row.is_kept:
            for value in row.makes:
                storage = self._env[self._tape.base[value]]
                self._reference(storage)
                self._cached[value] = storage

    # Backward

    def _begin_backward(self) -> None:
        """Enter backward: free what forward no longer needs, and allocate the loss's gradient."""
        loss = self._tape.rows[-1].makes[0]
        self._phase, self._is_loss = _BACKWARD, False
        for value in self._dying[len(self._tape.rows)]:
            if value not in self._tape.outlive:
                self._drop(self._env.pop(value))
        scaled = TapeOp("mul", "", (loss,))
        self._seeds = [self._allocate(self._tape.nbytes[loss], scaled) for _ in range(2)]
        self._grads[loss] = self._allocate(self._tape.nbytes[loss], scaled)

    def _run_backward(self, spans: Sequence[RecomputeSpan]) -> None:
        for span in reversed(spans):
            self._backward(span)
        for value in self._tape.outlive:
            self._drop(self._env.pop(value))
        self._add_hook_point(HookKind.END_OF_BACKWARD, "")
        self._drop_all(self._seeds)

    def _backward(self, span: RecomputeSpan) -> None:
        end = span.end
        if span.recompute:
            # The ops after the last one that saves something are not recomputed, so their backward
            # runs first. The hook of the unit then gathers its parameters before its ops run again.
            end = 1 + self._tape.last_kept(span)
            self._backward_of_span(end, span.end)
            self._begin_unit(end - 1)
            self._recompute(span)
        self._backward_of_span(span.start, end, span if span.recompute else None)

    def _end_span(self, span: RecomputeSpan) -> None:
        """Free the saved inputs of a recomputed span, and the cached values that it did not use."""
        left = [v for row in self._tape.rows[span.start : span.end] for v in row.makes]
        spared = [self._cached.pop(value) for value in left if value in self._cached]
        self._drop_all((*self._inputs.pop(span.start).values(), *spared))
        self._host.end(~span.start, self._now)

    def _backward_of_span(self, start: int, end: int, ending: RecomputeSpan | None = None) -> None:
        loss_start = self._tape.loss_start
        for number in range(end - 1, start - 1, -1):
            self._is_loss = 0 <= loss_start <= number
            if number == loss_start - 1:
                self._add_hook_point(HookKind.BEFORE_BACKWARD, "")
            self._begin_unit(number)
            self._backward_of_op(number)
            if ending is not None and number == start:
                self._end_span(ending)
            self._end_unit(number)

    def _begin_unit(self, number: int) -> None:
        """Mark the beginning of a unit's backward, if the op is the last of a unit."""
        if number in self._ends:
            self._add_hook_point(HookKind.BEFORE_BACKWARD, self._ends.pop(number))
            self._nested.begin(number, self._grads)

    def _end_unit(self, number: int) -> None:
        """Mark the end of a unit's backward, if the op is the first of a unit."""
        if number in self._starts:
            self._add_hook_point(HookKind.AFTER_BACKWARD, self._starts[number])
            for value, storage in self._nested.end(number, self._grads):
                self._accumulate(value, storage, self._tape.rows[number])

    def _recompute(self, span: RecomputeSpan) -> None:
        """Run the forward of a span again, up to the last op that saves something."""
        rows, last = self._tape.rows, self._tape.last_kept(span)
        self._is_loss = False
        env = dict(self._inputs[span.start])
        for storage in env.values():
            self._reference(storage)
        back = [self._allocate(size, rows[span.start]) for size in self._host.of(~span.start)]
        for storage in back:  # The span is called with the copy, and references it to its end.
            env[self._tape.base[span.enters]] = storage
            self._reference(storage)
        for number in range(span.start, last + 1):
            row = rows[number]
            if number in self._starts and number > span.start:
                self._add_hook_point(HookKind.BEFORE_FORWARD, self._starts[number])
            # torch.utils.checkpoint stops before the last op if that op saves only its inputs.
            if number < last or set(row.keeps) & set(row.makes):
                self._run(row, env, self._cached)
            self._keep(number, env)
            for value in self._dying[number]:
                if value in env:
                    self._drop(env.pop(value))
            if number in self._ends and number < last:
                self._add_hook_point(HookKind.AFTER_FORWARD, self._ends[number])
        self._drop_all((*env.values(), *back))

    def _backward_of_op(self, number: int) -> None:
        """Run the backward of one op: allocate its inputs' gradients, then free what it used."""
        row, grads = self._tape.rows[number], self._grads
        given = [grads.pop(value) for value in row.makes if value in grads]
        made, own = list[tuple[int, int]](), list[tuple[str, int, int]]()
        back: Sequence[int] = ()
        if given:
            back = [self._allocate(size, row) for size in self._host.of(number)]
            workspace_bytes = row.workspace_backward_bytes
            own, made = self._made(number, row.parameters, row.grads, given, workspace_bytes)
        # autograd frees the gradient of the output and the saved values only after the gradients of
        # the inputs exist.
        self._drop_all((*back, *given, *self._kept.pop(number, ())))
        if self._host.changes:
            self._host.end(number, self._now)
        self._add_up(number, own, made)
        for fqn, _ in row.parameters if given else ():
            if fqn in self._other_layout:
                self._relayout(fqn, number)
            self._ready[fqn] = len(self._events)

    def _made(
        self,
        number: int,
        parameters: Iterable[tuple[str, int]],
        grads: Iterable[Grad],
        given: Sequence[int],
        workspace_bytes: int,
    ) -> tuple[list[tuple[str, int, int]], list[tuple[int, int]]]:
        """Return the gradients that an op's backward makes, of parameters and as `_passed_on`.

        Args:
            number: The op.
            parameters: (fqn, bytes of the gradient) of each parameter with a gradient.
            grads: The gradients of inputs.
            given: Storages of the gradients of the op's outputs.
            workspace_bytes: Bytes of the workspace meanwhile.
        """
        row = self._tape.rows[number]
        took = self._allocate(workspace_bytes, row) if workspace_bytes else None
        own = [(fqn, size, self._gradient(fqn, size, number)) for fqn, size in parameters]
        made = self._passed_on(number, grads, given)
        if took is not None:
            self._drop(took)
        return own, made

    def _add_up(
        self,
        number: int,
        own: Iterable[tuple[str, int, int]],
        made: Iterable[tuple[int, int]],
    ) -> None:
        """Add what `_made` returned to the gradients from other ops."""
        for fqn, nbytes, storage in own:
            self._add_gradient(fqn, nbytes, storage, number)
        for value, storage in made:
            self._accumulate(value, storage, self._tape.rows[number])

    def _passed_on(
        self, number: int, grads: Iterable[Grad], given: Sequence[int]
    ) -> list[tuple[int, int]]:
        """Return (value, storage of its gradient) for each input of an op.

        The gradient of an input with 0 bytes in `grads` is the gradient of the output itself.

        Args:
            number: The op.
            grads: The gradients that the op makes.
            given: Storages of the gradients of the op's outputs.
        """
        made: list[tuple[int, int]] = []
        grad_from, row = self._tape.grad_from, self._tape.rows[number]
        for value, nbytes in grads:
            if grad_from and (number, value) in grad_from:
                made.append((value, self._saved_gradient(number, value)))
            elif nbytes:
                made.append((value, self._allocate(nbytes, row)))
            else:
                self._reference(given[0])
                made.append((value, given[0]))
        return made

    def _accumulate(self, value: int, storage: int, row: TapeOp) -> None:
        known = self._grads.get(value)
        if known is None:
            self._grads[value] = storage
            return
        # torch adds in place only if nothing else references the first gradient.
        if self._sums_in_place and self._uses[known] == 1 and value not in self._tape.sums_apart:
            self._drop(storage)
            return
        self._grads[value] = self._allocate(max(self._sizes[known], self._sizes[storage]), row)
        self._drop(known)
        self._drop(storage)

    def _relayout(self, fqn: str, number: int) -> None:
        """Bring a gradient into the layout of its parameter, unless the unit does so later.

        The unit cannot if another gradient of the parameter is in that layout already, because both
        have to be added up here.
        """
        row, known, other_layout = (
            self._tape.rows[number],
            self._gradients[fqn],
            self._other_layout[fqn],
        )
        if known == other_layout and fqn not in self._tape.relaid_at_once:
            return
        size = self._tape.relayout_bytes[number, fqn]
        relaid = self._allocate(size, row, Term.GRADIENTS)
        if known != other_layout:
            total = self._allocate(size, row, Term.GRADIENTS)
            self._drop(relaid)
            self._drop(known)
            relaid = total
        self._drop(self._other_layout.pop(fqn))
        self._gradients[fqn] = relaid

    def _saved_gradient(self, number: int, key: int | str) -> int:
        """Return the storage of a gradient that forward computed and saved.

        Args:
            number: The op that returns the gradient in backward.
            key: The value, or the fqn of the parameter, whose gradient it is.
        """
        place = self._tape.rows[number].keeps.index(self._tape.grad_from[number, key])
        storage = self._kept[number][place]
        self._reference(storage)
        return storage

    def _gradient(self, fqn: str, nbytes: int, number: int) -> int:
        """Return the storage of a parameter's gradient that one op makes."""
        if (number, fqn) in self._tape.grad_from:
            return self._set_term(Term.GRADIENTS, self._saved_gradient(number, fqn))
        return self._allocate(nbytes, self._tape.rows[number], Term.GRADIENTS)

    def _add_gradient(self, fqn: str, nbytes: int, storage: int, number: int) -> None:
        """Add a parameter's gradient to the gradients from other ops that read the parameter."""
        has_own_layout = (number, fqn) not in self._tape.relayout_bytes
        if not has_own_layout:
            self._other_layout[fqn] = storage
        known = self._gradients.setdefault(fqn, storage)
        if known == storage or not has_own_layout:
            return
        if not self._sums_in_place:
            self._gradients[fqn] = self._allocate(nbytes, self._tape.rows[number], Term.GRADIENTS)
            self._drop(self._as_addend(known))
        self._drop(self._as_addend(storage))

    def _as_addend(self, storage: int) -> int:
        """Return a storage that is added to a parameter's gradient, with a temporary's term."""
        of_loss = self._born_in[storage] == _LOSS
        return self._set_term(Term.LOSS if of_loss else Term.TEMPORARIES, storage)

    def _set_term(self, term: Term, storage: int) -> int:
        """Change the term of a storage and return it."""
        self._terms[storage] = term
        return storage
