"""Positions that a batch brings along under cp: one sample a row is right, packed ones refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import meshplan
from meshplan.runtime.watch import guard
from tests.helpers import models, parity

PLAN: dict[str, Any] = {"version": 1, "mesh": {"cp": 2}, "batch": {"seq_len": models.SEQ_LEN}}
ROWS = {
    "from 0": torch.arange(models.SEQ_LEN),
    "packed": torch.cat((torch.arange(6), torch.arange(models.SEQ_LEN - 6))),
    "packed in the middle": torch.arange(models.SEQ_LEN) % (models.SEQ_LEN // 2),
    "packed on one rank": torch.cat((torch.arange(12), torch.arange(models.SEQ_LEN - 12))),
}


def batch(step: int, rows: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    inputs, targets = models.batch("hf_llama", step)
    return {**inputs, "position_ids": ROWS[rows].expand(8, -1).clone()}, targets


def train(context: dict[str, Any], *rows: str) -> tuple[list[str], float]:
    """(what each step refused, the largest difference from one process)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guard, "GRACE_S", 3.0 if len(rows) > 1 else 0.5)
        return _train(context, *rows)


def _train(context: dict[str, Any], *rows: str) -> tuple[list[str], float]:
    model = meshplan.parallelize(models.build("hf_llama"), PLAN | {"context": context})
    alone = models.build("hf_llama")
    optimizers = models.optimizer(model), models.optimizer(alone)
    told = []
    for step, kind in enumerate(rows):
        inputs, targets = batch(step, kind)
        mine = meshplan.local_batch(model, (inputs, targets))
        try:
            meshplan.train_step(model, optimizers[0], *mine, models.loss)
        except meshplan.ApplyError as error:
            told.append(str(error))
            continue
        told.append("")
        models.loss(alone(**inputs), targets).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    if all(told):
        return told, 0.0
    live = meshplan.full_state_dict(model)
    expected = alone.state_dict()
    return told, max([0.0, *((live[n] - expected[n]).abs().max().item() for n in live)])


CONTEXTS: dict[str, dict[str, Any]] = {
    "balanced": {"attention": "all_gather"},
    "in order": {"attention": "all_gather", "balance": False},
    "by heads": {"attention": "all_to_all"},
}


@pytest.mark.parametrize("context", CONTEXTS)
def test_positions_of_one_sample_a_row(pool, context):
    for told, difference in pool(2).run(train, CONTEXTS[context], "from 0", "from 0"):
        assert told == ["", ""]
        assert difference <= parity.TOLERANCE


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize(
    "rows",
    [
        pytest.param("packed", marks=pytest.mark.wide),
        pytest.param("packed in the middle", marks=pytest.mark.wide),
        "packed on one rank",
    ],
)
def test_packed_samples_are_refused_on_every_rank(pool, context, rows):
    """Without conforming exchanges gloo aborts: key heads are repeated under a mask only."""
    results = pool(2).run(train, CONTEXTS[context], rows, timeout=30)
    pool(2).close()  # Where one rank raises what the other does not, the group has been ended.
    for told, _ in results:
        assert "of the sequence" in told[0]


@pytest.mark.parametrize("context", CONTEXTS)
def test_packed_samples_that_come_later_are_refused(pool, context):
    rows = ("from 0", "packed on one rank", "from 0")
    for told, difference in pool(2).run(train, CONTEXTS[context], *rows, timeout=30):
        assert told[1]
        assert (told[0], told[2]) == ("", "")
        assert difference <= parity.TOLERANCE
