"""Command-line flags as values: of a shell script, an argument file, or one long command.

A shell script is split into words and nothing in it is run. Variables that the script itself sets
to plain words are filled in.
"""

from __future__ import annotations

import re
import shlex
from typing import Any, Final

from meshplan.errors import Origin, Problem, SpecError
from meshplan.interop.configs.texts import UNKNOWN, placed
from meshplan.spec.values import PlanValue

_SET: Final = re.compile(r"\s*(?:export\s+|local\s+|declare\s+(?:-\w+\s+)?)?([A-Za-z_]\w*)\+?=(.*)")
_NAME: Final = re.compile(r"\$\{(\w+)(?:\[[@*]\])?(?::?-([^}]*))?\}|\$(\w+)")
_FLAG: Final = re.compile(r"--[A-Za-z][\w.:-]*(?:=.*)?", re.DOTALL)
_STARTS: Final = re.compile(
    r"(.*/)?(torchrun|python[\d.]*|srun|mpirun|deepspeed|accelerate|exec|uv)"
)
_MOST_ROUNDS: Final = 8


def parse_flags(text: str, name: str) -> PlanValue:
    """Return the flags of a text as a mapping, by name without dashes.

    `--a-b 1` and `--a_b=1` are one key, `a_b`. A flag without a value is true.

    Raises:
        SpecError: A quote is not closed, or there are too many words.
    """
    lines = _joined(text)
    variables = _variables(lines)
    commands, settings = list[list[str]](), list[list[str]]()
    for number, line in lines:
        found = _SET.match(line.replace("\n", " "))
        words = _words(found[2] if found else line, number, name, variables)
        if found:
            settings.append(words)
        elif words and (_STARTS.fullmatch(words[0]) or words[0].startswith("--")):
            commands.append(words)
    flags = dict[str, Any]()
    for words in commands or settings:
        _read_words(words, flags)
    return placed(flags, name, {flag: _place(text, flag) for flag in flags})


def _place(text: str, flag: str) -> tuple[int, int]:
    """Return line and column of the first mention of a flag."""
    spelled = re.compile("--" + re.escape(flag).replace("_", "[-_]") + r"(?![\w-])")
    found = spelled.search(text)
    if found is None:
        return 0, 0
    before = text[: found.start()]
    return before.count("\n") + 1, found.start() - before.rfind("\n")


def _joined(text: str) -> list[tuple[int, str]]:
    """Return (number of its first line, line), with continued lines joined and without comments.

    The lines of an array, `NAME=(` to `)`, are one line.
    """
    out: list[tuple[int, str]] = []
    current, first, is_array = "", 0, False
    for number, raw in enumerate(text.splitlines(), 1):
        line = re.sub(r"(^|\s)#.*$", "", raw).rstrip()
        first = first or number
        is_array = is_array or re.search(r"=\($|=\([^)]*$", line) is not None
        goes_on = line.endswith("\\")
        current += (line[:-1] if goes_on else line) + "\n"
        is_array = is_array and not line.rstrip().endswith(")")
        if not goes_on and not is_array:
            out.append((first, current))
            current, first = "", 0
    return [*out, (first, current)] if current.strip() else out


def _variables(lines: list[tuple[int, str]]) -> dict[str, str]:
    variables = dict[str, str]()
    for _, line in lines:
        found = _SET.fullmatch(line.rstrip("\n")) or re.match(_SET, line.replace("\n", " "))
        if found is not None:
            value = found[2].strip()
            value = value[1:-1] if value[:1] == "(" and value[-1:] == ")" else value
            if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
                value = value[1:-1]
            if "$(" not in value and "`" not in value:
                variables[found[1]] = value
    return variables


def _words(line: str, number: int, name: str, variables: dict[str, str]) -> list[str]:
    body = line.replace("\n", " ").strip()
    for _ in range(_MOST_ROUNDS):
        filled = _NAME.sub(
            lambda found: variables.get(found[1] or found[3], found[2] or found[0]), body
        )
        if filled == body or len(filled) > 10**6:
            break
        body = filled
    if body.startswith("(") and body.endswith(")"):
        body = body[1:-1]
    try:
        lexer = shlex.shlex(body, posix=True, punctuation_chars=";&|<>")
        lexer.whitespace_split, lexer.commenters = True, ""
        return list(lexer)
    except ValueError as error:
        what = f"the words cannot be separated: {str(error).lower()}"
        raise SpecError(Problem(what, Origin(name, "", number, 1), "close the quote")) from None


def _read_words(words: list[str], flags: dict[str, Any]) -> None:
    """Read the flags of one command; those of another command behind `;` or `|` are its own."""
    flag = ""
    for word in words:
        if _FLAG.fullmatch(word):
            flag, equals, value = word.lstrip("-").partition("=")
            flag = flag.replace("-", "_")
            flags[flag] = _scalar(value) if equals else True
            flag = "" if equals else flag
        elif re.fullmatch(r"[;&|<>]+", word) or word.endswith(".py") or _is_short_flag(word):
            flag = ""
        elif flag:
            old = flags[flag]
            new = _scalar(word)
            flags[flag] = new if old is True else [*(old if isinstance(old, list) else [old]), new]


def _is_short_flag(word: str) -> bool:
    """Return True for a flag such as -m, which is of the launcher."""
    return re.fullmatch(r"-[A-Za-z]", word) is not None


def _scalar(word: str) -> Any:
    """Return a word of a command line as a number or a truth value, if it looks like one."""
    if "$" in word or "`" in word:
        return UNKNOWN
    if re.fullmatch(r"[-+]?\d{1,30}", word):
        return int(word)
    if re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", word.lower()):
        return float(word)
    return {"true": True, "false": False}.get(word.lower(), word)
