"""Context parallelism: parity with one process, and refusal of what cannot be made right.

Which seeded bug would this catch? Positions that start anew on each rank, keys in the wrong
order, a mask of the part instead of the whole, a gradient that is not added up over cp, and a
model that is let through though its numbers are wrong.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import meshplan
from tests import context_models, models, parity
from tests.test_parity import assert_same

CP2: dict[str, Any] = {"version": 1, "mesh": {"cp": 2}}
HEADS = {"context": {"attention": "all_to_all"}}
TP_RULES = {"rules": models.tp_rules("own_llama")}
FULL = {"activation_checkpointing": "full"}
EIGHT = {"mesh": {"dp_shard": 2, "cp": 2, "tp": 2}} | TP_RULES
NORMS = {"match": "**.{norm,norm1,norm2}", "place": {"tp": "sequence_parallel"}}

CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "replicas": (2, "own_llama", {}),
    "in order": (2, "own_llama", {"context": {"balance": False}}),
    "heads": (2, "own_llama", HEADS),
    "heads, balanced": (2, "qwen3", {"context": {"attention": "all_to_all", "balance": True}}),
    "gpt2": (2, "gpt2", {"strategy": "zero2"}),
    "full checkpointing": (2, "own_llama", {"strategy": "full_shard"} | FULL),
    "selective checkpointing": (2, "hf_llama", {"activation_checkpointing": "selective"} | HEADS),
    "four ranks, as many tokens as a head has": (4, "own_llama", {"mesh": {"cp": 4}}),
    "shards over both axes": (
        4,
        "own_llama",
        {"mesh": {"dp_shard": 2, "cp": 2}, "batch": {"accumulate": 2}},
    ),
    "replicas of shards": (
        4,
        "hf_llama_tied",
        {"mesh": {"dp_replicate": 2, "cp": 2}, "strategy": "hybrid_shard"},
    ),
    "odd widths": (4, "hf_llama", {"mesh": {"dp_shard": 2, "cp": 2}, "strategy": "zero1"} | HEADS),
    "three kinds on eight ranks": (8, "own_llama", EIGHT),
    "three kinds by heads": (
        8,
        "own_llama",
        EIGHT | HEADS | FULL | {"sequence_parallel": True, "rules": [*TP_RULES["rules"], NORMS]},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_parity(pool, case):
    world, name, plan = CASES[case]
    assert_same(pool(world).run(parity.train, name, CP2 | plan)[0])


def test_parity_with_clipped_gradients(pool):
    plan = CP2 | {"mesh": {"dp_shard": 2, "cp": 2}, "clip_grad_norm": 0.1}
    assert_same(pool(4).run(parity.train, "own_llama", plan, clip=0.1)[0])


def trained(name: str, plan: dict[str, Any], own_checkpointing: bool = False) -> float:
    """The largest difference of losses and parameters from one process after three steps."""
    states, losses = [], []
    live = context_models.build(name)
    if own_checkpointing:
        live.gradient_checkpointing_enable({"use_reentrant": True})
    live = meshplan.parallelize(live, plan)
    for model in (live, context_models.build(name)):
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            inputs, targets = context_models.batch(step)
            if model is live:
                inputs, targets = meshplan.local_batch(model, (inputs, targets))
                losses.append(meshplan.train_step(model, sgd, inputs, targets, models.loss))
            else:
                losses.append(value := models.loss(model(inputs), targets))
                value.backward()
                sgd.step()
                sgd.zero_grad()
        whole = meshplan.full_state_dict(model) if model is live else model.state_dict()
        states.append(whole)
    apart = [abs(a - float(b)) for a, b in zip(losses[:3], losses[3:], strict=True)]
    apart += [float((states[0][n] - states[1][n]).abs().max()) for n in states[0]]
    return max(apart)


MADE = ("arange", "numbers", "table", "learned", "same line", "full", "Llama with cache", "Mistral")


@pytest.mark.parametrize("name", MADE)
def test_positions_and_attention_of_every_kind(pool, name):
    assert max(pool(2).run(trained, name, CP2)) <= parity.TOLERANCE


def test_the_models_own_checkpointing(pool):
    """Reentrant, which runs the block again without telling anybody."""
    assert max(pool(2).run(trained, "Mistral", CP2, True)) <= parity.TOLERANCE


REFUSED = {
    "written out": "no call of scaled_dot_product_attention over the sequence was seen",
    "Llama written out": "no call of scaled_dot_product_attention over the sequence was seen",
    "window": "on the whole sequence (not causal, with a mask, scale None)",
    "Mistral with window": "attention 1 is computed otherwise on the whole sequence",
    "distance": "attention over a part of the sequence was given a mask",
    "conv": "the queries of attention 2 differ by",
    "narrow": "the queries of attention 1 differ by",
    "counted": "the queries of attention 1 differ by",
    "pooled": "the output  of shape [1, 64] was computed from this rank's part",
}


def refusal(name: str, *inputs: Any) -> str:
    model = meshplan.parallelize(context_models.build(name), CP2)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    tokens, _ = meshplan.local_batch(model, context_models.batch(0))
    try:
        model(tokens, *inputs)
    except meshplan.ApplyError as error:
        assert all(torch.equal(before[n], p) for n, p in model.named_parameters())
        return str(error)
    return ""


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_wrong_is_refused_on_every_rank(pool, name):
    told = pool(2).run(refusal, name)
    assert REFUSED[name] in told[0]
    assert told[0] == told[1]
