"""One spec in force: every verb goes by the lock that holds, or says why not.

Which seeded bug would this catch? A verb that asks the plan file alone, a lock that is passed over
in silence, a key that `plan` chooses and another verb takes the default of.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import meshplan
from meshplan.api import checking
from meshplan.api.planning import lock_plan, overrides_of_free, search_plan
from meshplan.cli.app import main
from meshplan.errors import SpecError
from meshplan.planner.lock.lock import lock_path, read, spec_hash, write
from meshplan.spec.reader import load_spec
from tests.bench import consistency
from tests.helpers import models
from tests.helpers.wide import leaving
from tests.planner.test_planner import LARGE, LLAMA, job

__all__ = ["job"]

STATED = {
    "mesh": {"dp_shard": 8}, "strategy": "full_shard", "batch": {"micro": 2, "accumulate": 1,
    "seq_len": 8192}, "hardware": {"nodes": 1, "gpus_per_node": 8, "gpu": "a100-sxm-40gb"},
}  # fmt: skip
BY, OTHER = "uses plan.lock.yaml", "plan.lock.yaml was made for another state of this file"
DEFAULTS = "keys that the plan leaves out have their defaults"
VERBS = (
    "check -f PLAN", "estimate -f PLAN", "explain memory -f PLAN", "explain model.norm -f PLAN",
    "explain why strategy -f PLAN", "show -f PLAN", "draw --what memory -o OUT.svg -f PLAN",
    "diff PLAN PLAN", "report -o OUT.html -f PLAN",
)  # fmt: skip


@pytest.fixture
def closed(job) -> Path:
    """A plan that states mesh, strategy and batch, and fits by what `plan` chooses alone."""
    path = job(LLAMA | LARGE, **STATED)
    assert checking.estimate_memory(path).fits is False
    assert main(["plan", "-f", str(path), "-q"]) == 0
    return path


def notes_of(verb: str, path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[list[str], str]:
    """(the notes of `--json`, stderr without it) of a verb."""
    words = verb.replace("PLAN", str(path)).replace("OUT", str(path.with_name("out"))).split()
    capsys.readouterr()
    main([*words, "--json", "-q"])
    notes = json.loads(capsys.readouterr().out.splitlines()[-1])["notes"]
    main(words)
    return notes, capsys.readouterr().err


@pytest.mark.parametrize("verb", leaving(VERBS, lambda _, verb: verb.startswith("report")))
def test_every_verb_says_which_lock_it_went_by_or_why_not(closed, capsys, verb):
    notes, err = notes_of(verb, closed, capsys)
    assert any(note.endswith(BY) for note in notes)
    assert f"{BY}\n" in err
    closed.write_text(json.dumps({**json.loads(closed.read_text()), "clip_grad_norm": 1.0}))
    notes, err = notes_of(verb, closed, capsys)
    assert any(note.endswith(f"{OTHER}: {DEFAULTS}") for note in notes)
    assert f"{OTHER}: {DEFAULTS}\n" in err


def test_every_verb_says_what_plan_said(closed, capsys):
    """The bytes, the seconds and the verdict of the lock, not of the defaults."""
    chosen = search_plan(closed).chosen
    assert chosen is not None
    estimate = checking.estimate_memory(closed)
    assert estimate.worst.band == chosen.memory.worst.band
    assert estimate.fits is True
    assert checking.decide(closed).digest() == chosen.plan.digest()
    found = checking.check_plan(closed)
    assert found.plan is not None
    assert found.plan.digest() == chosen.plan.digest()
    assert main(["draw", "-f", str(closed), "--what", "memory"]) == 0
    assert capsys.readouterr().out.startswith(f"It fits: {estimate.size} on every rank\n")


def test_plan_says_what_the_file_is_without_its_choices(closed, capsys):
    lock_path(closed).unlink()
    without = checking.estimate_memory(closed)
    assert main(["plan", "-f", str(closed), "--dry-run", "--json"]) == 0
    out, err = capsys.readouterr()
    written = json.loads(out)["result"]["as_written"]
    assert written["peak_bytes"] == without.worst.band[1]
    assert written["fits"] is False
    assert f"with the file's defaults, without the lock: {without.size}: OVER by " in err


def test_a_plan_changed_on_top_is_not_the_locks(closed):
    found = checking.check_plan(closed, ["precision=bf16-true"])
    assert found.notes == (f"plan.lock.yaml was made for the file without --set: {DEFAULTS}",)
    assert found.plan is not None
    assert not found.plan.assignment.recompute


def test_without_a_lock_nothing_is_said_of_one(closed, capsys):
    lock_path(closed).unlink()
    assert main(["check", "-f", str(closed)]) == 0
    assert capsys.readouterr().err == ""
    assert checking.check_plan(json.loads(closed.read_text()) | {"model": None}).is_ok


def test_a_lock_of_an_earlier_version_holds(closed):
    """It took a headroom that nobody stated for 10 %, of which nobody's figures went by."""
    spec = load_spec(closed)
    assert spec.hardware is not None
    assert spec.hardware.headroom == 0
    lock = read(lock_path(closed))
    assert lock is not None
    assert lock.spec == spec_hash(spec) != spec_hash(load_spec(closed, ["hardware.headroom=0.1"]))
    assert "headroom=0.1" not in repr(spec)


