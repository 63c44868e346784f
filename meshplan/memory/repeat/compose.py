"""Compose a microbatch in which some blocks are recomputed from two traces: with none and with all.

In the plain trace no block is recomputed, in the other trace every block is. A block's forward and
backward are segments of a log, and depend on that block alone. So each segment is taken from the
trace that treats its block as the plan does. A storage that several blocks keep is freed by the
last of them. Where the two traces do not determine which block that is, one microbatch is composed
with the earliest and one with the latest possible end; the true memory lies between them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from meshplan.memory.log.events import Event, EventLog, Storage
from meshplan.memory.log.microbatch import HookPoint, MicrobatchTrace
from meshplan.memory.repeat.segments import END, At, NotComposableError, SegmentedTrace

_PLAIN, _RECOMPUTED = 0, 1


@dataclass(frozen=True, slots=True)
class _Ends:
    """The earliest and the latest possible end of a storage.

    Attributes:
        low: Earliest end, as (index of the log, place in that log). `END` as the event of a place
            means the end of the segment.
        high: Latest end, in the same form.
    """

    low: tuple[int, At]
    high: tuple[int, At]


class Composer:
    """Composes microbatches of a model in which any set of blocks is recomputed.

    Args:
        plain: The trace in which nothing is recomputed.
        recomputed: The trace in which every block is recomputed.
        blocks: Fqns of the blocks.

    Raises:
        NotComposableError: The two traces do not consist of corresponding segments.
    """

    def __init__(
        self, plain: MicrobatchTrace, recomputed: MicrobatchTrace, blocks: Collection[str]
    ) -> None:
        self._cuts = (SegmentedTrace(plain, blocks), SegmentedTrace(recomputed, blocks))
        one, other = (cut.pieces for cut in self._cuts)
        if [piece.key for piece in one] != [piece.key for piece in other]:
            raise NotComposableError("recomputed blocks run in a different order")
        if (
            plain.log.phases != recomputed.log.phases
            or plain.later_gradients
            or recomputed.later_gradients
        ):
            raise NotComposableError("the two traces have different phases")
        self._keys = [piece.key for piece in one]
        self._counterparts: tuple[dict[int, int], dict[int, int]] = ({}, {})
        """For each log, maps a storage that outlives its block to its counterpart in the other."""
        for number in range(len(one)):
            self._pair(number)
        self._called_with: dict[int, list[str]] = {}
        """For each storage of the fully recomputed log, the blocks that are called with it."""
        for block, storages in recomputed.taken.items():
            for storage in storages:
                self._called_with.setdefault(storage, []).append(block)
        self._lasts = {(key.block, key.direction): number for number, key in enumerate(self._keys)}

    def trace(self, recomputed: Collection[str]) -> tuple[MicrobatchTrace, MicrobatchTrace]:
        """Return (lower bound, upper bound) of the microbatch; both are often the same object.

        Args:
            recomputed: Fqns of the blocks that are recomputed; all other blocks are not.
        """
        if not recomputed:
            return (self._cuts[_PLAIN].trace,) * 2
        if all(key.block in recomputed for key in self._keys if key.block):
            return (self._cuts[_RECOMPUTED].trace,) * 2
        modes = [int(key.block in recomputed) for key in self._keys]
        ends, is_sure = self._ends(modes)
        low = self._written(modes, {key: end.low for key, end in ends.items()})
        if is_sure:
            return low, low
        return low, self._written(modes, {key: end.high for key, end in ends.items()})

    def kept_bytes(self) -> Mapping[str, tuple[int, int]]:
        """Return the bytes that each block saves for backward, as (plain, recomputed), by fqn.

        These are the bytes that are live between forward and backward. The key "" is for storages
        of no block. The sum over blocks is a lower bound on what a mixed microbatch saves, except
        where two blocks keep the same tensor and only one of them is recomputed.
        """
        cuts, counterparts = self._cuts, self._counterparts
        alive = [cut.alive_between_passes() for cut in cuts]
        kept: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
        for mode in (_PLAIN, _RECOMPUTED):
            for storage in alive[mode]:
                size = cuts[mode].sizes[storage]
                block = self._keys[cuts[mode].births[storage].piece].block
                counterpart = counterparts[mode].get(storage)
                known = storage if mode == _RECOMPUTED else counterpart
                receivers = self._called_with.get(known, []) if known is not None else []
                if counterpart in alive[1 - mode]:
                    kept[mode][block] += size
                elif mode == _RECOMPUTED:
                    kept[mode][receivers[0] if receivers else block] += size
                elif not receivers:  # A block called with the storage might keep it: count nothing.
                    kept[mode][block] += size
        blocks = {*kept[_PLAIN], *kept[_RECOMPUTED]} - {""}
        return {
            "": (min(kept[_PLAIN][""], kept[_RECOMPUTED][""]),) * 2,
            **{block: (kept[_PLAIN][block], kept[_RECOMPUTED][block]) for block in blocks},
        }

    def backward_bytes(self) -> Mapping[str, tuple[int, int]]:
        """Return the bytes that each block's backward needs beyond those that earlier blocks save.

        The result is (plain, recomputed) by the block's fqn. Gradients of parameters do not count.
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
        return {block: (plain, recomputed) for block, (plain, recomputed) in out.items()}

    # Pairing storages of the two logs

    def _pair(self, number: int) -> None:
        """Pair the storages that outlive a segment in one log with those in the other log.

        Storages are paired in order of creation.
        """
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
                raise NotComposableError(f"'{block}' leaves a different number of tensors")
        sizes = [cut.sizes for cut in self._cuts]
        for one, other in pairs:
            if sizes[0][one] != sizes[1][other]:
                raise NotComposableError(f"'{block}' leaves tensors of different sizes")
            self._counterparts[0][one], self._counterparts[1][other] = other, one

    def _aligned(self, one: Sequence[int], other: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield (plain storage, recomputed storage) pairs of one forward.

        Both logs make the same storages in this forward, but the log with recomputation may make
        additional ones.
        """
        logs = [cut.trace.log.storages for cut in self._cuts]
        sizes = [cut.sizes for cut in self._cuts]
        left = iter(other)
        for storage in one:
            sign = (logs[0][storage].op, sizes[0][storage])
            for candidate in left:
                if (logs[1][candidate].op, sizes[1][candidate]) == sign:
                    yield storage, candidate
                    break
            else:
                raise NotComposableError("forward differs with recomputation")

    def _is_own(self, cut: SegmentedTrace, storage: int, block: str) -> bool:
        """Return True if a storage that `block` made is freed in a segment of `block`."""
        death = cut.death(storage)
        return death.piece < END and bool(block) and self._keys[death.piece].block == block

    # Ends of storages

    def _ends(self, modes: Sequence[int]) -> tuple[dict[tuple[int, int], _Ends], bool]:
        """Return the ends of all storages of the chosen segments by (log, storage).

        The second result is True if the earliest and latest ends of all storages are equal.

        Args:
            modes: For each segment, `_PLAIN` or `_RECOMPUTED`: the log that it is taken from.
        """
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
        counterpart = self._counterparts[mode].get(storage)
        block = self._keys[cut.births[storage].piece].block
        if counterpart is None:
            return _Ends(own, own)
        other = (1 - mode, self._cuts[1 - mode].death(counterpart))
        if self._is_own(cut, storage, block) and self._is_own(
            self._cuts[1 - mode], counterpart, block
        ):
            return _Ends(own, own)
        if own[1].piece == other[1].piece == END:
            return _Ends(own, own)
        plain, recomputed = (own, other) if mode == _PLAIN else (other, own)
        if own[1].piece == other[1].piece:
            # Segments between blocks have the same events in both logs. Use the plain log's.
            is_plain = not self._keys[own[1].piece].block or modes[own[1].piece] == _PLAIN
            last = plain if is_plain else recomputed
            return _Ends(last, last)
        # The last block that keeps the storage frees it.
        receivers = self._called_with.get(storage if mode == _RECOMPUTED else counterpart, ())
        holds = [*self._ends_if_recomputed(recomputed, receivers, modes)]
        holds += self._ends_if_plain(plain, [*receivers, *([block] if block else [])], modes)
        birth = (mode, At(cut.births[storage].piece, END))
        low = max([birth, *(hold.low for hold in holds)], key=lambda end: end[1])
        high = max([birth, *(hold.high for hold in holds)], key=lambda end: end[1])
        return _Ends(low, high)

    def _ends_if_recomputed(
        self, end: tuple[int, At], receivers: Sequence[str], modes: Sequence[int]
    ) -> Iterator[_Ends]:
        """Yield the ends set by recomputed blocks, which keep their inputs until their backward.

        Args:
            end: End of the storage in the log in which all blocks are recomputed.
            receivers: Blocks that are called with the storage.
            modes: For each segment, the log that it is taken from.
        """
        if self._is_taken(end, modes):
            yield _Ends(end, end)
        for block in receivers:
            last = self._lasts.get((block, "backward"))
            if last is not None and modes[last] == _RECOMPUTED and last != end[1].piece:
                yield _Ends((_RECOMPUTED, At(last - 1, END)), (_RECOMPUTED, At(last, END)))

    def _ends_if_plain(
        self, end: tuple[int, At], holders: Sequence[str], modes: Sequence[int]
    ) -> Iterator[_Ends]:
        """Yield the ends set by blocks that are not recomputed.

        Such a block keeps the tensors that its operators save for backward, no longer than in the
        log without recomputation.

        Args:
            end: End of the storage in the plain log.
            holders: Blocks that may save the storage: those called with it, and the one that made
                it.
            modes: For each segment, the log that it is taken from.
        """
        if self._is_taken(end, modes):
            yield _Ends(end, end)
            return
        for block in holders:
            first = self._lasts.get((block, "forward"), 0)
            last = self._lasts.get((block, "backward"), first)
            if modes[first] == _PLAIN:
                low, high = At(min(first, end[1].piece), END), At(last, END)
                yield _Ends((_PLAIN, low), (_PLAIN, min(high, At(end[1].piece, END))))

    def _is_taken(self, end: tuple[int, At], modes: Sequence[int]) -> bool:
        """Return True if an end is in a segment that is taken from the log of that end."""
        mode, at = end
        if at.piece == END or not self._keys[at.piece].block:
            return True
        return modes[at.piece] == mode

    # Writing the composed log

    def _written(
        self, modes: Sequence[int], ends: Mapping[tuple[int, int], tuple[int, At]]
    ) -> MicrobatchTrace:
        numbers: dict[tuple[int, int], int] = {}
        late: dict[int, list[tuple[int, int, tuple[int, int]]]] = {}
        """For each segment, storages that are freed in it although none of its events does so:
        (storages that the segment makes before, hook points before, key of the storage)."""
        for key, (mode, at) in ends.items():
            is_written = at.piece == END or (at.event != END and modes[at.piece] == mode)
            if not is_written:
                late.setdefault(at.piece, []).append((*self._moment(mode, at), key))
        storages: list[Storage] = []
        events: list[Event] = []
        hook_points: list[HookPoint] = []
        after: dict[tuple[int, int], int] = {}
        """Number of composed events once an event is written, by (log, index of the event)."""
        for number, mode in enumerate(modes):
            cut = self._cuts[mode]
            piece = cut.pieces[number]
            ending = sorted(late.get(number, ()))
            made = 0
            waiting = iter([*piece.hook_points, None])
            point, num_hook_points = next(waiting), 0

            def end(*, is_over: bool = False) -> None:
                while ending and (is_over or ending[0][:2] <= (made, num_hook_points)):  # noqa: B023
                    key = ending.pop(0)[2]  # noqa: B023
                    size = self._cuts[key[0]].sizes[key[1]]
                    phase = self._phase_at(number, modes)  # noqa: B023
                    events.append(Event(-size, numbers[key], phase))

            for place in range(len(piece.events) + 1):
                while point is not None and point.event <= piece.first + place:
                    end()
                    hook_points.append(point._replace(event=len(events)))
                    point, num_hook_points = next(waiting), num_hook_points + 1
                end()
                if place == len(piece.events):
                    break
                delta, storage, phase = piece.events[place]
                at = At(number, place)
                if cut.births[storage] == at:
                    numbers[mode, storage] = len(storages)
                    storages.append(cut.trace.log.storages[storage])
                    events.append(Event(delta, numbers[mode, storage], phase))
                    made += 1
                else:
                    own_key = self._chosen((mode, storage), numbers)
                    if own_key is not None and ends[own_key] == (mode, at):
                        events.append(Event(delta, numbers[own_key], phase))
                after[mode, piece.first + place] = len(events)
            end(is_over=True)
        plain, other = (cut.trace for cut in self._cuts)

        def number_of(found: tuple[int, int]) -> int:
            key = self._chosen(found, numbers)
            if key is None:
                raise NotComposableError("recomputation moves the origin of a gradient")
            return numbers[key]

        gradients, ready = {}, {}
        for fqn, storage in plain.gradients.items():
            if fqn not in other.gradients:
                raise NotComposableError(f"{fqn} has no gradient with recomputation")
            is_plain = (_PLAIN, storage) in numbers
            gradients[fqn] = number_of((_PLAIN if is_plain else _RECOMPUTED,
                                        storage if is_plain else other.gradients[fqn]))  # fmt: skip
            ready_events = [(_PLAIN, plain.ready.get(fqn)), (_RECOMPUTED, other.ready.get(fqn))]
            found = [
                after[m, e - 1] for m, e in ready_events if e is not None and (m, e - 1) in after
            ]
            if ready_events[0][1] is not None:
                if not found:
                    raise NotComposableError(f"unknown when the gradient of {fqn} is complete")
                ready[fqn] = found[0]
        losses = tuple(number_of((_PLAIN, storage)) for storage in plain.losses)
        return replace(
            plain,
            log=EventLog(tuple(storages), tuple(events), plain.log.phases),
            hook_points=tuple(hook_points),
            gradients=gradients,
            ready=ready,
            losses=losses,
        )

    def _moment(self, mode: int, at: At) -> tuple[int, int]:
        """Return (storages made, hook points passed) in a segment before one of its events.

        Both are `END` at the end of the segment.
        """
        if at.event == END:
            return END, END
        cut = self._cuts[mode]
        piece = cut.pieces[at.piece]
        made = sum(cut.births[storage].event < at.event for storage in piece.made)
        return made, sum(point.event <= piece.first + at.event for point in piece.hook_points)

    def _chosen(
        self, key: tuple[int, int], numbers: Mapping[tuple[int, int], int]
    ) -> tuple[int, int] | None:
        """Return the (log, storage) under which a storage or its counterpart was written, or None.

        Args:
            key: (log, storage).
            numbers: Numbers in the composed log of the storages written so far.
        """
        if key in numbers:
            return key
        counterpart = self._counterparts[key[0]].get(key[1])
        other = (1 - key[0], counterpart if counterpart is not None else -1)
        return other if other in numbers else None

    def _phase_at(self, number: int, modes: Sequence[int]) -> int:
        """Return the number of the phase in which a segment ends."""
        for back in range(number, -1, -1):
            events = self._cuts[modes[back]].pieces[back].events
            if events:
                return events[-1].phase
        return 0
