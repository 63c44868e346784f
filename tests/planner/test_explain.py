"""Why, and why not: the same search with something held."""

from __future__ import annotations

import dataclasses
import json
import time

import pytest

from meshplan.api.planning import explain, search_plan
from meshplan.cli.app import main
from meshplan.errors import PlanError
from meshplan.planner.answers.explain import _missing
from meshplan.planner.objectives.fastest import fastest_of
from meshplan.planner.objectives.offload_variants import fastest_of_all
from meshplan.planner.problem.problem import PlanningProblem
from meshplan.planner.problem.request import request_of_file
from meshplan.planner.solve.shares import Shares
from meshplan.render.plans.explain import verdict
from tests.bench.planned_models import MODELS
from tests.planner.test_planner import LARGE, LLAMA, PLAN, job

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
    assert sum(dataclasses.astuple(answer.plan_shares)) == pytest.approx(answer.plan.seconds)
    assert min(dataclasses.astuple(answer.shares)) > -1e-12
    assert answer.shares.update > 0
    assert answer.shares.tensor_parallel > 0
    assert answer.plan_shares.tensor_parallel == 0
    again = ask(job(), "activation_checkpointing=full")
    assert again.shares.recompute > 0
    assert again.plan_shares.recompute == 0


def test_what_is_not_in_the_space_says_why(job):
    path = job()
    assert "8 devices do not divide by 3" in verdict(ask(path, "mesh.tp=3"))
    assert "the 64 samples of a step do not divide by 3" in verdict(ask(path, "batch.micro=3"))
    a100 = PLAN["hardware"] | {"gpu": "a100-sxm-80gb"}  # Its kernels exchange heads only.
    assert "heads do not divide by it" in verdict(ask(job(hardware=a100), "mesh.cp=8"))
    path = job(mesh={"dp_shard": 8}, strategy=None)
    assert "mesh has no tp, or states size 1" in verdict(ask(path, "mesh.tp=2"))


def test_what_has_no_figures_is_told_and_not_searched(job):
    path = job(activation_checkpointing="selective")
    assert "recomputed in full, only" in ask(path, "offload=activations").why


def test_what_does_not_fit_says_how_much_is_missing(job):
    path = job(
        mesh={"dp_replicate": "auto", "dp_shard": "auto"},
        hardware=PLAN["hardware"] | {"headroom": 0.99},
        batch={"micro": 1, "global": 8, "seq_len": 1024},
    )
    answer = ask(path, "mesh.dp_shard=8")
    assert answer.seconds is None
    assert answer.missing_bytes > 0
    assert " over the limit" in verdict(answer)


@pytest.mark.parametrize(
    "changed", [{"time_limit_s": -1.0}, {"is_stopped": lambda: True}], ids=["late", "stopped"]
)
def test_nobody_waits_to_hear_how_much_is_missing(job, changed):
    path = job(mesh={"dp_replicate": "auto", "dp_shard": "auto"})
    question = dataclasses.replace(request_of_file(path), limit_bytes=1 << 20)
    assert _missing(PlanningProblem(question)) > 0
    assert _missing(PlanningProblem(dataclasses.replace(question, **changed))) is None


def test_one_search_for_all_values_of_a_field(job, monkeypatch):
    """What all are put beside is searched once, within the time that the plan allows."""
    asked, planned = [], []

    def counted(problem, deadline):
        asked.append(deadline)
        return fastest_of_all(problem, deadline)

    def decided(*args, **more):
        planned.append(args)
        return fastest_of(*args, **more)

    monkeypatch.setattr("meshplan.planner.answers.explain.fastest_of_all", counted)
    monkeypatch.setattr("meshplan.planner.answers.explain.fastest_of", decided)
    answers = explain(job(solve={"time_limit": "1h"}), ["why", "mesh.dp_shard"])
    assert (len(asked), len(planned)) == (len(answers), 1)
    assert all(deadline < time.monotonic() + 3600 for deadline in asked)


def test_time_that_is_up_is_said(job):
    answer = ask(job(solve={"time_limit": "0.000001s"}), "mesh.tp=2")
    assert not answer.is_whole
    assert verdict(answer).startswith("search incomplete, time limit reached: ")


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
    assert [a["verdict"] == "the plan uses it" for a in answers] == [
        a["is_planned"] for a in answers
    ]
    assert sum(a["is_planned"] for a in answers) == 1
    assert main(["explain", "why-not", "mesh.tp=2", "-f", str(job()), "-q"]) == 0
    assert capsys.readouterr().out.startswith("mesh.tp=2: +")


