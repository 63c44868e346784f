"""Code that a file names runs when a person says so, and no file of a folder is imported by chance.

Which seeded bug would this catch? A verb that imports `model.entry` by itself, a lock or a config
that reaches code, a path on which the working directory comes first.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import sysconfig
from multiprocessing.forkserver import ensure_running
from pathlib import Path

import huggingface_hub as hub
import pytest
import transformers

from meshplan.cli.app import main
from meshplan.errors import SpecError
from meshplan.planner.lock.admission import check_chosen
from meshplan.planner.lock.lock import lock_path, overrides, read, write
from meshplan.planner.problem.request import loading
from meshplan.runtime.estimate.scale_down import model_of_source, source_of_config
from meshplan.runtime.trace.entry import model_of_entry
from meshplan.spec import reader, source, trust
from meshplan.spec.reader import load_spec
from tests.helpers.pool import forkserver
from tests.planner.test_planner import LLAMA, job

__all__ = ["job"]

EVIL = """
import pathlib
pathlib.Path(__file__).with_name("RAN").touch()
import torch

def build():
    return torch.nn.Linear(4, 4)

def change(module):
    pass
"""
PLAN = """version: 1
model: {entry: "evil_code:build"}
mesh: {dp_shard: 2}
strategy: full_shard
hardware: {nodes: 1, gpus_per_node: 2, gpu: h100-sxm-80gb}
input: {shape: [2, 4], dtype: float32}
batch: {global: 4}
"""
VERBS = {
    "check": 0, "show": 2, "estimate": 2, "plan --dry-run": 2, "explain why strategy": 2,
    "draw --what mesh -o mesh.svg": 2, "report -o report.html": 0, "verify": 2,
}  # fmt: skip
"""By verb, how it ends where the model may not be built: what can be told without it is."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a plan that names code, in which nobody has said anything."""
    forkserver()
    ensure_running()  # Its environment is that of every process after it: not the one below.
    monkeypatch.delenv(trust.ALLOW_CODE)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil_code.py").write_text(EVIL)
    (tmp_path / "plan.yaml").write_text(PLAN)
    yield tmp_path
    sys.modules.pop("evil_code", None)


@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_runs_code_unasked(folder, capsys, verb):
    assert main([*verb.split(), "-f", "plan.yaml"]) == VERBS[verb]
    err = capsys.readouterr().err
    assert not (folder / "RAN").exists()
    if VERBS[verb] or verb == "check":
        assert "meshplan trust plan.yaml" in err
    assert "this file names the code 'evil_code:build'" in err


@pytest.mark.parametrize(
    "words",
    [["--allow-code"], ["--model", "evil_code:build"], ["--set", "model.entry=evil_code:build"]],
)
def test_a_person_may_say_so(folder, words):
    assert main(["check", "-f", "plan.yaml", *words]) == 0
    assert (folder / "RAN").exists()
    assert trust.ALLOW_CODE not in os.environ
    assert not sys.path.count(str(folder))


def test_trust_ends_with_a_change_of_the_file(folder, capsys):
    assert main(["trust", "plan.yaml"]) == 0
    assert "plan.yaml:2:16: model.entry: evil_code:build" in capsys.readouterr().out
    assert main(["show", "-f", "plan.yaml"]) == 0
    for change in (
        lambda path: path.write_text(PLAN + "# more"),
        lambda path: path.rename("b.yaml"),
    ):
        (folder / "plan.yaml").write_text(PLAN)
        change(folder / "plan.yaml")
        name = "b.yaml" if (folder / "b.yaml").exists() else "plan.yaml"
        assert main(["show", "-f", name]) == 2
    (folder / "plan.yaml").write_text(PLAN)
    assert main(["show", "-f", "plan.yaml"]) == 0
    assert main(["trust", "--forget", "plan.yaml"]) == 0
    assert main(["show", "-f", "plan.yaml"]) == 2


