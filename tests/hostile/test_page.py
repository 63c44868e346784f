"""The page on trust against the code: what each verb reads, runs and writes, by an audit hook.

Which seeded bug would this catch? A verb that is not in the table, or that reads, runs or writes
what the table does not name; a table that names what no verb does.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshplan.cli.app import VERBS, main
from meshplan.cost.calibration import profile_from, write_profile
from meshplan.planner.answers.measured import FORMAT
from meshplan.runtime import calibrate
from meshplan.spec import trust
from meshplan.state.safetensors import TensorEntry, write
from tests.cost.test_calibrate import MADE
from tests.hostile.test_code import folder
from tests.planner.test_planner import job

__all__ = ["folder", "job"]

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/trust.md").read_text()
ROWS = {
    row[0]: row[1:]
    for line in PAGE.splitlines()
    if len(row := [cell.strip() for cell in re.sub("`", "", line).strip("|").split("|")]) == 4
    and row[0].isalpha()
}
FILES = {"plan": "plan.yaml", "lock": "plan.lock.yaml", "config": "config.json",
         "profile": "profile.json", "run.json": "run.json",
         "a file of another tool": "theirs.json", "files that it names": "beside.json"}  # fmt: skip
"""What the table calls the files of a person."""
DECOYS = ("matplotlibrc", ".env", "pyproject.toml", "setup.cfg", "hardware.json", "generation.json",
          "generation_config.json", "tokenizer.json", "adapter_config.json", "torch.py", "numpy.py",
          "sitecustomize.py", "usercustomize.py", "matplotlib.py", "yaml.py")  # fmt: skip
"""Files that no verb has a reason to read, under names that libraries look for."""
CODE = ("model.entry", "apply")

WATCH = """
import json, os, sys

LOG, FOLDER = os.environ["WATCH_LOG"], os.environ["WATCH_FOLDER"]

def path_of(path, folder=-1):
    if folder != -1:
        path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), os.fsdecode(path))
    return os.path.abspath(os.fsdecode(path))

