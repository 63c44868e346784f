"""Why, and why not: the same search with something held."""

from __future__ import annotations

import dataclasses
import json
import time

import pytest

from meshplan.cli import main
from meshplan.planner.explain import Shares, WhyNot
from meshplan.planner.search import search
from meshplan.planning import explain, search_plan
from meshplan.render.explain import verdict
from tests.test_planner import LLAMA, PLAN, job

__all__ = ["job"]


def ask(path, *words):
    (answer,) = explain(path, ["why-not", *words])
    return answer


def test_the_best_with_a_setting_is_the_plan_that_states_it(job):
    """The answer to why not X is what planning with X gives."""
    path = job()
    answer = ask(path, "mesh.dp_shard=2")
    free = search_plan(path).best_s
    held = search_plan(
        job(mesh={"dp_replicate": "auto", "dp_shard": 2, "pp": "auto", "tp": "auto"})
    )
    assert answer.base_s == pytest.approx(free)
    assert answer.seconds == pytest.approx(held.best_s)
    assert answer.seconds > answer.base_s


def test_shares_add_up_to_the_step(job):
    answer = ask(job(), "mesh.tp=2")
    assert sum(dataclasses.astuple(answer.shares)) == pytest.approx(answer.seconds)
    assert sum(dataclasses.astuple(answer.base_shares)) == pytest.approx(answer.base_s)
    assert answer.shares.tensor_parallel > 0
    assert answer.base_shares.tensor_parallel == 0
    again = ask(job(), "activation_checkpointing=full")
    assert again.shares.recompute > 0
    assert again.base_shares.recompute == 0


def test_what_is_not_in_the_space_says_why(job):
    path = job()
    assert "8 devices do not divide by 3" in verdict(ask(path, "mesh.tp=3"))
    assert "heads do not divide by it" in verdict(ask(path, "mesh.cp=8"))
    path = job(mesh={"dp_shard": 8}, strategy=None)
    assert "does not have that axis" in verdict(ask(path, "mesh.tp=2"))


def test_what_does_not_fit_says_how_much_is_missing(job):
    path = job(
        mesh={"dp_replicate": "auto", "dp_shard": "auto"},
        hardware=PLAN["hardware"] | {"headroom": 0.99},
        batch={"micro": 1, "global": 8, "seq_len": 1024},
    )
    answer = ask(path, "mesh.dp_shard=8")
    assert answer.seconds is None
    assert answer.missing_bytes > 0
    assert "are missing at the least" in verdict(answer)


def test_one_search_for_all_values_of_a_field(job, monkeypatch):
    """What all are put beside is searched once, within the time that the plan allows."""
    asked = []

    def counted(*args, **more):
        asked.append(more["deadline"])
        return search(*args, **more)

    monkeypatch.setattr("meshplan.planner.widened.search", counted)
    answers = explain(job(solve={"time_limit": "1h"}), ["why", "mesh.dp_shard"])
    assert len(asked) == len(answers) + 1
    assert all(deadline < time.monotonic() + 3600 for deadline in asked)


def test_time_that_is_up_is_said(job):
    answer = ask(job(solve={"time_limit": "0.000001s"}), "mesh.tp=2")
    assert not answer.is_whole
    assert verdict(answer).startswith("so far, the time was up: ")


@pytest.mark.parametrize(
    "words",
    [
        ["why-not", "mesh.tp"],
        ["why", "nothing"],
        ["what"],
        ["why-not", "mesh.tp=x"],
        ["why-not", "strategy=fast"],
    ],
)
def test_what_is_no_question_is_refused(job, capsys, words):
    assert main(["explain", *words, "-f", str(job())]) == 2
    assert capsys.readouterr().err.startswith("meshplan: 1 problem")


def test_json_and_text(job, capsys):
    assert main(["explain", "why", "mesh.dp_shard", "-f", str(job()), "--json", "-q"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["schema"] == "explain/1"
    answers = content["result"]["answers"]
    assert [a["setting"] for a in answers] == [f"mesh.dp_shard={n}" for n in (1, 2, 4, 8)]
    assert any(a["verdict"] == "it is what the plan has, or as fast" for a in answers)
    assert main(["explain", "why-not", "mesh.tp=2", "-f", str(job()), "-q"]) == 0
    assert capsys.readouterr().out.startswith("mesh.tp=2: +")


def test_a_verdict_names_what_grew_most():
    base = Shares(compute=1.0, recompute=0.0, tensor_parallel=0.0, data=0.2, pipeline=0.0)
    more = dataclasses.replace(base, tensor_parallel=0.5, recompute=0.1)
    answer = WhyNot(setting="x", base_s=1.2, seconds=1.8, shares=more, base_shares=base)
    assert verdict(answer) == "+50.0%: what tp, cp or ep sends in the way (+41.7%)"


@pytest.mark.parametrize("setting", ["loss_chunks=4", "precision=bf16-true", "loss_chunks=1"])
def test_what_only_a_plan_can_state_is_searched_as_if_it_did(job, setting):
    """The same as planning with it in the file."""
    path = job(LLAMA | {"vocab_size": 32_768}, mesh={"dp_shard": 8}, strategy="full_shard")
    answer = ask(path, setting)
    stated, plain = search_plan(path, [setting]), search_plan(path)
    assert answer.seconds == pytest.approx(stated.best_s, rel=1e-9)
    assert answer.base_s == pytest.approx(plain.best_s, rel=1e-9)
    is_faster = stated.best_s < plain.best_s * (1 - 5e-4)
    assert is_faster == ("has to state it" in verdict(answer))
    assert is_faster == (setting == "precision=bf16-true")


def test_what_a_plan_cannot_have_is_told(job):
    path = job(mesh={"dp_shard": 4, "cp": 2}, strategy="full_shard")
    answer = ask(path, "loss_chunks=4")
    assert "loss_chunks and cp do not go together" in answer.why
