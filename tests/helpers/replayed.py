"""One training step composed from one traced microbatch, and the same step traced whole."""

from __future__ import annotations

import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from meshplan.layout.mesh import DATA_AXES
from meshplan.memory import EventLog
from meshplan.memory.log.events import Storage, Term
from meshplan.memory.log.microbatch import MicrobatchTrace
from meshplan.memory.replay import Prepared, replay
from meshplan.memory.replay.optimizer import is_uniform
from meshplan.memory.replay.step import composed_log
from meshplan.plan.plan import Plan, make_plan
from meshplan.runtime.base.batch import mapped, microbatch, part_of
from meshplan.runtime.fake_step import microbatch as blocks
from meshplan.runtime.fake_step.costs import Ask, watch
from meshplan.runtime.fake_step.microbatch import trace_microbatch
from meshplan.runtime.fake_step.step import fake_step
from meshplan.runtime.trace.ops import record
from meshplan.runtime.trace.rehearse import rehearser
from meshplan.runtime.trace.structure import graph_of
from meshplan.spec.reader import load_spec
from tests.helpers import exact, models


class Block(nn.Module):
    """One of many, which knows its number; some do more than others."""

    def __init__(self, number: int, special: int) -> None:
        super().__init__()
        self.number, self.special = number, special
        self.up, self.down = nn.Linear(24, 48), nn.Linear(48, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.special >= 0 and self.number == self.special:
            x = torch.tanh(x) * 2
        # Backward needs no `x`: it is freed once the block has returned to its caller.
        return x + self.down(torch.tanh(self.up(x * 2)))


class Deep(nn.Module):
    """Many blocks, of which one may do more than its weights tell."""

    def __init__(self, special: int) -> None:
        super().__init__()
        self.stem = nn.Linear(24, 24)
        self.blocks = nn.ModuleList([Block(number, special) for number in range(14)])
        self.head = nn.Linear(24, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = first = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x + first)


def deep(special: int, plan: Mapping[str, Any]) -> tuple[int, list[Any], list[Any]] | str:
    """(blocks that were run, the work of a deep model, the same traced whole), for comparison."""
    model = Deep(special)
    found = make_plan(load_spec(dict(plan)), graph_of(model), world_size=4)
    batch = torch.zeros(2, 24), torch.zeros(2, dtype=torch.int64)
    return _short_and_whole(model, model.blocks, found, batch)


def deep_in_sequence(plan: Mapping[str, Any]) -> tuple[int, list[Any], list[Any]] | str:
    """As `deep`, of a BERT whose blocks gather the sequence within themselves."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=9, num_attention_heads=4,
        intermediate_size=32, max_position_embeddings=16, attention_probs_dropout_prob=0.0,
        hidden_dropout_prob=0.0,
    )  # fmt: skip
    model, ids = BertForMaskedLM(config), torch.zeros(2, 8, dtype=torch.int64)
    spec, example = load_spec(dict(plan)), {"input_ids": ids}
    graph = graph_of(model, record(model, example))
    found = make_plan(spec, graph, world_size=4, rehearse=rehearser(model, example))
    return _short_and_whole(model, model.bert.encoder.layer, found, (example, ids))


def _short_and_whole(
    model: nn.Module, listed: nn.ModuleList, found: Plan, batch: tuple[Any, Any]
) -> tuple[int, list[Any], list[Any]] | str:
    warnings.simplefilter("ignore")
    try:
        count = 0

        def note(*_: Any) -> None:
            nonlocal count
            count += 1

        handles = [block.register_forward_hook(note) for block in listed]
        short = trace_microbatch(model, found, *batch, models.loss)
        for handle in handles:
            handle.remove()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(blocks, "runs_of", lambda *_: [])
            whole = trace_microbatch(model, found, *batch, models.loss)
        return count, spelled(short), spelled(whole)
    except Exception:
        return traceback.format_exc()


def spelled(work: MicrobatchTrace) -> list[Any]:
    """All of a work, storages numbered as they come."""
    numbers: dict[int, int] = {}
    events = [(e.delta, numbers.setdefault(e.storage, len(numbers)), e.phase)
              for e in work.log.events]  # fmt: skip
    names = {new: work.log.storages[old].module for old, new in numbers.items()}
    gradients = {fqn: numbers[storage] for fqn, storage in work.gradients.items()}
    return [
        events,
        names,
        work.hook_points,
        gradients,
        work.ready,
        [numbers[s] for s in work.losses],
    ]


Figures = tuple[list[int], Mapping[str, tuple[int, int]], Mapping[Term, int]]


def decided(model_name: str, plan: Mapping[str, Any], world: int) -> tuple[Any, Plan, Any]:
    """(the model, its plan, one rank's inputs and targets of a step)."""
    model, spec = models.build(model_name), load_spec(dict(plan))
    inputs, targets = models.batch(model_name, 0)
    example = inputs if isinstance(inputs, dict) else (inputs,)
    flow = record(model, example) if spec.reads_flow else None
    rehearse = rehearser(model, example) if spec.reads_flow else None
    found = make_plan(spec, graph_of(model, flow), world_size=world, rehearse=rehearse)
    ranks = found.mesh.size(*DATA_AXES)
    batch = mapped((inputs, targets), lambda t: part_of(t, ranks, 0, "data ranks"))
    cp = found.mesh.size("cp")
    batch = mapped(batch, lambda t: t.chunk(cp, 1)[0].clone() if t.ndim > 1 else t)
    return model, found, batch


def work_of(model: Any, plan: Plan, batch: Any, rank: int, device: str = "cpu") -> MicrobatchTrace:
    """Traced from one microbatch with memory of its own."""
    first = mapped(microbatch(batch, plan.accumulate), torch.clone)
    return trace_microbatch(model, plan, *first, models.loss, rank, device)


def figures(log: EventLog) -> Figures:
    """(live bytes at each turn, most bytes of each phase, what they are for at the peak).

    A turn is where they stop growing, or shrinking.

    What DeviceMesh takes on the host to find itself in a list of ranks is no memory of a device.
    """
    kept = [e for e in log.events if not is_on_host(log.storages[e.storage])]
    turns, live, grows = [], 0, True
    for delta, _, phase in kept:
        if phase and (delta > 0) != grows:
            turns.append(live)
            grows = delta > 0
        live += delta
    found = EventLog(log.storages, tuple(kept), log.phases)
    return [*turns, live], found.by_phase, found.terms_at_peak


def is_on_host(storage: Storage) -> bool:
    return not storage.module and storage.op in ("aten.eq.Scalar", "aten.nonzero.default")


def both(
    model_name: str, plan: Mapping[str, Any], how: str, world: int, rank: int
) -> tuple[Figures, Figures] | str:
    """(traced whole, composed), in a process without a group; or what was raised."""
    warnings.simplefilter("ignore")
    try:
        model, found, batch = decided(model_name, plan, world)
        whole = fake_step(
            model, found, *batch, models.loss, lambda m: exact.optimizer(m, how), rank
        )
        work = work_of(model, found, batch, rank)
        # Beside Muon, AdamW is left to choose, and on a CPU takes one parameter at a time.
        foreach = is_uniform(found.assignment) and how != "muon"
        composed = replay(work, found, how, rank=rank, foreach=foreach)
        return figures(whole), figures(composed)
    except Exception:
        return traceback.format_exc()


def with_mistakes(
    model_name: str, plan: Mapping[str, Any], world: int, mistakes: Mapping[str, Callable[[], Any]]
) -> tuple[Figures, dict[str, Figures]] | str:
    """(composed, composed with each mistake): each puts something wrong and returns what mends."""
    warnings.simplefilter("ignore")
    try:
        model, found, batch = decided(model_name, plan, world)
        work = work_of(model, found, batch, 0)
        right = figures(replay(work, found, "adamw"))
        wrong = {}
        for name, make in mistakes.items():
            mend = make()
            try:
                wrong[name] = figures(replay(work, found, "adamw"))
            finally:
                mend()
        assert figures(replay(work, found, "adamw")) == right
        return right, wrong
    except Exception:
        return traceback.format_exc()


Births = Mapping[tuple[str, int, int], int]


def counted_after(model_name: str, plan: Mapping[str, Any], world: int) -> list[Any] | str:
    """Each microbatch of some that run one after the other, and each run alone, for comparison."""
    warnings.simplefilter("ignore")
    try:
        model, found, batch = decided(model_name, plan, world)
        blocks = frozenset(found.graph.blocks())
        asks = [Ask(samples, again) for again in (frozenset[str](), blocks) for samples in (1, 2)]

        def counted(these: list[Ask]) -> list[Any]:
            seen = watch(model, found, *batch, models.loss, "cuda", these)
            return [(spelled(each.trace), dict(each.done), each.convolved) for each in seen]

        return [*zip(counted(asks), [counted([ask])[0] for ask in asks], strict=True)]
    except Exception:
        return traceback.format_exc()


def births(log: EventLog) -> Births:
    """How many storages of each size grow in each phase on each stream."""
    return Counter(
        (log.phases[e.phase], log.storages[e.storage].stream, e.delta)
        for e in log.events
        if e.phase and e.delta > 0 and not is_on_host(log.storages[e.storage])
    )


def on_streams(model_name: str, plan: Mapping[str, Any], world: int) -> tuple[Births, Births] | str:
    """(traced whole, composed) as of a GPU, in a process without a group; or what was raised."""
    warnings.simplefilter("ignore")
    try:
        model, found, batch = decided(model_name, plan, world)
        whole = fake_step(
            model, found, *batch, models.loss, lambda m: exact.optimizer(m, "adamw"), 0, "cuda"
        )
        work = work_of(model, found, batch, 0, "cuda")
        return births(whole), births(composed_log(Prepared(work), found, 0))
    except Exception:
        return traceback.format_exc()
