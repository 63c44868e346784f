"""Sizes that no machine has are answered soon, or asked about.

Which seeded bug would this catch? Work for each rank, microbatch or block where few of
them stand for all, a value of a config that is taken unread, an answer to a typing error without
a word.
"""

from __future__ import annotations

import json
import time

import pytest

from meshplan.cli.app import main
from meshplan.errors import SpecError
from meshplan.model.blueprint import from_mapping
from meshplan.model.blueprint.families import FAMILIES
from meshplan.model.blueprint.keys import misfits, unknown
from tests.planner.test_planner import LLAMA, job

__all__ = ["job"]

SOON_S = 60.0  # seconds on a quiet machine; for ever, or minutes, before


def answered(*words: str) -> int:
    """The exit code of an answer that comes soon."""
    began = time.monotonic()
    code = main([*words])
    assert time.monotonic() - began < SOON_S
    return code


@pytest.mark.parametrize("verb", ["show", "check", "estimate"])
def test_a_million_ranks(job, verb):
    mesh = {"dp_replicate": 125, "dp_shard": 1000, "tp": 8}
    plan = job(mesh=mesh, strategy="hybrid_shard", tp_plan="auto", hardware=None,
               batch={"micro": 1, "seq_len": 1024})  # fmt: skip
    assert answered(verb, "-f", str(plan)) == 0


@pytest.mark.parametrize("name", [*FAMILIES, "gpt2"])
def test_every_key_that_transformers_writes_is_known(name):
    from transformers import AutoConfig

    content = json.loads(AutoConfig.for_model(name).to_json_string(use_diff=False))
    assert unknown(content) == []
    assert list(misfits(content)) == []


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("attention_dropout", float("nan"), "nan is not a probability"),
        ("initializer_range", -1, "-1 is not a number of 0 or more"),
        ("use_cache", "yes", "'yes' is not true or false"),
        ("rope_parameters", 3, "3 is not a JSON object"),
        ("layer_types", ["full_attention", 1], "is not a list of strings"),
        ("eos_token_id", "</s>", "'</s>' is not a token id"),
        ("pretraining_tp", 10**30, "is not a size"),
        ("rms_norm_eps", 10**400, "is not a number of 0 or more"),
        ("attention_dropout", 10**400, "is not a probability"),
        ("router_aux_loss_coef", -(10**400), "is not a number"),
        ("hidden_act", ["silu"] * 10_000, "is not a string"),
        ("num_experts_per_tok", 10**9, "a token cannot use 1000000000 of 8 experts"),
    ],
)
def test_a_key_that_no_figure_depends_on_is_read(key, value, what):
    config = LLAMA | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", key: value}
    with pytest.raises(SpecError) as error:
        from_mapping(config)
    (problem,) = error.value.problems
    assert what in problem.what
    assert problem.origin.path == key
    assert len(str(problem)) < 300


def test_a_key_that_nobody_knows_is_named_with_the_one_that_may_be_meant(job, capsys):
    plan = job({**LLAMA, "num_kv_heads": 2, "num_hidden_layer": 3, "_private": 1})
    assert main(["check", "-f", str(plan)]) == 0
    assert "ignored keys: 'num_kv_heads'" in capsys.readouterr().err
    plan = job({key: LLAMA[key] for key in ("model_type", "hidden_size")} | {"num_hidden_layer": 3})
    assert main(["estimate", "--config", str(plan.with_name("config.json")), "--gpus", "8"]) == 0
    err = capsys.readouterr().err
    assert "'num_hidden_layer' (did you mean num_hidden_layers?)" in err
    assert "_private" not in err


def test_figures_that_no_machine_has_are_asked_about(job, capsys):
    config = LLAMA | {"intermediate_size": 10**9, "hidden_size": 10**6, "num_attention_heads": 8}
    plan = job(config, mesh={"dp_shard": 8}, strategy="full_shard")
    assert main(["check", "-f", str(plan)]) == 0
    assert "is params right?" in capsys.readouterr().err
    assert main(["estimate", "--params", "3e9", "--gpus", "3e6"]) == 0
    assert "is gpus right? 3,000,000 GPUs" in capsys.readouterr().err
    assert main(["estimate", "--params", "3e9", "--gpus", "8", "--memory", "80TiB"]) == 0
    assert "is memory right?" in capsys.readouterr().err
    assert main(["estimate", "--params", "1e12", "--gpus", "100000", "--memory", "1TB"]) == 0
    assert "right?" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"batch": {"micro": 1, "seq_len": 1024, "accumulate": 65_536}}, 0),
        pytest.param({"batch": {"micro": 10**6, "seq_len": 10**9}}, 1, marks=pytest.mark.wide),
    ],
)
def test_a_report_of_a_step_that_has_no_end(job, changed, code):
    plan = job(strategy="full_shard", mesh={"dp_shard": 8}, **changed)
    out = plan.with_name("out.html")
    assert answered("report", "-f", str(plan), "-o", str(out)) == code
    assert out.stat().st_size < 4_000_000


