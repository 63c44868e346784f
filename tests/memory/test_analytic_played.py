"""What was played for one plan serves others, and changes nothing that they are told.

Which seeded bug would this catch? Stages taken to be alike that are of other sizes, recompute
otherwise, run their backward in halves or are called otherwise; a stage played once more.
"""

from __future__ import annotations

from typing import Any

import pytest

from meshplan.memory.analytic import stages
from meshplan.memory.analytic.estimate import analytic_log_of_rank
from meshplan.memory.analytic.stages import Played
from meshplan.plan.plan import Plan
from tests.memory.test_analytic_stages import AGAIN, FUSED, GPT2, MIXED, QWEN, decided, plan_of

BATCH = {"micro": 8, "seq_len": 64}
SHORT = {"micro": 4, "seq_len": 32}
SELECTIVE = {"activation_checkpointing": "selective"}
SOME = {"rules": [{"match": "model.layers.{2..5}", **AGAIN}]}
PLANS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    (FUSED, plan_of("1F1B", batch=BATCH, **MIXED)),
    (FUSED, plan_of("Interleaved1F1B", virtual=2, batch=BATCH, **MIXED)),
    (FUSED, plan_of("Interleaved1F1B", virtual=2, batch=BATCH, **MIXED, **AGAIN)),
    (FUSED, plan_of("Interleaved1F1B", virtual=2, batch=BATCH, **MIXED, **SOME)),
    (FUSED, plan_of("Interleaved1F1B", virtual=2, batch=BATCH, **MIXED, **SELECTIVE)),
    (FUSED, plan_of("InterleavedZeroBubble", virtual=2, batch=BATCH, **MIXED)),
    (FUSED, plan_of("Interleaved1F1B", virtual=4, batch=BATCH, **MIXED)),
    (FUSED, plan_of("Interleaved1F1B", virtual=2, batch=SHORT, **MIXED)),
    (FUSED, plan_of("Interleaved1F1B", virtual=2, batch=BATCH)),
    (FUSED | {"intermediate_size": 96}, plan_of("1F1B", batch=BATCH, **MIXED)),
    (QWEN | {"head_dim": 16}, plan_of("1F1B", batch=BATCH, **MIXED)),
    (GPT2 | {"n_embd": 64}, plan_of("1F1B", batch=BATCH, **MIXED)),
)


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    return [decided(*case) for case in PLANS]


def ranks_of(plan: Plan) -> tuple[int, int]:
    return 0, plan.mesh.world_size - 1


def test_nothing_changes(plans: list[Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where few are kept."""
    alone = [
        [analytic_log_of_rank(plan, r, device="cuda") for r in ranks_of(plan)] for plan in plans
    ]
    for most in (stages._MOST_PLAYED, 2):
        monkeypatch.setattr(stages, "_MOST_PLAYED", most)
        played = Played()
        for _ in range(2):
            for plan, logs in zip(plans, alone, strict=True):
                for rank, log in zip(ranks_of(plan), logs, strict=True):
                    assert analytic_log_of_rank(plan, rank, device="cuda", played=played) == log
            assert len(played._known) <= most


def test_a_stage_is_played_once(plans: list[Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    count, play = [0], stages.play_stage

    def counted(*args: Any, **more: Any) -> Any:
        count[0] += 1
        return play(*args, **more)

    monkeypatch.setattr(stages, "play_stage", counted)
    played = Played()
    for plan in plans[1:4]:
        for rank in ranks_of(plan):
            analytic_log_of_rank(plan, rank, device="cuda", played=played)
    # First, between and last; the same recomputed; of some blocks only the last stage's are not.
    before = count[0]
    assert before <= 7
    for rank in ranks_of(plans[3]):
        analytic_log_of_rank(plans[3], rank, device="cuda", played=played)
    assert count[0] == before
