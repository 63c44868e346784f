"""What a backward in two halves leaves between them, told from a config, is what a trace shows.

Which seeded bug would this catch? What a first half noted is let go of too soon, what forward kept
ends with the first half, a received tensor goes while the graph holds it, a stage's neighbour on
the same rank is taken for another rank (`test_a_mistake_shows` makes such mistakes).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from meshplan.errors import PlanError
from meshplan.memory.analytic import stages
from meshplan.memory.analytic.microbatches import analytic_microbatches
from meshplan.memory.log.events import EventLog
from meshplan.memory.replay import part, replay
from meshplan.memory.stages import schedule_pass, split_backward
from meshplan.memory.tape import split_backward as on_tape
from meshplan.memory.tape.op import Grad, Tape, TapeOp
from meshplan.memory.tape.split_backward import split_backward_of
from tests.helpers import told
from tests.memory.test_analytic_stages import (
    CUT,
    DEEP,
    FUSED,
    GPT2,
    LLAMA,
    MIXED,
    MIXTRAL,
    MORE,
    QWEN,
    check_ranks,
    decided,
    log_of,
    plan_of,
)

TIED = {"tie_word_embeddings": True}
LOOPED = "InterleavedZeroBubble"
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "looped": (LLAMA, plan_of(LOOPED, virtual=2)),
    "looped, no data axes": (LLAMA, plan_of(LOOPED, virtual=2, mesh={})),
    "looped, accumulated, clipped": (LLAMA, plan_of(LOOPED, virtual=2, **MIXED, **MORE)),
    "looped, of 8 stages": (DEEP, plan_of(LOOPED, 4, 8, virtual=2, **MIXED)),
    "looped, uneven rounds": (DEEP, plan_of(LOOPED, 3, 8, virtual=2)),
    "looped, tied": (GPT2 | TIED, plan_of(LOOPED, virtual=2, **MORE)),
    "looped, tp, loss parallel": (LLAMA, plan_of(
        LOOPED, virtual=2, mesh=CUT, tp_plan="auto", loss_parallel=True)),
    "looped, qwen, some blocks dense": (QWEN, plan_of(LOOPED, virtual=2)),
    "looped, embeddings apart": (GPT2, plan_of(LOOPED, virtual=2, split=[
        ["transformer.wte"], ["transformer.wpe", "transformer.h.0"], ["transformer.h.1"],
        ["transformer.h.2"]])),
    "v, no data axes": (LLAMA, plan_of("ZBVZeroBubble", mesh={})),
    "v": (LLAMA, plan_of("ZBVZeroBubble", **MIXED)),
    "v, of 8 stages": (DEEP, plan_of("ZBVZeroBubble", 4, 8, **MIXED)),
    "v, gpt2": (GPT2, plan_of("ZBVZeroBubble", **MIXED)),
    "v, mixtral": (MIXTRAL, plan_of("ZBVZeroBubble", **MIXED)),
    "v, tp": (LLAMA, plan_of("ZBVZeroBubble", mesh=CUT, tp_plan="hf", **MIXED)),
    "v, gpt2, tp": (GPT2, plan_of("ZBVZeroBubble", mesh=CUT, tp_plan="auto", **MIXED)),
    "v, hybrid": (LLAMA, plan_of(
        "ZBVZeroBubble", mesh={"dp_replicate": 2, "dp_shard": 2}, **MIXED)),
    "v, zero1": (LLAMA, plan_of("ZBVZeroBubble", strategy="zero1", **MIXED, **MORE)),
    "v, zero2": (LLAMA, plan_of("ZBVZeroBubble", strategy="zero2", **MIXED, **MORE)),
    "v, ddp": (LLAMA, plan_of(
        "ZBVZeroBubble", mesh={"dp_replicate": 2}, strategy="ddp", **MIXED, **MORE)),
    "partly in halves": (LLAMA, plan_of("DualPipeV", **MIXED)),
    "partly in halves, of 8 stages": (DEEP, plan_of("DualPipeV", 4, 8)),
    "qwen3, norms of heads cut by tp": (LLAMA | {"model_type": "qwen3"}, plan_of(
        "ZBVZeroBubble", mesh=CUT, tp_plan="hf", **MIXED)),
}  # fmt: skip
DEFAULT = {"v": 2}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c in DEFAULT else [pytest.mark.wide]) for c in CASES]
)
def test_a_told_rank_is_the_traced_one(apart: ProcessPoolExecutor, case: str) -> None:
    check_ranks(apart, *CASES[case], DEFAULT.get(case))


def _note_nothing() -> tuple[Any, str, Any]:
    back = split_backward._SplitBackwardPlayer._back_to_inputs

    def without(self: Any, number: int) -> None:
        back(self, number)
        for storage in self._noted.get(number, ()):
            self._drop(storage)
            self._noted[number] = [self._allocate(0, self._tape.rows[number])]

    return split_backward._SplitBackwardPlayer, "_back_to_inputs", without


def _hold_no_operations() -> tuple[Any, str, Any]:
    """Beyond those that weights join at."""
    until = on_tape._until

    def fewer(tape: Tape, groups: Any) -> tuple[int, ...]:
        own = {number for group in groups for number in group.joins}
        return tuple(u if n in own else -1 for n, u in enumerate(until(tape, groups)))

    return on_tape, "_until", fewer


def _drop_what_was_received() -> tuple[Any, str, Any]:
    end = split_backward._SplitBackwardPlayer._end_received

    def early(self: Any, place: int) -> None:
        for each in sorted(self._ending):
            end(self, each)

    return split_backward._SplitBackwardPlayer, "_end_received", early


def _reduce_at_every_half() -> tuple[Any, str, Any]:
    return part, "splits_backward", lambda assignment: False


def _copy_from_neighbours() -> tuple[Any, str, Any]:
    forward = schedule_pass.Pass.forward

    def copied(self: Any, stage: int, m: int) -> None:
        forward(self, stage, m)
        if stage - 1 in self._parts:
            self._receive(stage, m, received=True)

    return schedule_pass.Pass, "forward", copied


MISTAKES: tuple[Callable[[], tuple[Any, str, Any]], ...] = (
    _note_nothing, _hold_no_operations, _drop_what_was_received,
    _reduce_at_every_half, _copy_from_neighbours,
)  # fmt: skip


@pytest.mark.parametrize("make", MISTAKES)
def test_a_mistake_shows(
    make: Callable[[], tuple[Any, str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = [decided(*CASES[case]) for case in ("v", "looped, no data axes")]

    def held() -> list[int]:
        logs = [log_of(plan, plan.mesh.world_size // 2) for plan in plans]
        return [size for log in logs for sizes in log.by_phase.values() for size in sizes]

    right = held()
    monkeypatch.setattr(*make())
    wrong = held()
    assert any(abs(a / b - 1) > 0.001 for a, b in zip(wrong, right, strict=True))


@pytest.mark.parametrize(
    ("schedule", "ranks", "count"),
    [("ZBVZeroBubble", 2, 24), *(
        pytest.param(schedule, ranks, count, marks=pytest.mark.wide)
        for schedule, ranks, count in (
            (LOOPED, 2, 24), (LOOPED, 4, 32), ("ZBVZeroBubble", 4, 32), ("DualPipeV", 3, 24)))],
)  # fmt: skip
def test_a_long_step_is_told_by_few_of_its_microbatches(
    schedule: str, ranks: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those between warming up and the end, and what is written in brief, make no peak."""
    more = {"virtual": 2} if schedule == LOOPED else {}
    config = FUSED | {"num_hidden_layers": 12} if ranks == 3 else FUSED
    plan = decided(config, plan_of(schedule, ranks, count, **more, **MIXED))

    def log(rank: int, *, summarised: bool = False) -> EventLog:
        works = analytic_microbatches(plan, 2 * count, told.LENGTH)
        return replay(works.of_rank(rank, summarised=summarised), plan, "adamw", rank=rank)

    for rank in range(0, 2 * ranks, 2):
        telling, brief = log(rank), log(rank, summarised=True)
        with monkeypatch.context() as patch:
            patch.setattr(stages, "num_to_simulate", lambda schedule, ranks, count: count)
            whole = log(rank)
        assert telling.peak.live_bytes == whole.peak.live_bytes == brief.peak.live_bytes
        assert telling.pooled_bytes == whole.pooled_bytes
        assert telling.by_phase["step"] == whole.by_phase["step"] == brief.by_phase["step"]
        assert len(brief.events) < 0.6 * len(whole.events)


