"""Import: every key of a file is honoured, irrelevant or refused; the honoured ones are a plan."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from meshplan.errors import Origin, Problem, SpecError
from meshplan.interop.configs.plan_text import plan_to_text
from meshplan.interop.configs.runnable import refuse_what_does_not_run
from meshplan.interop.configs.statements import IN_RULES, Draft, Facts, StatedFact, settle
from meshplan.interop.configs.table import (
    ABSENT,
    ConfigKey,
    ConfigTable,
    Refusal,
    Translation,
    Verdict,
    WrongFormError,
)
from meshplan.interop.configs.texts import UNKNOWN, parse_json, parse_yaml, read_config_text
from meshplan.shown import shown
from meshplan.spec.match import near
from meshplan.spec.reader import load_spec
from meshplan.spec.source import child_path
from meshplan.spec.values import PlanValue, join, plain, quote, show

_MOST_SHOWN: Final = 60
_MOST_FILES: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigTool:
    """One tool: how its files look, its table, and what several keys say together.

    Args:
        name: The word for `--from` and `--to`.
        title: The name in sentences.
        looked_for: What its files are recognised by, for the error that nothing was.
        table: The rows.
        suffixes: Names of its files end with one of these.
        written: What export writes, in words, and how the names of such files end, the usual
            ending first.
        parse: Makes values of a text; None for YAML, or JSON if the name ends so.
        recognises: Returns True if a file is of this tool, from its root keys and the whole tree.
        prepare: Changes the tree before the rows read it.
        settle: Relates facts of several keys, after the rows have read them.
        always: Sections whose defaults count although the file leaves them out.
        grafts: Keys whose value may be the name of another file that belongs here.
        unsettle: The reverse of `settle`: changes the facts so that the rows can write them, and
            returns why some cannot be said, by name.
        dump: The text of a file from a tree of plain values.
        implied: Facts that follow from others whenever this tool runs.
        assumed: Facts that hold if the file says nothing of their name.
        outside: Beginnings of facts that the tool leaves to the training program.
        tp_plan: What an import takes for tensor parallelism if the file says only how many ranks.
        counts_microbatches: True if the tool's microbatch goes through a pipeline by itself, and
            the accumulated ones are those of the pipeline.
    """

    name: str
    title: str
    looked_for: str
    table: ConfigTable
    suffixes: tuple[str, ...]
    written: tuple[str, tuple[str, ...]]
    recognises: Callable[[PlanValue], bool]
    unsettle: Callable[[Facts], Mapping[str, str] | None]
    dump: Callable[[Any], str]
    parse: Callable[[str, str], PlanValue] | None = None
    prepare: Callable[[PlanValue], None] = lambda root: None
    settle: Callable[[Draft, PlanValue], None] = lambda draft, root: None
    always: tuple[str, ...] = ()
    grafts: tuple[str, ...] = ()
    implied: tuple[str, ...] = ()
    assumed: Mapping[str, Any] = field(default_factory=dict)
    outside: tuple[str, ...] = ("batch.seq_len",)
    tp_plan: str = "auto"
    counts_microbatches: bool = True


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class TranslatedKey:
    """A key of a file, and what became of it.

    Args:
        key: Dotted path in the file.
        value: The value, as plain data.
        verdict: honoured, irrelevant or refused.
        plan_key: The plan's key that says it; "" if none does.
        note: Why, and what to do.
        origin: The place in the file.
    """

    key: str
    value: Any
    verdict: Verdict
    plan_key: str = ""
    note: str = ""
    origin: Origin | None = field(default=None, compare=False)


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedPlan:
    """A plan made from a configuration file of another tool.

    Args:
        tool: Name of the tool.
        file: The file.
        keys: What became of every key, in the file's order.
        text: The plan file; without the keys that were refused.
        notes: Remarks on the plan as a whole.
    """

    tool: str
    file: str
    keys: tuple[TranslatedKey, ...]
    text: str
    notes: tuple[str, ...] = ()

    def of(self, verdict: Verdict) -> tuple[TranslatedKey, ...]:
        """Return the keys with one verdict."""
        return tuple(key for key in self.keys if key.verdict == verdict)

    @property
    def is_whole(self) -> bool:
        """True if no key was refused."""
        return not self.of("refused")


def import_file(
    path: str,
    tools: Mapping[str, ConfigTool],
    *,
    tool: str | None = None,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    gpu: str | None = None,
) -> ImportedPlan:
    """Translate a file, or the only one of a folder that a tool recognises.

    Raises:
        SpecError: No tool recognises it, or it cannot be read, or contradicts itself.
    """
    if tool is not None and tool not in tools:
        fix = f"write --from {join(tools)}"
        raise SpecError(Problem(f"there is no tool {quote(tool)}", Origin("--from"), fix))
    if os.path.isdir(path):
        path = _only_file(path, tools, tool)
    read, root = _recognise(path, read_config_text(path), tools, tool)
    return _translate(read, root, path, nodes, gpus_per_node, gpu)


def _only_file(folder: str, tools: Mapping[str, ConfigTool], tool: str | None) -> str:
    """Return the only configuration file of a folder."""
    suffixes = {each for one in tools.values() for each in one.suffixes}
    files = sorted(each for each in Path(folder).iterdir() if each.suffix in suffixes)
    found = []
    for each in files[:_MOST_FILES]:
        try:
            known, _ = _recognise(str(each), read_config_text(str(each)), tools, None)
        except SpecError:
            continue
        found += [str(each)] if tool in (None, known.name) else []
    if len(found) == 1:
        return found[0]
    what = f"the folder has {len(found) or 'no'} configuration files that import reads"
    fix = f"name one: {', '.join(found[:8])}" if found else _looked_for(tools)
    raise SpecError(Problem(what, Origin(folder), fix))


def _looked_for(tools: Mapping[str, ConfigTool]) -> str:
    return "looked for " + "; ".join(f"{tool.looked_for} ({tool.name})" for tool in tools.values())


def _parse(tool: ConfigTool, text: str, path: str) -> PlanValue:
    if tool.parse is not None:
        return tool.parse(text, path)
    return parse_any(text, path)


def parse_any(text: str, path: str) -> PlanValue:
    """Return the values of a JSON text, if it begins as one, else of a YAML text."""
    is_json = path.endswith((".json", ".hjson")) or text.lstrip()[:1] in ("{", "/")
    return parse_json(text, path) if is_json else parse_yaml(text, path)


def _recognise(
    path: str, text: str, tools: Mapping[str, ConfigTool], tool: str | None
) -> tuple[ConfigTool, PlanValue]:
    """Return the tool of a file, and its values."""
    if tool is not None:
        root = _parse(tools[tool], text, path)
        _check_mapping(root)
        return tools[tool], root
    errors: list[SpecError] = []
    trees: dict[Any, PlanValue | None] = {}
    for each in tools.values():
        if not path.endswith(each.suffixes):
            continue
        if each.parse not in trees:
            try:
                trees[each.parse] = _parse(each, text, path)
            except SpecError as error:
                trees[each.parse] = None
                errors.append(error)
        parsed = trees[each.parse]
        if parsed is not None and isinstance(parsed.data, dict) and each.recognises(parsed):
            return each, parsed
    for parsed in filter(None, trees.values()):
        if isinstance(parsed.data, dict) and {"version", "strategy"} <= parsed.data.keys():
            fix = "meshplan export writes the file of another tool from it"
            raise SpecError(Problem("this is a plan already", Origin(path), fix))
    if errors:
        raise errors[0]
    what = "no tool has a configuration file like this"
    fix = f"name the tool with --from, or the right file; {_looked_for(tools)}"
    if not text.strip():
        what, fix = "the file is empty", _looked_for(tools)
    elif "torch.distributed.launch" in text:
        what = "this script states nothing but the ranks that torch.distributed.launch starts"
        fix = "write strategy: ddp into plan.yaml, call meshplan.parallelize(model, 'plan.yaml'), "
        fix += "and start the program with meshplan launch or torchrun"
    raise SpecError(Problem(what, Origin(path), fix))


def _check_mapping(root: PlanValue) -> None:
    if not isinstance(root.data, dict):
        what = f"a configuration is a mapping of keys, not {show(root)}"
        raise SpecError(Problem(what, root.origin, "name a configuration file"))


class _KeyReader:
    """Read every key of a tree by the rows of its table."""

    def __init__(self, tool: ConfigTool) -> None:
        self._tool, self.draft = tool, Draft()
        self.keys: list[TranslatedKey] = []
        self.facts_of: dict[str, str] = {}
        self.present: set[str] = set()

    def read(self, root: PlanValue) -> None:
        for path, value in self._leaves(root, ""):
            self._read_key(path, value)
        for row in self._tool.table.honoured():
            self._assume_default(row)

    def _leaves(self, value: PlanValue, path: str) -> Iterator[tuple[str, PlanValue]]:
        table = self._tool.table
        if path and (table.covers(path) or not isinstance(value.data, dict) or not value.data):
            yield path, value
            return
        self.present.add(path)
        for key, child in value.data.items():
            yield from self._leaves(child, child_path(path, key))

    def _read_key(self, path: str, value: PlanValue) -> None:
        table, data = self._tool.table, plain(value)
        row = table.row(path)
        self.present.add(path if row is None else row.path)
        inner = table.section(path) if row is None else None
        if data == {} or (data is None and (row is not None or inner is not None)):
            self._add(path, value, "irrelevant", note="it is empty")
        elif inner is not None:
            what = f"{path} is a section of keys, not {show(value)}"
            fix = f"write the keys that are meant, such as {path}.{inner}, or leave it out"
            self.draft.problems.append(Problem(what, value.origin, fix))
        elif row is None:
            close = table.nearest(path)
            hint = f"did you mean {close}?" if close else "remove it, or say what it means"
            why = f"{self._tool.title} has no such key that is known here; {hint}"
            self._add(path, value, "refused", note=why)
        elif row.verdict == "refused" and not _is_off(data, row):
            self._add(path, value, "refused", note=row.note)
        elif row.verdict == "refused":
            self._add(path, value, "irrelevant", note="it is switched off")
        elif row.values is None:
            self._add(path, value, "irrelevant", note=row.note)
        else:
            self._translate(path, value, row, data)

    def _translate(self, path: str, value: PlanValue, row: ConfigKey, data: Any) -> None:
        assert row.values is not None
        if data == UNKNOWN:
            self._add(path, value, "refused", note=f"the program computes it: state {row.plan}")
            return
        if data == "auto" and "auto" not in row.values.form:
            why = f"'auto' is filled in by the program that loads the file; state {row.plan} here"
            self._add(path, value, "irrelevant", note=why)
            return
        try:
            meaning = row.values.read(data)
        except WrongFormError as error:
            what = f"{path} must be {row.values.form}, not {show(value)}"
            fix = _close(data, row.values) or f"write {error}"
            self.draft.problems.append(Problem(what, value.origin, fix))
            return
        if isinstance(meaning, Refusal):
            self._add(path, value, "refused", note=meaning.why)
        elif meaning is ABSENT:
            self._add(path, value, "irrelevant", note=row.note or "a plan means this without it")
        else:
            self._add(path, value, "honoured", row.plan, row.note)
            self.facts_of[path] = row.plan
            words = f"{path}: {shortly(data)}"
            self.draft.add(row.plan, StatedFact(meaning, (words,), value.origin))

    def _assume_default(self, row: ConfigKey) -> None:
        section = row.path.rpartition(".")[0]
        is_there = section in self.present or any(
            section == each or section.startswith(f"{each}.") for each in self._tool.always
        )
        if row.default is ABSENT or row.path in self.present or not is_there:
            return
        assert row.values is not None
        meaning = row.values.read(row.default)
        if meaning is not ABSENT:
            words = f"{row.path} is {shortly(row.default)} if left out"
            self.draft.add(row.plan, StatedFact(meaning, (words,), None, is_default=True))

    def _add(
        self, path: str, value: PlanValue, verdict: Verdict, plan: str = "", note: str = ""
    ) -> None:
        self.keys.append(
            TranslatedKey(key=path, value=plain(value), verdict=verdict, plan_key=plan, note=note,
                          origin=value.key or value.origin)
        )  # fmt: skip


def _close(data: Any, values: Translation) -> str:
    """Return what was probably meant by a value of another form, as a fix; "" if nothing is."""
    if not isinstance(data, str):
        return ""
    word = near(data, [shortly(each) for each in values.words])
    if word is not None:
        return f"did you mean {word}?"
    try:
        number = float(data)
        number = int(number) if number == int(number) else number
        values.read(number)
    except (ValueError, OverflowError, WrongFormError):
        return ""
    return f"write {number} without quotes"


def _is_off(data: Any, row: ConfigKey) -> bool:
    """Return True for a value that switches a refused key off, or a section that says so itself."""
    is_off = isinstance(data, dict) and _same(data.get("enabled", True), False)
    return is_off or any(_same(data, each) for each in row.harmless)


def _same(data: Any, other: Any) -> bool:
    is_flag = isinstance(data, bool) or isinstance(other, bool)
    if is_flag and isinstance(data, str):
        return data.lower() == str(other).lower()
    return data == other and (not is_flag or isinstance(data, bool) == isinstance(other, bool))


def shortly(data: Any) -> str:
    """Return a value of a file on one line and not too long."""
    text = str(data).lower() if isinstance(data, bool) else str(data)
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 1] + "…"


def _graft(tool: ConfigTool, root: PlanValue, path: str) -> None:
    """Replace names of files that belong to this one by their content."""
    for key in tool.grafts:
        *parents, last = key.split(".")
        here = root
        for part in parents:
            here = here.data.get(part, here) if isinstance(here.data, dict) else here
        value = here.data.get(last) if isinstance(here.data, dict) else None
        if value is None or not isinstance(value.data, str) or value.data in ("", "none"):
            continue
        name = os.path.join(os.path.dirname(path), value.data)
        if not os.path.isfile(name):
            what = f"{key} names {quote(value.data)}, which is not there"
            raise SpecError(Problem(what, value.origin, "put the file there, or correct the name"))
        inner = parse_any(read_config_text(name), name)
        _check_mapping(inner)
        here.data[last] = inner


def _translate(
    tool: ConfigTool,
    root: PlanValue,
    path: str,
    nodes: int | None,
    gpus_per_node: int | None,
    gpu: str | None,
) -> ImportedPlan:
    _graft(tool, root, path)
    tool.prepare(root)
    reader = _KeyReader(tool)
    reader.read(root)
    if not reader.keys:
        # All of the plan would be what the tool assumes.
        what = f"the file states nothing that {tool.title} reads"
        fix = f"name another file, or another tool with --from; looked for {tool.looked_for}"
        raise SpecError(Problem(what, Origin(path), fix))
    draft = reader.draft
    draft.counts_microbatches = tool.counts_microbatches
    if not draft.problems:
        tool.settle(draft, root)
        settle(draft, nodes, gpus_per_node)
        refuse_what_does_not_run(draft)
    if draft.problems:
        raise SpecError(draft.problems)
    if gpu is not None:
        draft.facts["hardware.gpu"] = StatedFact(gpu, (f"--gpu {gpu}",), Origin("--gpu"))
        if "hardware.gpus_per_node" not in draft.facts:
            fix = "add --gpus-per-node M, and --nodes N for several nodes"
            what = "--gpu names the kind of the GPUs, and nothing says how many there are"
            raise SpecError(Problem(what, Origin("--gpu"), fix))
    keys = tuple(_final(key, draft, reader.facts_of) for key in reader.keys)
    left_out = [(f"{key.key}: {shortly(key.value)}", key.note)
                for key in keys if key.verdict == "refused"]  # fmt: skip
    text = plan_to_text(draft, tool.title, os.path.basename(path), left_out)
    _check(text, draft, path)
    return ImportedPlan(tool=tool.name, file=path, keys=keys, text=text, notes=tuple(draft.notes))


def _final(key: TranslatedKey, draft: Draft, facts_of: Mapping[str, str]) -> TranslatedKey:
    """Return a key with what became of its fact when the facts were related."""
    fact = facts_of.get(key.key, "")
    if key.verdict != "honoured":
        return key
    if fact in draft.refused:
        return replace(key, verdict="refused", plan_key="", note=draft.refused[fact])
    is_in_plan = fact in draft.facts or fact not in draft.without_effect
    if (fact in IN_RULES and is_in_plan) or fact in draft.facts:
        return replace(key, plan_key=IN_RULES.get(fact, fact))
    if fact in draft.moved:
        return replace(key, plan_key=draft.moved[fact])
    if fact not in draft.without_effect:
        return key
    return replace(key, verdict="irrelevant", plan_key="", note=draft.without_effect[fact])


def _check(text: str, draft: Draft, path: str) -> None:
    """Raise what the plan's own reader says against the plan, where the file says it."""
    try:
        load_spec(plain(parse_yaml(text, "plan.yaml")))
    except SpecError as error:
        problems = []
        for problem in error.problems:
            key = problem.origin.path if problem.origin else ""
            origin = draft.origin(key) or Origin(path)
            problems.append(Problem(f"{key}: {problem.what}" if key else problem.what, origin,
                                    problem.fix))  # fmt: skip
        raise SpecError(problems) from None
