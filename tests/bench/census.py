"""Import every configuration of a folder, and count what became of the keys.

`python -m tests.bench.census [FOLDER] [--plan]` prints, by tool, the files, the keys by verdict,
and the median milliseconds of a file. Without a folder it takes the fixtures: those of
tests/interop/configs, and one for each value of each row, made from the tables. With `--plan`,
imported plans are also searched for a model, and counted if they fit and if a faster one does; of
the fixtures, those written by hand. A line for each file of a folder says both, and what is faster.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

import meshplan
from meshplan.errors import MeshplanError
from meshplan.interop.configs.exporting import put_path
from meshplan.interop.configs.importing import ImportedPlan, import_file
from meshplan.interop.configs.statements import word_of
from meshplan.interop.configs.table import ConfigKey
from meshplan.interop.configs.tools import TOOLS

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests/interop/configs"
MODEL = ROOT / "plans/models/llama-3.1-8b.json"
SUFFIXES = {"deepspeed": ".json", "accelerate": ".yaml", "lightning": ".yaml", "hf": ".json",
            "torchtitan": ".toml", "megatron": ".sh", "nanotron": ".yaml"}  # fmt: skip
BASES: dict[str, dict[str, Any]] = {
    "deepspeed": {"zero_optimization": {"stage": 3}},
    "accelerate": {"distributed_type": "FSDP", "num_processes": 8, "num_machines": 1,
                   "fsdp_config": {"fsdp_version": 1}},
    "lightning": {"trainer": {"devices": 8, "strategy": {
        "class_path": "lightning.pytorch.strategies.FSDPStrategy", "init_args": {}}}},
    "hf": {"output_dir": "out", "fsdp": "full_shard"},
    "torchtitan": {"training": {"local_batch_size": 4}, "parallelism": {}},
    "megatron": {"micro_batch_size": 1, "use_distributed_optimizer": True, "nproc_per_node": 8},
    "nanotron": {"parallelism": {"dp": 8, "pp": 1, "tp": 1}, "optimizer": {"zero_stage": 1}},
}  # fmt: skip
"""For each tool, a configuration to which one key is added at a time."""
SECTIONS: dict[str, dict[str, Any]] = {
    "deepspeed_config.": {"distributed_type": "DEEPSPEED", "num_processes": 8},
    "megatron_lm_config.": {"distributed_type": "MEGATRON_LM", "num_processes": 8},
    "deepspeed.": {"output_dir": "out"}, "distributed_config.": {}, "parallelism_config.": {
        "output_dir": "out"},
}  # fmt: skip
"""Instead of the base, for keys of a section that excludes what the base has."""


def written() -> Iterator[tuple[str, str, str]]:
    """Yield (tool, name, text) of the fixtures written by hand: documents by tool."""
    for path in sorted(FIXTURES.glob("*.yaml")):
        for name, content in yaml.safe_load(path.read_text()).items():
            tool = path.stem
            text = content if isinstance(content, str) else text_of(tool, content)
            yield tool, name, text


def text_of(tool: str, tree: dict[str, Any]) -> str:
    """The text of a tool's file from a tree of values."""
    if tool == "torchtitan":
        lines = []
        for section, values in tree.items():
            lines += [f"[{section}]", *(f"{key} = {_toml(value)}" for key, value in values.items())]
        return "\n".join(lines) + "\n"
    if tool == "megatron":
        words = [f"--{key.replace('_', '-')}" + ("" if value is True else f" {value}")
                 for key, value in tree.items()]  # fmt: skip
        return "torchrun pretrain_gpt.py " + " ".join(words) + "\n"
    return yaml.safe_dump(tree, sort_keys=False, default_flow_style=SUFFIXES[tool] == ".json",
                          width=10**6)  # fmt: skip


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def made() -> Iterator[tuple[str, str, str]]:
    """Yield (tool, name, text) of a configuration for each row, and for each word of its values."""
    for tool, found in TOOLS.items():
        for row in found.table.rows:
            for value in values_of(row):
                other = next((b for s, b in SECTIONS.items() if row.path.startswith(s)), None)
                is_other = other is not None and (tool == "accelerate") == (
                    "distributed_type" in other
                )
                tree = yaml.safe_load(yaml.safe_dump(other if is_other else BASES[tool]))
                try:
                    put_path(tree, row.path, value)
                except (TypeError, AttributeError):  # Below a key that is a word in the base.
                    continue
                if tool == "torchtitan" and "." not in row.path:
                    continue  # Flags of torchrun, which TOML has not.
                yield tool, f"{row.path}={value}", text_of(tool, tree)


def values_of(row: ConfigKey) -> list[Any]:
    """Values that a row takes, and one that a refused row refuses."""
    if row.path.endswith("*") or row.path in ("fsdp", "trainer.strategy"):
        return []
    if row.values is None:
        return [True]
    if row.values.form.startswith("a whole number"):
        return [2]
    if row.values.form.startswith("a number above 0"):
        return [0.5]
    return list(row.values.words[:4])


class Tally:
    """What was counted of one tool."""

    def __init__(self) -> None:
        self.files, self.unread = 0, 0
        self.keys: Counter[str] = Counter()
        self.milliseconds: list[float] = []
        self.fits, self.faster, self.planned = 0, 0, 0
        self.errors: list[str] = []
        self.plans: list[str] = []


