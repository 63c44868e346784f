"""What is told of a pipeline's ranks from a config is what a trace of the real stages shows.

Which seeded bug would this catch? A tensor that is let go of when it is sent, a gradient that is
kept too short, a microbatch too many in flight, a stage that computes another's module: each rank's
peaks would be off (`test_a_mistake_shows` makes such mistakes).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from meshplan.assign import Assignment
from meshplan.errors import PlanError
from meshplan.layout.schedules import Action
from meshplan.memory import EventLog
from meshplan.memory.analytic import stages
from meshplan.memory.analytic.estimate import estimate_analytic
from meshplan.memory.analytic.microbatches import analytic_microbatches
from meshplan.memory.analytic.ranks import BRIEF_ERROR, OverError
from meshplan.memory.log.allocator import reserve
from meshplan.memory.log.driver import with_workspaces
from meshplan.memory.log.events import Term
from meshplan.memory.replay import replay
from meshplan.memory.replay.optimizer import is_uniform
from meshplan.memory.stages import microbatch, schedule_pass, tape
from meshplan.model.blueprint import from_mapping
from meshplan.plan.plan import Plan, make_plan
from meshplan.spec.reader import load_spec
from tests.helpers import told
from tests.helpers.analytic import analytic_log

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 160, "hidden_size": 48, "intermediate_size": 112,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4,
    "max_position_embeddings": 64, "use_cache": False, "tie_word_embeddings": False,
    "head_dim": 12,
}  # fmt: skip
NUMBERS = 64
"""Bytes: single numbers that loops and stand-ins make, which are not told one by one."""
TABLE = "model.embed_tokens"
DEEP = LLAMA | {"num_hidden_layers": 8}
FUSED = DEEP | {"head_dim": 16}
"""As CUDA's kernels of attention want it."""
GPT2: dict[str, Any] = {
    "model_type": "gpt2", "vocab_size": 160, "n_embd": 48, "n_layer": 4, "n_head": 4,
    "n_positions": 64, "use_cache": False, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": False,
}  # fmt: skip


MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
QWEN = LLAMA | {
    "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 3,
    "moe_intermediate_size": 40, "mlp_only_layers": [1],
}  # fmt: skip
DEEPSEEK = LLAMA | {
    "model_type": "deepseek_v3", "num_key_value_heads": 4, "moe_intermediate_size": 40,
    "n_routed_experts": 64, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
    "first_k_dense_replace": 1, "q_lora_rank": 28, "kv_lora_rank": 20, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 24, "head_dim": 8,
}  # fmt: skip


def plan_of(schedule: str, pp: int = 2, microbatches: int = 4, **more: Any) -> dict[str, Any]:
    pipeline: dict[str, Any] = {"schedule": schedule, "microbatches": microbatches}
    for key in ("virtual", "split"):
        if key in more:
            pipeline[key] = more.pop(key)
    mesh = more.pop("mesh", {"dp_shard": 2})
    return {"version": 1, "mesh": {"pp": pp} | mesh, "pipeline": pipeline} | more


