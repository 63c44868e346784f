"""The command line itself: colour, help, interrupts, what starting it imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import meshplan
from meshplan.api import checking, configs
from meshplan.cli import common
from meshplan.cli.app import main
from meshplan.render.base.text import folded, packed
from meshplan.render.plans.plan import decision_to_text
from tests.textbook.test_estimate import run

ROOT = Path(__file__).resolve().parents[2]
__all__ = ["run"]


def test_colour_is_never_the_only_sign(run, monkeypatch):
    words = "--params 5e9 --gpus 8 --memory 40GB"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = run(words)[1]
    assert "\x1b[31mOVER by " in coloured
    assert "\x1b[32mok, " in coloured
    plain = run(f"{words} --no-color")[1]
    assert "\x1b" not in plain
    assert "OVER by " in plain
    monkeypatch.setenv("NO_COLOR", "1")
    assert run(words)[1] == plain


def test_help_version_and_no_verb(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"meshplan {meshplan.__version__}\n"
    assert main(["estimate", "--help"]) == 0
    assert "--max-params" in capsys.readouterr().out
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert out.startswith("usage: meshplan")
    assert "estimate" in out
    assert not err


def test_interrupted_in_one_line(capsys, monkeypatch):
    def interrupt(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("meshplan.api.checking.estimate_states", interrupt)
    assert main(["estimate", "--params", "3e9", "--gpus", "8"]) == 130
    assert capsys.readouterr() == ("", "meshplan: interrupted\n")


def _python(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=60
    )


def test_a_reader_that_leaves_early():
    script = f"{sys.executable} -m meshplan estimate --params 3e9 --gpus 8 --explain | head -c 9"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", script], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "3.00 B pa")
    assert "Error" not in done.stderr


def test_nothing_heavy_is_imported():
    script = (
        "import sys; from meshplan.cli.app import main\n"
        "main(['estimate', '--params', '3e9', '--gpus', '8', '--gpu', 'h200'])\n"
        "heavy = 'torch numpy sympy networkx matplotlib rich yaml transformers'.split()\n"
        "print('IMPORTED', *(name for name in heavy if name in sys.modules))"
    )
    assert _python("-c", script).stdout.endswith("\nIMPORTED\n")


def test_sympy_is_imported_only_for_inverse_questions():
    script = (
        "import sys; from meshplan.cli.app import main\n"
        "main(['estimate', '--gpus', '8', '--gpu', 'h200', '--max-params'])\n"
        "print('IMPORTED', 'sympy' in sys.modules)"
    )
    assert _python("-c", script).stdout.endswith("\nIMPORTED True\n")


def test_a_formula_loads_few_modules():
    """A tenth of the package: what starts is quick, and seconds would be the machine's."""
    script = (
        "import sys; from meshplan.cli.app import main\n"
        "main(['estimate', '--params', '3e9', '--gpus', '8', '--json'])\n"
        "own = [name for name in sys.modules if name.startswith('meshplan')]\n"
        "print('LOADED', len(own), len(sys.modules))"
    )
    *_, own, every = _python("-c", script).stdout.split()
    assert int(own) <= 60
    assert int(every) <= 200