def count(path: Path, tool: str | None, tallies: dict[str, Tally]) -> ImportedPlan | None:
    """Import one file and count its keys."""
    began = time.perf_counter()
    try:
        imported = import_file(str(path), TOOLS, tool=tool)
    except MeshplanError as error:
        tally = tallies[tool or "(not read)"]
        tally.files += 1
        tally.unread += 1
        tally.errors.append(f"{path.name}: {error.problems[0].what}")
        return None
    tally = tallies[imported.tool]
    tally.milliseconds.append(1e3 * (time.perf_counter() - began))
    tally.files += 1
    tally.keys.update(key.verdict for key in imported.keys)
    return imported


@functools.cache
def _fits(plan: str) -> bool:
    return meshplan.estimate_memory(json.loads(plan)).fits is not False


@functools.cache
def _chosen(plan: str) -> tuple[float, str] | None:
    """Seconds and statements of the plan that is chosen; None if none fits. Many say alike."""
    chosen = meshplan.search_plan(json.loads(plan)).chosen
    return None if chosen is None else (chosen.seconds, word_of(chosen.stated))


def plan_it(imported: ImportedPlan, tally: Tally) -> None:
    """Say whether an imported plan fits its H100s, eight if it states none; and a faster one."""
    plan = yaml.safe_load(imported.text) | {"model": {"config": str(MODEL)}}
    sizes = [size for size in plan.get("mesh", {}).values() if isinstance(size, int)]
    ranks = math.prod(sizes) if len(sizes) == len(plan.get("mesh", ())) > 0 else 8
    nodes = ranks // 8 if ranks % 8 == 0 else 1
    plan.setdefault("hardware", {"nodes": nodes, "gpus_per_node": ranks // nodes})
    plan["hardware"]["gpu"] = "h100-sxm-80gb"
    plan.pop("rules", None)  # Classes of another model than the one that is asked about.
    plan.setdefault("batch", {}).setdefault("seq_len", 2048)
    if "global" not in plan["batch"]:  # Plans are compared at as many samples a step.
        plan["batch"].pop("accumulate", None)
        plan["batch"]["global"] = 64
    free = {key: value for key, value in plan.items()
            if key in ("version", "model", "hardware", "batch", "precision")}  # fmt: skip
    try:
        stated, searched = json.dumps(plan), json.dumps(
            free | {"mesh": "auto", "strategy": "auto", "activation_checkpointing": "auto",
                    "solve": {"time_limit": "5s"}})  # fmt: skip
        fits = _fits(stated)
        tally.fits += fits
        tally.planned += 1
        own, best = _chosen(stated) if fits else None, _chosen(searched)
        is_faster = own is not None and best is not None and best[0] < 0.99 * own[0]
        tally.faster += is_faster
        line = f"{imported.file}: {'fits' if fits else 'does not fit'}"
        line += f", {own[0]:.3f} s a step" if own is not None else ""
        if best is not None and (is_faster or own is None):
            line += f"; {best[0]:.3f} s with {best[1]}"
        tally.plans.append(line)
    except MeshplanError as error:
        tally.errors.append(f"{imported.file}: {error.problems[0].what}")


def table(tallies: dict[str, Tally], *, has_plans: bool) -> str:
    """The counts as a table of Markdown."""
    head = ["tool", "files", "not read", "honoured", "irrelevant", "refused", "ms a file"]
    head += ["planned", "fit", "a faster plan"] if has_plans else []
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    for tool, tally in tallies.items():
        median = statistics.median(tally.milliseconds) if tally.milliseconds else 0.0
        cells = [tool, tally.files, tally.unread, tally.keys["honoured"], tally.keys["irrelevant"],
                 tally.keys["refused"], f"{median:.1f}"]  # fmt: skip
        cells += [tally.planned, tally.fits, tally.faster] if has_plans else []
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> None:
    """Print the census."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", help="a folder of configurations")
    parser.add_argument(
        "--plan", action="store_true", help="also say what fits, and what is faster"
    )
    args = parser.parse_args()
    tallies: dict[str, Tally] = defaultdict(Tally)
    with tempfile.TemporaryDirectory() as scratch:
        if args.folder:
            suffixes = tuple({suffix for tool in TOOLS.values() for suffix in tool.suffixes})
            found = [(None, path) for path in sorted(Path(args.folder).rglob("*"))
                     if path.name.endswith(suffixes) and path.is_file()]  # fmt: skip
        else:
            found = []
            for number, (tool, _, text) in enumerate([*written(), *made()]):
                path = Path(scratch) / f"{number}{SUFFIXES[tool]}"
                path.write_text(text)
                found.append((tool, path))
        num_planned = len(found) if args.folder else len(list(written()))
        for number, (tool, path) in enumerate(found):
            imported = count(path, tool, tallies)
            if args.plan and imported is not None and number < num_planned:
                plan_it(imported, tallies[imported.tool])
    print(table(tallies, has_plans=args.plan))
    if args.folder:
        print("\n".join(line for tally in tallies.values() for line in tally.plans))
    for tool, tally in tallies.items():
        for error in tally.errors[:5]:
            print(f"{tool}: {error}")


if __name__ == "__main__":
    main()
