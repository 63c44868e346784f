"""`meshplan compare`: what a run took beside its plan, and the constant that would close a gap.

Which seeded bug would this catch? Phases that do not add up to the step, a constant that closes
another gap than the one there is, ranks of a class of which only the first counts, bytes of a
collective over other axes, and any file that is taken for a run.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from meshplan.api import checking
from meshplan.cli.app import main
from meshplan.planner.problem.request import cluster_of
from meshplan.planner.tables.whole_plan import Costed
from meshplan.textbook.inputs import read_limit
from meshplan.traffic import forecast
from tests.planner.test_planner import LLAMA, job

__all__ = ["job"]

WHOLE = {"mesh": {"dp_shard": 8}, "strategy": "full_shard",
         "batch": {"micro": 4, "accumulate": 2, "seq_len": 1024}}  # fmt: skip


def costed(path):
    plan = checking.decide(path)
    device, _, _ = read_limit(None, None, plan.spec)
    return Costed(plan, cluster_of(plan.spec, device))


def blocks_s(costs):
    """The forwards of all blocks, which are all of a step's but those of embedding and head."""
    names = [f"model.layers.{number}" for number in range(LLAMA["num_hidden_layers"])]
    return costs.plan.accumulate * sum(costs.block(name).forward_s for name in names)


def as_predicted(path):
    """The content of a run.json that took what is predicted."""
    costs, memory = costed(path), checking.estimate_memory(path, fixes=False)
    ranks = costs.plan.mesh.world_size
    by_rank = {rank: group.peak for group in memory.groups for rank in group.ranks}
    return {
        "format": "meshplan/run/1", "plan": costs.plan.digest(), "ranks": ranks, "device": "H100",
        "step_s": costs.seconds + 0.5, "phases_s": {"data": 0.5, **costs.phases},
        "peak_bytes": [by_rank[rank].allocated_bytes for rank in range(ranks)],
        "reserved_bytes": [by_rank[rank].reserved_bytes for rank in range(ranks)],
        "flops": 0.4 * costs.profile.peak_flops * (costs.seconds + 0.5),
        "modules": [
            {"name": "model.layers.*", "modules": 6, "calls": 12, "forward_s": blocks_s(costs)},
        ],
        "collectives": [
            {"kind": each.route.kind, "axes": list(each.route.axes), "count": each.count,
             "bytes": each.count * each.route.num_bytes}
            for each in forecast(costs.plan).traffic
        ],
    }  # fmt: skip


@pytest.fixture
def compare(job, tmp_path, capsys):
    """Compare a run, changed by a function, with its plan: (exit code, JSON answer)."""

    def run(change=lambda content: None, *words, fields=None):
        path = job(LLAMA, **(WHOLE | (fields or {})))
        content = as_predicted(path)
        change(content)
        file = tmp_path / "run.json"
        file.write_text(json.dumps(content))
        code = main(["compare", str(file), "-f", str(path), "--json", *words])
        return code, json.loads(capsys.readouterr().out)["result"]

    return run


def test_phases_add_up_to_the_step(job):
    for fields in ({}, {"activation_checkpointing": "full"}, {"strategy": "zero1"}):
        costs = costed(job(LLAMA, **(WHOLE | fields)))
        assert sum(costs.phases.values()) == pytest.approx(costs.seconds, rel=1e-9)


def test_a_run_as_predicted_agrees(compare):
    code, found = compare()
    assert code == 0
    assert found["agrees"]
    assert found["constants"] == []
    known = {each["what"]: each["error"] for each in found["figures"]}
    assert known.pop("data") is None  # No plan predicts a loader.
    assert {"a step, without its data", "forward", "backward", "communication", "optimizer",
            "peak allocated", "peak reserved",
            "all_gather over dp_shard"} <= known.keys()  # fmt: skip
    assert all(error == pytest.approx(0, abs=1e-9) for error in known.values())
    assert "forward of model.layers.*" in known
    assert found["mfu"] == pytest.approx(0.4)


