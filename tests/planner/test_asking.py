"""What people ask in a slightly wrong way: what they are told, before anything is searched."""

from __future__ import annotations

import json

import pytest

from meshplan.api.planning import explain
from meshplan.cli.app import main
from meshplan.errors import SpecError
from meshplan.planner.lock.lock import lock_path
from tests.planner.test_planner import LLAMA, PLAN, job
from tests.planner.test_words import measured

__all__ = ["job"]

TIGHT = {"mesh": {"dp_shard": "auto"}, "strategy": None}


@pytest.mark.parametrize(
    ("words", "what", "fix"),
    [
        (["why"], "'why' is not a question", "ask why FIELD, or why-not FIELD=VALUE"),
        (["why", "not", "mesh.tp=4"], "is not a question", "why-not FIELD=VALUE"),
        (
            ["why-not", "mesh.tp"],
            "why-not needs a value of mesh.tp",
            "ask why-not mesh.tp=VALUE, or why",
        ),
        (["why-not", "mesh.xx=2"], "'mesh.xx' is not a key that the", "did you mean 'mesh."),
        (["why-not", "strategy=fast"], "'fast' is not a strategy", "write one of ddp, zero1"),
        (["why-not", "mesh.tp=0"], "'0' is not a positive number", "a whole number of at least 1"),
        (
            ["why-not", "offload=all"],
            "'all' is not a value of offload",
            "none, params, activations or",
        ),
        (["why-not", "sequence_parallel=1"], "'1' is not a value", "write true or false"),
        (["model.layrs"], "is neither a module of", "did you mean 'model.layers'? Questions are: "),
        (["zzz"], "is neither a module of", "see meshplan show for the names. Questions are: why"),
    ],
)
def test_a_question_that_is_none_is_told_how_to_ask(job, capsys, words, what, fix):
    assert main(["explain", "-f", str(job(**TIGHT)), *words]) == 2
    problem, _, told = capsys.readouterr().err.partition("    fix: ")
    assert "meshplan: 1 problem\n" in problem
    assert what in problem
    assert fix in told


def test_a_question_may_be_one_text(job):
    path = job()
    words = ("why-not", "mesh.tp = 2")
    assert repr(explain(path, " ".join(words))) == repr(explain(path, words))
    with pytest.raises(SpecError, match=r"'mesh\.tp' is not a question"):
        explain(path, "mesh.tp")


def test_spaces_around_a_value_do_no_harm(job):
    path = job()
    one, two = (explain(path, ["why-not", text])[0] for text in ("mesh.tp=2", "mesh.tp = 2"))
    assert one.seconds == two.seconds


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--price", "x"], "--price: 'x' is not a positive number"),
        (["--price", "0"], "--price: '0' is not a positive number"),
        (["--retarget", ""], "--retarget: '' does not set a hardware field"),
        (["--retarget", "gpus=4"], "--retarget: 'gpus=4' does not set a hardware field"),
        (["--tokens", "x", "--days", "1"], "--tokens: 'x' is not a positive number"),
    ],
)
def test_flags_are_read_before_anything_is_searched(job, capsys, words, problem):
    path = job()
    assert main(["plan", "-f", str(path), *words]) == 2
    err = capsys.readouterr().err
    assert problem in err
    assert "configurations" not in err
    assert not lock_path(path).exists()


def test_a_file_of_another_kind_is_one_problem(job, capsys):
    path = job(**TIGHT)
    assert main(["plan", "-f", str(path), "-q"]) == 0
    capsys.readouterr()
    assert main(["plan", "-f", str(path.with_name("config.json"))]) == 2
    err = capsys.readouterr().err
    assert "meshplan: 1 problem\n" in err
    assert "this is a model's config, not a plan" in err
    assert "fix: refer to it in a plan: model: {config: config.json}" in err
    assert main(["plan", "-f", str(lock_path(path))]) == 2
    assert "this is a lock, not a plan" in capsys.readouterr().err
    path.rename(path.with_name("plan.txt"))
    assert main(["plan", "-f", str(path.parent)]) == 2
    assert "no plan file is given, and the directory" in capsys.readouterr().err


def test_what_it_costs_stands_with_the_limits(job, capsys):
    assert main(["plan", "-f", str(job()), "-q", "--dry-run", "--price", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("cost "))
    assert lines[at - 1] == ""
    assert lines[at + 1] == ""
    assert at < lines.index("fastest plans with another kind of layout")


def test_plans_of_a_frontier_are_told_apart(job, capsys):
    """By what blocks do too, and with memory in the unit of all other answers."""
    config = LLAMA | {"num_hidden_layers": 4}
    hardware = {"nodes": 1, "gpus_per_node": 1, "gpu": "h100-sxm-80gb"}
    path = job(config, hardware=hardware, batch={"global": 4, "seq_len": 1024})
    assert main(["plan", "-f", str(path), "--frontier", "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert "bytes" not in err
    assert " GiB" in err
    frontier = out.partition("memory-time frontier, fastest plan first\n")[2]
    plans = [" ".join(each.split()[4:]) for each in _entries(frontier)]
    assert len(plans) == len(set(plans)) > 2


def _entries(text):
    """Lines with those that go on with them."""
    out = []
    for line in text.splitlines():
        if line[:5].strip():
            out.append(line)
        else:
            out[-1] += line
    return out


def test_a_training_of_tokens_needs_samples_that_have_some(tmp_path, capsys):
    path = tmp_path / "plan.yaml"
    content = PLAN | {"model": {"entry": "tests.helpers.planned:Alone"}, "batch": {"global": 64},
                      "input": {"shape": [2, 64, 512], "dtype": "fp32"}}  # fmt: skip
    path.write_text(json.dumps(content))
    assert main(["plan", "-f", str(path), "-q", "--tokens", "1e9", "--days", "1"]) == 2
    assert "the plan states no sequence length" in capsys.readouterr().err
    assert main(["plan", "-f", str(path), "-q"]) == 0
    lock = str(lock_path(path))
    capsys.readouterr()
    assert main(["diff", lock, lock, "--set", "optimizer=sgd"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"a step: unknown for {lock}: Alone has no config to estimate from" in text


def test_what_was_measured_is_gone_by_where_the_lock_was(job, tmp_path, capsys):
    """Explain and diff are of the plan that the lock has, and so by the figures that it has."""
    hardware = {"nodes": 1, "gpus_per_node": 8, "gpu": "h100-sxm-80gb"}
    path = job(LLAMA | {"hidden_size": 2048}, hardware=hardware, **TIGHT)
    slow = measured(tmp_path / "slow.json", share=0.01)
    assert main(["plan", "-f", str(path), "-q", "--json", "--profile", str(slow)]) == 0
    step = json.loads(capsys.readouterr().out)["result"]["step_s"]
    assert main(["explain", "-f", str(path), "why-not", "mesh.dp_shard=8", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["result"]["answers"][0]["plan_step_s"] == step
    assert "step times use slow.json, the profile that the lock was made with" in err
    lock = str(lock_path(path))
    assert main(["diff", lock, lock, "--json"]) == 0
    old = json.loads(capsys.readouterr().out)["result"]["old"]
    assert old["step_s"] == pytest.approx(step)
