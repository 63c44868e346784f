"""docs/trust.md against the code: what each verb writes, seen by an audit hook.

Which seeded bug would this catch? A verb that is not in the table, or that writes a file which the
table does not name.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from meshplan.cli import VERBS
from tests.test_planner import job

__all__ = ["job"]

PAGE = (Path(__file__).parents[2] / "docs" / "trust.md").read_text()
ROWS = {
    row[0]: row[1:]
    for line in PAGE.splitlines()
    if len(row := [cell.strip() for cell in re.sub("`", "", line).strip("|").split("|")]) == 4
    and row[0].isalpha()
}
WATCH = """
import json, os, sys
written = set()

def see(event, args):
    if event == "open":
        path, mode, flags = args
        writes = (isinstance(mode, str) and set(mode) & set("wax+")) or flags & (
            os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if writes and isinstance(path, str | bytes | os.PathLike):
            written.add(os.path.abspath(os.fsdecode(path)))
    elif event in ("os.rename", "os.link", "os.symlink"):
        written.add(os.path.abspath(os.fsdecode(args[1])))
    elif event in ("os.mkdir",):
        written.add(os.path.abspath(os.fsdecode(args[0])))

sys.addaudithook(see)
from meshplan.cli import main
code = main(sys.argv[1:])
sys.__stderr__.write("\\nWRITTEN " + json.dumps([code, sorted(written)]) + "\\n")
"""
WORDS = {
    "estimate": "-f {plan}", "check": "-f {plan}", "plan": "-f {plan}",
    "explain": "why mesh.dp_shard -f {plan}", "diff": "{plan} {plan}", "show": "-f {plan}",
    "draw": "--what mesh -f {plan} -o {folder}/mesh.svg", "trust": "{plan}",
    "report": "-f {plan} -o {folder}/report.html",
}  # fmt: skip


def test_the_table_has_every_verb():
    assert [verb.name for verb in VERBS] == [name for name in ROWS if name != "verb"]


@pytest.mark.parametrize("verb", WORDS)
def test_a_verb_writes_what_the_page_says(job, tmp_path, verb):
    plan = job(mesh={"dp_shard": 8}, strategy="auto")
    before = set(tmp_path.rglob("*"))
    words = WORDS[verb].format(plan=plan, folder=tmp_path).split()
    environment = {"HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "tmp"), "PATH": "",
                   "XDG_DATA_HOME": str(tmp_path / "data"), "PYTHONDONTWRITEBYTECODE": "1",
                   "PYTHONPATH": str(Path(__file__).parents[2]),
                   "MPLCONFIGDIR": str(tmp_path / "home")}  # fmt: skip
    for name in ("home", "tmp"):
        (tmp_path / name).mkdir()
    done = subprocess.run(
        [sys.executable, "-P", "-c", WATCH, verb, *words],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    code, written = json.loads(done.stderr.rpartition("WRITTEN ")[2])
    assert code in (0, 1), done.stderr
    caches = (str(tmp_path / "home"), str(tmp_path / "tmp"), "/dev/", "/proc/")
    own = {Path(path) for path in written if not path.startswith(caches)}
    own = {path for path in own if not path.name.endswith(".tmp")}
    said = ROWS[verb][2]
    allowed = {
        "lock": {plan.with_name("plan.lock.yaml")} if "PLAN.lock.yaml" in said else set(),
        "output": {Path(word) for word in words if word.startswith(f"{tmp_path}/")}
        if "-o FILE" in said
        else set(),
    }
    trusted = tmp_path / "data" / "meshplan" / "trusted"
    if "XDG_DATA_HOME" in said:
        allowed["trusted"] = {trusted.parent.parent, trusted.parent, *own & _below(own, trusted)}
    assert own <= set().union(*allowed.values()), own
    left = {path for path in tmp_path.rglob("*") if not str(path).startswith(caches)} - before
    assert {path for path in left if path.is_file()} <= own


def _below(paths: set[Path], folder: Path) -> set[Path]:
    return {path for path in paths if path.is_relative_to(folder)}
