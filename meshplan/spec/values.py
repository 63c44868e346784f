"""The values of a plan file with their places, and the small decoders that read them.

A decoder takes a `PlanValue` and returns its meaning. If it cannot, it records a `Problem` and
returns None, and reading continues, so that one run finds every mistake of a file. Each decoder has
the JSON Schema of what it accepts, and `json_schema` collects these. The file syntax is read in
`reader`; the keys of the format are in `schema`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from meshplan.errors import Origin, Problem, SpecError
from meshplan.spec.match import near
from meshplan.units import FORMS, any_case, parse_bytes, parse_memory

_MAX_PROBLEMS: Final = 100
"""Number of problems after which reading stops: searching suggestions for more takes too long."""

_MAX_SHOWN: Final = 60
"""Maximum number of characters of a user's text that a message repeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanValue:
    """One value of a plan.

    Args:
        data: None, bool, int, float or str; or a list or a dict of `PlanValue`s.
        origin: The place of the value.
        text: A scalar as it was written; "" for a list or a mapping.
        key: The place of the value's key; None if the value is an entry of a list.
        is_quoted: True for a string in quotes, which is never read as a number.
        is_broken: True if a problem with the value is already recorded; `data` is then not valid.
    """

    data: Any
    origin: Origin
    text: str = ""
    key: Origin | None = None
    is_quoted: bool = False
    is_broken: bool = False


