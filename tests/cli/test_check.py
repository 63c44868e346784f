"""`meshplan check`: what it prints, where, and with which exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from meshplan import check_plan
from meshplan.api import checking
from meshplan.cli.app import main
from meshplan.errors import PlanError, SpecError

ROOT = Path(__file__).parents[2]
BAD_PLANS = ROOT / "tests" / "bad_plans"


@pytest.mark.parametrize(
    "path", sorted((BAD_PLANS / "needs_model").glob("*.yaml")), ids=lambda p: p.stem
)
def test_findings_are_the_answer(path, monkeypatch, capsys):
    monkeypatch.chdir(path.parent)
    code = main(["check", "-f", path.name])
    out, err = capsys.readouterr()
    expected = path.with_suffix(".txt").read_text().rstrip("\n")
    if expected.startswith("meshplan: "):
        assert (out, err, code) == (f"{expected}\n", "", 1)
    else:
        assert out.startswith(f"meshplan: 1 warning\n{expected}\n{path.name}: ok, ByteLlama on ")
        assert (err, code) == ("", 0)


@pytest.mark.parametrize("path", sorted(BAD_PLANS.glob("*.yaml")), ids=lambda p: p.stem)
def test_a_broken_file_gives_no_answer(path, monkeypatch, capsys):
    monkeypatch.chdir(path.parent)
    code = main(["check", "-f", path.name])
    expected = path.with_suffix(".txt").read_text().rstrip("\n")
    assert (*capsys.readouterr(), code) == ("", f"{expected}\n", 2)


def test_json_of_findings(monkeypatch, capsys):
    monkeypatch.chdir(BAD_PLANS / "needs_model")
    assert main(["check", "-f", "unmatched_rule.yaml", "--json"]) == 1
    content = json.loads(capsys.readouterr().out)
    assert content["schema"] == "check/1"
    assert content["result"] == {
        "ok": False,
        "problems": [
            {
                "what": "'layers.*.atn.wq' matches no module of ByteLlama",
                "file": "unmatched_rule.yaml",
                "line": 6,
                "column": 12,
                "path": "rules[0].match",
                "fix": "did you mean 'layers.*.attn.wq'?",
            }
        ],
        "warnings": [],
    }


def test_json_of_a_warning(monkeypatch, capsys):
    monkeypatch.chdir(BAD_PLANS / "needs_model")
    assert main(["check", "-f", "shadowed_rule.yaml", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert (result["ok"], result["problems"]) == (True, [])
    assert [(w["path"], w["line"]) for w in result["warnings"]] == [("rules[0]", 6)]


def test_json_of_a_broken_file(tmp_path, capsys):
    assert main(["check", "-f", str(tmp_path / "none.yaml"), "--json"]) == 2
    out, err = capsys.readouterr()
    [problem] = json.loads(out)["result"]["problems"]
    assert problem["what"] == "there is no such file"
    assert (problem["line"], problem["column"], problem["path"]) == (None, None, None)
    assert err == ""


def test_no_file(capsys):
    assert main(["check"]) == 2
    expected = (
        "meshplan: 1 problem\nno plan file is given, and the working directory has no plan\n"
        "    fix: add -f plan.yaml, or write a first plan with meshplan init\n"
    )
    assert capsys.readouterr() == ("", expected)


NOTE = (
    "note: the plan {}: rules, heads and shapes were not checked; "
    "add --model pkg.mod:function or --config PATH to check them\n"
)


def plan_file(folder: Path, text: str) -> str:
    path = folder / "plan.yaml"
    path.write_text(f"version: 1\n{text}\n")
    return str(path)


@pytest.mark.parametrize(
    ("model", "known"),
    [
        ("", "names no model"),
        ("model: {params: 3e9}", "states only the model's number of parameters"),
    ],
)
def test_without_a_model_rules_are_not_matched_and_the_rest_is_checked(
    tmp_path, capsys, model, known
):
    rules = "rules: [{match: nowhere, place: replicate}]"
    path = plan_file(tmp_path, f"mesh: {{dp_shard: 4}}\n{model}\n{rules}")
    assert main(["check", "-f", path]) == 0
    assert capsys.readouterr() == (f"{path}: ok\n", NOTE.format(known))

    wrong = f"{model}\nmesh: {{dp_shard: 4}}\nstrategy: ddp\noffload: auto"
    path = plan_file(tmp_path, wrong)
    assert main(["check", "-f", path, "-q"]) == 1
    out, err = capsys.readouterr()
    assert "ddp uses dp_replicate only" in out
    assert "'offload: auto' is left to the planner" in out
    assert err == ""


def test_flags_go_before_the_plan_and_say_so(tmp_path, capsys):
    config = BAD_PLANS / "needs_model" / "tiny_llama.json"
    path = plan_file(tmp_path, "model: {config: elsewhere.json}\nmesh: {dp_shard: 4}")
    assert main(["check", "-f", path, "--config", str(config)]) == 0
    out, err = capsys.readouterr()
    assert out == f"{path}: ok, LlamaForCausalLM on dp_shard 4\n"
    assert err == f"note: --config replaces the model of {path}:2:8: model\n"


def test_two_flags_for_one_model(tmp_path, capsys):
    path = plan_file(tmp_path, "mesh: {dp_shard: 4}")
    assert main(["check", "-f", path, "--config", "a", "--model", "b:c"]) == 2
    assert capsys.readouterr().err == (
        "meshplan: 1 problem\n--model: --model and --config both state the model\n"
        "    fix: leave one of them out\n"
    )


ON_META = (
    "the function is called without arguments under torch.device('meta'), where tensors have "
    "shapes and no values: it must only build the model"
)
FOUND = "modules are imported from the installed packages or the working directory"


@pytest.mark.parametrize(
    ("entry", "code", "what", "fix"),
    [
        ("{}", "", "'{}' does not name a function", "write it as pkg.mod:function"),
        ("{}:", "", "'{}:' does not name a function", "write it as pkg.mod:function"),
        (
            "no_{}:f",
            "",
            "there is no no_{}.py in the working directory, nor a package 'no_{}'",
            "run the command in the folder of the module, or add this folder to PYTHONPATH",
        ),
        ("./{}.py:f", "import no_such", "importing '{}' raised ModuleNotFoundError: No module "
         "named 'no_such' {place}:1", FOUND),
        ("{}:f", "pass\ndef f(:\n  pass",
         "importing '{}' raised SyntaxError: invalid syntax {place}:2", ""),
        (f"{os.pardir}/no_{{}}.py:f", "", f"there is no file {os.pardir}/no_{{}}.py", ""),
        ("{}:f", "1 / 0",
         "importing '{}' raised ZeroDivisionError: division by zero {place}:1", ""),
        ("{}:f", "raise SystemExit", "importing '{}' raised SystemExit {place}:1", ""),
        ("{}:f", "", "'{}' has no 'f'", "name a function of {}"),
        ("{}:f", "f = 3", "'{}:f' is int, which cannot be called",
         "name a function that returns the model"),
        ("{}:f", "def f(): return 3", "'{}:f' returned int, not an nn.Module", "return the model"),
        ("{}:f", "def f(x): pass", "calling '{}:f' raised TypeError: f() missing 1 required "
         "positional argument: 'x'", ON_META),
        ("{}:f", "def f():\n    raise ValueError('no\\nmore')",
         "calling '{}:f' raised ValueError: no {place}:2", ON_META),
        ("{}:f", "import torch\ndef f():\n    return torch.ones(1).item()",
         "calling '{}:f' raised RuntimeError: Tensor.item() cannot be called on meta tensors "
         "{place}:3", ON_META),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_made(
    tmp_path, monkeypatch, capsys, request, entry, code, what, fix
):
    name = f"entry_{abs(hash(request.node.name))}"
    module = tmp_path / f"{name}.py"
    module.write_text(code)
    monkeypatch.chdir(tmp_path)
    path = plan_file(tmp_path, "mesh: {dp_shard: 4}")
    assert main(["check", "-f", path, "--model", entry.format(name)]) == 2
    what = what.replace("{place}", f"({module}").format(name, name)
    what += ")" if str(module) in what else ""
    expected = f"meshplan: 1 problem\n--model: {what}\n"
    expected += f"    fix: {fix.format(name)}\n" if fix else ""
    assert capsys.readouterr() == ("", expected)


def test_a_model_of_another_folder(tmp_path, monkeypatch, capsys):
    (tmp_path / "here").mkdir()
    (tmp_path / "abroad.py").write_text("import torch\nnet = torch.nn.Linear(8, 8)\n")
    path = plan_file(tmp_path, "mesh: {dp_shard: 4}")
    monkeypatch.chdir(tmp_path / "here")
    for folder in (os.pardir, str(tmp_path)):
        file = f"{folder}/abroad.py"
        assert main(["check", "-f", path, "--model", f"{file}:net"]) == 2
        assert capsys.readouterr().err == (
            f"meshplan: 1 problem\n--model: {file} is not in the working directory\n"
            f"    fix: run the command in {folder}, or write PYTHONPATH={folder} before it and "
            "name the function as abroad:net\n"
        )
    monkeypatch.chdir(tmp_path)
    assert main(["check", "-f", path, "--model", f"{tmp_path}/abroad.py:net"]) == 0


def test_contradictions_and_rules_are_told_in_one_round(tmp_path, capsys):
    path = tmp_path / "plan.yaml"
    path.write_text(
        "version: 1\nmodel: {entry: meshplan.runtime.demo_model:build}\n"
        "hardware: {gpus_per_node: 8, gpu: h100-sxm-80gb, memory: 80GB}\n"
        "mesh: {dp_shard: 4, tp: 3}\nbatch: {micro: 3, global: 16, accumulate: 1}\n"
        "rules: [{match: layers.*.atn, place: replicate}]\n"
    )
    assert main(["check", "-f", str(path)]) == 2
    told = capsys.readouterr().err
    for what in (
        "hardware.memory: 'gpu' and 'memory' both state",
        "mesh: dp_shard 4 x tp 3 = 12 devices, but hardware has 1 x 8 = 8",
        "batch.global: 16 is not micro 3 x accumulate 1 x 4 data ranks = 12",
        "rules[0].match: 'layers.*.atn' matches no module",
    ):
        assert what in told
    assert "meshplan: 4 problems\n" in told


def test_a_mistake_in_a_section_does_not_hide_others(tmp_path, capsys):
    wrong = "hardware: {gpus_per_node: 8, gpu: nothing}\nmesh: {dp_shard: 4}"
    assert main(["check", "-f", plan_file(tmp_path, wrong)]) == 2
    told = capsys.readouterr().err
    assert "gpu 'nothing' is not in the hardware table" in told
    assert "dp_shard 4 = 4 devices, but hardware has 1 x 8 = 8" in told
    nodes = "hardware: {node: 2, gpus_per_node: 8}\nmesh: {dp_shard: 16}"
    assert main(["check", "-f", plan_file(tmp_path, nodes)]) == 2
    assert "meshplan: 1 problem\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("match", "missing"),
    [("layers.{0..9}", "{4..9}"), ("layers.{2,7}.attn", "{7}"), ("layers.{0..3}", "")],
)
def test_numbers_of_a_pattern_that_match_nothing_are_told(tmp_path, capsys, match, missing):
    model = "model: {entry: meshplan.runtime.demo_model:build}\nmesh: {dp_shard: 2}\n"
    for more in ("", ", optional: true"):
        rule = f'rules: [{{match: "{match}", place: replicate{more}}}]'
        assert main(["check", "-f", plan_file(tmp_path, model + rule)]) == 0
        told = capsys.readouterr().out
        warning = f"'{match}' matches no module of ByteLlama for the numbers {missing}\n"
        assert (warning in told) == (bool(missing) and not more)


def test_what_a_model_prints_does_not_break_json(tmp_path, monkeypatch, capsys):
    (tmp_path / "loud_entry.py").write_text(
        "import torch\nprint('at import')\n"
        "class Net(torch.nn.Linear):\n"
        "    def __init__(self): super().__init__(8, 8); print('at call')\n"
        "net = torch.nn.Linear(8, 8)\n"
    )
    monkeypatch.chdir(tmp_path)
    path = plan_file(tmp_path, "mesh: {dp_shard: 4}")
    for entry in ("loud_entry:Net", "loud_entry:net"):
        assert main(["check", "-f", path, "--model", entry, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["result"]["ok"] is True
    assert str(tmp_path) not in sys.path


def test_from_python():
    plan = {"version": 1, "mesh": {"dp_shard": 8}, "strategy": "hybrid_shard"}
    checked = check_plan(plan)
    assert not checked.is_ok
    assert "needs the axis dp_replicate" in checked.problems[0].what
    with pytest.raises(SpecError, match="there is no such file"):
        check_plan("nowhere.yaml")


def test_decide_raises_what_check_finds():
    from meshplan import decide

    with pytest.raises(PlanError, match="needs the axis dp_replicate"):
        decide({"version": 1, "mesh": {"dp_shard": 8}, "strategy": "hybrid_shard"})
    with pytest.raises(SpecError, match="the plan names no function or config of the model"):
        decide({"version": 1, "mesh": {"dp_shard": 8}})


@pytest.mark.parametrize("verb", ["check", "show"])
def test_a_config_needs_no_torch(tmp_path, verb):
    config = BAD_PLANS / "needs_model" / "tiny_llama.json"
    path = plan_file(tmp_path, f"model: {{config: {config}}}\nmesh: {{dp_shard: 4}}")
    script = (
        "import sys; from meshplan.cli.app import main\n"
        f"code = main([{verb!r}, '-f', {path!r}])\n"
        "heavy = {'torch', 'numpy', 'sympy', 'networkx', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(f'exit code {code}, imported {heavy}' if code or heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "LlamaForCausalLM" in done.stdout


@pytest.mark.parametrize("axis", ["tp", "ep", "dp_shard"])
def test_a_rule_on_an_axis_that_the_mesh_lacks_is_told_without_a_model(axis):
    word = {"tp": "colwise", "ep": "ep_dispatch_experts", "dp_shard": "S(0)"}[axis]
    rule = {"match": "layers.*.wq", "place": {axis: word}}
    plan = {"version": 1, "mesh": {"dp_replicate": 2}, "rules": [rule]}
    (problem,) = checking.check_plan(plan).problems
    assert problem.what == f"the mesh has no axis {axis} (it has dp_replicate 2)"
    assert problem.origin.path == f"rules[0].place.{axis}"
    for other in (rule | {"optional": True}, rule | {"place": {axis: "R"}}):
        assert checking.check_plan(plan | {"rules": [other]}).is_ok
    mesh = {"dp_shard": 2, "tp": 2, "ep": "2 in dp_shard"}
    assert checking.check_plan(plan | {"mesh": mesh}).is_ok


def test_the_same_is_said_of_it_with_a_model(monkeypatch):
    monkeypatch.chdir(BAD_PLANS / "needs_model")
    plan = yaml.safe_load(Path("axis_not_in_the_mesh.yaml").read_text())
    with_model = checking.check_plan("axis_not_in_the_mesh.yaml").problems
    without = checking.check_plan(
        {key: value for key, value in plan.items() if key != "model"}
    ).problems
    assert [(p.what, p.fix) for p in without] == [(p.what, p.fix) for p in with_model]
