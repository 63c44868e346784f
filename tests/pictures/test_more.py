"""Pictures of a step and of a search: waterfall, timeline, treemap, pareto, ladder, graph."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest
from matplotlib.collections import PolyCollection
from matplotlib.lines import Line2D

from meshplan.api import planning
from meshplan.cli.app import main
from meshplan.errors import PlanError, SpecError
from meshplan.memory.analytic.estimate import estimate_analytic
from meshplan.memory.log.events import Event, EventLog, Storage, Term
from meshplan.pictures.base.palette import THEMES, WHOLE
from meshplan.pictures.graphs.tree import module_tree
from meshplan.pictures.main import WHATS, draw, draw_decision
from meshplan.pictures.memory.timeline import draw_timeline, timeline
from meshplan.pictures.memory.treemap import squarified, treemap
from meshplan.pictures.memory.waterfall import waterfall
from meshplan.pictures.plans.ladder import ladder
from meshplan.pictures.plans.pareto import pareto
from meshplan.textbook.inputs import read_limit
from meshplan.units import GIB
from tests.bench.gallery import FOLDER, MOST_BYTES, PAGE, SHOWN
from tests.helpers.analytic import analytic_log
from tests.helpers.graphs import blocks, graph
from tests.helpers.pictured import (
    LLAMA,
    PIPED,
    boxes,
    check_readable,
    llama,
    plan_of,
    strange,
    written,
)

ALONE = {"mesh": {"dp_shard": 1}, "strategy": "full_shard", "hardware": None}


def estimate_of(plan):
    device, limit_bytes, _ = read_limit(None, None, plan.spec)
    return estimate_analytic(plan, device=device, limit_bytes=limit_bytes)


# Waterfall and timeline


@pytest.mark.parametrize("theme", THEMES)
def test_the_waterfall_ends_at_the_estimate_to_the_byte(theme):
    plan = llama(4)
    estimate = estimate_of(plan)
    facts = waterfall(estimate)
    first, *rest = facts.steps
    assert first.total_bytes + sum(step.delta_bytes for step in rest) == facts.total_bytes
    assert facts.total_bytes == estimate.worst.peak.total_bytes
    picture = draw(plan, "waterfall", theme=theme)
    drawn = boxes(picture.figure, "step ")
    sizes = [int(name.split(": ")[1].removesuffix(" B")) for name in drawn]
    large = [step.delta_bytes for step in facts.steps if abs(step.delta_bytes) > GIB]
    assert [size for size in sizes if abs(size) > GIB] == large
    assert sum(sizes) == facts.total_bytes
    ends = list(itertools.accumulate(sizes))
    for box, begin, end in zip(drawn.values(), [0, *ends], ends, strict=False):
        low, high = sorted((begin, end))
        assert (box.get_x() * GIB, box.get_width() * GIB) == pytest.approx((low, high - low))
    total = boxes(picture.figure, "total")["total"].get_width()
    assert total * GIB == pytest.approx(facts.total_bytes, rel=1e-12)
    assert picture.title.startswith("From the textbook's ")
    check_readable(picture.figure)


@pytest.mark.parametrize("changes", [{}, PIPED], ids=["hybrid", "pipeline"])
def test_the_timeline_peaks_at_the_estimate_to_the_byte(changes):
    plan = llama(4, **changes)
    worst = estimate_of(plan).worst
    picture = draw(plan, "timeline")
    areas = {a.get_gid(): a for a in picture.figure.findobj(PolyCollection) if a.get_gid()}
    top = max(path.vertices[:, 1].max() for a in areas.values() for path in a.get_paths())
    assert top * GIB == pytest.approx(worst.peak.requested_bytes, rel=1e-9)
    assert {str(term) for term in worst.terms} <= set(areas)
    assert picture.title == (
        f"Tensors of rank {worst.ranks[0]} peak at {worst.peak.requested_bytes / GIB:.1f} GiB, in "
        f"{worst.at.phase}"
        + (f" of {worst.at.module}" if worst.at.module else f", for {worst.at.term}")
    )
    check_readable(picture.figure)


def test_the_timeline_keeps_every_peak_where_events_are_many():
    storages = tuple(Storage(Term.ACTIVATIONS, module="m") for _ in range(3000))
    events = [
        e
        for n in range(3000)
        for e in (Event(10 + (n == 1234), n, 1), Event(-10 - (n == 1234), n, 1))
    ]
    log = EventLog(storages, tuple(events), ("before", "forward"))
    facts = timeline(log, 3)
    assert max(point.live_bytes for point in facts.points) == facts.peak_bytes == 11
    assert (facts.points[-1].live_bytes, facts.num_events) == (0, 6000)
    assert facts.title == "Tensors of rank 3 peak at 11 B, in forward of m"
    assert len(facts.points) < 800


def test_a_traced_log_is_drawn_as_it_is():
    plan = llama(2)
    log = analytic_log(plan, batch=1, seq_len=1024, rank=5)
    picture = draw(plan, "timeline", log=log, rank=5)
    assert picture.title.startswith("Tensors of rank 5 peak at ")
    assert (
        "Drawn are 3 of the 4 forwards of the step; the others equal the last but one."
        in written(picture.figure)
    )


@pytest.mark.wide
def test_a_live_model_is_traced_for_its_timeline(tmp_path, capsys):
    out = tmp_path / "timeline.svg"
    flags = ["-f", "plans/hybrid_2x4.yaml", "--what", "timeline", "-o", str(out)]
    assert main(["draw", *flags]) == 0
    assert "Tensors of rank 0 peak at " in capsys.readouterr().out


def test_terms_of_no_bytes_and_an_empty_log_are_drawn():
    empty = timeline(EventLog((Storage(Term.BUFFERS),), (Event(0, 0, 0),), ("before",)))
    check_readable(draw_timeline(empty, THEMES["light"]).figure)
    assert empty.peak_bytes == 0


# Treemap


def test_areas_are_bytes_and_what_is_whole_is_marked():
    plan = plan_of(
        blocks(), mesh={"dp_shard": 4}, strategy="full_shard",
        rules=[{"match": "layers.0", "place": "replicate"}],
    )  # fmt: skip
    facts = treemap(plan)
    held = [
        p.stored.local_numel(p.info.shape, plan.mesh) * 4 for p in plan.assignment.tensors.values()
    ]
    assert facts.total_bytes == sum(held)
    assert facts.whole_bytes == sum(a.num_bytes for a in facts.areas if "layers.0" in a.name) > 0
    picture = draw(plan, "treemap")
    drawn = boxes(picture.figure, "area ")
    areas = {name: box.get_width() * box.get_height() for name, box in drawn.items()}
    for name, area in areas.items():
        size = int(name.split(": ")[-1].removesuffix(" B"))
        assert area / sum(areas.values()) == pytest.approx(size / facts.total_bytes)
    marked = [b for n, b in drawn.items() if "layers.0" in n]
    assert {box.get_hatch() for box in marked} == {WHOLE.hatch}
    assert (
        picture.title
        == "2.9 KiB of parameters on rank 0: 1.6 KiB (54.8%) are replicated on every rank"
    )
    whole = treemap(plan, "global")
    assert whole.total_bytes == plan.graph.num_params * 4
    check_readable(picture.figure)
    check_readable(draw(plan, "treemap", of="global").figure)


def test_a_page_of_a_treemap_lets_one_choose_whose_bytes():
    for of, first in (("local", "bytes of rank 3"), ("global", "bytes of the model")):
        picture = draw(llama(2), "treemap", of=of, rank=3)
        assert picture.views[0][0] == first
        assert picture.views[0][1].title == picture.title
        page = picture.page()
        assert page.count("<svg ") == 2 * 2  # Each for wide and for narrow screens.
        assert page.count(" hidden>") == 1
        assert page.index('aria-pressed="true"') < page.index(first) < page.index("<svg ")
        assert {of: each.title for of, each in picture.views} == {
            "bytes of rank 3": draw(llama(2), "treemap", rank=3).title,
            "bytes of the model": draw(llama(2), "treemap", of="global").title,
        }
    assert "<script>" not in draw(llama(2), "mesh").page()


def test_a_treemap_folds_blocks_and_keeps_to_its_stage():
    plan = llama(4, **PIPED)
    names = {area.name for area in treemap(plan, rank=15).areas}
    assert "lm_head.weight" in names
    assert "model.embed_tokens.weight" not in names
    assert "model.layers.{0..3}.mlp.up_proj.weight" in {a.name for a in treemap(llama(4)).areas}


def test_rectangles_fill_the_room():
    found = squarified([6, 6, 4, 3, 2, 2, 1], 0, 0, 6, 4)
    assert [w * h for _, _, w, h in found] == pytest.approx([6, 6, 4, 3, 2, 2, 1])
    assert found[0] == (0, 0, 3.0, 2.0)
    assert squarified([], 0, 0, 1, 1) == []


# A search


@pytest.fixture(scope="module")
def decision():
    return planning.search_plan(
        {
            "version": 1, "model": {"config": str(LLAMA)}, "mesh": "auto", "strategy": "auto",
            "hardware": {"nodes": 1, "gpus_per_node": 8, "gpu": "h100-sxm-80gb"},
            "precision": "bf16-mixed", "batch": {"global": 8, "seq_len": 4096},
            "activation_checkpointing": "auto",
        }
    )  # fmt: skip


def test_the_frontier_has_all_candidates_and_the_star_is_the_plan(decision):
    facts = pareto(decision)
    assert len(facts.bounds) == len(decision.bounds) <= decision.num_configs
    chosen = decision.chosen
    assert (facts.chosen.num_bytes, facts.chosen.seconds) == (
        chosen.memory.worst.band[1], chosen.seconds,
    )  # fmt: skip
    fastest = min(d.seconds for d in facts.simulated if d.num_bytes <= facts.limit_bytes)
    assert fastest == decision.best_s
    # No bound is above what was measured of the fastest: it would not be one.
    assert min(dot.seconds for dot in facts.bounds) <= fastest
    assert all(
        a.num_bytes < b.num_bytes for a, b in zip(facts.frontier, facts.frontier[1:], strict=False)
    )
    picture = draw_decision(decision, "pareto")
    lines = {line.get_gid(): line for line in picture.figure.findobj(Line2D) if line.get_gid()}
    assert lines["chosen"].get_xdata()[0] * GIB == facts.chosen.num_bytes
    assert lines["limit"].get_xdata()[0] * GIB == decision.limit_bytes
    assert picture.title.startswith(f"Chosen of {decision.num_configs:,} configurations: ")
    check_readable(picture.figure)


def test_where_nothing_fits_the_picture_says_so(decision):
    nothing = dataclasses.replace(
        decision, chosen=None, alternatives=(), ladder=None, limit_bytes=GIB
    )
    picture = draw_decision(nothing, "pareto", theme="dark")
    assert picture.title == f"None of {decision.num_configs:,} configurations fits into 1.0 GiB"
    check_readable(picture.figure)
    with pytest.raises(PlanError, match="no plan was found that fits"):
        draw_decision(nothing, "ladder")


def test_the_ladder_goes_down_to_the_physical_limit(decision):
    facts = ladder(decision)
    found = decision.ladder
    assert [rung.seconds for rung in facts.rungs] == [
        found.roofline_s, found.no_network_s, found.no_memory_limit_s, found.plan_s,
        decision.chosen.seconds,
    ]  # fmt: skip
    picture = draw(decision.chosen.plan, "ladder", decision=decision)
    widths = [box.get_width() for box in boxes(picture.figure, "rung ").values()]
    assert widths == [rung.seconds for rung in facts.rungs]
    assert "times the physical limit of" in picture.title
    check_readable(picture.figure)


def test_a_plan_does_not_know_its_search():
    with pytest.raises(PlanError, match="a plan does not contain the search"):
        draw(llama(2), "pareto")


# Modules


def test_modules_are_folded_and_coloured_by_layout_or_stage():
    facts = module_tree(llama())
    names = [row.name for row in facts.rows]
    assert "{0..31}" in names
    assert sum(row.num_modules for row in facts.rows) == len(llama().graph.modules)
    assert facts.rows[0].num_params == llama().graph.num_params
    assert facts.title == (
        "LlamaForCausalLM: 423 modules of 8.03 B parameters, all laid out as S(0)@dp_shard"
    )
    piped = module_tree(llama(4, **PIPED))
    assert piped.groups == ("stage 0", "stage 1", "stage 2", "stage 3")
    assert piped.title.endswith("in 4 stages")


def test_a_large_tree_is_cut_and_counts_what_it_leaves_out():
    modules = {f"part{n}": "linear" for n in range(400)}
    tensors = {f"part{n}.weight": (4, 4) for n in range(400)}
    facts = module_tree(plan_of(graph(modules, tensors), mesh={"dp_shard": 2}))
    assert facts.rows[-1].name == "… 354 more"
    deep = {".".join("abcdefgh"[: n + 1]): "linear" for n in range(8)}
    check_readable(draw(plan_of(graph(deep, {}), mesh={"dp_shard": 2}), "graph").figure)


@pytest.mark.parametrize("what", ["treemap", "comm", "graph"])
def test_strange_names_and_empty_models_are_drawn(what):
    check_readable(draw(plan_of(strange(), mesh={"dp_shard": 2}), what, theme="dark").figure)
    alone = draw(llama(2, **ALONE), what)
    check_readable(alone.figure)
    texts = " ".join([alone.title, *written(alone.figure)])
    assert " 1 B" not in texts
    assert "replicated on every rank" not in texts
    empty = plan_of(graph({"a": "linear"}, {}), mesh={"dp_shard": 1})
    picture = draw(empty, what)
    check_readable(picture.figure)
    assert "no parameters" in picture.title or "nothing is sent" in picture.title


@pytest.mark.wide
@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("what", [what for what in WHATS if what not in ("pareto", "ladder")])
@pytest.mark.parametrize("changes", [{}, PIPED, {"mesh": {"dp_shard": 16}, "strategy": "zero1"}])
def test_every_picture_can_be_read(what, changes, theme):
    check_readable(draw(llama(4, **changes), what, theme=theme).figure)


# The command line


def test_the_command_line_writes_a_picture(tmp_path, capsys):
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        f"version: 1\nmodel: {{config: {LLAMA}}}\nhardware: {{nodes: 2, gpus_per_node: 8, gpu: "
        "h100-sxm-80gb, inter: 50GB/s}\nmesh: {dp_shard: 16}\nbatch: {micro: 1, seq_len: 2048}\n"
    )
    for what, suffix in (("memory", "png"), ("timeline", "svg"), ("graph", "html")):
        out = tmp_path / f"{what}.{suffix}"
        assert main(["draw", "-f", str(plan), "--what", what, "-o", str(out), "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["schema"] == "draw/1"
        assert told["result"]["file"] == str(out)
        assert told["result"]["title"]
        assert out.stat().st_size > 2000


def test_without_a_picture_it_is_an_overview(capsys):
    assert main(["draw", "-f", "plans/pp_fsdp_tp.yaml", "-q"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("8 ranks on 1 node")
    assert 0 < out.index("\n1F1B: ranks wait") < out.index("\nExpected ")


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["-o", "x.png"], "no picture is named"),
        (["--what", "cake"], "there is no picture of 'cake'"),
        (["--what", "comm"], "has no text form, and no file is named"),
        (["--what", "mesh", "-o", "x.bmp"], "'.bmp' is no picture format"),
        (["--what", "mesh", "-o", "/nowhere/x.png"], "its folder does not exist"),
        (["--what", "mesh", "-o", "x.png", "--theme", "pink"], "'pink' is no theme"),
        (["--what", "comm", "-o", "x.png", "--rank", "16"], "there is no rank 16"),
        (["--what", "timeline", "-o", "x.png", "--rank", "99"], "there is no rank 99"),
        (["--what", "comm", "-o", "x.png", "--rank", "-1"], "'-1' is not a rank"),
        (["--what", "mesh", "-o", "x.png", "--module", "a"], "has no option 'name'"),
        (["--what", "pareto", "-o", "x.png", "--rank", "1"], "takes no --rank"),
        (["--what", "treemap", "-o", "x.png", "--bytes", "all"], "'all' is not a kind of bytes"),
    ],
)
def test_bad_flags_are_refused(flags, problem, capsys):
    settings = ("mesh={dp_shard: 16}", "strategy=full_shard", "batch.micro=1",
                "activation_checkpointing=none")  # fmt: skip
    stated = [word for setting in settings for word in ("--set", setting)]
    assert main(["draw", "-f", "plans/auto.yaml", *stated, *flags]) == 2
    assert problem in capsys.readouterr().err


def test_a_picture_that_cannot_be_written_is_a_problem(tmp_path, monkeypatch):
    picture = draw(llama(2), "mesh")
    with pytest.raises(SpecError, match="cannot be written"):
        picture.save(tmp_path / f"{'n' * 300}.png")


def test_the_gallery_shows_every_picture():
    page = PAGE.read_text()
    assert {shown.what for shown in SHOWN} == set(WHATS)
    files = [FOLDER / shown.file for shown in SHOWN]
    assert all(f"](gallery/{file.name})" in page for file in files)
    assert sorted(FOLDER.iterdir()) == sorted(files)
    assert max(file.stat().st_size for file in files) < MOST_BYTES
