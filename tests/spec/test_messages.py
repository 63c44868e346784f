"""Every broken plan gives its exact message: the text beside it, character for character.

`bad_plans/` holds what the file alone shows, `bad_plans/needs_model/` what only a model shows.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from meshplan.errors import MeshplanError, SpecError
from meshplan.model.blueprint import from_config
from meshplan.model.graph import ModelGraph
from meshplan.plan.plan import make_plan
from meshplan.runtime.demo_model import build
from meshplan.runtime.trace.structure import graph_of
from meshplan.spec.reader import load_spec
from meshplan.spec.spec import Spec

BAD_PLANS = Path(__file__).parents[1] / "bad_plans"
FILES = sorted(BAD_PLANS.glob("*.yaml"))
NEEDS_MODEL = sorted((BAD_PLANS / "needs_model").glob("*.yaml"))


@functools.cache
def demo_graph() -> ModelGraph:
    return graph_of(build())


def graph_for(spec: Spec) -> ModelGraph:
    if spec.model and spec.model.config:
        return from_config(spec.model.config)
    return demo_graph()


def test_there_are_enough_of_them() -> None:
    assert len(FILES) >= 40
    assert len(NEEDS_MODEL) >= 12
    for folder in (BAD_PLANS, BAD_PLANS / "needs_model"):
        plans = {path.stem for path in folder.glob("*.yaml")}
        assert {path.stem for path in folder.glob("*.txt")} == plans


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_broken_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    with pytest.raises(SpecError) as caught:
        load_spec(path.name)
    assert str(caught.value) == path.with_suffix(".txt").read_text().rstrip("\n")
    is_one = path.stem != "many_problems"
    assert (len(caught.value.problems) == 1) == is_one, "one mistake gives one message"


@pytest.mark.parametrize("path", NEEDS_MODEL, ids=lambda path: path.stem)
def test_a_plan_that_does_not_fit_its_model(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    spec = load_spec(path.name)
    try:
        plan = make_plan(spec, graph_for(spec))
        message = "\n".join(map(str, plan.assignment.warnings))
    except MeshplanError as error:
        message = str(error)
    assert message == path.with_suffix(".txt").read_text().rstrip("\n")


def message_of(source: object) -> str:
    with pytest.raises(SpecError) as caught:
        load_spec(source)  # type: ignore[arg-type]
    return str(caught.value)


def test_a_missing_file_names_its_neighbour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plan.yaml").touch()
    assert message_of("plna.yaml") == (
        "meshplan: 1 problem\nplna.yaml: there is no such file\n    fix: did you mean 'plan.yaml'?"
    )
    Path("net.yaml").touch()
    for missing in ("nothere.yaml", "exam.yaml"):
        assert message_of(missing).endswith("fix: give the path of a plan file")
    for missing in ("plan.yml", "plan"):
        assert message_of(missing).endswith("fix: did you mean 'plan.yaml'?")
    assert message_of("plans/auto.yaml") == (
        "meshplan: 1 problem\n"
        "plans/auto.yaml: there is no such file\n"
        "    fix: there is no directory 'plans' either"
    )


def test_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plans").mkdir()
    Path("plans/ddp.yaml").touch()
    assert message_of("plans") == (
        "meshplan: 1 problem\n"
        "plans: this is a directory, not a plan file\n"
        "    fix: give a file in it, such as ddp.yaml"
    )


def test_a_huge_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Path("huge.yaml").open("wb") as file:
        file.truncate(50_000_000)
    assert message_of("huge.yaml") == (
        "meshplan: 1 problem\n"
        "huge.yaml: the file has 50,000,000 bytes, but a plan has at most 1,000,000\n"
        "    fix: name a plan file"
    )


def test_a_device_that_never_ends() -> None:
    assert message_of("/dev/zero") == (
        "meshplan: 1 problem\n/dev/zero: this is not a regular file\n    fix: name a plan file"
    )


def test_a_name_no_file_can_have() -> None:
    assert message_of("a\0b") == (
        "meshplan: 1 problem\na\0b: the file cannot be read: its name is not valid"
    )


def test_something_that_is_no_source() -> None:
    assert message_of(8) == "meshplan: 1 problem\na plan is a path or a mapping, not int"


def test_a_mapping_has_places_without_lines() -> None:
    assert message_of(
        {"version": 1, "rules": [{"match": "embed", "place": {"tp": "colwize"}}]}
    ) == (
        "meshplan: 1 problem\n"
        "<mapping>: rules[0].place.tp: 'colwize' is not a placement\n"
        "    fix: did you mean 'colwise'?"
    )
    assert message_of({"version": 1, "strategy": b"ddp"}) == (
        "meshplan: 1 problem\n"
        "<mapping>: strategy: a plan cannot contain a value of type bytes\n"
        "    fix: use strings, numbers below 1e30, true, false, lists and mappings"
    )


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "mesh.tp",
            "--set: 'mesh.tp' is not PATH=VALUE\n    fix: write something like --set mesh.tp=2",
        ),
        (
            "strategy=fdsp",
            "--set: strategy: 'fdsp' is not a strategy\n    fix: did you mean 'fsdp'?",
        ),
        (
            "mesh.tp=2",
            "--set: mesh.tp: mesh is 'auto', not a mapping with a key 'tp'\n"
            "    fix: set mesh as a whole: --set 'mesh={tp: 2, ...}'",
        ),
        (
            "rules[3].place=shard",
            "--set: rules[3].place: rules has 0 entries; setting [3] would leave a gap\n"
            "    fix: set rules as a whole, or an entry up to [0]",
        ),
        ("mesh={tp: 2", "--set: mesh: the '{' that opens here is never closed\n    fix: close it"),
    ],
)
def test_an_override(override: str, expected: str) -> None:
    with pytest.raises(SpecError) as caught:
        load_spec({"version": 1, "mesh": "auto"}, [override])
    assert str(caught.value) == f"meshplan: 1 problem\n{expected}"