def test_trust_is_of_what_was_read_and_not_of_what_lies_there_later(folder, monkeypatch):
    """A file that is swapped between reading and the check, in either direction."""
    evil = load_spec("plan.yaml")
    harmless = PLAN.replace("evil_code:build", "meshplan.runtime.demo_model:build")
    (folder / "plan.yaml").write_text(harmless)
    assert main(["trust", "plan.yaml"]) == 0
    with pytest.raises(trust.UntrustedError):
        model_of_entry(evil.model.entry, evil.origin("model.entry"))

    def read_and_swap(name):
        text = source.read_text(name)
        (folder / "plan.yaml").write_text(PLAN)
        return text

    (folder / "plan.yaml").write_text(harmless + "# again")
    with monkeypatch.context() as patch:
        patch.setattr(reader, "read_text", read_and_swap)
        assert main(["trust", "plan.yaml"]) == 0
    assert main(["show", "-f", "plan.yaml"]) == 2
    assert not (folder / "RAN").exists()


def test_trust_is_of_one_working_directory(folder, monkeypatch, capsys):
    """Else the same names would find the modules of another folder."""
    assert main(["trust", "plan.yaml"]) == 0
    other = folder / "other"
    other.mkdir()
    (other / "evil_code.py").write_text(EVIL)
    with monkeypatch.context() as patch:
        patch.chdir(other)
        assert main(["show", "-f", str(folder / "plan.yaml")]) == 2
        assert f"meshplan trust {folder}" in capsys.readouterr().err
    assert not (other / "RAN").exists()
    assert main(["show", "-f", "plan.yaml"]) == 0


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_nothing_is_trusted_that_could_not_be_shown(folder, more):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "meshplan", "trust", "plan.yaml", *more],
            stdout=full, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    assert done.returncode == 2
    assert main(["show", "-f", "plan.yaml"]) == 2


def test_code_of_rules_is_not_run_by_verify_or_demo(folder, capsys):
    rules = 'rules: [{match: "**", apply: "evil_code:change"}]\n'
    model = PLAN.replace("evil_code:build", "meshplan.runtime.demo_model:build")
    (folder / "plan.yaml").write_text(
        model.replace("input: {shape: [2, 4], dtype: float32}\n", "") + rules
    )
    for verb in ("verify", "demo"):
        assert main([verb, "-f", "plan.yaml"]) == 2
        assert "this file names the code 'evil_code:change'" in capsys.readouterr().err
    assert not (folder / "RAN").exists()


def test_a_file_with_a_persons_name_is_a_file(folder):
    """`-f model` names a file, and says nothing of what it may run."""
    for name in sorted(trust.PERSONS_WORDS - {"<mapping>"}):
        (folder / name).write_text(PLAN)
        assert main(["check", f"--file={name}"]) == 0
    assert not (folder / "RAN").exists()


def test_installed_modules_are_not_shadowed(folder, capsys):
    (folder / "hypothesis.py").write_text(EVIL)
    assert main(["check", "-f", "plan.yaml", "--model", "hypothesis:build"]) == 2
    assert ", not from the working directory" in capsys.readouterr().err
    assert not (folder / "RAN").exists()


CHOSEN = {
    "model": {"entry": "evil_code:build"},
    "model.entry": "evil_code:build",
    "rules[0]": {"match": "**", "apply": "evil_code:change"},
    "rules[1]": {"match": "**", "activation_checkpointing": "full"},
    "hardware": {"gpu": "h200"},
    "hardware.gpu": "h200",
    "precision": "bf16-true",
    "optimizer": "sgd",
    "mesh": {"dp_replicate": 8},
    "batch.global": 8,
    "solve": {"objective": "memory"},
    "activation_checkpointing": "none",
    "rules[2]": {"match": "**", "activation_checkpointing": "none"},
    "pipeline.microbatches": "&a",
}


@pytest.mark.parametrize("path", CHOSEN)
def test_a_lock_says_what_the_plan_leaves_open(job, capsys, path):
    """Well hashed, as whoever writes a hostile lock can."""
    rules = [{"match": "model.layers.0", "activation_checkpointing": "none"}]
    plan = job(mesh={"dp_shard": 8}, strategy="auto", rules=rules, activation_checkpointing="full")
    assert main(["plan", "-f", str(plan), "-q"]) == 0
    lock = read(lock_path(plan))
    content = {key: value for key, value in lock.content.items() if key != "hash"}
    write(lock.path, {**content, "chosen": {**lock.chosen, path: CHOSEN[path]}})
    for verb in ("check", "estimate"):
        capsys.readouterr()
        assert main([verb, "-f", str(plan)]) in (1, 2)
        out, err = capsys.readouterr()
        assert f"plan.lock.yaml:{_line(lock.path, path)}:" in out + err
    capsys.readouterr()
    assert main(["diff", str(lock.path), str(plan), "--set", "clip_grad_norm=1"]) == 2
    assert f"plan.lock.yaml:{_line(lock.path, path)}:" in capsys.readouterr().err