def test_launches_are_not_called_communication(job):
    """Many small microbatches wait for the host, however fast the network is."""
    asked = []
    for intra in ("900GB/s", "90000GB/s"):
        hardware = PLAN["hardware"] | {"intra": intra}
        batch = {"global": 512, "seq_len": 64}
        path = job(mesh={"dp_shard": 8}, hardware=hardware, batch=batch)
        asked.append(ask(path, "batch.micro=1"))
    slow, fast = asked
    assert slow.shares.launch == pytest.approx(fast.shares.launch)
    assert fast.shares.launch > 10 * fast.shares.data
    assert "kernels that the host launches too slowly" in verdict(fast)


def test_a_verdict_names_what_grew_most(job):
    answer = ask(job(), "mesh.tp=2")
    base = Shares(compute=1.0, recompute=0.0, tensor_parallel=0.0, data=0.2, pipeline=0.0)
    more = dataclasses.replace(base, tensor_parallel=0.5, recompute=0.1)
    plan = dataclasses.replace(answer.plan, seconds=1.2)
    answer = dataclasses.replace(answer, seconds=1.8, shares=more, plan=plan, plan_shares=base)
    mesh = "with mesh: {dp_replicate: 4, tp: 2}, "
    answer = dataclasses.replace(
        answer,
        evaluated=dataclasses.replace(
            answer.evaluated, stated={"mesh": {"dp_replicate": 4, "tp": 2}}
        ),
    )
    assert verdict(answer) == f"+50.0%: {mesh}exposed communication of tp (+41.7%)"
    same = dataclasses.replace(plan, stated=answer.evaluated.stated)
    answer = dataclasses.replace(answer, plan=same)
    assert verdict(answer) == "+50.0%: exposed communication of tp (+41.7%)"


def test_what_some_blocks_do_is_said_of_them(job):
    """Some row has it, whatever blocks do, and none blames axes that its own best does not have."""
    path = job(
        MODELS["Llama-3.1-8B"],
        hardware={"nodes": 1, "gpus_per_node": 8, "gpu": "a100-sxm-40gb"},
        mesh={"dp_shard": 8}, strategy="full_shard", loss_chunks=2, allocator="default",
        batch={"micro": 1, "global": 64, "seq_len": 8192}, activation_checkpointing="auto",
    )  # fmt: skip
    answers = {each.setting: each for each in explain(path, ["why", "activation_checkpointing"])}
    shares = [each.num_with for each in answers.values()]
    assert sum(num for num, _ in shares) == 32
    assert {num for _, num in shares} == {32}
    assert [verdict(a).startswith("the plan uses it") for a in answers.values()] == [
        num > 0 for num, _ in shares
    ]
    assert not any("of tp" in verdict(each) for each in answers.values())


@pytest.mark.parametrize("words", [["why", "mesh.tp"], ["why-not", "loss_chunks=8"]])
def test_what_the_plan_lacks_is_told_as_by_plan(job, words):
    """Without the bandwidth between nodes nothing can be priced, whatever is asked."""
    path = job(hardware={"nodes": 2, "gpus_per_node": 4, "gpu": "l40s-48gb"})
    with pytest.raises(PlanError, match="the plan states no bandwidth between nodes"):
        search_plan(path)
    with pytest.raises(PlanError, match="the plan states no bandwidth between nodes"):
        explain(path, words)


@pytest.fixture
def flat(monkeypatch):
    """Optima as flat as can be: the plan takes what is simpler, however much slower."""
    monkeypatch.setattr("meshplan.planner.objectives.simplify.SLACK", 0.5)
    monkeypatch.setattr("meshplan.planner.objectives.fastest.SLACK", 0.5)


def test_a_part_of_the_slack_is_left_for_what_is_not_searched(job, flat, monkeypatch):
    path = job(LLAMA | LARGE | {"num_hidden_layers": 4}, batch={"global": 8, "seq_len": 512},
               mesh={"pp": "auto", "dp_shard": "auto", "tp": "auto"})  # fmt: skip
    for left, is_best in ((0.0, False), (0.4999, True)):
        monkeypatch.setattr("meshplan.planner.objectives.simplify._UNSEARCHED", left)
        decision = search_plan(path)
        assert decision.chosen is not None
        assert (decision.chosen.seconds <= decision.best_s * 1.0001) is is_best


