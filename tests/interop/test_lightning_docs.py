"""Callbacks of Lightning's documentation under a plan do what they do in one process.

Which seeded bug would this catch? Ranks that stop at different epochs, a checkpoint without the
tensors beside the network, accumulation and clipping of the plan that are not taken, and stages of
a pipeline that stay in evaluation mode, or leave a mode that the user has set.
"""

from __future__ import annotations

import importlib

import pytest

pytest.importorskip("lightning", reason="lightning is not installed: pip install -e '.[lightning]'")

EXTRA = {"batch": {"accumulate": 3}, "clip_grad_norm": 0.5}


def jobs():
    return importlib.import_module("tests.helpers.lit_docs")


# Functions of the pool's ranks, which import Lightning there.


def run(*args):
    return jobs().run(*args)


def decisions():
    return jobs().decisions()


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    return jobs().run("", str(tmp_path_factory.mktemp("alone")), {})


@pytest.mark.parametrize(
    "name", ["pp_fsdp", *(pytest.param(each, marks=pytest.mark.wide)
                          for each in ("ddp", "full_shard", "tp_fsdp"))]
)  # fmt: skip
def test_runs_stop_early_and_go_on_from_the_best_checkpoint(pool, one_process, tmp_path, name):
    for found in pool(4).run(run, name, str(tmp_path / name), EXTRA, timeout=240):
        for key in ("run0", "run1"):
            own, expected = dict(found[key]), dict(one_process[key])
            if "pp" not in name:
                assert own["modes"] == expected["modes"] == {(False, True)}
            assert own.pop("modes") == {(False, True)}
            expected.pop("modes")
            for name_of in ("losses", "scores"):
                numbers = pytest.approx(expected.pop(name_of), rel=2e-6)
                assert own.pop(name_of) == numbers, (key, name_of)
            assert own.pop("score") == pytest.approx(expected.pop("score"), rel=2e-6)
            assert own == expected
    first = one_process["run0"]
    assert 0 < first["stopped"] < 11
    assert first["best"] != first["kept"][-1] or first["waited"] == 2


def test_ranks_decide_together(pool):
    for found in pool(4).run(decisions):
        assert found == [False, True, True, True, False, False]
