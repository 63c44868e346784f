"""Parts of the reference that are made from the code: the flags of verbs, GPUs, messages."""

from __future__ import annotations

import argparse
import html
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from meshplan.cli.app import VERBS
from meshplan.interop.configs.statements import IN_RULES
from meshplan.interop.configs.tools import TOOLS
from meshplan.layout.hardware import Device, devices
from meshplan.spec.keys import KEYS
from meshplan.spec.meanings import MEANINGS
from meshplan.units import GIB
from tools.docs.messages import collect

_DTYPES: Final = ("float32", "bfloat16", "float16", "float8_e4m3fn")
_TITLES: Final = {
    "spec": "Reading a plan",
    "launch": "Starting ranks",
    "model": "Reading a model or its config",
    "assign": "Applying a plan to a model",
    "layout": "Meshes, layouts and hardware",
    "plan": "Checking a plan",
    "state": "Saved training states",
    "textbook": "Textbook formulas",
    "memory": "Estimating memory",
    "cost": "Estimating time, profiles",
    "planner": "Planning and locks",
    "runtime": "Wrapping, training and verifying a live model",
    "pictures": "Pictures",
    "report": "Reports",
    "interop": "Other tools: their trainers, their files",
    "api": "Functions of Python",
    "cli": "The command line",
    "files.py": "Files",
    "units.py": "Numbers with units",
}
"""What each room of the package does when it finds a problem; a room without a title has none."""


def keys_table(section: str) -> str:
    """Return the keys of one section of the plan reference, with meaning and default."""
    if section == "Rules":
        rows = [(path.removeprefix("rules."), means) for path, means in MEANINGS[section].items()]
        return _table(["key of a rule", "values"], rows)
    keys = {key.path: key for key in KEYS}
    head = ["key", "values", "if left out", "chosen by `plan`"]
    return _table(
        head,
        [
            (path, means, keys[path].default, "yes" if keys[path].chosen else "")
            if path in keys
            else (path, means, "", "")
            for path, means in MEANINGS[section].items()
        ],
    )


def _table(head: list[str], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ["---"] * len(head), *([f"`{row[0]}`", *row[1:]] for row in rows)]
    return "".join(f"| {' | '.join(cells)} |\n".replace("|  |", "| |") for cells in lines)


def config_keys_part(tool: str) -> str:
    """Return the keys of another tool's files: what each states in a plan, or why it does not."""
    rows = TOOLS[tool].table.rows
    head = "| key | in a plan | |\n|---|---|---|\n"
    shown = {"honoured": "yes", "irrelevant": "nothing", "refused": "refused"}
    lines = [
        f"| `{row.path}` | {_in_plan(row.plan) or shown[row.verdict]} | {_cell(row.note)} |\n"
        for row in rows
        if not _is_nested(row.path, tool)
    ]
    return head + "".join(lines)


def _in_plan(fact: str) -> str:
    """Return the key of a plan that says a fact; "" if it is a part of one, or of several."""
    key = IN_RULES.get(fact, fact)
    return f"`{key}`" if key in _STATED or fact in IN_RULES else ""


_STATED: Final = {path for paths in MEANINGS.values() for path in paths} | {
    "offload.params", "offload.optimizer", "offload.activations", "ddp.bucket_mb",
    "ddp.find_unused_parameters", "ddp.static_graph", "ddp.broadcast_buffers",
    "ddp.gradient_as_bucket_view",
}  # fmt: skip
"""Facts that are keys of a plan; others are parts of one, such as the dtype of reductions."""


def _is_nested(path: str, tool: str) -> bool:
    """Return True for DeepSpeed's keys inside of another tool's file: they have their own page."""
    inside = ("deepspeed.", "deepspeed_config.deepspeed_config_file.",
              "trainer.strategy.init_args.config.", "distributed_config.")  # fmt: skip
    return tool != "deepspeed" and path.startswith(inside)