@pytest.mark.parametrize("settings", [[], ["--set", "optimizer=sgd"]])
def test_a_lock_that_diff_names_is_of_its_plan_and_model(job, tmp_path, capsys, settings):
    """As the lock beside a plan file, but refused where that one is passed over."""
    plan = job(mesh={"dp_shard": 8}, strategy="auto")
    assert main(["plan", "-f", str(plan), "-q"]) == 0
    lock = lock_path(plan)
    words = ["diff", str(lock), str(plan), *settings]
    assert main(words) == 0
    before = plan.read_text()
    for change, other in (
        (lambda: plan.write_text(before + " "), None),
        (lambda: plan.write_text(before.replace('"global": 64', '"global": 32')), "state"),
        (lambda: job(LLAMA | {"vocab_size": 8192}, mesh={"dp_shard": 8}, strategy="auto"), "model"),
    ):
        change()
        capsys.readouterr()
        assert main(words) == (2 if other else 0)
        if other:
            err = capsys.readouterr().err
            assert f"{lock}: this lock was made for another {other}" in err


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("expected", 3), ("expected", {"step_s": "soon"}), ("expected", {"mfu": float("inf")}),
        ("expected", {"step_s": True}), ("memory", None), ("memory", [3]),
        ("memory", [{"high_bytes": -1}]),
    ],
)  # fmt: skip
def test_figures_of_a_lock_are_figures(job, capsys, name, value):
    """Well hashed, as whoever writes a hostile lock can."""
    plan = job(mesh={"dp_shard": 8}, strategy="auto")
    assert main(["plan", "-f", str(plan), "-q"]) == 0
    lock = read(lock_path(plan))
    content = {key: each for key, each in lock.content.items() if key != "hash"}
    write(lock.path, {**content, name: value})
    for words in (["check", "-f", str(plan)], ["diff", str(plan), str(lock.path)]):
        assert main(words) == 2
        assert "this is not a lock file of this version: it" in capsys.readouterr().err


def _line(path: Path, key: str) -> int:
    lines = path.read_text().splitlines()
    chosen = lines.index("chosen:")
    return next(n for n in range(chosen, len(lines)) if lines[n].startswith(f"  {key}:")) + 1


@pytest.mark.parametrize(
    ("stated", "chosen"),
    [
        ({"strategy": "full_shard"}, {"strategy": "auto"}),
        ({"offload": {"params": True}}, {"offload": None}),
        ({"activation_checkpointing": "full"}, {"activation_checkpointing": None}),
    ],
)  # fmt: skip
def test_a_lock_takes_no_word_of_the_plan_back(stated, chosen):
    load = loading({"version": 1, "mesh": {"dp_shard": 8}, **stated}, ())
    origins = {path: load(()).origin("") for path in chosen}
    with pytest.raises(SpecError, match="a lock cannot change it"):
        check_chosen(chosen, origins, load, overrides(chosen))


def test_no_truncation_of_a_lock_is_taken(job):
    plan = job(mesh={"dp_shard": 8}, strategy="auto")
    assert main(["plan", "-f", str(plan), "-q"]) == 0
    path = lock_path(plan)
    whole = path.read_bytes()
    for size in range(len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(SpecError):
            read(path)


@pytest.mark.parametrize(
    "name", ["pipeline", "PreTrainedModel", "AutoModel", "__doc__", "os.system", 3, []]
)
def test_a_config_names_a_class_of_models(tmp_path, name):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | {"architectures": name if name == [] else [name]}))
    if name == []:
        assert source_of_config(path, load_spec({"version": 1}).origin("")).architecture
        return
    with pytest.raises(SpecError, match="transformers has no model class"):
        source_of_config(path, load_spec({"version": 1}).origin(""))


