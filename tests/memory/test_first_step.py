"""The first step, which comes before the one that is estimated: what the allocator reserved in it.

Which seeded bug would this catch? States that are there from the beginning, a storage of the first
step that is never freed, a step that begins with other storages than it was traced with.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshplan.memory.analytic.estimate import analytic_log_of_rank
from meshplan.memory.answer.reserved import reserve_from_start
from meshplan.memory.log.allocator import reserve
from meshplan.memory.log.columns import Columns
from meshplan.memory.log.driver import with_workspaces
from meshplan.memory.log.events import Event, EventLog, Storage, Term
from meshplan.memory.log.first_step import with_first_step
from meshplan.spec.reader import load_spec
from tests.memory.test_analytic_stages import GPT2, QWEN, decided, plan_of

MIB = 1 << 20
SPEC = load_spec({"version": 1})
PHASES = ("before", "forward", "backward", "step")


def changes_of(columns: Columns) -> list[tuple[int, ...]]:
    return [tuple(event) for event in columns.T.tolist()]


def sizes_after(changes: Any) -> dict[int, int]:
    sizes: dict[int, int] = {}
    for delta, number, _ in changes:
        sizes[number] = sizes.get(number, 0) + delta
    return {number: size for number, size in sizes.items() if size}


def test_states_take_the_place_of_activations() -> None:
    """A block of 40 MiB is split for two states of 16 MiB; the next step needs another one."""
    storages = (Storage(Term.PARAMETERS), Storage(Term.OPTIMIZER), Storage(Term.OPTIMIZER),
                Storage(Term.ACTIVATIONS))  # fmt: skip
    changes = (
        *(Event(16 * MIB, number, 0) for number in range(3)),
        Event(40 * MIB, 3, 1), Event(-40 * MIB, 3, 2),
        Event(MIB // 2, 3, 3), Event(-MIB // 2, 3, 3),
    )  # fmt: skip
    log = EventLog(storages, changes, PHASES)
    assert reserve(log).reserved_bytes == (3 * 16 + 40 + 2) * MIB
    assert reserve_from_start(log, SPEC).reserved_bytes == (16 + 2 * 40 + 2) * MIB
    assert reserve_from_start(log, SPEC).requested_bytes == reserve(log).requested_bytes
    adagrad = load_spec({"version": 1, "optimizer": "adagrad"})  # Makes its states beforehand.
    assert reserve_from_start(log, adagrad) == reserve(log)


@pytest.mark.parametrize(
    "ops", [("aten.add.Tensor", "aten.mm.default", "aten.addmm.default"), ("mmul", "mm", "addmm")]
)
def test_a_workspace_is_born_after_the_first_product_of_its_thread(ops: tuple[str, ...]) -> None:
    """With operators named as by a trace, and as by a log that is computed from sizes."""
    storages = (Storage(Term.WORKSPACES), Storage(Term.WORKSPACES), Storage(Term.OPTIMIZER),
                *[Storage(Term.ACTIVATIONS, op) for op in ops])  # fmt: skip
    before = [Event(32 * MIB, 0, 0), Event(32 * MIB, 1, 0), Event(8, 2, 0)]
    forward = [Event(1, 3, 1), Event(2, 4, 1), Event(-1, 3, 1)]
    backward = [Event(3, 5, 2), Event(-2, 4, 2), Event(-3, 5, 2)]
    step = [Event(1, 3, 3), Event(-1, 3, 3)]
    log = EventLog(storages, (*before, *forward, *backward, *step), PHASES)
    assert changes_of(with_first_step(log)) == [
        *forward[:2], before[0], *forward[2:], *backward[:1], before[1], *backward[1:],
        before[2], *step, *forward, *backward, *step,
    ]  # fmt: skip


@pytest.mark.parametrize("config", [QWEN, GPT2])
def test_steps_computed_from_a_config_have_products_too(config: dict[str, Any]) -> None:
    stages = plan_of("1F1B", batch={"micro": 8, "seq_len": 64})
    log = with_workspaces(analytic_log_of_rank(decided(config, stages), 0, device="cuda"), "cuda")
    changes = changes_of(with_first_step(log))
    births = [at for at, event in enumerate(changes) if event[1] >= len(log.storages) - 2]
    for at in births:
        before = log.storages[changes[at - 1][1]].op
        assert before in ("mm", "addmm"), before
    assert [log.phases[changes[at][2]] for at in births] == ["before", "before"]
    assert len(births) == 2


def test_a_step_without_states_stays_as_it_is() -> None:
    log = EventLog((Storage(Term.PARAMETERS),), (Event(MIB, 0, 0),), PHASES)
    assert with_first_step(log) is log.columns


@st.composite
def steps(draw: st.DrawFn) -> EventLog:
    """A step in which some of what exists before it may be replaced by storages of equal size."""
    terms = draw(st.lists(st.sampled_from([Term.PARAMETERS, Term.OPTIMIZER]), min_size=1))
    storages = [Storage(term) for term in terms]
    sizes = [draw(st.integers(1, 40)) * MIB // 2 for _ in terms]
    changes = [Event(size, number, 0) for number, size in enumerate(sizes)]
    replaced = False
    for phase in (1, 2, 3):
        for _ in range(draw(st.integers(0, 4))):
            number, size = len(storages), draw(st.integers(1, 40)) * MIB // 2
            storages.append(Storage(Term.ACTIVATIONS))
            changes += [Event(size, number, phase), Event(-size, number, phase)]
        if terms[0] is Term.PARAMETERS and not replaced and draw(st.booleans()):
            changes += [Event(sizes[0], len(storages), phase), Event(-sizes[0], 0, phase)]
            storages.append(Storage(Term.PARAMETERS))
            replaced = True
    return EventLog(tuple(storages), tuple(changes), PHASES)


@given(steps())
def test_the_step_begins_with_what_it_was_traced_with(log: EventLog) -> None:
    begin = sum(phase == 0 for _, _, phase in log.changes)
    if with_first_step(log) is log.columns:
        return
    changes, step = changes_of(with_first_step(log)), [*log.changes[begin:]]
    assert changes[len(changes) - len(step) :] == step
    first = changes[: len(changes) - len(step)]
    assert sizes_after(first) == sizes_after(log.changes[:begin])
    seen: dict[int, int] = {}
    for delta, number, _ in changes:
        seen[number] = seen.get(number, 0) + delta
        assert seen[number] >= 0
    whole = reserve(log, from_first=True)
    assert whole.requested_bytes == log.peak.live_bytes
    assert whole.reserved_bytes >= log.pooled_bytes


def traced(name: str) -> tuple[int, int, int]:
    """(reserved after a first step by rule, as traced from the first step on, without one)."""
    import torch

    from meshplan.runtime.fake_step import step as stepping
    from meshplan.runtime.fake_step.memory_tracker import MemoryTracker
    from tests.gpu import memory

    gpu = "h200-sxm-141gb"
    model, plan, case, samples = memory._decided(name, "full")
    with torch.device("meta"):
        inputs, targets = case.batch(samples)
    logs, watch, forget, calls = [], stepping.watch_steps, MemoryTracker.forget, [0]

    def forget_once(tracker: MemoryTracker) -> None:
        calls[0] += 1
        if calls[0] == 1:
            forget(tracker)

    for count, forgets in ((1, forget), (1, forget_once)):
        MemoryTracker.forget = forgets  # type: ignore[method-assign]
        stepping.watch_steps = lambda *a, n=count, **k: watch(*a, **{**k, "count": n})
        try:
            log = stepping.fake_step(
                model, plan, inputs, targets, case.loss, memory._optimizer(plan), device=gpu
            )
        finally:
            MemoryTracker.forget, stepping.watch_steps = forget, watch  # type: ignore[method-assign]
        logs.append(log)
    return (
        reserve_from_start(logs[0], SPEC).reserved_bytes,
        reserve(logs[1]).reserved_bytes,
        reserve(logs[0]).reserved_bytes,
    )


@pytest.mark.parametrize(
    "name",
    [
        "full_shard, recomputed",
        pytest.param("zero2", marks=pytest.mark.wide),
        pytest.param("full_shard, accumulated", marks=pytest.mark.wide),
        pytest.param("BERT, full_shard", marks=pytest.mark.wide),
    ],
)
def test_the_rule_reserves_what_a_traced_first_step_reserves(
    apart: ProcessPoolExecutor, name: str
) -> None:
    by_rule, as_traced, without = apart.submit(traced, name).result()
    assert by_rule == pytest.approx(as_traced, rel=2e-3)
    assert abs(without / as_traced - 1) > 0.02