def test_public_names_are_found_when_used():
    script = "import sys, meshplan\nprint(sorted(m for m in sys.modules if 'meshplan' in m))"
    assert _python("-c", script).stdout == "['meshplan']\n"
    assert set(meshplan.__all__) <= set(dir(meshplan))
    light = {"Spec", "Mesh", "Layout", "Plan", "make_plan", "load_spec", "estimate_states"}
    for name in light | {"MeshplanError", "SpecError", "PlanError", "ApplyError", "__version__"}:
        assert getattr(meshplan, name) is not None
    with pytest.raises(AttributeError, match="module 'meshplan' has no attribute 'nonsense'"):
        _ = meshplan.nonsense


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "-f", "missing.yaml"],
        ["plan", "--bogus"],
        ["explain", "-f", "plans/auto.yaml", "why"],
        ["diff", "plans/auto.yaml", "plans/nothing.yaml"],
        ["estimate", "--gpus", "0"],
        ["show"],
    ],
)
def test_what_cannot_be_answered_is_json_where_json_is_asked_for(words, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main([*words, "--json"]) == 2
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert answer["schema"] == "problems/1"
    assert not answer["result"]["ok"]
    assert [each["what"] for each in answer["result"]["problems"]]
    assert all(each["what"] in err for each in answer["result"]["problems"])
    assert main(words) == 2
    assert capsys.readouterr().out == ""


def test_a_closed_stream_and_letters_that_it_lacks_are_no_crash(tmp_path):
    script = f"{sys.executable} -m meshplan estimate --params 3e9 --gpus 8 >&-"
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)
    path = tmp_path / "план.yaml"
    path.write_text("version: 1\nmodel: {params: 3e9}\nmesh: {dp_shard: 8}\n")
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    done = subprocess.run(
        [sys.executable, "-m", "meshplan", "check", "-f", str(path)],
        cwd=ROOT, capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert done.returncode == 0
    assert "\\u043f\\u043b\\u0430\\u043d.yaml: ok" in done.stdout


@pytest.mark.parametrize("verb", [("show",), ("estimate", "--explain"), ("gpus", "-v"), ("check",)])
def test_a_narrow_terminal_is_kept_to(verb, monkeypatch, capsys):
    """Only a line of a single word may be longer."""
    plan = ["-f", str(ROOT / "plans" / "auto.yaml")]
    flags = ["--params", "3e9", "--gpus", "8"] if verb[0] == "estimate" else plan
    monkeypatch.delenv("COLUMNS", raising=False)
    main([*verb, *(flags if verb[0] != "gpus" else [])])
    wide = capsys.readouterr()
    monkeypatch.setenv("COLUMNS", "60")
    main([*verb, *(flags if verb[0] != "gpus" else [])])
    narrow = capsys.readouterr()
    assert max(map(len, wide.out.splitlines())) > 60 or verb[0] == "check"
    for line in (narrow.out + narrow.err).splitlines():
        assert len(line) <= 60 or len(line.split()) == 1, line
    assert (narrow.out + narrow.err).split() == (wide.out + wide.err).split()


def test_a_plan_and_its_variants_are_kept_to_a_narrow_terminal(monkeypatch):
    """One decision as text twice: of two searches, one may end at its time on a busy machine."""
    path = ROOT / "plans" / "auto.yaml"
    decision = meshplan.search_plan(path, other_layouts=True)
    texts = []
    for columns in ("200", "60"):
        monkeypatch.setenv("COLUMNS", columns)
        lines = [
            piece
            for line in decision_to_text(decision, str(path))
            for piece in folded(line, int(columns))
        ]
        assert all(len(line) <= int(columns) or len(line.split()) == 1 for line in lines)
        texts.append(" ".join(lines).split())
    assert texts[0] == texts[1]
    head, part = "hybrid  +2.2%  4.357 s  78.6 GiB  ", "mesh: {dp_replicate: 2, dp_shard: 8}"
    assert packed(head, [part]) == [head.rstrip(), f"    {part}"]
    monkeypatch.setenv("COLUMNS", "200")
    assert packed(head, [part]) == [head + part]


def test_json_and_files_do_not_depend_on_the_terminal(monkeypatch, capsys):
    answers = []
    for columns in ("60", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        for verb in (["schema"], ["completion", "bash"], ["gpus", "--json"]):
            main(verb)
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]


def test_a_reader_that_closes_the_pipe_does_not_lose_the_lock(tmp_path):
    """`meshplan plan | head` writes the lock, although the answer cannot be printed."""
    plan = tmp_path / "plan.yaml"
    text = (ROOT / "plans" / "auto.yaml").read_text()
    plan.write_text(text.replace("models/", f"{ROOT}/plans/models/"))
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "meshplan", "plan", "-f", str(plan)]
    subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=True)
    os.close(writer)
    assert (tmp_path / "plan.lock.yaml").exists()


def test_estimate_reads_the_only_plan_of_the_directory_too(tmp_path, monkeypatch, capsys):
    plan = (ROOT / "plans" / "full_shard.yaml").read_text()
    (tmp_path / "plan.yaml").write_text(plan)
    monkeypatch.chdir(tmp_path)
    assert main(["estimate", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["schema"] == "memory/1"
    assert "reads plan.yaml, the only plan here" in err
    assert main(["estimate", "--params", "3e9", "--gpus", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["schema"] == "estimate/1"


@pytest.mark.parametrize("words", [
    ["check", "plans/ddp.yaml"], ["export", "-f", "plans/ddp.yaml", "--to", "deepspeed"],
    ["import", "examples/configs/deepspeed.json"],
])  # fmt: skip
def test_what_takes_seconds_is_told_on_a_terminal(capsys, monkeypatch, words):
    told = threading.Event()
    real = {name: getattr(configs, name) for name in ("export_config", "import_config")}
    real_check = checking.check_plan

    def print_error(text: str) -> None:
        sys.stderr.write(f"{text}\n")
        told.set()

    def slowly(call):
        def slow(*args, **more):
            assert told.wait(60), "nothing was said"
            return call(*args, **more)

        return slow

    monkeypatch.setattr(common, "FIRST_AFTER_S", 0.0)
    monkeypatch.setattr(common, "print_error", print_error)
    monkeypatch.setattr(checking, "check_plan", slowly(real_check))
    for name, call in real.items():
        monkeypatch.setattr(configs, name, slowly(call))
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert main(words) == 0
    assert "s so far" in capsys.readouterr().err
    monkeypatch.setattr("sys.stderr.isatty", lambda: False, raising=False)
    assert main(words) == 0
    assert "s so far" not in capsys.readouterr().err