MIXED = {"precision": "bf16-mixed"}
AGAIN = {"activation_checkpointing": "full"}
CUT = {"dp_shard": 2, "tp": 2}
SPREAD: dict[str, Any] = {
    "mesh": {"dp_shard": 2, "ep": "2 in dp_shard"},
    "rules": [{"match": "**.experts", "place": {"ep": "ep_dispatch_experts"}}],
}  # fmt: skip
WHOLE: dict[str, Any] = {"rules": [{"match": "**.experts", "place": {"tp": "R"}}]}
MORE = {"batch": {"accumulate": 3}, "clip_grad_norm": 1.0}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "GPipe": (LLAMA, plan_of("GPipe")),
    "1F1B": (LLAMA, plan_of("1F1B", 4, 8)),
    "1F1B in bf16": (LLAMA, plan_of("1F1B", **MIXED)),
    "1F1B in true bf16": (LLAMA, plan_of("1F1B", precision="bf16-true")),
    "1F1B, recomputed": (LLAMA, plan_of("1F1B", **AGAIN, **MIXED)),
    "interleaved": (LLAMA, plan_of("Interleaved1F1B", virtual=2)),
    "interleaved, recomputed": (LLAMA, plan_of("Interleaved1F1B", virtual=2, **AGAIN, **MIXED)),
    "interleaved, of 8 stages": (DEEP, plan_of("Interleaved1F1B", 4, 8, virtual=2)),
    "looped": (LLAMA, plan_of("LoopedBFS", virtual=2)),
    "fewer microbatches than stages": (LLAMA, plan_of("GPipe", 4, 2)),
    "no data axes": (LLAMA, plan_of("1F1B", mesh={})),
    "no data axes, bf16": (LLAMA, plan_of("1F1B", mesh={}, **MIXED)),
    "ddp": (LLAMA, plan_of("1F1B", mesh={"dp_replicate": 2}, strategy="ddp", **MIXED)),
    "hybrid": (LLAMA, plan_of("1F1B", mesh={"dp_replicate": 2, "dp_shard": 2}, **MIXED)),
    "zero1": (LLAMA, plan_of("1F1B", strategy="zero1", **MIXED)),
    "zero2": (LLAMA, plan_of("Interleaved1F1B", virtual=2, strategy="zero2")),
    "accumulated, clipped": (LLAMA, plan_of("Interleaved1F1B", virtual=2, **MIXED, **MORE)),
    "tp": (LLAMA, plan_of("1F1B", mesh=CUT, tp_plan="hf", **MIXED, **MORE)),
    "tp, loss parallel": (LLAMA, plan_of(
        "Interleaved1F1B", virtual=2, mesh=CUT, tp_plan="auto", loss_parallel=True)),
    "selective": (LLAMA, plan_of("1F1B", activation_checkpointing="selective", **MIXED)),
    "tied": (LLAMA | {"tie_word_embeddings": True}, plan_of("1F1B", **MIXED)),
    "gpt2, tied, clipped": (GPT2 | {"tie_word_embeddings": True}, plan_of("1F1B", **MORE)),
    "gpt2, tied, ddp": (GPT2 | {"tie_word_embeddings": True}, plan_of(
        "GPipe", mesh={"dp_replicate": 2}, strategy="ddp", clip_grad_norm=1.0)),
    "gpt2, 1F1B": (GPT2, plan_of("1F1B", **MIXED)),
    "gpt2, GPipe": (GPT2, plan_of("GPipe", 4, 8)),
    "gpt2, interleaved, recomputed": (GPT2, plan_of("Interleaved1F1B", virtual=2, **AGAIN)),
    "a lone table, bf16": (LLAMA, plan_of(
        "1F1B", split=[["model.embed_tokens"], ["model.layers.0"]], **MIXED)),
    "gpt2 of lone embeddings": (GPT2, plan_of("1F1B", split=[
        ["transformer.wte", "transformer.wpe"], ["transformer.h.0"]])),
    "gpt2 with embeddings apart": (GPT2, plan_of("1F1B", split=[
        ["transformer.wte"], ["transformer.wpe"]])),
    "mixtral": (MIXTRAL, plan_of("1F1B", **MIXED)),
    "mixtral, recomputed": (MIXTRAL, plan_of("Interleaved1F1B", virtual=2, **AGAIN, **MIXED)),
    "qwen, some blocks dense, selective": (
        QWEN, plan_of("GPipe", activation_checkpointing="selective", **MORE)),
    "granite, tied": (LLAMA | {
        "model_type": "granite", "tie_word_embeddings": True}, plan_of("1F1B", **MIXED)),
    "qwen2_moe, interleaved": (
        QWEN | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 56},
        plan_of("Interleaved1F1B", virtual=2, **MIXED)),
    "deepseek": (DEEPSEEK, plan_of("1F1B", 4, 8, **MIXED)),
    "deepseek, interleaved, recomputed": (
        DEEPSEEK, plan_of("Interleaved1F1B", virtual=2, **AGAIN, **MIXED)),
    "mixtral, spread": (MIXTRAL, plan_of("1F1B", **SPREAD, **MIXED)),
    "mixtral of two blocks, spread, recomputed": (
        MIXTRAL | {"num_hidden_layers": 2}, plan_of("1F1B", 2, 2, **SPREAD, **AGAIN, **MIXED)),
    "mixtral, spread, recomputed, twice, clipped": (
        MIXTRAL, plan_of("Interleaved1F1B", virtual=2, **SPREAD, **AGAIN, **MIXED, **MORE)),
    "qwen, spread, float32, selective, half as many more": (
        QWEN | {"num_experts_per_tok": 2}, plan_of(
            "GPipe", activation_checkpointing="selective", experts={"capacity": 1.5}, **SPREAD)),
    "mixtral, spread over some, zero2": (
        MIXTRAL, plan_of("1F1B", strategy="zero2", **SPREAD | {
            "mesh": {"dp_shard": 4, "ep": "2 in dp_shard"}}, **MIXED)),
    "mixtral, spread, zero1, hybrid": (
        MIXTRAL, plan_of("1F1B", **SPREAD | {
            "mesh": {"dp_replicate": 2, "dp_shard": 2, "ep": "2 in dp_shard"}}, **MIXED)),
    "mixtral, spread, zero1": (MIXTRAL, plan_of("1F1B", strategy="zero1", **SPREAD, **MIXED)),
    "deepseek, spread, recomputed": (
        DEEPSEEK | {"n_routed_experts": 8}, plan_of("1F1B", 4, 8, **SPREAD, **AGAIN, **MIXED)),
    "qwen, spread, in halves": (QWEN, plan_of("InterleavedZeroBubble", virtual=2, **SPREAD)),
    "mixtral, spread, in halves, bf16": (MIXTRAL, plan_of("ZBVZeroBubble", **SPREAD, **MIXED)),
    "mixtral, spread, beside tp": (
        MIXTRAL, plan_of("1F1B", tp_plan="hf", **SPREAD | {
            "mesh": {"dp_shard": 2, "tp": 2, "ep": "2 in dp_shard"},
            "rules": [*SPREAD["rules"], *WHOLE["rules"]]}, **MIXED)),
}  # fmt: skip
DEFAULT = {
    "GPipe": 2, "interleaved, recomputed": 3, "gpt2, tied, clipped": 0, "a lone table, bf16": 2,
    "mixtral of two blocks, spread, recomputed": 0,
}  # fmt: skip
"""One rank of each; the wide run takes one of every stage."""


