"""Pictures by their structure: facts, titles beside the sentence expected, and what can be read."""

from __future__ import annotations

import re
import threading
import xml.etree.ElementTree as ET

import pytest
from matplotlib.text import Text

from meshplan.errors import SpecError
from meshplan.layout.mesh import Mesh
from meshplan.layout.schedules import SCHEDULES
from meshplan.memory.analytic.estimate import estimate_analytic
from meshplan.memory.log.events import Term
from meshplan.pictures.base.page import fitted, fitted_name, width_of, wrapped
from meshplan.pictures.base.palette import PASSES, SHARDS, TERMS, THEMES, shard_ink
from meshplan.pictures.base.types import Picture
from meshplan.pictures.main import WHATS, draw, facts_of
from meshplan.pictures.memory.bars import memory_bars, states_alone
from meshplan.pictures.mesh.links import crosses_nodes, members
from meshplan.pictures.mesh.mesh_map import mesh_map
from meshplan.pictures.mesh.tensor import tensor_layout
from meshplan.pictures.plans.gantt import gantt
from meshplan.textbook.inputs import read_limit
from meshplan.units import GIB, format_seconds
from tests.helpers.graphs import blocks
from tests.helpers.pictured import LONG, boxes, check_readable, llama, plan_of, strange, written

PIPED = {
    "mesh": {"pp": 4, "dp_shard": 4},
    "strategy": "full_shard",
    "batch": {"micro": 8, "seq_len": 2048},
    "activation_checkpointing": None,
    "pipeline": {"schedule": "1F1B", "microbatches": 8},
}


# Mesh


def test_equal_colours_hold_the_same_shard():
    facts = mesh_map(llama())
    tiles = {tile.rank: tile for node in facts.nodes for tile in node.tiles if tile}
    assert sorted(tiles) == list(range(16))
    assert all(tiles[rank].shard == tiles[rank + 8].shard == rank for rank in range(8))
    assert (facts.num_shards, facts.copies, facts.cut_axes) == (8, 2, ("dp_shard",))
    assert tiles[9].at == ("dp_replicate 1", "dp_shard 1")


def test_shards_are_told_apart_along_every_axis_that_cuts():
    plan = llama(2, mesh={"dp_replicate": 2, "dp_shard": 4, "tp": 2}, tp_plan="auto")
    facts = mesh_map(plan)
    tiles = [tile for node in facts.nodes for tile in node.tiles]
    assert facts.cut_axes == ("dp_shard", "tp")
    assert [t.shard for t in tiles] == [plan.mesh.index(t.rank, facts.cut_axes) for t in tiles]


def test_some_groups_across_nodes_are_enough():
    mesh = Mesh.of({"dp_replicate": 3, "tp": 4})
    assert crosses_nodes(mesh, ("tp",), 4) is False
    assert crosses_nodes(mesh, ("tp",), 6) is True  # ranks 4 to 7
    assert crosses_nodes(mesh, ("tp",), None) is None
    assert list(members(mesh, ("dp_replicate",), 2)) == [2, 6, 10]


def test_a_map_tells_what_crosses_the_nodes():
    facts = mesh_map(llama())
    inside, outside = [
        {lane.kind for lane in facts.lanes if bool(lane.crosses) is crosses}
        for crosses in (False, True)
    ]
    assert inside == {"reduce_scatter", "all_gather"}
    assert outside == {"all_reduce"}
    across = next(lane for lane in facts.lanes if lane.crosses)
    # An eighth of every gradient in float32, there and back between two.
    assert across.sent_bytes == llama().graph.num_params // 8 * 4
    assert across.bytes_per_s == 50e9
    assert facts.title == (
        "16 ranks on 2 nodes: 8 different shards, each held twice; each rank sends 3.7 GiB a step "
        "along axes that cross nodes"
    )
    assert "ACROSS NODES, 50 GB/s" in facts.alt


