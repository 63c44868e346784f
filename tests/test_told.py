"""Steps told from a config are the traced ones, byte by byte: selective recomputation, tp.

Which seeded bug would this catch? An operation that recomputation is not spared, or is; a gather
too many; a part where the whole is held; a buffer let go of one operation too late.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from meshplan.blueprint import from_mapping
from meshplan.errors import PlanError
from meshplan.memory.replay.optimizer import is_uniform
from meshplan.memory.told import told_log
from meshplan.plan import Plan, make_plan
from meshplan.reader import load_spec

BATCH, SEQ_LEN = 2, 32
LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 160, "hidden_size": 48, "intermediate_size": 112,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3,
    "max_position_embeddings": 64, "use_cache": False, "tie_word_embeddings": False,
    "head_dim": 12,
}  # fmt: skip
QWEN3 = LLAMA | {"model_type": "qwen3"}
GPT2: dict[str, Any] = {
    "model_type": "gpt2", "vocab_size": 160, "n_embd": 48, "n_layer": 3, "n_head": 4,
    "n_positions": 64, "use_cache": False, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip

Figures = Mapping[str, tuple[int, int]]
"""By phase: most bytes at once, bytes at the end."""


def traced(config: dict[str, Any], spec: dict[str, Any], world: int, rank: int) -> Figures | str:
    """The whole step, in a process of its own; or what was raised."""
    try:
        return _traced(config, spec, world, rank)
    except Exception:
        return traceback.format_exc()


def _traced(config: dict[str, Any], spec: dict[str, Any], world: int, rank: int) -> Figures:
    import torch
    import torch.nn.functional as F
    from transformers import AutoConfig, AutoModelForCausalLM

    from meshplan.runtime.imagine import imagine_step
    from meshplan.runtime.trace import graph_of

    made = AutoConfig.for_model(**config)
    model = AutoModelForCausalLM.from_config(made, attn_implementation="sdpa")
    plan = make_plan(load_spec(spec), graph_of(model), world_size=world)
    ids = torch.zeros(BATCH, SEQ_LEN, dtype=torch.long)
    foreach = is_uniform(plan.assignment)

    def loss_fn(output: Any, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.logits.flatten(0, 1).float(), targets.flatten())

    log = imagine_step(
        model, plan, ids, ids.clone(), loss_fn,
        lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3, foreach=foreach), rank,
    )  # fmt: skip
    return log.by_phase


def plan_of(config: dict[str, Any], spec: dict[str, Any], world: int) -> Plan:
    return make_plan(load_spec(spec), from_mapping(config), world_size=world)


def told(config: dict[str, Any], spec: dict[str, Any], world: int, rank: int) -> Figures:
    plan = plan_of(config, spec, world)
    foreach = is_uniform(plan.assignment)
    return told_log(
        plan, batch=BATCH, seq_len=SEQ_LEN, rank=rank, is_cuda=False, in_place=False,
        foreach=foreach,
    ).by_phase  # fmt: skip


@pytest.fixture(scope="module")
def apart() -> Iterator[ProcessPoolExecutor]:
    """A process that is in no group."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as executor:
        yield executor


SELECTIVE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (LLAMA, {"activation_checkpointing": "selective"}),
    "gpt2": (GPT2, {"activation_checkpointing": "selective"}),
    "qwen3, only attention": (
        QWEN3, {"activation_checkpointing": {"mode": "selective", "save": ["sdpa"]}}),
    "bf16, each block its own way": (
        LLAMA,
        {
            "precision": "bf16-mixed",
            "activation_checkpointing": {"mode": "selective", "every": 2},
            "rules": [{"match": "model.layers.1", "activation_checkpointing": "full"}],
        }),
}  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [
        "bf16, each block its own way",
        *(
            pytest.param(c, marks=pytest.mark.wide)
            for c in ("llama", "gpt2", "qwen3, only attention")
        ),
    ],
)
def test_recomputation_of_chosen_operations(apart: ProcessPoolExecutor, case: str) -> None:
    config, more = SELECTIVE[case]
    spec = {"version": 1, "mesh": {"dp_shard": 2}} | more
    real = apart.submit(traced, config, spec, 2, 0).result()
    assert told(config, spec, 2, 0) == real


def test_words_that_no_row_stands_for_are_refused() -> None:
    spec = {
        "version": 1, "mesh": {"dp_shard": 2},
        "activation_checkpointing": {"mode": "selective", "save": ["sdpa", "aten.silu"]},
    }  # fmt: skip
    with pytest.raises(PlanError, match=r"recomputation that saves aten\.silu"):
        told(LLAMA, spec, 2, 0)
