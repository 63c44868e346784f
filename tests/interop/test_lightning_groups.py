"""LightningModules make groups by modules under a pipeline, and draw noise in workers under tp.

Which seeded bug would this catch? Groups that lack the parameters of modules that are walked, a
group of another rank's stage that moves the learning rates of the others, states that an optimizer
has from the beginning of parameters without values, parameters that stay trained although
`configure_optimizers` freezes them, and workers that are seeded by the rank among all ranks.
"""

from __future__ import annotations

import importlib

import pytest
import torch

pytest.importorskip("lightning", reason="lightning is not installed: pip install -e '.[dev]'")


def jobs():
    return importlib.import_module("tests.helpers.lit_groups")


# Functions of the pool's ranks, which import Lightning there.


def alone():
    return jobs().alone()


def planned():
    return jobs().planned()


def refused():
    return jobs().refused()


def test_groups_by_modules_train_as_in_one_process(pool):
    (expected,) = pool(1).run(alone, timeout=240)
    assert len(expected) == 10
    found = pool(4).run(planned, timeout=240)[0]  # Full tensors are on rank 0.
    assert found.keys() == expected.keys()
    for case, wanted in expected.items():
        assert found[case].keys() == wanted.keys()
        for name, value in wanted.items():
            assert torch.allclose(found[case][name], value, rtol=1e-9, atol=1e-12), (case, name)


def test_an_optimizer_with_references_of_its_own_is_refused(pool):
    for found in pool(4).run(refused, timeout=240):
        assert "ApplyError" in found
        assert "Remembering keeps states or references of its own to the parameters" in found


def drawn(name, *args):
    jobs = importlib.import_module("tests.helpers.lit_workers")
    return getattr(jobs, name)(*args)


@pytest.mark.parametrize(
    ("by", "workers"),
    [
        ("drawn", 1),
        *(pytest.param(*each, marks=pytest.mark.wide)
          for each in (("drawn", 0), ("drawn_by_fabric", 1), ("drawn_by_fabric", 0))),
    ],
)  # fmt: skip
def test_workers_of_ranks_along_tp_draw_the_same(pool, by, workers):
    found = pool(4).run(drawn, by, "tp_fsdp", workers, timeout=240)[0]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[2], found[3])
    for column in range(3):  # Workers draw by the seed of their data rank.
        is_alike = torch.equal(found[0][..., column], found[2][..., column])
        assert is_alike == (workers == 0), column
