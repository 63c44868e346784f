"""LightningModules make groups by modules under a pipeline, and draw noise in workers under tp.

Which seeded bug would this catch? Groups that lack the parameters of modules that are walked, a
group of another rank's stage that moves the learning rates of the others, states that an optimizer
has from the beginning of parameters without values, parameters that stay trained although
`configure_optimizers` freezes them, hooks that see no modules of a stage or those of other stages,
whose weights are NaN, and workers that are seeded by the rank among all ranks.
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


def watched(*args):
    return jobs().watched(*args)


def watched_alone(*args):
    return jobs().watched_alone(*args)


def test_hooks_see_the_modules_of_the_stages(pool):
    """Each rank has those of its stages and no others: together, those of one process."""
    (expected,) = pool(1).run(watched_alone, timeout=240)
    ranks = pool(4).run(watched, timeout=240)
    for case, (norms, buffers, kinds) in enumerate(expected):
        found_norms, found_buffers, found_kinds = {}, {}, set()
        for rank in ranks:
            own_norms, own_buffers, own_kinds = rank[case]
            assert own_norms.keys() < norms.keys()
            for name, values in own_norms.items():
                # Where a rank has two copies of a tied weight, it has a norm of each.
                copies = len(values) // len(norms[name])
                expected_norms = [each for each in norms[name] for _ in range(copies)]
                assert values == pytest.approx(expected_norms, rel=1e-9), (case, name)
            found_norms |= own_norms
            found_buffers |= own_buffers
            found_kinds |= own_kinds
        assert found_norms.keys() >= norms.keys(), case
        assert found_buffers == buffers, case
        assert {"Linear", "LayerNorm", "Scaled", "ModuleList"} <= found_kinds & kinds


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
