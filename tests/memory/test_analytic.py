"""Steps told from a config are the traced ones, byte by byte: selective recomputation, tp.

Which seeded bug would this catch? An operation that recomputation is not spared, or is; a gather
too many; a part where the whole is held; a buffer let go of one operation too late.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from meshplan.errors import PlanError
from meshplan.memory.analytic.estimate import estimate_analytic
from meshplan.memory.decoder.microbatch import MicrobatchSpec, tape_of
from meshplan.memory.decoder.sizes import shape_of
from meshplan.memory.log.events import EventLog, Term
from meshplan.memory.log.microbatch import HookKind
from meshplan.memory.replay.optimizer import is_uniform
from meshplan.memory.tape.tape import play
from meshplan.model.blueprint import from_mapping
from meshplan.plan.plan import Plan, make_plan
from meshplan.spec.reader import load_spec
from tests.helpers.analytic import analytic_log

BATCH, SEQ_LEN = 2, 32
LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 160, "hidden_size": 48, "intermediate_size": 112,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3,
    "max_position_embeddings": 64, "use_cache": False, "tie_word_embeddings": False,
    "head_dim": 12,
}  # fmt: skip
GRANITE = LLAMA | {
    "model_type": "granite", "embedding_multiplier": 12.0, "residual_multiplier": 0.22,
    "logits_scaling": 8.0, "attention_multiplier": 0.1,
}  # fmt: skip
QWEN3 = LLAMA | {"model_type": "qwen3"}
GPT2: dict[str, Any] = {
    "model_type": "gpt2", "vocab_size": 160, "n_embd": 48, "n_layer": 3, "n_head": 4,
    "n_positions": 64, "use_cache": False, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip

Figures = tuple[Mapping[str, tuple[int, int]], Mapping[tuple[str, str], int], Mapping[Term, int]]
"""By phase: most bytes at once, bytes at the end; by phase and block: most bytes in it; what they
are for at the peak."""


def traced(
    config: dict[str, Any], spec: dict[str, Any], world: int, rank: int,
    seq_len: int = SEQ_LEN, device: str = "cpu",
) -> Figures | str:  # fmt: skip
    """The whole step, in a process of its own; or what was raised."""
    try:
        return _traced(config, spec, world, rank, seq_len, device)
    except Exception:
        return traceback.format_exc()


def _traced(
    config: dict[str, Any], spec: dict[str, Any], world: int, rank: int, seq_len: int, device: str
) -> Figures:
    import torch
    import torch.nn.functional as F
    from transformers import AutoConfig, AutoModelForCausalLM

    from meshplan.runtime.fake_step.step import fake_step
    from meshplan.runtime.trace.ops import record
    from meshplan.runtime.trace.rehearse import rehearser
    from meshplan.runtime.trace.structure import graph_of
    from tests.helpers.replayed import is_on_host

    made = AutoConfig.for_model(**config)
    model = AutoModelForCausalLM.from_config(made, attn_implementation="sdpa")
    ids = torch.zeros(BATCH, seq_len, dtype=torch.long)
    read = load_spec(spec)
    flow = record(model, (ids,)) if read.reads_flow else None
    rehearse = rehearser(model, (ids,)) if read.reads_flow else None
    plan = make_plan(read, graph_of(model, flow), world_size=world, rehearse=rehearse)
    foreach = is_uniform(plan.assignment)

    def loss_fn(output: Any, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.logits.flatten(0, 1).float(), targets.flatten())

    log = fake_step(
        model, plan, ids, ids.clone(), loss_fn,
        lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3, foreach=foreach), rank, device,
    )  # fmt: skip
    kept = tuple(e for e in log.events if not is_on_host(log.storages[e.storage]))
    return figures(EventLog(log.storages, kept, log.phases))


def figures(log: EventLog) -> Figures:
    """What is compared."""
    most: dict[tuple[str, str], int] = {}
    live = 0
    for delta, number, phase in log.events:
        live += delta
        storage = log.storages[number]
        if phase and delta > 0 and storage.op not in ("", "aten.empty.memory_format"):
            # Not the wrappers'.
            place = log.phases[phase], ".".join(storage.module.split(".")[:3])
            most[place] = max(most.get(place, 0), live)
    blocks = {place: size for place, size in most.items() if place[1].count(".") == 2}
    return log.by_phase, blocks, log.terms_at_peak


def plan_of(config: dict[str, Any], spec: dict[str, Any], world: int) -> Plan:
    return make_plan(load_spec(spec), from_mapping(config), world_size=world)


def told(
    config: dict[str, Any], spec: dict[str, Any], world: int, rank: int,
    seq_len: int = SEQ_LEN, device: str = "cpu",
) -> Figures:  # fmt: skip
    plan = plan_of(config, spec, world)
    foreach = is_uniform(plan.assignment)
    return figures(analytic_log(
        plan, batch=BATCH // plan.accumulate, seq_len=seq_len, rank=rank,
        is_cuda=device == "cuda", in_place=False, foreach=foreach,
    ))  # fmt: skip


Case = tuple[dict[str, Any], dict[str, Any], int]
"""(config, plan, ranks)"""

SELECTIVE: dict[str, Case] = {
    "llama": (LLAMA, {"activation_checkpointing": "selective"}, 2),
    "gpt2": (GPT2, {"activation_checkpointing": "selective"}, 2),
    "qwen3, only attention": (
        QWEN3, {"activation_checkpointing": {"mode": "selective", "save": ["sdpa"]}}, 2),
    "fp16, clipped": (LLAMA, {"precision": "16-mixed", "clip_grad_norm": 1.0}, 2),
    "bf16, each block its own way": (
        LLAMA,
        {
            "precision": "bf16-mixed",
            "activation_checkpointing": {"mode": "selective", "every": 2},
            "rules": [{"match": "model.layers.1", "activation_checkpointing": "full"}],
        }, 2),
    # What the norm of the queries is called with is most of what the block holds at once.
    "qwen3 of wide heads, bf16, recomputed": (
        QWEN3 | {"num_attention_heads": 6, "head_dim": 16, "intermediate_size": 48},
        {"precision": "bf16-mixed", "activation_checkpointing": "full"}, 2),
}  # fmt: skip

HF: dict[str, Any] = {"mesh": {"tp": 2}, "tp_plan": "hf"}
AUTO: dict[str, Any] = {"mesh": {"tp": 2}, "tp_plan": "auto"}
BOTH: dict[str, Any] = {"mesh": {"dp_shard": 2, "tp": 2}}
THREE: dict[str, Any] = {"mesh": {"dp_replicate": 2, "dp_shard": 2, "tp": 2}}
BF16: dict[str, Any] = {"precision": "bf16-mixed"}
TIED: dict[str, Any] = {"tie_word_embeddings": True}
TWICE: dict[str, Any] = {"batch": {"accumulate": 2}}
WORDS: dict[str, Any] = {"vocab_size": 4096, "num_hidden_layers": 1}
"""Most of it is the table of words."""
PACKED: dict[str, Any] = {
    "mesh": {"tp": 2},
    "rules": [
        {"match": "transformer.h.*.attn.c_attn", "place": {"tp": "packed_colwise"}},
        {"match": "transformer.h.*.mlp.c_fc", "place": {"tp": "colwise"}},
        {"match": "transformer.h.*.{attn,mlp}.c_proj", "place": {"tp": "rowwise"}},
        {"match": "{transformer.wte,lm_head}", "place": {"tp": "vocab"}},
        {"match": "transformer.wpe", "place": {"tp": "colwise_gather_output"}},
    ],
}  # fmt: skip
TENSOR: dict[str, Case] = {
    "qwen3, auto, tied, sharded, bf16, selective": (
        QWEN3 | TIED, AUTO | BOTH | BF16 | {"activation_checkpointing": "selective"}, 4),
    "llama, loss parallel, bf16": (
        LLAMA | WORDS, HF | BOTH | BF16 | {"loss_parallel": True}, 4),
    "llama, hf": (LLAMA, HF, 2),
    "llama, auto, loss parallel": (LLAMA, AUTO | {"loss_parallel": True}, 2),
    "llama with biases, hf, recomputed": (
        LLAMA | {"attention_bias": True, "mlp_bias": True},
        HF | {"activation_checkpointing": "full"}, 2),
    "llama, ranks share heads": (LLAMA, HF | {"mesh": {"dp_shard": 2, "tp": 4}} | BF16, 8),
    "llama, attention whole": (LLAMA, AUTO | {"mesh": {"tp": 4}}, 4),
    "llama, tied, hybrid, twice": (LLAMA | TIED, HF | THREE | BF16 | TWICE, 8),
    "words, tied": (LLAMA | WORDS | TIED, HF, 2),
    "words, zero1, twice": (LLAMA | WORDS, HF | BOTH | BF16 | TWICE | {"strategy": "zero1"}, 4),
    "words, replicated, twice": (
        LLAMA | WORDS, HF | {"mesh": {"dp_replicate": 2, "tp": 2}} | TWICE, 4),
    "qwen2, clipped": (
        LLAMA | {"model_type": "qwen2"}, HF | BOTH | {"clip_grad_norm": 1.0}, 4),
    "gpt2, rules": (GPT2, PACKED, 2),
    "gpt2, auto, sharded": (GPT2, AUTO | BOTH, 4),
    "granite, bf16": (GRANITE | {"vocab_size": 4096}, BF16 | {"mesh": {"dp_shard": 2}}, 2),
    "granite, auto, tied, recomputed": (
        GRANITE | TIED, AUTO | BOTH | {"activation_checkpointing": "full"}, 4),
    "granite, auto, loss parallel": (GRANITE, AUTO | BF16 | {"loss_parallel": True}, 2),
    "llama, a rule leaves some whole": (
        LLAMA,
        AUTO | {"rules": [{"match": "{lm_head,model.layers.1.*.q_proj}", "place": {"tp": "R"}}]},
        2),
}  # fmt: skip
CHUNKS: dict[str, Case] = {
    "loss in chunks, bf16": (LLAMA | WORDS, BF16 | {"loss_chunks": 3}, 2),
    "loss in chunks, tied, twice": (LLAMA | WORDS | TIED, BF16 | TWICE | {"loss_chunks": 4}, 2),
    "loss in chunks, gpt2, replicas": (
        GPT2, {"mesh": {"dp_replicate": 2}, "strategy": "ddp", "loss_chunks": 2}, 2),
    "loss in chunks, tp leaves words whole": (
        LLAMA | WORDS,
        AUTO | BF16 | {"loss_chunks": 2, "rules": [{"match": "lm_head", "place": {"tp": "R"}}]}, 2),
}  # fmt: skip
LONE: dict[str, Any] = {"mesh": {"dp_shard": 1}}
ALONE: dict[str, Case] = {
    "one rank gives back, bf16, twice": (
        LLAMA, LONE | BF16 | TWICE | {"strategy": "full_shard", "clip_grad_norm": 1.0}, 1),
    "one rank keeps, bf16, twice": (LLAMA, LONE | BF16 | TWICE | {"strategy": "zero2"}, 1),
    "one rank gives back, recomputed": (
        GPT2, LONE | {"strategy": "full_shard", "activation_checkpointing": "full"}, 1),
    "one rank, zero1, bf16": (LLAMA, LONE | BF16 | {"strategy": "zero1"}, 1),
}  # fmt: skip
DEFAULT = (
    "one rank gives back, bf16, twice",
    "bf16, each block its own way",
    "qwen3 of wide heads, bf16, recomputed",
    "loss in chunks, bf16",
    "qwen3, auto, tied, sharded, bf16, selective",
)
"""The cases that show most; every change runs them."""
OTHERWISE_CALLED = (
    "one rank gives back, bf16, twice", "one rank keeps, bf16, twice",
    "one rank gives back, recomputed", "llama, tied, hybrid, twice",
    "qwen3, auto, tied, sharded, bf16, selective", "qwen2, clipped",
    "gpt2, auto, sharded", "loss in chunks, tp leaves words whole",
)  # fmt: skip
"""With tp: whether what a collective reads is a buffer of it, and a gradient in parts is one. One
rank sends nothing, so what it reduces from is a gradient."""
CASES = SELECTIVE | TENSOR | CHUNKS | ALONE


def told_and_traced(
    apart: ProcessPoolExecutor, config: dict[str, Any], more: dict[str, Any], world: int
) -> tuple[Any, Any]:
    """The last rank's step, both ways."""
    spec = {"version": 1, "mesh": {"dp_shard": 2}} | more
    real = apart.submit(traced, config, spec, world, world - 1).result()
    assert isinstance(real, tuple), real
    return told(config, spec, world, world - 1), real


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c in DEFAULT else [pytest.mark.wide]) for c in CASES]
)
def test_a_told_step_is_the_traced_one(apart: ProcessPoolExecutor, case: str) -> None:
    mine, real = told_and_traced(apart, *CASES[case])
    assert mine[:2] == real[:2]
    if case not in OTHERWISE_CALLED:  # A sum of losses over microbatches has four bytes.
        assert {term: size for term, size in mine[2].items() if size} == pytest.approx(
            {term: size for term, size in real[2].items() if size}, abs=4
        )


