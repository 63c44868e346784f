"""The text of a plan made from another tool's file: each line says what it translates."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

from meshplan.interop.configs.statements import (
    Draft,
    StatedFact,
    leaves,
    precision_of,
    word_of,
)
from meshplan.spec.json_schema import EDITOR_LINE

_COMMENT_COLUMN: Final = 34
_WIDTH: Final = 100
_SECTIONS: Final = ("hardware", "mesh", "batch", "pipeline", "context", "experts", "ddp")
_PLAIN: Final = re.compile(r"[A-Za-z_][\w./-]*(?: \w+)*")
_RULES: Final = ("units", "reshard_after_forward", "tp_rules", "recompute_units")
_NO_HARDWARE: Final = """\
# The file does not say how many GPUs of which kind there are. State them, and the model, for
# `meshplan plan` and `meshplan estimate`:
# hardware: {nodes: 1, gpus_per_node: 8, gpu: h100-sxm-80gb}
"""
_NO_MODEL: Final = '# model: {config: config.json}    # or {entry: "pkg.mod:build"}\n'


def plan_to_text(
    draft: Draft, title: str, source: str, left_out: Sequence[tuple[str, str]] = ()
) -> str:
    """Return the content of a commented plan file.

    Args:
        draft: The settled facts.
        title: The tool's name.
        source: Name of the imported file.
        left_out: Keys that the plan does not say, with the reason.
    """
    facts = dict(draft.facts)
    lines = [EDITOR_LINE, f"# Imported from {_one_line(source)}, a configuration of {title}."]
    lines += [f"# {note}" for each in draft.notes for note in _wrapped(each)]
    lines += ["version: 1", ""]
    text = _NO_MODEL if "hardware.gpus_per_node" in facts else _NO_HARDWARE + _NO_MODEL
    lines += [*text.splitlines(), ""]
    body = [(name, each) for name, each in leaves(facts) if name not in _RULES]
    for section in _SECTIONS:
        inside = [(name, each) for name, each in body if name.startswith(f"{section}.")]
        if section == "hardware" and inside:
            lines += [*_section(section, inside), ""]
    done = {"hardware"}
    for name, each in body:
        section = name.partition(".")[0]
        if section in done:
            continue
        inside = [pair for pair in body if pair[0].startswith(f"{section}.")]
        if section == "offload":
            done.add(section)
            lines.append(_offload(inside))
        elif section in _SECTIONS:
            done.add(section)
            lines += _section(section, inside)
        elif name == "precision":
            lines += _line(f"precision: {word_of(precision_of(each.value))}", each)
        else:
            lines += _line(f"{name}: {_value(each.value)}", each)
    rules = [line for name in _RULES if name in facts for line in _rules(name, facts[name])]
    lines += ["rules:", *rules] if rules else []
    if left_out:
        lines += ["", "# Left out of this plan:"]
        lines += [
            f"# {piece}"
            for key, why in left_out
            for piece in _wrapped(f"- {_one_line(key)}: {why}")
        ]
    return "\n".join(lines) + "\n"


def _section(section: str, inside: Iterable[tuple[str, StatedFact]]) -> list[str]:
    lines = [f"{section}:"]
    for name, each in inside:
        key = name.removeprefix(f"{section}.")
        value = f'"{each.value}"' if name == "mesh.ep" else _value(each.value)
        lines += _line(f"  {key}: {value}", each)
    return lines


def _offload(inside: Sequence[tuple[str, StatedFact]]) -> str:
    parts = {name.removeprefix("offload."): each.value for name, each in inside}
    if parts.get("params"):
        parts.pop("optimizer", None)  # The optimizer's state is where the parameters are.
    value = next(iter(parts)) if len(parts) == 1 and "activations" not in parts else word_of(parts)
    sources = tuple(source for _, each in inside for source in each.sources)
    return "\n".join(_line(f"offload: {value}", StatedFact(None, sources)))


def _rules(name: str, statement: StatedFact) -> list[str]:
    value = statement.value
    if name == "tp_rules":
        return [
            line
            for pattern, style in value
            for line in _line(
                f"  - {{match: {json.dumps(pattern)}, place: {{tp: {style}}}}}", statement
            )
        ]
    if name == "reshard_after_forward":
        return _line(f'  - {{match: "**", reshard_after_forward: {_value(value)}}}', statement)
    match = ", ".join(f"{{type: {_value(each)}}}" for each in value)
    match = match if len(value) == 1 else f"[{match}]"
    setting = "unit: true" if name == "units" else "activation_checkpointing: full"
    return _line(f"  - {{match: {match}, {setting}}}", statement)


def _line(text: str, statement: StatedFact) -> list[str]:
    """Return a line with its sources behind it, or above it if there is no room."""
    words = "; ".join(map(_one_line, statement.sources))
    if not words:
        return [text]
    line = f"{text:{_COMMENT_COLUMN - 2}}  # {words}"
    if len(line) <= _WIDTH:
        return [line]
    indent = " " * (len(text) - len(text.lstrip()))
    return [*(f"{indent}# {piece}" for piece in _wrapped(words)), text]


def _value(value: Any) -> str:
    if isinstance(value, str):
        is_word = value.lower() in ("true", "false", "null", "yes", "no")
        return value if _PLAIN.fullmatch(value) and not is_word else json.dumps(value)
    return word_of(value)


def _one_line(text: str) -> str:
    """Return text for a comment: no line of a stranger's file becomes a line of the plan."""
    return "".join(char if char.isprintable() else " " for char in text)[:300]


def _wrapped(text: str, width: int = 96) -> list[str]:
    out, line = [], ""
    for word in _one_line(text).split():
        if line and len(line) + 1 + len(word) > width:
            out.append(line)
            line = "  " + word if text.startswith("- ") else word
        else:
            line = f"{line} {word}" if line else word
    return [*out, line] if line else out
