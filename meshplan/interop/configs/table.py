"""The table of a tool's keys: what each says in a plan, or why it says nothing there.

A row is written once. Import reads their value by it, export writes it, the pages show it. For
example, DeepSpeed's row of `zero_optimization.stage` and accelerate's of
`fsdp_config.fsdp_sharding_strategy` both state `strategy`, each with its own words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, Literal

from meshplan.spec.match import near
from meshplan.spec.values import join

Verdict = Literal["honoured", "irrelevant", "refused"]


class _Absent:
    def __repr__(self) -> str:
        return "ABSENT"


ABSENT: Final = _Absent()
"""Nothing: a value that states nothing, a fact that a key cannot say, a default that is not set."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A value that no plan can say.

    Args:
        why: The reason, and what to do instead.
    """

    why: str


class WrongFormError(Exception):
    """A value has another type or word than its key takes; the message says which it takes."""


@dataclass(frozen=True, slots=True)
class Translation:
    """A value of another tool and the value of a plan that says the same.

    Args:
        form: The values that the key takes, in words.
        read: Their value -> the plan's. ABSENT if it states nothing there; a Refusal if a plan
            cannot say it. Raises WrongFormError for a value of another form.
        write: The plan's value -> theirs; ABSENT if they cannot say it.
        words: The words that the key takes; () if it takes other values.
    """

    form: str
    read: Callable[[Any], Any]
    write: Callable[[Any], Any]
    words: tuple[Any, ...] = ()


def words(pairs: Mapping[Any, Any], otherwise: Refusal | None = None) -> Translation:
    """Translate each of their words; of several for one value, the first is written.

    Args:
        pairs: The plan's value by their word.
        otherwise: What any other text means; None if it is a mistake.
    """
    form = join(dict.fromkeys(_shown(word) for word in pairs))
    by_text = {str(word).lower(): meaning for word, meaning in pairs.items()}

    def read(value: Any) -> Any:
        if isinstance(value, str) and otherwise and value.lower() not in by_text:
            return otherwise
        if isinstance(value, (list, dict)) or str(value).lower() not in by_text:
            raise WrongFormError(form)
        return by_text[str(value).lower()]

    def write(meaning: Any) -> Any:
        same = (word for word, each in pairs.items() if each == meaning and each is not ABSENT)
        return next(same, ABSENT)

    return Translation(form, read, write, tuple(pairs))


def _shown(word: Any) -> str:
    return str(word).lower() if isinstance(word, bool) else str(word)


def whole(low: int = 1, *, off: Sequence[Any] = ()) -> Translation:
    """Translate a whole number of at least `low`; the values `off` state nothing."""
    form = f"a whole number of at least {low}"

    def read(value: Any) -> Any:
        if value in off and not isinstance(value, bool):
            return ABSENT
        if not is_number(value) or value != int(value) or value < low:
            raise WrongFormError(form)
        return int(value)

    def write(value: Any) -> Any:
        return int(value) if is_number(value) and value == int(value) else ABSENT

    return Translation(form, read, write)


def positive(*, off: Any = ABSENT) -> Translation:
    """Translate a number above 0; `off` is their word for none."""
    form = "a number above 0" + ("" if off is ABSENT else f", or {_shown(off)} for none")

    def read(value: Any) -> Any:
        if off is not ABSENT and value == off:
            return ABSENT
        if not is_number(value) or value <= 0:
            raise WrongFormError(form)
        return float(value)

    return Translation(form, read, lambda value: value)


def flag(on: Any = True, off: Any = ABSENT) -> Translation:
    """Translate true and false to values of the plan; by default false states nothing."""
    return words({True: on, False: off})


def text() -> Translation:
    """Translate a text as it is."""

    def read(value: Any) -> Any:
        if not isinstance(value, str) or not value.strip():
            raise WrongFormError("a text")
        return value

    return Translation("a text", read, lambda value: value)


def names(*, as_list: bool = True) -> Translation:
    """Translate names in a list, or separated by commas, to a tuple; `as_list` is how to write."""

    def read(value: Any) -> Any:
        parts = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
            raise WrongFormError("names in a list, or separated by commas")
        return tuple(part.strip() for part in parts if part.strip()) or ABSENT

    write = list if as_list else ",".join
    return Translation("names in a list, or separated by commas", read, write)


def is_number(value: Any) -> bool:
    """Return True for a finite number that is no truth value."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigKey:
    """A row: one key of another tool.

    Args:
        path: Dotted path in their file. A last part `*` is any single key, `**` all below.
        verdict: honoured, irrelevant or refused, unless the value decides.
        plan: The fact that it states, named after the plan's key; "" if none.
        note: What it means or why it says nothing, for the reader of an import and of the pages.
        values: The two translations; None if it is not honoured.
        harmless: Values of a refused key that switch it off, so that nothing is lost.
        default: The value that the tool assumes if the key is left out, where a plan assumes
            something else; ABSENT if a plan that says nothing means the same.
        none: What to write if the plan states nothing, because leaving out means the default.
        is_written: False for a spelling that export does not use.
    """

    path: str
    verdict: Verdict
    plan: str = ""
    note: str = ""
    values: Translation | None = None
    harmless: tuple[Any, ...] = ()
    default: Any = ABSENT
    none: Any = ABSENT
    is_written: bool = True


