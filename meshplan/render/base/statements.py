"""Statements of a plan as text, in the form of a plan file but shortened for the reader.

A pipeline split is shortened to the number of stages of each size, and a list of blocks to one
pattern. The lock and the JSON output have the full values.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from meshplan.planner.problem.decision import Evaluated
from meshplan.spec.match import fold
from meshplan.units import spans_of

_SPLIT: Final = "pipeline.split"
_MOST_NAMED: Final = 3
"""Maximum number of runs of stages of the same size; more runs are shortened without names."""
_MOST_LISTED: Final = 4
"""Maximum number of values of one path that are listed without an ellipsis."""
_NUMBERED: Final = re.compile(r"(.*\.|)(?:([0-9]+)|\{([0-9]+)\.\.([0-9]+)\})")


def plan_lines(evaluated: Evaluated) -> Iterator[str]:
    """Yield the statements that turn the plan file into this plan, one per line."""
    return statement_lines(evaluated.stated, evaluated.plan.graph.blocks())


def statement_lines(stated: Mapping[str, Any], blocks: Sequence[str] = ()) -> Iterator[str]:
    """Yield statements as they would be in a plan file, one per line.

    Args:
        stated: Values by their path in the plan file, such as "mesh.tp"; None values are left out.
        blocks: Fqns of the model's blocks, in the order in which they run.
    """
    for path, value in stated.items():
        if value is not None:
            yield f"{path}: {statement_value(path, value, blocks)}"


def statement_value(path: str, value: Any, blocks: Sequence[str] = ()) -> str:
    """Return the value of a path in the plan file as short text.

    >>> statement_value("rules[0]", {"match": ["a.{0..3}", "a.5"], "stage": 1})
    '{match: "a.{0..3,5}", stage: 1}'
    """
    if path == _SPLIT and _is_split(value):
        return stages_in_words([names[0] for names in value], blocks)
    if isinstance(value, Mapping) and isinstance(value.get("match"), list):
        found = _joined(value["match"])
        value = {**value, "match": found[0] if len(found) == 1 else found}
    return flow(value)


def flow(value: Any) -> str:
    """Return a value as YAML on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(flow, value)) + "]"
    if isinstance(value, str):
        return value if value.replace("_", "").isalnum() else json.dumps(value)
    return json.dumps(value)


def stages_in_words(firsts: Sequence[str], blocks: Sequence[str]) -> str:
    """Describe a pipeline split: the number of stages, and how many blocks each has, in order.

    Args:
        firsts: Fqn of the first module of each stage.
        blocks: Fqns of the model's blocks, in order. If a stage begins with another module, the
            first modules of all stages are listed instead.

    >>> layers = [f"layers.{n}" for n in range(8)]
    >>> stages_in_words(["layers.0", "layers.4"], layers)
    '2 stages of 4 blocks'
    >>> stages_in_words(["layers.0", "layers.1", "layers.2", "layers.5"], layers)
    '4 stages: 2 of 1 block, 2 of 3 from layers.2'
    >>> stages_in_words(["stem", "layers.0", "layers.3"], layers)
    '3 stages, which begin with stem, layers.{0,3}'
    """
    num = f"{len(firsts)} stage{'' if len(firsts) == 1 else 's'}"
    places = {name: place for place, name in enumerate(blocks)}
    at = [places.get(name, -1) for name in firsts]
    if at[0] != 0 or at != sorted(set(at)):
        return f"{num}, which begin with {', '.join(fold(firsts))}"
    sizes = [after - before for before, after in itertools.pairwise((*at, len(blocks)))]
    runs = [(size, len(list(same))) for size, same in itertools.groupby(sizes)]
    if len(runs) == 1:
        return f"{num} of {_blocks(sizes[0])}"
    words, stage = [], 0
    for size, count in runs:
        where = f" from {firsts[stage]}" if stage and len(runs) <= _MOST_NAMED else ""
        words.append(f"{count} of {size if stage else _blocks(size)}{where}")
        stage += count
    return f"{num}: {', '.join(words)}"


def _blocks(count: int) -> str:
    return f"{count} block{'' if count == 1 else 's'}"


def _is_split(value: Any) -> bool:
    """Return True if the value is a list of lists of one name, which a user's edit may change."""
    return bool(value) and isinstance(value, list) and all(
        isinstance(names, list) and len(names) == 1 and isinstance(names[0], str)
        for names in value
    )  # fmt: skip


def _joined(patterns: Sequence[Any]) -> list[str]:
    """Merge patterns that differ only in their last number: "a.1", "a.{3..5}" to "a.{1,3..5}"."""
    spans: dict[str, list[int]] = {}
    for pattern in map(str, patterns):
        found = _NUMBERED.fullmatch(pattern)
        if found is None:
            spans[pattern] = []
            continue
        low = int(found[2] or found[3])
        spans.setdefault(found[1], []).extend(range(low, int(found[2] or found[4]) + 1))
    return [container + _braced(numbers) for container, numbers in spans.items()]


def _braced(numbers: Sequence[int]) -> str:
    if not numbers:
        return ""
    spans = [f"{a}..{b}" if a < b else str(a) for a, b in spans_of(sorted(set(numbers)))]
    return spans[0] if len(numbers) == 1 else "{" + ",".join(spans) + "}"


def settings_in_words(settings: Iterable[str]) -> str:
    """Join settings such as "mesh.pp=128"; the values of one path are listed together, shortened.

    >>> settings_in_words(["mesh.cp=16, 32", "mesh.cp=64", "mesh.cp=128, 256, 512", "mesh.ep=2"])
    'mesh.cp=16, 32, ..., 512 (6 sizes), mesh.ep=2'
    """
    by_path: dict[str, list[str]] = {}
    for setting in settings:
        path, equals, values = setting.partition("=")
        by_path.setdefault(path + equals, []).extend(values.split(", ") if equals else [])
    return ", ".join(f"{path}{_listed(values)}" for path, values in by_path.items())


def _listed(values: Sequence[str]) -> str:
    if len(values) <= _MOST_LISTED or not all(value.isdigit() for value in values):
        return ", ".join(values)
    return f"{values[0]}, {values[1]}, ..., {values[-1]} ({len(values)} sizes)"