def test_a_tied_table_on_one_rank_is_refused() -> None:
    plan = decided(LLAMA | TIED, plan_of("ZBVZeroBubble"))
    with pytest.raises(PlanError, match="that two stages of one rank share"):
        log_of(plan, 0)


def _tape(*rows: TapeOp) -> Tape:
    tape = Tape()
    for _ in range(6):
        tape.value(8)
    for row in rows:
        tape.add(row)
    return tape


def _by_name(module: str, fqn: str) -> tuple[int, int]:
    return ord(fqn[0]), 0


def test_weights_that_join_at_one_place_go_together() -> None:
    tape = _tape(
        TapeOp("table", "", (), (1,), parameters=(("c", 8),)),
        TapeOp("add", "", (0, 1), (2,), grads=(Grad(0, 0), Grad(1, 8))),
        TapeOp(
            "mm", "", (2,), (3,), keeps=(2,), grads=(Grad(2, 8),), parameters=(("a", 8), ("b", 8))
        ),
        TapeOp("send", "", (3,), (4,), grads=(Grad(3, 8),)),
    )
    found = split_backward_of(tape, (0,), _by_name)
    assert found is not None
    assert [(g.parameters, g.joins, g.rows) for g in found.groups] == [
        (("a", "b"), (2,), (2,)), (("c",), (1,), (1, 0))
    ]  # fmt: skip
    assert found.until == (1, 1, 0, -1)


def test_a_stage_that_received_nothing_is_not_split() -> None:
    tape = _tape(TapeOp("table", "", (0,), (1,), parameters=(("c", 8),)),
                 TapeOp("send", "", (1,), (2,), grads=(Grad(1, 8),)))  # fmt: skip
    assert split_backward_of(tape, (), _by_name) is None


@pytest.mark.parametrize(
    ("rows", "what"),
    [
        ((TapeOp("mm", "", (0,), (1,), grads=(Grad(0, 8),), parameters=(("a", 8),)),
          TapeOp("mm", "", (1,), (2,), grads=(Grad(1, 8),), parameters=(("a", 8),)),
          TapeOp("send", "", (2,), (3,), grads=(Grad(2, 8),))), "uses twice"),
        ((TapeOp("mm", "", (0,), (1,), grads=(Grad(0, 8),)),
          TapeOp("table", "", (), (2,), parameters=(("a", 8),)),
          TapeOp("send", "", (1, 2), (3,), grads=(Grad(1, 8), Grad(2, 8)))), "weights alone"),
    ],
)  # fmt: skip
def test_what_has_no_rule_is_refused(rows: tuple[TapeOp, ...], what: str) -> None:
    with pytest.raises(PlanError, match=what):
        split_backward_of(_tape(*rows), (0,), _by_name)