@pytest.mark.parametrize(
    ("config", "more", "what"),
    [
        (LLAMA, {"activation_checkpointing": {"mode": "selective", "save": ["sdpa", "aten.silu"]}},
         r"recomputation that saves aten\.silu"),
        (LLAMA, HF | {"sequence_parallel": True}, "transformers' own code does not run"),
        (LLAMA, HF | {"rules": [{"match": "model.norm", "place": {"tp": "S(0)"}}]}, "at use"),
        (LLAMA, HF | {"rules": [{"match": "lm_head", "place": {"tp": "rowwise_split_input"}}]},
         r"the style 'rowwise_split_input' \(of lm_head\)"),
        (LLAMA, {"mesh": {"tp": 2}, "rules": [{"match": "**.q_proj", "place": {"tp": "colwise"}}]},
         "a tensor that reaches model.layers.0.self_attn is not sharded as"),
        (LLAMA, {"mesh": {"tp": 2}, "rules": [{"match": "**.up_proj", "place": {"tp": "colwise"}}]},
         "a tensor that reaches model.layers.0.mlp is not sharded as"),
        (LLAMA | {"vocab_size": 161}, HF, "161 does not divide by tp 2"),
    ],
)  # fmt: skip
def test_what_no_row_stands_for_is_refused(
    config: dict[str, Any], more: dict[str, Any], what: str
) -> None:
    with pytest.raises(PlanError, match=what):
        told(config, {"version": 1, "mesh": {"dp_shard": 2}} | more, 2, 0)