def test_what_the_plan_has_is_said_of_the_plan_and_not_of_the_fastest(job, flat):
    """The plan may be slower than the best, and simpler: answers are put beside the plan."""
    path = job(LLAMA | LARGE | {"num_hidden_layers": 4}, batch={"global": 8, "seq_len": 512},
               mesh={"pp": "auto", "dp_shard": "auto", "tp": "auto"})  # fmt: skip
    decision = search_plan(path)
    plan = decision.chosen
    assert plan.seconds > decision.best_s * 1.001
    answers = {a.setting: a for field in ("mesh.pp", "mesh.dp_shard", "mesh.tp", "strategy",
                                          "batch.micro", "reshard_after_forward",
                                          "activation_checkpointing", "offload")
               for a in explain(path, ["why", field])}  # fmt: skip
    slower = 1 - decision.best_s / plan.seconds
    for setting, answer in answers.items():
        assert answer.why or answer.plan.stated == plan.stated
        if answer.is_planned:
            assert verdict(answer) == (
                f"the plan uses it; the fastest plan takes {slower:.1%} less time "
                "but is less simple"
            )
        elif answer.seconds is not None:
            share = answer.seconds / plan.seconds - 1
            assert verdict(answer).startswith((f"{share:+.1%}: ", "as fast as the plan"))
            if share < -1e-3:
                assert "faster, but" in verdict(answer), setting
    planned = {setting for setting, answer in answers.items() if answer.is_planned}
    mesh = {axis.name: axis.size for axis in plan.plan.mesh}
    for axis in ("pp", "dp_shard", "tp"):
        assert f"mesh.{axis}={mesh.get(axis, 1)}" in planned
    assert f"strategy={plan.stated['strategy']}" in planned
    assert f"batch.micro={plan.stated['batch.micro']}" in planned
    assert "offload=none" in planned


@pytest.mark.parametrize("setting", ["mesh.tp=2", "mesh.dp_shard=2", "batch.micro=2"])
def test_the_share_is_what_planning_with_the_setting_gives(job, capsys, setting):
    path = job(mesh={"pp": "auto", "dp_replicate": "auto", "dp_shard": "auto", "tp": "auto"})
    answer = ask(path, setting)
    held, plan = search_plan(path, [setting]), search_plan(path)
    assert answer.seconds == pytest.approx(held.best_s)
    share = held.best_s / plan.chosen.seconds - 1
    assert main(["explain", "-f", str(path), "why-not", setting, "-q"]) == 0
    assert capsys.readouterr().out.startswith(f"{setting}: {share:+.1%}: ")


@pytest.mark.wide
def test_what_is_planned_for_memory_is_explained_by_memory(job):
    path = job(solve={"objective": "memory"})
    plan = search_plan(path).chosen
    answers = explain(path, ["why", "strategy"])
    (own,) = [answer for answer in answers if answer.is_planned]
    assert own.setting == f"strategy={plan.stated['strategy']}"
    assert verdict(own) == "the plan uses it"
    least = plan.memory.worst.band[1]
    others = [answer for answer in answers if not answer.is_planned and answer.evaluated]
    assert others
    for answer in others:
        assert answer.evaluated.memory.worst.band[1] >= least
        held = search_plan(path, [answer.setting]).chosen
        assert answer.evaluated.memory.worst.band[1] == held.memory.worst.band[1]
        assert "uses " in verdict(answer)


def test_microbatches_are_asked_about_as_far_as_there_are_any(job):
    """The plan's own is among them, where it is that of a pipeline too."""
    path = job(mesh={"pp": 2, "dp_shard": "auto", "tp": "auto"}, strategy=None)
    answers = explain(path, ["why", "batch.micro"])
    assert [answer.setting for answer in answers] == [f"batch.micro={n}" for n in (16, 32, 64)]
    assert sum(answer.is_planned for answer in answers) == 1
    assert all(answer.evaluated is not None for answer in answers)


@pytest.mark.parametrize("setting", ["loss_chunks=4", "precision=bf16-true", "loss_chunks=1"])
def test_what_only_a_plan_can_state_is_searched_as_if_it_did(job, setting):
    """The same as planning with it in the file."""
    path = job(LLAMA | {"vocab_size": 32_768}, mesh={"dp_shard": 8}, strategy="full_shard")
    answer = ask(path, setting)
    stated, plain = search_plan(path, [setting]), search_plan(path)
    assert answer.seconds == pytest.approx(stated.best_s, rel=1e-9)
    assert answer.base_s == pytest.approx(plain.best_s, rel=1e-9)
    assert ("state it in the plan" in verdict(answer)) == (setting == "precision=bf16-true")
    assert (verdict(answer) == "the plan uses it") == (setting == "loss_chunks=1")


def test_what_a_plan_cannot_have_is_told(job):
    path = job(mesh={"dp_shard": 4, "cp": 2}, strategy="full_shard")
    answer = ask(path, "loss_chunks=4")
    assert "loss_chunks and cp do not go together" in answer.why
