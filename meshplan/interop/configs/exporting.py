"""Export: the file of another tool from a plan, and a list of what that file cannot say."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from meshplan.errors import Origin, PlanError, Problem, SpecError
from meshplan.interop.configs.importing import ConfigTool, shortly
from meshplan.interop.configs.statements import (
    Facts,
    facts_of,
    split_microbatches,
    word_of,
)
from meshplan.interop.configs.table import ABSENT
from meshplan.shown import shown
from meshplan.spec.spec import Spec
from meshplan.spec.values import join, quote

_DECISIVE: Final = ("strategy", "mesh.", "precision", "batch.", "pipeline.", "offload.")
"""Without these, the file would train another plan."""
_OUTSIDE: Final = "the training program states it"
_LEFT_OPEN: Final = ("batch.", "optimizer")
"""Facts of which a plan that leaves them out assumes nothing, or what the program states."""
_LAUNCHED: Final = ("hardware.nodes", "hardware.gpus_per_node", "world_size")


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedConfig:
    """The configuration file of another tool, made from a plan.

    Args:
        tool: Name of the tool.
        text: The file.
        unsaid: What the plan states and the file does not say: pairs (statement, why).
        assumed: What the tool assumes because the file does not say it, and the plan leaves open:
            pairs (statement, why).
        is_decisive: True if something of `unsaid` is about layouts or the batch, so that the tool
            would train otherwise than the plan.
    """

    tool: str
    text: str
    unsaid: tuple[tuple[str, str], ...]
    assumed: tuple[tuple[str, str], ...] = ()
    is_decisive: bool


def check_name(path: str, to: str, tools: Mapping[str, ConfigTool]) -> None:
    """Refuse a name for the file of a tool that ends as files of another form do.

    Raises:
        SpecError: The name ends so, or there is no such tool.
    """
    _check_tool(to, tools)
    form, endings = tools[to].written
    stem, ending = os.path.splitext(path)
    if ending and ending not in endings:
        what = f"the file for {tools[to].title} is {form}, and {ending} ends names of another form"
        raise SpecError(Problem(what, Origin(path), f"write -o {stem}{endings[0]}"))


def _check_tool(to: str, tools: Mapping[str, ConfigTool]) -> None:
    if to not in tools:
        fix = f"write --to {join(tools)}"
        raise SpecError(Problem(f"there is no tool {quote(to)}", Origin("--to"), fix))


def export_spec(spec: Spec, to: str, tools: Mapping[str, ConfigTool]) -> ExportedConfig:
    """Translate a plan whose choices are all made.

    Raises:
        SpecError: There is no such tool.
        PlanError: The plan leaves something to the planner.
    """
    _check_tool(to, tools)
    if spec.free_fields:
        fix = "run meshplan plan first, so that its lock decides them, or state them"
        raise PlanError(
            [Problem(f"'{path}' is left to the planner", spec.origin(path), fix)
             for path in spec.free_fields]
        )  # fmt: skip
    tool = tools[to]
    facts = facts_of(spec)
    if tool.counts_microbatches:
        split_microbatches(facts)
    stated = dict(facts)
    whys = dict(tool.unsettle(facts) or {})
    translated = stated.keys() - facts.keys() - whys.keys()
    tree: dict[str, Any] = {}
    said = _write(tool, facts, tree) | translated
    if lost := _lost_axes(stated, said, whys):
        # So many ranks would contradict the axes that the file has, which tools refuse or fill up.
        for name in _LAUNCHED:
            if name in said:
                whys[name] = f"the file lacks {join(lost)}: its axes have fewer ranks"
        tree = {}
        kept = {name: value for name, value in facts.items() if name not in whys}
        said = _write(tool, kept, tree) | translated
    _imply_batch(stated, said)
    if "strategy" not in whys:
        _imply_data_axis(stated, said)
    unsaid = {name: value for name, value in stated.items() if name not in said}
    unsaid |= {name: stated.get(name, facts.get(name)) for name in whys}
    for name in [*_LAUNCHED, *tool.implied]:
        if name not in whys:
            unsaid.pop(name, None)
    for name, value in tool.assumed.items():
        if name not in whys and unsaid.get(name) == value:
            unsaid.pop(name)
    if unsaid.get("tp_plan") == tool.tp_plan:
        unsaid.pop("tp_plan")
    whys |= {name: _OUTSIDE for name in unsaid if name.startswith(tool.outside)}
    decisive = [name for name in unsaid if name.startswith(_DECISIVE)]
    return ExportedConfig(
        tool=to,
        text=tool.dump(tree),
        unsaid=tuple(
            (f"{name}: {word_of(value)}", whys.get(name, f"{tool.title} has no key for it"))
            for name, value in unsaid.items()
        ),
        assumed=tuple(_assumed(tool, stated, said)),
        is_decisive=any(whys.get(name) != _OUTSIDE for name in decisive),
    )


def _assumed(tool: ConfigTool, facts: Facts, said: set[str]) -> Iterator[tuple[str, str]]:
    """Yield what the tool assumes of facts that neither the plan nor the file states."""
    for row in tool.table.honoured():
        is_open = row.plan.startswith(_LEFT_OPEN) and row.plan not in facts and row.plan not in said
        if not is_open or not row.is_written:
            continue
        if row.values is None or row.default is ABSENT or row.none is not ABSENT:
            continue
        meaning = row.values.read(row.default)
        if meaning is not ABSENT and meaning != getattr(Spec(), row.plan, None):
            why = f"{row.path} is {shortly(row.default)} if left out"
            yield f"{row.plan}: {word_of(meaning)}", why


def _lost_axes(facts: Facts, said: set[str], whys: Mapping[str, str]) -> list[str]:
    """Return the axes, besides data axes, that a tool has no key for."""
    return [
        name for name, size in facts.items()
        if name in ("mesh.pp", "mesh.cp", "mesh.tp") and size > 1
        and (name in whys or name not in said)
    ]  # fmt: skip


def _write(tool: ConfigTool, facts: Facts, tree: dict[str, Any]) -> set[str]:
    """Write the facts into a tree by the first row that can say each; return those said."""
    said: set[str] = set()
    for row in tool.table.honoured():
        assert row.values is not None
        if row.plan in said or not row.is_written:
            continue
        if row.plan in facts:
            value = row.values.write(facts[row.plan])
            if value is not ABSENT:
                said.add(row.plan)
                put_path(tree, row.path, value)
        elif row.none is not ABSENT:
            put_path(tree, row.path, row.none)
    return said


def put_path(tree: dict[str, Any], path: str, value: Any) -> None:
    """Put a value into nested mappings at a dotted path."""
    *parents, last = path.split(".")
    for part in parents:
        tree = tree.setdefault(part, {})
    tree[last] = value


def _imply_batch(facts: Facts, said: set[str]) -> None:
    """Count the third of three batch sizes as said: two of them imply it."""
    sizes = {"batch.micro", "batch.accumulate", "batch.global"}
    if len(sizes & said) == 2 and all(isinstance(facts.get(each), int) for each in sizes):
        said.update(sizes)


def _imply_data_axis(facts: Facts, said: set[str]) -> None:
    """Count a data axis as said if it has all ranks that the other axes leave."""
    data = [name for name in ("mesh.dp_replicate", "mesh.dp_shard") if facts.get(name, 1) > 1]
    if len([name for name in data if name not in said]) == 1 and len(data) == 1:
        said.update(data)
