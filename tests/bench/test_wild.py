"""Telling cells of the hunt (tests/bench/wild.py): models that nobody prepared, beside one process.

Which seeded bug would this catch? A stage cut where the size of what is sent depends on numbers, a
module that computes other numbers when it runs again, a complex parameter beside real ones that is
not averaged, a projection cut by itself whose gradient counts twice, running statistics that are
another rank's.
"""

from __future__ import annotations

import pytest
import torch

from tests.bench import wild_cases, wild_cell

CELLS = (
    ("recursion", "tp"), ("tabnet", "tp_fsdp"), ("counter_in_forward", "recompute"),
    ("unet_groupnorm", "recompute"), ("s4d_complex_parameters", "full_shard"),
    ("float64_head", "bf16"), ("gnn_nonzero", "pp"), ("masked_positions_to_head", "pp"),
    ("multitask_returns_parameters", "ddp"), ("resnet_batchnorm", "full_shard"),
    ("loop_accumulating", "full_shard"), ("siamese_shared_module", "hybrid"),
)  # fmt: skip


@pytest.mark.parametrize(("name", "layout"), CELLS)
def test_one_cell(pool, name, layout):
    cell = wild_cell.run_cell(pool(wild_cell.LAYOUTS[layout][0]), name, layout)
    assert cell.outcome == "pass", cell


@pytest.mark.parametrize("layout", ["full_shard", "tp"])
def test_a_second_derivative_is_refused(pool, layout):
    """It was silently wrong by 0.1 under tp."""
    pool = pool(wild_cell.LAYOUTS[layout][0])
    cell = wild_cell.run_cell(pool, "gan_gradient_penalty", layout)
    assert cell.outcome == "refused", cell
    assert "create_graph=True" in cell.why
    assert cell.fix


def test_a_wrong_number_shows():
    """One parameter off by a thousandth of its update is wrong; so is a NaN, or another dtype."""
    told = wild_cell.reference("recursion", 1, False, torch.float32)
    assert wild_cell.difference(told.result, told.result, is_first=True)[0] == 0.0
    for bad in (2e-5, float("nan")):
        state = {key: value.clone() for key, value in told.result.state.items()}
        state["a.weight"][0, 0] += bad
        apart, worst = wild_cell.difference(
            told.result._replace(state=state), told.result, is_first=True
        )
        assert not apart <= wild_cell.TOLERANCE
        assert worst == "a.weight"
    outputs = [output.double() for output in told.result.outputs]
    apart, _ = wild_cell.difference(
        told.result._replace(outputs=outputs), told.result, is_first=False
    )
    assert apart == float("inf")
    assert wild_cell.share(told.start, told) == pytest.approx(1.0)


def test_there_are_at_least_150_cases_without_any_package():
    assert len([name for name in wild_cases.load() if "/" not in name]) >= 150
