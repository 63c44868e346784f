"""`meshplan estimate` at its boundary: the JSON contract, exit codes, messages, start-up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import meshplan
from meshplan.cli.app import main
from meshplan.layout.hardware import find_device
from meshplan.textbook.inverse import STATES_ONLY

ROOT = Path(__file__).resolve().parents[2]

PLAN = """\
version: 1
model: {params: 3e9}
hardware: {nodes: 2, gpus_per_node: 4, gpu: a100-sxm-40gb}
mesh: {dp_replicate: 2, dp_shard: 4}
strategy: hybrid_shard
"""


@pytest.fixture
def run(capsys):
    """`run("--params 3e9 ...")` -> (exit code, stdout, stderr)."""

    def of(words: str, *more: str) -> tuple[int, str, str]:
        code = main(["estimate", *words.split(), *more])
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return code, out, err

    return of


@pytest.fixture
def plan(tmp_path: Path):
    """`plan(text)` -> the path of a plan file that says this."""

    def write(text: str) -> str:
        path = tmp_path / "plan.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_the_json_contract(run):
    code, out, err = run("--params 3e9 --gpus 8 --nodes 2 --json")
    assert (code, err) == (0, "")
    answer = json.loads(out)
    assert list(answer) == ["meshplan", "schema", "result", "notes"]
    assert answer["meshplan"] == meshplan.__version__
    assert answer["schema"] == "estimate/1"
    assert answer["notes"] == [STATES_ONLY]
    result = answer["result"]
    assert (result["num_params"], result["num_gpus"], result["nodes"]) == (3 * 10**9, 8, 2)
    keys = ["strategy", "precision", "formula", "terms", "bytes_per_gpu", "fits"]
    assert all(list(row) == keys for row in result["rows"])
    assert [tuple(row.values())[:3] + (row["bytes_per_gpu"],) for row in result["rows"]] == [
        ("ddp", "fp32", "20*a", 60_000_000_000),
        ("ddp", "mixed", "18*a", 54_000_000_000),
        ("zero1", "fp32", "8*a + 8*a/n", 27_000_000_000),
        ("zero2", "fp32", "4*a + 12*a/n", 16_500_000_000),
        ("full_shard", "fp32", "16*a/n", 6_000_000_000),
        ("hybrid_shard", "fp32", "16*a/(n/nodes)", 12_000_000_000),
    ]
    for row in result["rows"]:
        assert sum(row["terms"].values()) == row["bytes_per_gpu"]
        assert row["fits"] is None
    assert result["rows"][1]["terms"] == {
        "weights": 12_000_000_000,
        "bf16_weights": 6_000_000_000,
        "gradients": 6_000_000_000,
        "adam": 24_000_000_000,
        "buckets": 6_000_000_000,
    }


def test_the_table(run):
    code, out, err = run("--params 3e9 --gpus 8 --nodes 2 --memory 16GB")
    assert code == 0
    assert out == (
        "3.00 B parameters on 8 GPUs (2 nodes): training states of each GPU in GiB, of 14.9 GiB\n"
        "\n"
        "strategy      precision  formula         weights  bf16 weights  gradients  adam  buckets"
        "  total\n"
        "ddp           fp32       20*a               11.2                     11.2  22.4     11.2"
        "   55.9  OVER by 41.0 GiB\n"
        "ddp           mixed      18*a               11.2           5.6        5.6  22.4      5.6"
        "   50.3  OVER by 35.4 GiB\n"
        "zero1         fp32       8*a + 8*a/n        11.2                     11.2   2.8         "
        "   25.1  OVER by 10.2 GiB\n"
        "zero2         fp32       4*a + 12*a/n       11.2                      1.4   2.8         "
        "   15.4  OVER by 476.8 MiB\n"
        "full_shard    fp32       16*a/n              1.4                      1.4   2.8         "
        "    5.6  ok, 9.3 GiB left\n"
        "hybrid_shard  fp32       16*a/(n/nodes)      2.8                      2.8   5.6         "
        "   11.2  ok, 3.7 GiB left\n"
        "\n"
        f"{STATES_ONLY}\n"
    )
    assert err == ""


def test_one_node_is_said_and_silenced(run):
    note = "note: on one node hybrid_shard equals full_shard; --nodes states the number of nodes\n"
    assert run("--params 3e9 --gpus 8")[2] == note
    assert run("--params 3e9 --gpus 8 -q")[2] == ""


def test_explain_shows_formula_substitution_result_and_source(run):
    _, out, _ = run("--params 3e9 --gpus 8 --explain")
    text = """
