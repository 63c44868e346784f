"""Assign a term (a category of bytes) to storages, from when they live and what handles them.

Parameters, optimizer state and the like are named when they are made. The rest follows from the
order of a step: what forward makes and leaves behind is kept for backward, what backward leaves
behind is a gradient, and memory that comes back every step is that of gathered parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from meshplan.memory.log.events import Change, Storage, Term


def settle(
    storages: Sequence[Storage],
    events: Sequence[Change],
    phases: Sequence[str],
    *,
    sent: Collection[int],
    num_before: int,
) -> tuple[Storage, ...]:
    """Return the storages, with a term for each one that was `TEMPORARIES` so far.

    Args:
        events: All changes of the step, in order.
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
    found = settled(terms, known, phases, sent=sent, num_before=num_before)
    return tuple(
        storage if storage.term == term else storage._replace(term=term)
        for storage, term in zip(storages, found, strict=True)
    )


def settled(
    terms: Sequence[Term],
    spans: Sequence[tuple[int, int] | None],
    phases: Sequence[str],
    *,
    sent: Collection[int],
    num_before: int,
) -> list[Term]:
    """Return the term of every storage, where one that was `TEMPORARIES` gets its term.

    Args:
        spans: For each storage, the numbers of its first phase and of the phase in which it ended
            (`len(phases)` if it never did); None if unknown, in which case its term is left as it
            is.
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
    """Return the term of a storage that lives from phase `first` to phase `last`."""
    if is_known and first:
        return Term.GATHERED  # It had shrunk to 0 bytes, as only FSDP2's gathered parameters do.
    if is_sent:
        return Term.COMMUNICATION
    born = phases[first]
    if last > first and born == "forward":
        return Term.ACTIVATIONS
    if last > first and born == "backward":
        return Term.GRADIENTS
    return Term.TEMPORARIES
