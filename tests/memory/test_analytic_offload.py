"""Offloading told from a config is what a trace of transformers' own code shows, on both sides.

Which seeded bug would this catch? A copy that stays, comes back early or goes late; one copy for
two that autograd keeps; an input of a recomputed block that is held on the device.
"""

from __future__ import annotations

import traceback
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from meshplan.errors import PlanError
from meshplan.memory.analytic.estimate import estimate_analytic
from meshplan.memory.analytic.microbatches import analytic_microbatches
from meshplan.memory.log.events import EventLog
from meshplan.memory.replay import replay
from meshplan.memory.replay.optimizer import is_uniform
from meshplan.model.blueprint import from_mapping
from meshplan.plan.plan import Plan, make_plan
from meshplan.render.memory.memory import memory_to_json, memory_to_text
from meshplan.spec.reader import load_spec
from tests.helpers.analytic import analytic_log
from tests.memory.test_analytic import GPT2, LLAMA, QWEN3
from tests.memory.test_analytic_stages import NUMBERS

BATCH, SEQ_LEN = 2, 32

Sides = tuple[dict[str, tuple[int, int]], int]
"""(bytes of the device by phase, most bytes on the host)"""


def traced(
    config: dict[str, Any], spec: dict[str, Any], world: int, rank: int, device: str
) -> Sides | str:
    """The whole step, in a process of its own; or what was raised."""
    try:
        return _traced(config, spec, world, rank, device)
    except Exception:
        return traceback.format_exc()


def _traced(
    config: dict[str, Any], spec: dict[str, Any], world: int, rank: int, device: str
) -> Sides:
    import torch
    import torch.nn.functional as F
    from transformers import AutoConfig, AutoModelForCausalLM

    from meshplan.runtime.fake_step import step
    from meshplan.runtime.trace.ops import record
    from meshplan.runtime.trace.rehearse import rehearser
    from meshplan.runtime.trace.structure import graph_of
    from tests.helpers.offloaded import host_apart
    from tests.helpers.replayed import is_on_host

    made = AutoConfig.for_model(**config)
    model = AutoModelForCausalLM.from_config(made, attn_implementation="sdpa")
    ids = torch.zeros(BATCH, SEQ_LEN, dtype=torch.long)
    read = load_spec(spec)
    flow = record(model, (ids,)) if read.reads_flow else None
    rehearse = rehearser(model, (ids,)) if read.reads_flow else None
    plan = make_plan(read, graph_of(model, flow), world_size=world, rehearse=rehearse)
    size = samples(plan) * plan.accumulate, SEQ_LEN // plan.mesh.size("cp")
    ids = torch.zeros(*size, dtype=torch.long)

    def loss_fn(output: Any, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.logits.flatten(0, 1).float(), targets.flatten())

    with pytest.MonkeyPatch.context() as patch:
        if device == "cpu":
            patch.setattr(step, "behaving_as", host_apart)
        log = step.fake_step(
            model, plan, ids, ids.clone(), loss_fn,
            lambda m: torch.optim.AdamW(
                m.parameters(), lr=1e-3, foreach=is_uniform(plan.assignment)),
            rank, device,
        )  # fmt: skip
    kept = tuple(e for e in log.events if not is_on_host(log.storages[e.storage]))
    return dict(EventLog(log.storages, kept, log.phases).by_phase), log.host_bytes


def samples(plan: Plan) -> int:
    """Of what a rank takes at once."""
    stages = plan.assignment.stages
    return BATCH * stages.microbatches if stages is not None else BATCH // plan.accumulate


def told(
    config: dict[str, Any], spec: dict[str, Any], world: int, rank: int = 0, device: str = "cpu"
) -> Sides:
    plan = make_plan(load_spec(spec), from_mapping(config), world_size=world)
    log = analytic_log(
        plan, batch=samples(plan), seq_len=SEQ_LEN, rank=rank, has_host=True,
        is_cuda=device == "cuda", in_place=False, foreach=is_uniform(plan.assignment),
    )  # fmt: skip
    return dict(log.by_phase), log.host_bytes


