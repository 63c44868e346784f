"""The fastest plan of each other kind of layout, beside the chosen plan.

Which seeded bug would this catch? A kind whose mask takes in other layouts or leaves some out; a
search that ends at the first plan that fits, or that goes by bounds of the whole grid; the chosen
plan's own kind offered as another; a stopped search that claims to be a proof; near variants of the
chosen plan that crowd out the others; settings that were not searched and are not counted.
"""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from meshplan.api.planning import explain, search_plan
from meshplan.cli.app import main
from meshplan.layout.mesh import AXES
from meshplan.planner.answers.difference import side_of
from meshplan.planner.objectives.fastest import fastest_of
from meshplan.planner.objectives.layouts import (
    KINDS,
    decide_beside_others,
    kinds_of,
    with_other_layouts,
)
from meshplan.planner.solve.search import TOLERANCE
from meshplan.render.plans.plan import decision_to_json, decision_to_text
from tests.planner.test_planner import LARGE, LLAMA, PLAN, job, job_of

__all__ = ["job"]

SMALL = {"hardware": {"nodes": 1, "gpus_per_node": 8, "gpu": "h100-sxm-80gb"}}
FULL = {"batch": {"global": 16, "seq_len": 4096}, **SMALL}


def of_kind(decision, kind):
    return next(each for each in decision.other_layouts if each.kind == kind)


def best_by_why_not(path, *settings):
    """The least seconds of several questions of why-not; None if nothing fits with any."""
    seconds = [explain(path, ["why-not", each])[0].seconds for each in settings]
    return min((each for each in seconds if each is not None), default=None)


@pytest.mark.parametrize(
    ("config", "fields"), [(LLAMA, {}), (LLAMA | LARGE | {"num_hidden_layers": 8}, FULL)]
)
def test_each_is_what_why_not_says_of_its_kind(job, config, fields):
    path = job(config, **fields)
    decision = search_plan(path, other_layouts=True)
    expected = {
        "tp": best_by_why_not(path, "mesh.tp=2", "mesh.tp=4", "mesh.tp=8"),
        "pp": best_by_why_not(path, "mesh.pp=2", "mesh.pp=4", "mesh.pp=8"),
        "hybrid": best_by_why_not(path, "strategy=hybrid_shard", "strategy=hybrid_shard_zero2"),
    }
    own = kinds_of(decision.chosen.plan)
    assert {each.kind for each in decision.other_layouts} == set(KINDS) - own
    assert len(own) == 1
    for each in decision.other_layouts:
        if each.kind in expected:
            assert each.is_whole
            assert each.evaluated.seconds == pytest.approx(expected[each.kind], rel=2 * TOLERANCE)
            assert each.evaluated.memory.fits
            assert each.kind in kinds_of(each.evaluated.plan)


def test_tp_that_shards_less_counts_among_them_and_in_why_not(job):
    """With short sequences, tp without sequence_parallel has fewer collectives to wait for."""
    config, batch = LLAMA, {"global": 8, "seq_len": 128}

    def seconds(**more):
        path = job(config, batch=batch, **SMALL, **more)
        decision = search_plan(path, other_layouts=True)
        asked = best_by_why_not(path, "mesh.tp=2", "mesh.tp=4", "mesh.tp=8")
        others = {each.kind: each.evaluated for each in decision.other_layouts}
        return others.get("tp", decision.chosen).seconds, asked

    whole, parts = seconds(sequence_parallel=False), seconds(sequence_parallel=True)
    assert whole[0] < 0.99 * parts[0]
    assert seconds() == pytest.approx(whole, rel=2 * TOLERANCE)


