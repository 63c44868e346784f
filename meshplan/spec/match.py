r"""Selectors: match names against a pattern, fold names into patterns, and suggest near misses.

    *           one name, or part of one       layers.*.attn    block*
    **.         any number of names, also none **.norm          layers.**.wq
    **          everything below; alone, the whole model        layers.**
    ?           one character                  layers.?
    {a,b}       any of these, nested as you like                attn.{wq,wk}
    {0..18}     these numbers                  layers.{0..3,7}
    /.../       a regular expression for the whole name         /layers\.\d+/

Names are plain strings here; `assign` matches rules against a model.
"""

from __future__ import annotations

import difflib
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final

from meshplan.spec.spec import Selector

_MAX_RANGE: Final = 1_000
"""Maximum number of values of a range, more than any model has blocks or experts."""
_MAX_LENGTH: Final = 4096
_SIMPLE: Final = 3
"""Maximum number of wildcards and braces of a glob that is compiled with `re`. `re` is imported
anyway, but backtracks; globs with more of them are compiled with RE2.
"""
_MAX_MEMORY: Final = 1 << 24
"""Maximum number of bytes that one compiled pattern may use."""

_TOKEN: Final = re.compile(
    r"(?P<range>(?<=[{,])[0-9]{1,30}\.\.[0-9]{1,30}(?=[,}]))"
    r"|(?P<below>(?:\*\*\.)+(?!$))|(?P<deep>\*\*)|(?P<star>\*)|(?P<one>\?)"
    r"|(?P<open>\{)|(?P<close>\})|(?P<comma>,)|(?P<dot>\.)|(?P<bracket>[\[\]])"
    r"|(?P<name>[^*?{},.\[\]]+)"
)


class PatternError(ValueError):
    """The error of a pattern that is not valid; `fix` is what to write instead, or ""."""

    def __init__(self, what: str, fix: str = "") -> None:
        super().__init__(what)
        self.fix = fix


@dataclass(frozen=True, slots=True)
class Matcher:
    """A compiled selector."""

    selector: Selector
    pattern: Any = None
    """A compiled pattern of `re` or of RE2; None for selectors of module types."""

    def matches(self, fqn: str, type: str = "", qualified_type: str = "") -> bool:
        """Return True if the selector matches this module or, for a `param`, this parameter.

        Args:
            fqn: Fully qualified name, "" for the root module.
            type: Class name of a module.
            qualified_type: Class name with its module path.
        """
        if self.pattern is None:
            return self.selector.text in (type, qualified_type)
        return self.pattern.fullmatch(fqn) is not None


def compile_selector(selector: Selector) -> Matcher:
    """Return the matcher of a selector.

    Raises:
        PatternError: The pattern is not valid.

    >>> matcher = compile_selector(Selector("glob", "layers.{0..3}.attn.{wq,wk}"))
    >>> matcher.matches("layers.2.attn.wk"), matcher.matches("layers.4.attn.wk")
    (True, False)
    """
    if not selector.text:
        raise PatternError("the pattern is empty", "write a name, or ** for the whole model")
    if selector.kind == "type":
        return Matcher(selector)
    if len(selector.text) > _MAX_LENGTH:
        what = f"the pattern has {len(selector.text):,} characters, more than {_MAX_LENGTH:,}"
        raise PatternError(what, "split the pattern into several rules")
    if selector.kind == "regex":
        return Matcher(selector, _linear(selector.text, f"/{selector.text}/"))
    return Matcher(selector, _of_glob(selector.text))


def _of_glob(glob: str) -> Any:
    """Compile a glob; use RE2 if the glob could make Python's engine backtrack."""
    text = _regex(glob)
    if sum(glob.count(sign) for sign in ("{", "*")) > _SIMPLE:
        return _linear(text, glob)
    try:
        return re.compile(text)
    except (RecursionError, OverflowError):
        raise PatternError(
            "the pattern is nested too deeply", "split the pattern into several rules"
        ) from None


def _linear(text: str, shown: str) -> Any:
    """Compile a pattern with RE2, which matches in time linear in the length of the name.

    Raises:
        PatternError: The pattern is not a regular expression, or has look-around or backreferences.
    """
    import re2  # The import takes a few milliseconds; few plans need it.

    options = re2.Options()
    options.log_errors = False
    options.max_mem = _MAX_MEMORY
    try:
        return re2.compile(text, options)
    except re2.error as error:
        (reason,) = error.args
        reason = reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)
        fix = ""
        if reason.startswith(("invalid perl operator", "invalid escape")):
            fix = "write the pattern in RE2 syntax, without look-around and backreferences"
        elif "too large" in reason:
            fix = "split the pattern into several rules"
        shown, reason = (text if len(text) < 100 else f"{text[:99]}…" for text in (shown, reason))
        raise PatternError(f"'{shown}' is not a valid regular expression: {reason}", fix) from None


