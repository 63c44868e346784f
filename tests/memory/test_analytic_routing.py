"""What an estimate says of experts and of the tokens sent to them, and what it refuses to say.

Which seeded bug would this catch? A routing taken to be even that the plan states otherwise; the
worst of all told of an even one; a switch that changes a block and is not read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshplan.errors import PlanError, SpecError
from meshplan.memory.analytic.estimate import (
    estimate_analytic,
    estimate_worst_routing,
)
from meshplan.memory.decoder.experts import Spread, most_arriving
from meshplan.memory.decoder.sizes import shape_of
from meshplan.model.blueprint import from_mapping
from meshplan.spec.reader import load_spec
from meshplan.units import format_gib
from tests.helpers.analytic import analytic_log
from tests.memory.test_analytic import AUTO, BF16, LLAMA, LONG, plan_of
from tests.memory.test_analytic_experts import MIXTRAL, QWEN, SPREAD


def test_an_estimate_says_how_experts_are_computed() -> None:
    more = BF16 | {"mesh": {"dp_shard": 2}, "batch": {"micro": 1, "seq_len": 64}}
    plan = plan_of(MIXTRAL | LONG, {"version": 1} | more, 2)
    found = estimate_analytic(plan, device="h100-sxm-80gb", limit_bytes=None)
    assert ("experts", "transformers' grouped_mm, whose sizes do not depend on the routing") in (
        found.assumed
    )
    dense = plan_of(LLAMA | LONG, {"version": 1} | more, 2)
    assert not any(
        what == "experts"
        for what, _ in estimate_analytic(dense, device="h100-sxm-80gb", limit_bytes=None).assumed
    )


def test_in_a_pipeline_too_they_say_it() -> None:
    mesh = {"pp": 2, "dp_shard": 4, "ep": "2 in dp_shard"}
    pipeline = {"schedule": "1F1B", "microbatches": 4}
    more = SPREAD | {"mesh": mesh, "pipeline": pipeline, "batch": {"micro": 4, "seq_len": 2048}}
    plan = plan_of(MIXTRAL | LONG, {"version": 1} | more, 8)
    found = estimate_analytic(plan, device="h100-sxm-80gb", limit_bytes=None, worst_routing=True)
    usual = estimate_analytic(
        plan, device="h100-sxm-80gb", limit_bytes=None, stop_above_bytes=1 << 60
    )
    assert estimate_worst_routing(usual, plan) == found != usual


def test_spread_experts_say_what_they_are_taken_to_be_sent() -> None:
    more = SPREAD | {"batch": {"micro": 1, "seq_len": 2048}}
    plan = plan_of(MIXTRAL | LONG, {"version": 1} | more, 4)
    found = estimate_analytic(plan, device="h100-sxm-80gb", limit_bytes=None, worst_routing=True)
    usual = estimate_analytic(
        plan, device="h100-sxm-80gb", limit_bytes=None, stop_above_bytes=1 << 60
    )
    assert estimate_worst_routing(usual, plan) == found != usual
    (said,) = (value for what, value in found.assumed if what == "routing")
    assert said.startswith("each of the 2 ranks of ep receives an even share of the tokens; if one")
    even = analytic_log(plan, batch=1, seq_len=2048).peak.live_bytes
    all_here = Spread(2, most_arriving(shape_of(plan.graph), 2), is_unit=True)
    most = analytic_log(plan, batch=1, seq_len=2048, spread=all_here).peak.live_bytes
    assert most > 1.2 * even
    assert said.endswith(f"would be {format_gib(most)}")


def test_what_a_plan_states_of_the_routing_is_what_memory_is_told_for() -> None:
    more = SPREAD | {"batch": {"micro": 1, "seq_len": 2048}}

    def peak(**stated: Any) -> tuple[int, str]:
        plan = plan_of(MIXTRAL | LONG, {"version": 1} | more | stated, 4)
        found = estimate_analytic(plan, device="h100-sxm-80gb", limit_bytes=None)
        (said,) = (value for what, value in found.assumed if what == "routing")
        return found.worst.peak.requested_bytes, said

    even, _ = peak()
    assert peak(experts={"capacity": 1})[0] == even
    some, said = peak(experts={"capacity": 1.5})
    most, _ = peak(experts={"capacity": 2})
    assert even < some < most == peak(experts={"capacity": 7})[0]
    assert said == "a rank of ep receives at most 1.5 times an even share, as the plan states"
    limit = estimate_analytic(
        plan_of(MIXTRAL | LONG, {"version": 1} | more, 4),
        device="h100-sxm-80gb", limit_bytes=None,
    ).worst.band[1]  # fmt: skip
    full = plan_of(MIXTRAL | LONG, {"version": 1} | more | {"experts": {"capacity": 2}}, 4)
    assert estimate_analytic(full, device="h100-sxm-80gb", limit_bytes=limit).fits is False


def test_a_capacity_without_ranks_to_send_to_is_refused() -> None:
    with pytest.raises(PlanError, match="no effect without an ep axis"):
        plan_of(MIXTRAL, {"version": 1, "mesh": {"dp_shard": 2}, "experts": {"capacity": 2}}, 2)
    with pytest.raises(SpecError, match="at least 1"):
        load_spec({"version": 1, "experts": {"capacity": 0.5}})


def test_more_slots_come_where_all_are_sent_to_one() -> None:
    shape = shape_of(from_mapping(QWEN))  # Of 6 experts a token goes to 3.
    assert most_arriving(shape, 2) == 2.0
    assert most_arriving(shape, 3) == 2.0  # A rank has 2 of a token's 3.
    assert most_arriving(shape, 6) == 2.0


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"experts_implementation": "eager"}, "experts_implementation depends on the routing"),
        ({"output_router_logits": True}, "the loss over output_router_logits"),
        ({"router_jitter_noise": 0.1}, "router_jitter_noise"),
        ({"hidden_act": "quick_gelu"}, "the activation quick_gelu saves"),
    ],
)
def test_switches_that_change_a_block_are_refused(more: dict[str, Any], what: str) -> None:
    with pytest.raises(PlanError, match=what):
        shape_of(from_mapping(MIXTRAL | more))


def test_a_token_goes_to_experts_that_there_are() -> None:
    graph = from_mapping(MIXTRAL)
    sent = replace(graph, config={**graph.config, "num_experts_per_tok": 5})
    with pytest.raises(PlanError, match="a token cannot be sent to 5 of 4 experts"):
        shape_of(sent)


def test_mixtral_looks_back_as_far_as_its_config_says() -> None:
    assert shape_of(from_mapping(MIXTRAL)).window == 0
    assert shape_of(from_mapping(MIXTRAL | {"sliding_window": None})).window == 0
    assert shape_of(from_mapping(MIXTRAL | {"sliding_window": 24})).window == 24


def test_what_auto_derives_of_other_experts_needs_a_live_model() -> None:
    with pytest.raises(PlanError, match="auto derives tp styles from a recorded forward"):
        plan_of(MIXTRAL | {"experts_implementation": "eager"}, {"version": 1} | AUTO, 2)