PLAN_OF_FOUR: dict[str, Any] = {
    "version": 1, "strategy": "full_shard", "precision": "bf16-mixed",
    "batch": {"micro": 2, "seq_len": SEQ_LEN},
}  # fmt: skip
BIG = LLAMA | {"hidden_size": 96, "head_dim": 24, "intermediate_size": 224}
MOE: dict[str, Any] = QWEN3 | {
    "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64, "norm_topk_prob": True,
}  # fmt: skip
PLAIN: dict[str, Any] = {"version": 1, "strategy": "full_shard"}
SEEDS = 3 * 24
"""Bytes that attention's kernel keeps to make its random numbers again, in three blocks."""
WAIT: dict[str, Any] = {
    "version": 1, "strategy": "full_shard", "offload": {"activations": True}}  # fmt: skip
PP: dict[str, Any] = {
    "version": 1, "mesh": {"pp": 2, "dp_shard": 2},
    "pipeline": {"microbatches": 4, "schedule": "1F1B"},
}  # fmt: skip
MESH: dict[str, Any] = {"version": 1, "offload": {"activations": True}}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], int, int, str]] = {
    "all": (LLAMA, WAIT | {"offload": {"activations": True, "params": True}}, 2, 0, "cpu"),
    "activations": (LLAMA, WAIT, 2, 0, "cpu"),
    "activations, bf16": (QWEN3, WAIT | {"precision": "bf16-mixed"}, 2, 0, "cpu"),
    "gpt2": (GPT2, WAIT, 2, 0, "cpu"),
    "recomputed": (LLAMA, WAIT | {"activation_checkpointing": "full"}, 2, 0, "cpu"),
    "half recomputed": (GPT2, WAIT | {"activation_checkpointing": "selective"}, 2, 0, "cpu"),
    "on a GPU": (BIG, WAIT | {"precision": "bf16-mixed"}, 2, 0, "cuda"),
    "all, recomputed, on a GPU": (BIG, WAIT | {
        "offload": {"activations": True, "params": True}, "precision": "bf16-mixed",
        "activation_checkpointing": "full"}, 2, 0, "cuda"),
    "block by block, accumulated": (LLAMA, {
        "version": 1, "strategy": "full_shard", "batch": {"accumulate": 2}, "rules": [
            {"match": "model.layers.0", "offload": "params"},
            {"match": "model.layers.1", "offload": {"activations": True}},
            {"match": "model.layers.2", "activation_checkpointing": "full",
             "offload": {"activations": True}}]}, 2, 0, "cpu"),
    "tp": (LLAMA, MESH | {"mesh": {"dp_shard": 2, "tp": 2}, "tp_plan": "auto"}, 4, 0, "cpu"),
    "gpt2, tp": (GPT2, MESH | {"mesh": {"dp_shard": 2, "tp": 2}, "tp_plan": "auto"}, 4, 0, "cpu"),
    "cp": (LLAMA, MESH | {"mesh": {"dp_shard": 2, "cp": 2},
           "context": {"attention": "all_to_all"}}, 4, 0, "cpu"),
    "ddp": (LLAMA, WAIT | {"strategy": "ddp"}, 2, 0, "cpu"),
    "moe": (MOE, WAIT, 2, 0, "cpu"),
    "1F1B, first": (LLAMA, PP | {"offload": {"activations": True}}, 4, 0, "cpu"),
    "1F1B, last": (LLAMA, PP | {"offload": {"activations": True}}, 4, 2, "cpu"),
    "1F1B, parameters, bf16": (LLAMA, PP | {
        "offload": "params", "precision": "bf16-mixed"}, 4, 0, "cpu"),
    "1F1B, all, bf16, clipped": (LLAMA, PP | {"clip_grad_norm": 1.0,
        "offload": {"activations": True, "params": True}, "precision": "bf16-mixed"}, 4, 2, "cpu"),
    "1F1B, all, recomputed": (GPT2 | {"tie_word_embeddings": False}, PP | {
        "offload": {"activations": True, "params": True}, "activation_checkpointing": "full",
        "precision": "bf16-mixed", "batch": {"accumulate": 2}}, 4, 0, "cpu"),
    "rounds, all": (LLAMA | {"num_hidden_layers": 4}, {
        "version": 1, "mesh": {"pp": 2, "dp_shard": 2},
        "pipeline": {"microbatches": 4, "schedule": "Interleaved1F1B", "virtual": 2},
        "offload": {"activations": True, "params": True}}, 4, 0, "cpu"),
    "tp, all, on a GPU": (BIG, MESH | {"mesh": {"dp_shard": 2, "tp": 2}, "tp_plan": "hf",
        "offload": {"activations": True, "params": True}, "precision": "bf16-mixed"}, 4, 0, "cuda"),
    "clipped": (LLAMA, WAIT | {"offload": "params", "clip_grad_norm": 1.0}, 2, 0, "cpu"),
}  # fmt: skip