class Findings:
    """The problems found so far."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def add(self, where: PlanValue | Origin, what: str, fix: str = "") -> None:
        """Record a problem.

        Raises:
            SpecError: The file has too many problems for a longer list to help.
        """
        self.problems.append(
            Problem(what, where.origin if isinstance(where, PlanValue) else where, fix)
        )
        if len(self.problems) >= _MAX_PROBLEMS:
            self.problems.append(Problem("too many problems: reading stopped here"))
        self.raise_if(len(self.problems) >= _MAX_PROBLEMS)

    def raise_if(self, condition: object) -> None:
        """Raise the recorded problems, if there are any and the condition is true.

        Raises:
            SpecError: The condition is true and problems were recorded.
        """
        if condition and self.problems:
            raise SpecError(self.problems)


Form = dict[str, Any]
"""A JSON Schema (draft-07)."""


@dataclass(frozen=True, slots=True)
class Decoder:
    """A reader of one kind of value, and the form of such values for editors.

    Args:
        read: Returns the meaning of a value; if it has none, records a problem and returns None.
        form: The JSON Schema of the values that are read without a problem.
    """

    read: Callable[[PlanValue, Findings], Any]
    form: Form

    def __call__(self, value: PlanValue, found: Findings) -> Any:
        """Read a value."""
        return self.read(value, found)


def decoder(*forms: Form) -> Callable[[Callable[[PlanValue, Findings], Any]], Decoder]:
    """Make a decoder of a function that accepts values of any of these forms."""
    return lambda read: Decoder(read, any_of(*forms))


def any_of(*forms: Form) -> Form:
    """Return the form of values that have one of these forms."""
    return forms[0] if len(forms) == 1 else {"anyOf": list(forms)}


def words_form(*words: str) -> Form:
    """Return the form of one of these words in any case."""
    pattern = f"^({'|'.join(map(any_case, words))})$"
    return any_of({"enum": list(words)}, {"type": "string", "pattern": pattern})


def or_null(form: Form) -> Form:
    """Return the form of a key that may be left without a value, which then is not stated."""
    return any_of(form, {"type": "null"})


def states(key: str) -> Form:
    """Return the form of a mapping that states a value for this key."""
    return {"required": [key], "properties": {key: {"not": {"type": "null"}}}}


def mapping_form(fields: Mapping[str, Decoder], required: Iterable[str] = (), **more: Any) -> Form:
    """Return the form of a mapping as `section` reads it: a key without a value is not stated."""
    forms = {
        key: each.form if key in required else or_null(each.form) for key, each in fields.items()
    }
    out: Form = {"type": "object", "properties": forms, "additionalProperties": False}
    return out | ({"required": list(required)} if required else {}) | more


def list_form(entry: Form) -> Form:
    """Return the form of a list with at least one entry, as `items` reads it."""
    return {"type": "array", "items": entry, "minItems": 1}


def plain(value: PlanValue) -> Any:
    """Return a value as plain Python data, without places; recursion is safe to `MAX_DEPTH`."""
    if isinstance(value.data, dict):
        return {key: plain(inner) for key, inner in value.data.items()}
    if isinstance(value.data, list):
        return [plain(inner) for inner in value.data]
    return value.data


def show(value: PlanValue) -> str:
    """Return a short name of the value for a message."""
    if isinstance(value.data, (list, dict)):
        return "a list" if isinstance(value.data, list) else "a mapping"
    if isinstance(value.data, str):
        return quote(value.data)
    return quote(value.text)[1:-1] if value.data is not None else "nothing"


def quote(text: str) -> str:
    """Return the text in quotes, on one line and not too long."""
    return repr(text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 1] + "…")


def join(words: Iterable[str], last: str = "or") -> str:
    """Join words as in `a, b or c`."""
    *first, end = words
    return f"{', '.join(first)} {last} {end}" if first else end


def missing_space(key: str) -> str:
    """Return the fix for `key:value`, which YAML reads as one text."""
    return f"put a space after '{key}:'"


def did_you_mean(word: str, words: Iterable[str], otherwise: str = "") -> str:
    """Return a fix that names the most similar word, else `otherwise`."""
    name, colon, _ = word.partition(":")
    close = near(name, words)
    if colon and name == close:
        return missing_space(name)
    return f"did you mean '{close}'?" if close else otherwise


def section(
    value: PlanValue,
    found: Findings,
    fields: Mapping[str, Decoder],
    example: str,
    *,
    required: Mapping[str, str] | None = None,
    homes: Mapping[str, str] | None = None,
) -> dict[str, Any] | None:
    """Decode a mapping with known keys; a key without a value is not stated.

    Args:
        value: The value from the file.
        found: The findings that problems are added to.
        fields: A decoder per key.
        example: A correct mapping, for the fix if the value has another type.
        required: The fix for each required key that is missing.
        homes: The fix for each key that is valid only elsewhere in the plan.

    Returns:
        The decoded values that could be read, None if the value is not a mapping.
    """
    if not is_mapping(value, found, example):
        return None
    out = {}
    missing = dict(required or {})
    for key, child in value.data.items():
        if key not in fields and child.is_broken:
            continue
        if key not in fields:
            fix = (homes or {}).get(key) or did_you_mean(
                key, fields, f"the valid keys are {', '.join(fields)}"
            )
            found.add(child.key or child.origin, "unknown key", fix)
            missing.pop(near(key.partition(":")[0], fields) or "", None)
            continue
        if child.is_broken or child.data is not None:
            missing.pop(key, None)
        if is_stated(child):
            decoded = fields[key](child, found)
            if decoded is not None:
                out[key] = decoded
    for key, fix in missing.items():
        found.add(value, f"'{key}' is missing", fix)
    return out


def is_stated(value: PlanValue) -> bool:
    """Return True if the value is neither empty nor broken."""
    return value.data is not None and not value.is_broken


def is_mapping(value: PlanValue, found: Findings, example: str) -> bool:
    """Return True if the value is a mapping; otherwise record a problem."""
    if not isinstance(value.data, dict):
        found.add(value, f"{show(value)} is not a mapping", f"write {example}")
        return False
    return True


def items(value: PlanValue, found: Findings, example: str) -> list[PlanValue]:
    """Return the entries of a list; record a problem if it is empty, no list, or has empty ones."""
    if not isinstance(value.data, list):
        found.add(value, f"{show(value)} is not a list", f"write {example}")
        return []
    if not value.data:
        found.add(value, "the list is empty", f"write {example}")
    for child in value.data:
        if child.data is None and not child.is_broken:
            found.add(child, "this entry of the list is empty", "write a value or remove it")
    return [child for child in value.data if is_stated(child)]


def integer(low: int = 1, *words: str, high: int = 10**9) -> Decoder:
    """Return a decoder for a whole number from `low` to `high`, or for one of `words`."""
    wanted = f"a whole number of at least {low}"
    wanted += f", {'or ' if len(words) == 1 else ''}{join(words)}" if words else ""

    def decode(value: PlanValue, found: Findings) -> int | str | None:
        data = value.data
        if isinstance(data, str) and data.lower() in words:
            return data.lower()
        is_whole = _is_number(data) and data == int(data)
        if is_whole and low <= data <= high:
            return int(data)
        if is_whole and data > high:
            found.add(value, f"{show(value)} is too large", f"write {high:,} or less")
        else:
            fix = _unquote(value, words) or f"write {low} or more"
            found.add(value, f"{show(value)} is not {wanted}", fix)
        return None

    whole = {"type": "integer", "minimum": low, "maximum": high}
    return Decoder(decode, any_of(whole, words_form(*words)) if words else whole)


def number(accepts: Callable[[float], bool], wanted: str, fix: str, **bounds: float) -> Decoder:
    """Return a decoder for a finite number for which `accepts` is true.

    Args:
        accepts: Returns True for the numbers that are valid.
        wanted: These numbers in words.
        fix: The fix for any other value.
        bounds: The valid numbers as keywords of JSON Schema.
    """

    def decode(value: PlanValue, found: Findings) -> float | None:
        if _is_number(value.data) and accepts(value.data):
            return float(value.data)
        found.add(value, f"{show(value)} is not {wanted}", _unquote(value) or fix)
        return None

    return Decoder(decode, {"type": "number", **bounds})


_HALF_A_UNIT: Final = re.compile(r"\d\s*[KMGT]$")


def measured(parse: Callable[[str], Any]) -> Decoder:
    """Return a decoder for a number with a unit, read by one of the parsers of `units`."""
    bare, regex = FORMS[parse]

    def decode(value: PlanValue, found: Findings) -> Any:
        if isinstance(value.data, (bool, list, dict)):
            found.add(value, f"{show(value)} is not a number")
            return None
        try:
            return parse(value.text)
        except ValueError as error:
            is_unit = parse in (parse_memory, parse_bytes) and _HALF_A_UNIT.search(value.text)
            fix = f"write {value.text}iB or {value.text}B" if is_unit else ""
            found.add(value, str(error), fix)
            return None

    return Decoder(decode, any_of(bare, {"type": "string", "pattern": regex}))


def choice(words: Mapping[str, Any] | Iterable[str], noun: str) -> Decoder:
    """Return a decoder for one of `words`, in any case.

    If `words` is a mapping, the decoder returns the value of the word, else the word itself.
    """
    meaning = dict(words) if isinstance(words, Mapping) else {word: word for word in words}
    by_lower = {word.lower(): what for word, what in meaning.items()}

    def decode(value: PlanValue, found: Findings) -> Any:
        if not isinstance(value.data, (list, dict)) and value.text.lower() in by_lower:
            return by_lower[value.text.lower()]
        fix = f"write {join(dict.fromkeys(meaning.values() if _is_flat(meaning) else meaning))}"
        found.add(value, f"{show(value)} is not {noun}", did_you_mean(value.text, meaning, fix))
        return None

    return Decoder(decode, scalar_words_form(meaning))


def scalar_words_form(words: Iterable[str]) -> Form:
    """Return the form of one of these words, of which numbers need no quotes."""
    numbers = [int(word) for word in words if word.isdecimal()]
    return any_of(words_form(*words), *([{"enum": numbers}] if numbers else []))


@decoder({"type": "boolean"})
def boolean(value: PlanValue, found: Findings) -> bool | None:
    """Decode `true` or `false`; `yes`, `on` and similar words are strings in YAML 1.2."""
    if isinstance(value.data, bool):
        return value.data
    meant = {"yes": "true", "on": "true", "1": "true", "no": "false", "off": "false", "0": "false"}
    meant |= {"true": "true without quotes", "false": "false without quotes"}
    fix = f"write {meant.get(value.text.lower(), 'true or false')}"
    found.add(value, f"{show(value)} is not true or false", fix)
    return None


def text(wanted: str) -> Decoder:
    """Return a decoder for a text that is not empty."""

    def decode(value: PlanValue, found: Findings) -> str | None:
        if isinstance(value.data, str) and value.data.strip():
            return value.data
        is_scalar = not isinstance(value.data, (list, dict, str))
        found.add(value, f"{show(value)} is not {wanted}", "put it in quotes" if is_scalar else "")
        return None

    return Decoder(decode, {"type": "string", "pattern": r"\S"})


def pattern(regex: str, wanted: str, example: str) -> Decoder:
    """Return a decoder for a text that matches a regular expression."""
    form = re.compile(regex)

    def decode(value: PlanValue, found: Findings) -> str | None:
        if isinstance(value.data, str) and form.fullmatch(value.data):
            return value.data
        found.add(value, f"{show(value)} is not {wanted}", f"write something like {example}")
        return None

    return Decoder(decode, {"type": "string", "pattern": f"^(?:{regex})$"})


def _is_number(data: Any) -> bool:
    if isinstance(data, float):
        return math.isfinite(data)
    return isinstance(data, int) and not isinstance(data, bool)


def _is_flat(meaning: Mapping[str, Any]) -> bool:
    return all(isinstance(what, str) for what in meaning.values())


def _unquote(value: PlanValue, words: Iterable[str] = ()) -> str:
    """Return the fix for a number in quotes, or for a misspelled word."""
    if value.is_quoted and re.fullmatch(r"[-+]?[0-9.]+(e[-+]?[0-9]+)?", value.text):
        return f"write {value.text} without quotes"
    return did_you_mean(value.text, words) if isinstance(value.data, str) else ""


_DURATION: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(s|min|h)?")
_SECONDS: Final = {None: 1, "s": 1, "min": 60, "h": 3600}


@decoder(
    {"type": "number", "exclusiveMinimum": 0},
    {"type": "string", "pattern": rf"^(?=.*[1-9])(?:{_DURATION.pattern})$"},
)
def duration(value: PlanValue, found: Findings) -> float | None:
    """Read a duration such as "30s" in seconds."""
    form = _DURATION.fullmatch(value.data) if isinstance(value.data, str) else None
    seconds = float(form[1]) * _SECONDS[form[2]] if form else 0.0
    if isinstance(value.data, (int, float)) and not isinstance(value.data, bool):
        seconds = value.data
    if 0 < seconds < math.inf:
        return seconds
    found.add(value, f"{show(value)} is not a duration", "write something like 30s, 5min or 1h")
    return None


_PERCENT: Final = re.compile(r"([0-9]{1,2}(?:\.[0-9]+)?)%")


@decoder(
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    {"type": "string", "pattern": rf"^(?=.*[1-9])(?:{_PERCENT.pattern})$"},
)
def share(value: PlanValue, found: Findings) -> float | None:
    """Read a share such as "10%" as a number between 0 and 1."""
    part = value.data
    if isinstance(part, str) and (form := _PERCENT.fullmatch(part)):
        part = float(form[1]) / 100
    if isinstance(part, (int, float)) and not isinstance(part, bool) and 0 < part < 1:
        return float(part)
    what = f"{show(value)} is not a share of more than 0 % and less than 100 %"
    found.add(value, what, "write something like 10%")
    return None