def test_what_is_freed_is_in_the_lock_and_holds_in_every_verb(closed, capsys):
    free = ["batch.micro", "mesh.dp_replicate"]
    words = [word for key in free for word in ("--free", key)]
    stated = json.loads(closed.read_text())
    stated["batch"] = {"micro": 2, "global": 16, "seq_len": 8192}
    closed.write_text(json.dumps(stated))
    assert main(["plan", "-f", str(closed), "-q", *words]) == 0
    lock = read(lock_path(closed))
    assert lock is not None
    assert lock.free == tuple(free)
    line = "uses plan.lock.yaml, which frees batch.micro and mesh.dp_replicate"
    found = checking.check_plan(closed)
    assert found.notes == (line,)
    assert found.plan is not None
    chosen = search_plan(closed, overrides_of_free(free)).chosen
    assert chosen is not None
    assert found.plan.digest() == chosen.plan.digest()
    capsys.readouterr()
    assert main(["plan", "-f", str(closed), *words]) == 0
    assert "nothing changed since the last lock" in capsys.readouterr().err


def test_a_picture_of_the_search_is_of_what_is_freed(closed, capsys):
    """With the strategy free there are more configurations in it."""
    words = ["draw", "--what", "pareto", "-o", str(closed.with_name("out.svg")), "-f", str(closed)]
    counts = []
    for free in ([], ["--free", "strategy"]):
        capsys.readouterr()
        assert main([*words, "--json", *free]) == 0
        title = json.loads(capsys.readouterr().out)["result"]["title"]
        counts.append(int(title.split()[2].replace(",", "")))
    assert counts[0] < counts[1]


@pytest.mark.parametrize("key", ["loss", "mesh.xp", "model"])
def test_what_nobody_chooses_cannot_be_freed(closed, capsys, key):
    assert main(["plan", "-f", str(closed), "--free", key]) == 2
    assert f"--free: '{key}' is not a key that the planner chooses" in capsys.readouterr().err


@pytest.mark.parametrize("free", [["model"], "mesh", [3]])
def test_a_lock_frees_only_what_may_be_chosen(closed, free):
    lock = read(lock_path(closed))
    assert lock is not None
    content = {key: value for key, value in lock.content.items() if key != "hash"}
    write(lock_path(closed), {**content, "inputs": {**content["inputs"], "free": free}})
    with pytest.raises(SpecError, match="its free is"):
        read(lock_path(closed))


def trained_by_lock(path: str) -> tuple[bool, int]:
    """(whether blocks are recomputed, lines about the lock) on this rank."""
    import logging

    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("meshplan").addHandler(handler)
    try:
        model = meshplan.parallelize(models.build("hf_llama"), path)
    finally:
        logging.getLogger("meshplan").removeHandler(handler)
    return bool(model.meshplan.plan.assignment.recompute), told.count(BY)


def test_parallelize_goes_by_the_lock_of_a_plan_without_auto(job, pool):
    path = job(
        models.build("hf_llama").config.to_dict(), mesh={"dp_shard": 2}, strategy="full_shard",
        hardware={"nodes": 1, "gpus_per_node": 2, "gpu": "h100-sxm-80gb"},
        batch={"global": 16, "seq_len": models.SEQ_LEN},
    )  # fmt: skip
    assert pool(2).run(trained_by_lock, str(path)) == [(False, 0)] * 2
    lock_plan(path, search_plan(path))
    content = {k: v for k, v in read(lock_path(path)).content.items() if k != "hash"}
    content["chosen"] = {**content["chosen"], "activation_checkpointing": "full"}
    write(lock_path(path), content)
    assert pool(2).run(trained_by_lock, str(path)) == [(True, 1), (True, 0)]


@pytest.mark.parametrize("number", [1, 2])
def test_verbs_agree_on_drawn_plans(tmp_path, number):
    """A few of `python -m tests.bench.consistency`."""
    import random

    rng = random.Random(f"suite {number}")
    for _ in range(2):
        plan, config = consistency.drawn(rng, is_live=False)
        assert consistency.examined(plan, config, tmp_path, pictures=False)[1] == []


def test_a_report_says_that_it_planned(job):
    path = job()
    assert meshplan.make_report(path).notes[0] == "there is no plan.lock.yaml: planning"
