"""`meshplan estimate -f` where blocks repeat: composed, extrapolated or traced, one answer."""

from __future__ import annotations

from typing import Any

import pytest

from meshplan.errors import Origin
from meshplan.memory import EventLog, reserve
from meshplan.runtime.base.subprocess_pool import run_in_subprocesses
from meshplan.runtime.estimate.estimate import _fake_step
from meshplan.runtime.estimate.request import EstimateRequest, decided
from meshplan.runtime.estimate.scale_down import ModelSource
from meshplan.spec.reader import load_spec
from tests.cli.test_estimate_memory import PLAN, check_modules, result_of, run

__all__ = ["run"]


def whole_log(plan: dict[str, Any], entry: str) -> EventLog:
    """Of rank 0, with all blocks."""
    source = ModelSource(entry=f"tests.helpers.estimated:{entry}", origin=Origin("<test>"))
    request = EstimateRequest(spec=load_spec(plan), source=source)
    _, known = decided(request.spec, source)
    (imagined,) = run_in_subprocesses(_fake_step, [(request, known, 0)])
    return imagined.log


def test_tier_2_traces_the_whole_step(run):
    result = result_of(run, TALL, "--tier", "2")
    assert result["tier"] == 3
    assert "the composed step (tier 1) has the same peak, to the byte" in result["certified"]
    check_is_whole(result, whole_log(TALL, "high_tower"))


def check_is_whole(result: dict[str, Any], log: EventLog) -> None:
    """Whether the first group needs what the step that was traced whole does."""
    group = result["groups"][0]
    terms = group["terms"]
    workspaces = terms.pop("library workspaces")
    assert group["peak"]["requested_bytes"] - workspaces == log.peak.live_bytes
    traced = {term: size for term, size in log.terms_at_peak.items() if size}
    if result["tier"] == 1:  # It knows gradients and losses sooner: before they are reduced.
        for found in (terms, traced):
            found["temporaries"] += sum(found.pop(n, 0) for n in ("gradients", "logits and loss"))
    assert terms == traced
    assert group["peak"]["reserved_bytes"] - workspaces == reserve(log).reserved_bytes


TALL = PLAN | {"model": {"entry": "tests.helpers.estimated:high_tower"}}


@pytest.mark.parametrize(
    "more",
    [
        {"clip_grad_norm": 1.0, "batch": {"micro": 2, "seq_len": 16, "accumulate": 2}},
        pytest.param({"mesh": {"dp_shard": 2, "tp": 2}, "tp_plan": "auto"}, marks=pytest.mark.wide),
        pytest.param({"strategy": "zero1", "precision": "bf16-mixed"}, marks=pytest.mark.wide),
        pytest.param({"mesh": {"pp": 2, "dp_shard": 2}, "batch": {"micro": 4, "seq_len": 16},
                      "pipeline": {"schedule": "1F1B", "microbatches": 4}}, marks=pytest.mark.wide),
    ],
)  # fmt: skip
def test_where_blocks_repeat_a_step_is_composed_and_is_the_whole_one(run, more):
    """A rule left out of the replay, or a block too few, would be seen here."""
    result = result_of(run, TALL | more)
    assert result["tier"] == 1
    assert "added by rules" in result["certified"]
    if "clip_grad_norm" in more:
        check_modules(result["groups"][0], {"table": 1, "blocks.*.up": 24, "head": 1})
    check_is_whole(result, whole_log(TALL | more, "high_tower"))
    low, high = result["groups"][0]["band"]
    driver = result["groups"][0]["peak"]["driver_bytes"]
    whole = result_of(run, TALL | more, "--tier", "3") if "mesh" in more else None
    if whole is not None:  # What is composed has the wider band.
        assert low < whole["groups"][0]["band"][0]
        assert high > whole["groups"][0]["band"][1] > driver


@pytest.mark.parametrize(
    ("change", "flags", "what"),
    [
        (
            {
                "mesh": {"dp_replicate": 2},
                "strategy": "ddp",
                "batch": {"micro": 2, "accumulate": 2},
                "ddp": {"find_unused_parameters": True},
            },
            ("--tier", "1"),
            "tier 1 cannot answer: the replay of a step has no",
        ),
        (
            {"model": {"params": "1e6"}},
            ("--tier", "3"),
            "--tier is about the peak memory of a step",
        ),
    ],
)
def test_a_tier_that_cannot_answer_says_why(run, change, flags, what):
    code, out, err = run(PLAN | change, "-q", *flags)
    assert (code, out) == (2, "")
    assert what in err
    assert "    fix: " in err


def test_nothing_recomputed_lives_on(run):
    """With tp the hook that lets go of activations is not called for what runs again."""
    tp = {"mesh": {"tp": 2}, "tp_plan": "auto"}
    again = whole_log(PLAN | tp | {"activation_checkpointing": "full"}, "tower")
    assert again.by_phase["step"][1] == whole_log(PLAN | tp, "tower").by_phase["step"][1]
