"""Sliders beside pictures: what they ask for, what is shown, and what stands there without them."""

from __future__ import annotations

import base64
import builtins
import json
import subprocess
import sys

import pytest

import meshplan
from meshplan.errors import PlanError, SpecError
from meshplan.memory.analytic import microbatches
from meshplan.memory.analytic.estimate import estimate_analytic
from meshplan.model.blueprint import from_config
from meshplan.pictures.explored import Knobs, knobs_of, scene_of, spec_at
from meshplan.plan.plan import make_plan
from meshplan.spec.reader import load_spec
from meshplan.textbook.inputs import read_limit
from tests.helpers import browser
from tests.helpers.pictured import LLAMA, STATED, check_readable, llama, plan_of, strange, written

ipywidgets = pytest.importorskip("ipywidgets", reason="pip install ipywidgets")


@pytest.fixture
def explorer():
    return meshplan.explore(llama(2))


def shown(explorer):
    *_, html = explorer.widget.children
    return html.value


def test_a_slider_redraws_what_the_plan_file_would_give(explorer):
    explorer.controls["nodes"].value = 4
    explorer.controls["micro"].value = 2
    stated = {**STATED, "hardware": {**STATED["hardware"], "nodes": 4},
              "mesh": {"dp_replicate": 4, "dp_shard": 8},
              "batch": {"micro": 2, "accumulate": 4, "seq_len": 8192}}  # fmt: skip
    plan = make_plan(load_spec(stated), from_config(LLAMA, blocks=2))
    device, limit_bytes, _ = read_limit(None, None, plan.spec)
    estimate = estimate_analytic(plan, device=device, limit_bytes=limit_bytes)
    assert explorer.scene.verdict == f"It fits: {estimate.size} on every rank"
    words = shown(explorer)
    assert f"<b>{explorer.scene.verdict}</b>" in words
    assert "mesh: {dp_replicate: 4, dp_shard: 8}; strategy: hybrid_shard; 2 samples per" in words
    assert "256 a step" in words
    assert words.count("<svg ") == 2
    assert "node 3" in words


def test_every_picture_of_a_scene_can_be_read(explorer):
    for picture in explorer.scene.pictures:
        check_readable(picture.figure)
    texts = [text for picture in explorer.scene.pictures for text in written(picture.figure)]
    assert any(text.startswith("all_reduce along dp_replicate") for text in texts)


@pytest.mark.parametrize(
    ("settings", "mesh"),
    [
        ({"strategy": "full_shard"}, {"dp_shard": 16}),
        ({"strategy": "ddp"}, {"dp_replicate": 16}),
        ({"tp": 4}, {"dp_replicate": 2, "dp_shard": 2, "tp": 4}),
        ({"gpus_per_node": 4}, {"dp_replicate": 2, "dp_shard": 4}),
        ({"strategy": "zero1", "tp": 2, "pp": 2, "micro": 2}, {"pp": 2, "dp_shard": 4, "tp": 2}),
    ],
)
def test_axes_follow_the_settings(settings, mesh, explorer):
    scene = explorer.set(**settings)
    assert scene.is_possible, scene
    assert {a.name: a.size for a in make_plan(
        spec_at(explorer.plan, scene.knobs), explorer.plan.graph).mesh} == mesh  # fmt: skip
    assert {name: control.value for name, control in explorer.controls.items()} == {
        name: getattr(scene.knobs, name) for name in explorer.controls
    }
    assert ("tp_plan: auto" in scene.words[-1]) == ("tp" in mesh)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tp": 4, "gpus_per_node": 11}, "22 devices are not a multiple of 4"),
        ({"pp": 4, "micro": 2}, "2 samples cannot be divided into 4 pipeline microbatches"),
    ],
)
def test_what_cannot_be_is_said_in_words_and_the_way_back_is_open(settings, words, explorer):
    before = shown(explorer)
    scene = explorer.set(**settings)
    assert not scene.is_possible
    assert scene.pictures == ()
    assert "not possible" in scene.verdict
    assert words in scene.words[0]
    assert shown(explorer) == scene.html()
    assert 'role="alert"' in scene.html()
    assert "<svg" not in scene.html()
    explorer.set(**_as_dict(knobs_of(explorer.plan)))
    assert shown(explorer) == before


@pytest.mark.parametrize("settings", [{"micros": 2}, {"nodes": 0}, {"strategy": "fast"}])
def test_settings_that_are_none_are_refused(settings, explorer):
    with pytest.raises(SpecError):
        explorer.set(**settings)


def _as_dict(knobs):
    return {name: getattr(knobs, name) for name in knobs.__dataclass_fields__}


def test_operations_that_are_told_once_are_those_of_the_plan(monkeypatch):
    """What was told before changes nothing of what is told now."""

    def told(**changes):
        plan = llama(2, **changes)
        return estimate_analytic(plan, device="h100-sxm-80gb", limit_bytes=2**30)

    asked = [
        {},
        {"batch": {"micro": 2, "seq_len": 8192}},
        {"activation_checkpointing": "none"},
        {"mesh": {"dp_shard": 8, "tp": 2}, "strategy": "full_shard", "tp_plan": "auto"},
    ]
    fresh = []
    for changes in asked:
        monkeypatch.setattr(microbatches, "LAST", microbatches.LastPlayed(most=2))
        fresh.append(told(**changes))
    for _ in range(2):
        assert [told(**changes) for changes in asked] == fresh
    assert told(mesh={"dp_shard": 16}, strategy="full_shard") != fresh[0]