DEFAULT = {"block by block, accumulated"}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c in DEFAULT else [pytest.mark.wide]) for c in CASES]
)
def test_both_sides_are_those_of_the_trace(apart: ProcessPoolExecutor, case: str) -> None:
    _, spec, *_ = CASES[case]
    real = apart.submit(traced, *CASES[case]).result()
    assert isinstance(real, tuple), real
    (mine, host), (theirs, their_host) = told(*CASES[case]), real
    assert host == their_host > 0
    assert mine.keys() == theirs.keys()
    for phase, figures in theirs.items():
        close = SEEDS if CASES[case][-1] == "cuda" else NUMBERS if "pipeline" in spec else 0
        assert mine[phase] == pytest.approx(figures, abs=close), phase


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"rules": [{"match": "model.layers.*.mlp", "offload": {"activations": True}}]},
         "offloaded activations outside of blocks"),
    ],
)  # fmt: skip
def test_what_has_no_rules_is_refused(more: dict[str, Any], what: str) -> None:
    with pytest.raises(PlanError, match=what):
        told(LLAMA, PLAIN | more, 2)


def test_weights_that_stages_share_stay_on_the_device() -> None:
    over = PP | {"offload": "params"}
    with pytest.raises(PlanError, match="stages 0 and 1 share") as error:
        make_plan(load_spec(over), from_mapping(GPT2))
    fix = error.value.problems[0].fix
    assert "match: transformer.h.*, " in fix
    rules = [{"match": "transformer.h.*", "offload": "params"}]
    plan = make_plan(load_spec(PP | {"rules": rules}), from_mapping(GPT2))
    on_host = {fqn for fqn, unit in plan.assignment.units.items() if unit.on_host}
    assert on_host == {f"transformer.h.{n}" for n in range(3)}


def test_what_is_told_in_brief_waits_on_the_host_too() -> None:
    many = {"schedule": "1F1B", "microbatches": 16}
    spec = PP | {"pipeline": many, "offload": {"activations": True}}
    plan = make_plan(load_spec(spec), from_mapping(LLAMA))
    works = analytic_microbatches(plan, 2 * 16, SEQ_LEN, is_cuda=False)

    def host(*, summarised: bool) -> int:
        work = works.of_rank(0, summarised=summarised)
        return replay(work, plan, "adamw", has_host=True).host_bytes

    assert host(summarised=True) == host(summarised=False) > 0
    expanded, brief = (len(works.of_rank(0, summarised=b).log.events) for b in (False, True))
    assert brief < expanded


def test_the_estimate_tells_both_sides() -> None:
    def group(**more: Any) -> Any:
        spec = PLAIN | {"hardware": {"gpus_per_node": 2, "gpu": "a100-sxm-80gb"}} | more
        spec |= {"batch": {"micro": 2, "seq_len": SEQ_LEN}, "precision": "bf16-mixed"}
        plan = make_plan(load_spec(spec), from_mapping(BIG))
        return estimate_analytic(plan, device="a100-sxm-80gb", limit_bytes=2**34).worst

    there, here = group(offload={"activations": True}), group()
    assert there.host_bytes > 0 == here.host_bytes
    assert there.peak.requested_bytes < here.peak.requested_bytes


@pytest.mark.parametrize(
    ("memory", "fits", "words"),
    [
        ({}, True, "of its 288.0 GiB (assumed; state hardware.host_memory)"),
        ({"host_memory": "1MiB"}, False, ": TOO MUCH"),
        ({"host_memory": "1GiB"}, True, "of its 1.0 GiB"),
    ],
)
def test_a_node_s_host_holds_what_its_ranks_do(
    memory: dict[str, Any], fits: bool, words: str
) -> None:
    hardware = {"nodes": 2, "gpus_per_node": 2, "gpu": "a100-sxm-80gb", **memory}
    spec = PLAN_OF_FOUR | {"hardware": hardware, "offload": "params"}
    found = estimate_analytic(
        make_plan(load_spec(spec), from_mapping(BIG)), device="a100-sxm-80gb", limit_bytes=2**34
    )
    assert found.host is not None
    assert found.host.held_bytes == 2 * found.worst.host_bytes
    assert found.host.is_stated == bool(memory)
    assert found.fits is fits
    assert any(words in line for line in memory_to_text(found, ""))
    assert memory_to_json(found)["host"]["held_bytes"] == found.host.held_bytes
