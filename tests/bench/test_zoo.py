"""A sample of the zoo: what a user's model may be, under every layout, against one process.

A cell must be exact or refused with a reason; what tests/bench/zoo.md says is exact must stay so.
Which seeded bug would this catch? A unit whose parameters are used from outside its forward, a
tied weight that comes apart, a buffer or scalar left behind, a gradient averaged twice.
"""

from __future__ import annotations

import pytest

from tests.bench import zoo_cell
from tests.bench.zoo import SAMPLE
from tests.bench.zoo_cell import LAYOUTS
from tests.bench.zoo_table import kept

CELLS = [
    pytest.param(name, layout, marks=[] if number % turns == turn else [pytest.mark.wide])
    for turns in [2 * len(LAYOUTS)]
    for number, name in enumerate(SAMPLE)
    for turn, layout in enumerate(LAYOUTS)
]
"""Every layout in turn by another architecture, until half of these are used; the rest is wide."""


@pytest.mark.parametrize(("name", "layout"), CELLS)
def test_one_cell(pool, name, layout):
    cell = zoo_cell.run(pool(zoo_cell.LAYOUTS[layout][0]), name, layout)
    assert cell.outcome in ("pass", "refused", "not yet"), cell
    if kept().get((name, layout)) == "ok":
        assert cell.outcome == "pass", cell


def test_a_wrong_number_shows():
    """One parameter off by less than its update is wrong; so is a NaN."""
    expected = zoo_cell.reference("llama", 1)
    assert zoo_cell.difference(expected.losses, expected.state, expected) == (0.0, "loss of step 0")
    for bad in (2e-5, float("nan")):
        state = {key: value.clone() for key, value in expected.state.items()}
        state["model.norm.weight"][0] += bad
        apart, worst = zoo_cell.difference(expected.losses, state, expected)
        assert apart > zoo_cell.TOLERANCE
        assert worst == "model.norm.weight"
