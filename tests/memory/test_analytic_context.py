"""What a rank of cp holds that exchanges heads, told from a config, is what a trace shows.

Which seeded bug would this catch? An exchange that forgets what it stacks, keys that are let go of
before attention is done, a result that is not laid anew, positions of the part instead of the
whole: peaks of some phase would be off.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from meshplan.errors import PlanError
from meshplan.memory.analytic import microbatches
from meshplan.memory.analytic.estimate import estimate_analytic
from meshplan.memory.decoder import blocks
from meshplan.memory.replay.optimizer import is_uniform
from meshplan.memory.tape.ops import TapeBuilder
from meshplan.model.blueprint import from_mapping
from meshplan.plan.plan import Plan, make_plan
from meshplan.spec.reader import load_spec
from tests.helpers import told
from tests.helpers.analytic import analytic_log
from tests.memory.test_analytic_stages import AGAIN, FUSED, GPT2, LLAMA, MIXED, MIXTRAL, NUMBERS

FLAG = 8
"""Bytes: what ranks tell each other of a forward, which is not told."""
WIDE = LLAMA | {"num_key_value_heads": 4}
HEADS = WIDE | {"head_dim": 96, "intermediate_size": 16, "vocab_size": 16, "num_hidden_layers": 2}
"""Attention is where the most is held, so what exchanges take in passing shows."""
DATA = {"dp_shard": 2, "cp": 2}
MORE = {"batch": {"accumulate": 3}, "clip_grad_norm": 1.0}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "alone": (LLAMA, {"mesh": {"cp": 2}}),
    "bf16": (LLAMA, {"mesh": DATA} | MIXED),
    "recomputed": (LLAMA, {"mesh": DATA} | MIXED | AGAIN),
    "selective": (LLAMA, {"mesh": DATA, "activation_checkpointing": "selective"}),
    "over four": (WIDE, {"mesh": {"cp": 4}}),
    "tp": (WIDE, {"mesh": {"cp": 2, "tp": 2}, "tp_plan": "hf"}),
    "tp, loss parallel": (
        WIDE, {"mesh": {"cp": 2, "tp": 2}, "tp_plan": "hf", "loss_parallel": True}),
    "hybrid": (LLAMA, {"mesh": {"dp_replicate": 2, "dp_shard": 2, "cp": 2}} | MIXED),
    "zero1": (LLAMA, {"mesh": DATA, "strategy": "zero1"} | MIXED),
    "zero2, accumulated, clipped": (LLAMA, {"mesh": DATA, "strategy": "zero2"} | MORE),
    "ddp": (LLAMA, {"mesh": {"dp_replicate": 2, "cp": 2}, "strategy": "ddp"}),
    "gpt2": (GPT2, {"mesh": {"cp": 2}}),
    "heads": (HEADS, {"mesh": {"cp": 2}} | AGAIN),
    "mixtral": (MIXTRAL, {"mesh": {"cp": 2}} | MIXED),
    "qwen3": (LLAMA | {"model_type": "qwen3"}, {"mesh": {"cp": 2}} | MIXED),
}  # fmt: skip


def decided(config: dict[str, Any], spec: dict[str, Any]) -> Plan:
    over = {"version": 1, "context": {"attention": "all_to_all"}} | spec
    return make_plan(load_spec(over), from_mapping(config))


def log_of(plan: Plan) -> Any:
    """As the trace on CPUs shows it."""
    return analytic_log(
        plan, batch=2, seq_len=told.LENGTH, is_cuda=False, in_place=False,
        foreach=is_uniform(plan.assignment),
    )  # fmt: skip


@pytest.mark.wide
@pytest.mark.parametrize("case", CASES)
def test_a_told_rank_is_the_traced_one(apart: ProcessPoolExecutor, case: str) -> None:
    config, spec = CASES[case]
    plan = decided(config, spec)
    over = {"version": 1, "context": {"attention": "all_to_all"}} | spec
    answer = apart.submit(told.traced, config, over, plan.mesh.world_size, (0,)).result()
    assert isinstance(answer, tuple), answer
    digest, (theirs,) = answer
    assert plan.digest() == digest
    mine = log_of(plan)
    assert mine.peak.live_bytes == theirs.peak.live_bytes
    assert mine.by_phase.keys() == theirs.by_phase.keys()
    # Ranks of tp compare what they have, and look at the numbers that say so one by one.
    close = NUMBERS if "tp" in case else FLAG
    for phase, figures in theirs.by_phase.items():
        assert mine.by_phase[phase] == pytest.approx(figures, abs=close), phase


def _stack_nothing(self: TapeBuilder, x: int) -> int:
    return self.scale(x, "exchange")


def _lay_nothing(w: TapeBuilder, shape: Any, q: int, k: int, v: int, part: Any) -> int:
    q, k, v = (w.exchange(each) for each in (q, k, v))
    out = blocks.attend(w, q, k, v, shape.head_dim, part.seq_len, is_fused=part.is_fused)
    return w.exchange(out)


@pytest.mark.parametrize(
    "mistake",
    [(TapeBuilder, "exchange", _stack_nothing), (blocks, "_attend_to_whole", _lay_nothing)],
)
def test_a_mistake_shows(mistake: tuple[Any, str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    plan = decided(*CASES["heads"])
    right = log_of(plan).by_phase
    monkeypatch.setattr(
        microbatches, "LAST", microbatches.LastPlayed(most=2)
    )  # Nothing that was played without it.
    monkeypatch.setattr(*mistake)
    assert log_of(plan).by_phase != right


def test_a_rank_holds_less_of_a_sequence_that_more_ranks_cut() -> None:
    """All but what comes and goes with parameters shrinks with the part."""
    config = FUSED | {"num_key_value_heads": 4, "max_position_embeddings": 65536}
    batch = {"micro": 1, "seq_len": 65536}
    peaks = []
    for cp in (1, 2, 4):
        spec = {"mesh": {"cp": cp} if cp > 1 else {"dp_replicate": 1}, "batch": batch} | MIXED
        if cp == 1:
            plan = make_plan(load_spec({"version": 1} | spec), from_mapping(config))
        else:
            plan = decided(config, spec)
        found = estimate_analytic(plan, device="h100-sxm-80gb", limit_bytes=None)
        peaks.append(found.worst.peak.requested_bytes)
        assert ("inputs of a rank's step", f"[1, {65536 // cp}] int64") in found.assumed
    assert peaks[1] < 0.6 * peaks[0]
    assert peaks[2] < 0.6 * peaks[1]


@pytest.mark.parametrize(
    ("config", "more", "what"),
    [
        (LLAMA, {"mesh": {"cp": 2, "tp": 2}, "tp_plan": "hf"}, "no multiple of tp times cp"),
    ],
)
def test_what_has_no_rule_is_refused(
    config: dict[str, Any], more: dict[str, Any], what: str
) -> None:
    with pytest.raises(PlanError, match=what):
        log_of(decided(config, more))
