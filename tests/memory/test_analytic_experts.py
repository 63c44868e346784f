"""Steps of mixtures of experts told from a config are the traced ones, byte by byte.

Which seeded bug would this catch? Tokens that stand once where they stand once for each expert; an
index that backward needs and nobody keeps; weights of experts in the wrong dtype; a block that is
dense told as one of experts.
"""

from __future__ import annotations

import gc
import os
import traceback
import warnings
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from meshplan.memory.decoder.experts import Spread
from meshplan.memory.decoder.microbatch import MicrobatchSpec, tape_of
from meshplan.memory.decoder.sizes import shape_of
from meshplan.model.blueprint import from_mapping
from tests.helpers.analytic import analytic_log
from tests.memory.test_analytic import (
    AUTO,
    BATCH,
    BF16,
    FULL,
    LLAMA,
    LONG,
    SEQ_LEN,
    TWICE,
    Case,
    Figures,
    figures,
    plan_of,
    told,
    told_and_traced,
    traced,
)

SELECTIVE = {"activation_checkpointing": "selective"}
MIXTRAL: dict[str, Any] = LLAMA | {
    "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
QWEN: dict[str, Any] = LLAMA | {
    "model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 3,
    "moe_intermediate_size": 40, "norm_topk_prob": True,
}  # fmt: skip
QWEN2: dict[str, Any] = QWEN | {
    "model_type": "qwen2_moe", "shared_expert_intermediate_size": 56, "norm_topk_prob": False,
}  # fmt: skip
WHOLE = {"rules": [{"match": "model.layers.*.mlp.experts", "place": {"tp": "R"}}]}

SPREAD = BF16 | {
    "mesh": {"dp_shard": 4, "ep": "2 in dp_shard"},
    "rules": [{"match": "**.experts", "place": {"ep": "ep_dispatch_experts"}}],
}
CUT_ATTENTION = (
    {"match": "**.{q_proj,k_proj,v_proj}", "place": {"tp": "colwise"}},
    {"match": "**.o_proj", "place": {"tp": "rowwise"}},
)

CASES: dict[str, Case] = {
    "mixtral, bf16": (MIXTRAL, BF16, 2),
    "qwen, some blocks dense, selective": (
        QWEN | {"mlp_only_layers": [1]}, BF16 | SELECTIVE, 2),
    "mixtral, float32, recomputed": (MIXTRAL, FULL, 2),
    "mixtral, gelu, selective": (MIXTRAL | {"hidden_act": "gelu"}, BF16 | SELECTIVE, 2),
    "qwen, weights as they are, twice": (QWEN | {"norm_topk_prob": False}, BF16 | TWICE, 2),
    "qwen, every second, recomputed": (
        QWEN | {"decoder_sparse_step": 2, "attention_bias": True}, BF16 | FULL, 2),
    "mixtral, hybrid": (MIXTRAL, BF16 | {"mesh": {"dp_replicate": 2, "dp_shard": 2}}, 4),
    "qwen, more ranks than experts": (QWEN, BF16 | {"mesh": {"dp_shard": 8}}, 8),
    "mixtral, zero1, twice": (MIXTRAL, BF16 | TWICE | {"strategy": "zero1"}, 2),
    "mixtral, replicated, float32": (MIXTRAL, {"mesh": {"dp_replicate": 2}}, 2),
    "qwen, clipped, tied": (
        QWEN | {"tie_word_embeddings": True}, BF16 | {"clip_grad_norm": 1.0}, 2),
    "mixtral beside tp": (
        MIXTRAL, BF16 | WHOLE | {"mesh": {"dp_shard": 2, "tp": 2}, "tp_plan": "hf"}, 4),
    "qwen beside tp from the data flow, some dense": (
        QWEN | {"mlp_only_layers": [0]},
        BF16 | AUTO | {"mesh": {"dp_shard": 2, "tp": 2}, "loss_parallel": True}, 4),
    "qwen, spread, recomputed": (QWEN, SPREAD | FULL, 4),
    "mixtral, spread, half as many more": (MIXTRAL, SPREAD | {"experts": {"capacity": 1.5}}, 4),
    "qwen, spread, as many as can be": (
        QWEN, SPREAD | FULL | {"experts": {"capacity": 99}}, 4),
    "mixtral, spread over all": (
        MIXTRAL, SPREAD | {"mesh": {"dp_shard": 4, "ep": "4 in dp_shard"}}, 4),
    "qwen, spread, selective, some dense": (
        QWEN | {"mlp_only_layers": [0]}, SPREAD | SELECTIVE, 4),
    "qwen, spread, float32, twice": (
        QWEN, SPREAD | TWICE | {"precision": {"param": "float32"}}, 4),
    "mixtral, spread, hybrid": (
        MIXTRAL,
        SPREAD | {"mesh": {"dp_replicate": 2, "dp_shard": 4, "ep": "2 in dp_shard"}}, 8),
    "mixtral, spread, zero2, clipped": (
        MIXTRAL, SPREAD | {"strategy": "zero2", "clip_grad_norm": 1.0}, 4),
    "mixtral, spread, zero1, twice": (MIXTRAL, SPREAD | TWICE | {"strategy": "zero1"}, 4),
    "qwen, spread over one": (QWEN, SPREAD | {"mesh": {"dp_shard": 4, "ep": 1}}, 4),
    "mixtral, one expert a token, spread, recomputed": (
        MIXTRAL | {"num_experts_per_tok": 1}, SPREAD | FULL, 4),
    "mixtral, spread, beside tp as transformers has it": (
        MIXTRAL,
        SPREAD | {
            "mesh": {"dp_shard": 2, "tp": 2, "ep": "2 in dp_shard"}, "tp_plan": "hf",
            "rules": [*SPREAD["rules"], *WHOLE["rules"]],
        }, 4),
    "mixtral, spread, beside tp": (
        MIXTRAL,
        SPREAD | {
            "mesh": {"dp_shard": 2, "tp": 2, "ep": "2 in dp_shard"},
            "rules": [*SPREAD["rules"], *CUT_ATTENTION],
        }, 4),
    "qwen2, bf16": (QWEN2, BF16, 2),
    "qwen2, float32, recomputed, one block dense": (QWEN2 | {"mlp_only_layers": [1]}, FULL, 2),
    "qwen2, spread, selective": (QWEN2, SPREAD | SELECTIVE, 4),
    # What the gate of the shared expert gave back waits for the routed ones to be reduced.
    "qwen2, spread, one expert a token, tied, twice": (
        QWEN2 | {
            "hidden_size": 64, "intermediate_size": 72, "head_dim": 8, "num_attention_heads": 4,
            "num_experts": 8, "num_experts_per_tok": 1, "tie_word_embeddings": True,
            "mlp_only_layers": [1],
        }, SPREAD | TWICE, 4),
    "qwen2 beside tp": (QWEN2, BF16 | AUTO | {"mesh": {"dp_shard": 2, "tp": 2}}, 4),
}  # fmt: skip
DEFAULT = (
    "mixtral, bf16",
    "qwen2, bf16",
    "qwen, some blocks dense, selective",
    "qwen, spread, recomputed",
    "qwen2, spread, one expert a token, tied, twice",
)


IN_OTHER_PARTS = frozenset({
    "qwen, spread over one", "qwen, spread, float32, twice",
    "mixtral, zero1, twice", "mixtral, spread, zero1, twice",
})  # fmt: skip
"""Whose experts do not divide, or whose gradients are widened at the end: FSDP2 copies by operators
that the model has too, which the figures of a block count as the model's."""


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c in DEFAULT else [pytest.mark.wide]) for c in CASES]
)
def test_a_told_step_is_the_traced_one(apart: ProcessPoolExecutor, case: str) -> None:
    mine, real = told_and_traced(apart, *CASES[case])
    assert mine[0] == real[0]
    assert mine[1] == real[1] or case in IN_OTHER_PARTS


