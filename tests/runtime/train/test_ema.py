"""`EMA`: the averages of one process under every layout, saved and loaded with the optimizer.

Which seeded bug would this catch? Averages of other parameters or of gathered ones, weights that
stay averaged after the block, averages that start anew after a load, or an Adam that takes the
average for its own state.
"""

from __future__ import annotations

import pytest
import torch

import meshplan
from meshplan.errors import ApplyError, StateError
from tests.helpers.stated import LAYOUTS, Job, next_token_loss, plan_of

DECAY = 0.7


def averages(plan, path, before, after):
    """The averaged weights after so many steps, and losses with the model's own weights around."""
    job = Job(plan)
    ema = meshplan.EMA(job.model, job.optimizer, DECAY)
    if before:
        job.train(before)
        meshplan.save(path, job.model, job.optimizer, step=before, data=job.loader)
    else:
        meshplan.load(path, job.model, job.optimizer, data=job.loader)
    job.train(after)
    batch = next(iter(job.loader))
    losses = [meshplan.eval_step(job.model, *batch, next_token_loss)]
    with ema.averaged():
        found = meshplan.full_state_dict(job.model)
        losses.append(meshplan.eval_step(job.model, *batch, next_token_loss))
        with pytest.raises(ApplyError, match="averaged weights"):
            job.optimizer.step()
        with pytest.raises(StateError, match="averaged weights"):
            meshplan.save(path, job.model, job.optimizer, step=99)
    losses.append(meshplan.eval_step(job.model, *batch, next_token_loss))
    return found, losses


@pytest.mark.parametrize(
    ("source", "target"),
    [("full_shard", "packed"), ("ddp", "pp"), *(pytest.param(*pair, marks=pytest.mark.wide)
     for pair in (("zero1", "hybrid"), ("pp", "ep_fsdp"), ("pp_fsdp_tp", "zero2")))],
)  # fmt: skip
def test_averages_are_those_of_one_process_before_and_after_a_load(pool, tmp_path, source, target):
    expected, lines = pool(1).run(averages, plan_of("one"), tmp_path / "one", 2, 2)[0]
    assert lines[0] == lines[2] != lines[1]
    for layout, steps in ((source, (2, 2)), (target, (0, 2))):
        plan = plan_of(layout)
        found, losses = pool(LAYOUTS[layout].world).run(averages, plan, tmp_path, *steps)[0]
        assert losses == pytest.approx(lines, rel=1e-5)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            # Adam turns rounding noise into parts of a step; a wrong average is off by steps.
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-3)


def test_an_average_follows_its_formula(pool):
    assert pool(1).run(followed, plan_of("one")) == [True]


def followed(plan):
    job = Job(plan)
    ema = meshplan.EMA(job.model, job.optimizer, DECAY)
    expected = {}
    for _ in range(3):
        job.train(1)
        for name, value in meshplan.full_state_dict(job.model).items():
            before = expected.get(name, value)
            expected[name] = DECAY * before + (1 - DECAY) * value
    with ema.averaged():
        found = meshplan.full_state_dict(job.model)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
    return True


def test_no_averages_before_the_first_step(pool):
    def bad(plan):
        job = Job(plan)
        with pytest.raises(ApplyError, match="before the first"):
            meshplan.EMA(job.model, job.optimizer).averaged().__enter__()
        with pytest.raises(ApplyError, match=r"must be from 0 to 1"):
            meshplan.EMA(job.model, job.optimizer, 1.5)
        with pytest.raises(ApplyError, match="has an EMA already"):
            meshplan.EMA(job.model, job.optimizer, 0.9)

    bad(plan_of("one"))
