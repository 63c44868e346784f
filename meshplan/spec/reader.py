"""Read plan.yaml into a `Spec`; the only module that imports yaml.

Scalars follow YAML 1.2's core schema: `3e9` is a number, `no` and `1:30` are strings. A key given
twice is an error. Anchors, aliases and tags are refused. Every value is read with its line and
column. The reader processes yaml's events without recursion, so a small file cannot cause deep
recursion or expand into a large value. The meaning of the keys is defined in `schema`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import yaml

from meshplan.errors import Origin, Problem, SpecError
from meshplan.files import read_bytes
from meshplan.spec.schema import read_spec
from meshplan.spec.source import (
    MAX_DEPTH,
    MAX_DIGITS,
    MAX_VALUES,
    TOO_DEEP,
    TOO_MANY,
    UNPRINTABLE,
    child_path,
    decoded,
    from_python,
    put,
    read_text,
    split_override,
)
from meshplan.spec.spec import Spec
from meshplan.spec.trust import PERSONS_WORDS, digest_of
from meshplan.spec.values import Findings, PlanValue, missing_space, quote, show

_BEGIN: Final = "begin with version: 1"
_MOST_PARSED, _LONG = 128, 1 << 14
"""`_MOST_PARSED`: number of texts whose yaml events are cached. `_LONG`: maximum length of a cached
text in characters.
"""
_INT: Final = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT: Final = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
_WORDS: Final[Mapping[str, bool | None]] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}


def load_spec(
    source: str | os.PathLike[str] | Mapping[str, Any], overrides: Sequence[str] = ()
) -> Spec:
    """Read a plan file, or the same content as a Python mapping, into a `Spec`.

    Args:
        source: A path, or a mapping with the keys of the file.
        overrides: Statements such as "mesh.tp=2" or "rules[0].place.tp=colwise", applied last;
            an empty value removes a statement.

    Raises:
        SpecError: The plan has problems; the error carries all of them.
    """
    found = Findings()
    plan: PlanValue | None
    if isinstance(source, Mapping):
        name = "<mapping>"
        plan = from_python(source, name, found)
    elif isinstance(source, (str, os.PathLike)):
        name = str(source)
        if name in PERSONS_WORDS:  # Else the file would count as text that the user typed.
            name = os.path.join(os.curdir, name)
        text = read_text(name)
        plan = _YamlComposer(name, found, digest=digest_of(text)).compose(text)
        if plan is None and not found.problems:
            found.add(Origin(name), "the file is empty", _BEGIN)
    else:
        raise SpecError(f"a plan is a path or a mapping, not {type(source).__name__}")
    if plan is not None and not isinstance(plan.data, dict) and not plan.is_broken:
        found.add(plan, f"a plan is a mapping of keys, not {show(plan)}", _BEGIN)
    if plan is None or not isinstance(plan.data, dict):
        raise SpecError(found.problems)
    _check_kind(plan.data, name)
    for override in overrides:
        _override(plan, override, found)
    spec = read_spec(plan, found, _origins(plan), name)
    found.raise_if(True)
    assert spec is not None, "no Spec without a problem"
    return spec


def read_yaml(path: str | os.PathLike[str], most: int, what: str) -> PlanValue:
    """Read a YAML file that is not a plan, with the same limits on depth and number of values.

    Args:
        path: The file.
        most: Maximum size in bytes.
        what: The kind of file, with an article: "a lock".

    Returns:
        The root value; its `data` is None if the file is empty.

    Raises:
        FileNotFoundError: The file does not exist.
        SpecError: The file cannot be read; the error carries every problem found.
    """
    name = os.fspath(path)
    return compose_yaml(decoded(read_bytes(path, most, what), name, what), name)


def compose_yaml(text: str, name: str) -> PlanValue:
    """Read the text of a YAML file that is not a plan; `name` is the file's name for messages.

    Returns:
        The root value; its `data` is None if the text is empty.

    Raises:
        SpecError: The text cannot be read; the error carries every problem found.
    """
    found = Findings()
    value = _YamlComposer(name, found).compose(text)
    found.raise_if(True)
    return value or PlanValue(data=None, origin=Origin(name))


_KINDS: Final = (
    ("model_type", "a model's config", "refer to it in a plan: model: {{config: {name}}}"),
    ("lock", "a lock", "name the plan file that the lock was made for"),
)
"""Kinds of files that are not plans: (a key that only this kind has, its name, the fix)."""


def _check_kind(keys: Mapping[str, PlanValue], name: str) -> None:
    """Raise one error for a file of another kind, instead of one for each of its keys."""
    for key, kind, fix in _KINDS:
        if key in keys and "version" not in keys:
            what = f"this is {kind}, not a plan"
            raise SpecError(Problem(what, Origin(name), fix.format(name=Path(name).name)))


def _override(plan: PlanValue, override: str, found: Findings) -> None:
    """Read one `--set PATH=VALUE` and put it into the plan."""
    parts = split_override(override, found)
    if parts is None:
        return
    path, text = parts
    origin, num_before = Origin("--set", path), len(found.problems)
    # A command line has no anchors: a pattern such as *.norm needs no second pair of quotes.
    if text.startswith("*") or UNPRINTABLE.search(text):
        value: PlanValue | None = PlanValue(data=text, origin=origin, text=text)
    else:
        value = _YamlComposer("--set", found, path, has_lines=False).compose(text)
    if len(found.problems) == num_before:
        put(plan, value or PlanValue(data=None, origin=origin), found)


@dataclass(slots=True)
class _Open:
    """A list or mapping whose end has not been read yet."""

    value: PlanValue
    mark: Any
    pending: tuple[str, Origin] | None = None


@lru_cache(maxsize=_MOST_PARSED)
def _parsed(text: str) -> tuple[yaml.Event, ...] | None:
    """Return the yaml events of a text; None if the text is invalid, long or deeply nested.

    The result is cached, because a planner reads the same text many times. Other texts are parsed
    event by event by the caller, which reports the values before the error, and which can stop
    before yaml becomes slow because of many open brackets.
    """
    if len(text) > _LONG:
        return None
    events, depth = [], 0
    try:
        for event in yaml.parse(text, yaml.SafeLoader):
            events.append(event)
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                return None
    except (yaml.YAMLError, ValueError, OverflowError):
        return None
    return tuple(events)


class _YamlComposer:
    """Compose `PlanValue`s from yaml events.

    Args:
        file: The name for messages.
        found: The findings that problems are added to.
        base: Dotted path of the text's root value in the plan.
        has_lines: False for a text from the command line.
        digest: Hash of a plan file's text. Every origin stores it, so that `trust.check_code` can
            check whether the user trusts this content.
    """

    def __init__(
        self,
        file: str,
        found: Findings,
        base: str = "",
        has_lines: bool = True,
        digest: str = "",
    ) -> None:
        self._file, self._found, self._base, self._has_lines = file, found, base, has_lines
        self._digest = digest
        self._open: list[_Open] = []
        self._anchors: set[str] = set()
        self._root: PlanValue | None = None
        self._num_values = 0

    def compose(self, text: str) -> PlanValue | None:
        """Return the root value; None if the text is empty or a problem stopped the reading."""
        try:
            for event in _parsed(text) or yaml.parse(text, yaml.SafeLoader):
                if not self._take(event, text):
                    return None
        except yaml.MarkedYAMLError as error:
            brackets = [at.mark for at in self._open if text[at.mark.index] in "[{"]
            what, fix, mark = _syntax(error, text, brackets[-1] if brackets else None)
            self._found.add(self._at(mark, ""), what, fix)
            return None
        except SpecError:  # also a ValueError
            raise
        except (yaml.YAMLError, ValueError, OverflowError) as error:
            self._found.add(Origin(self._file, self._base), f"this is not valid YAML: {error}")
            return None
        return self._root

    def _take(self, event: Any, text: str) -> bool:
        """Process one event; return True if reading can continue."""
        if isinstance(event, yaml.DocumentStartEvent) and self._root is not None:
            where = self._at(event.start_mark, "")
            self._found.add(where, "a second document begins here", "keep one plan per file")
            return False
        if isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
            self._attach(self._open.pop().value)
            return True
        if not isinstance(event, yaml.NodeEvent):
            return True
        parent = self._open[-1] if self._open else None
        if parent and isinstance(parent.value.data, dict) and parent.pending is None:
            return self._take_key(event, parent, text)
        value = self._value(event, text)
        if isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent)):
            self._open.append(_Open(value, event.start_mark))
        else:
            self._attach(value)
        self._num_values += 1
        if len(self._open) > MAX_DEPTH:
            self._found.add(self._at(event.start_mark, ""), *TOO_DEEP)
        elif self._num_values > MAX_VALUES:
            self._found.add(self._at(event.start_mark, ""), *TOO_MANY)
        else:
            return True
        return False

    def _take_key(self, event: Any, parent: _Open, text: str) -> bool:
        path = parent.value.origin.path
        if isinstance(event, yaml.AliasEvent):
            self._quote_star(event.start_mark, text, path)
            return False
        if not isinstance(event, yaml.ScalarEvent) or not event.value:
            fix = "put a string that begins with '{' or '[' in quotes"
            self._found.add(self._at(event.start_mark, path), "a key must be a word", fix)
            return False
        parent.pending = event.value, self._at(event.start_mark, child_path(path, event.value))
        return True

    def _value(self, event: Any, text: str) -> PlanValue:
        """Return the value that begins with an event; a list or mapping is still empty."""
        parent = self._open[-1] if self._open else None
        key = parent.pending[1] if parent and parent.pending else None
        if parent is None:
            path = self._base
        elif key is not None:
            path = key.path
        else:
            path = f"{parent.value.origin.path}[{len(parent.value.data)}]"
        origin = self._at(event.start_mark, path)
        broken = PlanValue(data=None, origin=origin, key=key, is_broken=True)
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self._anchors:
                self._quote_star(event.start_mark, text, path)
            return broken
        is_broken = event.anchor is not None or event.tag is not None
        if event.anchor is not None:
            self._anchors.add(event.anchor)
            what = f"anchors such as {quote('&' + event.anchor)} are not supported"
            self._found.add(origin, what, "write the value out wherever it applies")
        elif event.tag is not None:
            self._found.add(
                origin, f"tags such as {quote(event.tag)} are not supported", "remove it"
            )
        data: Any
        if isinstance(event, yaml.MappingStartEvent):
            data = {}
        elif isinstance(event, yaml.SequenceStartEvent):
            data = []
        else:
            is_quoted = event.style in ("'", '"', "|", ">")
            data = event.value if is_quoted or is_broken else _scalar(event.value)
            return PlanValue(
                data=data, origin=origin, text=event.value, key=key,
                is_quoted=is_quoted, is_broken=is_broken,
            )  # fmt: skip
        return PlanValue(data=data, origin=origin, key=key, is_broken=is_broken)

    def _attach(self, value: PlanValue) -> None:
        """Put a finished value into its parent, or make it the root."""
        if not self._open:
            self._root = value
            return
        parent = self._open[-1]
        data = parent.value.data
        if parent.pending is None:
            data.append(value)
            return
        name, key = parent.pending
        parent.pending = None
        if name in data:
            first = data[name].key
            fix = f"it is also at line {first.line}; keep one" if first.line else "keep one"
            self._found.add(key, "this key is given twice", fix)
        else:
            data[name] = value

    def _quote_star(self, mark: Any, text: str, path: str) -> None:
        what, fix = _star(text, mark.index)
        self._found.add(self._at(mark, path), what, fix)

    def _at(self, mark: Any, path: str) -> Origin:
        if not self._has_lines:
            return Origin(self._file, path or self._base)
        return Origin(self._file, path, mark.line + 1, mark.column + 1, self._digest)


def _scalar(text: str) -> Any:
    """Return the Python value of an unquoted scalar in YAML 1.2's core schema."""
    if text in _WORDS:
        return _WORDS[text]
    if len(text) <= MAX_DIGITS and _INT.fullmatch(text):
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
    return float(text.replace(".inf", "inf").replace(".nan", "nan")) if _is_float(text) else text


