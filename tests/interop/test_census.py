"""Configurations of every kind: no key is dropped, and each file is a plan or one clear error.

Which seeded bug would this catch? A key that a walk passes over, a row whose value makes an
exception, a refusal without a reason, a plan that its own reader refuses.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from meshplan.cli.app import main
from meshplan.errors import MeshplanError
from meshplan.interop.configs.importing import import_file
from meshplan.interop.configs.tools import TOOLS
from meshplan.spec.meanings import MEANINGS
from meshplan.spec.reader import load_spec
from tests.bench import census
from tests.bench.census import SUFFIXES, made, written

WRITTEN = list(written())
PLAN_KEYS = {path for paths in MEANINGS.values() for path in paths} | {
    "hardware", "rules.unit", "rules.reshard_after_forward", "rules.activation_checkpointing",
    "rules.place", "offload.params", "offload.optimizer", "offload.activations",
    "ddp.bucket_mb", "ddp.find_unused_parameters", "ddp.static_graph", "ddp.broadcast_buffers",
    "ddp.gradient_as_bucket_view",
}  # fmt: skip
MADE = list(made())


def leaves(tree, path: str = ""):
    """The paths of all values of a tree that are no mappings, and of empty mappings."""
    if not isinstance(tree, dict) or not tree:
        yield path
        return
    for key, value in tree.items():
        yield from leaves(value, f"{path}.{key}" if path else str(key))


def check(tmp_path, tool: str, text: str):
    """Import a text, and hold its keys against an independent walk; None if it is refused whole."""
    path = tmp_path / f"theirs{SUFFIXES[tool]}"
    path.write_text(text)
    try:
        imported = import_file(str(path), TOOLS, tool=tool)
    except MeshplanError as error:
        for problem in error.problems:
            assert problem.origin is not None, problem
            assert problem.fix, problem
        return None
    answered = {key.key for key in imported.keys}
    if SUFFIXES[tool] in (".json", ".yaml"):
        for leaf in leaves(yaml.safe_load(text)):
            assert any(leaf == key or leaf.startswith(f"{key}.") for key in answered), leaf
    for key in imported.keys:
        assert key.note or key.verdict == "honoured", key
        assert (key.plan_key in PLAN_KEYS) == (key.verdict == "honoured"), key
    load_spec(yaml.safe_load(imported.text))
    return imported


@pytest.mark.parametrize(("tool", "name", "text"), WRITTEN, ids=[f"{t}-{n}" for t, n, _ in WRITTEN])
def test_a_configuration_as_people_write_them(tmp_path, tool, name, text):
    imported = check(tmp_path, tool, text)
    assert imported is not None
    assert imported.is_whole == (not name.startswith("refused")), imported.of("refused")
    path = tmp_path / f"theirs{SUFFIXES[tool]}"
    assert import_file(str(path), TOOLS).tool == tool  # It is recognised by its keys.


def test_there_are_enough_configurations():
    assert len(WRITTEN) >= 60
    assert len(MADE) >= 300
    assert {tool for tool, *_ in MADE} == {tool for tool, *_ in WRITTEN} == set(TOOLS)


def test_a_part_of_the_keys_one_by_one(tmp_path):
    read = [check(tmp_path, tool, text) is not None for tool, _, text in MADE[::23]]
    assert sum(read) > 0.9 * len(read)


@pytest.mark.wide
def test_all_keys_one_by_one(tmp_path):
    read = [check(tmp_path, tool, text) is not None for tool, _, text in MADE]
    assert sum(read) > 0.9 * len(MADE)


def test_examples_are_whole():
    folder = Path(__file__).parents[2] / "examples/configs"
    files = sorted(folder.iterdir())
    found = {path.name: import_file(str(path), TOOLS) for path in files}
    assert {imported.tool for imported in found.values()} == set(TOOLS)
    assert json.dumps([name for name, each in found.items() if not each.is_whole]) == "[]"


def test_the_census_of_a_folder_names_a_faster_plan(tmp_path, capsys, monkeypatch):
    """Eight replicas of eight billion parameters do not fit; sharded they do."""
    theirs = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}}
    (tmp_path / "ds.json").write_text(json.dumps(theirs))
    monkeypatch.setattr("sys.argv", ["census", str(tmp_path), "--plan"])
    census.main()
    shown = capsys.readouterr().out
    assert f"{tmp_path / 'ds.json'}: does not fit; " in shown
    assert "s with {mesh: {dp_shard: 8}, strategy: " in shown


@pytest.mark.parametrize(
    "page", sorted(Path("docs/coming-from").glob("*.md")), ids=lambda p: p.stem
)
def test_the_plan_of_a_page_has_no_problem(tmp_path, page):
    """A newcomer checks the plan that the page has shown him first of all."""
    commands = re.findall(r"<!-- output: meshplan (import .*) -->", page.read_text())
    assert len(commands) == (page.stem != "index")
    for command in commands:
        plan = tmp_path / "plan.yaml"
        assert main([*shlex.split(command), "-o", str(plan)]) == 0
        assert main(["check", str(plan)]) == 0
