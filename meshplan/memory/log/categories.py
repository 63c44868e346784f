"""Assign a term (a category of bytes) to storages, from their lifetime and their communication.

Parameters, optimizer state and similar storages get their term when they are allocated. All others
get theirs from the order of a step: a storage that outlives the forward in which it was born is an
activation saved for backward, a storage that outlives the backward in which it was born is a
gradient, and a storage of an earlier step that is allocated again is a gathered parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from meshplan.memory.log.events import Change, Storage, Term


def assign_terms(
    storages: Sequence[Storage],
    events: Sequence[Change],
    phases: Sequence[str],
    *,
    sent: Collection[int],
    num_before: int,
) -> tuple[Storage, ...]:
    """Return the storages, where each `TEMPORARIES` is replaced by the term of its lifetime.

    Args:
        storages: All storages; each is referred to by its index.
        events: All changes of the step, in order.
        phases: Names of the phases in order, as in `EventLog`.
        sent: Numbers of the storages that a collective reads or writes.
        num_before: Number of storages that existed before this step, alive or not.
    """
    spans: dict[int, tuple[int, int]] = {}
    sizes: dict[int, int] = {}
    for delta, number, phase in events:
        sizes[number] = size = sizes.get(number, 0) + delta
        first, _ = spans.get(number, (phase, phase))
        spans[number] = (first, phase if not size else len(phases))
    known = [spans.get(number) for number in range(len(storages))]
    terms = [storage.term for storage in storages]
    found = terms_by_lifetime(terms, known, phases, sent=sent, num_before=num_before)
    return tuple(
        storage if storage.term == term else storage._replace(term=term)
        for storage, term in zip(storages, found, strict=True)
    )


def terms_by_lifetime(
    terms: Sequence[Term],
    spans: Sequence[tuple[int, int] | None],
    phases: Sequence[str],
    *,
    sent: Collection[int],
    num_before: int,
) -> list[Term]:
    """Return every storage's term, where `TEMPORARIES` is replaced by the term of its lifetime.

    Args:
        terms: For each storage, its term so far.
        spans: For each storage, the numbers of its first phase and of the phase in which it was
            freed (`len(phases)` if it never was); None if unknown, which leaves its term unchanged.
        phases: Names of the phases in order, as in `EventLog`.
        sent: Numbers of the storages that a collective reads or writes.
        num_before: Number of storages that existed before this step, alive or not.
    """
    out = list(terms)
    known: dict[tuple[int, int, bool, bool], Term] = {}
    for number, term in enumerate(terms):
        span = spans[number]
        if term is not Term.TEMPORARIES or span is None:
            continue
        key = (*span, number in sent, number < num_before)
        if key not in known:
            known[key] = _term(phases, *span, is_sent=key[2], is_known=key[3])
        out[number] = known[key]
    return out


def _term(phases: Sequence[str], first: int, last: int, *, is_sent: bool, is_known: bool) -> Term:
    """Return the term of a storage that lives from phase `first` to phase `last`.

    Args:
        phases: Names of the phases in order, as in `EventLog`.
        first: Number of the phase of its first event.
        last: Number of the phase in which it was freed; `len(phases)` if it never was.
        is_sent: True if a collective reads or writes it.
        is_known: True if it existed before this step.
    """
    if is_known and first:
        # The storage had 0 bytes when the step began. Only FSDP2 resizes storages like this, when
        # it frees and gathers parameters.
        return Term.GATHERED
    if is_sent:
        return Term.COMMUNICATION
    born = phases[first]
    if last > first and born == "forward":
        return Term.ACTIVATIONS
    if last > first and born == "backward":
        return Term.GRADIENTS
    return Term.TEMPORARIES
