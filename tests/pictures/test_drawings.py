"""Drawings as a reader sees them: what lies over what, which words there are, wide and narrow."""

from __future__ import annotations

import itertools
import re
from dataclasses import fields

import pytest
from matplotlib.collections import PolyCollection
from matplotlib.lines import Line2D
from matplotlib.text import Text

from meshplan.api import planning
from meshplan.memory.analytic.estimate import estimate_analytic
from meshplan.pictures.base.page import NARROW, SMALL
from meshplan.pictures.base.palette import PAGE, PLACEMENTS, THEMES, WHOLE
from meshplan.pictures.main import OF_DECISIONS, WHATS, draw, draw_decision, facts_of
from meshplan.pictures.memory.bars import memory_bars
from meshplan.pictures.memory.one_bar import spread
from meshplan.pictures.memory.scale import scale_of
from meshplan.pictures.memory.timeline import log_of, timeline
from meshplan.pictures.plans.pareto import difference, pareto, settings_of
from meshplan.planner.problem.request import cluster_of
from meshplan.planner.tables.whole_plan import Costed
from meshplan.report import figures
from meshplan.textbook.inputs import read_limit
from meshplan.units import GIB, format_bytes
from tests.helpers.graphs import blocks
from tests.helpers.pictured import (
    LLAMA,
    PIPED,
    boxes,
    check_clear,
    check_readable,
    llama,
    plan_of,
    strange,
    written,
)

TIGHT = {"mesh": {"dp_shard": 16}, "strategy": "full_shard", "activation_checkpointing": None}
"""A plan whose peak is within a few GiB of the limit."""
OVER = {"hardware": {"nodes": 2, "gpus_per_node": 8, "memory": "30GiB"}}
WIDE = {"hardware": {"nodes": 16, "gpus_per_node": 8}, "mesh": {"dp_replicate": 16, "dp_shard": 8}}
OF_PLANS = [what for what in WHATS if what not in OF_DECISIONS]


@pytest.fixture(scope="module")
def decision():
    return planning.search_plan(
        {
            "version": 1, "model": {"config": str(LLAMA)}, "mesh": "auto", "strategy": "auto",
            "hardware": {"nodes": 2, "gpus_per_node": 8, "gpu": "h100-sxm-80gb",
                         "inter": "50GB/s"},
            "precision": "bf16-mixed", "batch": {"global": 64, "seq_len": 8192},
            "activation_checkpointing": "auto",
        }
    )  # fmt: skip


def both(picture):
    """The figures of a picture for a wide and for a narrow screen."""
    return [picture.figure, picture.narrow().figure]


def texts(figure, gid):
    return [text for text in figure.findobj(Text) if text.get_gid() == gid]


def lines(figure, gid):
    return [line for line in figure.findobj(Line2D) if line.get_gid() == gid]


def turned(figure):
    """The texts that are not written from left to right."""
    return [text for text in figure.findobj(Text) if text.get_text() and text.get_rotation()]


# Narrow drawings


@pytest.mark.parametrize("what", OF_PLANS)
@pytest.mark.parametrize("changes", [{}, PIPED], ids=["hybrid", "pipeline"])
def test_a_narrow_drawing_can_be_read(what, changes):
    picture = draw(llama(4, **changes), what)
    narrow = picture.narrow()
    assert narrow.title == picture.title
    assert narrow.figure.get_figwidth() == NARROW < picture.figure.get_figwidth()
    check_readable(narrow.figure)
    assert turned(narrow.figure) == []


@pytest.mark.parametrize("what", ["mesh", "layout", "memory", "treemap", "gantt", "comm", "graph"])
def test_a_narrow_drawing_has_room_for_any_name(what):
    plan = plan_of(strange(), mesh={"dp_shard": 2}, strategy="full_shard")
    check_readable(draw(plan, what, theme="dark").narrow().figure)


@pytest.mark.parametrize("what", OF_DECISIONS)
def test_a_search_is_drawn_narrow(what, decision):
    for figure in both(draw_decision(decision, what)):
        check_readable(figure)
        check_clear(figure, "limit")


@pytest.mark.parametrize("what", WHATS)
@pytest.mark.parametrize("changes", [{}, PIPED, WIDE], ids=["hybrid", "pipeline", "16x8"])
def test_a_page_can_give_a_drawing_the_colours_of_its_theme(what, changes, decision):
    """No other colour depends on the theme: texts on tiles, cells of a heat map."""

    def drawings(theme):
        if what in OF_DECISIONS:
            picture = draw_decision(decision, what, theme=theme)
        else:
            picture = draw(llama(4, **changes), what, theme=theme)
        return figures.figure("p", picture).lower()

    found = drawings("page")
    for each in fields(PAGE):
        stands_for = getattr(THEMES["dark"], each.name).lower()
        found = found.replace(f"var(--{each.name})", stands_for)
    assert found.split("<") == drawings("dark").split("<")