def fold(names: Iterable[str]) -> list[str]:
    """Fold names into few patterns: names that differ only in numbers become one line.

    Each pattern takes the position of its first name and matches exactly its own names.

    >>> fold(f"layers.{i}.attn.{w}" for i in range(4) for w in ("wq", "wk"))
    ['layers.{0..3}.attn.wq', 'layers.{0..3}.attn.wk']
    >>> fold(["norm", "layers.0.norm", "layers.2.norm", "layers.5.norm"])
    ['norm', 'layers.{0,2,5}.norm']
    """
    rows = list(dict.fromkeys(tuple(name.split(".")) for name in names))
    for position in reversed(range(max(map(len, rows), default=0))):
        groups: dict[tuple[tuple[str, ...], ...], list[tuple[str, ...]]] = {}
        for row in rows:
            is_number = position < len(row) and _is_number(row[position])
            key = (row[:position], row[position + 1 :]) if is_number else (row,)
            groups.setdefault(key, []).append(row)
        rows = [
            (*key[0], _numbers(int(row[position]) for row in group), *key[1])
            if len(group) > 1
            else group[0]
            for key, group in groups.items()
        ]
    return [".".join(row) for row in rows]


def nearest(pattern: str, names: Iterable[str]) -> str | None:
    """Return a pattern similar to this one that matches some of `names`; None if none is similar.

    First, each part between dots that matches no name is replaced by the most similar name at its
    position. If this gives no pattern, return the most similar name with `*` for its numbers,
    preferably a name with the same last part.

    >>> nearest("layers.{0..3}.atn.wq", ["layers.0.attn.wq", "layers.0.attn.wk", "norm"])
    'layers.{0..3}.attn.wq'
    >>> nearest("layers.*.wq", ["layers.0.attn.wq", "layers.1.attn.wq", "norm"])
    'layers.*.attn.wq'
    """
    rows, general = _shapes(tuple(names))
    parts = _parts(pattern)
    mended = _mend(parts, rows)
    if mended and mended != pattern:
        return mended
    same_end = _fitting(parts[-1], (row[-1] for row in general.values()))
    ends_alike = [name for name, row in general.items() if row[-1] in same_end]
    return near(pattern, ends_alike) or near(pattern, general)


@lru_cache(maxsize=8)
def _shapes(
    names: tuple[str, ...],
) -> tuple[Sequence[tuple[str, ...]], Mapping[str, tuple[str, ...]]]:
    """Return (the parts of each name, one name for each pattern with `*` for numbers)."""
    rows = tuple(dict.fromkeys(tuple(name.split(".")) for name in names if name))
    general = {any_number(".".join(row)): row for row in rows}
    return rows, MappingProxyType(general)


def any_number(name: str) -> str:
    """Return the pattern of the names that differ from this one in numbers only.

    >>> any_number("layers.11.mlp")
    'layers.*.mlp'
    """
    return ".".join("*" if _is_number(part) else part for part in name.split("."))


def near(word: str, words: Iterable[str]) -> str | None:
    """Return the most similar of `words`, ignoring case; None when none is similar.

    >>> near("colwize", ["colwise", "rowwise"]), near("banana", ["colwise", "rowwise"])
    ('colwise', None)
    >>> near("gpus", ["gpu", "gpus_per_node"])
    'gpus_per_node'
    """
    by_lower = {w.lower(): w for w in words}
    longer = [w for w in by_lower if word and w.startswith(f"{word.lower()}_")]
    if len(longer) == 1:
        return by_lower[longer[0]]
    close = difflib.get_close_matches(word[:200].lower(), by_lower, n=1)
    return by_lower[close[0]] if close else None


_NUMBERED: Final = re.compile(
    r"([^{}]*)\{({N}(?:\.\.{N})?(?:,{N}(?:\.\.{N})?)*)\}([^{}]*)".replace("{N}", "[0-9]{1,30}")
)


def numbers_without(glob: str, names: Iterable[str]) -> str:
    """Return the numbers in a glob's only braces for which it matches no name; "" for none.

    >>> numbers_without("h.{0..9}.mlp", ["h.0.mlp", "h.1.mlp"]), numbers_without("h.{0,1}", ["h.1"])
    ('{2..9}', '{0}')
    >>> numbers_without("h.{0..999999999999}", ["h.0", "h.7"])
    '{1..6,8..999999999999}'
    """
    found = _NUMBERED.fullmatch(glob)
    if found is None:
        return ""
    before, numbers, after = found.groups()
    text = _regex(f"{before}\0{after}").replace("\0", "([0-9]{1,30})")
    form = _linear(text, glob) if glob.count("*") >= _SIMPLE else re.compile(text)
    matches = (form.fullmatch(name) for name in names)
    there = sorted({int(match[1]) for match in matches if match is not None})
    # A range may have more numbers than fit into memory: go from one that is there to the next.
    runs, begin = [], 0
    ends = (each.partition("..") for each in numbers.split(","))
    for low, high in sorted((int(first), int(last or first)) for first, _, last in ends):
        begin = max(begin, low)
        for number in there[bisect_left(there, begin) :]:
            if number > high:
                break
            runs.append((begin, number - 1))
            begin = number + 1
        runs.append((begin, high))
        begin = max(begin, high + 1)
    return _in_braces((first, last) for first, last in runs if first <= last)