def verbs_part() -> str:
    """Return a section for each verb, with its own flags."""
    lines = ["## Flags by verb", ""]
    for verb in VERBS:
        parser = argparse.ArgumentParser(prog=f"meshplan {verb.name}", add_help=False)
        verb.add_flags(parser)
        own = parser._actions
        usage = " ".join(parser.format_usage().split()).removeprefix("usage: ")
        lines += [f"### `{verb.name}`", "", f"{verb.help[0].upper()}{verb.help[1:]}.", ""]
        lines += ["```text", usage, "```", ""]
        if own:
            lines += ["| argument | |", "|---|---|", *map(_flag, own), ""]
    return "\n".join(lines)


def _flag(action: argparse.Action) -> str:
    name = ", ".join(action.option_strings) or str(action.metavar or action.dest)
    if action.option_strings and action.nargs != 0:
        choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else ""
        name += f" {action.metavar or choices or action.dest.upper()}"
    return f"| `{name}` | {_cell(action.help or '')} |"


def gpus_part() -> str:
    """Return the hardware table, and the remarks and sources of each device."""
    dtypes = [dtype.partition("_")[0] for dtype in _DTYPES]
    head = ["name", "GiB", *dtypes, "bf16 reached", "memory GB/s", "node GB/s", "network GB/s"]
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    for device in devices().values():
        figures = [device.peak_flops.get(dtype) for dtype in _DTYPES]
        cells = [
            f"`{device.name}`", f"{device.usable_bytes / GIB:.1f}",
            *(_figure(flops, 1e12) for flops in figures), _figure(device.product_flops, 1e12),
            _figure(device.memory_bytes_per_s, 1e9), _figure(device.intra_bytes_per_s, 1e9),
            _figure(device.inter_bytes_per_s, 1e9),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "## Remarks and sources", ""]
    for device in devices().values():
        lines += _sources(device)
    return "\n".join(lines)


def _sources(device: Device) -> Iterator[str]:
    yield f"**`{device.name}`**" + (f": {device.note}" if device.note else "")
    yield ""
    yield from (f"- {_cell(source)}" for source in device.all_sources)
    yield ""


def _figure(value: float | None, unit: float) -> str:
    return "" if value is None else f"{value / unit:,.4g}"


def messages_part(package: Path) -> str:
    """Return every message with its fix, by the room that makes it and its source file."""
    found = collect(package)
    lines: list[str] = []
    for room, title in _TITLES.items():
        of_room = [message for message in found if message.module.split("/")[0] == room]
        lines += [f"## {title}", ""]
        for file in dict.fromkeys(message.module for message in of_room):
            lines += [f"### `{file}`", "", '<dl class="messages">']
            of_file = [message for message in of_room if message.module == file]
            for key, alike in itertools.groupby(of_file, key=lambda each: (each.where, each.what)):
                lines.append(_message(*key, [message.fix for message in alike if message.fix]))
            lines += ["</dl>", ""]
    return "\n".join(lines)


def untitled_rooms(package: Path) -> set[str]:
    """Return the rooms that make messages and have no title here."""
    return {message.module.split("/")[0] for message in collect(package)} - _TITLES.keys()


def _message(where: str, what: str, fixes: list[str]) -> str:
    """Return a message as an item of a list of definitions, with each of its fixes."""
    key = f"<code>{_escaped(where)}</code>: " if where else ""
    return f"<dt>{key}{_code(what)}</dt>" + "".join(f"<dd>{_code(fix)}</dd>" for fix in fixes)


def _code(text: str) -> str:
    """Return a message as HTML, what it has in backquotes as code."""
    parts = re.split(r"`([^`]+)`", text)
    return "".join(
        f"<code>{_escaped(part)}</code>" if number % 2 else _escaped(part)
        for number, part in enumerate(parts)
    )


def _escaped(text: str) -> str:
    return html.escape(" ".join(text.split()), quote=False)


def _cell(text: str) -> str:
    """Return text for a cell of a table, in which nothing is Markdown."""
    return re.sub(r"([|*_<\\\[])", r"\\\1", text % {"default": ""} if "%(" in text else text)