LONG: dict[str, Any] = {"head_dim": 16, "max_position_embeddings": 2048, "vocab_size": 192}
FULL: dict[str, Any] = {"activation_checkpointing": "full"}
CUDA: dict[str, tuple[Case, float]] = {
    "qwen3, auto, loss parallel, selective": (
        (QWEN3 | TIED | LONG,
         AUTO | BOTH | BF16 | {"activation_checkpointing": "selective", "loss_parallel": True}, 4),
        1e-4),
    "llama, loss in chunks": ((LLAMA | LONG | TIED, BF16 | {"loss_chunks": 4}, 2), 1e-4),
    "llama, recomputed": ((LLAMA | LONG, BF16 | FULL, 2), 1e-4),
    # On CPU, whose shapes the trace has, LayerNorm keeps its statistics in the dtype of its input.
    "gpt2, dropout": (
        (GPT2 | {"n_head": 3, "n_positions": 2048, "resid_pdrop": 0.1, "embd_pdrop": 0.1}, BF16, 2),
        4e-3),
    "llama in float32, shared keys": (
        (LLAMA | LONG, HF | BOTH | {"activation_checkpointing": "selective"}, 4), 1e-5),
    "gpt2 in float32": ((GPT2 | {"n_head": 3, "n_positions": 2048}, {}, 2), 1e-5),
}  # fmt: skip


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.wide] if n else []) for n, c in enumerate(CUDA)]
)
def test_on_cuda_it_takes_what_cuda_takes(apart: ProcessPoolExecutor, case: str) -> None:
    """More tokens than a table's gradient is summed from without sorting them."""
    (config, more, world), apart_by = CUDA[case]
    spec = {"version": 1, "mesh": {"dp_shard": 2}} | more
    real = apart.submit(traced, config, spec, world, 0, 2048, "cuda").result()
    assert isinstance(real, tuple), real
    mine = told(config, spec, world, 0, 2048, "cuda")
    for phase in ("forward", "loss", "backward"):
        assert mine[0][phase][0] == pytest.approx(real[0][phase][0], rel=apart_by)
    assert mine[1].keys() == real[1].keys()
    for place, size in real[1].items():
        assert mine[1][place] == pytest.approx(size, rel=apart_by)


