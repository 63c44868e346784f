"""What LightningModules do besides steps: gather, read parts of the network, average weights.

Which seeded bug would this catch? A LightningModule that is the network itself wrapped once more by
the next run, or evaluated without its stages; and raw errors of torch where it calls its parts.
Then `self.all_gather` that counts ranks along tp, since Lightning
asks for the world if it is told no group; a network under ddp whose layers cannot be read; and a
traceback of DTensor where weights of shards are averaged.
"""

from __future__ import annotations

import importlib

import pytest

pytest.importorskip("lightning", reason="lightning is not installed: pip install -e '.[lightning]'")


def jobs():
    return importlib.import_module("tests.helpers.lit_odd")


# Functions of the pool's ranks, which import Lightning there.


def alone(*args):
    return jobs().alone(*args)


def planned(*args):
    return jobs().planned(*args)


def averaging(*args):
    return jobs().averaging(*args)


def whole(*args):
    return jobs().whole(*args)


def whole_alone():
    return jobs().whole_alone()


def error_of(*args):
    return jobs().error_of(*args)


def two_under_pp():
    return jobs().two_under_pp()


@pytest.mark.parametrize(("name", "unfreezes"), [("tp_fsdp", False), ("ddp", True)])
def test_each_sample_is_gathered_once_and_layers_can_be_read(pool, name, unfreezes):
    (expected,) = pool(1).run(alone, unfreezes, timeout=240)
    assert expected["rows"] == 16
    for found in pool(4).run(planned, name, unfreezes, timeout=240):
        assert found == pytest.approx(expected, rel=2e-6)


@pytest.mark.parametrize("name", ["tp_fsdp", "ddp"])
@pytest.mark.parametrize(
    ("kind", "more"),
    [("EMAWeightAveraging", {"decay": 0.8}), ("StochasticWeightAveraging", {"swa_lrs": 0.1})],
)
def test_averages_of_shards_are_refused(pool, name, kind, more):
    for found in pool(4).run(averaging, name, kind, more, timeout=240):
        if found is None:
            pytest.skip(f"this version of Lightning has no {kind}")
        if name == "ddp":
            assert found == ""
        else:
            assert f"{kind} averages whole parameters, and the plan shards them" in found
            assert "meshplan.EMA" in found


def test_manual_optimization_of_a_pipeline_is_refused_also_if_the_module_is_the_network(pool):
    for found in pool(4).run(two_under_pp, timeout=240):
        assert "ApplyError" in found
        assert "a pipeline runs its own backward, which manual optimization would call too" in found


@pytest.mark.parametrize(
    "name", ["pp", *(pytest.param(each, marks=pytest.mark.wide) for each in ("ddp", "hybrid"))]
)
def test_a_module_that_is_the_network_goes_on_in_several_runs(pool, name):
    (expected,) = pool(1).run(whole_alone, timeout=240)
    assert len(expected["losses"]) == 10
    for found in pool(4).run(whole, name, timeout=240):
        assert found["losses"] == pytest.approx(expected["losses"], rel=2e-6)
        assert found["found"] == pytest.approx(expected["found"], rel=2e-6)


@pytest.mark.parametrize(("name", "optimizers"), [("ddp", 1), ("hybrid", 1), ("hybrid", 2)])
def test_forwards_of_the_modules_own_layers_are_refused_in_manual_optimization(
    pool, name, optimizers
):
    for found in pool(4).run(error_of, name, "players", optimizers, timeout=240):
        assert "runs forward and backward of layers of the LightningModule itself" in found
        assert "(first, second)" in found
        assert "call self.net(name, ...) once before each manual_backward" in found


def test_a_loss_that_runs_layers_of_other_stages_is_refused(pool):
    for found in pool(4).run(error_of, "pp", "parts", timeout=240):
        assert "meshplan_loss runs a Linear, but a pipeline's last stage has the model's" in found
