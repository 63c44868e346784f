"""Every way to say mesh, strategy and hardware, and every way for them to disagree."""

from __future__ import annotations

from typing import Any

import pytest

from meshplan.errors import PlanError
from meshplan.spec.reader import load_spec
from meshplan.spec.spec import STRATEGY_WORDS
from meshplan.spec.strategies import STRATEGIES, resolve_mesh

TWO_BY_FOUR = {"hardware": {"nodes": 2, "gpus_per_node": 4}}


def resolve(
    plan: dict[str, Any], world_size: int | None = 8, gpus_per_node: int | None = None
) -> tuple[str, str]:
    mesh, strategy = resolve_mesh(load_spec({"version": 1} | plan), world_size, gpus_per_node)
    return str(mesh), strategy.name


def refusal(plan: dict[str, Any], *job: int | None) -> str:
    with pytest.raises(PlanError) as caught:
        resolve(plan, *job)
    return "\n".join(str(problem) for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("plan", "mesh", "strategy"),
    [
        # Only a strategy: it spreads over all devices.
        ({"strategy": "ddp"}, "dp_replicate 8", "ddp"),
        ({"strategy": "NO_SHARD"}, "dp_replicate 8", "ddp"),
        ({"strategy": "zero1"}, "dp_shard 8", "zero1"),
        ({"strategy": "SHARD_GRAD_OP"}, "dp_shard 8", "zero2"),
        ({"strategy": "fsdp"}, "dp_shard 8", "full_shard"),
        # Only a mesh: its data axes say which strategy.
        ({"mesh": {"dp_shard": 8}}, "dp_shard 8", "full_shard"),
        ({"mesh": {"dp_replicate": 8}}, "dp_replicate 8", "ddp"),
        (
            {"mesh": {"dp_replicate": 2, "dp_shard": 4}},
            "dp_replicate 2 x dp_shard 4",
            "hybrid_shard",
        ),
        ({"mesh": {"tp": 8}}, "tp 8", "ddp"),
        ({"mesh": {"dp_shard": 4, "tp": 2}}, "dp_shard 4 x tp 2", "full_shard"),
        ({"mesh": {"tp": 2, "dp_replicate": 4}}, "tp 2 x dp_replicate 4", "ddp"),
        # A bare list: the strategy names the axes.
        ({"mesh": [8], "strategy": "ddp"}, "dp_replicate 8", "ddp"),
        ({"mesh": [8], "strategy": "zero2"}, "dp_shard 8", "zero2"),
        ({"mesh": [2, 4], "strategy": "hsdp"}, "dp_replicate 2 x dp_shard 4", "hybrid_shard"),
        # One free axis is what is left of the devices.
        ({"mesh": {"dp_shard": "auto", "tp": 2}}, "dp_shard 4 x tp 2", "full_shard"),
        ({"mesh": {"dp_replicate": "auto", "dp_shard": 8}}, "dp_replicate 1 x dp_shard 8",
         "hybrid_shard"),
        # Both, in agreement; an axis of one rank contradicts nothing.
        ({"mesh": {"dp_shard": 4, "tp": 2}, "strategy": "zero1"}, "dp_shard 4 x tp 2", "zero1"),
        ({"mesh": {"dp_replicate": 1, "dp_shard": 8}, "strategy": "full_shard"},
         "dp_replicate 1 x dp_shard 8", "full_shard"),
        ({"mesh": {"dp_replicate": 8, "dp_shard": 1}, "strategy": "ddp"},
         "dp_replicate 8 x dp_shard 1", "ddp"),
        ({"mesh": {"dp_shard": 1, "dp_replicate": 8}}, "dp_shard 1 x dp_replicate 8",
         "hybrid_shard"),
        ({"mesh": {"pp": 1, "dp_shard": 8}}, "pp 1 x dp_shard 8", "full_shard"),
    ],
)  # fmt: skip
def test_what_eight_devices_become(plan: dict[str, Any], mesh: str, strategy: str) -> None:
    assert resolve(plan) == (mesh, strategy)


