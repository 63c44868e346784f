"""What a plan states, on paper: short, exact, and the same wherever it is told."""

from __future__ import annotations

import itertools
import json
import random

import pytest

from meshplan.cli.app import main
from meshplan.planner.lock.changes import FieldChange
from meshplan.planner.lock.lock import lock_path, read
from meshplan.planner.problem.overrides import patterns
from meshplan.render.base.statements import flow, stages_in_words, statement_lines, statement_value
from meshplan.render.base.text import WIDTH, packed, wrapped
from meshplan.render.plans.changes import changes_to_text
from meshplan.spec.match import compile_selector
from meshplan.spec.spec import Selector
from tests.planner.test_planner import LLAMA, job

__all__ = ["job"]

LAYERS = [f"model.layers.{n}" for n in range(126)]
LONG = [[name] for name in LAYERS if (n := int(name[13:])) < 98 or n % 2]


def counted(words: str) -> list[int]:
    """Blocks of each stage, read back from the words."""
    num, _, runs = words.partition(" stages")
    if runs.startswith(" of "):
        return [int(runs.split()[1])] * int(num)
    out = []
    for run in runs.removeprefix(": ").split(", "):
        count, _, size, *_ = run.split()
        out += [int(size)] * int(count)
    return out


def test_a_split_is_told_by_how_many_blocks_stages_hold():
    words = statement_value("pipeline.split", LONG, LAYERS)
    assert words == (
        "112 stages: 97 of 1 block, 14 of 2 from model.layers.97, 1 of 1 from model.layers.125"
    )
    assert stages_in_words(LAYERS[::21], LAYERS) == "6 stages of 21 blocks"
    assert stages_in_words(LAYERS, LAYERS) == "126 stages of 1 block"
    assert stages_in_words(LAYERS[:1], LAYERS) == "1 stage of 126 blocks"


def test_the_words_tell_every_cut_exactly():
    pick = random.Random(0)
    for _ in range(200):
        cuts = sorted(pick.sample(range(1, 126), pick.randrange(1, 60)))
        starts = [0, *cuts]
        sizes = [b - a for a, b in itertools.pairwise([*starts, 126])]
        assert counted(stages_in_words([LAYERS[n] for n in starts], LAYERS)) == sizes


@pytest.mark.parametrize(
    ("value", "blocks"),
    [
        (LONG, ()),  # Of a lock whose model is another by now.
        (LONG, LAYERS[:50]),
        ([["model.embed_tokens"], ["model.layers.3"]], LAYERS),
        ([["model.layers.3"], ["model.layers.0"]], LAYERS),
        ([["model.layers.0"], ["model.layers.0"]], LAYERS),
    ],
)
def test_stages_of_other_modules_are_named(value, blocks):
    words = statement_value("pipeline.split", value, blocks)
    head, _, names = words.partition(", which begin with ")
    assert head == f"{len(value)} stages"
    if value is LONG:
        assert (
            names == "model.layers.{0..97,99,101,103,105,107,109,111,113,115,117,119,121,123,125}"
        )
    else:
        assert set(names.split(", ")) <= {
            "model.embed_tokens",
            "model.layers.3",
            "model.layers.{3,0}",
            "model.layers.{0,3}",
            "model.layers.0",
        }


@pytest.mark.parametrize("value", ["auto", [], [[]], [["a", "b"], ["c"]], [1, 2], {"a": 1}, [[3]]])
def test_what_people_wrote_into_a_lock_is_told_as_it_is(value):
    assert statement_value("pipeline.split", value) == flow(value)


def test_a_list_of_blocks_is_one_pattern_that_matches_the_same():
    pick = random.Random(1)
    for _ in range(100):
        names = sorted(pick.sample(LAYERS, pick.randrange(2, 100)), key=lambda n: int(n[13:]))
        rule = {"match": patterns(names), "activation_checkpointing": "full"}
        line = statement_value("rules[0]", rule)
        shown = line.partition('match: "')[2].partition('"')[0]
        matcher = compile_selector(Selector("glob", shown))
        assert [name for name in LAYERS if matcher.matches(name)] == names
    several = {"match": ["a.{0..3}", "b.7", "stem", "a.5"], "stage": 1}
    assert statement_value("rules[0]", several) == '{match: ["a.{0..3,5}", "b.7", stem], stage: 1}'


def test_lines_are_broken_between_words_and_lose_none():
    text = "  " + " ".join(f"word{n}" for n in range(60))
    lines = wrapped(text, indent=4)
    assert all(len(line) <= WIDTH for line in lines)
    assert " ".join(lines).split() == text.split()
    assert all(line.startswith("    word") for line in lines[1:])
    parts = [f"field.{n}: {n}" for n in range(30)]
    lines = packed("  +1.0%  ", parts)
    assert all(len(line) <= WIDTH for line in lines)
    assert "; ".join(line.rstrip(";").strip().removeprefix("+1.0%").strip() for line in lines) == (
        "; ".join(parts)
    )


def test_what_changed_is_told_in_the_same_words():
    changes = (FieldChange("pipeline.split", LONG, [[name] for name in LAYERS]),)
    line = changes_to_text(changes, LAYERS)[0]
    assert line.endswith("125 -> 126 stages of 1 block")
    assert f"pipeline.split: {statement_value('pipeline.split', LONG, LAYERS)} -> " in line


def test_nobody_reads_names_of_stages_and_json_has_them_all(job, capsys):
    """Plan, explain and diff say a split alike; what is made to be read by programs keeps it."""
    config = LLAMA | {"num_hidden_layers": 12}
    path = job(config, mesh={"pp": 8, "dp_shard": "auto"}, strategy=None)
    assert main(["plan", "-f", str(path)]) == 0
    text = capsys.readouterr().out
    line = next(line.strip() for line in text.splitlines() if "pipeline.split" in line)
    assert sum(counted(line.partition(": ")[2])) == 12
    assert "[[" not in text
    assert max(map(len, text.splitlines()[1:])) <= WIDTH
    assert main(["plan", "-f", str(path), "--json", "--dry-run"]) == 0
    stated = json.loads(capsys.readouterr().out)["result"]["chosen"]
    assert len(stated["pipeline.split"]) == 8
    assert line in list(statement_lines(stated, LAYERS[:12]))
    assert main(["explain", "-f", str(path), "why-not", "mesh.pp=8"]) == 0
    assert line in capsys.readouterr().out
    other = path.with_name("other.yaml")
    other.write_text(path.read_text().replace('"pp": 8', '"pp": 2'))
    assert main(["plan", "-f", str(other), "-q"]) == 0
    capsys.readouterr()
    locks = [str(each.with_suffix(".lock.yaml")) for each in (path, other)]
    assert main(["diff", *locks]) == 1
    text = capsys.readouterr().out
    assert line.partition(": ")[2] in text
    assert "stage " not in text
    assert main(["diff", *locks, "--json"]) == 1
    fields = json.loads(capsys.readouterr().out)["result"]["fields"]
    split = next(each for each in fields if each["what"] == "pipeline.split")
    assert split["old"] == stated["pipeline.split"]
    assert split["new"] == read(lock_path(other)).chosen["pipeline.split"]