def test_one_data_axis_alone_is_what_its_mesh_gives(job):
    """Beside a chosen plan with tp, the fastest plan of one data axis."""
    path = job()
    problem = job_of(path)
    decision = fastest_of(problem)
    assert kinds_of(decision.chosen.plan) == {"data"}
    with_tp = with_other_layouts(problem, decision)
    other = replace(decision, chosen=of_kind(with_tp, "tp").evaluated)
    found = of_kind(with_other_layouts(problem, other), "data")
    assert found.evaluated.seconds == pytest.approx(decision.best_s, rel=2 * TOLERANCE)
    held = [
        search_plan(job(mesh={axis: 8}, strategy=None)) for axis in ("dp_replicate", "dp_shard")
    ]
    assert found.evaluated.seconds == pytest.approx(
        min(each.best_s for each in held), rel=2 * TOLERANCE
    )


def test_kinds_are_of_the_mesh():
    """By every layout of eight devices: each kind has those layouts alone that its words mean."""
    sizes = {axis: np.array([1, 1, 1, 1, 1, 1, 1]) for axis in AXES}
    #                         ddp fsdp hsdp tp pp cp ep
    sizes["dp_replicate"] = np.array([8, 1, 2, 1, 1, 1, 1])
    sizes["dp_shard"] = np.array([1, 8, 4, 4, 4, 4, 8])
    sizes["tp"], sizes["pp"] = np.array([1, 1, 1, 2, 1, 1, 1]), np.array([1, 1, 1, 1, 2, 1, 1])
    sizes["cp"], sizes["ep"] = np.array([1, 1, 1, 1, 1, 2, 1]), np.array([1, 1, 1, 1, 1, 1, 8])
    found = {kind: np.flatnonzero(is_kind(sizes)).tolist() for kind, is_kind in KINDS.items()}
    assert found == {"tp": [3], "pp": [4], "hybrid": [2], "data": [0, 1]}


def test_a_kind_that_does_not_fit_says_so(job):
    """Without room to replicate over half the devices, no hybrid plan fits."""
    config = LLAMA | LARGE | {"num_hidden_layers": 32}
    hardware = {"nodes": 1, "gpus_per_node": 8, "gpu": "a100-sxm-40gb"}
    path = job(config, hardware=hardware, batch={"global": 16, "seq_len": 4096})
    decision = search_plan(path, other_layouts=True)
    hybrid = of_kind(decision, "hybrid")
    assert hybrid.evaluated is None
    assert hybrid.is_whole
    assert hybrid.why == "no plan fits without offload"
    assert "  hybrid: no plan fits without offload" in decision_to_text(decision, "plan.yaml")


def test_a_space_without_other_kinds_says_nothing(job):
    decision = search_plan(job(mesh={"dp_shard": 8}, strategy=None), other_layouts=True)
    assert {each.why for each in decision.other_layouts} == {"not in the search space"}
    text = "\n".join(decision_to_text(decision, "plan.yaml"))
    assert "another kind of layout" not in text
    decision = search_plan(
        job(mesh={"dp_shard": "auto", "tp": "auto"}, strategy=None), other_layouts=True
    )
    assert "  pp, hybrid: not in the search space" in decision_to_text(decision, "plan.yaml")


def test_python_callers_do_not_pay(job):
    assert search_plan(job()).other_layouts == ()


def test_the_search_itself_is_the_same(job):
    path = job()
    one, two = search_plan(path), search_plan(path, other_layouts=True)
    assert one.chosen.stated == two.chosen.stated
    assert one.rejected == two.rejected
    assert one.num_configs == two.num_configs
    assert [e.stated for e in one.alternatives] == [e.stated for e in two.alternatives]


def test_kinds_of_the_fastest_plan_are_searched_once_a_simpler_one_is_chosen(job):
    """The others are searched beside the choice, before it is known which plan is chosen."""
    path = job()
    problem = job_of(path)
    decision = fastest_of(problem)
    with_tp = of_kind(with_other_layouts(problem, decision), "tp").evaluated
    found = decide_beside_others(problem, with_tp, 1.0, lambda: decision)
    assert {each.kind for each in found.other_layouts} == {"tp", "pp", "hybrid"}
    assert of_kind(found, "tp").evaluated.seconds == pytest.approx(with_tp.seconds)
    assert found == with_other_layouts(problem, decision)
    stopped = replace(decision, is_whole=False)
    found = decide_beside_others(problem, with_tp, 1.0, lambda: stopped)
    assert [each.kind for each in found.other_layouts if not each.is_whole] == ["tp"]
    assert (
        decide_beside_others(
            problem, with_tp, 1.0, lambda: replace(decision, chosen=None)
        ).other_layouts
        == ()
    )


