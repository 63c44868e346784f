"""Stages that do the same are played once, and what the others do is that under other names.

Which seeded bug would this catch? Stages that are taken for alike although blocks run again in one
and not in the other; names that are not put for the first one's (`test_a_mistake_shows` makes such
mistakes); modules of two names that are taken for modules of one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from meshplan.memory.analytic import microbatches, stages
from meshplan.memory.analytic.estimate import analytic_log_of_rank
from meshplan.memory.decoder.tp_ops import TpPlanOnTape
from meshplan.memory.log.events import EventLog, Term
from meshplan.memory.log.microbatch import MicrobatchTrace
from meshplan.memory.repeat import equal_stages
from meshplan.memory.replay import replay
from meshplan.memory.stages import microbatch, schedule_pass
from meshplan.memory.stages.tape import StageTape
from meshplan.memory.tape.op import Tape, TapeOp
from meshplan.plan.plan import Plan
from tests.helpers import told
from tests.memory.test_analytic_stages import (
    DEEP,
    FUSED,
    GPT2,
    LLAMA,
    MIXED,
    MIXTRAL,
    QWEN,
    SPREAD,
    decided,
    plan_of,
)

TWELVE = {"num_hidden_layers": 12}
SOME_AGAIN = {"rules": [{"match": "model.layers.{4..6}", "activation_checkpointing": "full"}]}
BATCH = {"batch": {"micro": 8, "seq_len": 64}}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "interleaved": (LLAMA | TWELVE, plan_of("Interleaved1F1B", 2, 4, virtual=6, **MIXED)),
    "some run again": (LLAMA | TWELVE, plan_of(
        "Interleaved1F1B", 2, 4, virtual=6, **MIXED, **SOME_AGAIN)),
    "some are dense": (QWEN | TWELVE, plan_of("1F1B", 4, 8)),
    "experts": (MIXTRAL | {"num_hidden_layers": 8}, plan_of("1F1B", 4, 8, **MIXED)),
    "halves": (DEEP, plan_of("InterleavedZeroBubble", 2, 4, virtual=4, **MIXED)),
    "partly in halves": (DEEP, plan_of("DualPipeV", 4, 8)),
    "gpt2, ddp": (GPT2 | {"n_layer": 8}, plan_of(
        "1F1B", 4, 8, mesh={"dp_replicate": 2}, strategy="ddp")),
}  # fmt: skip


def logs_of(plan: Plan) -> list[EventLog]:
    """Of one rank of each place along pp."""
    count, batch = plan.mesh.world_size, told.samples(plan) // plan.accumulate
    works = microbatches.analytic_microbatches(
        plan, batch, told.LENGTH, is_cuda=False, in_place=False
    )
    ranks = range(0, count, count // plan.mesh.size("pp"))
    return [replay(works.of_rank(rank), plan, "adamw", rank=rank) for rank in ranks]


def play_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """No stage is like another one."""
    number = itertools.count()

    def apart(*args: Any) -> equal_stages.StageSignature:
        outline = equal_stages.outline_of(*args)
        return replace(outline, shape=(outline.shape, next(number)))

    monkeypatch.setattr(stages, "outline_of", apart)


@pytest.mark.parametrize("case", CASES)
def test_alike_stages_are_played_once_and_named_apart(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = decided(*CASES[case])
    played: list[StageTape] = []
    play = stages.StageWorks._play

    def noted(self: Any, part: StageTape, *, in_halves: bool) -> Any:
        played.append(part)
        return play(self, part, in_halves=in_halves)

    monkeypatch.setattr(stages.StageWorks, "_play", noted)
    shared = logs_of(plan)
    num_shared = len(played)
    play_each(monkeypatch)
    assert logs_of(plan) == shared
    assert num_shared < len(played) - num_shared


def _forget_what_runs_again() -> tuple[Any, str, Any]:
    def less(part: Any, order: Any = None) -> equal_stages.StageSignature:
        return equal_stages.outline_of(replace(part, tape=replace(part.tape, spans=[])), order)

    return stages, "outline_of", less


def _rename_nothing() -> tuple[Any, str, Any]:
    return microbatch.StageWork, "renamed", lambda self, names: self


@pytest.mark.parametrize("make", [_forget_what_runs_again, _rename_nothing])
def test_a_mistake_shows(
    make: Callable[[], tuple[Any, str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = decided(*CASES["some run again"])
    right = logs_of(plan)
    monkeypatch.setattr(*make())
    assert logs_of(plan) != right


def test_of_names_only_which_are_the_same_is_compared() -> None:
    tape = Tape()
    x = tape.value(8)
    tape.before[x] = Term.INPUTS
    y = tape.value(8)
    tape.add(TapeOp("mm", "a.0.up", (x,), (y,), parameters=(("a.0.up.weight", 4),)))

    def named(*names: str) -> equal_stages.StageSignature:
        row = tape.rows[0]._replace(module=names[0], parameters=((names[1], 4),))
        return equal_stages.outline_of(StageTape(replace(tape, rows=[row]), (), ()))

    one, other = named("a.0.up", "a.0.up.weight"), named("a.1.up", "a.1.up.weight")
    assert one.shape == other.shape
    assert one.names == ("", "a.0.up", "a.0.up.weight")
    assert other.names == ("", "a.1.up", "a.1.up.weight")
    assert named("a.0.up", "a.0.up").shape != one.shape
    assert named("", "a.0.up.weight").shape != one.shape


NEAR: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "interleaved": (FUSED | TWELVE, plan_of(
        "Interleaved1F1B", 3, 4, virtual=4, **BATCH, **MIXED, **SOME_AGAIN)),
    "experts": (MIXTRAL | {"num_hidden_layers": 8, "head_dim": 16}, plan_of(
        "1F1B", 4, 8, **BATCH, **SPREAD, **MIXED)),
    "halves": (FUSED, plan_of("InterleavedZeroBubble", 2, 4, virtual=4, **BATCH)),
    "a cut sequence": (FUSED, plan_of(
        "1F1B", 4, 8, mesh={"tp": 2}, tp_plan="auto", sequence_parallel=True, **BATCH)),
}  # fmt: skip


def one_by_one(plan: Plan) -> list[EventLog]:
    count = plan.mesh.world_size
    ranks = range(0, count, count // plan.mesh.size("pp"))
    return [analytic_log_of_rank(plan, rank, device="h100-sxm-80gb") for rank in ranks]


@pytest.mark.parametrize("case", NEAR)
def test_of_one_rank_only_blocks_near_it_are_told(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where blocks of its own are left out too, that shows."""
    plan = decided(*NEAR[case])
    found, num = one_by_one(plan), len(plan.graph.blocks())
    monkeypatch.setattr(microbatches, "_near", lambda *_: set(range(num)))
    assert one_by_one(plan) == found
    monkeypatch.setattr(microbatches, "_near", lambda *_: {0, num - 1})
    assert one_by_one(plan) != found


