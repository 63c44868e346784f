"""A step composed from one traced microbatch has the bytes of the step traced whole.

`test_memory_exact` proves that the whole trace has the bytes of real processes. Which seeded bug
would this catch? Any rule of a wrapper that is left out, comes early or late, or pads otherwise:
`test_a_mistake_shows` makes such mistakes.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace as changed
from typing import Any

import pytest

from meshplan.errors import PlanError
from meshplan.memory import EventLog
from meshplan.memory.log.microbatch import MicrobatchTrace
from meshplan.memory.replay import gather, loops, optimizer, part, reduction, replay, shards
from tests.helpers import replayed
from tests.runtime.fake_step.test_memory_exact import CASES, FULL

REFUSED = {
    "stages, ZBV": "a schedule that splits the backward",
}
IN_PARTS = ("full_shard, muon", "zero1, muon")
"""What DTensor gathers for products of matrices in parts."""
CALLED_ALIKE = (
    "full_shard, bf16", "full_shard, fp16, clipped", "ddp", "zero1", "tp", "tp x full_shard",
    "loss in chunks",
)  # fmt: skip
"""Where each byte of the peak is for the same whoever tells it."""
DEFAULT = (
    "full_shard of odd sizes", "zero1, accumulated", "full_shard, fp16, clipped",
    "hybrid_shard, accumulated, bf16", "ddp, accumulated", "tp x full_shard, sequence",
    "stages x full_shard",
)  # fmt: skip
"""One of each kind; the others are of the wide run."""


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if case in DEFAULT else [pytest.mark.wide])
        for case, (_, _, _, *how) in CASES.items()
        if case not in {*REFUSED, *IN_PARTS} and set(how) <= {*optimizer.OPTIMIZERS, *loops.LOOPS}
    ],
)
def test_the_composed_step_is_the_traced_step(apart: ProcessPoolExecutor, case: str) -> None:
    model, world, plan, *rest = CASES[case]
    how = rest[0] if rest else "adamw"
    ranks = (world - 1,) if case in DEFAULT else (0, world - 1)
    for rank in ranks:
        answer = apart.submit(replayed.both, model, plan, how, world, rank).result()
        assert isinstance(answer, tuple), answer
        whole, composed = answer
        assert composed[:2] == whole[:2]
        if case in CALLED_ALIKE:
            assert composed[2] == whole[2]


@pytest.mark.parametrize(
    ("special", "plan"),
    [
        (-1, FULL),
        pytest.param(
            -1,
            FULL | {"activation_checkpointing": {"mode": "full", "every": 2}},
            marks=[pytest.mark.wide],
        ),
        (5, FULL),  # This block is left out of the short model, and does more.
        pytest.param(-1, {"version": 1, "strategy": "ddp"}, marks=[pytest.mark.wide]),
    ],
)
def test_blocks_that_are_alike_are_traced_a_few_times(
    apart: ProcessPoolExecutor, special: int, plan: dict[str, Any]
) -> None:
    answer = apart.submit(replayed.deep, special, plan).result()
    assert isinstance(answer, tuple), answer
    count, short, whole = answer
    # Two microbatches each: five periods, or all after the numbers were found to be looked at.
    kept = 10 if "activation_checkpointing" in plan else 5
    assert count == 2 * (kept + (14 if special >= 0 else 0))
    assert short == whole


def test_blocks_that_gather_the_sequence_are_traced_a_few_times(
    apart: ProcessPoolExecutor,
) -> None:
    """Where tp gathers and shards activations is stated by names of modules inside of blocks."""
    plan = {
        "version": 1, "mesh": {"dp_shard": 2, "tp": 2}, "strategy": "full_shard",
        "tp_plan": "auto", "sequence_parallel": True,
    }  # fmt: skip
    answer = apart.submit(replayed.deep_in_sequence, plan).result()
    assert isinstance(answer, tuple), answer
    count, short, whole = answer
    # The first block alone shards what enters it, and the last one gathers what it returns.
    assert count == 2 * (5 + 2)
    assert short == whole


@pytest.mark.parametrize("more", [{}, {"sequence_parallel": True}, {"loss_parallel": True}])
def test_microbatches_on_one_copy_are_those_that_run_alone(
    apart: ProcessPoolExecutor, more: dict[str, bool]
) -> None:
    """Whatever tp finds out when it first runs, or runs for a shape that is new, is not counted."""
    plan = {"version": 1, "mesh": {"dp_shard": 2, "tp": 2}, "tp_plan": "auto", **more}
    answer = apart.submit(replayed.counted_after, "bert", plan, 4).result()
    assert not isinstance(answer, str), answer
    assert len(answer) == 4
    for one, alone in answer:
        assert one == alone


@pytest.mark.parametrize(
    "case",
    [
        "full_shard",  # Computed as it is stored: what is gathered and reduced is of one size.
        pytest.param("full_shard, all in bf16", marks=pytest.mark.wide),
        pytest.param("hybrid_shard, accumulated, bf16", marks=pytest.mark.wide),
        pytest.param("a mixture", marks=pytest.mark.wide),
    ],
)
def test_buffers_are_made_on_the_streams_of_torch(apart: ProcessPoolExecutor, case: str) -> None:
    """What is reserved depends on it: the allocator keeps a pool for each stream."""
    model, world, plan, *_ = CASES[case]
    answer = apart.submit(replayed.on_streams, model, plan, world).result()
    assert isinstance(answer, tuple), answer
    whole, composed = answer
    assert {stream for _, stream, _ in whole} >= {0, 1, 2}
    assert composed == whole


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_rule_is_refused_by_name(case: str) -> None:
    model, world, plan, *_ = CASES[case]
    _, found, _ = replayed.decided(model, plan, world)
    nothing = MicrobatchTrace(EventLog((), (), ("before",)), (), {})
    with pytest.raises(PlanError, match=REFUSED[case]):
        replay(nothing, found, "adamw")
    with pytest.raises(PlanError, match="sophia"):
        replay(nothing, found, "sophia")


@pytest.mark.parametrize("case", IN_PARTS)
def test_matrices_in_parts_are_refused(case: str) -> None:
    model, world, plan, how = CASES[case]
    _, found, _ = replayed.decided(model, plan, world)
    with pytest.raises(PlanError, match="what DTensor gathers when the optimizer muon steps"):
        replay(MicrobatchTrace(EventLog((), (), ("before",)), (), {}), found, how)


def _instead(owner: Any, name: str, wrong: Any) -> Callable[[], None]:
    right = getattr(owner, name)
    setattr(owner, name, wrong)
    return lambda: setattr(owner, name, right)


def _keep_last_gathered() -> Callable[[], None]:
    return _instead(gather.Gathering, "end_forward", lambda self: setattr(self, "last", None))


def _free_before_copying_out() -> Callable[[], None]:
    wait = gather.Gathering.wait

    def early(self: gather.Gathering, unit: Any) -> None:
        self.end_forward()
        wait(self, unit)

    return _instead(gather.Gathering, "wait", early)


def _gather_without_padding() -> Callable[[], None]:
    make = shards._shard

    def exact(*args: Any) -> shards.Shard:
        out = make(*args)
        return changed(out, padded_numel=out.grad_numel)

    return _instead(shards, "_shard", exact)


def _reduce_late() -> Callable[[], None]:
    return _instead(reduction.Reduction, "end_reduction", lambda self: None)


def _do_not_prefetch() -> Callable[[], None]:
    before = part.ReplayUnits.before_backward

    def alone(self: part.ReplayUnits, fqn: str) -> None:
        self.states[fqn].forward_positions.clear()
        before(self, fqn)

    return _instead(part.ReplayUnits, "before_backward", alone)


def _take_parameters_alone() -> Callable[[], None]:
    return _instead(optimizer, "_together", optimizer._alone)


def _let_go_of_the_last_gradient() -> Callable[[], None]:
    lay = reduction.Reduction._relayout

    def all_of_it(self: reduction.Reduction, *args: Any) -> tuple[list[int], list[int]]:
        laid, kept = lay(self, *args)
        return laid + kept, []

    return _instead(reduction.Reduction, "_relayout", all_of_it)


MISTAKES = {
    make.__name__: make
    for make in (
        _keep_last_gathered, _free_before_copying_out, _gather_without_padding, _reduce_late,
        _do_not_prefetch, _take_parameters_alone, _let_go_of_the_last_gradient,
    )
}  # fmt: skip


def test_a_mistake_shows(apart: ProcessPoolExecutor) -> None:
    """Each is seen in the figures of a model with odd sizes."""
    plan = FULL | {"rules": [{"match": "head", "unit": True}]}
    answer = apart.submit(replayed.with_mistakes, "odd", plan, 4, MISTAKES).result()
    assert isinstance(answer, tuple), answer
    right, wrong = answer
    assert {name for name, seen in wrong.items() if seen == right} == set()