def test_a_stopped_search_is_no_proof(job):
    path = job()
    problem = job_of(path)
    decision = search_plan(path)
    problem.request = replace(problem.request, is_stopped=lambda: True)
    found = with_other_layouts(problem, decision)
    assert found.other_layouts
    assert not any(each.is_whole for each in found.other_layouts)
    assert {each.why for each in found.other_layouts} == {
        "the search was stopped before a plan that fits was found"
    }
    unsearched = with_other_layouts(job_of(path), replace(decision, is_whole=False))
    assert not any(each.is_whole or each.evaluated for each in unsearched.other_layouts)


def test_the_limit_of_the_plan_ends_them(job):
    path = job()
    problem, decision = job_of(path), search_plan(path)
    problem.request = replace(problem.request, time_limit_s=0.0)
    found = with_other_layouts(problem, decision)
    assert not any(each.is_whole for each in found.other_layouts)


def test_json_has_them_under_a_key_of_their_own(job, capsys):
    path = job()
    assert main(["plan", "-f", str(path), "--dry-run", "-q", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    decision = search_plan(path, other_layouts=True)
    assert result["alternatives"] == decision_to_json(decision)["alternatives"]
    others = result["other_layouts"]
    assert [each["kind"] for each in others] == [each.kind for each in decision.other_layouts]
    for each in others:
        if each["chosen"] is None:
            assert each["why"]
        else:
            assert each["step_s"] > 0
            assert each["peak_bytes"] <= result["limit_bytes"]
            assert each["chosen"]["mesh"]
            assert "why" not in each
    assert any(each["chosen"] for each in others)


def test_what_was_not_searched_is_counted_and_listed_when_asked(job, capsys):
    # This GPU's kernels take no mask with grouped heads: cp exchanges heads only.
    path = str(job(hardware=PLAN["hardware"] | {"gpu": "a100-sxm-80gb"}))
    assert main(["plan", "-f", path, "--dry-run", "-q"]) == 0
    short = capsys.readouterr().out
    assert main(["plan", "-f", path, "--dry-run", "-q", "--why-not-searched"]) == 0
    whole = capsys.readouterr().out
    head, _, section = whole.partition("not in the search space\n")
    line = short.removeprefix(head)
    count = sum(len(each.what.partition("=")[2].split(", ")) for each in search_plan(path).rejected)
    assert line == (f"{count} settings were not searched: --why-not-searched lists the reasons\n")
    assert "  mesh.cp=8: " in section
    # The first line has the path of the plan.
    assert max(map(len, (*short.splitlines()[1:], *whole.splitlines()[1:]))) <= 100


def test_the_answer_comes_in_the_order_of_the_questions(job, capsys):
    assert main(["plan", "-f", str(job()), "--dry-run", "-q"]) == 0
    lines = capsys.readouterr().out.splitlines()
    heads = (
        *("  mesh: ", "memory  ", "speed   ", "limits  ", "        proved: no plan is more than "),
        "fastest plans with another kind of layout",
    )
    at = [next(n for n, line in enumerate(lines) if line.startswith(head)) for head in heads]
    assert at == sorted(at)
    assert "(gap" not in "\n".join(lines)


def test_only_faster_variants_of_the_chosen_plan_are_shown(job):
    decision = search_plan(job(), other_layouts=True)
    assert decision.alternatives
    slow = [replace(each, seconds=2 * decision.chosen.seconds) for each in decision.alternatives]
    text = decision_to_text(replace(decision, alternatives=tuple(slow)), "plan.yaml")
    assert "faster, but less simple" not in text
    fast = replace(slow[0], seconds=0.99 * decision.chosen.seconds, stated={"batch.micro": 3})
    text = decision_to_text(replace(decision, alternatives=(fast, *slow[1:])), "plan.yaml")
    at = text.index("faster, but less simple")
    barely = replace(slow[0], seconds=0.9996 * decision.chosen.seconds)
    told = decision_to_text(replace(decision, alternatives=(barely, *slow[1:])), "plan.yaml")
    assert "faster, but less simple" not in told
    assert text[at + 1].startswith("  -1.0%  ")
    assert text[at + 2] == ""


def test_a_balanced_plan_is_compared_within_its_own_memory(job):
    decision = search_plan(job(solve={"objective": "balanced"}), other_layouts=True)
    held = decision.chosen.memory.worst.band[1]
    found = [each.evaluated for each in decision.other_layouts if each.evaluated is not None]
    assert all(each.memory.worst.band[1] <= held for each in found)
    text = decision_to_text(decision, "plan.yaml")
    assert "fastest plans with another kind of layout within the same memory" in text


def test_the_cheapest_number_of_nodes_is_the_one_compared(job):
    decision = search_plan(job(solve={"objective": "cost"}), other_layouts=True)
    world = decision.chosen.plan.mesh.world_size
    found = [each.evaluated for each in decision.other_layouts if each.evaluated is not None]
    assert found
    assert {each.plan.mesh.world_size for each in found} == {world}


def test_a_plan_that_needs_offload_is_compared_with_offload(job):
    """The chosen plan has offload, so what why-not says of other kinds has it too."""
    config = LLAMA | LARGE | {"num_hidden_layers": 32}
    hardware = {"nodes": 1, "gpus_per_node": 2, "gpu": "h100-sxm-80gb"}
    path = job(config, hardware=hardware, batch={"global": 4, "seq_len": 1024})
    decision = search_plan(path, other_layouts=True)
    assert decision.chosen.stated["offload"] == "params"
    for each, setting in (("tp", "mesh.tp=2"), ("pp", "mesh.pp=2")):
        found = of_kind(decision, each)
        if found.is_whole:
            assert found.evaluated.seconds == pytest.approx(
                best_by_why_not(path, setting), rel=2 * TOLERANCE
            )
    assert any(each.is_whole and each.evaluated for each in decision.other_layouts)


def test_the_stated_order_of_axes_is_kept_and_priced(job):
    """Which seeded bug would this catch? A plan with tp across nodes at the price of one inside."""
    machine = {"nodes": 2, "gpus_per_node": 2, "gpu": "h100-sxm-80gb", "inter": "1GB/s"}
    seconds = {}
    for outer, inner in (("tp", "dp_shard"), ("dp_shard", "tp")):
        mesh = {outer: 2, inner: 2}
        path = job(LLAMA, hardware=machine, mesh=mesh, batch={"global": 16, "seq_len": 4096})
        chosen = search_plan(path).chosen
        assert chosen.plan.mesh.names == (outer, inner)
        assert chosen.seconds == pytest.approx(side_of("", chosen.plan).step_s.value)
        seconds[inner] = chosen.seconds
    assert seconds["tp"] < 0.8 * seconds["dp_shard"]


def test_a_layout_without_a_data_axis_names_no_strategy(job):
    """`check` refuses a strategy that has no data axis."""
    hardware = {"nodes": 1, "gpus_per_node": 2, "gpu": "h100-sxm-80gb"}
    batch = {"global": 4, "seq_len": 1024}
    decision = search_plan(job(hardware=hardware, batch=batch), other_layouts=True)
    others = [each.evaluated for each in decision.other_layouts if each.evaluated is not None]
    assert {"mesh": {"tp": 2}, "strategy": None}.items() <= others[0].stated.items()
    text = " ".join(decision_to_text(decision, "plan.yaml"))
    assert "mesh: {tp: 2};" in text
    assert "mesh: {tp: 2}; strategy" not in text
