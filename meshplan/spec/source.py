"""The sources of a plan: the text of a file, a Python mapping, `--set` on the command line.

This module reads and decodes the file, converts Python values, splits `--set PATH=VALUE`, and puts
such a value into the plan. yaml is parsed in `reader`; the keys are defined in `schema`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from meshplan.errors import Origin, Problem, SpecError
from meshplan.files import read_bytes
from meshplan.spec.match import near
from meshplan.spec.values import Findings, PlanValue, quote, show

MAX_FILE_BYTES: Final = 10**6
MAX_DEPTH: Final = 32
MAX_VALUES: Final = 20_000
MAX_DIGITS: Final = 30

TOO_DEEP: Final = (
    f"values are nested more than {MAX_DEPTH} levels deep",
    "remove levels: no key of a plan needs more than 5",
)
TOO_MANY: Final = (
    f"the plan has more than {MAX_VALUES:,} values",
    "use fewer rules with wider patterns, such as layers.*",
)

UNPRINTABLE: Final = re.compile(
    "[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]"
)
"""Characters that YAML does not allow in a file."""


def read_text(name: str) -> str:
    """Read the text of a plan file.

    Raises:
        SpecError: The file cannot be read, is not text, or is far too large for a plan.
    """
    if os.path.isdir(name):
        plans = sorted(
            path.name for path in Path(name).glob("*.y*ml") if not path.name.endswith(".lock.yaml")
        )
        fix = f"give a file in it, such as {plans[0]}" if plans else "give the path of a plan file"
        raise SpecError(Problem("this is a directory, not a plan file", Origin(name), fix))
    try:
        return decoded(read_bytes(name, MAX_FILE_BYTES, "a plan"), name, "a plan")
    except FileNotFoundError:
        raise SpecError(Problem("there is no such file", Origin(name), _sibling(name))) from None


def decoded(data: bytes, name: str, what: str) -> str:
    """Return the content of a file as text.

    Args:
        data: The content of the file.
        name: The file's name for messages.
        what: The kind of file, with an article: "a plan".

    Raises:
        SpecError: The content is not text that YAML allows.
    """
    origin = Origin(name)
    if b"\0" in data:
        problem = "this is a binary file, not text"
        raise SpecError(Problem(problem, origin, f"{what} is a text file in UTF-8"))
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8-sig")
        problem = f"the byte 0x{data[error.start]:02x} is not UTF-8 text"
        where = _place(before, len(before), origin)
        raise SpecError(Problem(problem, where, "save the file as UTF-8")) from None
    strange = UNPRINTABLE.search(text)
    if strange:
        problem = f"the character {strange.group()!r} is not allowed in {what}"
        raise SpecError(Problem(problem, _place(text, strange.start(), origin), "remove it"))
    return text


def _place(text: str, index: int, origin: Origin) -> Origin:
    line_start = text.rfind("\n", 0, index) + 1
    return Origin(origin.file, "", text.count("\n", 0, index) + 1, index - line_start + 1)


def _sibling(name: str) -> str:
    """Return the fix for a missing file: if possible, an existing file with a similar name."""
    path = Path(name)
    if name.endswith(".lock.yaml"):
        plan = path.with_name(path.name.removesuffix(".lock.yaml") + ".yaml")
        if plan.exists():
            return f"meshplan plan -f {plan} writes this lock"
    try:
        names = sorted(entry.name for entry in path.parent.iterdir() if entry.is_file())
    except OSError:
        return f"there is no directory {quote(str(path.parent))} either"
    alike = [name for name in names[:1000] if near(path.stem, [Path(name).stem])]
    close = near(path.name, alike)  # The same ending alone would make any two names similar.
    return f"did you mean '{path.with_name(close)}'?" if close else "give the path of a plan file"


def child_path(path: str, key: str) -> str:
    """Return the dotted path of a key; a long or unprintable key is shortened and escaped."""
    name = key if key.isprintable() and len(key) <= 60 else quote(key)[1:-1]
    return f"{path}.{name}" if path else name


def from_python(data: Any, name: str, found: Findings) -> PlanValue:
    """Convert a Python mapping into `PlanValue`s.

    Raises:
        SpecError: The mapping contains itself, or is far too large for a plan.
    """
    num_values = 0

    def convert(data: Any, path: str, depth: int) -> PlanValue:
        nonlocal num_values
        num_values += 1
        origin = Origin(name, path)
        if depth > MAX_DEPTH or num_values > MAX_VALUES:
            found.add(origin, *(TOO_DEEP if depth > MAX_DEPTH else TOO_MANY))
            found.raise_if(True)
        value: Any = None
        if isinstance(data, Mapping):
            value = {}
            for key, inner in data.items():
                if isinstance(key, (str, int)) and key != "":
                    value[str(key)] = convert(inner, child_path(path, str(key)), depth + 1)
                else:
                    what = f"a key must be a non-empty string, not {quote(repr(key))}"
                    found.add(origin, what, "use a string as the key")
        elif isinstance(data, (list, tuple)):
            value = [convert(inner, f"{path}[{i}]", depth + 1) for i, inner in enumerate(data)]
        elif isinstance(data, str):
            return PlanValue(data=data, origin=origin, text=data, is_quoted=True)
        elif data is None or isinstance(data, (bool, float)) or _is_short(data):
            return PlanValue(data=data, origin=origin, text=str(data).lower())
        else:
            what = f"a plan cannot contain a value of type {type(data).__name__}"
            fix = "use strings, numbers below 1e30, true, false, lists and mappings"
            found.add(origin, what, fix)
        is_broken = value is None
        return PlanValue(data=value, origin=origin, is_broken=is_broken)

    return convert(data, "", 0)


def _is_short(data: Any) -> bool:
    return isinstance(data, int) and abs(data) < 10**MAX_DIGITS


_STEP: Final = re.compile(r"(?:^|\.)(\w+)|\[([0-9]{1,6})\]")
_PATH: Final = re.compile(r"\w+(?:\.\w+|\[[0-9]{1,6}\])*")


def split_override(override: str, found: Findings) -> tuple[str, str] | None:
    """Split one `--set PATH=VALUE` into the path and the value's text; None if it is malformed."""
    path, equals, text = (part.strip() for part in override.partition("="))
    if equals and _PATH.fullmatch(path):
        return path, text
    what = f"{quote(override)} is not PATH=VALUE"
    found.add(Origin("--set"), what, "write something like --set mesh.tp=2")
    return None