def _is_float(text: str) -> bool:
    return len(text) <= 2 * MAX_DIGITS and _FLOAT.fullmatch(text.lower()) is not None


def _star(text: str, index: int) -> tuple[str, str]:
    """Return the problem and fix for an unquoted pattern that begins with `*`."""
    found = re.compile(r"[^\s,\[\]#:]{1,60}").match(text, index)
    word = found.group() if found else "*"
    return "a string that begins with '*' must be in quotes", f'write "{word}"'


_SPACELESS: Final = re.compile(r"\s*(?:- +)?(\w+):[^\s/]")


def _syntax(error: yaml.MarkedYAMLError, text: str, bracket: Any) -> tuple[str, str, Any]:
    """Return (what is wrong, fix, mark of the place) for a text that is not valid yaml.

    Args:
        error: The error that yaml raised.
        text: The whole text.
        bracket: The mark of the innermost '[' or '{' that is still open; None if none is.
    """
    problem, context = error.problem or "", error.context or ""
    mark: Any = error.problem_mark or error.context_mark
    start: Any = error.context_mark or mark
    char = text[mark.index] if mark.index < len(text) else ""
    if "alias" in context:
        return *_star(text, start.index), start
    if char == "\t":
        return "a tab is used where YAML allows only spaces", "indent with spaces", mark
    if "cannot start any token" in problem:
        return f"no value can begin with {char!r}", "put the text in quotes", mark
    if "mapping values are not allowed" in problem or "could not find expected ':'" in problem:
        lines = text.splitlines()
        for line in (start.line, mark.line - 1):
            found = _SPACELESS.match(lines[line]) if 0 <= line < len(lines) else None
            if found:
                where = yaml.Mark("", 0, line, found.start(1), None, 0)
                what = f"the key '{found[1]}' and its value are read as one text"
                return what, missing_space(found[1]), where
    if "mapping values are not allowed" in problem:
        fix = "indent the line like the one above, or put a string that contains ': ' in quotes"
        return "this ':' is not allowed here", fix, mark
    if "quoted scalar" in context and "end of stream" in problem:
        return "the quote that opens here is never closed", "close it", start
    if bracket and not char:
        return f"the '{text[bracket.index]}' that opens here is never closed", "close it", bracket
    if bracket and char in "{[":
        return f"a string with {char!r} inside brackets must be in quotes", "put it in quotes", mark
    if bracket:
        opens = f"the '{text[bracket.index]}' of line {bracket.line + 1}"
        return f"{char!r} is not allowed here", f"close {opens}, or add a comma", mark
    if "<scalar>" in problem:
        fix = "put the whole text in the other kind of quotes"
        return "the text goes on after its closing quote", fix, mark
    if "<block end>" in problem:
        fix = "begin all keys of one mapping in the same column"
        return "the indentation fits none of the lines above", fix, mark
    return f"this is not valid YAML: {problem}", "put the text in quotes", mark


def _origins(plan: PlanValue) -> dict[str, Origin]:
    """Return the place of each value, by dotted path; keys without a value are left out."""
    out: dict[str, Origin] = {}
    todo = [plan]
    while todo:
        value = todo.pop()
        if value.data is None:
            continue
        out[value.origin.path] = value.origin
        if isinstance(value.data, dict):
            todo += value.data.values()
        elif isinstance(value.data, list):
            todo += value.data
    return out
