"""Pipelines, parts of the sequence, experts, cut losses and statistics: predicted and counted.

Which seeded bug would this catch? A microbatch, a direction or one of keys and values forgotten,
a shape that is whole where it is cut, a stage that answers for another.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import pytest

from meshplan.traffic import Forecast, Route, Routed, RouteDifference, Traffic, differences
from tests.helpers import models, moe
from tests.helpers.counted import told_and_counted, told_twice_and_counted
from tests.helpers.wide import leaving

RULES: Final = models.tp_rules("own_llama")
NORMS: Final = {"match": "**.{norm,norm1,norm2}", "place": {"tp": "sequence_parallel"}}
STAGES: Final = {"mesh": {"pp": 2, "dp_shard": 2}}
STAGES_TP: Final = {"mesh": {"pp": 2, "tp": 2}, "rules": RULES}
PARTS: Final = {"mesh": {"dp_shard": 2, "cp": 2}}
HEADS: Final = {"context": {"attention": "all_to_all"}}
FULL: Final = {"activation_checkpointing": "full"}
SELECTIVE: Final = {"activation_checkpointing": "selective"}
UNITS: Final = {"match": "{block,other}", "unit": True}
NESTED: Final = {"match": "layers.*.attn.w?", "unit": True}
EXPERTS: Final = {"dp_shard": 4, "ep": "2 in dp_shard"}
EXPERT_STAGES: Final = {"pp": 2, "dp_shard": 2, "ep": "2 in dp_shard"}
ALL_EXPERTS: Final = {"dp_shard": 4, "ep": "4 in dp_shard"}


def pipeline(schedule: str, **more: Any) -> dict[str, Any]:
    return {**STAGES, "pipeline": {"schedule": schedule}, **more}


CASES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "four stages, accumulated": (
        "gpt2", {"mesh": {"pp": 4}, "clip_grad_norm": 1.0, "batch": {"accumulate": 2}},
    ),
    "stages in shards, recomputed": ("own_llama", pipeline("1F1B", clip_grad_norm=1.0, **FULL)),
    "zero2, two microbatches": (
        "own_llama",
        {**STAGES, "strategy": "zero2", "pipeline": {"microbatches": 2},
         "batch": {"accumulate": 2}},
    ),
    "a backward in halves of frozen stages": (
        "own_llama, half frozen", pipeline("ZBVZeroBubble"),
    ),
    "a backward partly in halves": ("own_llama", pipeline("DualPipeV")),
    "tied over stages of one rank": ("hf_llama_tied", pipeline("ZBVZeroBubble")),
    "two stacks, skips": ("t5", pipeline("1F1B")),
    "shared by all stages": ("odd", pipeline("Interleaved1F1B", clip_grad_norm=1.0)),
    "a unit in two stages": ("twice", pipeline("1F1B", rules=[UNITS])),
    "a stage that no gradient reaches": (
        "own_llama, half frozen", pipeline("1F1B", strategy="zero2", clip_grad_norm=1.0),
    ),
    "stages and tp, a cut loss": (
        "own_llama", STAGES_TP | SELECTIVE | {"loss_parallel": True, "clip_grad_norm": 1.0},
    ),
    "stages and tp, q and k norms": (
        "qwen3",
        {"mesh": {"pp": 2, "tp": 2}, "rules": models.tp_rules("qwen3"),
         "pipeline": {"schedule": "InterleavedZeroBubble"}},
    ),
    "stages and sequence parallel": (
        "own_llama", STAGES_TP | {"rules": [*RULES, NORMS], "sequence_parallel": True},
    ),
    "a cut loss, accumulated": (
        "hf_llama_tied",
        {"mesh": {"dp_shard": 2, "tp": 2}, "rules": models.tp_rules("hf_llama_tied"),
         "loss_parallel": True, "batch": {"accumulate": 2}},
    ),
    "statistics, recomputed and accumulated": (
        "batchnorms",
        {"strategy": "hybrid_shard", "mesh": [2, 2], "sync_batchnorm": True,
         "batch": {"accumulate": 2},
         "rules": [{"match": "{1,4}", "activation_checkpointing": "full"}]},
    ),
    "statistics of stages": ("batchnorms", STAGES | {"sync_batchnorm": True}),
    "keys and values": (
        "own_llama", PARTS | {"clip_grad_norm": 1.0, "batch": {"accumulate": 2}},
    ),
    "keys and values, recomputed": ("hf_llama, masked", PARTS | FULL),
    "keys and values in bf16": ("qwen3", PARTS | {"precision": "bf16-mixed"}),
    "heads, half of them frozen": ("own_llama, half frozen", PARTS | HEADS),
    "heads, recomputed": ("own_llama", PARTS | HEADS | FULL),
    "keys and values of cut heads": (
        "own_llama", {"mesh": {"cp": 2, "tp": 2}, "rules": RULES, "loss_parallel": True},
    ),
    "heads of cut heads": (
        "own_llama",
        HEADS | {"mesh": {"cp": 2, "tp": 2}, "rules": [*RULES, NORMS], "sequence_parallel": True},
    ),
    "one rank gets every token of frozen experts": (
        "one rank gets all, frozen", moe.plan(EXPERTS),
    ),
    "a unit twice": (
        "twice",
        {"strategy": "hybrid_shard", "mesh": [2, 2], "rules": [UNITS],
         "batch": {"accumulate": 2}},
    ),
    "units that no gradient reaches": (
        "own_llama, a third frozen",
        {"strategy": "full_shard", "rules": [NESTED], "activation_checkpointing": "full"},
    ),
    "torch's own heads": (
        "heads", {"mesh": {"dp_shard": 2, "tp": 2}, "rules": [
            {"match": "layers.*", "place": {"tp": "packed_colwise"}}]},
    ),
    "found styles, whole parameters on parts": (
        "gpt2", {"mesh": {"dp_shard": 2, "tp": 2}, "tp_plan": "auto", "strategy": "zero1",
                 "batch": {"accumulate": 2}},
    ),
    "found styles, two stacks": ("t5", {"mesh": {"dp_shard": 2, "tp": 2}, "tp_plan": "auto"}),
}  # fmt: skip


# Five of six combine what others show one by one.
@pytest.mark.parametrize("case", leaving(CASES, lambda number, _: bool(number % 6)))
def test_counted_equals_predicted(pool, case):
    for told, counted in pool(4).run(told_and_counted, *CASES[case]):
        assert told.unknown == ()
        assert counted
        assert differences(told, counted) == ()


ROUTED: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "experts": ("mixtral", moe.plan(EXPERTS, clip_grad_norm=1.0)),
    "experts of all ranks": ("mixtral grouped", moe.plan(ALL_EXPERTS, clip_grad_norm=1.0)),
    "experts, recomputed": ("deepseek_v3", moe.plan(EXPERTS, **FULL)),
    "experts, recomputed in part, accumulated": (
        "stack", moe.plan(EXPERTS, **SELECTIVE, batch={"accumulate": 2}),
    ),
    "one rank gets every token": ("one rank gets all", moe.plan(EXPERTS)),
    "experts in stages": ("qwen3_moe", moe.plan(EXPERT_STAGES, clip_grad_norm=1.0)),
    "experts in stages, recomputed": (
        "mixtral grouped",
        moe.plan(EXPERT_STAGES, pipeline={"schedule": "Interleaved1F1B"}, **FULL)),
    "experts in stages, recomputed in part, accumulated": (
        "even", moe.plan(EXPERT_STAGES, **SELECTIVE, batch={"accumulate": 2})),
    "experts in stages, in halves": (
        "mixtral grouped", moe.plan(EXPERT_STAGES, pipeline={"schedule": "InterleavedZeroBubble"})),
}  # fmt: skip


@pytest.mark.parametrize("case", leaving(ROUTED, lambda _, case: "in stages" in case))
def test_what_experts_are_sent_follows_from_the_routing(pool, case):
    for balanced, given, counted in pool(4).run(told_twice_and_counted, *ROUTED[case]):
        assert balanced.unknown == given.unknown == ()
        assert any(each.routed for each in balanced.traffic)
        assert differences(balanced, counted) == ()
        assert not any(each.routed for each in given.traffic)
        assert given.routes() == counted


def sent(axis: str, num_bytes: int, kind: str = "all_to_all") -> Route:
    return Route(kind, (axis,), num_bytes)


def routed(count: int, rows: int, row_bytes: int) -> Traffic:
    """Balanced over two ranks."""
    bounds = Routed(row_bytes, 2 * rows)
    return Traffic(route=sent("ep", rows * row_bytes), count=count, what="results", routed=bounds)


def test_what_a_router_decides_is_compared_with_its_bounds():
    exact = Traffic(route=sent("ep", 64), count=1, what="tokens")
    told = Forecast((exact, routed(2, 16, 4), routed(1, 16, 32)))
    for rows, more, wide in ((16, 16, 16), (0, 32, 0), (32, 5, 30), (3, 32, 32)):
        counted = Counter([sent("ep", 64), sent("ep", 4 * rows), sent("ep", 4 * more)])
        counted[sent("ep", 32 * wide)] += 1
        assert differences(told, counted) == ()
        for wrong in (sent("ep", 8), sent("dp_shard", 8), sent("ep", 64, "all_gather")):
            assert differences(told, counted + Counter([wrong]))
        assert differences(told, counted - Counter([sent("ep", 32 * wide)]))
    too_much = sent("ep", 32 * (2 * 16 + 1))
    counted = Counter([sent("ep", 64), sent("ep", 64), sent("ep", 64), too_much])
    assert RouteDifference(too_much, 0, 1) in differences(told, counted)