def test_a_trace_of_a_step_that_has_no_end(job, capsys):
    """Tensors of 10^9 positions have no numbers; traces that nobody waits for are refused."""
    plan = job(strategy="full_shard", mesh={"dp_shard": 8}, batch={"micro": 4, "seq_len": 10**9})
    assert answered("estimate", "-f", str(plan), "--trace") in (1, 2)
    # GPipe holds them all; of 1F1B few are traced, whatever their number.
    for schedule, code in (("1F1B", 0), ("GPipe", 2)):
        stages = {"schedule": schedule, "microbatches": 65_536}
        plan = job(mesh={"pp": 2, "dp_replicate": 4}, strategy="ddp", pipeline=stages,
                   batch={"micro": 65_536, "seq_len": 1024})  # fmt: skip
        assert answered("estimate", "-f", str(plan), "--trace") == code
    assert "--set pipeline.microbatches=8" in capsys.readouterr().err


def test_thousands_of_rules_that_match_nothing(job, capsys):
    rules = [
        {"match": f"model.layers.*.mpl{{,{n}}}", "reshard_after_forward": True} for n in range(4000)
    ]
    assert answered("check", "-f", str(job(strategy="full_shard", mesh=None, rules=rules))) == 1
    assert "did you mean" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("left_out", "asked"), [("micro", "micro: 1"), ("seq_len", "seq_len: 2048")]
)
def test_what_a_plan_leaves_out_is_asked_without_a_trace(job, capsys, left_out, asked):
    batch = {"micro": 1, "seq_len": 1024}
    del batch[left_out]
    plan = job(strategy="full_shard", mesh={"dp_shard": 8}, batch=batch)
    assert main(["estimate", "-f", str(plan)]) == 2
    err = capsys.readouterr().err
    assert asked in err
    assert "fake_rank" not in err


def test_an_example_that_is_too_large_to_run_is_one_without_numbers(job):
    """The rule that matches nothing sends the question from the config's rules to a trace."""
    rules = [{"match": "/(a+)+/", "reshard_after_forward": True}]
    mesh, stages = {"pp": 2, "dp_shard": 2, "tp": 2}, {"schedule": "1F1B", "microbatches": 4}
    plan = job(mesh=mesh, strategy="full_shard", tp_plan="auto", pipeline=stages, rules=rules,
               batch={"global": 64, "seq_len": 10**9})  # fmt: skip
    assert answered("estimate", "-f", str(plan)) == 2


def test_verify_refuses_an_example_that_nobody_waits_for(job, capsys):
    plan = job(strategy="full_shard", mesh={"dp_shard": 2}, hardware=None,
               batch={"micro": 1}, input={"shape": [2, 10**7], "dtype": "int64"})  # fmt: skip
    assert answered("verify", "-f", str(plan)) == 2
    assert "--set 'input.shape=[2, 64]'" in capsys.readouterr().err


@pytest.mark.wide
def test_verify_runs_few_of_very_many_microbatches(job, capsys):
    stages = {"schedule": "1F1B", "microbatches": 65_533}
    plan = job(mesh={"pp": 2}, strategy=None, pipeline=stages, hardware=None,
               batch={"micro": 65_533, "seq_len": 64})  # fmt: skip
    assert answered("verify", "-f", str(plan)) == 0
    assert "microbatches: 65533 to 9" in capsys.readouterr().out


def test_a_step_of_more_microbatches_than_are_accepted_is_refused(job, capsys):
    plan = job(strategy="full_shard", mesh={"dp_shard": 8},
               batch={"global": 10**9, "micro": 1, "seq_len": 1024})  # fmt: skip
    for verb in ("check", "estimate"):
        assert answered(verb, "-f", str(plan)) in (1, 2)
        assert "125,000,000 microbatches of micro 1 on each rank" in capsys.readouterr().err
