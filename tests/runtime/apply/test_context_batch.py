"""What `local_batch` cuts under cp, and the batches that it refuses on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import meshplan
from tests.helpers import context_models

CP2: dict[str, Any] = {"version": 1, "mesh": {"cp": 2}}


def fed(batch: Any, plan: dict[str, Any]) -> Any:
    model = meshplan.parallelize(context_models.build("arange"), CP2 | plan)
    try:
        return meshplan.local_batch(model, batch)
    except meshplan.ApplyError as error:
        return str(error)


def test_what_is_cut(pool):
    tokens = torch.arange(32).reshape(2, 16)
    batch = {"tokens": tokens, "weights": tokens.float(), "class": torch.tensor([4, 5]), "n": 3}
    first, second = pool(2).run(fed, batch, {})
    assert first["tokens"][0].tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    assert second["weights"][1].tolist() == [20, 21, 22, 23, 24, 25, 26, 27]
    assert first["class"].tolist() == [4, 5]
    in_order = pool(2).run(fed, (tokens, [tokens]), {"context": {"balance": False}})[1]
    assert in_order[1][0][0].tolist() == [8, 9, 10, 11, 12, 13, 14, 15]


@pytest.mark.parametrize(
    ("batch", "plan", "says"),
    [
        (torch.zeros(2, 18, dtype=torch.int64), {}, "does not divide into the 4 chunks of cp"),
        (torch.zeros(2, 3, 8, 8), {}, "no tensor has the shape (samples, tokens)"),
        (
            (torch.zeros(2, 16, dtype=torch.int64), torch.zeros(2, 8, dtype=torch.int64)),
            {},
            "its tensors have the lengths 8, 16",
        ),
        (
            (torch.zeros(2, 16, dtype=torch.int64), torch.zeros(2, 1, 16, 16)),
            {},
            "has the sequence length along dim 2",
        ),
    ],
)
def test_batches_that_cannot_be_cut(pool, batch, plan, says):
    told = pool(2).run(fed, batch, plan)
    assert says in told[0]
    assert told[0] == told[1]


def test_a_stated_length_decides(pool):
    two = (torch.zeros(2, 16, dtype=torch.int64), torch.zeros(2, 8, dtype=torch.int64))
    out = pool(2).run(fed, two, {"batch": {"seq_len": 16}})[0]
    assert [tuple(t.shape) for t in out] == [(2, 8), (2, 8)]


def uneven_targets() -> int:
    model = meshplan.parallelize(context_models.build("arange"), CP2)
    tokens, targets = context_models.batch(0)
    targets[:, -2:] = -100
    with pytest.warns(UserWarning, match="different numbers of targets equal to -100"):
        meshplan.local_batch(model, (tokens, targets))
    return 1


def test_ignored_targets_in_one_part_are_told(pool):
    assert pool(2).run(uneven_targets) == [1, 1]
