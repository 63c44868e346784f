"""Derive arrows between boxes from the ops of a forward; a box may stand for many modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from meshplan.model.flow import Flow, Op
from meshplan.model.graph import around
from meshplan.pictures.graphs.tree import Folded

ENTRY: Final = -1
"""Start of a link inside a frame, in place of a box, for values from outside the frame."""
EXIT: Final = -2
"""End of a link inside a frame, in place of a box, for values that leave the frame."""

Links = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A box of the graph: equal modules, or code between modules that combines values.

    A frame is a box around other boxes, which shows one of several identical blocks. A repeat is
    one of these blocks.

    Args:
        name: Dotted name within the frame; a sign such as "+" if the box combines values.
        type: Class names of the modules; "" if the box combines values.
        num_modules: Number of equal modules, in all repeats together.
        num_params: Parameters of all these modules, including their submodules.
        group: Stage or layout that colours the box; "" if it has no parameters.
        frame: Number of the frame around the box; -1 for none.
        is_frame: If True, this box is a frame, with other boxes inside.
        num_below: Number of submodules that are not shown, in one repeat.
    """

    name: str
    type: str
    num_modules: int = 1
    num_params: int = 0
    group: str = ""
    frame: int = -1
    is_frame: bool = False
    num_below: int = 0

    @property
    def is_meeting(self) -> bool:
        """True if the box combines values and stands for no module."""
        return not self.type


@dataclass(slots=True, eq=False)
class Item:
    """A candidate for a box, used while the boxes are chosen.

    Attributes:
        node: The equal modules that it stands for.
        name: Dotted name within the frame.
        depth: Depth in the tree of modules; 0 for the root.
        frame: The frame around it; None for none.
        is_frame: If True, it is a frame.
    """

    node: Folded
    name: str
    depth: int
    frame: Item | None = None
    is_frame: bool = False
    kids: list[Item] = field(default_factory=list)
    is_itself: bool = False
    """If True, the item stands only for the module's own tensors; submodules have other items."""


_Origin = tuple[int, int]
"""(number of a box, number of its repeat)."""


