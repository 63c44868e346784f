"""Experts that are spread within the stages of a pipeline, against one process.

Which seeded bug would this catch? A stage that spreads experts of another one, or none; gradients
of experts that count ranks of ep, or microbatches, twice; a norm that leaves out what other ranks
of ep or other stages hold; a rank that no token comes to and that waits in another collective.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint

import meshplan
from meshplan.memory import state_bytes
from meshplan.model.blueprint import from_mapping
from meshplan.plan.plan import make_plan
from meshplan.plan.restrict import restrict
from meshplan.runtime.base.held_bytes import live_bytes
from meshplan.runtime.fake_step.step import fake_step
from meshplan.spec.reader import load_spec
from tests.helpers import exact, models, moe, replayed
from tests.helpers.parity import TOLERANCE
from tests.runtime.apply.test_expert_parallel import train

PAIR = {"pp": 2, "dp_shard": 2, "ep": "2 in dp_shard"}
SOME = {"pp": 2, "dp_shard": 4, "ep": "2 in dp_shard"}
HYBRID = {"pp": 2, "dp_replicate": 2, "dp_shard": 2, "ep": "2 in dp_shard"}
TP = {"pp": 2, "dp_shard": 2, "tp": 2, "ep": "2 in dp_shard"}
CLIP: dict[str, Any] = {"clip_grad_norm": 0.1}


def spread(mesh: dict[str, Any], schedule: str = "1F1B", count: int = 2, **more: Any) -> Any:
    return moe.plan(mesh, pipeline={"schedule": schedule, "microbatches": count}, **more)


CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "qwen3_moe, recomputed, clipped": (
        4, "qwen3_moe", spread(PAIR, count=4, activation_checkpointing="full", **CLIP)),
    "mixtral": (4, "mixtral grouped", spread(PAIR)),
    "own, recomputed in part, clipped": (
        4, "grouped", spread(PAIR, count=4, activation_checkpointing="selective", **CLIP)),
    "own, recomputed in part, over all ranks of one stage": (
        4, "grouped",
        moe.plan({"dp_shard": 4, "ep": "4 in dp_shard"}, activation_checkpointing="selective")),
    "qwen3_moe, recomputed in part, accumulated": (
        4, "qwen3_moe batched",
        spread(PAIR, activation_checkpointing="selective", batch={"accumulate": 2})),
    "qwen3_moe, zero1, accumulated": (
        4, "qwen3_moe", spread(PAIR, strategy="zero1", batch={"accumulate": 2}, **CLIP)),
    "own, zero2, accumulated": (
        4, "grouped", spread(PAIR, strategy="zero2", batch={"accumulate": 2})),
    "own, GPipe, one rank gets every token": (
        4, "grouped, one rank gets all", spread(PAIR, "GPipe", activation_checkpointing="full")),
    "own, in halves, one rank gets every token": (
        4, "grouped, one rank gets all", spread(PAIR, "ZBVZeroBubble", 4, **CLIP)),
    "mixtral, interleaved, recomputed": (
        4, "mixtral grouped", spread(PAIR, "Interleaved1F1B", activation_checkpointing="full")),
    "mixtral, looped": (4, "mixtral grouped", spread(PAIR, "LoopedBFS")),
    "mixtral, interleaved, in halves": (
        4, "mixtral grouped", spread(PAIR, "InterleavedZeroBubble", **CLIP)),
    "mixtral, both ways": (4, "mixtral grouped", spread(PAIR, "DualPipeV", 4, **CLIP)),
    "mixtral, ep 2 in 4": (8, "mixtral grouped", spread(SOME, **CLIP)),
    "qwen3_moe, hybrid": (8, "qwen3_moe", spread(HYBRID, **CLIP)),
    "mixtral beside tp from the data flow, loss on parts": (
        8, "mixtral grouped", spread(TP, tp_plan="auto", loss_parallel=True, **CLIP)),
    "mixtral, parameters on the host": (
        4, "mixtral grouped", spread(PAIR, offload="params", **CLIP)),
    "mixtral, compiled": (4, "mixtral grouped", spread(PAIR, compile=True)),
}  # fmt: skip
DEFAULT = ("own, recomputed in part, clipped",)


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c in DEFAULT else [pytest.mark.wide]) for c in CASES]
)
def test_parity(pool: Any, case: str) -> None:
    world, name, plan = CASES[case]
    for apart in pool(world).run(train, name, plan):
        assert {n: d for n, d in apart.items() if d > TOLERANCE} == {}


def test_a_stage_spreads_the_experts_that_it_has() -> None:
    """Whatever it keeps of other stages' modules computes nothing."""
    config = {"model_type": "mixtral", "num_hidden_layers": 4, "num_local_experts": 8}
    plan = make_plan(load_spec(spread(PAIR)), from_mapping(config))
    names = [[f"model.layers.{n}.mlp.experts" for n in own] for own in ((0, 1), (2, 3))]
    assert [[*restrict(plan, stage).assignment.experts] for stage in (0, 1)] == names


def held(plan: dict[str, Any]) -> tuple[int, int]:
    """(bytes that a rank holds of a model from meta, bytes that its layouts say)."""
    with torch.device("meta"):
        model = moe.BUILDERS["mixtral grouped"]().train()
    model = meshplan.parallelize(model, plan)
    rank = torch.distributed.get_rank()
    planned = state_bytes(model.meshplan.plan.assignment, "sgd", rank)
    return live_bytes(model, models.optimizer(model)).parameters_bytes, planned.parameters_bytes