def note(*what):
    handle = os.open(LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(handle, json.dumps(what).encode() + b"\\n")
    os.close(handle)

def see(event, args):
    if event == "open":
        path, mode, flags = args
        if not isinstance(path, str | bytes | os.PathLike) or path == LOG:
            return
        writes = (isinstance(mode, str) and set(mode) & set("wax+")) or flags & (
            os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        path = path_of(path)
        if writes or os.path.dirname(path) == FOLDER:  # Modules are many, and not of interest.
            note("writes" if writes else "reads", path)
    elif event in ("os.rename", "os.link"):
        note("writes", path_of(args[1], args[3]))
        note("writes", path_of(args[0], args[2]))
    elif event == "os.symlink":
        note("writes", path_of(args[1], args[2]))
    elif event in ("os.mkdir", "os.remove", "os.rmdir"):
        note("writes", path_of(args[0], args[-1]))
    elif event in ("os.truncate", "os.utime", "os.chmod", "os.chown"):
        if not isinstance(args[0], int):
            note("writes", path_of(args[0]))
    elif event in ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.spawn", "os.system"):
        note("runs", os.path.basename(os.fsdecode(args[0])))
    elif event in ("socket.connect", "socket.bind", "socket.sendto"):
        note("network", int(args[0].family), str(args[1]))
    elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
        note("network", str(args[0]))

sys.addaudithook(see)
"""
"""A sitecustomize: it watches a verb from before its first line, and every process it starts."""
START = "import sys; from meshplan.cli.app import main; sys.exit(main(sys.argv[1:]))"
QUICK = "import meshplan.runtime.calibrate as it; it.ROUNDS = 1; "
"""Times of one round are too noisy to be a profile, unless a profile may be noisy."""
NOISY = "import meshplan.cost.calibration as it; it._WORST_SPREAD = it._WORST_LAW = 1e9; "
SMALL = "--set batch.global=2 --set batch.seq_len=16"
WORDS = {
    "init": "--config {config} --gpu h100-sxm-80gb --gpus-per-node 8 -o {folder}/new.yaml",
    "gpus": "", "schema": "", "completion": "bash",
    "estimate": "-f {plan}", "check": "-f {plan}", "plan": "-f {plan} --profile {profile}",
    "explain": "why mesh.dp_shard -f {plan}", "diff": "{plan} {lock}",
    "compare": "{folder}/run.json -f {plan} --profile {profile}",
    "calibrate": "--out {folder}/mine.json", "show": "-f {plan}",
    "record": '-f {plan} --set input={{"input_ids":{{"shape":[1,16],"dtype":"int64"}}}} '
    "-o {folder}/model.tape.json",  # A stated input is traced, not planned from the config.
    "draw": "--what mesh -f {plan} -o {folder}/mesh.svg", "report": "-f {plan} -o {folder}/it.html",
    "import": "{folder}/theirs.json -o {folder}/imported.yaml",
    "export": "-f {plan} --to accelerate --partial -o {folder}/theirs.yaml",
    "trust": "{plan}", "verify": "-f {plan}",
    "launch": "-f {plan} --slurm {folder}/job.sbatch -m train", "doctor": "-f {plan}",
    "state": "{folder}/states -f {plan}",
    "demo": f"-f {{plan}} --steps 2 {SMALL}",
}  # fmt: skip
SLOW = ("verify", "doctor", "demo", "record")
"""They start processes or trace a model, which takes more than ten seconds."""


def make_state(folder: Path) -> None:
    """A checkpoint of one tensor, which is of no model."""
    folder.mkdir()
    entry = TensorEntry("F32", (3,))
    write(folder / "model.safetensors", {"x": entry}, lambda _: (np.zeros(12, np.uint8),))


def make_run(folder: Path) -> None:
    """A run on two ranks of which nothing was measured."""
    empty = {"step_s": None, "phases_s": {}, "peak_bytes": [], "reserved_bytes": []}
    run = {"format": FORMAT, "plan": "", "ranks": 2, "device": "cpu", "collectives": [], **empty}
    (folder / "run.json").write_text(json.dumps(run))


def make_foreign(folder: Path) -> None:
    """The Trainer's arguments, with DeepSpeed's configuration in a file beside them."""
    theirs = {"per_device_train_batch_size": 1, "output_dir": "x", "deepspeed": "beside.json"}
    (folder / "theirs.json").write_text(json.dumps(theirs))
    beside = {"train_batch_size": "auto", "zero_optimization": {"stage": 2}}
    (folder / "beside.json").write_text(json.dumps(beside))


def verbs(words: dict[str, str], slow: tuple[str, ...]) -> list[Any]:
    return [pytest.param(verb, marks=[pytest.mark.wide] * (verb in slow)) for verb in words]


def test_the_table_has_every_verb():
    named = [name for name in ROWS if name != "verb"]
    assert [verb.name for verb in VERBS] == named
    assert set(WORDS) == set(CODE_WORDS) == set(named)


@pytest.mark.parametrize("verb", verbs(WORDS, SLOW))
def test_a_verb_reads_and_writes_what_the_page_says(job, tmp_path, verb):
    hardware = {"nodes": 1, "gpus_per_node": 2, "gpu": "h100-sxm-80gb"}
    plan = job(mesh={"dp_shard": 2}, strategy="auto", hardware=hardware)
    paths = {kind: tmp_path / name for kind, name in FILES.items()}
    write_profile(profile_from(MADE), paths["profile"])
    make_state(tmp_path / "states")
    make_run(tmp_path)
    make_foreign(tmp_path)
    assert main(["plan", "-f", str(plan), "--profile", str(paths["profile"]), "-q"]) == 0
    for name in DECOYS:
        (tmp_path / name).write_text("")
    words = WORDS[verb].format(folder=tmp_path, **paths).split()
    log = watched(tmp_path, verb, words)
    said = dict(zip(("reads", "runs", "writes"), ROWS[verb], strict=True))

    folders = (str(tmp_path / name) for name in ("home", "tmp", "watch"))
    caches = tuple(f"{each}{os.sep}" for each in (*folders, "/dev", "/proc"))
    written = {
        Path(path)
        for what, path, *_ in log
        if what == "writes" and not path.startswith(caches) and not path.endswith(".tmp")
    }
    read = {Path(path).name for what, path, *_ in log if what == "reads" and Path(path).is_file()}
    assert read == {name for kind, name in FILES.items() if kind in said["reads"]}

    allowed = {paths["lock"]} if "PLAN.lock.yaml" in said["writes"] else set()
    if "FILE" in said["writes"]:
        allowed |= {Path(word) for word in words if word.startswith(f"{tmp_path}/")}
    trusted = tmp_path / "data" / "meshplan" / "trusted"
    if "XDG_DATA_HOME" in said["writes"]:
        allowed |= {trusted.parents[1], trusted.parent, trusted}
        allowed |= {path for path in written if path.parent == trusted}
    assert written <= allowed
    if "DIR" not in said["writes"]:  # Only `state convert` writes there.
        assert bool(written) == bool(said["writes"])

    # Python itself, for the processes of verify and demo, matplotlib's question for fonts, and that
    # of the Triton of torch's CUDA builds for the driver.
    programs = {words[0] for what, *words in log if what == "runs"}
    assert programs <= {Path(sys.executable).name, "fc-list", "ldconfig"}
    addresses = [words for what, *words in log if what == "network"]
    assert all(words[0] == socket.AF_UNIX for words in addresses), addresses


def watched(tmp_path: Path, verb: str, words: list[str]) -> list[list[Any]]:
    """What a verb does that the hook is told of, in the folder of its files."""
    for name in ("home", "tmp", "watch"):
        (tmp_path / name).mkdir()
    (tmp_path / "watch" / "sitecustomize.py").write_text(WATCH)
    log = tmp_path / "watch" / "log"
    environment = {"HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "tmp"),
                   "PATH": os.environ["PATH"], "XDG_DATA_HOME": str(tmp_path / "data"),
                   "PYTHONDONTWRITEBYTECODE": "1", "WATCH_LOG": str(log),
                   "WATCH_FOLDER": str(tmp_path),
                   "PYTHONPATH": f"{tmp_path / 'watch'}:{ROOT}"}  # fmt: skip
    start = QUICK + NOISY + START if verb == "calibrate" else START
    done = subprocess.run(
        [sys.executable, "-P", "-c", start, verb, *words],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


NAMED = """
import pathlib
pathlib.Path(__file__).with_name("ran imported").touch()
import torch

def build():
    pathlib.Path(__file__).with_name("ran model.entry").touch()
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))

