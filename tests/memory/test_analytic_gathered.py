"""What a rank of cp holds that gathers keys and values, told from a config, is what a trace shows.

Which seeded bug would this catch? A mask that is let go of before backward, keys of a part instead
of the whole, a gradient of the part instead of the whole, another rank's chunks: peaks of some
phase would be off (`test_a_mistake_shows` makes such mistakes).
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from meshplan.errors import PlanError
from meshplan.memory.analytic import microbatches
from meshplan.memory.analytic.estimate import estimate_analytic
from meshplan.memory.answer.rank_classes import equal_ranks
from meshplan.memory.decoder import cp_all_gather
from meshplan.memory.log.events import EventLog
from meshplan.memory.replay.optimizer import is_uniform
from meshplan.model.blueprint import from_mapping
from meshplan.plan.plan import Plan, make_plan
from meshplan.spec.reader import load_spec
from tests.helpers import told
from tests.helpers.analytic import analytic_log
from tests.memory.test_analytic_stages import AGAIN, GPT2, LLAMA, MIXED, MIXTRAL

FEW = 24
"""Bytes: what ranks tell each other of a forward, and the seeds of a kernel's random numbers."""
HEADS = LLAMA | {"head_dim": 16}
ALIKE = HEADS | {"num_key_value_heads": 4}
TWO = {"mesh": {"cp": 2}}
DATA = {"mesh": {"dp_shard": 2, "cp": 2}}
IN_ORDER = {"context": {"attention": "all_gather", "balance": False}}
CPU, H100, A100 = "cpu", "h100-sxm-80gb", "a100-sxm-80gb"
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "alone": (LLAMA, TWO, CPU),
    "over four": (ALIKE, {"mesh": {"cp": 4}}, CPU),
    "in order": (LLAMA, TWO | IN_ORDER, CPU),
    "bf16": (LLAMA, DATA | MIXED, CPU),
    "recomputed": (LLAMA, DATA | MIXED | AGAIN, CPU),
    "selective": (LLAMA, TWO | {"activation_checkpointing": "selective"}, CPU),
    "gpt2": (GPT2, TWO, CPU),
    "mixtral": (MIXTRAL, TWO | MIXED, CPU),
    "tp": (ALIKE, {"mesh": {"cp": 2, "tp": 2}, "tp_plan": "hf"}, CPU),
    "cuDNN, grouped queries": (HEADS, TWO | MIXED, H100),
    "cuDNN, in order": (HEADS, TWO | MIXED | IN_ORDER, H100),
    "cuDNN, recomputed": (HEADS, TWO | MIXED | AGAIN, H100),
    "memory-efficient": (ALIKE, TWO | MIXED, A100),
    "memory-efficient, in float32": (ALIKE, TWO, A100),
}


def spec_of(more: dict[str, Any]) -> dict[str, Any]:
    return {"version": 1, "context": {"attention": "all_gather"}} | more


def decided(config: dict[str, Any], more: dict[str, Any]) -> Plan:
    return make_plan(load_spec(spec_of(more)), from_mapping(config))


def log_of(plan: Plan, rank: int, device: str = CPU) -> EventLog:
    """As the trace on CPUs, or as it imagines another device, shows it."""
    return analytic_log(
        plan, batch=2, seq_len=told.LENGTH, rank=rank, is_cuda=device != CPU, in_place=False,
        foreach=is_uniform(plan.assignment), device=device, has_host=device != CPU,
    )  # fmt: skip