def test_the_map_draws_each_rank_and_marks_what_crosses():
    picture = draw(llama(), "mesh")
    tiles = boxes(picture.figure, "rank ")
    assert set(tiles) == {f"rank {rank}" for rank in range(16)}
    assert len({tiles[f"rank {rank}"].get_facecolor() for rank in range(8)}) == 8
    assert tiles["rank 3"].get_facecolor() == tiles["rank 11"].get_facecolor()
    bad = [t for t in picture.figure.findobj(Text) if t.get_gid() == "lane"]
    assert [t.get_color() for t in bad] == [THEMES["light"].ink] * 2 + [THEMES["light"].bad]


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"hardware": None},
        {"mesh": {"dp_shard": 1}, "strategy": "full_shard", "hardware": None},
        {"mesh": {"dp_shard": 16}, "strategy": "full_shard"},
        {"mesh": {"dp_replicate": 32, "dp_shard": 512},
         "hardware": {"nodes": 2048, "gpus_per_node": 8, "gpu": "h100-sxm-80gb"}},
        {"mesh": {"dp_shard": 64}, "strategy": "full_shard",
         "hardware": {"nodes": 1, "gpus_per_node": 64}},
    ],
    ids=["hybrid", "no hardware", "one rank", "16", "16384", "64 on a node"],
)  # fmt: skip
def test_maps_of_any_size_can_be_read(changes, theme):
    picture = draw(llama(2, **changes), "mesh", theme=theme)
    check_readable(picture.figure)


def test_a_huge_map_is_folded_and_counts_what_it_leaves_out():
    nodes = {"nodes": 2048, "gpus_per_node": 8, "gpu": "h100-sxm-80gb"}
    picture = draw(llama(2, mesh={"dp_replicate": 32, "dp_shard": 512}, hardware=nodes), "mesh")
    assert "… 2,037 more nodes, ranks 80–16,375" in written(picture.figure)
    assert len(boxes(picture.figure, "rank ")) == 11 * 8


# One tensor


def test_shards_of_a_tensor_are_those_of_its_layout():
    plan = llama(2, mesh={"pp": 1, "dp_shard": 8, "tp": 2}, strategy="full_shard", tp_plan="auto")
    facts = tensor_layout(plan, "model.layers.0.self_attn.o_proj")
    rest, used = facts.faces
    assert (rest.spelled, used.spelled) == ("S(0)@dp_shard S(1)@tp", "S(1)@tp")
    placed = plan.assignment.tensors[facts.fqn]
    for row in rest.rows.pieces:
        for column in rest.columns.pieces:
            for rank in rest.ranks(row, column):
                found = placed.stored.slices(placed.info.shape, plan.mesh, rank)
                expected = (slice(row.start, row.stop), slice(column.start, column.stop))
                assert found == expected
    held = [r for row in rest.rows.pieces for c in rest.columns.pieces for r in rest.ranks(row, c)]
    assert sorted(held) == list(range(16))


def test_the_largest_parameter_is_drawn_where_none_is_named():
    assert tensor_layout(llama(2)).fqn == "model.embed_tokens.weight"
    assert draw(llama(2), "layout").title == (
        "model.embed_tokens.weight is cut into 8 shards of 16,032 × 4,096, each held twice"
    )


def test_a_tensor_of_a_later_stage_is_on_its_ranks_only():
    facts = tensor_layout(llama(4, **PIPED), "lm_head")
    face = facts.faces[0]
    assert sorted(r for piece in face.rows.pieces for r in face.ranks(piece, None)) == [
        12, 13, 14, 15,
    ]  # fmt: skip


def test_many_shards_are_folded():
    nodes = {"nodes": 2048, "gpus_per_node": 8, "gpu": "h100-sxm-80gb"}
    plan = llama(2, mesh={"dp_shard": 16384}, strategy="full_shard", hardware=nodes)
    picture = draw(plan, "layout", name="model.norm")
    assert picture.title.startswith("model.norm.weight is cut into 16,384 shards of at most 1,")
    assert "none" in written(picture.figure)
    check_readable(picture.figure)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("model.layers.0.mlp.up_prj", "did you mean 'model.layers.0.mlp.up_proj'"),
        ("model.layers.0.mlp.act_fn", "has no parameter"),
    ],
)
def test_an_unknown_module_is_refused(name, problem):
    with pytest.raises(SpecError, match=problem):
        draw(llama(2), "layout", name=name)


# Memory


