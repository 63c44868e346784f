"""One microbatch of a model some of whose blocks run again in backward, from two that were traced.

Of one nothing runs again, of the other every block does. The piece of either log that is a block's
forward or backward is the block's own affair, so each block's pieces are taken from the log in
which it does what it shall do. What several blocks hold ends with the last of them; where two logs
do not tell when that is, both answers are given, and the truth lies between them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from meshplan.memory.log.events import Event, EventLog, Storage
from meshplan.memory.log.microbatch import HookPoint, MicrobatchTrace
from meshplan.memory.repeat.segments import END, At, NotComposableError, SegmentedTrace

_PLAIN, _AGAIN = 0, 1


@dataclass(frozen=True, slots=True)
class _Ends:
    """When a storage ends: at the one at the earliest, at the other at the latest.

    Attributes:
        low, high: (the log that tells it, where); `END` as the event is the end of the piece.
    """

    low: tuple[int, At]
    high: tuple[int, At]


class Composer:
    """Works of a model with any of its blocks run again.

    Args:
        plain: Where nothing runs again.
        again: Where every block does.
        blocks: Their fqns.

    Raises:
        NotComposableError: They are not made of pieces that go together.
    """

    def __init__(
        self, plain: MicrobatchTrace, again: MicrobatchTrace, blocks: Collection[str]
    ) -> None:
        self._cuts = (SegmentedTrace(plain, blocks), SegmentedTrace(again, blocks))
        one, other = (cut.pieces for cut in self._cuts)
        if [piece.key for piece in one] != [piece.key for piece in other]:
            raise NotComposableError("blocks run in another order where they run again")
        if plain.log.phases != again.log.phases or plain.again or again.again:
            raise NotComposableError("the phases are others")
        self._keys = [piece.key for piece in one]
        self._twins: tuple[dict[int, int], dict[int, int]] = ({}, {})
        """By log and storage, the same storage in the other log, of those that several hold."""
        for number in range(len(one)):
            self._pair(number)
        self._takers: dict[int, list[str]] = {}
        """By storage of the log where all run again, the blocks that are called with it."""
        for block, storages in again.taken.items():
            for storage in storages:
                self._takers.setdefault(storage, []).append(block)
        self._lasts = {(key.block, key.direction): number for number, key in enumerate(self._keys)}

    def work(self, again: Collection[str]) -> tuple[MicrobatchTrace, MicrobatchTrace]:
        """The least and the most that one microbatch holds; often the same object.

        Args:
            again: The blocks that run again.
        """
        if not again:
            return (self._cuts[_PLAIN].work,) * 2
        if all(key.block in again for key in self._keys if key.block):
            return (self._cuts[_AGAIN].work,) * 2
        modes = [int(key.block in again) for key in self._keys]
        ends, is_sure = self._ends(modes)
        low = self._written(modes, {key: end.low for key, end in ends.items()})
        if is_sure:
            return low, low
        return low, self._written(modes, {key: end.high for key, end in ends.items()})

    def kept_bytes(self) -> Mapping[str, tuple[int, int]]:
        """By block, what it adds at the turn from forward to backward: plain, and run again.

        Under "" what lies in no block. Together no more than what a mixed microbatch has then, but
        where two blocks hold one tensor in two ways.
        """
        cuts, twins = self._cuts, self._twins
        alive = [cut.alive_at_turn() for cut in cuts]
        kept: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
        for mode in (_PLAIN, _AGAIN):
            for storage in alive[mode]:
                size = cuts[mode].sizes[storage]
                block = self._keys[cuts[mode].births[storage].piece].block
                twin = twins[mode].get(storage)
                known = storage if mode == _AGAIN else twin
                takers = self._takers.get(known, []) if known is not None else []
                if twin in alive[1 - mode]:
                    kept[mode][block] += size
                elif mode == _AGAIN:
                    kept[mode][takers[0] if takers else block] += size
                elif not takers:  # Or else whoever is called with it may be who holds it.
                    kept[mode][block] += size
        blocks = {*kept[_PLAIN], *kept[_AGAIN]} - {""}
        return {
            "": (min(kept[_PLAIN][""], kept[_AGAIN][""]),) * 2,
            **{block: (kept[_PLAIN][block], kept[_AGAIN][block]) for block in blocks},
        }

    def turn_bytes(self) -> Mapping[str, tuple[int, int]]:
        """By block, the most that its backward holds beside what blocks before it keep.

        Plain, and run again; gradients of parameters do not count.
        """
        out: dict[str, list[int]] = {}
        kept = self.kept_bytes()
        order = [key.block for key in self._keys if key.direction == "forward"]
        for mode, cut in enumerate(self._cuts):
            most = cut.most_in_backward()
            before = 0
            for block in dict.fromkeys(order):
                out.setdefault(block, []).append(max(0, most.get(block, 0) - before))
                before += kept.get(block, (0, 0))[mode]
        return {block: (plain, again) for block, (plain, again) in out.items()}

    # Which storages are the same

    def _pair(self, number: int) -> None:
        """Of what is made in one piece, what others hold too, in the order in which it is made."""
        block = self._keys[number].block
        made = [cut.pieces[number].made for cut in self._cuts]
        if self._keys[number].direction == "forward":
            pairs = list(self._aligned(made[0], made[1]))
        else:
            crossing = [
                [s for s in those if not self._is_own(cut, s, block)]
                for cut, those in zip(self._cuts, made, strict=True)
            ]
            pairs = list(zip(*crossing, strict=False))
            if len(crossing[0]) != len(crossing[1]):
                raise NotComposableError(f"'{block}' leaves another number of tensors behind")
        sizes = [cut.sizes for cut in self._cuts]
        for one, other in pairs:
            if sizes[0][one] != sizes[1][other]:
                raise NotComposableError(f"what '{block}' leaves behind is of another size")
            self._twins[0][one], self._twins[1][other] = other, one

    def _aligned(self, one: Sequence[int], other: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Forward does the same in both, but that whoever runs it again may note things too."""
        logs = [cut.work.log.storages for cut in self._cuts]
        sizes = [cut.sizes for cut in self._cuts]
        left = iter(other)
        for storage in one:
            sign = (logs[0][storage].op, sizes[0][storage])
            for candidate in left:
                if (logs[1][candidate].op, sizes[1][candidate]) == sign:
                    yield storage, candidate
                    break
            else:
                raise NotComposableError("forward does something else where it runs again")

    def _is_own(self, cut: SegmentedTrace, storage: int, block: str) -> bool:
        """Whether it ends where the block that made it runs."""
        death = cut.death(storage)
        return death.piece < END and bool(block) and self._keys[death.piece].block == block

    # When they end

    def _ends(self, modes: Sequence[int]) -> tuple[dict[tuple[int, int], _Ends], bool]:
        """By log and storage, of all that the chosen pieces make; and whether all are sure."""
        out: dict[tuple[int, int], _Ends] = {}
        is_sure = True
        for number, mode in enumerate(modes):
            cut = self._cuts[mode]
            for storage in cut.pieces[number].made:
                found = self._end(storage, mode, modes)
                out[mode, storage] = found
                is_sure = is_sure and found.low == found.high
        return out, is_sure

    def _end(self, storage: int, mode: int, modes: Sequence[int]) -> _Ends:
        cut = self._cuts[mode]
        own = (mode, cut.death(storage))
        twin = self._twins[mode].get(storage)
        block = self._keys[cut.births[storage].piece].block
        if twin is None:
            return _Ends(own, own)
        other = (1 - mode, self._cuts[1 - mode].death(twin))
        if self._is_own(cut, storage, block) and self._is_own(self._cuts[1 - mode], twin, block):
            return _Ends(own, own)
        if own[1].piece == other[1].piece == END:
            return _Ends(own, own)
        plain, again = (own, other) if mode == _PLAIN else (other, own)
        if own[1].piece == other[1].piece:
            # Between blocks both logs do the same, and the plain one is taken.
            is_plain = not self._keys[own[1].piece].block or modes[own[1].piece] == _PLAIN
            last = plain if is_plain else again
            return _Ends(last, last)
        takers = self._takers.get(storage if mode == _AGAIN else twin, ())
        holds = [*self._held_again(again, takers, modes)]
        holds += self._held_plain(plain, [*takers, *([block] if block else [])], modes)
        birth = (mode, At(cut.births[storage].piece, END))
        low = max([birth, *(hold.low for hold in holds)], key=lambda end: end[1])
        high = max([birth, *(hold.high for hold in holds)], key=lambda end: end[1])
        return _Ends(low, high)

    def _held_again(
        self, end: tuple[int, At], takers: Sequence[str], modes: Sequence[int]
    ) -> Iterator[_Ends]:
        """What runs again keeps what it is called with until its backward is done."""
        if self._is_there(end, modes):
            yield _Ends(end, end)
        for block in takers:
            last = self._lasts.get((block, "backward"))
            if last is not None and modes[last] == _AGAIN and last != end[1].piece:
                yield _Ends((_AGAIN, At(last - 1, END)), (_AGAIN, At(last, END)))

    def _held_plain(
        self, end: tuple[int, At], holders: Sequence[str], modes: Sequence[int]
    ) -> Iterator[_Ends]:
        """What does not keeps what its own operators want, no longer than the log says."""
        if self._is_there(end, modes):
            yield _Ends(end, end)
            return
        for block in holders:
            first = self._lasts.get((block, "forward"), 0)
            last = self._lasts.get((block, "backward"), first)
            if modes[first] == _PLAIN:
                low, high = At(min(first, end[1].piece), END), At(last, END)
                yield _Ends((_PLAIN, low), (_PLAIN, min(high, At(end[1].piece, END))))

    def _is_there(self, end: tuple[int, At], modes: Sequence[int]) -> bool:
        """Whether the piece in which it ends is taken from the log that says so."""
        mode, at = end
        if at.piece == END or not self._keys[at.piece].block:
            return True
        return modes[at.piece] == mode

    # Writing

    def _written(
        self, modes: Sequence[int], ends: Mapping[tuple[int, int], tuple[int, At]]
    ) -> MicrobatchTrace:
        numbers: dict[tuple[int, int], int] = {}
        late: dict[int, list[tuple[int, int, tuple[int, int]]]] = {}
        """By piece, (how much is made before, how many marks are, what ends)."""
        for key, (mode, at) in ends.items():
            is_written = at.piece == END or (at.event != END and modes[at.piece] == mode)
            if not is_written:
                late.setdefault(at.piece, []).append((*self._moment(mode, at), key))
        storages: list[Storage] = []
        events: list[Event] = []
        marks: list[HookPoint] = []
        after: dict[tuple[int, int], int] = {}
        """By log and number of an event: how many events are written when it is over."""
        for number, mode in enumerate(modes):
            cut = self._cuts[mode]
            piece = cut.pieces[number]
            ending = sorted(late.get(number, ()))
            made = 0
            waiting = iter([*piece.marks, None])
            mark, num_marks = next(waiting), 0

            def end(*, is_over: bool = False) -> None:
                while ending and (is_over or ending[0][:2] <= (made, num_marks)):  # noqa: B023
                    key = ending.pop(0)[2]  # noqa: B023
                    size = self._cuts[key[0]].sizes[key[1]]
                    phase = self._phase_at(number, modes)  # noqa: B023
                    events.append(Event(-size, numbers[key], phase))

            for place in range(len(piece.events) + 1):
                while mark is not None and mark.event <= piece.first + place:
                    end()
                    marks.append(mark._replace(event=len(events)))
                    mark, num_marks = next(waiting), num_marks + 1
                end()
                if place == len(piece.events):
                    break
                delta, storage, phase = piece.events[place]
                at = At(number, place)
                if cut.births[storage] == at:
                    numbers[mode, storage] = len(storages)
                    storages.append(cut.work.log.storages[storage])
                    events.append(Event(delta, numbers[mode, storage], phase))
                    made += 1
                else:
                    mine = self._chosen((mode, storage), numbers)
                    if mine is not None and ends[mine] == (mode, at):
                        events.append(Event(delta, numbers[mine], phase))
                after[mode, piece.first + place] = len(events)
            end(is_over=True)
        plain, other = (cut.work for cut in self._cuts)

        def number_of(found: tuple[int, int]) -> int:
            key = self._chosen(found, numbers)
            if key is None:
                raise NotComposableError("a gradient is made elsewhere where blocks run again")
            return numbers[key]

        gradients, ready = {}, {}
        for fqn, storage in plain.gradients.items():
            if fqn not in other.gradients:
                raise NotComposableError(f"{fqn} has no gradient where blocks run again")
            is_plain = (_PLAIN, storage) in numbers
            gradients[fqn] = number_of((_PLAIN if is_plain else _AGAIN,
                                        storage if is_plain else other.gradients[fqn]))  # fmt: skip
            whens = [(_PLAIN, plain.ready.get(fqn)), (_AGAIN, other.ready.get(fqn))]
            found = [after[m, e - 1] for m, e in whens if e is not None and (m, e - 1) in after]
            if whens[0][1] is not None:
                if not found:
                    raise NotComposableError(f"nothing tells when the gradient of {fqn} is there")
                ready[fqn] = found[0]
        losses = tuple(number_of((_PLAIN, storage)) for storage in plain.losses)
        return replace(
            plain,
            log=EventLog(tuple(storages), tuple(events), plain.log.phases),
            marks=tuple(marks),
            gradients=gradients,
            ready=ready,
            losses=losses,
        )

    def _moment(self, mode: int, at: At) -> tuple[int, int]:
        """How much a piece makes, and how many marks it has, before one of its events."""
        if at.event == END:
            return END, END
        cut = self._cuts[mode]
        piece = cut.pieces[at.piece]
        made = sum(cut.births[storage].event < at.event for storage in piece.made)
        return made, sum(mark.event <= piece.first + at.event for mark in piece.marks)

    def _chosen(
        self, key: tuple[int, int], numbers: Mapping[tuple[int, int], int]
    ) -> tuple[int, int] | None:
        """The name under which a storage of either log was made."""
        if key in numbers:
            return key
        twin = self._twins[key[0]].get(key[1])
        other = (1 - key[0], twin if twin is not None else -1)
        return other if other in numbers else None

    def _phase_at(self, number: int, modes: Sequence[int]) -> int:
        """The phase in which a piece ends."""
        for back in range(number, -1, -1):
            events = self._cuts[modes[back]].pieces[back].events
            if events:
                return events[-1].phase
        return 0