@pytest.mark.parametrize(
    ("config", "more", "what"),
    [
        (GPT2 | {"n_head": 8}, {}, "attention in float32 with heads of 6 features"),
        (LLAMA, BF16, "attention with heads of 12 features"),
        (LLAMA | {"model_type": "mistral", "sliding_window": 24, "head_dim": 16}, BF16,
         "attention over a window of 24 tokens of 32"),
        (LLAMA | {"model_type": "mistral", "sliding_window": 32, "head_dim": 16}, BF16,
         "attention over a window of 32 tokens of 32"),
    ],
)  # fmt: skip
def test_attention_that_torch_does_not_fuse_is_refused(
    config: dict[str, Any], more: dict[str, Any], what: str
) -> None:
    spec = {"version": 1, "mesh": {"dp_shard": 2}} | more
    with pytest.raises(PlanError, match=what):
        told(config, spec, 2, 0, device="cuda")


def test_kernels_take_for_themselves_what_a_trace_knows_that_they_take() -> None:
    import torch

    from meshplan.runtime.fake_step.cuda_workspace import taken_inside

    shape = shape_of(from_mapping(LLAMA | {"head_dim": 48, "vocab_size": 5000}))
    run = MicrobatchSpec(batch=2, seq_len=2000, element_bytes=2, tp=2)
    rows = {row.op: row for row in tape_of(shape, run).rows}
    ops = torch.ops.aten

    def empty(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    q, k, ids = empty(2, 2, 2000, 48), empty(2, 1, 2000, 48), empty(2, 2000, dtype=torch.long)
    flash = ops._scaled_dot_product_flash_attention_backward.default
    table = ops.embedding_dense_backward.default
    assert rows["attention"].workspace_backward_bytes == sum(
        taken_inside(flash, (None, q, k), None)
    )
    summed = taken_inside(table, (empty(2, 2000, 48), ids, 2500), None)  # Of this rank.
    assert rows["embedding"].workspace_backward_bytes == sum(summed) > 0


def test_a_block_is_gathered_before_it_runs_again() -> None:
    shape = shape_of(from_mapping(LLAMA))
    run = MicrobatchSpec(batch=1, seq_len=8, recomputed=frozenset({0, 1, 2}))
    work = play(tape_of(shape, run))
    blocks = [f"model.layers.{n}" for n in (2, 1, 0)]
    starts = [
        m for m in work.hook_points if m.kind == HookKind.BEFORE_BACKWARD and m.unit in blocks
    ]
    assert [mark.unit for mark in starts] == blocks
    for mark in starts:
        first = next(e for e in work.log.events[mark.event :] if e.delta > 0)
        assert work.log.storages[first.storage].module == f"{mark.unit}.input_layernorm"


def test_devices_without_flash_attention_are_refused() -> None:
    more = BF16 | {"mesh": {"dp_shard": 2}, "batch": {"micro": 1, "seq_len": 64}}
    plan = plan_of(LLAMA | LONG, {"version": 1} | more, 2)
    with pytest.raises(PlanError, match="v100-sxm-32gb, which has no flash attention"):
        estimate_analytic(plan, device="v100-sxm-32gb", limit_bytes=None)
    assert estimate_analytic(plan, device="h100-sxm-80gb", limit_bytes=None).groups


def test_gradients_of_what_enters_cut_projections_are_summed_apart() -> None:
    """They are DTensors, which torch adds up in new memory; elsewhere it writes into the first."""
    shape = shape_of(from_mapping(LLAMA | {"num_hidden_layers": 1}))
    tape = tape_of(shape, MicrobatchSpec(batch=1, seq_len=8, tp=2))
    apart = len(play(tape, sums_in_place=True).log.storages)
    tape.sums_apart.clear()
    assert apart - len(play(tape, sums_in_place=True).log.storages) == 3  # k and v to q; up to gate