@pytest.mark.parametrize("changes", [{}, PIPED], ids=["hybrid", "pipeline"])
def test_bars_add_up_to_the_estimate(changes):
    plan = llama(4, **changes)
    device, limit_bytes, _ = read_limit(None, None, plan.spec)
    estimate = estimate_analytic(plan, device=device, limit_bytes=limit_bytes)
    facts = memory_bars(estimate)
    assert [bar.total_bytes for bar in facts.bars] == [
        group.peak.total_bytes for group in estimate.groups
    ]
    for bar, group in zip(facts.bars, estimate.groups, strict=True):
        parts = dict(bar.parts)
        assert {term: parts[str(term)] for term in group.terms} == dict(group.terms)
        assert bar.high_bytes == group.band[1]
    picture = draw(plan, "memory")
    for bar in facts.bars:
        drawn = boxes(picture.figure, f"{bar.name}: ")
        assert sum(box.get_width() for box in drawn.values()) * GIB == pytest.approx(
            bar.total_bytes, rel=1e-12
        )
        sizes = [int(name.split(": ")[-1].removesuffix(" B")) for name in drawn]
        assert sum(sizes) == bar.total_bytes
    check_readable(picture.figure)


def test_what_fits_and_what_does_not_is_said():
    plan = llama(2)
    device, limit_bytes, _ = read_limit(None, None, plan.spec)
    estimate = estimate_analytic(plan, device=device, limit_bytes=limit_bytes)
    assert draw(plan, "memory").title == f"It fits: {estimate.size} on every rank"
    over = draw(llama(2, hardware={"nodes": 2, "gpus_per_node": 8, "memory": "8GiB"}), "memory")
    assert over.title.startswith("It does not fit: expected ")
    assert ", of 8.0 GiB; ranks 0–15 are OVER by " in over.title
    verdict = next(
        text for text in over.figure.findobj() if getattr(text, "get_gid", str)() == "verdict"
    )
    assert "OVER by" in verdict.get_text()
    assert verdict.get_color() == THEMES["light"].bad


def test_unknown_activations_are_called_unknown():
    plan = llama(2, batch=None)
    facts = states_alone(plan, 80 * GIB, "why")
    assert facts.bars[0].total_bytes > 0
    picture = draw(plan, "memory")
    assert picture.title.endswith("activations are unknown")
    assert any("unknown" in name for name in boxes(picture.figure))
    assert any("the plan states no microbatch size" in text for text in written(picture.figure))
    too_large = draw(llama(mesh={"dp_replicate": 16}, strategy="ddp", batch=None), "memory")
    assert too_large.title.startswith("Does not fit: states alone are OVER by")


# Pipeline


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_drawn_and_its_bubble_told(name):
    schedule = SCHEDULES[name]
    pipeline = {"schedule": name, "microbatches": 8, "virtual": schedule.virtual or 2}
    plan = llama(8, **{**PIPED, "pipeline": pipeline})
    facts = facts_of(plan, "gantt")
    stages = 4 * pipeline["virtual"]
    forwards = [block for block in facts.blocks if block.kind == "F"]
    assert len({(b.stage, b.microbatch) for b in forwards}) == len(forwards) == stages * 8
    busy = sum(block.end - block.begin for block in facts.blocks)
    assert facts.idle_share == pytest.approx(1 - busy / (4 * facts.step))
    assert [row[-1][1] for row in facts.kept] == [0] * 4
    picture = draw(plan, "gantt")
    assert picture.title == (
        f"{name}: ranks wait {facts.idle_share:.1%} of a step of {format_seconds(facts.step)} "
        f"({stages} stages on 4 ranks, 8 microbatches)"
    )
    check_readable(picture.figure)


def test_what_a_rank_keeps_is_what_its_schedule_has_in_flight():
    facts = gantt(llama(4, **PIPED))
    assert facts.most_kept == (4, 3, 2, 1)
    # The last rank has one all the time: it is kept until its backward has ended.
    first, *rest, last = facts.kept[3]
    assert (first, {count for _, count in rest}, last) == ((0.0, 0), {1}, (27.0, 0))
    gpipe = {**PIPED, "pipeline": {"schedule": "GPipe", "microbatches": 8}}
    assert gantt(llama(4, **gpipe)).most_kept == (8, 8, 8, 8)
    assert gantt(llama(4, **PIPED)).idle_share == pytest.approx(3 / 11)


def test_without_a_pipeline_there_is_no_bubble():
    picture = draw(llama(2), "gantt")
    assert re.fullmatch(
        r"No pipeline: \d\d% of a step of [\d.]+ (ms|s) is computation; most of the rest: \w.*",
        picture.title,
    )
    assert len(boxes(picture.figure, "F stage")) == 4
    check_readable(picture.figure)
    # Without a known device, times are those of a forward.
    unknown = draw(llama(2, hardware=None), "gantt")
    assert unknown.title.startswith("No pipeline: every rank computes 4 microbatches")
    assert boxes(unknown.figure, "part ") == {}
    check_readable(unknown.figure)


