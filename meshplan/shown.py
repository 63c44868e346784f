"""Views of values: a `repr` of one screen, and HTML in a notebook.

`shown` decorates the classes of values. A plan of a large model holds thousands of layouts, and the
`repr` that dataclasses generate would print all of them: megabytes.

The HTML is made in `meshplan.pictures`, which imports the packages of the values. A package of
values therefore cannot import it: `view` imports its functions by name when a value is first shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any, Final, TypeVar

VIEWS: Final = MappingProxyType(
    {
        "layout_html": "meshplan.pictures.notebook",
        "spec_html": "meshplan.pictures.notebook",
        "memory_html": "meshplan.pictures.notebook",
        "plan_html": "meshplan.pictures.notebook",
        "value_html": "meshplan.pictures.notebook",
        "draw": "meshplan.pictures.main",
    }
)
"""The module that defines each function, by the name of the function."""

MOST_LINES: Final = 40
"""Lines of a `repr` at most."""
_LINE: Final = 96
"""Characters of one line of a `repr`: 40 such lines have fewer than 4,000 characters."""
_MOST_FIELDS: Final = MOST_LINES - 3
"""Fields of a `repr`: the other lines are the first, the last, and a count of further fields."""
_MOST_TEXT: Final = 60
"""Characters of a string inside an abbreviated `repr`."""
_STEPS: Final = (
    (99, None), (3, 6), (2, 6), (2, 3), (1, 6), (1, 3), (1, 1), (0, 1), (1, 0), (0, 0)
)  # fmt: skip
"""The steps in which `short` abbreviates, from not at all to completely: (depth of nesting, items
of a collection; None for all of them)."""

_is_whole: Final[ContextVar[bool]] = ContextVar("meshplan_whole_repr", default=False)
_Shown = TypeVar("_Shown")


def view(name: str) -> Callable[..., Any]:
    """Import the function of this name in `VIEWS`, and return it."""
    function: Callable[..., Any] = getattr(import_module(VIEWS[name]), name)
    return function


def shown(cls: type[_Shown]) -> type[_Shown]:
    """Decorate a class of values: give it a `repr` of one screen, and `_repr_html_`.

    The `repr` is that of a dataclass if it fits on one line. Otherwise each field has a line, on
    which its value is abbreviated. `whole_repr` returns the unabbreviated one.

    Args:
        cls: A class: above `@dataclass`, or with `__repr_fields__`, which names its attributes. A
            `_repr_html_` that the class defines is kept.

    Returns:
        The class itself.
    """
    whole: Callable[[Any], str] = cls.__repr__

    def bounded(self: Any) -> str:
        return whole(self) if _is_whole.get() else _screen(self)

    def html(self: Any) -> str:
        fragment: str = view("value_html")(self)
        return fragment

    methods: dict[str, Callable[[Any], str]] = {"__repr__": bounded}
    if not hasattr(cls, "_repr_html_"):
        methods["_repr_html_"] = html
    for name, method in methods.items():
        method.__name__, method.__qualname__ = name, f"{cls.__qualname__}.{name}"
        setattr(cls, name, method)
    return cls


def whole_repr(value: object) -> str:
    """Return the unabbreviated `repr` of a value, in which every field of every value is stated."""
    token = _is_whole.set(True)
    try:
        return repr(value)
    finally:
        _is_whole.reset(token)


def fields_of(value: object) -> list[tuple[str, Any]]:
    """Return (name, value) of the fields that a `repr` shows.

    An object that is no dataclass has those that `__repr_fields__` names; without it, none.
    """
    if is_dataclass(value):
        return [(field.name, getattr(value, field.name)) for field in fields(value) if field.repr]
    return [(name, getattr(value, name)) for name in getattr(value, "__repr_fields__", ())]


def short(value: object, room: int) -> str:
    """Return the `repr` of a value on one line, abbreviated to at most `room` characters.

    Nested values are abbreviated before the outer ones: `Plan(spec=Spec(…), accumulate=1)`.
    """
    for depth, num_items in _STEPS:
        try:
            return _OneLine(room, num_items).text(value, depth)
        except _NoRoomError:
            continue
    return f"{type(value).__name__}(…)"[:room]


def _screen(value: object) -> str:
    """Return the `repr` of a value on one line if it fits, and otherwise a line for each field."""
    name = type(value).__name__
    try:
        return _OneLine(_LINE, None).text(value, _STEPS[0][0])
    except _NoRoomError:
        pass
    stated = fields_of(value)
    lines = [f"{name}("]
    for key, item in stated[:_MOST_FIELDS]:
        head = f"    {key}="
        lines.append(f"{head}{short(item, _LINE - len(head) - 1)},")
    if len(stated) > _MOST_FIELDS:
        lines.append(f"    … {len(stated) - _MOST_FIELDS} more fields")
    return "\n".join([*lines, ")"])


class _NoRoomError(Exception):
    """The text has more characters than there is room for."""


class _OneLine:
    """Writes one value as one line, and gives up as soon as the line is full.

    Args:
        room: Characters of the line.
        num_items: Items of a collection that are written out; None for all of them, and strings in
            full.
    """

    def __init__(self, room: int, num_items: int | None) -> None:
        self._room, self._num_items = room, num_items

    def text(self, value: object, depth: int) -> str:
        """Return the line.

        Args:
            value: Any object.
            depth: Levels of nested values and collections that are written out.

        Raises:
            _NoRoomError: The line would be too long.
        """
        parts = []
        for part in self._parts(value, depth):
            parts.append(part)
            self._room -= len(part)
            if self._room < 0:
                raise _NoRoomError
        return "".join(parts)

    def _parts(self, value: Any, depth: int) -> Iterator[str]:
        """Yield the text of a value piece by piece."""
        if isinstance(value, Mapping):
            is_view = isinstance(value, MappingProxyType)
            pair = ("mappingproxy({", "})") if is_view and self._num_items is None else ("{", "}")
            yield from self._collection(value.items(), len(value), pair, depth, is_mapping=True)
        elif isinstance(value, Sequence | Set) and type(value) in _BRACKETS:
            pair = _BRACKETS[type(value)]
            if not value and isinstance(value, Set):
                yield f"{type(value).__name__}()"
                return
            if type(value) is tuple and len(value) == 1:
                pair = ("(", ",)")
            yield from self._collection(value, len(value), pair, depth)
        elif _is_walked(value):
            yield f"{type(value).__name__}("
            stated = fields_of(value)
            if depth == 0 and stated:
                yield from self._distinguishing_fields(stated)
                return
            for number, (key, item) in enumerate(stated):
                yield f"{', ' if number else ''}{key}="
                yield from self._parts(item, depth - 1)
            yield ")"
        elif isinstance(value, str) and type(value) is str:
            yield self._string(value)
        else:
            yield " ".join(repr(value).split())

    def _distinguishing_fields(self, stated: Sequence[tuple[str, Any]]) -> Iterator[str]:
        """Yield the first fields of a nested value that are numbers or strings, and an ellipsis."""
        plain = [(key, item) for key, item in stated if type(item) in (str, int, float)]
        for key, item in plain[: 2 if self._num_items else 0]:
            yield f"{key}="
            yield from self._parts(item, 0)
            yield ", "
        yield "…)"

    def _collection(
        self, items: Any, count: int, pair: tuple[str, str], depth: int, *, is_mapping: bool = False
    ) -> Iterator[str]:
        """Yield the items of a collection between brackets, the first ones if there are many."""
        start, end = pair
        if depth == 0 and count:
            yield f"{start}… {count:,} item{'' if count == 1 else 's'}{end.lstrip(',')}"
            return
        yield start
        for number, item in enumerate(items):
            if number == self._num_items:
                yield f", … {count - number:,} more"
                break
            if number:
                yield ", "
            if is_mapping:
                key, item = item
                yield from self._parts(key, depth - 1)
                yield ": "
            yield from self._parts(item, depth - 1)
        yield end

    def _string(self, value: str) -> str:
        """Return the `repr` of a string, of its beginning if it is long."""
        if self._num_items is None or len(value) <= _MOST_TEXT:
            # Escape only the characters that may fit, and one more to notice that they do not.
            return repr(value[: self._room + 1])
        most = _MOST_TEXT if self._num_items else 8
        return f"{value[:most]!r}… {len(value):,} characters"


_BRACKETS: Final[Mapping[type, tuple[str, str]]] = MappingProxyType(
    {
        tuple: ("(", ")"),
        list: ("[", "]"),
        set: ("{", "}"),
        frozenset: ("frozenset({", "})"),
    }
)


def _is_walked(value: object) -> bool:
    """Return True if the `repr` of a value is made of its fields: ours, or one of a dataclass."""
    if isinstance(value, type):
        return False
    own = type(value).__repr__
    is_generated = hasattr(own, "__wrapped__") and is_dataclass(value)
    return is_generated or getattr(own, "__module__", "") == __name__
