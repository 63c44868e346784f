"""Command-line flags as values: of a shell script, an argument file, or one long command.

A shell script is split into words and nothing in it is run. Variables that the script itself sets
to plain words are filled in, as the lines before a command leave them; where only a run would tell
what a variable is, its flags are refused.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Container
from typing import Any, Final

from meshplan.errors import Origin, Problem, SpecError
from meshplan.interop.configs.texts import UNKNOWN, placed
from meshplan.spec.values import PlanValue

_SET: Final = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_SETS_INSIDE: Final = re.compile(r"(?:^|[\s;(])([A-Za-z_]\w*)\+?=")
_NAME: Final = re.compile(r"\$\{(\w+)(?:\[[@*]\])?(?::?-([^}]*))?\}|\$(\w+)")
_FLAG: Final = re.compile(r"--[A-Za-z][\w.:-]*(?:=.*)?", re.DOTALL)
_STARTS: Final = re.compile(
    r"(.*/)?(torchrun|python[\d.]*|srun|mpirun|deepspeed|accelerate|exec|uv)"
)
_COMPUTED: Final = re.compile(r"\$\(\([^()]*\)\)|\$\([^()]*\)|`[^`]*`")
_REDIRECTION: Final = re.compile(r"(?<!\S)(?:\d*|&)>>?(?:&\d|\s*[^\s;|&]+)")
_MOST_ROUNDS: Final = 8
_MOST_LETTERS: Final = 10**6
_KEYWORDS: Final = ("then", "do", "else", "{", "!", "time")
_DECLARE: Final = ("export", "local", "declare", "readonly", "typeset")
_OPENS: Final = ("if", "for", "while", "until", "case", "select")
_CLOSES: Final = ("fi", "done", "esac")


def parse_flags(text: str, name: str, known: Container[str]) -> PlanValue:
    """Return the flags of a text as a mapping, by name without dashes.

    `--a-b 1` and `--a_b=1` are one key, `a_b`. A flag without a value is true.

    Args:
        text: A script, flags on lines of their own, or only variables with flags.
        name: The file, for places.
        known: The flags that state something; a second command without any is another program.

    Raises:
        SpecError: A quote is not closed, two commands have known flags, or a command has words
            that only a run of the script would give.
    """
    script = _Script(name)
    for number, line in _joined(text):
        script.read(number, line)
    commands = [(number, words) for number, words in script.commands if _has_flags(words, known)]
    if len(commands) > 1:
        (first, _), (second, _) = commands[:2]
        what = f"two commands have flags of a training: one in line {first}, one in line {second}"
        fix = "keep the one that trains, in a file of its own"
        raise SpecError(Problem(what, Origin(name, "", second, 1), fix))
    flags = dict[str, Any]()
    for number, words in commands or script.commands or script.settings():
        _read_words(words, flags, Origin(name, "", number, 1))
    return placed(flags, name, {flag: _place(text, flag) for flag in flags})


def _has_flags(words: list[str], known: Container[str]) -> bool:
    named = (word.lstrip("-").partition("=")[0] for word in words if _FLAG.fullmatch(word))
    return any(flag.replace("-", "_") in known for flag in named)


class _Script:
    """Follow a script line by line: the values of its variables, and its commands with flags.

    A variable that is set under a condition, or by a command, has no value.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._variables = dict[str, str | None]()
        self._lines = dict[str, int]()
        self._depth = 0
        self._bare: list[str] | None = None
        self.commands: list[tuple[int, list[str]]] = []

    def read(self, number: int, line: str) -> None:
        words = _words(self._filled(line), number, self._name)
        for place, word in enumerate(words[1:], 1):
            if words[place - 1] in ("-c", "eval") and re.search(r"\s--", word):
                words[place : place + 1] = _words(word, number, self._name)
                break
        statement, is_sure = list[str](), True
        for word in [*words, ";"]:
            if not re.fullmatch(r"[;&|]+", word):
                statement.append(word)
                continue
            self._read_statement(number, statement, is_sure=is_sure)
            statement, is_sure = [], word not in ("&&", "||")

    def settings(self) -> list[tuple[int, list[str]]]:
        """Return the words of all variables, for a file that has nothing else.

        Raises:
            SpecError: One with flags has no value.
        """
        return [
            (self._lines[key], _words(value or f"${key}", self._lines[key], self._name))
            for key, value in self._variables.items()
            if value is None or "--" in value
        ]

    def _filled(self, line: str) -> str:
        """Return a line with the values of variables, and with $_ for what commands print."""
        body = line.replace("\n", " ").strip()
        for _ in range(_MOST_ROUNDS):
            body, count = _COMPUTED.subn("$_", body)
            if not count:
                break
        body = re.sub(r'"(\$\{\w+\[@\]\})"', r"\1", _REDIRECTION.sub(" ", body))

        def value_of(found: re.Match[str]) -> str:
            key = found[1] or found[3]
            if key not in self._variables:
                return found[0] if found[2] is None else found[2]
            value = self._variables[key]
            return found[0] if value is None else value

        filled = _NAME.sub(value_of, body)
        return filled if len(filled) <= _MOST_LETTERS else body

    def _read_statement(self, number: int, words: list[str], *, is_sure: bool) -> None:
        while words and words[0] in _KEYWORDS:
            words = words[1:]
        if not words:
            return
        self._depth += (words[0] in _OPENS) - (words[0] in _CLOSES)
        is_sure = is_sure and self._depth == 0
        if not is_sure:
            for key in _SETS_INSIDE.findall(" ".join(words)):
                self._set(key, None, number)
        is_declared = words[0] in _DECLARE
        while words and (words[0] in _DECLARE or (is_declared and words[0].startswith("-"))):
            words = words[1:]
        while words and (found := _SET.fullmatch(words[0])) is not None:
            key, plus, value = found.groups()
            words = words[1:]
            if value.startswith("("):
                parts = [value[1:]]
                while words and not parts[-1].endswith(")"):
                    parts.append(words[0])
                    words = words[1:]
                parts[-1] = parts[-1].removesuffix(")")
                value = " ".join(shlex.quote(part) for part in parts if part)
                plus = plus and " "
            if words and not is_declared and not _SET.fullmatch(words[0]):
                break  # It is set for one command only.
            if is_sure:
                old = self._variables.get(key, "") if plus else ""
                new = None if old is None else f"{old}{plus.strip('+')}{value}"
                self._set(key, new, number)
        if any(_FLAG.fullmatch(word) for word in words):
            self._add_command(number, words)

    def _set(self, key: str, value: str | None, number: int) -> None:
        self._variables[key] = value
        self._lines[key] = number

    def _add_command(self, number: int, words: list[str]) -> None:
        if words[0].startswith("--"):  # Flags on lines of their own are one command.
            if self._bare is None:
                self._bare = []
                self.commands.append((number, self._bare))
            self._bare += words
            return
        start = next((at for at, word in enumerate(words) if _STARTS.fullmatch(word)), 0)
        self.commands.append((number, words[start:]))


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


