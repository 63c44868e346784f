"""`meshplan state`: what is in a state, whether it is whole, and states written anew."""

from __future__ import annotations

import json

import pytest
import yaml

from meshplan.cli import main
from meshplan.state.manifest import read_manifest
from tests.helpers.stated import LAYOUTS, loaded, plan_of, saved
from tests.runtime.state.test_layouts import differences, merged

MODEL = "tests.helpers.stated:Model"


@pytest.fixture
def states(pool, tmp_path):
    """Where a state of four ranks is, saved after two steps."""
    before = pool(4).run(saved, "full_shard", tmp_path / "states", extra={"note": "a"})
    return tmp_path / "states", before


def write_plan(path, layout):
    path.write_text(yaml.safe_dump(plan_of(layout)))
    return str(path)


def test_it_says_what_a_state_has(states, capsys):
    path, _ = states
    assert main(["state", str(path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{path}/step-00000002: whole, step 2, saved by 4 ranks (dp_shard 4)",
        "  model      23 tensors, 22.2 KiB",
        "  optimizer  66 tensors, 44.4 KiB, AdamW",
        "  values     scheduler, data, extra",
    ]
    assert main(["state", str(path / "step-00000002"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    (only,) = result["result"]["states"]
    assert (only["step"], only["world_size"], only["is_whole"]) == (2, 4, True)
    assert only["sections"]["model"]["tensors"] == 23


def test_damage_is_an_answer(states, capsys):
    path, _ = states
    file = path / "step-00000002" / "rank-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert main(["state", str(path)]) == 1
    out = capsys.readouterr().out
    assert "step-00000002: damaged, step 2" in out
    assert f"{file}: the file was changed after it was saved" in out
    assert main(["state", "convert", str(path), "--to", "hf", "--out", str(path / "hf")]) == 2
    assert "the file was changed after it was saved" in capsys.readouterr().err
    assert not (path / "hf").exists()


def test_it_says_what_loading_under_a_plan_reads(states, tmp_path, capsys):
    path, _ = states
    plan = write_plan(tmp_path / "plan.yaml", "ddp")
    two = ["--set", "mesh.dp_replicate=2"]
    assert main(["state", str(path), "-f", plan, *two, "--model", MODEL]) == 0
    assert "each of 2 ranks reads up to 66.6 KiB, 133.2 KiB in all" in capsys.readouterr().out
    plan = write_plan(tmp_path / "plan.yaml", "full_shard")
    assert main(["state", str(path), "-f", plan, "--set", "mesh.dp_shard=4", "--model", MODEL]) == 0
    assert "each of 4 ranks reads up to 16.7 KiB, 66.9 KiB in all" in capsys.readouterr().out
    plan = write_plan(tmp_path / "plan.yaml", "ddp")
    other = "tests.runtime.state.test_layouts:Other"
    assert main(["state", str(path), "-f", plan, *two, "--model", other]) == 1
    assert "the state has 2 tensors that the model lacks" in capsys.readouterr().out


@pytest.mark.parametrize(
    "layout", ["pp", "packed", pytest.param("ep_fsdp", marks=pytest.mark.wide)]
)
def test_a_state_that_is_written_anew_is_the_same(states, pool, tmp_path, capsys, layout):
    path, before = states
    plan, out = write_plan(tmp_path / "plan.yaml", layout), tmp_path / "out"
    assert (
        main(["state", "convert", str(path), "--to", plan, "--out", str(out), "--model", MODEL])
        == 0
    )
    assert capsys.readouterr().out == f"wrote {out}/step-00000002\n"
    world = LAYOUTS[layout].world
    assert main(["state", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["result"]["states"][0]["world_size"] == world
    after = pool(world).run(loaded, layout, out)
    assert not differences(merged(before), merged(after))
    # Python is not seeded in the tests: its states are of the ranks that saved them.
    drawn = read_manifest(out / "step-00000002").values["random"]
    assert "cpu" in drawn
    assert "python" not in drawn
    assert {each.name for each in out.glob("*/rank-*")} == {
        f"rank-{rank:05d}.safetensors" for rank in range(world)
    }


def test_a_model_is_written_for_transformers(states, tmp_path, capsys):
    from safetensors.torch import load_file

    path, before = states
    out = tmp_path / "out"
    assert main(["state", "convert", str(path), "--to", "hf", "-o", str(out), "--step", "2"]) == 0
    tensors = load_file(out / "model.safetensors")
    numbers = merged(before)
    assert tensors.keys() == {name for name in numbers if "/" not in name and name != "rates"}
    assert all((tensors[name] == numbers[name]).all() for name in tensors)
    assert main(["state", str(out)]) == 0
    assert "a checkpoint of Hugging Face" in capsys.readouterr().out
    assert main(["state", "convert", str(path), "--to", "hf", "--out", str(out)]) == 2
    assert "has a checkpoint, which is not overwritten" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["DIR", "more"], "state takes one folder"),
        (["DIR", "--to", "hf"], "--to is about converting"),
        (["convert", "DIR"], "convert needs --to"),
        (["convert", "DIR", "--to", "hf"], "convert needs --out"),
        (["convert", "DIR", "--to", "none.yaml", "--out", "o"], "none.yaml: there is no such file"),
        (["DIR/none"], "there is no state in this folder"),
        (["convert", "DIR", "--to", "hf", "--out", "o", "--step", "9"], "no state of step 9"),
    ],
)
def test_what_cannot_be_done_is_said(states, capsys, words, text):
    path, _ = states
    assert main(["state", *(word.replace("DIR", str(path)) for word in words)]) == 2
    assert text in capsys.readouterr().err
