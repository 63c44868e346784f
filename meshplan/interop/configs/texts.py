"""The text of another tool's file as values with places: JSON, YAML, TOML.

JSON is read as the flow style of YAML, so that its values have lines and columns, after comments
and tabs, which JSON of DeepSpeed (hjson) may have and YAML may not, became spaces.
"""

from __future__ import annotations

import re
import tomllib
from typing import Any, Final

import yaml

from meshplan.errors import Origin, Problem, SpecError
from meshplan.files import read_bytes
from meshplan.spec.reader import compose_yaml
from meshplan.spec.source import MAX_DEPTH, MAX_VALUES, child_path, decoded
from meshplan.spec.values import PlanValue

MOST_BYTES: Final = 10**6
WHAT: Final = "a configuration file"
UNKNOWN: Final = "(computed by the program)"
"""The value of an expression or a variable that only a run of the program would give."""

_JSON_TOKEN: Final = re.compile(
    r'"(?:[^"\\\n]|\\.)*"|(?P<comment>//[^\n]*|/\*.*?\*/|(?<![^\s,{\[])\#[^\n]*)', re.DOTALL
)
_TOML_HEAD: Final = re.compile(r"\s*\[\[?([^\[\]]+)\]\]?\s*(?:#.*)?$")
_TOML_KEY: Final = re.compile(r"""(\s*)((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*[\w"'-]+)*)\s*=""")


def read_config_text(path: str) -> str:
    """Return the text of a configuration file.

    Raises:
        SpecError: It does not exist, is no regular file, too large, or no text.
    """
    try:
        return decoded(read_bytes(path, MOST_BYTES, WHAT), path, WHAT)
    except FileNotFoundError:
        fix = "give the path of a configuration file"
        raise SpecError(Problem("there is no such file", Origin(path), fix)) from None


def parse_json(text: str, name: str) -> PlanValue:
    """Return the values of a JSON text, which may have comments.

    Raises:
        SpecError: The text is not valid.
    """

    def blank(found: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", found[0]) if found["comment"] else found[0]

    return compose_yaml(_JSON_TOKEN.sub(blank, text).replace("\t", " "), name)


def parse_yaml(text: str, name: str) -> PlanValue:
    """Return the values of a YAML text.

    Raises:
        SpecError: The text is not valid, or has anchors or tags.
    """
    return compose_yaml(text, name)


def parse_toml(text: str, name: str) -> PlanValue:
    """Return the values of a TOML text.

    Raises:
        SpecError: The text is not valid.
    """
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        where = re.search(r"\(at line (\d+), column (\d+)\)", str(error))
        line, column = (int(where[1]), int(where[2])) if where else (0, 0)
        what = f"this is not valid TOML: {str(error).partition(' (at ')[0]}"
        raise SpecError(Problem(what, Origin(name, "", line, column), "correct it")) from None
    return placed(data, name, _toml_places(text))


def _toml_places(text: str) -> dict[str, tuple[int, int]]:
    """Return line and column of each key, by dotted path."""
    places, section = dict[str, tuple[int, int]](), ""
    for number, line in enumerate(text.splitlines(), 1):
        if head := _TOML_HEAD.match(line):
            section = re.sub(r"[\s\"']", "", head[1])
            places.setdefault(section, (number, 1))
        elif key := _TOML_KEY.match(line):
            path = child_path(section, re.sub(r"[\s\"']", "", key[2]))
            places.setdefault(path, (number, len(key[1]) + 1))
    return places


def placed(data: Any, name: str, places: dict[str, tuple[int, int]]) -> PlanValue:
    """Return plain data as values whose places are looked up by dotted path.

    Raises:
        SpecError: The data has too many values or levels.
    """
    count = 0

    def convert(data: Any, path: str, depth: int) -> PlanValue:
        nonlocal count
        count += 1
        line, column = places.get(path, (0, 0))
        origin = Origin(name, path, line, column)
        if count > MAX_VALUES or depth > MAX_DEPTH:
            what = f"the file has more than {MAX_VALUES:,} values or {MAX_DEPTH} levels"
            raise SpecError(Problem(what, origin, "name a configuration file"))
        if isinstance(data, dict):
            inner = {
                str(key): convert(value, child_path(path, str(key)), depth + 1)
                for key, value in data.items()
            }
            return PlanValue(data=inner, origin=origin, key=origin)
        if isinstance(data, (list, tuple)):
            entries = [convert(each, f"{path}[{n}]", depth + 1) for n, each in enumerate(data)]
            return PlanValue(data=entries, origin=origin, key=origin)
        if not isinstance(data, (bool, int, float, str, type(None))):
            data = str(data)  # a date of TOML
        return PlanValue(
            data=data, origin=origin, text=str(data), key=origin, is_quoted=isinstance(data, str)
        )

    return convert(data, "", 0)


def dump_yaml(tree: object) -> str:
    """Return a tree of plain values as YAML, in its own order of keys."""
    return yaml.safe_dump(tree, sort_keys=False)