def _words(body: str, number: int, name: str) -> list[str]:
    try:
        lexer = shlex.shlex(body, posix=True, punctuation_chars=";&|<>")
        lexer.whitespace_split, lexer.commenters = True, ""
        return list(lexer)
    except ValueError as error:
        what = f"the words cannot be separated: {str(error).lower()}"
        raise SpecError(Problem(what, Origin(name, "", number, 1), "close the quote")) from None


def _read_words(words: list[str], flags: dict[str, Any], origin: Origin) -> None:
    """Read the flags of one command."""
    flag, is_short = "", False
    for word in words:
        takes_word = is_short or (flag and flags[flag] is True)
        is_short = False
        if _FLAG.fullmatch(word):
            flag, equals, value = word.lstrip("-").partition("=")
            flag = flag.replace("-", "_")
            flags[flag] = _scalar(value) if equals else True
            flag = "" if equals else flag
        elif not takes_word and re.fullmatch(r"\$[^/]*|--\S*\s.*", word, re.DOTALL):
            what = f"nothing in the file says which flags are in {word[:60]}"
            fix = "write the flags out, or set the variable once, outside if and loops"
            raise SpecError(Problem(what, origin, fix))
        elif re.fullmatch(r"[<>&]+|-[A-Za-z][\w-]*", word) or word.endswith(".py"):
            flag, is_short = "", word.startswith("-")
        elif flag:
            old = flags[flag]
            new = _scalar(word)
            flags[flag] = new if old is True else [*(old if isinstance(old, list) else [old]), new]


def _scalar(word: str) -> Any:
    """Return a word of a command line as a number or a truth value, if it looks like one."""
    if "$" in word or "`" in word:
        return UNKNOWN
    if re.fullmatch(r"[-+]?\d{1,30}", word):
        return int(word)
    if re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", word.lower()):
        return float(word)
    return {"true": True, "false": False}.get(word.lower(), word)