def decided(config: dict[str, Any], spec: dict[str, Any]) -> Plan:
    return make_plan(load_spec(spec), from_mapping(config))


def log_of(plan: Plan, rank: int) -> EventLog:
    """As the trace on CPUs shows it."""
    foreach = is_uniform(plan.assignment)
    return analytic_log(
        plan, batch=told.samples(plan) // plan.accumulate, seq_len=told.LENGTH, rank=rank,
        is_cuda=False, in_place=False, foreach=foreach,
    )  # fmt: skip


def check_ranks(
    apart: ProcessPoolExecutor, config: dict[str, Any], spec: dict[str, Any], one: int | None
) -> None:
    """Hold a told step against a traced one, on one rank or on each place along pp."""
    plan = decided(config, spec)
    count = plan.mesh.world_size
    ranks = (one,) if one is not None else tuple(range(0, count, count // plan.mesh.size("pp")))
    answer = apart.submit(told.traced, config, spec, count, ranks).result()
    assert isinstance(answer, tuple), answer
    digest, logs = answer
    assert plan.digest() == digest
    for rank, theirs in zip(ranks, logs, strict=True):
        mine = log_of(plan, rank)
        assert mine.peak.live_bytes == pytest.approx(theirs.peak.live_bytes, abs=NUMBERS)
        assert mine.by_phase.keys() == theirs.by_phase.keys()
        for phase, figures in theirs.by_phase.items():
            assert mine.by_phase[phase] == pytest.approx(figures, abs=NUMBERS), phase


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c in DEFAULT else [pytest.mark.wide]) for c in CASES]
)
def test_a_told_rank_is_the_traced_one(apart: ProcessPoolExecutor, case: str) -> None:
    check_ranks(apart, *CASES[case], DEFAULT.get(case))


def _keep_what_has_arrived() -> tuple[Any, str, Any]:
    begin = schedule_pass.Pass.begin

    def late(self: Any, action: Action, arrived: Any) -> None:
        begin(self, action, ())

    return schedule_pass.Pass, "begin", late


def _drop_what_is_sent_at_once() -> tuple[Any, str, Any]:
    def send(self: Any, stage: int, m: int) -> None:
        part, flight = self._parts[stage], self._flights[stage, m]
        for storage in (*part.returned, *part.received):
            self._drop(flight[storage])

    return schedule_pass.Pass, "send_backward", send


def _keep_what_was_received() -> tuple[Any, str, Any]:
    def send(self: Any, stage: int, m: int) -> None:
        flight, part = self._flights[stage, m], self._parts[stage]
        kept = [flight[s] for s in (*part.returned, *part.received)]
        self._leaving[Action("SEND_B", stage, m)] = kept

    return schedule_pass.Pass, "send_backward", send