def test_hardware_answers_where_no_job_runs() -> None:
    hybrid = {"strategy": "hybrid_shard_zero2"} | TWO_BY_FOUR
    assert resolve(hybrid, None) == ("dp_replicate 2 x dp_shard 4", "hybrid_shard_zero2")
    assert resolve({"mesh": {"dp_shard": "auto", "tp": 4}} | TWO_BY_FOUR, None) == (
        "dp_shard 2 x tp 4",
        "full_shard",
    )


def test_nodes_are_those_of_the_job() -> None:
    assert resolve({"strategy": "hybrid_shard"}, 8, 4) == (
        "dp_replicate 2 x dp_shard 4",
        "hybrid_shard",
    )
    assert resolve({"strategy": "hybrid_shard"}, 8, 2)[0] == "dp_replicate 4 x dp_shard 2"


def test_the_plan_knows_the_nodes_better_than_a_launcher_of_as_many_ranks() -> None:
    hybrid = {"strategy": "hybrid_shard"} | TWO_BY_FOUR
    assert resolve(hybrid, 8, 8)[0] == "dp_replicate 2 x dp_shard 4"
    assert resolve({"strategy": "full_shard"} | TWO_BY_FOUR, 4, 4)[0] == "dp_shard 4"


DISAGREE = [
    (
        {"mesh": {"dp_replicate": 2, "dp_shard": 4}, "strategy": "full_shard"},
        "<mapping>: strategy: full_shard uses dp_shard only, but the mesh also has dp_replicate "
        "(mesh: {dp_replicate: 2, dp_shard: 4})\n"
        "    fix: write strategy: hybrid_shard or hybrid_shard_zero2, or write mesh: {dp_shard: N}",
    ),
    (
        {"mesh": {"dp_shard": 8}, "strategy": "ddp"},
        "<mapping>: strategy: ddp uses dp_replicate only, but the mesh also has dp_shard "
        "(mesh: {dp_shard: 8})\n"
        "    fix: write strategy: zero1 or zero2 or full_shard, or write mesh: {dp_replicate: N}",
    ),
    (
        {"mesh": {"dp_shard": 8}, "strategy": "hybrid_shard"},
        "<mapping>: strategy: hybrid_shard needs the axis dp_replicate, which the mesh does not "
        "have (mesh: {dp_shard: 8})\n"
        "    fix: write strategy: zero1 or zero2 or full_shard, or write mesh: "
        "{dp_replicate: N, dp_shard: N}",
    ),
    (
        {"mesh": {"tp": 8}, "strategy": "full_shard"},
        "<mapping>: strategy: full_shard needs the axis dp_shard, which the mesh does not have "
        "(mesh: {tp: 8})\n"
        "    fix: leave the strategy out, or write mesh: {dp_shard: N}",
    ),
    (
        {"mesh": {"dp_replicate": 2, "tp": 4}, "strategy": "zero1"},
        "<mapping>: strategy: zero1 uses dp_shard only, but the mesh also has dp_replicate "
        "(mesh: {dp_replicate: 2, tp: 4})\n"
        "    fix: write strategy: ddp, or write mesh: {dp_shard: N}",
    ),
    (
        {"mesh": {"dp_shard": 4, "dp_replicate": 2}},
        "<mapping>: mesh: dp_shard comes before dp_replicate, but the ranks of one replica must "
        "be adjacent\n"
        "    fix: write mesh: {dp_replicate: 2, dp_shard: 4}",
    ),
    (
        {"mesh": [2, 4]},
        "<mapping>: mesh: a mesh of 2 sizes without axis names is ambiguous: the plan states "
        "no strategy that implies the names\n"
        "    fix: name the axes, such as mesh: {dp_replicate: 2, dp_shard: 4}",
    ),
    (
        {"mesh": [8], "strategy": "hybrid_shard"},
        "<mapping>: mesh: a mesh of 1 size without axis names is ambiguous: hybrid_shard has 2 "
        "data axes (dp_replicate, dp_shard)\n"
        "    fix: name the axes, such as mesh: {dp_replicate: 2, dp_shard: 4}",
    ),
    (
        {"mesh": [2, 4], "strategy": "full_shard"},
        "<mapping>: mesh: a mesh of 2 sizes without axis names is ambiguous: full_shard has 1 "
        "data axis (dp_shard)\n"
        "    fix: name the axes, such as mesh: {dp_replicate: 2, dp_shard: 4}",
    ),
    (
        {"mesh": {"dp_shard": 4}},
        "<mapping>: mesh: the mesh has 4 devices, but 8 are available\n"
        "    fix: make the product 8, such as dp_shard: 8",
    ),
    (
        {"mesh": {"dp_shard": 4, "tp": 4}},
        "<mapping>: mesh: the mesh has 4 x 4 = 16 devices, but 8 are available\n"
        "    fix: make the product 8, such as dp_shard: 2",
    ),
    (
        {"mesh": {"dp_shard": 4, "tp": 3}},
        "<mapping>: mesh: the mesh has 4 x 3 = 12 devices, but 8 are available\n"
        "    fix: make the product 8",
    ),
    (
        {"mesh": {"dp_shard": "auto", "tp": 3}},
        "<mapping>: mesh.dp_shard: no size is possible for 'auto': 8 devices are not a "
        "multiple of 3, the product of the other axes\n"
        "    fix: make the product of the other axes a divisor of 8",
    ),
    (
        {},
        "<mapping>: the plan states neither 'mesh' nor 'strategy', and needs one of them\n"
        "    fix: add a line such as strategy: full_shard",
    ),
    (
        {"mesh": {"dp_shard": 8, "tp": "4 in dp_shard"}},
        "<mapping>: mesh.tp: 'tp' cannot borrow ranks: only ep can\n    fix: write tp: N",
    ),
]


