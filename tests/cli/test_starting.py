"""init, gpus, schema and completion, and the words of a person who has just begun.

Which seeded bug would this catch? A plan of `init` that `check` or `plan` refuses, or that replaces
a file; a verb or flag that a shell does not complete; a fix that names nothing that exists.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from meshplan.cli.app import VERBS, main
from meshplan.layout.hardware import devices
from meshplan.model.blueprint import config as configs
from meshplan.runtime import calibrate
from meshplan.spec import trust
from meshplan.spec.json_schema import EDITOR_LINE, plan_schema
from meshplan.spec.reader import load_spec
from tests.planner.test_planner import LLAMA

ROOT = Path(__file__).parents[2]
NET = """
import torch

class Net(torch.nn.Sequential):
    pass

def build():
    return Net({layers})
"""
GPUS = ["--gpu", "h100 sxm 80g", "--gpus-per-node", "4"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory, and a home for what is trusted."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def net(here: Path, layers: str, name: str) -> str:
    (here / f"{name}.py").write_text(NET.format(layers=layers))
    return f"{name}:build"


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_plan_of_a_config_can_be_planned(here, capsys, nodes):
    (here / "llama").mkdir()
    (here / "llama" / "config.json").write_text(json.dumps(LLAMA))
    assert main(["init", "--config", "llama", *GPUS, "--nodes", str(nodes)]) == 0
    assert capsys.readouterr() == ("wrote plan.yaml; next: meshplan plan -f plan.yaml\n", "")
    text = (here / "plan.yaml").read_text()
    assert text.startswith(EDITOR_LINE)
    jsonschema.validate(yaml.safe_load(text), plan_schema())
    spec = load_spec("plan.yaml")
    assert spec.hardware is not None
    assert (spec.hardware.nodes, spec.hardware.gpus_per_node) == (nodes, 4)
    assert spec.hardware.gpu == "h100-sxm-80gb"
    assert (spec.hardware.inter_bytes_per_s is None) == (nodes == 1)
    assert spec.batch.seq_len == min(4096, LLAMA["max_position_embeddings"])
    assert main(["check", "-q"]) == 0  # The only plan here needs no -f.
    assert main(["plan", "-q", "--dry-run"]) == 0


def test_the_network_of_a_start_is_the_usual_one(here):
    (here / "config.json").write_text(json.dumps(LLAMA))
    words = ["--gpu", "a100-sxm-80gb", "--nodes", "2", "--gpus-per-node", "8"]
    assert main(["init", "--config", "config.json", *words, "-q"]) == 0
    assert load_spec("plan.yaml").hardware.inter_bytes_per_s == 25e9


def test_the_config_is_named_from_the_folder_of_the_plan(here):
    (here / "config.json").write_text(json.dumps(LLAMA))
    (here / "plans").mkdir()
    assert main(["init", "--config", "config.json", *GPUS, "-o", "plans/new.yaml", "-q"]) == 0
    model = load_spec("plans/new.yaml").model
    assert model is not None
    assert model.config == os.path.join("..", "config.json")
    assert main(["check", "-f", "plans", "-q"]) == 0


@pytest.mark.parametrize(
    ("layers", "shape", "tokens"),
    [
        ("torch.nn.Conv2d(3, 8, 4, 4), torch.nn.Flatten()", (1, 3, 224, 224), None),
        ("torch.nn.Conv1d(2, 4, 3)", (1, 2, 1024), None),
        ("torch.nn.Linear(6, 4), torch.nn.Linear(4, 6)", (1, 6), None),
        ("torch.nn.Embedding(50, 8), torch.nn.Linear(8, 50)", None, 2048),
        ("torch.nn.LayerNorm(4)", None, None),
    ],
)
def test_a_plan_of_a_module_has_its_input_and_is_trusted(here, capsys, layers, shape, tokens):
    entry = net(here, layers, f"net_{abs(hash(layers))}")
    assert main(["init", "--model", entry.replace(":", ".py:"), *GPUS]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("wrote plan.yaml")
    assert err.startswith("note: ")
    spec = load_spec("plan.yaml")
    assert spec.model is not None
    assert spec.model.entry == entry
    assert trust.is_trusted(spec.origins[""])
    assert (spec.input.shape if spec.input else None) == shape
    assert spec.batch.seq_len == tokens
    if shape or tokens:
        assert main(["check", "-q"]) == 0


def test_gpus_that_are_seen_are_written(here, monkeypatch, capsys):
    monkeypatch.setattr(calibrate, "seen_devices", lambda: (devices()["a100-sxm-40gb"], 2))
    assert main(["init"]) == 0
    spec = load_spec("plan.yaml")
    assert spec.hardware is not None
    assert (spec.hardware.gpu, spec.hardware.gpus_per_node) == ("a100-sxm-40gb", 2)
    assert "no model is named" in capsys.readouterr().err


def test_nothing_is_replaced(here, capsys):
    (here / "plan.yaml").write_text("mine")
    assert main(["init", *GPUS]) == 2
    assert "exists already" in capsys.readouterr().err
    assert (here / "plan.yaml").read_text() == "mine"
    assert main(["init", "--gpus-per-node", "0", "-o", "new.yaml"]) == 2
    assert main(["init", "--gpu", "a100", "-o", "new.yaml"]) == 2
    assert sorted(p.name for p in here.iterdir()) == ["plan.yaml"]


def test_every_gpu_is_listed(capsys):
    assert main(["gpus"]) == 0
    out = capsys.readouterr().out
    assert main(["gpus", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["result"]["gpus"]
    assert [each["name"] for each in listed] == list(devices())
    assert all(f"\n{name} " in out for name in devices())
    sizes = {each["name"]: each["memory_bytes"] for each in listed}
    assert sizes["h100-sxm-80gb"] == devices()["h100-sxm-80gb"].usable_bytes


def test_the_schema_is_printed(capsys):
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == plan_schema()


def completed(script: str, *words: str) -> list[str]:
    """What bash offers for the last of these words."""
    line = " ".join(f"'{word}'" for word in words)
    asked = f"{script}\nCOMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _meshplan\n"
    done = subprocess.run(
        ["bash", "-c", asked + 'printf "%s\\n" "${COMPREPLY[@]}"'],
        capture_output=True, text=True, check=True, timeout=20,
    )  # fmt: skip
    return done.stdout.split()


def test_bash_completes_verbs_and_flags(capsys):
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert completed(script, "meshplan", "") == [verb.name for verb in VERBS]
    assert completed(script, "meshplan", "expl") == ["explain"]
    assert completed(script, "meshplan", "init", "--gpu") == ["--gpu", "--gpus-per-node"]
    assert completed(script, "meshplan", "completion", "z") == ["zsh"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_every_verb(capsys, shell):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(verb.name in script for verb in VERBS)
    if found := shutil.which(shell):
        subprocess.run([found, "-n", "-c", script], check=True, timeout=20)


PLAN = {"version": 1, "model": {"config": "config.json"}, "mesh": {"dp_shard": 4}}


@pytest.fixture
def planned(here):
    (here / "config.json").write_text(json.dumps(LLAMA))
    more = {"hardware": {"nodes": 1, "gpus_per_node": 4, "gpu": "h100-sxm-80gb"},
            "mesh": "auto", "strategy": "auto", "batch": {"global": 8, "seq_len": 64},
            "precision": "bf16-mixed", "loss_chunks": 1, "allocator": "default"}  # fmt: skip
    (here / "plan.yaml").write_text(json.dumps(PLAN | more))
    return here


@pytest.mark.parametrize(
    ("words", "what", "fix"),
    [
        ("estmate", "there is no verb 'estmate'", "did you mean 'estimate'?"),
        ("why-not", "there is no verb 'why-not'", "did you mean 'explain why-not'?"),
        ("wobble", "there is no verb 'wobble'", "write one of init, estimate"),
        ("plan --gpus 8", "plan has no flag --gpus", "did you mean '--gpu'?"),
        ("show plan.yaml", "show does not take 'plan.yaml'", "write -f plan.yaml"),
        ("explain why stratgy", "'stratgy' is not a key", "did you mean 'strategy'?"),
        ("explain why optimizer", "no other values", "ask why-not optimizer=VALUE"),
        ("explain why-not mesh=2", "'mesh' stands for several fields", "ask why-not mesh."),
        ("explain model.layers.9", "is neither a module", "model.layers has the modules 0 to"),
        ("estimate --gpu h7 --params 3B --gpus 8", "not in the hardware table", "meshplan gpus"),
        ("estimate --gpu 8 --params 3B", "is a number, not the name", "write --gpus 8 for 8 GPUs"),
        ("check --set model.entry=my/net.py:build", "names a file", "write my.net:build"),
        ("estimate --config org/net-7B --gpus 1", "cannot read", "hf download org/net-7B"),
    ],
)  # fmt: skip
def test_what_a_tired_person_types_has_a_fix(planned, capsys, words, what, fix):
    assert main(words.split()) == 2
    err = capsys.readouterr().err
    assert what in err
    assert fix in err


def test_a_word_stands_for_its_field(planned, capsys):
    assert main(["explain", "why-not", "tp=2", "-q"]) in (0, 1)
    assert capsys.readouterr().out.startswith("mesh.tp=2: ")
    assert main(["explain", "why", "mesh", "-q"]) in (0, 1)
    asked = {line.partition("=")[0] for line in capsys.readouterr().out.splitlines()}
    assert {"mesh.tp", "mesh.pp", "mesh.dp_shard", "mesh.dp_replicate"} <= asked


def test_several_plans_are_named(planned, capsys):
    (planned / "plan.yaml").rename(planned / "a.yaml")
    assert main(["check", "-q"]) == 0
    (planned / "b.yml").write_text("# mine\nversion: 1\n")
    (planned / "a.lock.yaml").write_text("version: 1\n")
    (planned / "other.yaml").write_text("key: 1\nversion: 1\n")
    assert main(["check"]) == 2
    err = capsys.readouterr().err
    assert "the working directory has 2" in err
    assert "add one of -f a.yaml, -f b.yml" in err


def test_a_config_is_found_in_the_cache_of_the_hub(here, monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_CACHE", str(here / "hub"))
    model = here / "hub" / "models--org--name-7B"
    for revision in ("old", "new"):
        (model / "snapshots" / revision).mkdir(parents=True)
        (model / "snapshots" / revision / "config.json").write_text(json.dumps(LLAMA))
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("old")
    assert configs.config_file("org/name-7B") == model / "snapshots" / "old" / "config.json"
    assert main(["estimate", "--config", "org/name-7B", "--gpus", "8", "-q"]) == 0
    assert main(["init", "--config", "org/name-7B", *GPUS, "-q"]) == 0
    stated = load_spec("plan.yaml").model
    assert stated is not None
    assert stated.config == "org/name-7B"
    assert main(["plan", "--dry-run", "-q"]) == 0


def test_it_starts_without_torch():
    script = (
        "import sys; from meshplan.cli.app import main\n"
        "for words in (['gpus'], ['schema'], ['completion', 'bash']): main(words)\n"
        "sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    )
    subprocess.run(
        [sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL, timeout=60
    )


def test_several_plans_are_checked_as_pre_commit_names_them(capsys):
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    plans = [str(path) for path in sorted((ROOT / "plans").glob("*.yaml"))]
    assert all(re.search(hook["files"], path) for path in plans)
    plans = [str(ROOT / "plans" / f"{name}.yaml") for name in ("ddp", "hybrid_2x4", "tp")]
    assert re.search(hook["exclude"], "plans/auto.lock.yaml")
    program, *words = hook["entry"].split()
    assert program == "meshplan"
    assert main([*words, *plans]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(plans)


def test_the_worst_of_several_plans_counts(here, capsys):
    (here / "good.yaml").write_text("version: 1\nmesh: {dp_shard: 2}\n")
    (here / "bad.yaml").write_text("version: 1\nmesh: {dp_shard: two}\n")
    assert main(["check", "-q", "bad.yaml", "good.yaml", "none.yaml"]) == 2
    out, err = capsys.readouterr()
    assert "good.yaml: ok" in out
    assert "bad.yaml:2:18" in err
    assert "none.yaml: there is no such file" in err
    assert main(["check", "good.yaml", "-f", "bad.yaml"]) == 2
    assert main(["check", "good.yaml", "bad.yaml", "--json"]) == 2


def test_flags_may_stand_between_the_words_of_a_verb(here, capsys):
    for name in ("a", "b"):
        (here / f"{name}.yaml").write_text("version: 1\nmesh: {dp_shard: 2}\n")
    assert main(["check", "a.yaml", "-q", "b.yaml"]) == 0
    assert capsys.readouterr().out == "a.yaml: ok\nb.yaml: ok\n"
