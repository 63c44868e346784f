"""Parts of the sequence over tp, told from a config: byte by byte what the traced step takes.

Which seeded bug would this catch? A part where the whole is held, a gather that lays nothing out
anew, gradients of norms that nobody adds up, what was cut held on to where only a part is needed.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from tests.memory import test_analytic_stages as stages
from tests.memory.test_analytic import (
    AUTO,
    BF16,
    BOTH,
    GPT2,
    GRANITE,
    LLAMA,
    QWEN3,
    TWICE,
    Case,
    told,
    traced,
)

SEQUENCE: dict[str, Any] = AUTO | {"sequence_parallel": True}
LOGITS = {"loss_parallel": True}
FULL = {"activation_checkpointing": "full"}
SELECTIVE = {"activation_checkpointing": "selective"}

CASES: dict[str, Case] = {
    "llama": (LLAMA, SEQUENCE, 2),
    "gpt2": (GPT2, SEQUENCE, 2),
    "llama, one sample, recomputed": (LLAMA, SEQUENCE | FULL | TWICE | BOTH, 4),
    "gpt2, one sample, in part": (GPT2, SEQUENCE | SELECTIVE | TWICE | BOTH, 4),
    "qwen3, in part, bf16": (QWEN3, SEQUENCE | SELECTIVE | BF16 | BOTH, 4),
    "granite, logits cut": (GRANITE, SEQUENCE | LOGITS | BOTH, 4),
    # What the body gave back is held while the scores are divided.
    "granite of few features, logits cut": (
        GRANITE | {"hidden_size": 32, "num_attention_heads": 2, "head_dim": 16, "vocab_size": 4096},
        SEQUENCE | LOGITS, 2),
    "llama, every other block, tied": (
        LLAMA | {"tie_word_embeddings": True},
        SEQUENCE | BF16 | LOGITS
        | {"activation_checkpointing": {"mode": "full", "every": 2}}, 2),
    "gpt2, recomputed": (GPT2, SEQUENCE | FULL | BF16 | BOTH, 4),
    "llama, head whole": (LLAMA | {"vocab_size": 40}, SEQUENCE | FULL, 2),
    "llama, twice": (LLAMA, SEQUENCE | TWICE, 2),
    "gpt2, twice": (GPT2, SEQUENCE | TWICE, 2),
    "gpt2, twice, bf16": (GPT2, SEQUENCE | TWICE | BOTH | BF16, 4),
}  # fmt: skip
DEFAULT = ("llama", "granite of few features, logits cut")
CALLED_ALIKE = ("llama", "gpt2", "granite, logits cut")
"""Of others, what a collective reads is called a buffer of it, or a gradient in parts is one."""


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c in DEFAULT else [pytest.mark.wide]) for c in CASES]
)
def test_a_told_step_is_the_traced_one(case: str, apart: ProcessPoolExecutor) -> None:
    config, spec, world = CASES[case]
    spec = {"version": 1} | spec
    theirs = apart.submit(traced, config, spec, world, world - 1).result()
    assert not isinstance(theirs, str), theirs
    mine = told(config, spec, world, world - 1)
    assert mine[:2] == theirs[:2]
    if case in CALLED_ALIKE:
        assert mine[2] == theirs[2]


PARTS = {"tp_plan": "auto", "sequence_parallel": True, "mesh": {"dp_shard": 2, "tp": 2}}
STAGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (stages.LLAMA, stages.plan_of("1F1B", **PARTS, **stages.MIXED, **stages.AGAIN)),
    "gpt2": (stages.GPT2, stages.plan_of("1F1B", **PARTS)),
    "llama, zero bubble": (
        stages.LLAMA,
        stages.plan_of("InterleavedZeroBubble", virtual=2, **PARTS),
    ),
    "llama, zero bubble, of 8 stages": (
        stages.DEEP,
        stages.plan_of("InterleavedZeroBubble", 4, 8, virtual=2, **PARTS, **stages.MIXED),
    ),
    "gpt2, zero bubble": (
        stages.GPT2,
        stages.plan_of("InterleavedZeroBubble", virtual=2, **PARTS, **stages.MIXED),
    ),
    "llama, interleaved": (stages.LLAMA, stages.plan_of("Interleaved1F1B", virtual=2, **PARTS)),
    "llama, interleaved, in part": (
        stages.LLAMA,
        stages.plan_of("Interleaved1F1B", virtual=2, strategy="zero1", **PARTS, **SELECTIVE),
    ),
}


@pytest.mark.parametrize(
    "case",
    [c if c == next(iter(STAGES)) else pytest.param(c, marks=pytest.mark.wide) for c in STAGES],
)
def test_every_stage_is_the_traced_one(case: str, apart: ProcessPoolExecutor) -> None:
    config, spec = STAGES[case]
    stages.check_ranks(apart, config, spec, None)
