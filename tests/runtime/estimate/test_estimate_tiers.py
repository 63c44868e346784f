"""`meshplan estimate -f` where blocks repeat: composed, extrapolated or traced, one answer."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from meshplan.errors import Origin
from meshplan.memory import EventLog, Term, reserve
from meshplan.memory.log.events import Event, Storage
from meshplan.memory.repeat.extrapolate import Blocks, NotRepeatingError, extrapolate, is_same
from meshplan.plan.plan import make_plan
from meshplan.runtime.base.subprocess_pool import run_in_subprocesses
from meshplan.runtime.estimate.estimate import _fake_step, _worth_cutting
from meshplan.runtime.estimate.request import EstimateRequest, decided
from meshplan.runtime.estimate.scale_down import Source
from meshplan.runtime.fake_step.equal_lists import Repeats, is_alike
from meshplan.runtime.trace.structure import graph_of
from meshplan.spec.reader import load_spec
from tests.cli.test_estimate_memory import PLAN, check_modules, result_of, run

__all__ = ["run"]


def whole_log(plan: dict[str, Any], entry: str) -> EventLog:
    """Of rank 0, with all blocks."""
    source = Source(entry=f"tests.helpers.estimated:{entry}", origin=Origin("<test>"))
    (imagined,) = run_in_subprocesses(
        _fake_step, [(EstimateRequest(spec=load_spec(plan), source=source), 0)]
    )
    return imagined.log


@pytest.mark.parametrize(
    "more",
    [
        {"clip_grad_norm": 1.0, "batch": {"micro": 2, "seq_len": 16, "accumulate": 2},
         "activation_checkpointing": {"mode": "full", "every": 2}},
        pytest.param({"precision": "bf16-mixed"}, marks=pytest.mark.wide),
        pytest.param({"strategy": "zero1"}, marks=pytest.mark.wide),
        pytest.param({"mesh": {"dp_replicate": 4}, "clip_grad_norm": 1.0}, marks=pytest.mark.wide),
        pytest.param({"mesh": {"dp_shard": 2, "tp": 2}, "tp_plan": "auto",
                      "activation_checkpointing": "full"}, marks=pytest.mark.wide),
    ],
)  # fmt: skip
def test_few_blocks_tell_the_whole(run, more):
    plan = PLAN | {"model": {"entry": "tests.helpers.estimated:high_tower"}} | more
    result = result_of(run, plan, "--tier", "2")
    assert result["tier"] == 2
    assert "found again to the byte with" in result["certified"]
    assert "the composed step (tier 1) has the same peak, to the byte" in result["certified"]
    check_is_whole(result, whole_log(plan, "high_tower"))


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
    assert "composed by rules" in result["certified"]
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
        ({}, ("--tier", "2"), "tier 2 cannot answer: the model has no long list of equal blocks"),
        ({"compile": True}, ("--tier", "1"), "tier 1 cannot answer: the replay of a step has no"),
        ({"model": {"params": "1e6"}}, ("--tier", "3"), "--tier is about the peak of a plan's"),
    ],
)
def test_a_tier_that_cannot_answer_says_why(run, change, flags, what):
    code, out, err = run(PLAN | change, "-q", *flags)
    assert (code, out) == (2, "")
    assert what in err
    assert "    fix: " in err


def repeats(plan: dict[str, Any]) -> Repeats | None:
    source = Source(entry=plan["model"]["entry"], origin=Origin("<test>"))
    return _worth_cutting(*decided(load_spec(plan), source))


def test_only_equal_blocks_are_left_out():
    plan = PLAN | {"model": {"entry": "tests.helpers.estimated:high_tower"}}
    found = repeats(plan)
    assert found is not None
    assert (found.blocks.lists, found.blocks.period, found.counts) == (("blocks",), 1, (24,))
    assert repeats(plan | {"model": {"entry": "tests.helpers.estimated:of_many_kinds"}}) is None
    assert repeats(plan | {"model": {"entry": "tests.helpers.estimated:tower"}}) is None
    for rule in (
        {"match": "blocks.0", "activation_checkpointing": "full"},
        {"match": "blocks.{0..22}", "unit": False},
        {"match": "blocks.23.up", "place": "replicate"},
    ):
        assert repeats(plan | {"rules": [rule]}) is None, rule


def test_what_does_not_repeat_is_refused():
    made = Storage(Term.ACTIVATIONS, "aten.mm.default", "blocks.0")

    def log(*sizes: int) -> EventLog:
        births = tuple(Event(size, n, 0) for n, size in enumerate(sizes))
        return EventLog((made,) * len(sizes), births, ("forward",))

    blocks = Blocks(("blocks",))
    sums = {n: sum(e.delta for e in extrapolate(log(8), log(8, 4), blocks, n).events)
            for n in (0, 1, 5)}  # fmt: skip
    assert sums == {0: 12, 1: 16, 5: 32}
    grown = extrapolate(log(16), log(24), blocks, 2)
    assert [event.delta for event in grown.events] == [40]
    with pytest.raises(NotRepeatingError):
        extrapolate(log(8, 4), log(8), blocks, 1)
    assert not is_same(log(8, 4), log(4, 8, 4))


def test_nothing_recomputed_lives_on(run):
    """With tp the hook that lets go of activations is not called for what runs again."""
    tp = {"mesh": {"tp": 2}, "tp_plan": "auto"}
    again = whole_log(PLAN | tp | {"activation_checkpointing": "full"}, "tower")
    assert again.by_phase["step"][1] == whole_log(PLAN | tp, "tower").by_phase["step"][1]


@pytest.mark.parametrize(
    ("more", "is_same"),
    [
        ({}, True),
        ({"strategy": "zero1"}, False),
        ({"batch": {"micro": 2, "accumulate": 4}}, False),
        ({"rules": [{"match": "0", "activation_checkpointing": "full"}]}, False),
        ({"rules": [{"match": "3", "activation_checkpointing": "full"}]}, True),  # It is not left.
    ],
)
def test_a_small_model_stands_for_the_whole_where_all_that_is_left_is_decided_alike(more, is_same):
    def plan_of(num: int, **fields):
        blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(num)))
        plan = {"version": 1, "mesh": {"dp_shard": 2}, "batch": {"micro": 2, "accumulate": 2}}
        return make_plan(load_spec(plan | fields), graph_of(blocks))

    assert is_alike(plan_of(4, **more), plan_of(2)) == is_same
