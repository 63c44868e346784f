"""Extrapolate a step with many equal blocks from two steps with few.

The log with one more period of blocks is the other log with segments inserted: the forward of a
block, its backward, and its share of the optimizer step. Each segment, inserted as often as blocks
are missing, gives the log of the whole model, event by event, so peak, categories and allocator are
evaluated as for any other log. Steps that do not repeat in this form are refused. Whether the
extrapolation is right is to be checked against a third log.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from meshplan.memory.log.allocator import reserve
from meshplan.memory.log.events import Event, EventLog, Storage

_GROWN_COST: Final = 3
"""Number of inserted events that cost as much as one storage that has grown."""


class NotRepeatingError(Exception):
    """One more period of blocks changes more of the log than it inserts."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Lists of equal modules from which blocks were left out.

    Args:
        lists: Fqns of the lists.
        period: Number of blocks after which equal ones repeat.
    """

    lists: tuple[str, ...]
    period: int = 1

    def split(self, module: str) -> tuple[str, int | None, str]:
        """Return (list, number, rest) for a module inside a block, else (module, None, "")."""
        for fqn in self.lists:
            prefix = f"{fqn}." if fqn else ""
            if module.startswith(prefix):
                number, _, rest = module[len(prefix) :].partition(".")
                if number.isdigit():
                    return prefix, int(number), f".{rest}" if rest else ""
        return module, None, ""

    def without_number(self, module: str) -> str:
        """Return the fqn with a star for the number of the block."""
        head, number, rest = self.split(module)
        return module if number is None else f"{head}*{rest}"

    def moved(self, module: str, by: int) -> str:
        """Return the fqn of the same module in the block that is `by` blocks further on."""
        head, number, rest = self.split(module)
        return module if number is None else f"{head}{number + by}{rest}"


class _Token(NamedTuple):
    """An event in a form that is the same for every block.

    Attributes:
        size: Bytes of the storage, positive where it is made and negative where it is freed.
        kind: Category, operator, module without its number, and stream of the storage.
        place: Position of the storage among the live ones of its kind and size: from the youngest
            counted up from 0, or from the oldest counted down from -1; 0 where it is made.
    """

    size: int
    kind: tuple[object, ...]
    place: int = 0


class _TokenRun(NamedTuple):
    """Consecutive tokens.

    Attributes:
        tokens: The tokens.
        storages: The storage of each token, in the log that the tokens are from.
        is_repeated: True if the tokens are to be inserted once for each period.
    """

    tokens: list[_Token]
    storages: list[Storage]
    is_repeated: bool


def extrapolate(few: EventLog, more: EventLog, blocks: Blocks, times: int) -> EventLog:
    """Return the log of a step with more blocks.

    Args:
        few: A step with some blocks.
        more: The same step with one more period of blocks.
        blocks: The lists of blocks.
        times: Number of periods to add to `more`.

    Raises:
        NotRepeatingError: The two logs differ by more than inserted segments.
    """
    if few.phases != more.phases:
        raise NotRepeatingError("other phases")
    short, long = _tokens(few, blocks), _tokens(more, blocks)
    writer = _TokenWriter()
    added = times * blocks.period
    for number, name in enumerate(more.phases):
        tokens = [token for token, _ in long[number]]
        storages = [storage for _, storage in long[number]]
        pieces = _pieces([token for token, _ in short[number]], tokens, storages, times)
        # Backward begins with the last block, whose number is the highest.
        is_past = name == "backward"
        for piece in pieces:
            if piece.is_repeated:
                named = [s._replace(module=blocks.without_number(s.module)) for s in piece.storages]
                for _ in range(1 + times):
                    writer.write(piece.tokens, named, number)
                is_past = not is_past
                continue
            by = added if is_past else 0
            named = [s._replace(module=blocks.moved(s.module, by)) for s in piece.storages]
            writer.write(piece.tokens, named, number)
    host = more.host_bytes + times * (more.host_bytes - few.host_bytes)
    return EventLog(tuple(writer.storages), tuple(writer.events), more.phases, host)


def is_same(one: EventLog, other: EventLog) -> bool:
    """Return True if two logs need the same bytes in every phase, and reserve the same bytes."""
    return (
        one.by_phase == other.by_phase
        and one.terms_at_peak == other.terms_at_peak
        and one.host_bytes == other.host_bytes
        and reserve(one) == reserve(other)
    )


def _tokens(log: EventLog, blocks: Blocks) -> list[list[tuple[_Token, Storage]]]:
    """Return the tokens of every phase, each with its storage."""
    out: list[list[tuple[_Token, Storage]]] = [[] for _ in log.phases]
    kinds: dict[int, tuple[object, ...]] = {}
    sizes: dict[int, int] = {}
    alive: dict[tuple[object, ...], list[int]] = {}
    for delta, number, phase in log.events:
        storage, before = log.storages[number], sizes.get(number, 0)
        sizes[number] = after = before + delta
        if before and after:
            raise NotRepeatingError(f"{storage.op} changes the size of a storage that is in use")
        if number not in kinds:
            kinds[number] = (
                storage.term, storage.op, blocks.without_number(storage.module), storage.stream,
            )  # fmt: skip
        kind = kinds[number]
        same = alive.setdefault((kind, abs(delta)), [])
        if after:
            same.append(number)
            token = _Token(delta, kind)
        else:
            at = same.index(number)
            del same[at]
            from_youngest = len(same) - at
            token = _Token(delta, kind, from_youngest if from_youngest <= at else -1 - at)
        out[phase].append((token, storage))
    return out


def _pieces(
    few: Sequence[_Token], more: list[_Token], storages: list[Storage], times: int
) -> Iterator[_TokenRun]:
    """Yield `more` in runs of tokens; those that `few` has one time less are repeated."""
    missing = len(more) - len(few)
    start = _common(few, more)
    end = min(_common(few[::-1], more[::-1]), len(few))
    # If a common prefix and suffix cover `few`, there is one insertion. Where it could be
    # shifted, the middle of its possible places is taken.
    if missing >= 0 and start + end >= len(few):
        at = (start + len(few) - end) // 2
        for first, last in ((0, at), (at, at + missing), (at + missing, len(more))):
            is_new = first == at and last == at + missing and missing > 0
            if first < last:
                yield _TokenRun(more[first:last], storages[first:last], is_new)
        return
    steps = _aligned(few[start : len(few) - end], more[start : len(more) - end])
    marks = [*([_SAME] * start), *steps, *([_SAME] * end)]
    at = first = 0
    for last in range(1, len(more) + 1):
        mark = marks[first]
        if last < len(more) and marks[last] == mark != _GROWN:
            continue
        tokens = more[first:last]
        if mark == _GROWN:
            tokens = [_grown(few[at], tokens[0], times)]
        yield _TokenRun(tokens, storages[first:last], mark == _NEW)
        at += 0 if mark == _NEW else last - first
        first = last


_SAME, _GROWN, _NEW = "same", "grown", "new"


def _aligned(few: Sequence[_Token], more: Sequence[_Token]) -> list[str]:
    """Classify each token of `more` as same, grown or new, with the fewest insertions.

    Every token of `few` has a counterpart in `more`, in order; its size may have grown.
    """
    width = len(more) - len(few)
    if width < 0:
        raise NotRepeatingError("with one more block there is less to do")
    # Dynamic programming over (tokens of `few` matched, tokens inserted). `matched` and `inserted`
    # are the least costs by number of insertions, where the last token was matched or inserted;
    # `choices` remembers the decisions for backtracking.
    far = len(more) * _GROWN_COST + 1
    matched = [0] + [far] * width
    inserted = [far] * (width + 1)
    choices: list[list[tuple[str, bool, bool]]] = []
    for i in range(len(few) + 1):
        row: list[tuple[str, bool, bool]] = []
        if i:
            before_matched, before_inserted = matched, inserted
            matched, inserted = [far] * (width + 1), [far] * (width + 1)
        for skipped in range(width + 1):
            what, was_inserted = _SAME, False
            if i:
                one, other = few[i - 1], more[i - 1 + skipped]
                cost = 0 if one == other else _GROWN_COST if one[1:] == other[1:] else far
                what = _GROWN if cost else _SAME
                was_inserted = before_inserted[skipped] < before_matched[skipped]
                best = min(before_inserted[skipped], before_matched[skipped])
                matched[skipped] = min(far, best + cost)
            is_opened = False
            if skipped:
                opened = matched[skipped - 1] + 1
                is_opened = opened < inserted[skipped - 1]
                inserted[skipped] = min(far, opened, inserted[skipped - 1])
            row.append((what, was_inserted, is_opened))
        choices.append(row)
    if min(matched[width], inserted[width]) >= far:
        raise NotRepeatingError("with one more block the step has another order")
    out: list[str] = []
    i, skipped, is_inserted = len(few), width, inserted[width] < matched[width]
    while i or skipped:
        what, was_inserted, is_opened = choices[i][skipped]
        if is_inserted:
            out.append(_NEW)
            skipped, is_inserted = skipped - 1, not is_opened
        else:
            out.append(what)
            i, is_inserted = i - 1, was_inserted
    return out[::-1]


def _common(one: Sequence[_Token], other: Sequence[_Token]) -> int:
    """Return the number of tokens that both sequences begin with."""
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _grown(few: _Token, more: _Token, times: int) -> _Token:
    """Return a token whose size grows with the number of blocks, such as that of all norms."""
    size = more.size + times * (more.size - few.size)
    if few[1:] != more[1:] or size * more.size <= 0:
        raise NotRepeatingError("with one more block the step does something else")
    return more._replace(size=size)


class _TokenWriter:
    """Turns tokens back into storages and events."""

    def __init__(self) -> None:
        self.storages: list[Storage] = []
        self.events: list[Event] = []
        self._alive: dict[tuple[object, ...], list[int]] = {}

    def write(self, tokens: Sequence[_Token], storages: Sequence[Storage], phase: int) -> None:
        for token, storage in zip(tokens, storages, strict=True):
            same = self._alive.setdefault((token.kind, abs(token.size)), [])
            if token.size > 0:
                number = len(self.storages)
                self.storages.append(storage)
                same.append(number)
            else:
                at = -1 - token.place if token.place < 0 else len(same) - 1 - token.place
                if not 0 <= at < len(same):
                    raise NotRepeatingError("a storage is freed that is not there")
                number = same.pop(at)
            self.events.append(Event(token.size, number, phase))