def change(module):
    pathlib.Path(__file__).with_name("ran apply").touch()
"""
RULES = 'rules: [{match: "**", apply: "evil_code:change"}]\n'
CODE_WORDS = {
    "init": "-o new.yaml", "gpus": "", "schema": "", "completion": "fish",
    "estimate": "-f plan.yaml", "check": "-f plan.yaml", "plan": "-f plan.yaml --dry-run",
    "explain": "memory -f plan.yaml", "diff": "plan.yaml plan.yaml",
    "compare": "run.json -f plan.yaml",
    "calibrate": "-f plan.yaml --out mine.json", "show": "-f plan.yaml",
    "record": "-f plan.yaml -o model.tape.json",
    "draw": "--what memory -f plan.yaml -o it.svg", "report": "-f plan.yaml -o it.html",
    "trust": "plan.yaml", "verify": "-f plan.yaml", "doctor": "-f plan.yaml",
    "launch": "-f plan.yaml --slurm job.sbatch -m train", "state": "states -f plan.yaml",
    "import": "theirs.json -o imported.yaml",
    "export": "-f plan.yaml --to deepspeed --partial",
    "demo": f"-f plan.yaml --steps 2 {SMALL}",
}  # fmt: skip


@pytest.mark.parametrize("verb", verbs(CODE_WORDS, ("doctor", "demo")))
def test_a_verb_runs_what_the_page_says_and_only_when_a_person_says_so(folder, monkeypatch, verb):
    monkeypatch.setattr(calibrate, "ROUNDS", 1)
    monkeypatch.syspath_prepend(folder)  # Where `apply` is looked for.
    make_state(folder / "states")
    make_run(folder)
    make_foreign(folder)
    (folder / "evil_code.py").write_text(NAMED)
    (folder / "plan.yaml").write_text((folder / "plan.yaml").read_text() + RULES)
    words = [verb, *CODE_WORDS[verb].split()]
    if verb == "demo":
        words += ["--set", "model.entry=meshplan.runtime.demo_model:build", "--set", "input="]
    assert main(words) in (0, 1, 2)
    assert not list(folder.glob("ran *"))
    assert main([*words, "--allow-code"]) in (0, 1, 2)
    assert trust.ALLOW_CODE not in os.environ
    ran = {path.name.removeprefix("ran ") for path in folder.glob("ran *")} - {"imported"}
    said = ROWS[verb][1].replace("*", "").split(",")
    assert ran == {word.strip() for word in said} - {""}
    assert ran <= set(CODE)