class Reader:
    """Reads the ops of a forward and collects the links (arrows) between boxes.

    An origin of a value is a (box, repeat) that computed it.
    """

    def __init__(self, flow: Flow, items: Sequence[Item], boxes: Sequence[Box]) -> None:
        self._flow, self._boxes = flow, list(boxes)
        self._box_of: dict[str, int] = {}
        self._frame_of: dict[str, tuple[int, int]] = {}
        self._itself: dict[str, int] = {}
        called = {above for call in flow.calls for above in around(call.module)}
        for number, item in enumerate(items):
            shown = any(fqn in called for kid in item.node.children for fqn in kid.fqns)
            for repeat, fqn in enumerate(item.node.fqns):
                if item.is_itself:
                    self._itself[fqn] = number
                elif item.is_frame and shown:
                    self._frame_of[fqn] = (number, repeat)
                else:
                    self._box_of[fqn] = number
        self._links: dict[int, dict[tuple[int, int], None]] = {}
        self._meetings: dict[tuple[int, frozenset[int]], int] = {}
        self._first: dict[int, int] = {}

    def read(self) -> tuple[list[Box], Mapping[int, Links]]:
        """Return (boxes in order of execution, links by the number of their frame).

        The boxes include new ones for code between modules that combines values.
        """
        origins: dict[int, frozenset[_Origin]] = {}
        for number, op in enumerate(self._flow.ops):
            given: frozenset[_Origin] = frozenset().union(
                *(origins.get(value, frozenset()) for value in op.inputs)
            )
            frame, repeat, box = self._place(op)
            if box is None:
                made = self._glue(op, given, frame, repeat)
            else:
                for each in given:
                    self._link(each, (box, repeat), frame)
                made = frozenset({(box, repeat)})
            for each in made:
                self._first.setdefault(each[0], number)
                if frame >= 0:
                    self._first.setdefault(frame, number)
            origins.update(dict.fromkeys(op.outputs, made))
        return self._in_order()

    def _place(self, op: Op) -> tuple[int, int, int | None]:
        """Return (frame, repeat, box) that an op belongs to.

        The frame is -1 for an op outside of all frames. The box is None for an op between modules.
        """
        box, frame, repeat = None, -1, 0
        for call in self._flow.around(op.call):
            for fqn in around(call.module):
                if box is None:
                    box = self._box_of.get(fqn)
                if frame < 0:
                    frame, repeat = self._frame_of.get(fqn, (-1, 0))
            if frame >= 0 or box is not None:
                break
        if box is None:
            owners = {name.rpartition(".")[0] for name in self._flow.parameters_of(op)}
            box = next((self._itself[fqn] for fqn in owners if fqn in self._itself), None)
        return frame, repeat, box

    def _seen(self, origin: _Origin, frame: int, repeat: int) -> int:
        """Return the box that stands for an origin inside a frame; `ENTRY` if it is outside."""
        box, its = origin
        inside = self._boxes[box].frame
        if frame >= 0:
            return box if (inside, its) == (frame, repeat) else ENTRY
        return inside if inside >= 0 else box

    def _glue(
        self, op: Op, given: frozenset[_Origin], frame: int, repeat: int
    ) -> frozenset[_Origin]:
        """Return the origins of the outputs of an op between modules.

        These are the origins of its inputs, or, if the op combines several, one combining box.
        """
        sign = _sign(op.name)
        seen = frozenset(self._seen(each, frame, repeat) for each in given)
        if ENTRY in seen and sign not in ("+", "join"):
            # Rotary angles, masks and so on enter the frame, but get no combining box in it.
            for each in given:
                if self._seen(each, frame, repeat) == ENTRY:
                    self._enter(each, frame)
            seen -= {ENTRY}
            given = frozenset(e for e in given if self._seen(e, frame, repeat) in seen) or given
        if len(seen) < 2 or not sign:
            return given
        known = [n for n in seen if n >= 0 and self._boxes[n].is_meeting]
        for meeting in known:
            into = {a for a, b in self._links.get(frame, ()) if b == meeting}
            if seen - {meeting} <= into:
                return frozenset({(meeting, repeat)})
        key = (frame, seen)
        if key not in self._meetings:
            self._meetings[key] = len(self._boxes)
            self._boxes.append(Box(name=sign, type="", frame=frame))
        meeting = self._meetings[key]
        for each in given:
            self._link(each, (meeting, repeat), frame)
        return frozenset({(meeting, repeat)})

    def _link(self, origin: _Origin, to: _Origin, frame: int) -> None:
        begin = self._seen(origin, frame, to[1])
        if frame < 0:
            if self._boxes[origin[0]].frame >= 0:
                self._add(begin, origin[0], EXIT)
            self._add(-1, begin, to[0])
            return
        self._add(frame, begin, to[0])
        if begin == ENTRY:
            self._enter(origin, frame)

    def _enter(self, origin: _Origin, frame: int) -> None:
        """Add the links by which a value from another box or the previous repeat enters a frame."""
        inside = self._boxes[origin[0]].frame
        if inside >= 0:
            self._add(inside, origin[0], EXIT)
        if inside != frame:
            self._add(-1, inside if inside >= 0 else origin[0], frame)

    def _add(self, frame: int, begin: int, end: int) -> None:
        if begin != end:
            self._links.setdefault(frame, {})[begin, end] = None

    def _in_order(self) -> tuple[list[Box], Mapping[int, Links]]:
        """Return (boxes, links) with the boxes numbered in the order of their first run.

        Links back to modules that run again are dropped, and so are boxes that never run and have
        no parameters, such as an inactive dropout.
        """
        last = len(self._flow.ops)
        idle = {
            n for n, box in enumerate(self._boxes)
            if n not in self._first and not (box.num_params or box.is_frame or box.num_below)
        }  # fmt: skip
        shown = [n for n in range(len(self._boxes)) if n not in idle]
        order = sorted(shown, key=lambda n: (self._first.get(n, last), n))
        place = {old: new for new, old in enumerate(order)} | {-1: -1}
        boxes = [self._boxes[n] for n in order]
        boxes = [replace(box, frame=place[box.frame]) for box in boxes]

        def number(n: int) -> int:
            return n if n < 0 else place[n]

        links = {}
        for frame, found in self._links.items():
            pairs = [(number(a), number(b)) for a, b in found]
            links[place[frame]] = tuple((a, b) for a, b in pairs if b == EXIT or a < b)
        return boxes, links


_SIGNS: Final = {"add": "+", "sub": "−", "cat": "join", "stack": "join", "mul": "×", "div": "÷"}
_PRODUCTS: Final = ("attention", "bmm", "matmul", "mm", "dot", "conv")


def _sign(name: str) -> str:
    """Return the text of a combining box for an op; "" if the op gets no box."""
    word = name.removeprefix("aten.").partition(".")[0].strip("_")
    if word in _SIGNS:
        return _SIGNS[word]
    if "attention" in word:
        return "attention"
    return "product" if any(each in word for each in _PRODUCTS) else ""
