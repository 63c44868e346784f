"""The terminal's twins of pictures, and what a notebook shows of values."""

from __future__ import annotations

import io
import itertools
import re
from xml.etree import ElementTree

import pytest

from meshplan.cli.app import main
from meshplan.cost.simulate import simulate
from meshplan.layout.layout import Layout
from meshplan.layout.schedules import SCHEDULES
from meshplan.memory.analytic.estimate import estimate_analytic
from meshplan.pictures.main import facts_of
from meshplan.pictures.plans.gantt import gantt
from meshplan.planner.problem.request import cluster_of
from meshplan.planner.tables.whole_plan import Costed
from meshplan.render.base.text import PlainStream
from meshplan.render.layouts.drawn import (
    gantt_lines,
    layout_lines,
    memory_lines,
    mesh_lines,
    print_lines,
)
from meshplan.spec.reader import load_spec
from meshplan.textbook.inputs import read_limit
from meshplan.units import GIB
from tests.helpers.graphs import graph
from tests.helpers.pictured import LONG, STATED, llama, plan_of, strange

PIPED = {
    "mesh": {"pp": 4, "dp_shard": 4}, "strategy": "full_shard",
    "batch": {"micro": 8, "seq_len": 2048}, "activation_checkpointing": None,
    "pipeline": {"schedule": "1F1B", "microbatches": 8},
}  # fmt: skip


def text_of(lines):
    out = io.StringIO()
    print_lines(lines, out, colour=False)
    return out.getvalue()


def test_the_map_has_every_rank_with_its_shard():
    text = text_of(mesh_lines(facts_of(llama(2), "mesh")))
    assert "node 0       0:0    1:1    2:2    3:3" in text
    assert "node 1       8:0    9:1   10:2   11:3" in text
    assert "ACROSS NODES, 50 GB/s" in text
    assert "\x1b" not in text


def test_the_bars_are_as_long_as_their_bytes():
    plan = llama(4)
    facts = facts_of(plan, "memory")
    text = text_of(memory_lines(facts))
    line = next(line for line in text.splitlines() if line.startswith("  ranks 0–15"))
    (bar,) = facts.bars
    parts = dict(bar.parts)
    for letter, name in (("P", "parameters"), ("O", "optimizer"), ("L", "logits and loss")):
        drawn = line.split(" GiB")[0].count(letter)
        assert drawn == pytest.approx(64 * parts[name] / facts.limit_bytes, abs=1)
    assert line.endswith(f"{bar.total_bytes / GIB:.1f} GiB: {facts.verdict(bar)}")
    over = facts_of(llama(4, hardware={"nodes": 2, "gpus_per_node": 8, "memory": "8GiB"}), "memory")
    assert "OVER by" in text_of(memory_lines(over))
    unknown = text_of(memory_lines(facts_of(llama(2, batch=None), "memory")))
    assert "? unknown: the plan states no microbatch size" in unknown


def test_the_layout_names_rows_and_ranks():
    text = text_of(layout_lines(facts_of(llama(2), "layout", name="lm_head")))
    assert "at rest: S(0)@dp_shard" in text
    assert re.search(r"rows 16,032–32,063 +ranks 1, 9", text)
    assert "in forward and backward: whole" in text


def test_the_rows_of_a_pipeline_wait_where_they_wait():
    text = text_of(gantt_lines(gantt(llama(4, **PIPED)), wide=33))
    assert "pp 0   FFFF......BBFBBFBBFBBFBB.BB.BB.BB  in flight 4" in text
    assert "pp 3   ...FBBFBBFBBFBBFBBFBBFBBFBB......  in flight 1" in text


@pytest.mark.parametrize("what", ["mesh", "layout", "memory", "gantt"])
def test_colour_only_adds_colour(what):
    lines = {"mesh": mesh_lines, "layout": layout_lines, "memory": memory_lines,
             "gantt": gantt_lines}[what](facts_of(llama(2), what))  # fmt: skip
    out = io.StringIO()
    print_lines(lines, out, colour=True)
    assert "\x1b[" in out.getvalue()
    plain = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    assert [line.rstrip() for line in plain.splitlines()] == text_of(lines).splitlines()


def test_colours_reach_the_terminal_and_control_characters_of_names_do_not():
    """The command line's stream escapes whatever it is written."""
    out = io.StringIO()
    print_lines(
        [[("bar", "black on cyan"), (" \x1b]0;title\x07", "")]], PlainStream(out), colour=True
    )
    assert out.getvalue() == "\x1b[30;46mbar\x1b[0m \\x1b]0;title\\x07\n"


def test_the_command_line_prints_the_twin(capsys):
    flags = ["--set", "mesh={dp_shard: 16}", "--set", "strategy=full_shard", "--set",
             "batch.micro=1", "--set", "activation_checkpointing=none"]  # fmt: skip
    assert main(["draw", "-f", "plans/auto.yaml", *flags, "--what", "mesh"]) == 0
    assert "16 different shards" in capsys.readouterr().out
    assert main(["draw", "-f", "plans/auto.yaml", *flags, "--what", "mesh", "--json"]) == 2
    assert "--json describes the file that was written" in capsys.readouterr().err