def trained(config: dict[str, Any]) -> Figures | str:
    """A step with numbers, tokens going where the router sends them; or what was raised."""
    try:
        return _trained(config)
    except Exception:
        return traceback.format_exc()


def _trained(config: dict[str, Any]) -> Figures:
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from transformers import AutoConfig, AutoModelForCausalLM

    import meshplan
    from meshplan.runtime.fake_step.step import watch_steps

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        made = AutoConfig.for_model(**config)
        model = AutoModelForCausalLM.from_config(made, attn_implementation="sdpa")
        wrapped = meshplan.parallelize(model, {"version": 1, "mesh": {"tp": 1}})
        ids = torch.randint(0, config["vocab_size"], (2, 32))

        def loss_fn(output: Any, targets: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(output.logits.flatten(0, 1).float(), targets.flatten())

        adam = torch.optim.AdamW(wrapped.parameters(), lr=1e-3, foreach=True)
        gc.collect()
        gc.disable()
        # The third step: in the first ones contents are compared, which takes memory of its own.
        return figures(watch_steps(wrapped, adam, ids, ids.clone(), loss_fn, 2)[1])
    finally:
        gc.enable()
        dist.destroy_process_group()


def test_a_told_step_is_one_with_numbers(apart: ProcessPoolExecutor) -> None:
    """What nobody routes by hand: bytes are the same wherever tokens go."""
    real = apart.submit(trained, QWEN).result()
    assert isinstance(real, tuple), real
    assert told(QWEN, {"version": 1, "mesh": {"tp": 1}}, 1, 0) == real


def exchanged(config: dict[str, Any], plan: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """(by phase, the bytes of real steps of this rank; slots that came to it in each)."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from transformers import AutoConfig, AutoModelForCausalLM

    import meshplan
    from meshplan.runtime.fake_step.step import watch_steps

    torch.manual_seed(0)
    made = AutoConfig.for_model(**config)
    model = AutoModelForCausalLM.from_config(made, attn_implementation="sdpa")
    wrapped = meshplan.parallelize(model, plan)
    torch.manual_seed(dist.get_rank())
    ids = torch.randint(0, config["vocab_size"], (2, 32))

    def loss_fn(output: Any, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.logits.flatten(0, 1).float(), targets.flatten())

    # Nothing is learnt, so every step routes alike.
    adam = torch.optim.AdamW(wrapped.parameters(), lr=0.0, foreach=True)
    gc.collect()
    gc.disable()
    try:
        logs = watch_steps(wrapped, adam, ids, ids.clone(), loss_fn, 4)
    finally:
        gc.enable()
    received = next(
        event.delta for event in logs[0].events
        if event.delta > 0 and logs[0].storages[event.storage].module.endswith("mlp.experts")
        and logs[0].storages[event.storage].op == "aten.new_empty.default"
    )  # fmt: skip
    # gloo's threads may let go of a tensor late: what a step needs is the least of several.
    least = {
        phase: tuple(min(log.by_phase[phase][n] for log in logs) for n in (0, 1))
        for phase in logs[0].by_phase
    }
    return least, received // (4 * config["hidden_size"])


@pytest.mark.wide
@pytest.mark.parametrize("policy", ["none", "full"])
def test_a_step_of_real_ranks_is_told_by_what_came_to_them(pool: Any, policy: str) -> None:
    """Routed as it happens, unevenly."""
    config = MIXTRAL | {"num_hidden_layers": 1}
    again = {"match": "model.layers.0", "activation_checkpointing": policy}
    spec = {"version": 1, "mesh": {"dp_shard": 2, "ep": "2 in dp_shard"},
            "rules": [*SPREAD["rules"], again]}  # fmt: skip
    plan, slots = plan_of(config, spec, 2), BATCH * SEQ_LEN * config["num_experts_per_tok"]
    came = []
    for rank, (real, arrived) in enumerate(pool(2).run(exchanged, config, spec)):
        came.append(arrived)
        spread = Spread(2, arrived / slots, is_unit=True)
        log = analytic_log(
            plan, batch=BATCH, seq_len=SEQ_LEN, rank=rank, is_cuda=False, in_place=False,
            spread=spread,
        )  # fmt: skip
        assert log.by_phase == real
    assert sum(came) == 2 * slots
    assert came[0] != came[1]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("config", "more", "world"),
    [(MIXTRAL, BF16, 2), (QWEN, BF16, 2), (MIXTRAL, SPREAD, 4), (MIXTRAL, SPREAD | FULL, 4)],
)
def test_on_cuda_it_takes_what_cuda_takes(
    apart: ProcessPoolExecutor, config: dict[str, Any], more: dict[str, Any], world: int
) -> None:
    """More slots than CUDA sorts in place."""
    spec = {"version": 1, "mesh": {"dp_shard": 2}} | more
    real = apart.submit(traced, config | LONG, spec, world, 0, 2048, "cuda").result()
    assert isinstance(real, tuple), real
    mine = told(config | LONG, spec, world, 0, 2048, "cuda")
    for phase in ("forward", "loss", "backward"):
        assert mine[0][phase][0] == pytest.approx(real[0][phase][0], rel=2e-5)
    assert mine[1].keys() == real[1].keys()
    for place, size in real[1].items():
        assert mine[1][place] == pytest.approx(size, rel=2e-5)


def over(config: dict[str, Any], plan: dict[str, Any]) -> list[str]:
    """What a step warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exchanged(config, plan)
    return [str(each.message) for each in caught if "even share" in str(each.message)]


@pytest.mark.wide
def test_more_than_stated_is_told_once_and_nothing_is_dropped(pool: Any) -> None:
    spec = {"version": 1, "mesh": {"dp_shard": 2, "ep": "2 in dp_shard"},
            "rules": SPREAD["rules"], "experts": {"capacity": 1.0}}  # fmt: skip
    told = pool(2).run(over, MIXTRAL | {"num_hidden_layers": 1}, spec)
    assert sorted(map(len, told)) == [0, 1]  # One gets more than its share, the other less.
    assert "times an even share of tokens" in next(filter(None, told))[0]
    assert pool(2).run(over, MIXTRAL, spec | {"experts": {"capacity": 2}}) == [[], []]


@pytest.mark.parametrize(
    ("seq_len", "is_cuda", "taken"), [(2048, False, 0), (2049, False, 0), (2048, True, 0),
                                      (2049, True, 3 * 2 * 2049 * 8)],
)  # fmt: skip
def test_long_lists_are_sorted_beside_themselves_on_cuda(
    seq_len: int, is_cuda: bool, taken: int
) -> None:
    """CUDA sorts 4096 numbers in place, and the CPU any."""
    shape = shape_of(from_mapping(MIXTRAL))
    run = MicrobatchSpec(
        batch=1, seq_len=seq_len, element_bytes=2, is_cuda=is_cuda, spread=Spread(2)
    )
    sorts = [row.workspace_bytes for row in tape_of(shape, run).rows if row.op == "sort"]
    assert set(sorts) == {taken}