def _regex(glob: str) -> str:
    """Return the regular expression that is equivalent to a glob.

    Raises:
        PatternError: The glob is not valid.
    """
    if glob == "**":
        return ".*"
    missing = "}" if glob.count("{") > glob.count("}") else "{"
    if glob.count("{") != glob.count("}"):
        raise PatternError(f"a '{missing}' is missing in '{glob}'")
    out: list[str] = []
    open_braces = 0
    for found in _TOKEN.finditer(glob):
        kind, text = found.lastgroup or "", found.group()
        before, after = glob[: found.start()], glob[found.end() :]
        starts = not before or before[-1] in ".{" or (before[-1] == "," and open_braces > 0)
        ends = not after or after[0] in ".}" or (after[0] == "," and open_braces > 0)
        if kind == "range":
            out.append(_alternatives(text))
        elif kind in ("below", "deep"):
            if not (starts and (ends or kind == "below")):
                raise PatternError(
                    f"'**' in '{glob}' must stand alone between dots",
                    "write * to match part of a name",
                )
            out.append(r"(?:[^.]+\.)*" if kind == "below" else ".+")
        elif kind == "star":
            out.append("[^.]+" if starts and ends else "[^.]*")
        elif kind == "one":
            out.append("[^.]")
        elif kind == "open":
            open_braces += 1
            if after.startswith("}"):
                raise PatternError(f"the braces in '{glob}' are empty")
            out.append("(?:")
        elif kind == "close":
            open_braces -= 1
            if open_braces < 0:
                raise PatternError(f"a '}}' comes before its '{{' in '{glob}'")
            out.append(")")
        elif kind == "comma":
            out.append("|" if open_braces else ",")
        elif kind == "dot":
            if starts or ends:
                raise PatternError(
                    f"'{glob}' has an empty name next to a dot",
                    "write a range as {0..18}" if ".." in glob else "remove the dot",
                )
            out.append(r"\.")
        elif kind == "bracket":
            raise PatternError(
                f"'{text}' is not supported in the pattern '{glob}'",
                "write {0..3} for numbers, {a,b} for names, or /.../ for a regular expression",
            )
        else:
            out.append(re.escape(text))
    return "".join(out)


def _alternatives(text: str) -> str:
    """Return a regex of the numbers in a range such as `0..18`; `00..18` keeps leading zeros."""
    low, high = text.split("..")
    first, last = int(low), int(high)
    if first > last:
        raise PatternError(f"the range {{{text}}} counts down", f"write {{{high}..{low}}}")
    if last - first >= _MAX_RANGE:
        raise PatternError(f"the range {{{text}}} has more than {_MAX_RANGE:,} numbers", "write *")
    width = len(low) if low.startswith("0") else 0
    return f"(?:{'|'.join(str(number).zfill(width) for number in range(first, last + 1))})"


def _is_number(part: str) -> bool:
    return len(part) < 10 and part.isascii() and part.isdigit() and str(int(part)) == part


def _numbers(numbers: Iterable[int]) -> str:
    """Format numbers as `{0..3,7}`, with runs of three and more as a range."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return _in_braces((run[0], run[-1]) for run in runs)


def _in_braces(runs: Iterable[tuple[int, int]]) -> str:
    """Format (first, last) of runs of numbers as `{0..3,7}`; "" for none."""
    words: list[str] = []
    for first, last in runs:
        is_short = last - first < 2
        words += map(str, range(first, last + 1)) if is_short else [f"{first}..{last}"]
    return "{" + ",".join(words) + "}" if words else ""


def _parts(glob: str) -> list[str]:
    """Split a glob at the dots outside braces."""
    parts, depth = [""], 0
    for char in glob:
        depth += (char == "{") - (char == "}")
        if char == "." and not depth:
            parts.append("")
        else:
            parts[-1] += char
    return parts


def _mend(parts: Sequence[str], rows: Sequence[tuple[str, ...]]) -> str | None:
    """Return a pattern whose unmatched parts are replaced by similar names; None if impossible."""
    here = {(row, 0) for row in rows}
    kept: list[str] = []
    for part in parts:
        if part == "**":
            here = {(row, at) for row, start in here for at in range(start, len(row) + 1)}
        else:
            there = {(row, at) for row, at in here if at < len(row)}
            names = dict.fromkeys(row[at] for row, at in there)
            fitting = _fitting(part, names)
            if not fitting:
                close = near(part, sorted(names))
                if close is None:
                    return None
                part, fitting = close, {close}
            here = {(row, at + 1) for row, at in there if row[at] in fitting}
        kept.append(part)
    return ".".join(kept) if any(at == len(row) for row, at in here) else None


def _fitting(part: str, names: Iterable[str]) -> set[str]:
    try:
        pattern = _of_glob(part)
    except PatternError:
        return set()
    return {name for name in names if pattern.fullmatch(name)}
