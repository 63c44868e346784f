"""`meshplan show`: literal text, and nothing unequal folded.

`python -m tests.cli.test_show` refreshes `golden/`.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshplan import decide
from meshplan.cli.app import main
from meshplan.memory import state_bytes, state_bytes_by_rank
from meshplan.model.blueprint import from_mapping
from meshplan.plan.plan import Plan, make_plan
from meshplan.render.base.tree import Entry, TreeLine, fold_tree
from meshplan.render.layouts.ranks import map_of_ranks
from meshplan.render.layouts.show import plan_to_json, plan_to_text
from meshplan.spec.reader import load_spec
from meshplan.spec.recipes import recipe_names, recipe_path

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
SHOWN = ("hybrid_2x4", "tp_hybrid", "hybrid_mixture")
RECIPES = [name for name in recipe_names() if name != "auto"]


def shown(name: str) -> str:
    return "\n".join(plan_to_text(decide(f"plans/{name}.yaml"))) + "\n"


@pytest.mark.parametrize("name", SHOWN)
def test_the_text(name, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert main(["show", "-f", f"plans/{name}.yaml"]) == 0
    expected = (GOLDEN / f"show_{name}.txt").read_text()
    assert capsys.readouterr() == (expected, "")


def expand(pattern: str) -> list[str]:
    """The names of a pattern with `{0..3,7}` in it."""
    pieces = []
    for number, part in enumerate(re.split(r"\{([0-9.,]+)\}", pattern)):
        if number % 2 == 0:
            pieces.append([part])
            continue
        numbers: list[str] = []
        for run in part.split(","):
            first, _, last = run.partition("..")
            numbers += map(str, range(int(first), int(last or first) + 1))
        pieces.append(numbers)
    return ["".join(words) for words in itertools.product(*pieces)]


def unfold(rows: list[TreeLine]) -> dict[str, tuple[str, ...]]:
    """Every name the rows stand for, with its cells."""
    out: dict[str, tuple[str, ...]] = {}
    around: list[list[str]] = []
    for row in rows:
        del around[row.depth :]
        names = [""]
        if row.depth:
            names = [
                f"{outer}.{inner}".removeprefix(".")
                for outer in around[-1]
                for inner in expand(row.name)
            ]
        for name in names:
            assert name not in out, f"{name} is shown twice"
            out[name] = row.cells
        around.append(names)
    return out


NAMES = st.lists(st.sampled_from(["0", "1", "2", "10", "w", "norm"]), min_size=1, max_size=4)


@given(st.dictionaries(NAMES.map(".".join), st.tuples(st.sampled_from("xy"), st.booleans())))
def test_folding_loses_nothing_and_merges_only_equals(drawn):
    entries = [Entry("", True, ("root",))]
    for fqn in sorted(drawn, key=lambda fqn: (fqn.count("."), fqn)):
        letter, is_module = drawn[fqn]
        entries.append(Entry(fqn, is_module, (letter,)))
    assert unfold(fold_tree(entries)) == {entry.fqn: entry.cells for entry in entries}


def test_blocks_that_differ_inside_are_apart():
    entries = [Entry("", True, ())]
    for block in range(4):
        entries.append(Entry(f"layers.{block}", True, ("unit",)))
        entries.append(Entry(f"layers.{block}.w", False, ("S(0)" if block != 2 else "R",)))
    assert [(row.name, *row.cells) for row in fold_tree(entries)] == [
        ("(model)",),
        ("layers.{0,1,3}", "unit"),
        ("w", "S(0)"),
        ("layers.2", "unit"),
        ("w", "R"),
    ]


@pytest.mark.parametrize("name", RECIPES)
def test_what_the_ranks_hold_adds_up(name):
    plan = decide(recipe_path(name))
    mesh = plan.mesh
    for placed in plan.assignment.tensors.values():
        held = sum(
            placed.stored.local_numel(placed.info.shape, mesh, rank)
            for rank in range(mesh.world_size)
        )
        assert held == placed.info.numel * placed.stored.num_replicas(mesh)
    states, optimizer = plan.assignment, plan.spec.optimizer
    every = state_bytes_by_rank(states, optimizer)
    assert every == tuple(state_bytes(states, optimizer, r) for r in range(mesh.world_size))
    assert [states["total_bytes"] for states in plan_to_json(plan)["state_bytes"]] == [
        states.total_bytes for states in every
    ]


def test_json_names_every_tensor_and_its_line(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert main(["show", "-f", "plans/tp_hybrid.yaml", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["schema"] == "show/1"
    result = content["result"]
    assert result["mesh"] == {"dp_replicate": 2, "dp_shard": 2, "tp": 2}
    assert result["batch"] == {"micro": 8, "accumulate": 1, "data_ranks": 4, "seq_len": 128}
    [tensor] = [t for t in result["tensors"] if t["name"] == "layers.3.attn.wq.weight"]
    assert (tensor["layout"], tensor["local_shape"]) == ("S(0)@tp,dp_shard", [32, 128])
    assert tensor["unit"] == "layers.3"
    assert [(r["text"], r["file"], r["line"]) for r in tensor["decided_by"]] == [
        ("tp: colwise", "plans/tp_hybrid.yaml", 13),
        ("strategy: hybrid_shard, repeated block", "plans/tp_hybrid.yaml", 7),
    ]


UNEVEN = {
    "model_type": "llama",
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_attention_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 10,
    "tie_word_embeddings": True,
}


def test_uneven_pieces_and_unequal_ranks_are_shown():
    spec = load_spec({"version": 1, "mesh": {"dp_shard": 8}, "strategy": "full_shard"})
    text = "\n".join(plan_to_text(make_plan(spec, from_mapping(UNEVEN))))
    assert re.search(
        r"embed_tokens.weight +Embedding +\(10, 12\) .* \(2, 12\), smallest \(0, 12\)", text
    )
    assert "also named lm_head.weight" in text
    assert "model.layers.{0..2}" in text
    assert "0 (most)" in text
    assert "7 (least)" in text


def test_a_piece_of_a_piece_may_be_smaller_than_the_last_ranks():
    rules = [{"match": {"param": "norm.weight"}, "place": {"tp": "S(0)"}}]
    plan = {"version": 1, "mesh": {"dp_shard": 3, "tp": 2}, "rules": rules}
    graph = from_mapping(UNEVEN | {"hidden_size": 14})
    spec = load_spec(plan | {"rules": [{**rules[0], "match": {"param": "model.norm.weight"}}]})
    # 14 over tp gives 7 and 7; 7 over 3 gives 3, 3, 1.
    text = "\n".join(plan_to_text(make_plan(spec, graph)))
    assert re.search(r"model.norm.weight .* S\(0\)@tp,dp_shard +\(3,\), smallest \(1,\)", text)


def test_ten_thousand_modules():
    def plan(num_layers: int) -> Plan:
        spec = load_spec({"version": 1, "mesh": {"dp_replicate": 4, "dp_shard": 16}})
        return make_plan(spec, from_mapping(UNEVEN | {"num_hidden_layers": num_layers}))

    large = plan(700)
    assert len(large.graph.modules) > 9_000
    began = time.process_time()
    lines = plan_to_text(large)
    assert time.process_time() - began < 5
    assert len(lines) == len(plan_to_text(plan(2)))
    assert any("model.layers.{0..699}" in line for line in lines)


def ranks(mesh: dict[str, int], nodes: tuple[int, int] | None) -> list[str]:
    plan: dict[str, object] = {"version": 1, "mesh": mesh}
    if nodes:
        plan["hardware"] = {"nodes": nodes[0], "gpus_per_node": nodes[1]}
    return map_of_ranks(make_plan(load_spec(plan), from_mapping(UNEVEN)))


def test_the_map_without_nodes_has_a_row_per_outermost_position():
    assert ranks({"dp_replicate": 2, "dp_shard": 3}, None) == [
        "mesh dp_replicate 2 x dp_shard 3 = 6 ranks (nodes not stated)",
        "                  dp_shard  0  1  2",
        "  dp_replicate 0      rank  0  1  2",
        "  dp_replicate 1            3  4  5",
    ]


def test_an_axis_across_nodes_is_written_behind_the_rank():
    assert ranks({"dp_shard": 4}, (2, 2)) == [
        "mesh dp_shard 4 = 4 ranks (2 nodes x 2)",
        "  node 0  rank:dp_shard  0:0  1:1",
        "  node 1                 2:2  3:3",
    ]


def test_a_large_map_is_cut():
    lines = ranks({"dp_replicate": 64, "dp_shard": 32}, (64, 32))
    assert len(lines) == 10
    assert lines[-2].split() == ["..."] * 16
    assert lines[-1].split()[:5] == ["node", "63,", "dp_replicate", "63", "2016"]
    assert lines[-1].split()[-2:] == ["...", "2047"]


if __name__ == "__main__":
    os.chdir(ROOT)
    for each in SHOWN:
        (GOLDEN / f"show_{each}.txt").write_text(shown(each))
