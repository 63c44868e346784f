"""`tp_plan: auto`: what it cuts trains as one process does, what it cannot prove is whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import meshplan
from meshplan.errors import PlanError
from meshplan.plan.plan import Plan, make_plan
from meshplan.runtime.trace.ops import record
from meshplan.runtime.trace.rehearse import rehearser
from meshplan.runtime.trace.structure import graph_of
from meshplan.spec.reader import load_spec
from tests.helpers import models, odd_flows, parity
from tests.helpers.wide import leaving
from tests.runtime.apply.test_parity import assert_same

AUTO: dict[str, Any] = {"version": 1, "tp_plan": "auto", "mesh": {"tp": 2}}
TP4: dict[str, Any] = AUTO | {"mesh": {"tp": 4}}
MIXED: dict[str, Any] = AUTO | {"mesh": {"dp_shard": 2, "tp": 2}}
TOKENS: dict[str, Any] = {"input": {"shape": [2, models.SEQ_LEN], "dtype": "int64"}}
MODELS = ("own_llama", "hf_llama", "hf_llama_tied", "gpt2", "qwen3", "bert", "vit", "t5")


def train(kind: str, plan: dict[str, Any]) -> tuple[float, str]:
    """Three steps on this rank: (largest difference from one process, where)."""
    model, alone = odd_flows.build(kind), odd_flows.build(kind)
    model = meshplan.parallelize(model, plan, example_inputs=odd_flows.batch())
    pairs = [(m, torch.optim.SGD(m.parameters(), lr=0.1)) for m in (model, alone)]
    for step in range(3):
        x = odd_flows.batch(step)
        for each, sgd in pairs:
            part = meshplan.local_batch(each, x) if each is model else x
            loss = sum(t.square().mean() for t in each(part))
            assert isinstance(loss, torch.Tensor)
            loss.backward()
            sgd.step()
            sgd.zero_grad()
    live, expected = meshplan.full_state_dict(model), alone.state_dict()
    apart = {n: (live[n] - t).abs().max().item() for n, t in expected.items() if n in live}
    worst = max(apart, key=apart.__getitem__, default="")
    return apart.get(worst, 0.0), worst


def decided(kind: str, size: int = 2, **more: Any) -> Plan:
    model, inputs = odd_flows.build(kind), odd_flows.batch()
    spec = load_spec(AUTO | {"mesh": {"tp": size}} | more)
    graph = graph_of(model, record(model, inputs))
    return make_plan(spec, graph, rehearse=rehearser(model, inputs))


def styles(plan: Plan) -> dict[str, str]:
    """What the first block's modules got."""
    return {
        fqn.removeprefix("blocks.0."): use.style.name
        for fqn, use in plan.assignment.styles.items()
        if fqn.startswith("blocks.0.")
    }


@pytest.mark.parametrize("name", leaving(MODELS, lambda number, _: bool(number % 4)))
def test_every_model_trains_as_one_process_without_a_rule(pool, name):
    plan = TP4 | (TOKENS if name == "own_llama" else {})
    assert_same(pool(4).run(parity.train, name, plan)[0])


@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_cut_where_rules_cut_it_and_beyond(name):
    """Parity alone would hold for a plan that cuts nothing."""
    model, inputs = models.build(name), models.batch(name, 0, 2)[0]
    graph = graph_of(model, record(model, inputs))
    for size in (2, 4):
        spec = load_spec(AUTO | {"mesh": {"tp": size}})
        by_rule = load_spec({"version": 1, "mesh": {"tp": size}, "rules": models.tp_rules(name)})
        derived = make_plan(spec, graph, rehearse=rehearser(model, inputs)).assignment
        cut = {
            f: t for f, t in make_plan(by_rule, graph).assignment.tensors.items() if t.stored.axes
        }
        assert {f: str(derived.tensors[f].stored) for f in cut} == {
            f: str(t.stored) for f, t in cut.items()
        }


@pytest.mark.parametrize(
    "name",
    ["hf_llama_tied"]
    + [pytest.param(n, marks=pytest.mark.wide) for n in ("own_llama", "gpt2", "qwen3", "t5")],
)
def test_under_full_shard(pool, name):
    plan = MIXED | (TOKENS if name == "own_llama" else {})
    assert_same(pool(4).run(parity.train, name, plan)[0])


QKV = {"q": "colwise", "k": "colwise", "v": "colwise", "o": "rowwise"}
PAIR = {"up": "colwise", "down": "rowwise"}
CUT: dict[str, dict[str, str]] = {
    "Attention": QKV,
    "CrossAttention": QKV,
    "LearnedSlopes": QKV,
    "RelativeTable": QKV,
    "OneKeyHead": QKV | {"k": "gradients_added", "v": "gradients_added"},
    "fused": {"qkv": "packed_colwise", "o": "rowwise"},
    "fused by head": {"qkv": "colwise", "o": "rowwise"},
    "Split": {"qkv": "packed_colwise", "o": "rowwise"},
    "Mlp": PAIR,
    "ScaleInside": PAIR,
    "GateOfOne": PAIR | {"gate": "gradients_added"},
    "FusedGate": {"gate_up": "packed_colwise", "down": "rowwise"},
    "Parallel": {f"attn.{m}": w for m, w in QKV.items()} | {f"mlp.{m}": w for m, w in PAIR.items()},
    "TiedTwins": {f"{m}.{k}": w for m in ("one", "two") for k, w in PAIR.items()},
    "WritesInto": PAIR,
    "Chain": {"b": "colwise", "c": "rowwise"},
}