def _gather_the_root_first() -> tuple[Any, str, Any]:
    return microbatch, "_inner_first", lambda marks: marks


def _share_tables() -> tuple[Any, str, Any]:
    return tape, "_widen", lambda *_: None


MISTAKES: tuple[Callable[[], tuple[Any, str, Any]], ...] = (
    _keep_what_has_arrived, _drop_what_is_sent_at_once, _keep_what_was_received,
    _gather_the_root_first, _share_tables,
)  # fmt: skip


@pytest.mark.parametrize("make", MISTAKES)
def test_a_mistake_shows(
    make: Callable[[], tuple[Any, str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In some phase of some rank, by more than a trace may differ."""
    # Roots that are given back are gathered anew before a backward, if in the right order.
    rules = [{"match": {"type": "LlamaForCausalLM"}, "reshard_after_forward": True}]
    plan = decided(DEEP, plan_of("Interleaved1F1B", 4, 8, virtual=2, rules=rules, **MIXED))

    def held() -> list[int]:
        logs = [log_of(plan, rank) for rank in range(0, 8, 2)]
        return [size for log in logs for sizes in log.by_phase.values() for size in sizes]

    right = held()
    monkeypatch.setattr(*make())
    wrong = held()
    assert any(abs(a / b - 1) > 0.001 for a, b in zip(wrong, right, strict=True))


@pytest.mark.parametrize(
    ("config", "more", "what"),
    [
        (LLAMA | {"num_hidden_layers": 2}, {"mesh": {"pp": 8}}, "cut inside blocks"),
        (GPT2, {"pipeline": {"schedule": "1F1B", "microbatches": 4, "split": [
            ["transformer.wte"], ["transformer.wpe"], ["transformer.h.0"]]}, "mesh": {"pp": 3}},
         "a tensor that skips a stage"),
    ],
)  # fmt: skip
def test_what_has_no_rule_is_refused(
    config: dict[str, Any], more: dict[str, Any], what: str
) -> None:
    plan = decided(config, plan_of("1F1B", mesh={}) | more)
    with pytest.raises(PlanError, match=what):
        analytic_log(plan, batch=4, seq_len=8)


def test_samples_that_are_no_whole_microbatches_make_no_plan() -> None:
    with pytest.raises(PlanError, match="3 samples cannot be divided into 4 pipeline microbatches"):
        decided(LLAMA, plan_of("1F1B", mesh={}) | {"batch": {"micro": 3, "seq_len": 8}})


def test_an_estimate_groups_the_ranks_of_a_stage() -> None:
    plan = decided(FUSED, plan_of("1F1B", 4, 8, batch={"micro": 8, "seq_len": 32}))
    found = estimate_analytic(plan, device="h100-sxm-80gb", limit_bytes=80 * 2**30)
    assert [(g.ranks, g.stages) for g in found.groups] == [
        ((0, 1), (0,)), ((2, 3), (1,)), ((4, 5), (2,)), ((6, 7), (3,))
    ]  # fmt: skip
    peaks = [group.peak.requested_bytes for group in found.groups]
    assert peaks[0] > peaks[1] > peaks[2]  # The earlier the stage, the more are in flight.


def test_only_ranks_that_need_most_are_told_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is much to tell; the others' band is wider, and their peak is the same."""
    spec = plan_of("1F1B", 4, 24, batch={"micro": 48, "seq_len": 1024}, **MIXED)
    plan = decided(FUSED | {"hidden_size": 1024, "intermediate_size": 4096}, spec)
    full = estimate_analytic(plan, device="cuda", limit_bytes=None)
    monkeypatch.setattr(stages, "_MOST", 0)
    found = estimate_analytic(plan, device="cuda", limit_bytes=None)
    assert found.worst == full.worst
    assert "are summarised" in found.certified
    assert "are summarised" not in full.certified
    for brief, whole in zip(found.groups, full.groups, strict=True):
        assert brief.peak.requested_bytes == whole.peak.requested_bytes
        assert brief.at == whole.at
    assert sum(a.band != b.band for a, b in zip(found.groups, full.groups, strict=True)) >= 1


def test_what_ranks_may_reserve_moves_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is over that in brief, and not in full, is told in full without it too."""
    monkeypatch.setattr(stages, "_MOST", 0)
    spec = plan_of("GPipe", 4, 24, batch={"micro": 48, "seq_len": 1024}, **MIXED)
    plan = decided(FUSED | {"hidden_size": 1024, "intermediate_size": 4096}, spec)
    usual = estimate_analytic(plan, device="cuda", limit_bytes=None)
    most, works = (
        usual.worst.peak.reserved_bytes,
        analytic_microbatches(plan, 48, 1024, device="cuda"),
    )
    brief = works.of_rank(usual.worst.ranks[0], summarised=True)
    log = with_workspaces(replay(brief, plan, "adamw", rank=usual.worst.ranks[0]), "cuda")
    assert reserve(log).reserved_bytes > most
    assert estimate_analytic(plan, device="cuda", limit_bytes=None, stop_above_bytes=most) == usual
    with pytest.raises(OverError):
        estimate_analytic(plan, device="cuda", limit_bytes=None, stop_above_bytes=most - 1)


def test_of_a_very_long_step_all_ranks_are_told_in_brief(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = decided(FUSED, plan_of("1F1B", 2, 24, batch={"micro": 48, "seq_len": 32}, **MIXED))
    full = estimate_analytic(plan, device="cuda", limit_bytes=None)
    monkeypatch.setattr(stages, "_MOST", 0)
    monkeypatch.setattr(stages, "_FAR_TOO_MANY", 0)
    found = estimate_analytic(plan, device="cuda", limit_bytes=None)
    assert found.certified.endswith("are summarised")
    for brief, whole in zip(found.groups, full.groups, strict=True):
        assert brief.peak.requested_bytes == whole.peak.requested_bytes
        assert brief.band[1] > whole.peak.reserved_bytes


def test_gradients_of_a_tied_table_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of the pass, in a tensor of their own."""
    plan = decided(*CASES["tied"])
    right = log_of(plan, 0)
    monkeypatch.setattr(Assignment, "shared", {})
    wrong = log_of(plan, 0)
    table = [s for s in right.storages if (s.term, s.module) == (Term.COMMUNICATION, TABLE)]
    assert len(right.storages) == len(wrong.storages) + 2  # And whether there is one.
    assert len(table) == 1


@pytest.mark.parametrize("more", [
    {"schedule": "1F1B"}, {"schedule": "1F1B", **AGAIN}, {"schedule": "GPipe"},
    {"schedule": "Interleaved1F1B", "virtual": 2}, {"schedule": "1F1B", "strategy": "zero1"},
])  # fmt: skip
def test_in_brief_a_rank_needs_as_much(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left out of a long step makes no peak, and nothing is left of it at the end."""
    given = dict(more)
    plan = decided(FUSED, plan_of(given.pop("schedule"), 2, 24, **given, **MIXED))

    def log(rank: int, *, summarised: bool = False) -> EventLog:
        works = analytic_microbatches(plan, 48, told.LENGTH)
        return replay(works.of_rank(rank, summarised=summarised), plan, "adamw", rank=rank)

    for rank in (0, 3):
        telling, brief = log(rank), log(rank, summarised=True)
        with monkeypatch.context() as patch:
            patch.setattr(stages, "num_to_simulate", lambda schedule, ranks, count: count)
            whole = log(rank)
        for each in (telling, brief):
            assert each.by_phase["step"] == whole.by_phase["step"]
            assert each.phase_at_peak == whole.phase_at_peak
        assert telling.peak.live_bytes == whole.peak.live_bytes
        assert telling.pooled_bytes == whole.pooled_bytes
        assert brief.peak.live_bytes <= whole.peak.live_bytes
        assert brief.peak.live_bytes >= whole.peak.live_bytes * (1 - BRIEF_ERROR)
        assert len(brief.events) < 0.6 * len(whole.events)


def test_a_pipeline_is_told_without_torch() -> None:
    script = (
        "import sys\n"
        "from meshplan.model.blueprint import from_mapping\n"
        "from tests.helpers.analytic import analytic_log\n"
        "from meshplan.plan.plan import make_plan\n"
        "from meshplan.spec.reader import load_spec\n"
        "graph = from_mapping({'model_type': 'llama', 'num_hidden_layers': 8})\n"
        "spec = load_spec({'version': 1, 'mesh': {'pp': 4, 'dp_shard': 2}})\n"
        "log = analytic_log(make_plan(spec, graph), batch=4, seq_len=128)\n"
        "sys.exit('torch' in sys.modules or not log.peak.live_bytes)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0