def test_what_a_move_leaves_as_it_is_is_not_drawn_again(explorer):
    first, before = explorer.scene.pictures
    explorer.controls["micro"].value = 2
    second, after = explorer.scene.pictures
    assert second is first
    assert after is not before
    explorer.controls["nodes"].value = 3
    third, _ = explorer.scene.pictures
    assert third.title.startswith("24 ranks on 3 nodes")


def test_samples_of_a_step_stay_where_they_are_stated():
    given = {**STATED, "batch": {"micro": 1, "global": 64, "seq_len": 8192}}
    plan = make_plan(load_spec(given), from_config(LLAMA, blocks=2))
    found = scene_of(plan, Knobs(**{**_as_dict(knobs_of(plan)), "micro": 2}))
    assert "2 samples per rank and microbatch, 2 microbatches: 64 a step" in found.words[-1]
    found = scene_of(plan, Knobs(**{**_as_dict(knobs_of(plan)), "micro": 3}))
    assert "64 is not a multiple of" in found.words[0]


def test_it_starts_from_a_file_a_spec_or_a_plan(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(json.dumps({**STATED, "model": {"config": str(LLAMA)}}))
    spec = load_spec(path)
    found = {meshplan.explore(each).scene.verdict
             for each in (path, spec, meshplan.decide(path))}  # fmt: skip
    assert len(found) == 1
    with pytest.raises(SpecError, match="overrides change a plan file"):
        meshplan.explore(spec, ["strategy=ddp"])
    with pytest.raises(SpecError, match="has its model"):
        meshplan.explore(llama(2), config=str(LLAMA))
    with pytest.raises(SpecError, match="theme"):
        meshplan.explore(llama(2), theme="pink")
    with pytest.raises(SpecError, match="names no function or config of the model"):
        meshplan.explore(load_spec(STATED))
    with pytest.raises(PlanError, match="matches no module"):
        meshplan.explore(path, ["rules=[{match: nobody, place: replicate}]"])


def test_names_are_texts_and_what_is_unknown_is_said():
    explorer = meshplan.explore(plan_of(strange(), mesh={"dp_shard": 2}, strategy="full_shard"))
    assert "activations are unknown" in explorer.scene.verdict
    explorer.controls["micro"].value = 2
    assert "activations are unknown" in shown(explorer)
    assert "<i>&amp;" not in shown(explorer)
    assert explorer.set(nodes=3).is_possible


def test_who_only_looks_sees_a_still(explorer, monkeypatch):
    live = explorer._repr_mimebundle_()
    assert set(live) == {
        "text/plain", "image/png", "application/vnd.jupyter.widget-view+json",
    }  # fmt: skip
    assert base64.b64decode(live["image/png"]).startswith(b"\x89PNG")

    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.partition(".")[0] == "ipywidgets":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    still = meshplan.explore(llama(2))
    assert (still.widget, still.controls) == (None, {})
    assert set(still._repr_mimebundle_()) == {"text/plain", "image/png"}
    assert live["text/plain"] == repr(still)
    before = still.scene.verdict
    assert still.set(micro=2).verdict != before


def test_the_still_says_how_to_get_sliders(explorer, monkeypatch):
    from meshplan.api import exploring

    said = []
    monkeypatch.setattr(exploring, "png_of", lambda scene, notes, **_: said.extend(notes) or b"")
    explorer._repr_mimebundle_()
    explorer.widget = None
    explorer._repr_mimebundle_()
    assert "sliders" in said[0]
    assert "pip install" in said[1]


@pytest.mark.wide
def test_it_needs_no_torch():
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "import meshplan\n"
        f"x = meshplan.explore({STATED!r}, config={str(LLAMA)!r})\n"
        "x.controls['nodes'].value = 3\n"
        "assert '24 ranks' in x.scene.words[0], x.scene.words\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.wide
def test_a_live_model_is_cut_anew():
    explorer = meshplan.explore("plans/tp_auto.yaml")
    scene = explorer.set(gpus_per_node=4)
    assert "mesh: {dp_shard: 2, tp: 2}" in scene.words[-1]
    assert "activations are unknown" in scene.verdict


@pytest.mark.skipif(browser.FOUND is None, reason="no chromium is installed")
@pytest.mark.parametrize(("width", "beside"), [(1500, 2), (700, 1), (375, 1)])
def test_a_browser_shows_the_pictures_beside_or_below_each_other(width, beside, explorer, tmp_path):
    page = (
        '<!DOCTYPE html><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    )
    (tmp_path / "scene.html").write_text(f"{page}<body>{explorer.scene.html()}")
    (tmp_path / "none.html").write_text(
        f"{page}<body>{explorer.set(tp=4, gpus_per_node=11).html()}"
    )
    with browser.Browser(tmp_path / "profile") as shown:
        shown.open(tmp_path / "scene.html", width=width)
        assert shown.ask("document.documentElement.scrollWidth") == width
        boxes = shown.ask(
            "[...document.querySelectorAll('svg')].map(s => s.getBoundingClientRect().toJSON())"
        )
        one, other = boxes
        assert (one["right"] <= other["left"]) == (beside == 2)
        assert (one["bottom"] <= other["top"]) == (beside == 1)
        assert all(box["width"] > 0.4 * width for box in boxes)
        shown.open(tmp_path / "none.html", width=width)
        assert shown.ask("document.documentElement.scrollWidth") == width
        assert "are not a multiple of 4" in shown.ask(
            "document.querySelector('[role=alert]').innerText"
        )
        assert shown.complaints == []