def test_what_is_whole_is_so_by_its_name_or_by_that_of_its_kind() -> None:
    here, there = "model.layers.0.attn.sinks", "model.layers.1.attn.sinks"
    styled = TpPlanOnTape(tp=2, whole=frozenset({here}))
    assert [styled.is_whole(name) for name in (here, there)] == [True, False]
    assert [styled.of_any_block().is_whole(name) for name in (here, there)] == [True, True]


def test_a_rank_of_stages_knows_when_its_gradients_are_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """None before it is born; each of several microbatches adds to it later."""
    ended: list[MicrobatchTrace] = []
    end = schedule_pass.Pass.end

    def note(self: schedule_pass.Pass, split_of: Any) -> MicrobatchTrace:
        ended.append(end(self, split_of))
        return ended[-1]

    monkeypatch.setattr(schedule_pass.Pass, "end", note)
    analytic_log_of_rank(decided(LLAMA, plan_of("1F1B", **BATCH)), 0, device="cpu")
    (work, *_) = ended
    births: dict[int, int] = {}
    for number, event in enumerate(work.log.events):
        births.setdefault(event.storage, number)
    assert work.gradients
    assert work.ready.keys() == work.gradients.keys()
    assert all(births[each] < work.ready[fqn] for fqn, each in work.gradients.items())