@pytest.mark.wide
def test_every_rank_holds_the_bytes_that_its_layouts_say(pool: Any) -> None:
    found = pool(8).run(held, spread(SOME, "Interleaved1F1B"))
    assert [live for live, _ in found] == [planned for _, planned in found]


EXACT: dict[str, tuple[dict[str, Any], str]] = {
    "1F1B": (spread(PAIR), "adamw"),
    "recomputed, clipped": (spread(PAIR, activation_checkpointing="full", **CLIP), "adamw"),
    "recomputed in part": (spread(PAIR, count=4, activation_checkpointing="selective"), "sgd"),
    "in halves": (spread(PAIR, "ZBVZeroBubble", 4), "adamw"),
    "interleaved, zero1, bf16": (
        spread(PAIR, "Interleaved1F1B", strategy="zero1", precision="bf16-mixed"), "adamw"),
}  # fmt: skip
"""By name, (plan, optimizer)."""


@pytest.mark.wide
@pytest.mark.parametrize("case", EXACT)
def test_every_phase_is_exact(pool: Any, apart: ProcessPoolExecutor, case: str) -> None:
    """Where every expert gets as many tokens, real ranks need what is imagined for them."""
    plan, how = EXACT[case]
    real = pool(4).run(exact.measured, "experts: even", plan, how, 4)
    for rank in (0, 3):
        answer = apart.submit(exact.imagined, "experts: even", plan, how, 4, rank).result()
        assert isinstance(answer, tuple), answer
        assert answer[0].by_phase == real[rank]


@pytest.mark.wide
@pytest.mark.parametrize("case", [case for case in EXACT if case != "in halves"])
def test_a_composed_step_is_the_traced_one(apart: ProcessPoolExecutor, case: str) -> None:
    plan, how = EXACT[case]
    for rank in (0, 3):
        answer = apart.submit(replayed.both, "experts: even", plan, how, 4, rank).result()
        assert isinstance(answer, tuple), answer
        whole, composed = answer
        assert composed[1] == whole[1]


def imagined_failing(plan: dict[str, Any]) -> str:
    """What is raised where the loss of an imagined step fails."""

    def fails(*_: Any) -> torch.Tensor:
        raise ValueError("no loss")

    model, found, batch = replayed.decided("experts: even", plan, 4)
    try:
        fake_step(model, found, *batch, fails, models.optimizer, 3)
    except ValueError as error:
        return str(error)
    return ""


def test_half_of_a_step_is_never_taken_for_all_of_it(apart: ProcessPoolExecutor) -> None:
    assert apart.submit(imagined_failing, spread(PAIR)).result() == "no loss"


def saved_and_loaded(plan: dict[str, Any], other: dict[str, Any], folder: str) -> float:
    """How far a model under another plan is from what was saved, once loaded."""
    model = meshplan.parallelize(moe.build("mixtral grouped"), plan)
    batch = meshplan.local_batch(model, models.batch("mixtral", 0))
    meshplan.train_step(model, models.optimizer(model), *batch, models.loss)
    mine = meshplan.full_state_dict(model)
    checkpoint.save({"model": model.state_dict()}, checkpoint_id=folder)
    model = meshplan.parallelize(moe.build("mixtral grouped"), other)
    state = {"model": model.state_dict()}
    checkpoint.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    theirs = meshplan.full_state_dict(model)
    assert mine.keys() == theirs.keys()
    return max((float((mine[n] - theirs[n]).abs().max()) for n in mine), default=0.0)


@pytest.mark.wide
@pytest.mark.parametrize("other", [
    moe.plan({"dp_shard": 4, "ep": "4 in dp_shard"}),
    {"version": 1, "mesh": {"pp": 2, "dp_shard": 2}},
])  # fmt: skip
def test_what_is_saved_loads_under_another_plan(pool: Any, other: Any, tmp_path: Path) -> None:
    assert pool(4).run(saved_and_loaded, spread(PAIR), other, str(tmp_path / "saved")) == [0.0] * 4


def refused(model: Any) -> str:
    """What a step of it raises."""
    batch = meshplan.local_batch(model, models.batch("mixtral", 0))
    try:
        meshplan.train_step(model, models.optimizer(model), *batch, models.loss)
    except meshplan.ApplyError as error:
        return str(error)
    return ""


def misrouted(plan: dict[str, Any], culprit: int) -> str:
    """What a step raises where the router of one rank fails in one of several groups of ep."""
    model = meshplan.parallelize(moe.build("mixtral grouped"), plan)
    (stage,) = model.stages.values()
    experts = next(
        module for name, module in stage.named_modules()
        if name.endswith("experts") and list(module.parameters())
    )  # fmt: skip
    if torch.distributed.get_rank() == culprit:
        dispatch = experts.forward
        experts.forward = lambda x, index, weights: dispatch(x, index + moe.EXPERTS, weights)
    return refused(model)


@pytest.mark.wide
def test_a_routing_that_cannot_be_dispatched_is_told_to_every_stage(pool: Any) -> None:
    told = pool(8).run(misrouted, spread(SOME), 5, timeout=30)
    pool(8).close()
    assert all("ep cannot dispatch the routing of" in text and "on rank 5" in text for text in told)


def unrecorded(plan: dict[str, Any]) -> str:
    model = meshplan.parallelize(moe.build("stack"), plan)
    return refused(model)


@pytest.mark.wide
def test_experts_whose_shapes_depend_on_numbers_are_refused_with_what_to_do(pool: Any) -> None:
    for told in pool(4).run(unrecorded, spread(PAIR)):
        assert "cannot be recorded on the example inputs" in told
        assert "experts_implementation='grouped_mm'" in told