def say(
    path: str,
    plan: str,
    values: Translation,
    note: str = "",
    *,
    default: Any = ABSENT,
    none: Any = ABSENT,
    is_written: bool = True,
) -> ConfigKey:
    """Make a row of a key that states something in a plan."""
    return ConfigKey(
        path=path, verdict="honoured", plan=plan, values=values, note=note, default=default,
        none=none, is_written=is_written,
    )  # fmt: skip


def skip(note: str, keys: str, prefix: str = "") -> list[ConfigKey]:
    """Make rows of keys, separated by spaces, that say nothing in a plan."""
    return [ConfigKey(path=prefix + key, verdict="irrelevant", note=note) for key in keys.split()]


def refuse(
    note: str, keys: str, prefix: str = "", harmless: tuple[Any, ...] = (False,)
) -> list[ConfigKey]:
    """Make rows of keys, separated by spaces, that change the training and have no word here."""
    return [
        ConfigKey(
            path=prefix + key, verdict="refused", note=note, harmless=(*harmless, None, "none")
        )
        for key in keys.split()
    ]  # fmt: skip


def within(prefix: str, rows: Sequence[ConfigKey]) -> list[ConfigKey]:
    """Return rows of a table that stands under a key of another table; they are only read."""
    return [replace(row, path=f"{prefix}.{row.path}", is_written=False) for row in rows]


@dataclass(frozen=True)
class ConfigTable:
    """All rows of a tool, found by path."""

    rows: tuple[ConfigKey, ...]

    @cached_property
    def _by_path(self) -> Mapping[str, ConfigKey]:
        return {row.path: row for row in self.rows}

    def row(self, path: str) -> ConfigKey | None:
        """Return the row of a key: of its own path, or one that covers it."""
        found = self._by_path.get(path)
        parts = path.split(".")
        if found is None and len(parts) > 1:
            found = self._by_path.get(".".join([*parts[:-1], "*"]))
        for count in range(len(parts), 0, -1):
            found = found or self._by_path.get(".".join([*parts[:count], "**"]))
        return found

    def covers(self, path: str) -> bool:
        """Return True if one row is about the value at a path as a whole, also if a mapping.

        It is not if another row lies below the path, which would never be read.
        """
        is_named = path in self._by_path or f"{path}.**" in self._by_path
        return is_named and path not in self._with_rows_below

    def section(self, path: str) -> str | None:
        """Return a key of the section at a path, if there is one that a plan has; None if none."""
        below = [row for row in self.rows if row.path.startswith(f"{path}.")]
        honoured = [row for row in below if row.verdict == "honoured" and row.is_written]
        first = next(iter(honoured or below), None)
        return None if first is None else first.path.removeprefix(f"{path}.")

    @cached_property
    def _with_rows_below(self) -> frozenset[str]:
        """Paths above a row, except the section of which `section.**` says everything."""
        above = set[str]()
        for row in self.rows:
            parts = row.path.removesuffix(".**").split(".")
            above |= {".".join(parts[:count]) for count in range(1, len(parts))}
        return frozenset(above)

    def nearest(self, path: str) -> str | None:
        """Return the most similar known key: beside the unknown one if there is one, else any."""
        parent, _, last = path.rpartition(".")
        beside = {
            row.path.rpartition(".")[2]: row.path
            for row in self.rows
            if row.path.rpartition(".")[0] == parent and not row.path.endswith("*")
        }
        close = near(last, beside)
        if close is not None:
            return beside[close]
        ends = {row.path.rpartition(".")[2]: row.path for row in self.rows}
        close = near(last, ends)
        return ends[close] if close is not None else None

    def honoured(self) -> Iterator[ConfigKey]:
        """Yield the rows that state something in a plan."""
        return (row for row in self.rows if row.verdict == "honoured")
