"""A microbatch with some blocks run again, composed of two: none runs again, and all do.

Which seeded bug would this catch? Something that ends too early or too late where its maker runs
again and its user does not, a mark that moves, a gradient that is there at another time.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from meshplan.memory.log.events import Event, EventLog, Storage, Term
from meshplan.memory.log.microbatch import HookKind, HookPoint, MicrobatchTrace
from meshplan.memory.repeat.compose import Composer
from meshplan.plan.plan import make_plan
from meshplan.runtime.fake_step.costs import Ask, watch
from meshplan.runtime.trace.structure import graph_of
from meshplan.spec.reader import load_spec

BLOCKS = ("blocks.0", "blocks.1", "blocks.2", "blocks.3")


class _Block(nn.Module):
    """Keeps what it makes and what it is called with; the first makes what all are called with."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(16, width), nn.Linear(width, 16), None
        if width == 64:
            self.scale = nn.Linear(16, 16)

    def forward(
        self, x: torch.Tensor, shared: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if shared is None:
            assert self.scale is not None
            shared = torch.sigmoid(self.scale(x))
        return x + self.down(torch.tanh(self.up(x * shared))), shared


class _Shares(nn.Module):
    """What goes from block to block is kept by them, and by what follows them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(16, 16), nn.Linear(16, 8)
        self.blocks = nn.ModuleList([_Block(width) for width in (64, 48, 32, 48)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = first = torch.relu(self.stem(x))
        shared = None
        for block in self.blocks:
            x, shared = block(x, shared)
        return self.head(x * torch.exp(first))


@pytest.fixture(scope="module")
def works() -> dict[frozenset[str], MicrobatchTrace]:
    """By the blocks that run again, a microbatch as it is traced."""
    model = _Shares()
    plan = {"version": 1, "mesh": {"dp_shard": 2}, "strategy": "full_shard", "batch": {"micro": 64}}
    made = make_plan(load_spec(plan), graph_of(model))
    chosen = [
        frozenset(again)
        for count in range(len(BLOCKS) + 1)
        for again in itertools.combinations(BLOCKS, count)
    ]
    seen = watch(
        model, made, torch.zeros(64, 16), torch.zeros(64, dtype=torch.int64),
        nn.functional.cross_entropy, "h100-sxm-80gb", [Ask(64, again) for again in chosen],
    )  # fmt: skip
    return {again: each.trace for again, each in zip(chosen, seen, strict=True)}


def live(work: MicrobatchTrace, *, without: frozenset[int] = frozenset()) -> list[int]:
    """Bytes after each event, without those of some storages."""
    deltas = (0 if e.storage in without else e.delta for e in work.log.events)
    return list(itertools.accumulate(deltas))


def named(work: MicrobatchTrace) -> tuple[object, ...]:
    """Events, gradients and losses without the numbers of storages."""
    what = work.log.storages
    births: dict[int, int] = {}
    for number, event in enumerate(work.log.events):
        births.setdefault(event.storage, number)
    return (
        [(event.delta, births[event.storage], event.phase) for event in work.log.events],
        [(what[storage].op, what[storage].module) for storage in births],
        {fqn: births[storage] for fqn, storage in work.gradients.items()},
        [births[storage] for storage in work.losses],
    )


def test_what_is_composed_is_what_is_traced(works):
    """Event by event, or else between two that are told."""
    composer, sure = Composer(works[frozenset()], works[frozenset(BLOCKS)], BLOCKS), 0
    for again, truth in works.items():
        low, high = composer.trace(again)
        assert max(live(low)) <= max(live(truth)) <= max(live(high)), again
        for each in (low, high):
            assert live(each)[-1] == live(truth)[-1]
            assert [mark.kind for mark in each.hook_points] == [
                mark.kind for mark in truth.hook_points
            ]
        if low is high:
            sure += 1
            assert named(low) == named(truth)
            assert (low.hook_points, low.ready) == (truth.hook_points, truth.ready)
    # What the first block made and others keep ends in one of two ways where it runs again.
    assert sure == 12


def test_what_blocks_keep_adds_up(works):
    composer = Composer(works[frozenset()], works[frozenset(BLOCKS)], BLOCKS)
    kept, turn = composer.kept_bytes(), composer.backward_bytes()
    assert [kept[block][0] > kept[block][1] for block in BLOCKS] == [True, True, True, False]
    for again, truth in works.items():
        modes = [int(block in again) for block in BLOCKS]
        held = [kept[block][mode] for block, mode in zip(BLOCKS, modes, strict=True)]
        most = max(live(truth, without=frozenset(truth.gradients.values())))
        assert kept[""][0] + sum(held) <= most
        if len(again) in (0, len(BLOCKS)):
            turns = [turn[block][mode] for block, mode in zip(BLOCKS, modes, strict=True)]
            assert most == max(sum(held[:at]) + each for at, each in enumerate(turns))


class _Glued(nn.Module):
    """Blocks that keep other things than what they are called with."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(16, 16), nn.Linear(16, 8)
        self.blocks = nn.ModuleList([_Wave(), _Wave(), _Wave()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class _Wave(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.sin(2 * x))


def test_who_runs_again_keeps_what_it_is_called_with():
    """A product keeps what it reads, and so does a sine; a factor does not."""
    model, blocks = _Glued(), BLOCKS[:3]
    plan = {"version": 1, "mesh": {"dp_shard": 2}, "strategy": "full_shard", "batch": {"micro": 64}}
    made = make_plan(load_spec(plan), graph_of(model))
    asks = [Ask(64, frozenset()), Ask(64, frozenset(blocks))]
    plain, again = (
        seen.trace for seen in watch(
            model, made, torch.zeros(64, 16), torch.zeros(64, dtype=torch.int64),
            nn.functional.cross_entropy, "h100-sxm-80gb", asks,
        )
    )  # fmt: skip
    kept, size = Composer(plain, again, blocks).kept_bytes(), 64 * 16 * 4
    assert [kept[block] for block in blocks[:2]] == [(2 * size, size)] * 2


def _told(steps: Sequence[tuple[Any, ...]]) -> MicrobatchTrace:
    """Of (bytes, storage, phase) and (moment, unit)."""
    events: list[Event] = []
    marks: list[HookPoint] = []
    for step in steps:
        if isinstance(step[0], HookKind):
            marks.append(HookPoint(len(events), *step))
        else:
            events.append(Event(*step))
    storages = tuple(Storage(Term.ACTIVATIONS, "mm") for _ in range(4))
    return MicrobatchTrace(
        EventLog(storages, tuple(events), ("forward", "backward")), tuple(marks), {}
    )


def test_what_ends_behind_a_mark_where_all_run_again_ends_there():
    """The second block holds what the first one made until the model itself is through."""
    begin, done = HookKind.BEFORE_FORWARD, HookKind.AFTER_FORWARD
    back, end = HookKind.BEFORE_BACKWARD, HookKind.AFTER_BACKWARD
    before = [(8, 0, 0), (begin, ""), (begin, "a"), (16, 1, 0), (done, "a"), (begin, "b")]
    after = [
        (back, ""), (back, "b"), (-32, 2, 1), (end, "b"), (back, "a"), (64, 3, 1), (end, "a"),
        (HookKind.END_OF_BACKWARD, ""), (-64, 3, 1), (-8, 0, 1),
    ]  # fmt: skip
    ends = (-16, 1, 0)
    plain = _told([*before, (32, 2, 0), ends, (done, "b"), (done, ""), *after])
    again = _told([*before, (32, 2, 0), (done, "b"), (done, ""), ends, *after])
    composer = Composer(plain, again, ("a", "b"))
    for some in ({"a"}, {"b"}):
        for each in composer.trace(some):
            assert (each.log.events, each.hook_points) == (again.log.events, again.hook_points)


def test_a_block_that_keeps_nothing_leaves_all_to_the_others():
    begin, done = HookKind.BEFORE_FORWARD, HookKind.AFTER_FORWARD
    back, end = HookKind.BEFORE_BACKWARD, HookKind.AFTER_BACKWARD
    work = _told([
        (8, 0, 0), (begin, ""), (begin, "a"), (16, 1, 0), (done, "a"), (begin, "b"), (done, "b"),
        (begin, "c"), (32, 2, 0), (done, "c"), (done, ""), (back, ""), (back, "c"), (64, 3, 1),
        (-64, 3, 1), (-32, 2, 1), (end, "c"), (back, "b"), (end, "b"), (back, "a"), (-16, 1, 1),
        (end, "a"), (HookKind.END_OF_BACKWARD, ""), (-8, 0, 1),
    ])  # fmt: skip
    composer = Composer(work, work, ("a", "b", "c"))
    kept, turn = composer.kept_bytes(), composer.backward_bytes()
    assert (kept["a"], "b" in kept) == ((16, 16), False)
    assert turn["c"] == (8 + 32 + 64, 8 + 32 + 64)


class _Remembers(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = super().forward(x)
        return self.last


@pytest.mark.parametrize(("kind", "is_steady"), [(nn.Linear, True), (_Remembers, False)])
def test_what_a_model_keeps_from_one_microbatch_to_the_next_is_seen(
    kind: type[nn.Linear], is_steady: bool
) -> None:
    model = kind(16, 8)
    plan = {"version": 1, "mesh": {"dp_shard": 2}, "strategy": "full_shard", "batch": {"micro": 4}}
    (seen,) = watch(
        model, make_plan(load_spec(plan), graph_of(model)), torch.zeros(4, 16),
        torch.zeros(4, dtype=torch.int64), nn.functional.cross_entropy, "h100-sxm-80gb",
        [Ask(4, frozenset())],
    )  # fmt: skip
    assert seen.is_steady is is_steady
