"""Collectives counted on real runs equal those the layouts predict, kind by kind, byte by byte."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import pytest

import meshplan
from meshplan.plan.plan import make_plan
from meshplan.runtime.trace.structure import graph_of
from meshplan.spec.reader import load_spec
from meshplan.traffic import (
    Forecast,
    Forward,
    Route,
    RouteDifference,
    Traffic,
    differences,
    forecast,
    units,
)
from meshplan.wrappers.fsdp import gathers_of_block
from tests.helpers import models
from tests.helpers.counted import told_and_counted
from tests.runtime.apply.test_tensor_parallel import NORMS, PLAIN

DP2_TP2: Final = {"mesh": {"dp_shard": 2, "tp": 2}, "rules": PLAIN}
GPT2_TP: Final = {"mesh": {"dp_shard": 2, "tp": 2}, "rules": models.tp_rules("gpt2")}
CASES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "ddp": ("own_llama", {"strategy": "ddp"}),
    "ddp that looks for unused parameters": (
        "own_llama",
        {"strategy": "ddp", "ddp": {"find_unused_parameters": True}},
    ),
    "ddp with buffers, accumulated": ("odd", {"strategy": "ddp", "batch": {"accumulate": 2}}),
    "zero1 accumulated": ("odd", {"strategy": "zero1", "batch": {"accumulate": 2}}),
    "zero2 accumulated": ("own_llama", {"strategy": "zero2", "batch": {"accumulate": 2}}),
    "full_shard": ("own_llama", {"strategy": "full_shard"}),
    "full_shard of odd sizes": ("odd", {"strategy": "full_shard", "clip_grad_norm": 1.0}),
    "full_shard accumulated": ("gpt2", {"strategy": "full_shard", "batch": {"accumulate": 2}}),
    "full_shard of tied weights": ("hf_llama_tied", {"strategy": "full_shard"}),
    "resharded to two": (
        "own_llama",
        {"strategy": "full_shard", "rules": [{"match": "layers.*", "reshard_after_forward": 2}]},
    ),
    "hybrid": ("own_llama", {"strategy": "hybrid_shard", "mesh": [2, 2], "clip_grad_norm": 1.0}),
    "hybrid accumulated": (
        "resnet",
        {"strategy": "hybrid_shard", "mesh": [2, 2], "batch": {"accumulate": 2}},
    ),
    "mixture": (
        "own_llama",
        {
            "strategy": "hybrid_shard",
            "mesh": [2, 2],
            "rules": [
                {"match": "layers.0", "place": "replicate"},
                {"match": "layers.{1..3}", "activation_checkpointing": "full"},
            ],
        },
    ),
    "16-mixed ddp": ("own_llama", {"strategy": "ddp", "precision": "16-mixed"}),
    "tp": ("own_llama", {"mesh": {"tp": 4}, "rules": PLAIN, "clip_grad_norm": 1.0}),
    "tp of a tied model": (
        "hf_llama_tied",
        {"mesh": {"dp_replicate": 2, "tp": 2}, "rules": models.tp_rules("hf_llama_tied")},
    ),
    "tp with q and k norms": (
        "qwen3",
        {"mesh": {"dp_shard": 2, "tp": 2}, "rules": models.tp_rules("qwen3")},
    ),
    "tp of gpt2": ("gpt2", GPT2_TP | {"clip_grad_norm": 1.0}),
    "gathered at use, recomputed": (
        "own_llama",
        {
            "mesh": {"dp_shard": 2, "tp": 2},
            "activation_checkpointing": "full",
            "rules": [{"match": "layers.*.norm1", "place": {"tp": "S(0)"}}],
        },
    ),
    "tp and recomputation": ("own_llama", DP2_TP2 | {"activation_checkpointing": "full"}),
    "tp and selective recomputation": (
        "own_llama",
        DP2_TP2 | {"activation_checkpointing": "selective", "batch": {"accumulate": 2}},
    ),
    "tp, recomputation of bert": (
        "bert",
        {
            "mesh": {"dp_replicate": 2, "tp": 2},
            "rules": models.tp_rules("bert"),
            "activation_checkpointing": "full",
        },
    ),
    "sequence parallel": (
        "own_llama",
        {"mesh": {"tp": 4}, "sequence_parallel": True, "rules": [*PLAIN, NORMS]},
    ),
    "sequence parallel and full_shard": (
        "own_llama",
        {
            "mesh": {"dp_shard": 2, "tp": 2},
            "sequence_parallel": True,
            "rules": [*PLAIN, NORMS],
            "activation_checkpointing": "full",
            "precision": "bf16-mixed",
        },
    ),
}


# Every other case combines what others show one by one.
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.wide] if number % 4 else [])
        for number, case in enumerate(CASES)
    ],
)
def test_counted_equals_predicted(pool, case):
    for told, counted in pool(4).run(told_and_counted, *CASES[case]):
        assert told.unknown == ()
        assert counted
        assert differences(told, counted) == ()


def test_the_comparison_can_fail(pool):
    told, counted = pool(4).run(told_and_counted, "own_llama", DP2_TP2)[0]
    route = Route("all_reduce", ("tp",), 16384)
    assert counted[route] == 18  # Four a block, the embedding and the head.
    for wrong in (counted + Counter([route]), counted - Counter([route])):
        assert differences(told, wrong) == (RouteDifference(route, 18, wrong[route]),)
    other = Route("all_reduce", ("dp_shard",), 16384)
    assert differences(told, counted + Counter([other])) == (RouteDifference(other, 0, 1),)


def test_what_torch_cuts_into_pieces_is_compared_by_its_sum():
    whole = Route("all_reduce", ("dp_replicate",), 100)
    told = Forecast((Traffic(route=whole, count=1, what="gradients", is_split=True),))
    pieces = Counter([Route("all_reduce", ("dp_replicate",), 60), replace(whole, num_bytes=40)])
    assert differences(told, pieces) == ()
    assert [each.route for each in differences(told, pieces + pieces)] == [*sorted(pieces), whole]


def test_what_no_layout_tells_is_named():
    rules = [{"match": "layers.0", "apply": "builtins:id"}]
    spec = meshplan.load_spec({"version": 1, **DP2_TP2, "rules": [*PLAIN, *rules]})
    told = forecast(meshplan.make_plan(spec, graph_of(models.build("own_llama"))))
    assert told.unknown == (
        "what 'builtins:id' does to 'layers.0'",
        "what activations send along tp (needs a recorded forward)",
    )


def test_an_axis_without_a_rule_is_named():
    spec = meshplan.load_spec({"version": 1, **DP2_TP2})
    plan = meshplan.make_plan(spec, graph_of(models.build("own_llama")))
    first, *others = plan.assignment.tensors.values()
    odd = replace(first, stored=first.stored.cut("other", 0))
    tensors = {placed.info.fqn: placed for placed in (odd, *others)}
    forward = Forward(calls=())
    assert forecast(plan, forward).unknown == ()
    changed = replace(plan, assignment=replace(plan.assignment, tensors=tensors))
    assert forecast(changed, forward).unknown == ("what the axis other sends",)


class OneByOne(units._Play):
    """Plays every microbatch."""

    def _repeat(self, stretch: Sequence[str], times: int) -> None:
        for _ in range(times):
            super()._repeat(stretch, 1)


def test_microbatches_that_are_alike_count_as_if_each_was_played():
    rng = random.Random(0)
    spec = load_spec({"version": 1, "mesh": {"dp_shard": 2}})
    few = make_plan(spec, graph_of(models.build("own_llama")))
    for _ in range(300):
        names = "abcd"[: rng.randint(1, 4)]
        unit = next(iter(few.assignment.units.values()))
        own = {n: replace(unit, fqn=n, reshard_after_forward=rng.random() < 0.6) for n in names}
        events = []
        for name in rng.choices(names, k=len(names) + 1):
            events.append(units._HookEvent("enter", (name,), rng.random() < 0.8))
            if rng.random() < 0.2:
                events.append(units._HookEvent("redo", tuple(names), True))
            events.append(units._HookEvent("leave", (name,), rng.random() < 0.8))
        warm, pairs = rng.randint(0, 4), rng.randint(0, 12)
        order = rng.choice(
            ["F" * warm + "FB" * pairs + "B" * warm, "F" * pairs + "B" * pairs, "F" * pairs]
        )
        passes = units.Passes(tuple(order), rng.random() < 0.3, rng.random() < 0.7)
        played = dict(OneByOne(own, events, passes).uses())
        assert dict(units._Play(own, events, passes).uses()) == played


@pytest.mark.parametrize("strategy", ["full_shard", "zero2"])
def test_the_gathers_that_seconds_are_made_of_are_those_of_the_traffic(strategy: str) -> None:
    """Which seeded bug would this catch? A forward or backward more or less in the price."""
    spec = load_spec({"version": 1, "mesh": {"dp_shard": 2}, "strategy": strategy})
    plan = make_plan(spec, graph_of(models.build("own_llama")))
    block = gathers_of_block(reshards=strategy == "full_shard")
    for count in (1, 2, 5):
        uses = units.uses_of_units(plan, None, units.Passes(("F", "B") * count))
        assert uses["layers.1"].gathers == (
            block.first_forward + (count - 1) * block.forward + count * block.backward
        )