@pytest.mark.wide
@pytest.mark.parametrize("case", CASES)
def test_a_told_rank_is_the_traced_one(apart: ProcessPoolExecutor, case: str) -> None:
    config, more, device = CASES[case]
    plan = decided(config, more)
    ranks = tuple(group[0] for group in equal_ranks(plan.assignment))
    assert len(ranks) == plan.mesh.size("cp")
    world = plan.mesh.world_size
    answer = apart.submit(told.traced, config, spec_of(more), world, ranks, device).result()
    assert isinstance(answer, tuple), answer
    digest, logs = answer
    assert plan.digest() == digest
    kernels = 1 if device == CPU else 2 * config.get("num_hidden_layers", 4)
    near = FEW * kernels
    for rank, theirs in zip(ranks, logs, strict=True):
        if case == "memory-efficient, in float32" and not rank:
            continue  # Without a mask the kernel pads its figures too, of so short a chunk.
        mine = log_of(plan, rank, device)
        assert mine.peak.live_bytes == pytest.approx(theirs.peak.live_bytes, abs=near)
        assert mine.by_phase.keys() == theirs.by_phase.keys()
        for phase, figures in theirs.by_phase.items():
            assert mine.by_phase[phase] == pytest.approx(figures, abs=near), phase


def _forget_the_mask(w: Any, q: int, k: int, v: int, *args: Any) -> Any:
    *_, before = args
    return w.attention(q, k, v, 1, args[0]), before


def _slice_nothing(w: Any, x: int, stop: int, num: int) -> int:
    return x


def _gather_nothing(w: Any, x: int, own: Any, ranks: int) -> int:
    return w.scale(x, "all_gather")


@pytest.mark.parametrize(
    "mistake",
    [("_masked", _forget_the_mask), ("_up_to", _slice_nothing), ("_gather", _gather_nothing)],
)
def test_a_mistake_shows(mistake: tuple[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    wide = ALIKE | {"intermediate_size": 16, "vocab_size": 16, "num_hidden_layers": 2}
    plan = decided(wide | {"head_dim": 96}, TWO)
    right = log_of(plan, 1).by_phase
    monkeypatch.setattr(
        microbatches, "LAST", microbatches.LastPlayed(most=2)
    )  # Nothing that was played without it.
    monkeypatch.setattr(cp_all_gather, *mistake)
    assert log_of(plan, 1).by_phase != right


def test_ranks_have_other_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, the last one has the longest mask; each stands for itself."""
    plan = decided(LLAMA, {"mesh": {"dp_shard": 2, "cp": 4}} | IN_ORDER)
    assert equal_ranks(plan.assignment) == tuple((r, r + 4) for r in range(4))
    peaks = [log_of(plan, rank).peak.live_bytes for rank in range(4)]
    assert peaks == sorted(peaks)
    assert peaks[-1] > peaks[0]
    exchanged = decided(ALIKE, {"mesh": {"cp": 4}, "context": {"attention": "all_to_all"}})
    assert equal_ranks(exchanged.assignment) == ((0, 1, 2, 3),)


def test_the_fullest_rank_is_reported() -> None:
    batch = {"micro": 1, "seq_len": 4096}
    plan = decided(HEADS | {"max_position_embeddings": 4096}, TWO | MIXED | IN_ORDER | {
        "batch": batch})  # fmt: skip
    found = estimate_analytic(plan, device=H100, limit_bytes=None)
    assert [group.ranks for group in found.groups] == [(0,), (1,)]
    assert found.worst.ranks == (1,)


@pytest.mark.parametrize(
    ("config", "more", "device"), [(HEADS, MIXED, A100), (HEADS, {}, H100), (HEADS, MIXED, "cuda")]
)
def test_a_mask_that_no_kernel_takes_is_refused(
    config: dict[str, Any], more: dict[str, Any], device: str
) -> None:
    with pytest.raises(PlanError, match="no fused kernel"):
        log_of(decided(config, TWO | more), 0, device)


def test_a_device_takes_masks_as_the_trace_imagines_it() -> None:
    """The two tables of devices are one."""
    from meshplan.runtime.fake_step.cuda_kernels import kernels_of

    for device in (*cp_all_gather.CUDNN, "a100", "l40s", "v100", "cuda", "rtx", "a10"):
        assert kernels_of(f"{device}-sxm").prefers_cudnn == (device in cp_all_gather.CUDNN)
    assert replace(kernels_of("h100"), prefers_cudnn=False) == kernels_of("a100")