@pytest.mark.parametrize("kind", CUT)
def test_what_is_cut_trains_as_one_process(pool, kind):
    found = styles(decided(kind))
    if kind == "Chain":
        assert sorted(found.values()) == ["colwise", "rowwise"]
    elif kind == "TiedTwins":
        assert found | {f.replace("one", "two"): w for f, w in found.items()} == CUT[kind]
    else:
        assert found == CUT[kind]
    apart, where = pool(4).run(train, kind, TP4 if kind != "TiedTwins" else MIXED)[0]
    assert apart <= parity.TOLERANCE, where


WHOLE = {
    "ReturnsWeights": "the model returns a value that would be sharded",
    "TalkingHeads": "on one rank of tp, blocks.0 would not run the operations of one process",
    "DividesWidth": ": write -1 in place of self.num_heads, the size in one process",
    "FixedSlopes": "it shares a dim with the buffer blocks.0.slopes, which is not sharded",
    "CountedSlopes": "it shares a dim with a constant",
    "CountedScale": "div: gets 1.414",
    "CountedConstant": "reads another constant",
    "NormInside": "a norm reduces over one of its dims",
    "GainInAndOut": "blocks.0.gain is used both with sharded values and without",
    "GateInAndOut": "is used both with sharded values and without",
    "InterleavedGate": "a slice with a step reads one of its dims",
    "TurnedFeatures": "flip mixes elements along one of its dims",
    "Square": "a norm reduces over one of its dims",
    "TiedBackwards": "blocks.0.up.weight is used outside of its module's forward",
}


BY_THEMSELVES = [kind for kind in WHOLE if kind != "TiedBackwards"]


@pytest.mark.parametrize("kind", BY_THEMSELVES)
def test_what_cannot_be_proved_stays_whole_and_says_why(kind):
    """Projections that no pair is proved for are cut by themselves, where they hold the most."""
    found = decided(kind)
    (problem,) = (w for w in found.assignment.warnings if "auto finds" in w.what)
    assert "auto finds no pair of projections to shard over tp 2" in problem.what
    assert WHOLE[kind] in problem.what
    assert problem.fix == "use those 2 ranks for dp_shard instead of tp"
    used = {use.style.name for use in found.assignment.styles.values()}
    assert used == {"colwise_gather_output"}


@pytest.mark.parametrize("kind", leaving(BY_THEMSELVES, lambda number, _: number % 4 > 0))
def test_projections_cut_by_themselves_train_as_in_one_process(pool, kind):
    apart, where = pool(4).run(train, kind, MIXED)[0]
    assert apart <= parity.TOLERANCE, where


def test_projections_by_themselves_that_hold_little_are_not_worth_ranks():
    with pytest.raises(PlanError) as caught:
        decided("TiedBackwards")
    (problem,) = caught.value.problems
    assert "auto finds no pair of projections to shard over tp 2" in problem.what
    assert WHOLE["TiedBackwards"] in problem.what
    assert problem.fix == "use those 2 ranks for dp_shard instead of tp"


def test_every_choice_is_explained():
    reasons = {f: u.reason.text for f, u in decided("Parallel").assignment.styles.items()}
    assert reasons["blocks.0.attn.q"] == "auto: its 4 heads pair with o"
    assert reasons["blocks.1.attn.o"] == "auto: its 4 heads pair with q, k and v"
    assert reasons["blocks.0.mlp.up"] == "auto: its 64 features pair with down"
    (note,) = (w for w in decided("Parallel").assignment.warnings if "auto" in w.what)
    assert note.what == "auto keeps replicated over tp: first (a norm reduces over one of its dims)"


def test_only_what_code_writes_into_is_copied():
    def copied(kind: str) -> set[str]:
        return {f for f, use in decided(kind).assignment.styles.items() if use.is_written}

    assert copied("Mlp") == set()
    assert copied("WritesInto") == {f"blocks.{b}.{p}" for b in (0, 1) for p in ("up", "down")}


def test_a_rule_decides_its_module_and_auto_the_rest():
    rules = [{"match": "blocks.0.up", "place": {"tp": "R"}}]
    plan = decided("Mlp", rules=rules)
    assert styles(plan) == {}
    assert list(plan.assignment.styles) == ["blocks.1.up", "blocks.1.down"]
    (note,) = (w for w in plan.assignment.warnings if "auto" in w.what)
    assert "blocks.*.down (a rule places a module that would be sharded with it)" in note.what


def test_auto_by_rule_is_for_the_modules_inside():
    rules = [{"match": "blocks.1", "place": {"tp": "auto"}}]
    plan = decided("Mlp", tp_plan="none", rules=rules)
    assert list(plan.assignment.styles) == ["blocks.1.up", "blocks.1.down"]


def test_the_numbers_that_code_must_see_are_part_of_the_digest():
    plan = decided("Attention")
    numbers = {(a.module, a.name): (a.whole, a.local) for a in plan.assignment.attributes}
    assert numbers["blocks.1", "num_heads"] == (4, 2)
    assert numbers["blocks.1", "width"] == (32, 16)
    assert ("blocks.1", "head_dim") not in numbers
    assert ["blocks.1", "num_heads", 4, 2] in plan._decisions()["attributes"]
    local = {f for f, p in decided("LearnedSlopes").assignment.tensors.items() if p.is_local}
    assert local == {f"blocks.{b}.{p}" for b in (0, 1) for p in ("slopes", "temperature")}


def refusal(**more: Any) -> str:
    with pytest.raises(PlanError) as caught:
        decided("Mlp", **more)
    (problem,) = caught.value.problems
    return str(problem)


def test_what_auto_needs_is_said():
    assert "'tp_plan' has no effect without a tp axis" in refusal(mesh={"dp_shard": 2})
    spec = load_spec(AUTO)
    with pytest.raises(PlanError, match="there is no live model"):
        make_plan(spec, graph_of(odd_flows.build("Mlp")))
