"""A step with many equal blocks, from two steps with few: what one more block adds, added again.

The log with one more period of blocks is the other log with pieces put in: the forward of a block,
its backward, its share of the optimizer's step. Each piece, put in as often as blocks are missing,
gives the log of the whole model, event by event, so that peak, terms and allocator are read from
it as from any other. What does not repeat in this way is refused; whether it does is to be proved
on a third log.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from meshplan.memory.log.allocator import reserve
from meshplan.memory.log.events import Event, EventLog, Storage

_GROWN_COST: Final = 3
"""How many pieces put in are worth one storage that has grown."""


class NotRepeatingError(Exception):
    """One more block adds something else than pieces of its own."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Lists of equal modules, of which some were left out.

    Args:
        lists: The fqns of the lists.
        period: After how many blocks they are alike again.
    """

    lists: tuple[str, ...]
    period: int = 1

    def split(self, module: str) -> tuple[str, int | None, str]:
        """(list, number, rest) of a module inside of a block; (module, None, "") of any other."""
        for fqn in self.lists:
            prefix = f"{fqn}." if fqn else ""
            if module.startswith(prefix):
                number, _, rest = module[len(prefix) :].partition(".")
                if number.isdigit():
                    return prefix, int(number), f".{rest}" if rest else ""
        return module, None, ""

    def without_number(self, module: str) -> str:
        """The same name for all blocks."""
        head, number, rest = self.split(module)
        return module if number is None else f"{head}*{rest}"

    def moved(self, module: str, by: int) -> str:
        """The same part of a block further on."""
        head, number, rest = self.split(module)
        return module if number is None else f"{head}{number + by}{rest}"


class _Token(NamedTuple):
    """An event, as it looks from every block alike.

    Attributes:
        size: Of the storage, above 0 where it is born and below where it dies.
        kind: The storage's term, operator, module without its number, and stream.
        place: Of the storage among the live ones of its kind and size: from the youngest, 0 and
            on, or from the oldest, -1 and down; 0 for a birth.
    """

    size: int
    kind: tuple[object, ...]
    place: int = 0


class _TokenRun(NamedTuple):
    """Tokens that follow each other, and the storages they are about in the log they are from."""

    tokens: list[_Token]
    storages: list[Storage]
    is_repeated: bool


def extrapolate(few: EventLog, more: EventLog, blocks: Blocks, times: int) -> EventLog:
    """The log of a step with more blocks.

    Args:
        few: A step with some blocks.
        more: The same step with one period of blocks more.
        times: How many periods to add to `more`.

    Raises:
        NotRepeatingError: The two logs do not differ by pieces put in.
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
        is_past = name == "backward"  # It begins with the last block, whose number is the highest.
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
    """Whether two logs ask for the same bytes in every phase, and of an allocator too."""
    return (
        one.by_phase == other.by_phase
        and one.terms_at_peak == other.terms_at_peak
        and one.host_bytes == other.host_bytes
        and reserve(one) == reserve(other)
    )


def _tokens(log: EventLog, blocks: Blocks) -> list[list[tuple[_Token, Storage]]]:
    """The events of every phase."""
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
    """`more` in pieces, those repeated that `few` has one less of."""
    missing = len(more) - len(few)
    start = _common(few, more)
    end = min(_common(few[::-1], more[::-1]), len(few))
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
    """What each token of `more` is beside those of `few`, with the fewest pieces put in.

    Every token of `few` has its counterpart, in order; sizes may have grown.
    """
    width = len(more) - len(few)
    if width < 0:
        raise NotRepeatingError("with one more block there is less to do")
    # costs[skipped]: of the best way to have come so far with so many tokens put in, and whether
    # the last one was put in; ways remember the choices.
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
    """How many tokens both begin with."""
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _grown(few: _Token, more: _Token, times: int) -> _Token:
    """A storage whose size grows with the number of blocks, such as of all gradients' norms."""
    size = more.size + times * (more.size - few.size)
    if few[1:] != more[1:] or size * more.size <= 0:
        raise NotRepeatingError("with one more block the step does something else")
    return more._replace(size=size)


class _TokenWriter:
    """Makes storages and events of tokens."""

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