@pytest.mark.parametrize(
    "more",
    [
        {"attn_implementation": "org/kernel"}, {"_attn_implementation": "org/kernel"},
        {"attn_implementation": {"": "org/kernel"}},
        {"text_config": {"_attn_implementation_internal": "org/kernel@main:f"}},
        {"experts_implementation": "org/kernel"},
        {"experts_implementation": "deepgemm"},  # fetched at the first forward
        {"backbone_config": {"use_pretrained_backbone": True}},
        {"num_hidden_layers": 10_000},
    ],
)  # fmt: skip
def test_a_config_asks_for_nothing_from_elsewhere(tmp_path, more):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | more))
    words = "is not a kernel built into|download weights|more modules than any model"
    with pytest.raises(SpecError, match=words):
        source_of_config(path, load_spec({"version": 1}).origin(""))


@pytest.mark.parametrize(
    "words",
    [
        "check -f {plan}", "plan -f {plan} --dry-run",
        pytest.param("estimate -f {plan} --trace", marks=pytest.mark.wide),
        "draw --what mesh -f {plan} -o {plan}.html",
        pytest.param("verify -f {plan}", marks=pytest.mark.wide),
        pytest.param(
            "demo --plan ddp --steps 2 --set mesh.dp_replicate=2 --set hardware.gpus_per_node=2",
            marks=pytest.mark.wide,
        ),
    ],
)  # fmt: skip
def test_no_module_of_the_working_directory_is_imported(tmp_path, job, words):
    """One file for every module that there is, in the folder where a verb is run."""
    hardware = {"nodes": 1, "gpus_per_node": 2, "gpu": "h100-sxm-80gb"}
    plan = job(mesh={"dp_shard": 2}, hardware=hardware)
    here = tmp_path / "here"
    here.mkdir()
    names = (
        sys.stdlib_module_names | {path.stem for path in _installed()} | {"triton", "flash_attn"}
    )
    for name in sorted(names - {"meshplan", "tests"}):
        (here / f"{name}.py").write_text("open(__file__ + '.ran', 'w').close()\n")
    script = Path(sysconfig.get_path("scripts"), "meshplan")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"}
    done = subprocess.run(
        [script, *words.format(plan=plan).split()],
        cwd=here, env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert not sorted(path.name for path in here.glob("*.ran"))
    assert done.returncode in (0, 1), done.stderr


def test_no_matplotlibrc_of_the_working_directory_is_read(job, tmp_path):
    """It is what matplotlib asks first, and a pipe of that name would block for good."""
    plan = job(mesh={"dp_shard": 8}, strategy="full_shard")
    drawn = {}
    for name in ("clean", "planted"):
        (tmp_path / name).mkdir()
    os.mkfifo(tmp_path / "planted" / "matplotlibrc")
    for name in ("clean", "planted"):
        done = subprocess.run(
            [sys.executable, "-P", "-m", "meshplan", "draw", "--what", "mesh", "-f", plan,
             "-o", "mesh.svg"],
            cwd=tmp_path / name, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        drawn[name] = (tmp_path / name / "mesh.svg").read_bytes()
    assert drawn["clean"] == drawn["planted"]


def test_a_model_of_a_config_is_built_offline(tmp_path, monkeypatch):
    """Whatever a class of transformers asks the hub for, nothing leaves the machine."""
    asked: list[object] = []

    def fetch(*_, **__):
        hub.hf_hub_download("org/name", "config.json", cache_dir=tmp_path)

    def connect(*words, **__):
        asked.append(words)
        raise OSError("no network in a test")

    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", connect)
    monkeypatch.setattr(socket.socket, "connect", connect)
    llama = source_of_config(tmp_path, load_spec({"version": 1}).origin(""))
    for call in (
        lambda: source_of_config(tmp_path, load_spec({"version": 1}).origin("")),
        lambda: model_of_source(llama, on_meta=True),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(transformers.LlamaConfig, "from_dict", fetch)
            patch.setattr(transformers.LlamaForCausalLM, "__init__", fetch)
            with pytest.raises((SpecError, hub.errors.LocalEntryNotFoundError)):
                call()
    assert not asked
    assert not hub.is_offline_mode()


def _installed() -> list[Path]:
    return [
        path for path in Path(sysconfig.get_path("purelib")).iterdir() if path.stem.isidentifier()
    ]
