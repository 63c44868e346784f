"""Where predictions of published runs are off: signed errors by fields.

    python -m tests.bench.residuals FILE.jsonl OUT --what memory --by tp,pp [--only nanotron]

OUT is what `published --json` wrote. A field is one of a row's: tp, nodes, micro_batch, ...
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

GIB = 2**30
SECTIONS = ("model", "hardware", "parallel", "training")


def errors(
    rows: Sequence[Mapping[str, Any]], answer: Mapping[str, Any], what: str
) -> Iterator[tuple[Mapping[str, Any], float]]:
    """Each row that was told and measured, with its relative error."""
    told = {each["id"]: each for each in answer[what]["rows"] if each["skipped"] is None}
    for row in rows:
        each = told.get(row["id"])
        if each is None:
            continue
        if what == "time":
            if each["is_stalled"]:
                continue
            yield row, each["predicted_s"] / each["real_s"] - 1
        elif real := row["measured"].get("peak_mem_gib"):
            yield row, each["predicted_bytes"] / GIB / real - 1


def field(row: Mapping[str, Any], name: str) -> Any:
    """What the row says, wherever it says it; 1 where it says nothing."""
    for section in SECTIONS:
        if name in row[section]:
            return row[section][name]
    return 1


def table(pairs: Sequence[tuple[Mapping[str, Any], float]], by: Sequence[str]) -> str:
    """A line for each group: how many, the signed median, the median and p90 of the size."""
    groups: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for row, error in pairs:
        groups[tuple(field(row, name) for name in by)].append(error)
    lines = ["".join(f"{name:>16}" for name in by) + "    runs  signed  median     p90"]
    for key in sorted(groups, key=lambda values: [(str(type(v)), v) for v in values]):
        all_of, size = groups[key], sorted(map(abs, groups[key]))
        last = size[min(len(size) - 1, int(0.9 * len(size)))]
        lines.append(
            "".join(f"{value!s:>16}" for value in key)
            + f"{len(size):8}{statistics.median(all_of):+8.1%}{statistics.median(size):8.1%}"
            + f"{last:8.1%}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("answer", type=Path)
    parser.add_argument("--what", choices=("memory", "time"), default="memory")
    parser.add_argument("--by", default="tp,pp")
    parser.add_argument("--only", default="", help="groups whose name has this in it")
    options = parser.parse_args(arguments)
    rows = [json.loads(line) for line in options.file.read_text().splitlines() if line.strip()]
    rows = [row for row in rows if options.only in str(row.get("group"))]
    answer = json.loads(options.answer.read_text())
    print(table(list(errors(rows, answer, options.what)), options.by.split(",")))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
