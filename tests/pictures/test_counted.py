"""Pictures of a plan that knows how many parameters there are, and nothing else."""

from __future__ import annotations

import re

import pytest

import meshplan
from meshplan.cli.app import main
from meshplan.errors import PlanError
from meshplan.memory.answer.states import state_bytes
from meshplan.pictures.main import WHATS, draw
from meshplan.pictures.memory.waterfall import waterfall_of_states
from meshplan.pictures.mesh.counted import OF_COUNT, ONLY_COUNT, counted_plan, is_counted
from meshplan.spec.reader import load_spec
from meshplan.units import GIB, KIB, MIB
from tests.helpers.graphs import graph
from tests.helpers.pictured import boxes, check_readable, llama, plan_of, strange, written

BILLIONS = 3_000_000_000
HARDWARE = {"nodes": 2, "gpus_per_node": 4, "gpu": "h100-sxm-80gb"}


def counted(**more):
    stated = {"version": 1, "model": {"params": "3e9"}, "hardware": HARDWARE, **more}
    return counted_plan(load_spec(stated))


@pytest.mark.parametrize(
    ("strategy", "precision", "states", "book"),
    [("full_shard", "32-true", 16 / 8, 16 / 8), ("zero1", "32-true", 16 / 8, 8 + 8 / 8),
     ("ddp", "bf16-mixed", 16, 18), ("hybrid_shard", "32-true", 16 / 4, 16 / 4)],
)  # fmt: skip
def test_states_are_those_of_the_textbook(strategy, precision, states, book):
    plan = counted(strategy=strategy, precision=precision)
    parts = boxes(draw(plan, "memory").figure, "ranks 0–7: ")
    held = sum(int(name.rsplit(": ", 1)[1].removesuffix(" B"))
               for name in parts if name.endswith(" B"))  # fmt: skip
    assert held == pytest.approx(states * BILLIONS, abs=8)
    assert any("unknown" in name for name in parts)
    facts = waterfall_of_states(plan, None, ONLY_COUNT)
    assert facts.steps[0].total_bytes == book * BILLIONS
    assert facts.total_bytes == pytest.approx(states * BILLIONS, abs=8)
    # Parameters that a step gathers are none of what lies between steps.
    missing = "activations" + (" and gathered parameters" if strategy == "zero1" else "")
    assert facts.title.endswith(f"; {missing} are unknown")
    assert draw(plan, "memory").title.endswith(f"; {missing} are unknown")
    picture = draw(plan, "waterfall")
    total = boxes(picture.figure, "total")["total"].get_width() * GIB
    assert total == pytest.approx(facts.total_bytes)
    assert "states alone" in written(picture.figure)
    check_readable(picture.figure)


def test_the_map_says_that_nobody_knows_what_is_sent():
    picture = draw(counted(strategy="full_shard"), "mesh")
    assert picture.title == (
        "8 ranks on 2 nodes: 8 different shards, each held once; traffic across nodes is unknown"
    )
    assert not re.search(r"\d [KMG]iB", " ".join(written(picture.figure)))
    check_readable(picture.figure)


@pytest.mark.parametrize("what", [what for what in WHATS if what not in OF_COUNT])
def test_what_needs_modules_is_refused_in_words(what, tmp_path, capsys):
    with pytest.raises(PlanError, match=ONLY_COUNT):
        draw(counted(strategy="ddp"), what)


def test_the_command_line_draws_it(tmp_path, capsys):
    path = tmp_path / "plan.yaml"
    path.write_text("version: 1\nmodel: {params: 3e9}\nmesh: {dp_shard: 8}\nstrategy: zero2\n")
    for what in OF_COUNT:
        out = tmp_path / f"{what}.png"
        assert main(["draw", "-f", str(path), "--what", what, "-o", str(out)]) == 0
        assert out.stat().st_size > 1000
    assert main(["draw", "-f", str(path), "--what", "memory"]) == 0
    assert "activations and gathered parameters are unknown" in capsys.readouterr().out
    assert main(["draw", "-f", str(path), "--what", "treemap", "-o", str(out)]) == 2
    assert ONLY_COUNT in capsys.readouterr().err
    assert main(["draw", "-f", str(path), "--what", "mesh", "--set", "mesh={pp: 2, dp_shard: 4}",
                 "-o", str(out)]) == 2  # fmt: skip
    found = meshplan.explore(path).set(nodes=2)
    assert "gathered parameters are unknown" in found.verdict


def test_a_model_is_no_number():
    assert is_counted(counted(strategy="ddp"))
    assert not is_counted(llama(2))
    assert not is_counted(plan_of(graph({}, {}), mesh={"dp_shard": 2}))
    assert counted_plan(load_spec({"version": 1, "mesh": {"dp_shard": 2}})) is None


def test_a_step_that_nobody_knows_has_the_way_to_its_states():
    for plan in (llama(2, batch=None), plan_of(strange(), mesh={"dp_shard": 2}),
                 plan_of(graph({}, {}), mesh={"dp_shard": 2})):  # fmt: skip
        picture = draw(plan, "waterfall")
        held = state_bytes(plan.assignment, plan.spec.optimizer).total_bytes
        # Small models have a scale in a smaller unit, which its label names.
        (label,) = (t for t in written(picture.figure) if t.endswith(" of one GPU"))
        unit = {"GiB": GIB, "MiB": MIB, "KiB": KIB}[label.split()[0]]
        total = boxes(picture.figure, "total")["total"].get_width() * unit
        assert total == pytest.approx(held, abs=0.01)
        assert picture.title.endswith("activations are unknown")
        assert any("no microbatch size" in t for t in written(picture.figure))
        check_readable(picture.figure)