@pytest.mark.parametrize(("plan", "message"), DISAGREE)
def test_a_contradiction_has_one_message(plan: dict[str, Any], message: str) -> None:
    assert refusal(plan) == message


def test_what_waits_for_the_planner_is_said_all_at_once() -> None:
    assert refusal({"mesh": "auto", "strategy": "auto"}) == (
        "<mapping>: mesh: 'mesh: auto' is left to the planner\n"
        "    fix: run meshplan plan, or state the axes, such as mesh: {dp_shard: 8}\n"
        "<mapping>: strategy: 'strategy: auto' is left to the planner\n"
        "    fix: run meshplan plan, or state one of ddp, zero1, zero2, full_shard, hybrid_shard, "
        "hybrid_shard_zero2"
    )


@pytest.mark.parametrize(
    ("job", "why"),
    [
        ((8, 8), "the 8 devices are on one node"),
        ((8, None), "the 8 devices are on one node"),
        ((1, 1), "there is one device"),
        ((8, 3), "8 devices are not a multiple of the 3 devices of a node"),
    ],
)
def test_hybrid_needs_nodes(job: tuple[int, int | None], why: str) -> None:
    assert refusal({"strategy": "hybrid_shard"}, *job) == (
        "<mapping>: strategy: hybrid_shard shards inside a node and replicates across nodes, but "
        f"{why}\n"
        "    fix: state both sizes, such as mesh: {dp_replicate: 2, dp_shard: 4}, or use full_shard"
    )


def test_without_hardware_the_command_line_cannot_know_the_devices() -> None:
    assert refusal({"strategy": "zero1"}, None) == (
        "<mapping>: strategy: strategy zero1 needs the number of devices, which the plan does "
        "not state\n"
        "    fix: add hardware: {nodes: 1, gpus_per_node: 8}, or mesh: {...}"
    )
    assert refusal({"mesh": {"dp_shard": "auto"}}, None) == (
        "<mapping>: mesh.dp_shard: 'auto' needs the number of devices, which the plan does "
        "not state\n    fix: add hardware: {nodes: 1, gpus_per_node: 8}, or write the size"
    )


def test_the_table_of_strategies() -> None:
    """ZeRO's stages cut one thing more each; every word of the format has a row."""
    cuts = {name: sorted(row.cuts) for name, row in STRATEGIES.items()}
    assert cuts["ddp"] == []
    assert cuts["zero1"] == ["optimizer"]
    assert cuts["zero2"] == cuts["hybrid_shard_zero2"] == ["gradient", "optimizer"]
    assert cuts["full_shard"] == cuts["hybrid_shard"] == ["gradient", "optimizer", "parameter"]
    assert set(STRATEGY_WORDS.values()) - {"auto"} == set(STRATEGIES)
