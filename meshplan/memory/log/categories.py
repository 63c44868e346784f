"""What storages are for, told by when they live and what handles them.

Parameters, optimizer state and the like are known by name. Of the rest nobody says what it is, but
a step has a plain order: what forward makes and leaves behind is kept for backward, what backward
leaves behind is a gradient, and memory that comes back every step is that of gathered parameters.
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
    """The storages with the terms of those that were `TEMPORARIES` until now.

    Args:
        sent: Numbers of those that a collective reads or writes.
        num_before: How many storages there were before this step, alive or not.
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
    """By storage, its term; what is left out and returned as in `settle`.

    Args:
        spans: By storage, the numbers of its first phase, and of that in which it ended or of none;
            None where nothing tells.
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
    """Of a storage that lives from one phase to another, both by number."""
    if is_known and first:
        return Term.GATHERED  # It had shrunk to nothing, as only FSDP2's memory does.
    if is_sent:
        return Term.COMMUNICATION
    born = phases[first]
    if last > first and born == "forward":
        return Term.ACTIVATIONS
    if last > first and born == "backward":
        return Term.GRADIENTS
    return Term.TEMPORARIES