zero2 fp32
  weights    4*a = 4*3000000000                             = 12,000,000,000 B = 11.2 GiB
  gradients  4*a/n = 4*3000000000/8                         = 1,500,000,000 B = 1.4 GiB
  adam       8*a/n = 8*3000000000/8                         = 3,000,000,000 B = 2.8 GiB
  total      4*a + 12*a/n = 4*3000000000 + 12*3000000000/8  = 16,500,000,000 B = 15.4 GiB
  source: ZeRO (Rajbhandari et al. 2020), section 5.2 (P_os+g).
"""
    assert text in out
    row = json.loads(run("--params 3e9 --gpus 8 --explain --json")[1])["result"]["rows"][4]
    assert row["substituted"] == "16*3000000000/8"
    assert row["written"] == {"weights": "4*a/n", "gradients": "4*a/n", "adam": "8*a/n"}


def test_a_gpu_sets_the_limit_and_says_so(run):
    code, out, err = run("--params 5e9 --gpus 16 --nodes 2 --gpu h100-sxm-80gb --json")
    assert (code, err) == (0, "")
    answer = json.loads(out)
    assert answer["result"]["memory_bytes"] == find_device("h100-sxm-80gb").usable_bytes
    fits = [row["fits"] for row in answer["result"]["rows"]]
    assert fits == [False, False, True, True, True, True]
    assert answer["notes"][1] == "h100-sxm-80gb has 79.1 GiB, as torch sees it"


def test_nothing_fits_is_an_honest_no(run):
    assert run("--params 3e9 --gpus 2 --memory 1GiB")[0] == 1
    assert run("--params 3e9 --gpus 2 --memory 1GiB --json")[0] == 1


def test_the_largest_model(run):
    code, out, _ = run("--gpus 8 --nodes 2 --memory 24GB --max-params")
    assert code == 0
    assert out == (
        "largest model whose states fit into 22.4 GiB on each of 8 GPUs (2 nodes)\n"
        "\n"
        "ddp           fp32   1.20 B   1,200,000,000 parameters  a = M/20\n"
        "ddp           mixed  1.33 B   1,333,333,333 parameters  a = M/18\n"
        "zero1         fp32   2.67 B   2,666,666,666 parameters  a = M*n/(8*n + 8)\n"
        "zero2         fp32   4.36 B   4,363,636,362 parameters  a = M*n/(4*n + 12)\n"
        "full_shard    fp32   12.0 B  12,000,000,000 parameters  a = M*n/16\n"
        "hybrid_shard  fp32   6.00 B   6,000,000,000 parameters  a = M*n/(16*nodes)\n"
        "\n"
        f"{STATES_ONLY}\n"
    )


def test_the_fewest_gpus(run):
    code, out, _ = run("--params 3e9 --nodes 2 --memory 20GB --min-gpus --explain")
    assert code == 0
    assert out == (
        "fewest GPUs of 18.6 GiB whose memory holds the states of 3.00 B parameters on 2 nodes\n"
        "\n"
        "ddp           fp32   never  20*a does not shrink with n\n"
        "ddp           mixed  never  18*a does not shrink with n\n"
        "zero1         fp32   never  n = 8*a/(M - 8*a)            "
        "n = 8*3000000000/(20000000000 - 8*3000000000)\n"
        "zero2         fp32       6  n = 12*a/(M - 4*a)           "
        "n = 12*3000000000/(20000000000 - 4*3000000000)\n"
        "full_shard    fp32       4  n = 16*a/M                   n = 16*3000000000/20000000000\n"
        "hybrid_shard  fp32       6  n = 16*a*nodes/M             n = 16*3000000000*2/20000000000\n"
        "\n"
        f"{STATES_ONLY}\n"
    )
    assert run("--params 3e9 --memory 10B --min-gpus")[0] == 1


def test_both_questions_beside_the_table(run):
    _, out, _ = run("--params 3e9 --gpus 8 --memory 80GB --min-gpus --max-params --json")
    result = json.loads(out)["result"]
    assert len(result["rows"]) == len(result["max_params"]) == len(result["min_gpus"]) == 6
    assert result["max_params"][0] == {
        "strategy": "ddp",
        "precision": "fp32",
        "solution": "a = M/20",
        "num_params": 4 * 10**9,
    }
    assert result["min_gpus"][5]["num_gpus"] == 1


def test_a_config(run, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    _, out, _ = run("--gpus 8 --json", "--config", str(tmp_path))
    assert json.loads(out)["result"]["num_params"] == 124_439_808


def test_a_plan_marks_its_own_row(run, plan):
    code, out, err = run("--json", "-f", plan(PLAN))
    assert (code, err) == (0, "")
    answer = json.loads(out)
    result = answer["result"]
    assert (result["num_params"], result["num_gpus"], result["nodes"]) == (3 * 10**9, 8, 2)
    assert result["memory_bytes"] == find_device("a100-sxm-40gb").usable_bytes
    assert [row.get("is_plan", False) for row in result["rows"]] == [False] * 5 + [True]
    assert answer["notes"][1:] == ["a100-sxm-40gb has 39.5 GiB, as torch sees it"]
    _, out, _ = run("", "-f", plan(PLAN))
    assert "ok, 28.3 GiB left  <- the plan\n" in out
    _, out, err = run("", "-f", plan(PLAN), "--set", "hardware.headroom=0.1")
    assert "ok, 24.4 GiB left  <- the plan\n" in out
    assert "hardware.headroom leaves 10% of memory free" in err


def test_a_plan_changed_by_set(run, plan):
    words = ("--set", "hardware.nodes=4", "--set", "mesh.dp_replicate=4")
    _, out, _ = run("--json", "-f", plan(PLAN), *words)
    result = json.loads(out)["result"]
    assert (result["num_gpus"], result["nodes"]) == (16, 4)


def test_a_plan_whose_config_lies_beside_it(run, plan, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    path = plan("version: 1\nmodel: {config: config.json}\nmesh: {dp_shard: 8}\n")
    _, out, _ = run("--json --nodes 1", "-f", path)  # Of states alone.
    result = json.loads(out)["result"]
    assert (result["num_params"], result["num_gpus"]) == (124_439_808, 8)
    assert result["rows"][4]["is_plan"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("mesh: {dp_shard: 4, tp: 2}", "the plan also uses tp"),
        (
            "mesh: {dp_shard: 8}\noptimizer: sgd",
            "the formulas assume Adam, and the optimizer is sgd",
        ),
        (
            "mesh: {dp_shard: 8}\nprecision: bf16-true",
            "the formulas assume float32 weights, and the plan keeps them in bfloat16",
        ),
        (
            "mesh: {dp_shard: 8}\nrules: [{match: a, place: replicate}]",
            "rules place single modules",
        ),
        (
            "mesh: [2, 4]\nstrategy: hybrid_shard_zero2",
            "hybrid_shard_zero2 has no textbook formula",
        ),
        (
            "mesh: [4, 2]\nstrategy: hybrid_shard\nhardware: {nodes: 2, gpus_per_node: 4}",
            "the plan does not replicate across 2 nodes",
        ),
    ],
)
def test_a_plan_that_has_no_row_of_its_own(run, plan, text, why):
    code, out, err = run("--params 3e9", "-f", plan(f"version: 1\n{text}\n"))
    assert code == 0
    assert f"note: no row of the table matches the plan: {why}\n" in err
    assert "<- the plan" not in out


def test_a_plan_in_mixed_precision(run, plan):
    path = plan("version: 1\nmesh: {dp_replicate: 8}\nprecision: bf16-mixed\n")
    _, out, _ = run("--params 3e9 --json", "-f", path)
    assert [row.get("is_plan", False) for row in json.loads(out)["result"]["rows"]][:2] == [
        False,
        True,
    ]
    code, _, err = run("--params 3e9 --nodes 3", "-f", path)
    assert (code, "--nodes: 3 nodes do not divide 8 GPUs" in err) == (2, True)


def test_flags_and_plan_must_agree(run, plan):
    path = plan(PLAN)
    assert run("--gpus 8 --nodes 2 --params 3B --gpu a100-40g", "-f", path)[0] == 0
    code, out, err = run("--gpus 16 --params 1e9 --gpu h200", "-f", path)
    assert (code, out) == (2, "")
    assert err == (
        "meshplan: 3 problems\n"
        f"--params: 1.00 B differs from 3.00 B in {path}:2:8: model\n"
        "    fix: remove --params, or write --set model.params=1e9 instead\n"
        f"--gpus: 16 differs from 8 in {path}:3:11: hardware\n"
        "    fix: remove --gpus, or write --set hardware.gpus_per_node=8 instead\n"
        "--gpu: h200-sxm-141gb (131.3 GiB) differs from a100-sxm-40gb (39.5 GiB) in "
        f"{path}:3:45: hardware.gpu\n"
        "    fix: remove --gpu, or write --set hardware.gpu=h200-sxm-141gb instead\n"
    )


@pytest.mark.parametrize(
    ("flag", "states", "words", "statements"),
    [
        ("--memory 40GiB", "gpu: h200", "40.0 GiB differs from h200-sxm-141gb (131.3 GiB)",
         "hardware.gpu=null hardware.memory=40GiB"),
        ("--gpu h200", "memory: 40GiB", "h200-sxm-141gb (131.3 GiB) differs from 40.0 GiB",
         "hardware.memory=null hardware.gpu=h200-sxm-141gb"),
        ("--memory 40GB", "memory: 40000MB, nodes: 2", None, ""),
        ("--memory 40000000001", "memory: 40GB", "40,000,000,001 differs from 40,000,000,000",
         "hardware.memory=40000000001"),
        ("--nodes 4", "memory: 40GiB, nodes: 2", "4 differs from 2", "hardware.nodes=4"),
    ],
)  # fmt: skip
def test_the_fix_states_what_the_flag_does(run, plan, flag, states, words, statements):
    path = plan(f"version: 1\nhardware: {{gpus_per_node: 8, {states}}}\n")
    code, _, err = run(f"{flag} --params 3B", "-f", path)
    assert code == (0 if words is None else 2)
    if words is None:
        return
    assert f": {words} in {path}:" in err
    overrides = [word for each in statements.split() for word in ("--set", each)]
    assert f"or write {' '.join(overrides)} instead\n" in err
    assert run("--params 3B", "-f", path, *overrides)[0] == 0


@pytest.mark.parametrize(
    ("words", "problems"),
    [
        (
            "--params 0 --gpus 8",
            "--params: '0' is not positive; give a count such as 8, 350M or 3e9\n"
            "    fix: for example --params 3e9\n",
        ),
        (
            "--params -3 --gpus 0",
            "--params: '-3' is not positive; give a count such as 8, 350M or 3e9\n"
            "    fix: for example --params 3e9\n"
            "--gpus: '0' is not positive; give a count such as 8, 350M or 3e9\n"
            "    fix: for example --gpus 8\n",
        ),
        (
            "--params nan --gpus 8",
            "--params: 'nan' is not a count such as 8, 350M or 3e9\n"
            "    fix: for example --params 3e9\n",
        ),
        (
            "--params 1e400 --gpus 8",
            "--params: '1e400' is larger than 1e18; give a count such as 8, 350M or 3e9\n"
            "    fix: for example --params 3e9\n",
        ),
        (
            "--params abc --gpus 8",
            "--params: 'abc' is not a count such as 8, 350M or 3e9\n"
            "    fix: for example --params 3e9\n",
        ),
        (
            "--params 3e9 --gpus 8 --nodes 3",
            "--nodes: 3 nodes do not divide 8 GPUs\n"
            "    fix: give a divisor of the number of GPUs\n",
        ),
        (
            "--params 3e9 --gpus 8 --gpu h100-sxm-80",
            "--gpu: gpu 'h100-sxm-80' is not in the hardware table\n"
            "    fix: did you mean 'h100-sxm-80gb'? If not, state its facts: "
            "memory=48GB,bf16=181e12,hbm=960GB/s\n",
        ),
        (
            "--params 3e9 --gpus 8 --memory lots",
            "--memory: 'lots' is not a size such as 80GiB, 80GB or 512MiB\n"
            "    fix: for example --memory 80GiB\n",
        ),
        (
            "--params 3e9 --gpus 8 --gpu h200 --memory 80GB",
            "--gpu: --gpu and --memory both state the memory of a GPU\n"
            "    fix: remove one of the two flags\n",
        ),
        (
            "",
            "no flag or plan states the size of the model\n"
            "    fix: add --params 3e9, --config PATH, or -f with a plan that "
            "states the size of the model\n"
            "no flag or plan states the number of GPUs\n"
            "    fix: add --gpus 8, or -f with a plan that states the number of GPUs\n",
        ),
        (
            "--params 3e9 --min-gpus",
            "no flag or plan states the memory of a GPU\n"
            "    fix: add --gpu h100-sxm-80gb, --memory 80GiB, or -f with a plan that "
            "states the memory of a GPU\n",
        ),
        (
            "--params 3e9 --gpus 8 --set mesh.tp=2",
            "--set: there is no plan file to change\n    fix: add -f plan.yaml\n",
        ),
        (
            "--params 3e9 --gpus 8 --bogus",
            "estimate has no flag --bogus\n    fix: did you mean '--gpus'?\n",
        ),
        (
            "--gpus",
            "argument --gpus: expected one argument\n    fix: see meshplan estimate --help\n",
        ),
        (
            "--config nowhere --gpus 8",
            "--config: cannot read 'nowhere': No such file or directory\n"
            "    fix: give a Hugging Face config.json, or the directory that holds one\n",
        ),
    ],
)
def test_bad_input(run, words, problems):
    code, out, err = run(words)
    count = problems.count("    fix: ")
    assert (code, out) == (2, "")
    assert err == f"meshplan: {count} problem{'' if count == 1 else 's'}\n{problems}"


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (None, "cannot read "),
        (b"\x89PNG\r\n\xff", "the file is not UTF-8 text"),
        (b"not json", "not JSON: Expecting value"),
        (b"[]", "the file holds a list, not an object of keys and values"),
        (b'{"model_type": "bert"}', "transformers has no model class 'BertForCausalLM'"),
        (b'{"model_type": "nosuch"}', "transformers has no model_type 'nosuch'"),
    ],
)
def test_bad_configs(run, tmp_path, content, what):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    code, out, err = run("--gpus 8", "--config", str(tmp_path))
    assert (code, out) == (2, "")
    assert err.startswith("meshplan: 1 problem\n")
    assert what in err
    assert "\n    fix: " in err