@pytest.mark.parametrize("colour", [False, True])
@pytest.mark.parametrize("what", ["mesh", "layout", "memory", "gantt"])
def test_a_narrow_terminal_has_narrow_drawings(what, colour, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    lines = {"mesh": mesh_lines, "layout": layout_lines, "memory": memory_lines,
             "gantt": gantt_lines}[what]  # fmt: skip
    for plan in (llama(2), llama(4, **PIPED)):
        out = io.StringIO()
        print_lines(lines(facts_of(plan, what)), out, colour=colour)
        plain = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue()).splitlines()
        assert max(map(len, map(str.rstrip, plain))) <= 60
        if what == "mesh":
            cells = " ".join(plain).partition("each cell")[0]
            assert len(re.findall(r"\d+:\d+", cells)) == 16
        rows = [line for line in plain if re.search(r"GiB: .* left$|in flight \d", line.rstrip())]
        assert bool(rows) == (what in ("memory", "gantt"))
        assert all(line.startswith(("  ranks ", "  pp ")) for line in rows), (
            "drawn anew, not folded"
        )


@pytest.mark.parametrize("what", ["mesh", "layout", "memory", "gantt"])
def test_any_plan_has_its_lines(what):
    lines = {"mesh": mesh_lines, "layout": layout_lines, "memory": memory_lines,
             "gantt": gantt_lines}[what]  # fmt: skip
    nodes = {"nodes": 2048, "gpus_per_node": 8, "gpu": "h100-sxm-80gb"}
    huge = llama(2, mesh={"dp_replicate": 2, "dp_shard": 8192}, hardware=nodes)
    for plan in (plan_of(strange(), mesh={"dp_shard": 2}), huge):
        assert len(text_of(lines(facts_of(plan, what))).splitlines()) < 60


# Seconds of stages


def test_stages_take_what_their_blocks_take():
    plan = llama(8, **PIPED)
    cluster = cluster_of(plan.spec, "h100-sxm-80gb")
    found = Costed(plan, cluster).stage_seconds
    assert len(found.forward_s) == 4
    # Two blocks each: the ends hold the embedding and the head besides.
    assert found.forward_s[1] == pytest.approx(found.forward_s[2])
    assert found.forward_s[3] > found.forward_s[1]
    more = {**PIPED, "activation_checkpointing": "full"}
    again = Costed(llama(8, **more), cluster).stage_seconds
    assert again.forward_s == pytest.approx(found.forward_s)
    assert all(a > b for a, b in zip(again.backward_s, found.backward_s, strict=True))
    run = simulate(
        SCHEDULES["1F1B"], found.forward_s, found.backward_s, ranks=4, microbatches=8,
        crossing_s=found.crossing_s,
    )  # fmt: skip
    facts = facts_of(plan, "gantt")
    assert (facts.step, facts.is_seconds) == (run.seconds, True)
    assert f"of a step of {run.seconds:.2f} s" in facts.title or run.seconds < 1


def test_spans_of_a_run_fill_its_busy_time():
    run = simulate(SCHEDULES["ZBVZeroBubble"], [1.0] * 8, [2.0] * 8, ranks=4, microbatches=8)
    for rank in range(4):
        own = [span for span in run.spans if span.rank == rank]
        assert sum(span.end_s - span.begin_s for span in own) == pytest.approx(run.busy_s[rank])
        assert all(a.end_s <= b.begin_s + 1e-9 for a, b in itertools.pairwise(own))


# Notebooks


def parsed(html):
    return ElementTree.fromstring(html)


def test_values_show_themselves():
    plan = llama(2)
    device, limit_bytes, _ = read_limit(None, None, plan.spec)
    estimate = estimate_analytic(plan, device=device, limit_bytes=limit_bytes)
    for value, words in (
        (plan, "8 different shards, each held twice"),
        (estimate, "It fits: "),
        (plan.spec, "hybrid_shard"),
        (Layout((("tp", "dp_shard"), ())), "S(0)@tp,dp_shard"),
    ):
        shown = value._repr_html_()
        assert words in "".join(parsed(shown).itertext())
        assert len(shown) < 30_000


def test_bars_of_a_notebook_are_as_wide_as_their_bytes():
    plan = llama(2)
    device, limit_bytes, _ = read_limit(None, None, plan.spec)
    estimate = estimate_analytic(plan, device=device, limit_bytes=limit_bytes)
    widths = [float(w) for w in re.findall(r"width:([0-9.]+)%;b", estimate._repr_html_())]
    total = estimate.worst.peak.total_bytes
    assert sum(widths) == pytest.approx(100 * total / limit_bytes, abs=0.02)


def test_whatever_is_shown_is_escaped():
    plan = plan_of(strange(), mesh={"dp_shard": 2}, strategy="full_shard", rules=[
        {"match": "<i>&", "place": "replicate", "why": "<script>alert(1)</script>"}])  # fmt: skip
    for value in (plan, plan.spec):
        shown = value._repr_html_()
        assert "<script>" not in shown
        parsed(shown)
    assert "<script>" in "".join(parsed(plan.spec._repr_html_()).itertext())
    rules = [{"match": LONG, "place": "replicate", "optional": True}] * 100
    assert "60 more rules" in load_spec({**STATED, "rules": rules})._repr_html_()


def test_an_empty_model_shows_itself():
    empty = plan_of(graph({"a": "linear"}, {}), mesh={"dp_shard": 1})
    assert "1 rank holds the whole model" in empty._repr_html_()
