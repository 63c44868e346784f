"""`generate` of a transformers model: the tokens of one process, or an error that says the way.

Which seeded bug would this catch? Ranks along tp that draw other tokens, prompts of other lengths
that abort the process or hang, ranks of FSDP2 that wait for one which has finished, and an encoder
that runs on the shards of its embedding.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import meshplan
from meshplan.errors import ApplyError

transformers = pytest.importorskip("transformers")

FULL_SHARD = {"version": 1, "mesh": {"dp_shard": 2}, "strategy": "full_shard"}
TP = {"version": 1, "mesh": {"tp": 2}, "tp_plan": "auto"}


def build():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64, max_position_embeddings=64, eos_token_id=5,
        pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def tokens(model, number):
    """Tokens for a prompt whose length, and whose number of tokens, depend on the number."""
    generator = torch.Generator().manual_seed(number)
    prompt = torch.randint(6, 64, (2, 4 + 3 * number), generator=generator)
    torch.manual_seed(number)
    return model.generate(prompt, max_new_tokens=5 + 4 * number, do_sample=True)


def generated(plan):
    model = meshplan.parallelize(build(), plan).eval()
    rank = dist.get_rank()
    if "tp" not in plan["mesh"]:
        return tokens(model, rank)
    torch.manual_seed(rank)
    prompt = torch.full((1, 4), 7)
    drawn = model.generate(prompt, max_new_tokens=8, do_sample=True)
    with pytest.raises(ApplyError, match="along tp need batches of the same size"):
        tokens(model, rank)
    return drawn


def test_ranks_of_fsdp_generate_as_many_tokens_as_each_needs(pool):
    found = pool(2).run(generated, FULL_SHARD)
    alone = build()
    for rank in range(2):
        assert torch.equal(found[rank], tokens(alone, rank))


def test_ranks_along_tp_draw_the_same_tokens(pool):
    one, other = pool(2).run(generated, TP)
    alone = build()
    torch.manual_seed(0)
    expected = alone.generate(torch.full((1, 4), 7), max_new_tokens=8, do_sample=True)
    assert torch.equal(one, other)
    assert torch.equal(one, expected)


def build_encoder_decoder(kind):
    torch.manual_seed(0)
    if kind == "t5":
        config = transformers.T5Config(
            vocab_size=64, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4,
            decoder_start_token_id=0, eos_token_id=5,
        )  # fmt: skip
        return transformers.T5ForConditionalGeneration(config).eval()
    config = transformers.BartConfig(
        vocab_size=64, d_model=16, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=32,
        decoder_ffn_dim=32, encoder_attention_heads=4, decoder_attention_heads=4,
        max_position_embeddings=64, bos_token_id=1, pad_token_id=0, eos_token_id=5,
        decoder_start_token_id=1, forced_eos_token_id=None, tie_word_embeddings=kind == "bart",
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(config).eval()


def generated_from_sources(kind, plan):
    """Tokens before the first forward of the whole model, and after it."""
    rank = dist.get_rank() // plan["mesh"].get("tp", 1)
    model = meshplan.parallelize(build_encoder_decoder(kind), plan).eval()
    before = tokens(model, rank)
    ids = torch.full((2, 4), 7)
    with torch.no_grad():
        model(input_ids=ids, labels=ids)
    return before, tokens(model, rank)


@pytest.mark.parametrize(
    ("kind", "plan"),
    [("t5", FULL_SHARD),
     pytest.param("bart", FULL_SHARD, marks=pytest.mark.wide),
     pytest.param("untied bart", {**FULL_SHARD, "rules": [{"match": "model", "unit": True}]},
                  marks=pytest.mark.wide),
     pytest.param("t5", {**TP, "mesh": {"dp_shard": 2, "tp": 2}}, marks=pytest.mark.wide)],
)  # fmt: skip
def test_an_encoder_runs_by_itself(pool, kind, plan):
    found = pool(2 * plan["mesh"].get("tp", 1)).run(generated_from_sources, kind, plan)
    alone = build_encoder_decoder(kind)
    for rank, each in enumerate(found):
        expected = tokens(alone, rank // plan["mesh"].get("tp", 1))
        for one in each:
            assert torch.equal(one, expected)


def refused(plan):
    model = meshplan.parallelize(build(), plan).eval()
    with pytest.raises((ApplyError, AttributeError)) as error:
        model.generate(torch.full((1, 4), 7), max_new_tokens=4)
    return str(error.value)


@pytest.mark.parametrize(
    "plan",
    [
        {"version": 1, "mesh": {"pp": 2}},
        {"version": 1, "mesh": {"dp_shard": 1, "cp": 2}, "strategy": "full_shard"},
    ],
)
def test_a_plan_that_cannot_generate_says_the_way(pool, plan):
    for message in pool(2).run(refused, plan):
        assert "save_pretrained" in message
