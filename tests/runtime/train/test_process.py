"""`is_main`, `main_first`, `seed_everything`, and clipping by value or with an error.

Which seeded bug would this catch? Ranks that do not wait for the first, or wait for ever if it
fails; a record on every rank, or without its number; a generator that is not seeded; gradients of
which parts are clamped before they are summed.
"""

from __future__ import annotations

import io
import logging
import random
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import meshplan
from meshplan.errors import ApplyError


def prepared(path):
    with meshplan.main_first():
        if meshplan.is_main():
            time.sleep(0.5)
            path.write_text("tokens")
        return meshplan.is_main(), path.read_text()


def test_the_other_ranks_wait_for_the_first(pool, tmp_path):
    found = pool(2).run(prepared, tmp_path / "cache")
    assert found == [(True, "tokens"), (False, "tokens")]


def failing():
    try:
        with meshplan.main_first():
            if meshplan.is_main():
                raise OSError("no network")
            raise AssertionError("this rank ran the block")
    except (OSError, ApplyError) as error:
        return str(error)


def test_a_failure_of_the_first_rank_ends_all(pool):
    main, other = pool(2).run(failing)
    pool(2).close()
    assert main == "no network"
    assert "rank 0" in other
    assert "no network" in other


def logged():
    """What the loggers of this rank emit, with arguments and percent signs in the messages."""
    out = io.StringIO()
    main, every = meshplan.rank_logger("one"), meshplan.rank_logger("all", all_ranks=True)
    handler = logging.StreamHandler(out)
    for logger in (main, every):
        logger.setLevel("INFO")
        logger.propagate = False
        logger.handlers = [handler]
        logger.info("100%% of %d", 3)
    meshplan.rank_logger("all").info("once")
    main.debug("below the level")
    return out.getvalue().splitlines()


def test_records_are_emitted_once_or_with_their_rank(pool):
    main, other = pool(2).run(logged)
    assert main == ["100% of 3", "[rank 0] 100% of 3", "once"]
    assert other == ["[rank 1] 100% of 3"]


def test_a_logger_knows_its_rank_before_the_group_exists(monkeypatch, caplog):
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
                        "MASTER_ADDR": "a", "MASTER_PORT": "1"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    meshplan.rank_logger("early").warning("nothing")
    meshplan.rank_logger("early", all_ranks=True).warning("here")
    assert caplog.messages == ["[rank 1] here"]


def drawn():
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_seeding():
    meshplan.seed_everything(3)
    first = drawn()
    assert drawn() != first
    meshplan.seed_everything(3)
    assert drawn() == first
    with pytest.raises(ApplyError, match="2\\*\\*32"):
        meshplan.seed_everything(-1)


def clipped(plan, value):
    torch.manual_seed(0)
    model = meshplan.parallelize(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)), plan)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    index = model.meshplan.plan.mesh.index(dist.get_rank(), ("dp_shard",))
    rows = torch.arange(8.0).reshape(2, 4)[index : index + 1 if "dp_shard" in plan["mesh"] else 2]
    loss = (model(rows) ** 2).mean()
    if value is None:
        (loss * float("inf")).backward()
        with pytest.raises(ApplyError, match=r"gradients is (nan|inf)"):
            meshplan.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
        return None
    loss.backward()
    meshplan.clip_grad_value_(model, value)
    optimizer.step()
    return meshplan.full_state_dict(model)


@pytest.mark.parametrize(
    "plan",
    [
        {"mesh": {"dp_shard": 2}, "strategy": "full_shard"},
        {"mesh": {"tp": 2}, "rules": [
            {"match": "0", "place": {"tp": "colwise"}}, {"match": "1", "place": {"tp": "rowwise"}}
        ]},
    ],
)  # fmt: skip
def test_clipping_by_value_is_that_of_one_process(pool, plan):
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    (alone(torch.arange(8.0).reshape(2, 4)) ** 2).mean().backward()
    largest = max(float(p.grad.abs().max()) for p in alone.parameters())
    torch.nn.utils.clip_grad_value_(alone.parameters(), largest / 3)
    torch.optim.SGD(alone.parameters(), 1.0).step()
    plan = {"version": 1, **plan}
    found = pool(2).run(clipped, plan, largest / 3)[0]
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(found[name], value)
    assert pool(2).run(clipped, plan, None) == [None, None]
