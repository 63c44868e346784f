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
from meshplan.runtime.base.mesh import full
from tests.helpers import context_models, models, parity
from tests.helpers.wide import leaving
from tests.runtime.apply.test_parity import assert_same

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


@pytest.mark.parametrize("case", leaving(CASES, lambda _, case: "by heads" in case))
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
    "window": "on the full sequence (not causal, with a mask, scale None)",
    "Mistral with window": "attention 1 is computed differently on the full sequence",
    "distance": "attention over a shard of the sequence was given a mask",
    "conv": "the queries of attention 2 differ by",
    "narrow": "the queries of attention 1 differ by",
    "counted": "the queries of attention 1 differ by",
    "Roberta": "the queries of attention 1 differ by",
    "pooled": "the output  of shape [1, 66] was computed from this rank's shard",
}


def refusal(name: str, plan: Any = None) -> str:
    model = meshplan.parallelize(context_models.build(name), CP2 | (plan or {}))
    before = meshplan.full_state_dict(model)
    tokens, _ = meshplan.local_batch(model, context_models.batch(0))
    try:
        model(tokens)
    except meshplan.ApplyError as error:
        after = meshplan.full_state_dict(model)
        assert all(torch.equal(before[n], after[n]) for n in before)
        return str(error)
    return ""


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_wrong_is_refused_on_every_rank(pool, name):
    told = pool(2).run(refusal, name)
    assert REFUSED[name] in told[0]
    assert told[0] == told[1]


def test_pieces_of_a_dim_that_two_axes_cut_unevenly(pool):
    plan = CP2 | {"mesh": {"dp_shard": 2, "cp": 2}}
    assert max(pool(4).run(trained, "table", plan)) <= parity.TOLERANCE


BF16: dict[str, Any] = {"mesh": {"dp_shard": 2, "cp": 2}, "precision": "bf16-mixed"}


def test_half_precision_is_told_from_wrong_positions(pool):
    assert max(pool(4).run(trained, "Mistral", CP2 | BF16)) < 2e-2
    assert "the queries of attention 1 differ" in pool(4).run(refusal, "narrow", BF16)[0]


def let_through(name: str) -> float:
    """A seeded bug: the proof finds nothing, so that a wrong model is trained."""
    from meshplan.runtime.apply.context import apply, proof

    proof.raise_first, original = lambda problem: None, proof.raise_first
    apply.raise_first = proof.raise_first
    try:
        return trained(name, CP2)
    finally:
        proof.raise_first = apply.raise_first = original


@pytest.mark.parametrize("name", ["narrow", "counted", "conv", "window", "Mistral with window"])
def test_what_is_refused_would_have_been_wrong(pool, name):
    assert pool(2).run(let_through, name)[0] > 1e-4


def lengths() -> tuple[list[float], int]:
    """Training at one length, evaluation at another, training again: all against one process."""
    alone = context_models.build("arange")
    model = meshplan.parallelize(context_models.build("arange"), CP2 | {"strategy": "full_shard"})
    apart = []
    for step, length in enumerate((16, 24, 16)):
        tokens, _ = context_models.batch(step, length=length)
        for each in (model, alone):
            each.train(length == 16)
        with torch.inference_mode(length != 16):
            own, whole = model(meshplan.local_batch(model, tokens)), alone(tokens)
        gathered = [torch.empty_like(own) for _ in range(2)]
        torch.distributed.all_gather(gathered, own.detach().contiguous())
        halves = [part.chunk(2, 1) for part in gathered]
        ordered = torch.cat([halves[0][0], halves[1][0], halves[1][1], halves[0][1]], 1)
        apart.append((ordered - whole).abs().max().item())
        if length == 16:
            own.square().mean().backward()
            grad = full(model.head.weight.grad)
            whole.square().mean().backward()
            apart.append((grad - alone.head.weight.grad).abs().max().item())
    return apart, sum(module.training for module in model.modules())


def test_evaluation_at_another_length_and_a_loop_of_ones_own(pool):
    for apart, training in pool(2).run(lengths):
        assert max(apart) <= 1e-5
        assert training > 0


def own_loss(shift: bool) -> str:
    model = meshplan.parallelize(context_models.build("with loss"), CP2)
    tokens, targets = meshplan.local_batch(model, context_models.batch(0))
    try:
        _, loss = model(tokens, targets, shift=shift)
    except meshplan.ApplyError as error:
        return str(error)
    torch.distributed.all_reduce(loss := loss.detach())
    alone = context_models.build("with loss")
    return str(round(float(loss) / 2 - float(alone(*context_models.batch(0))[1]), 6))