# All of them


def test_every_term_has_a_colour_of_its_own():
    assert set(TERMS) == set(Term)
    assert len({(ink.colour, ink.hatch) for ink in TERMS.values()}) == len(Term)
    assert len({shard_ink(n, 32) for n in range(32)}) == 32 > len(SHARDS)
    assert len({ink.colour for ink in PASSES.values()}) == 4


@pytest.mark.parametrize("what", ["mesh", "layout", "memory", "gantt"])
def test_strange_names_are_drawn(what, tmp_path):
    picture = draw(plan_of(strange(), mesh={"dp_shard": 2}, strategy="full_shard"), what)
    check_readable(picture.figure)
    page = picture.save(tmp_path / "page.html").read_text()
    assert "<script" not in page
    assert not re.search(r"(?:src|href)=.(?!#)", page)
    ET.fromstring(picture.svg())
    assert picture.save(tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", [LONG, "слой", "层", "a$b$c", "<i>&"])
def test_a_layout_of_any_name_is_drawn(name):
    picture = draw(
        plan_of(strange(), mesh={"dp_shard": 2}, strategy="full_shard"), "layout", name=name
    )
    assert picture.title.startswith(f"{name}.weight")
    check_readable(picture.figure)


def test_the_same_plan_is_the_same_svg_and_matplotlib_is_left_alone():
    import matplotlib

    stated = {"svg.fonttype": "path", "svg.hashsalt": "mine"}
    with matplotlib.rc_context(stated):
        before = dict(matplotlib.rcParams)
        one, two = (draw(llama(2), "mesh").svg() for _ in range(2))
        assert dict(matplotlib.rcParams) == before
    assert one == two
    assert "<text" in one


def test_pictures_are_drawn_by_several_threads():
    plan, found = llama(2), []
    alone = draw(plan, "memory").svg()
    threads = [
        threading.Thread(target=lambda: found.append(draw(plan, "memory").svg())) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [alone] * 3


def test_a_notebook_shows_the_sentence_too():
    picture = draw(llama(2), "mesh")
    assert isinstance(picture, Picture)
    shown = picture._repr_html_()
    assert 'role="img"' in shown
    assert "<title>rank 3</title>" in shown
    layout = draw(llama(2), "layout")._repr_html_()
    assert "<title>shard 1: ranks 1, 9, rows 16,032–32,063, columns 0–4,095</title>" in layout
    assert not re.search(r'<g id="', shown)
    assert picture.alt in shown
    assert llama(2).draw("mesh").title == picture.title


def test_texts_are_measured_and_shortened():
    assert width_of("mm") > width_of("m")
    assert width_of(fitted("a" * 300, 2.0)) <= 2.0
    assert all(width_of(line) <= 3.0 for line in wrapped("word " * 80, 3.0))
    for name in (f"a.{LONG}.weight", "model.layers.{0..31}.mlp.up_proj.weight", LONG):
        assert width_of(fitted_name(name, 1.2)) <= 1.2
    assert wrapped("needs 3.7 GiB", width_of("needs 3.7"))[-1].endswith("GiB")


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda plan: draw(plan, "mash"), "there is no picture of 'mash'"),
        (lambda plan: draw(plan, "mesh", theme="pink"), "'pink' is no theme"),
        (lambda plan: draw(plan, "mesh", name="lm_head"), "has no option 'name'"),
        (lambda plan: draw(plan, "mesh", colour=3), "has no option 'colour'"),
        (lambda plan: draw(plan, "mesh").save("x.gif"), "'.gif' is no picture format"),
        (lambda plan: draw(plan, "mesh").save("picture"), "the name has no suffix"),
        (lambda plan: draw(plan, "mesh").save("/nowhere/x.png"), "its folder does not exist"),
    ],
)
def test_bad_questions_are_refused(call, problem):
    with pytest.raises(SpecError, match=problem):
        call(llama(2))


def test_every_word_is_listed():
    assert set(WHATS) >= {"mesh", "layout", "memory", "gantt"}
    assert plan_of(blocks(), mesh={"dp_shard": 2}).draw("layout").what == "layout"


def test_axes_of_eight_ranks_of_a_node_are_written_out():
    texts = written(draw(llama(2), "mesh").figure)
    assert texts.count("dp_replicate 1") == 8
    assert not any("…" in text for text in texts)
