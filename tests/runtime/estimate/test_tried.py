"""`check` runs the forward of a live model as a rank would, and names the line that cannot run."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from meshplan.api import checking
from meshplan.cli.app import main
from meshplan.errors import PlanError
from meshplan.runtime.estimate import tried

FILE = Path(__file__).parents[2] / "helpers" / "tried_models.py"
LINES = {
    found[1]: number
    for number, line in enumerate(FILE.read_text().splitlines(), 1)
    if (found := re.search(r"# LINE: (\w+)", line))
}
FUSED = [{"match": "c_attn", "place": {"tp": "packed_colwise(3)"}},
         {"match": "c_proj", "place": {"tp": "rowwise"}}]  # fmt: skip


def cut(first: str, second: str) -> list[dict[str, Any]]:
    return [{"match": first, "place": {"tp": "colwise"}},
            {"match": second, "place": {"tp": "rowwise"}}]  # fmt: skip


def plan(entry: str, **more: Any) -> dict[str, Any]:
    return {
        "version": 1, "model": {"entry": f"tests.helpers.tried_models:{entry}"}, "mesh": {"tp": 2},
        "input": {"shape": [2, 6, 32], "dtype": "float32"}, "batch": {"micro": 4},
    } | more  # fmt: skip


def checked(stated: dict[str, Any]) -> checking.CheckResult:
    return checking.check_plan(stated, model=stated["model"]["entry"])


@pytest.mark.parametrize(
    ("entry", "rules", "line", "said", "fix"),
    [
        (
            "fused", FUSED, "split",
            "with tp: 2, c_attn returns 48 features where one process returns 96",
            "write self.c_attn(x).chunk(3, dim=2), which splits the local size",
        ),
        (
            "Heads", cut("q", "o"), "view",
            "with tp: 2, q returns 16 features where one process returns 32",
            "write -1 in place of self.n_head, the size in one process",
        ),
        (
            "Scaled", cut("up", "down"), "factors",
            "with tp: 2, up returns 32 features where one process returns 64",
            "read the size from the tensor there",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"dp_shard": 2, "tp": 2}])
def test_the_line_that_counts_on_the_whole_width_is_named(entry, rules, line, said, fix, mesh):
    (problem,) = checked(plan(entry, rules=rules, mesh=mesh)).problems
    assert said in problem.what
    assert f"tried_models.py:{LINES[line]} assumes" in problem.what
    assert problem.fix.startswith(fix)
    assert "rules[0].place.tp" in str(problem.origin)


def test_what_it_says_to_write_is_right():
    assert checked(plan("chunked", rules=FUSED)).is_ok


@pytest.mark.parametrize("mesh", [{"dp_shard": 2}, {"tp": 2}, {"pp": 2}])
def test_a_forward_that_no_process_runs_is_told_by_its_line(mesh):
    schedule = {"pipeline": {"schedule": "1F1B", "microbatches": 2}} if "pp" in mesh else {}
    stated = plan("Broken", mesh=mesh, rules=cut("up", "down") * ("tp" in mesh), **schedule)
    (problem,) = checked(stated).problems
    assert (
        f"fails at tests/helpers/tried_models.py:{LINES['broken']}, in one process too"
        in problem.what
    )
    assert "[2, 6, 32] float32" in problem.what
    assert "IndexError: too many indices" in problem.what


@pytest.mark.parametrize("verb", ["estimate", "verify"])
def test_other_verbs_say_the_same(verb, tmp_path, capsys):
    stated = plan("fused", rules=FUSED)
    (problem,) = checked(stated).problems
    path = tmp_path / "plan.yaml"
    path.write_text(repr(stated).replace("'", '"').replace("True", "true"))
    code = main([verb, "-f", str(path), "-q", "--model", stated["model"]["entry"]])
    told = "".join(capsys.readouterr())
    assert code != 0
    assert problem.what in told
    assert problem.fix in told


def test_what_cannot_be_run_without_numbers_is_said_and_no_problem():
    found = checked(plan("Asking", rules=cut("up", "down")))
    assert found.is_ok
    assert any("the forward under the plan was not checked: " in note for note in found.notes)


def test_inputs_that_nobody_stated_are_not_blamed_on_the_model():
    stated = plan("Broken", mesh={"dp_shard": 2})
    del stated["input"]
    found = checked(stated)
    assert found.is_ok
    assert any("the plan states no input for Broken" in note for note in found.notes)


@pytest.mark.parametrize("mesh", [{"dp_replicate": 2, "dp_shard": 4}, {"dp_shard": 2, "tp": 2}])
def test_a_forward_that_runs_is_ok_without_a_word(mesh):
    found = checked(plan("chunked", mesh=mesh, rules=FUSED if "tp" in mesh else []))
    assert (found.is_ok, found.notes) == (True, ())


def test_deciding_for_another_verb_runs_no_forward(monkeypatch):
    monkeypatch.setattr(tried, "try_source", lambda *_: pytest.fail("it ran"))
    stated = plan("fused", rules=FUSED)
    assert checking.decide(stated, model=stated["model"]["entry"]).mesh.size("tp") == 2
    with pytest.raises(PlanError):
        checking.decide(stated | {"mesh": {"tp": 5}}, model=stated["model"]["entry"])


def test_it_costs_little():
    stated = plan("chunked", rules=FUSED)
    checked(stated)  # What is imported once counts for nothing.
    began = time.process_time()
    for _ in range(3):
        checked(stated)
    assert time.process_time() - began < 3 * 1.5