def test_a_loss_inside_the_model(pool):
    """The mean over tokens is right; targets shifted by the model lose those between parts."""
    assert pool(2).run(own_loss, False)[0] in ("0.0", "-0.0")
    assert (
        "the output [1] of shape [] was computed from this rank's shard"
        in (pool(2).run(own_loss, True)[0])
    )


def labels() -> str:
    model = meshplan.parallelize(context_models.build("Mistral"), CP2)
    tokens, _ = context_models.batch(0)
    inputs = meshplan.local_batch(model, {"input_ids": tokens, "labels": tokens})
    try:
        model(**inputs)
    except meshplan.ApplyError as error:
        return str(error)
    return ""


def test_labels_are_refused(pool):
    told = pool(2).run(labels)[0]
    assert "the output loss of shape [] was computed from this rank's shard" in told


def padded(sample: int) -> str:
    """Padding at the end of a sample: only the rank with the tail sees it."""
    model = meshplan.parallelize(models.build("bert"), CP2 | {"strategy": "full_shard"})
    inputs, _ = models.batch("bert", 0)
    inputs["attention_mask"].fill_(1)[sample, -3:] = 0
    model(**meshplan.local_batch(model, {"input_ids": inputs["input_ids"]}))
    try:
        model(**meshplan.local_batch(model, inputs))
    except meshplan.ApplyError as error:
        return str(error)
    return ""


def test_padding_that_one_rank_sees_is_refused_on_every_rank(pool):
    for sample in (0, 5):
        told = pool(2).run(padded, sample)
        assert "was given a mask, which covers this shard alone" in told[0]
        assert told[0] == told[1]


class Late(context_models.Model):
    """Asks for a mask of its own from the second call on, on rank 1 only."""

    calls = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        late = self.calls > 1 and torch.distributed.get_rank() == 1
        self.blocks[1].kind = "distance" if late else "causal"
        return super().forward(tokens)


def late() -> str:
    model = meshplan.parallelize(Late(), CP2)
    tokens = meshplan.local_batch(model, context_models.batch(0)[0])
    model(tokens)
    try:
        model(tokens)
    except meshplan.ApplyError as error:
        return str(error)
    return ""


def test_what_one_rank_does_after_the_proof_is_refused_on_every_rank(pool):
    told = pool(2).run(late)
    assert "meshplan: 1 problem\n" in told[0]
    assert told[0] == told[1]


def dropped() -> tuple[float, float]:
    """Two forwards in training differ, two in evaluation do not."""
    model = meshplan.parallelize(context_models.build("dropout"), CP2)
    tokens = meshplan.local_batch(model, context_models.batch(0)[0])
    outputs = [model(tokens) for _ in range(2)]
    model.eval()
    outputs += [model(tokens) for _ in range(2)]
    first, second, third, fourth = outputs
    return float((first - second).abs().max()), float((third - fourth).abs().max())


def test_dropout_of_attention_draws_anew(pool):
    for trains, evaluates in pool(2).run(dropped):
        assert trains > 1e-3
        assert evaluates == 0.0


def by_its_part(strategy: str) -> str:
    """The model inside, past what `parallelize` returned."""
    model = meshplan.parallelize(context_models.build("Mistral"), CP2 | {"strategy": strategy})
    tokens = meshplan.local_batch(model, context_models.batch(0)[0])
    if strategy == "full_shard":
        model(tokens)  # Proved for this length, but not for a part of the model.
    inner = model.module if strategy == "ddp" else model.model
    try:
        inner(tokens)
    except meshplan.ApplyError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("strategy", ["ddp", "full_shard"])
def test_a_part_of_the_model_called_by_itself_is_refused(pool, strategy):
    for told in pool(2).run(by_its_part, strategy):
        assert "the module that parallelize returned" in told


def heads_of_three() -> str:
    model = context_models.build("arange")
    for block in model.blocks:
        block.qkv, block.out = nn.Linear(32, 36), nn.Linear(12, 32)
        block.attend = lambda x, b=block: torch.nn.functional.scaled_dot_product_attention(
            *b.qkv(x).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4), is_causal=True
        ).transpose(1, 2).flatten(-2)  # fmt: skip
    model = meshplan.parallelize(model, CP2 | HEADS)
    try:
        model(meshplan.local_batch(model, context_models.batch(0)[0]))
    except meshplan.ApplyError as error:
        return str(error)
    return ""


def test_heads_that_do_not_divide(pool):
    told = pool(2).run(heads_of_three)
    assert "does not divide the 3 heads and 3 key-value heads on each rank" in told[0]
    assert told[0] == told[1]