def test_a_page_has_both_drawings_and_no_id_twice():
    for what, count in (("memory", 2), ("treemap", 4)):
        page = draw(llama(2), what).page()
        assert page.count("<svg ") == count
        assert page.count('class="wide"') == page.count('class="narrow"') == count // 2
        ids = re.findall(r'\bid="([^"]+)"', page)
        assert len(ids) == len(set(ids)) > 0
        used = {a or b for a, b in re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', page)}
        assert used <= set(ids)


# Memory


@pytest.mark.parametrize("what", ["memory", "waterfall"])
@pytest.mark.parametrize("changes", [{}, TIGHT, OVER, {**PIPED, **OVER}],
                         ids=["far", "near", "over", "several bars"])  # fmt: skip
def test_the_limit_runs_through_no_text(what, changes):
    for figure in both(draw(llama(**changes), what)):
        assert lines(figure, "limit")
        check_clear(figure, "limit")


def test_a_limit_far_away_is_told_but_leaves_the_bars_their_room():
    plan = llama(1, hardware={"nodes": 2, "gpus_per_node": 8, "memory": "4TiB"})
    for what in ("memory", "waterfall"):
        for figure in both(draw(plan, what)):
            assert lines(figure, "limit") == []
            assert any("4,096.0 GiB, is far beyond" in text for text in written(figure))
    assert scale_of(9 * GIB, 80 * GIB).limit == 80.0


def test_the_names_of_one_bar_are_beside_its_parts():
    plan = llama()
    device, limit_bytes, _ = read_limit(None, None, plan.spec)
    facts = memory_bars(estimate_analytic(plan, device=device, limit_bytes=limit_bytes))
    large = {name: size for name, size in facts.bars[0].parts if size > 2 * GIB}
    for figure in both(draw(plan, "memory")):
        said = " ".join(" ".join(text.split()) for text in written(figure))
        for name, size in large.items():
            assert re.search(rf"{re.escape(name)},? {re.escape(format_bytes(size))}", said), name
        # There is no legend: nothing is drawn outside of the bar.
        swatches = [
            box for box in boxes(figure, "").values() if "ranks 0–15: " not in box.get_gid()
        ]
        assert swatches == []


def test_a_legend_is_lower_than_its_bars_and_names_what_can_be_seen():
    batch = {"micro": 8, "seq_len": 8192}
    figure = draw(llama(**{**PIPED, "batch": batch}), "memory").figure
    inside = {text.get_text() for text in texts(figure, "inside")}
    assert inside
    names = [text for text in written(figure) if text in inside]
    assert len(names) == len(inside), "a name is written once: in its part or in the legend"
    bars = {name.split(": ")[1] for name in boxes(figure, "ranks ")}
    assert any(re.fullmatch(r"\d+ smaller categories", name) for name in bars)
    assert bars <= set(written(figure))
    assert len(bars) < 11


def test_labels_are_spread_without_overlap():
    wanted, sizes = [0.1, 0.2, 0.3, 4.0, 9.9], [1.0, 2.0, 1.0, 1.0, 1.0]
    found = spread(wanted, sizes, 0.0, 10.0)
    ends = [(at - size / 2, at + size / 2) for at, size in zip(found, sizes, strict=True)]
    assert ends[0][0] >= 0
    assert ends[-1][1] <= 10
    assert all(a[1] <= b[0] + 1e-6 for a, b in itertools.pairwise(ends))
    assert found[-1] == 9.5
    assert spread([], [], 0.0, 1.0) == []


def test_a_thin_peak_is_drawn_again_where_it_can_be_seen():
    plan = llama(16)
    facts = timeline(log_of(plan, 0, "h100-sxm-80gb"))
    near = [point for point in facts.near if point.event == facts.peak_event]
    assert [point.live_bytes for point in near] == [facts.peak_bytes]
    assert [point.event for point in facts.near] == list(
        range(facts.near[0].event, facts.near[-1].event + 1)
    )
    picture = draw(plan, "timeline")
    for figure in both(picture):
        whole, zoom = figure.axes
        for axes, least in ((whole, 0), (zoom, 10)):
            wide = axes.get_window_extent().width / (axes.get_xlim()[1] - axes.get_xlim()[0])
            assert wide >= least / 10, "an event of the peak is at least a pixel wide"
        # No line is drawn over the areas but the mark of the peak, and that is above them.
        drawn = [line for line in figure.findobj(Line2D) if line.get_gid()]
        assert {line.get_gid() for line in drawn} == {"peak"}
        assert all(line.get_ydata()[0] * GIB > facts.peak_bytes for line in drawn)
    assert {len(a.get_paths()[0].vertices) for a in figure.findobj(PolyCollection)} <= set(
        range(3, 600)
    )


def test_a_wide_peak_is_not_drawn_again():
    assert timeline(log_of(llama(2, **PIPED), 0, "h100-sxm-80gb")).near == ()


# Treemap, mesh, gantt


def test_a_treemap_of_one_layout_has_a_colour_for_each_part():
    picture = draw(llama(4), "treemap")
    colours = {box.get_facecolor() for box in boxes(picture.figure, "area ").values()}
    assert len(colours) >= 3
    assert {"mlp", "self_attn", "embed_tokens"} <= set(written(picture.figure))
    assert any("Layout of all: S(0)@dp_shard" in text for text in written(picture.figure))
    for figure in both(picture):
        assert turned(figure) == []


def test_what_is_replicated_stands_out_from_all_parts():
    rules = [{"match": "layers.0", "place": "replicate"}]
    plan = plan_of(blocks(), mesh={"dp_shard": 4}, strategy="full_shard", rules=rules)
    drawn = boxes(draw(plan, "treemap").figure, "area ")
    whole = {name for name, box in drawn.items() if box.get_hatch() == WHOLE.hatch}
    assert whole == {name for name in drawn if "layers.0" in name}
    assert WHOLE.colour not in {ink.colour for ink in PLACEMENTS}


def test_the_lanes_of_a_map_have_one_size():
    nodes = {"nodes": 2048, "gpus_per_node": 8, "gpu": "h100-sxm-80gb"}
    huge = llama(2, mesh={"dp_replicate": 32, "dp_shard": 512}, hardware=nodes)
    for plan in (llama(2), huge, llama(4, **PIPED)):
        for figure in both(draw(plan, "mesh")):
            sizes = {text.get_fontsize() for text in texts(figure, "lane")}
            assert len(sizes) == 1
            assert sizes.pop() >= SMALL


def test_the_time_of_a_step_without_a_pipeline_is_told_apart():
    plan = llama(4)
    facts = facts_of(plan, "gantt")
    costed = _costs(plan)
    times, parts = costed.stage_seconds, costed.step_parts
    passes = plan.accumulate * (times.forward_s[0] + times.backward_s[0])
    assert facts.step == pytest.approx(passes)
    assert facts.whole_step == pytest.approx(passes + parts.ends_s + parts.update_s)
    assert parts.recompute_s > 0
    assert parts.model_parallel_s == 0
    saved = _costs(llama(4, activation_checkpointing=None)).step_parts
    assert saved.recompute_s == 0
    assert saved.compute_s == pytest.approx(parts.compute_s)
    for figure in both(draw(plan, "gantt")):
        drawn = boxes(figure, "part ")
        assert [box.get_width() for box in drawn.values()] == [part for _, part in facts.parts]
        ends = [(box.get_x(), box.get_x() + box.get_width()) for box in drawn.values()]
        assert all(a[1] == pytest.approx(b[0]) for a, b in itertools.pairwise(ends))
        assert len(boxes(figure, "end ")) == 2
    tp = llama(4, mesh={"dp_shard": 8, "tp": 2}, strategy="full_shard", tp_plan="auto")
    assert _costs(tp).step_parts.model_parallel_s > 0


def _costs(plan):
    return Costed(plan, cluster_of(plan.spec, "h100-sxm-80gb"))


# A search


def test_no_plan_is_called_measured_and_the_frontier_has_names(decision):
    facts = pareto(decision)
    for figure in both(draw_decision(decision, "pareto")):
        said = " ".join(written(figure))
        assert "measured" not in said
        assert "simulated" in said
        assert f"chosen: {facts.chosen.seconds:.2f} s" in said
        for dot in facts.named:
            assert " ".join(dot.words.split()[:2]) in said
        assert "no plan is below the line" in said
    assert facts.named
    # The line is below all bounds: none has both less memory and less time than a step of it.
    for dot in (*facts.bounds, *facts.simulated):
        assert any(b.num_bytes <= dot.num_bytes and b.seconds <= dot.seconds for b in facts.bound)
    assert all(a.seconds > b.seconds for a, b in itertools.pairwise(facts.bound))


def test_candidates_that_differ_have_texts_that_differ(decision):
    every = {id(each): each for each in (*decision.evaluated_plans, *decision.measured)}.values()
    found = [", ".join(settings_of(each).values()) for each in every]
    plans = {(each.plan.digest(), each.seconds) for each in every}
    assert len(set(found)) == len(plans) > 1
    for each in every:
        assert bool(difference(each, decision.chosen)) == (each is not decision.chosen)


@pytest.mark.parametrize("theme", THEMES)
def test_letters_of_a_map_are_of_no_shard(theme):
    figure = draw(llama(2), "mesh", theme=theme).figure
    rings = [line for line in figure.findobj(Line2D) if line.get_markersize() == 13]
    assert {ring.get_markerfacecolor() for ring in rings} == {THEMES[theme].paper}
