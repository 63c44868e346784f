"""Split a microbatch's log into segments: each block's forward, each block's backward, the rest."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from meshplan.memory.log.events import Event
from meshplan.memory.log.microbatch import HookKind, HookPoint, MicrobatchTrace

END: Final = 1 << 60
"""A number larger than the index of any segment, and of any event of a segment."""


class NotComposableError(Exception):
    """The logs do not consist of segments that can be combined."""


class SegmentKey(NamedTuple):
    """Identifies a segment of a log.

    Attributes:
        block: Fqn of the block; "" for a segment between blocks.
        direction: Forward or backward; "" for a segment between blocks.
        number: Number of earlier segments with the same block and direction, 0 for the first.
    """

    block: str
    direction: Literal["", "forward", "backward"]
    number: int


class At(NamedTuple):
    """A place in a log.

    Attributes:
        piece: Index of the segment.
        event: Number of events of the segment before the place.
    """

    piece: int
    event: int


NEVER: Final = At(END, 0)
"""The place of the end of a storage that is never freed."""


@dataclass(slots=True)
class Segment:
    """Events and hook points of one segment.

    Attributes:
        key: Block, direction and number of the segment.
        first: Index in the log of the segment's first event.
        events: The events, in order.
        hook_points: The hook points, in order; their events are indices in the whole log.
        made: Storages that are made in the segment, in order.
    """

    key: SegmentKey
    first: int
    events: list[Event] = field(default_factory=list)
    hook_points: list[HookPoint] = field(default_factory=list)
    made: list[int] = field(default_factory=list)


class SegmentedTrace:
    """A microbatch trace, split into segments.

    Attributes:
        trace: The trace.
        pieces: The segments, in order.
        births: The place at which each storage is made.
        deaths: The place at which each storage that ends is freed.
        sizes: Bytes of each storage.

    Raises:
        NotComposableError: A storage changes its size.
    """

    def __init__(self, trace: MicrobatchTrace, blocks: Collection[str]) -> None:
        self.trace = trace
        self.pieces = list(_pieces(trace, blocks))
        self.births: dict[int, At] = {}
        self.deaths: dict[int, At] = {}
        self.sizes: dict[int, int] = {}
        for number, piece in enumerate(self.pieces):
            for place, (delta, storage, _) in enumerate(piece.events):
                at = At(number, place)
                if storage not in self.births:
                    self.births[storage], self.sizes[storage] = at, delta
                    piece.made.append(storage)
                elif delta == -self.sizes[storage] and storage not in self.deaths:
                    self.deaths[storage] = at
                else:
                    raise NotComposableError("a storage changes its size")

    def death(self, storage: int) -> At:
        """Return the place at which a storage is freed; `NEVER` if it is not."""
        return self.deaths.get(storage, NEVER)

    def alive_between_passes(self) -> set[int]:
        """Return the storages that are live when memory peaks between forward and backward.

        Only events between the last block's forward and the first backward of a block count: no
        block has freed the tensors that it saved by then. Gradients of parameters do not count.
        """
        directions = [piece.key.direction for piece in self.pieces]
        if "backward" not in directions:
            return set()
        last = len(directions) - 1 - directions[::-1].index("forward")
        between = range(last + 1, directions.index("backward") + 1)
        gradients = set(self.trace.gradients.values())
        live = most = 0
        alive: set[int] = set()
        best: set[int] = set()
        for number, piece in enumerate(self.pieces[: between.stop]):
            for delta, storage, _ in piece.events:
                if storage in gradients:
                    continue
                live += delta
                if delta > 0:
                    alive.add(storage)
                else:
                    alive.discard(storage)
                if number in between and live > most:
                    most, best = live, set(alive)
        return best

    def most_in_backward(self) -> dict[str, int]:
        """Return the peak live bytes in each block's backward, by the block's fqn.

        Gradients of parameters do not count.
        """
        gradients = set(self.trace.gradients.values())
        live = 0
        out: dict[str, int] = {}
        for piece in self.pieces:
            for delta, storage, _ in piece.events:
                live += 0 if storage in gradients else delta
                if piece.key.direction == "backward":
                    out[piece.key.block] = max(live, out.get(piece.key.block, 0))
        return out


def _pieces(trace: MicrobatchTrace, blocks: Collection[str]) -> Iterator[Segment]:
    """Yield the segments of the log, split at the hook points where blocks begin and end."""
    numbers: dict[tuple[str, str], int] = {}
    never_ends = {m.unit for m in trace.hook_points if m.kind == HookKind.BEFORE_BACKWARD} - {
        m.unit for m in trace.hook_points if m.kind == HookKind.AFTER_BACKWARD
    }

    def piece(block: str, direction: Literal["", "forward", "backward"], at: int) -> Segment:
        number = numbers[block, direction] = numbers.get((block, direction), -1) + 1
        return Segment(SegmentKey(block, direction, number), at)

    current = piece("", "", 0)
    hook_points = iter([*trace.hook_points, None])
    point = next(hook_points)
    for number in range(len(trace.log.events) + 1):
        while point is not None and point.event == number:
            own = point.unit if point.unit in blocks else None
            is_open = current.key.block
            begins: Literal["", "forward", "backward"] = ""
            if own is not None and point.kind == HookKind.BEFORE_FORWARD:
                begins = "forward"
            elif own is not None and point.kind == HookKind.BEFORE_BACKWARD:
                begins = "backward"
            if begins and own != is_open:
                assert own is not None
                if is_open and not (is_open in never_ends and current.key.direction == "backward"):
                    raise NotComposableError(f"'{own}' begins while '{is_open}' runs")
                yield current
                current = piece(own, begins, number)
            elif point.kind == HookKind.END_OF_BACKWARD and is_open:
                yield current
                current = piece("", "", number)
            current.hook_points.append(point)
            ends = {"forward": HookKind.AFTER_FORWARD, "backward": HookKind.AFTER_BACKWARD}
            is_own = own is not None and own == is_open == current.key.block
            if is_own and point.kind == ends.get(current.key.direction):
                yield current
                current = piece("", "", number)
            point = next(hook_points)
        if number < len(trace.log.events):
            current.events.append(trace.log.events[number])
    yield current