def test_a_run_that_accumulated_more_is_held_against_steps_of_that_many(job, compare):
    """A schedule of epochs has other numbers than the plan, whose own step is shorter."""
    longer = costed(job(LLAMA, **WHOLE | {"batch": WHOLE["batch"] | {"accumulate": 6}}))

    def change(content):
        content.update(accumulate=6, phases_s={"data": 0.5, **longer.phases})
        content["modules"][0]["forward_s"] = blocks_s(longer)

    _, found = compare(change)
    errors = {each["what"]: each["error"] for each in found["figures"]}
    for what in ("a step, without its data", "forward", "optimizer", "forward of model.layers.*"):
        assert errors[what] == pytest.approx(0, abs=1e-9), what
    _, found = compare(lambda content: content.update(accumulate=2))
    assert found["agrees"]


def test_a_run_on_another_device_has_no_share_of_the_plans(compare):
    _, found = compare(lambda content: content.update(device="NVIDIA A100-SXM4-80GB"))
    assert found["mfu"] is None


def test_phases_with_communication_in_them_are_not_compared(compare):
    _, found = compare(lambda content: content["phases_s"].pop("communication"))
    phases = {each["what"]: each["error"] for each in found["figures"]}
    assert phases["forward"] is phases["backward"] is None


def test_a_slower_link_costs_communication_alone(job):
    costs = costed(job(LLAMA, **WHOLE))
    slow = costs.with_profile(
        replace(costs.profile, intra_bytes_per_s=costs.profile.intra_bytes_per_s / 50)
    )
    before, after = dict(costs.phases), dict(slow.phases)
    assert after.pop("communication") > 2 * before.pop("communication")
    assert after == pytest.approx(before)


@pytest.mark.parametrize("name", ["efficiency", "intra_bytes_per_s", "memory_bytes_per_s"])
def test_the_constant_that_closes_a_gap_is_named(job, compare, name):
    costs = costed(job(LLAMA, **WHOLE))
    real = getattr(costs.profile, name) / 3
    slow = costs.with_profile(replace(costs.profile, **{name: real}))
    assert slow.seconds > 1.01 * costs.seconds

    def slower(content):
        content["phases_s"] |= slow.phases

    code, found = compare(slower, "--within", "0.5")
    assert code == 1
    needed = {each["name"]: each["needed"] for each in found["constants"]}
    assert needed[name] == pytest.approx(real, rel=1e-3)


def test_every_rank_of_a_class_counts(compare):
    def fuller(content):
        content["peak_bytes"][5] *= 2

    code, found = compare(fuller)
    apart = {each["what"] for each in found["figures"] if abs(each["error"] or 0) > 0.1}
    assert code == 1
    assert apart == {"peak allocated"}


def test_collectives_are_compared_by_axes(compare):
    def others(content):
        for each in content["collectives"]:
            each["axes"] = ["dp_replicate"] if each["kind"] == "all_gather" else each["axes"]

    code, found = compare(others)
    bytes_of = {e["what"]: (e["predicted"], e["measured"]) for e in found["figures"]}
    assert code == 1
    assert bytes_of["all_gather over dp_shard"][1] == 0
    assert bytes_of["all_gather over dp_replicate"][0] == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "no run.json"),
        ('{"format": "meshplan/run/2"}', "another format"),
        ("{", "no run.json"),
        ("[" * 100_000, "no run.json"),
        ('{"format": "meshplan/run/1"}', "'plan'"),
    ],
)
def test_other_files_are_no_runs(job, tmp_path, capsys, content, message):
    path, file = job(LLAMA, **WHOLE), tmp_path / "run.json"
    file.write_text(content)
    assert main(["compare", str(file), "-f", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_a_missing_run_is_named(job, capsys):
    assert main(["compare", "nothing.json", "-f", str(job(LLAMA, **WHOLE))]) == 2
    told = capsys.readouterr().err
    assert "\nnothing.json: there is no such file\n    fix: name the file that" in told


def test_a_run_of_other_ranks_is_refused(compare, job, tmp_path, capsys):
    path, file = job(LLAMA, **WHOLE), tmp_path / "run.json"
    file.write_text(json.dumps(as_predicted(path) | {"ranks": 4}))
    assert main(["compare", str(file), "-f", str(path)]) == 2
    assert "the run had 4 ranks, but the plan has 8" in capsys.readouterr().err