def put(plan: PlanValue, value: PlanValue, found: Findings) -> None:
    """Put a value into the plan at its own path, creating the mappings that lead to it."""
    steps = [int(index) if index else name for name, index in _STEP.findall(value.origin.path)]
    here, at = plan, ""
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        data, problem, fix = here.data, "", f"set {at} as a whole"
        if isinstance(step, str) and not isinstance(data, dict):
            problem = f"{at} is {show(here)}, not a mapping with a key '{step}'"
            fix += f": --set '{at}={{{step}: {show(value) if following is None else '...'}, ...}}'"
        elif isinstance(step, int) and not isinstance(data, list):
            problem = f"{at} is {show(here)}, not a list with an entry [{step}]"
        elif isinstance(step, int) and step > len(data):
            problem = f"{at} has {len(data)} entries; setting [{step}] would leave a gap"
            fix += f", or an entry up to [{len(data)}]"
        if problem:
            if not here.is_broken:
                found.add(value.origin, problem, fix)
            return
        if isinstance(step, int):
            data += [None] * (step + 1 - len(data))
            inside, at = data[step], f"{at}[{step}]"
        else:
            inside, at = data.get(step), child_path(at, step)
        if following is None:
            inside = value
        elif inside is None or inside.data is None:
            empty: Any = [] if isinstance(following, int) else {}
            inside = PlanValue(data=empty, origin=Origin(value.origin.file, at))
        data[step] = here = inside
