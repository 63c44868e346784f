"""Chains of mixtures of experts: work against closed forms, bytes sent against the forecast.

Which seeded bug would this catch? All experts' products charged to every token; tokens sent once
where they go to several experts; experts gathered by ranks that hold other ones; padding of shards
that most ranks hold nothing of.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshplan.cost.chain import chain_of
from meshplan.errors import PlanError
from meshplan.model.blueprint import from_config, from_mapping
from meshplan.plan.plan import make_plan
from meshplan.spec.reader import load_spec
from meshplan.traffic import forecast
from tests.cost.test_step import BF16, FP32, LENGTH, LLAMA, charged, row, wire

LAYERS, HIDDEN, MLP, EXPERTS, TOP_K = 3, 48, 40, 8, 3
QWEN = LLAMA | {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K, "moe_intermediate_size": MLP, "head_dim": 16,
}  # fmt: skip
SPREAD = {"match": "**.experts", "place": {"ep": "ep_dispatch_experts"}}


def chain(ep=1, element_bytes=2, config=QWEN):
    return chain_of(from_mapping(config), seq_len=LENGTH, element_bytes=element_bytes, ep=ep)


def total(of, figure):
    return sum(figure(of.kinds[number]) for number in of.order)


@pytest.mark.parametrize("ep", [1, 2, 8])
def test_a_token_is_multiplied_with_its_experts_alone(ep):
    """The active parameters; where experts are does not change what all ranks together do."""
    active = sum(
        t.numel // EXPERTS * TOP_K if len(t.shape) == 3 else t.numel
        for t in from_mapping(QWEN).parameters
        if len(t.shape) > 1 and "embed_tokens" not in t.fqn
    )
    scores = LAYERS * 2 * LENGTH**2 * 4 * 16
    found = chain(ep)
    assert total(found, lambda k: k.forward.flops) == 2 * LENGTH * active + scores
    assert total(found, lambda k: k.backward.flops) == 4 * LENGTH * active + 2.5 * scores


@pytest.mark.parametrize("ep", [1, 2, 8])
def test_a_rank_holds_its_share_of_the_experts(ep):
    stacks = sum(t.numel for t in from_mapping(QWEN).parameters if len(t.shape) == 3)
    found = chain(ep)
    held = from_mapping(QWEN).num_params - stacks + stacks // ep
    assert total(found, lambda k: sum(k.numels)) == held
    assert total(found, lambda k: k.expert_numel) == stacks // ep
    assert {k.num_experts for k in found.kinds} == {0, EXPERTS // ep}
    assert len(found.kinds) == 3


def test_a_share_of_the_experts_is_read_in_a_share_of_the_time():
    whole, part = (chain(ep).kinds[1].forward for ep in (1, 4))
    stacks = 3 * HIDDEN * MLP * EXPERTS * 2
    assert whole.weight_bytes - part.weight_bytes == pytest.approx(stacks * 3 / 4, rel=1e-2)
    assert part.kernels > whole.kernels
    assert part.moved_bytes > whole.moved_bytes  # To sort, send and put back takes more.


MESHES = {
    "sharded": ({"dp_shard": 4}, 1, {}),
    "more ranks than experts": ({"dp_shard": 16}, 1, {}),
    "hybrid": ({"dp_replicate": 2, "dp_shard": 4}, 1, {}),
    "zero1": ({"dp_shard": 4}, 1, {"strategy": "zero1"}),
    "replicated": ({"dp_replicate": 4}, 1, {"strategy": "ddp"}),
    "spread": ({"dp_shard": 8}, 4, {}),
    "spread over all": ({"dp_shard": 8}, 8, {}),
    "spread, hybrid": ({"dp_replicate": 2, "dp_shard": 8}, 2, {}),
    "spread, zero1": ({"dp_shard": 8}, 2, {"strategy": "zero1"}),
}


@pytest.mark.parametrize("name", MESHES)
def test_data_ranks_are_charged_what_is_forecast(name):
    sizes, ep, more = MESHES[name]
    plan = {"version": 1, "mesh": sizes, "batch": {"accumulate": 2}} | more
    plan["precision"] = {"param": "bfloat16", "reduce": "float32"}
    if ep > 1:
        plan["mesh"] = sizes | {"ep": f"{ep} in dp_shard"}
        plan["rules"] = [SPREAD]
    decided = make_plan(load_spec(plan), from_mapping(QWEN))
    mode = {"zero1": "zero1", "ddp": "ddp"}.get(more.get("strategy", ""), "shard")
    grid = row(mode=mode, microbatches=2, ep=ep, **sizes)
    sent = charged(grid, chain(ep), BF16, reshard=int(mode == "shard"))
    if ep > 1:  # What goes along ep a record of the forward tells, below.
        sent -= charged(row(ep=ep, dp_shard=ep, microbatches=2), alone(chain(ep)), BF16)
    # Routers of 8 rows, of which 16 ranks gather 16, are not worth telling.
    rel = 1e-12 if sizes["dp_shard" if "dp_shard" in sizes else "dp_replicate"] <= EXPERTS else 5e-3
    assert sent == pytest.approx(wire(forecast(decided), decided.mesh), rel=rel)


def alone(of):
    """The same without parameters: what is left is what goes along ep."""
    from dataclasses import replace

    bare = (replace(k, numels=(0,), expert_numel=0, num_experts=0) for k in of.kinds)
    return replace(of, kinds=tuple(bare))


@pytest.mark.parametrize(
    "policy", ["full", *(pytest.param(p, marks=pytest.mark.wide) for p in ("none", "selective"))]
)
def test_ep_is_charged_what_is_forecast(policy):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from meshplan.runtime.trace.structure import graph_of
    from meshplan.runtime.verify.module_calls import record_forward

    torch.manual_seed(0)
    facts = {k: v for k, v in QWEN.items() if k != "architectures"}
    live = AutoModelForCausalLM.from_config(AutoConfig.for_model(**facts))
    plan = {
        "version": 1, "mesh": {"dp_shard": 2, "ep": "2 in dp_shard"}, "rules": [SPREAD],
        "activation_checkpointing": policy,
    }  # fmt: skip
    decided = make_plan(load_spec(plan), graph_of(live))
    ids = torch.zeros(2, LENGTH, dtype=torch.int64)
    forward = record_forward(live, decided, {"input_ids": ids}, ids)
    told = forecast(decided, forward)
    assert not told.unknown
    exchanged = [each for each in told.traffic if each.route.kind == "all_to_all"]
    expected = sum(each.count * each.route.num_bytes for each in exchanged)
    found = chain(2, element_bytes=4)
    again = ("none", "selective", "full").index(policy)
    parts = [
        (
            kind.sent_forward,
            kind.sent_backward,
            kind.sent_recompute[again] if kind.has_options else None,
        )
        for kind in (found.kinds[n] for n in found.order)
    ]
    sent = sum(2 * p.all_to_all_bytes + p.all_to_all_once_bytes for ps in parts for p in ps if p)
    assert sent == expected > 0
    assert sum(p.all_to_alls for ps in parts for p in ps if p) == sum(e.count for e in exchanged)
    seconds = charged(row(dp_shard=2, ep=2, micro=2), alone(found), FP32, again)
    assert seconds == pytest.approx(expected / 2, rel=1e-12)


def test_what_a_chain_does_not_know_is_refused():
    with pytest.raises(PlanError, match="8 experts do not divide by ep 3"):
        chain(3)


@pytest.mark.parametrize(
    "dense", [[0], [6], [0, 1, 2], [2, 4], [0, 6], list(range(6)), [0, 2, 4, 6], []]
)
def test_blocks_with_experts_and_blocks_without_take_turns(dense):
    """Each is what the model of such blocks alone has; of a block at an end too."""
    config = QWEN | {"num_hidden_layers": 7, "mlp_only_layers": dense}
    found = chain(ep=2, config=config)
    sparse, plain = chain(ep=2), chain(config=QWEN | {"mlp_only_layers": [0, 1, 2]})
    expected = [(plain if n in dense else sparse).kinds[1] for n in range(7)]
    blocks = [found.kinds[k] for k, name in zip(found.order, found.names, strict=True) if name]
    for kind, like in zip(blocks, expected, strict=True):
        assert replace(kind, name="", saved_bytes=(), transient_bytes=()) == replace(
            like, name="", saved_bytes=(), transient_bytes=()
        )
    assert len(found.kinds) - 2 <= 2 + 2 * (len(dense) in (1, 6))
    assert total(found, lambda k: sum(k.numels)) == (
        from_mapping(config).num_params - (7 - len(dense)) * EXPERTS // 2 * 3 * HIDDEN * MLP
    )


def test_deepseek_v3_takes_the_flops_of_its_active_parameters():
    """Of 671 billion each token meets 37, its table of words among them."""
    graph = from_config("plans/models/deepseek-v3.json")
    found = chain_of(graph, seq_len=4096, element_bytes=2)
    active = sum(
        t.numel // 256 * 8 if len(t.shape) == 3 else t.numel
        for t in graph.parameters
        if len(t.shape) > 1 and "embed_tokens" not in t.fqn
    )
    assert active == pytest.approx(37.5e9 - 129280 * 7168, rel=0.01)
    # Scores of 192 features and sums of 128, of 128 heads.
    scores = 61 * 3.5 * 4096**2 * 128 * (192 + 128)
    flops = total(found, lambda k: k.forward.flops + k.backward.flops)
    assert flops == pytest.approx(6 * active * 4096 + scores, rel=1e-12)
    assert [sum(found.kinds[k].expert_numel > 0 for k in found.order), len(found.kinds)] == [58, 4]


def test_mixtral_takes_the_flops_of_its_active_parameters():
    """12.9 billion of 46.7, its table of words apart: six operations each, and attention."""
    graph = from_config("plans/models/mixtral-8x7b.json")
    assert graph.num_params == 46_702_792_704
    found = chain_of(graph, seq_len=4096, element_bytes=2)
    flops = total(found, lambda k: k.forward.flops + k.backward.flops)
    scores = 32 * 3.5 * 2 * 4096**2 * 4096
    active = 12_879_925_248 - 32000 * 4096 - 65 * 4096
    assert flops == 6 * active * 4096 + scores
