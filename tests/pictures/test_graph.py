"""The graph of modules: what gives to what, folded, and laid out so that it can be read."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys

import pytest
from matplotlib.lines import Line2D

from meshplan.cli.app import main
from meshplan.model.blueprint import from_config
from meshplan.model.flow import Call, Flow, Op, Ref, Value
from meshplan.pictures.base.palette import THEMES
from meshplan.pictures.graphs.arrows import ENTRY, EXIT
from meshplan.pictures.graphs.layered import lay_out
from meshplan.pictures.graphs.modules import module_graph
from meshplan.pictures.main import draw
from meshplan.units import format_count
from tests.helpers.graphs import graph
from tests.helpers.pictured import (
    LLAMA,
    LONG,
    PIPED,
    boxes,
    check_readable,
    llama,
    plan_of,
    strange,
    written,
)

GPT2 = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 97, "n_embd": 32,
    "n_layer": 5, "n_head": 4, "n_positions": 64,
}  # fmt: skip


class Recorder:
    """A forward written by hand: modules call each other, and code joins what they give."""

    def __init__(self):
        self.values, self.ops, self.calls = [], [], []
        self.open = []
        self.enter("")
        self.x = self.value("input")

    def value(self, origin="op"):
        self.values.append(Value(id=len(self.values), shape=(1,), dtype="float32", origin=origin))
        return len(self.values) - 1

    def enter(self, module):
        parent = self.open[-1] if self.open else None
        self.calls.append(Call(id=len(self.calls), module=module, parent=parent, inputs=(),
                               outputs=(), ops=(0, 0)))  # fmt: skip
        self.open.append(len(self.calls) - 1)

    def code(self, name, *reads):
        out = self.value()
        self.ops.append(Op(name=f"aten.{name}.default", args=tuple(map(Ref, reads)), kwargs={},
                           outputs=(out,), call=self.open[-1]))  # fmt: skip
        return out

    def run(self, module, *reads):
        self.enter(module)
        out = self.code("mm", *reads)
        self.open.pop()
        return out

    def flow(self):
        return Flow(values=tuple(self.values), ops=tuple(self.ops), calls=tuple(self.calls))


def planned(modules, tensors, flow, **stated):
    on = dataclasses.replace(graph(modules, tensors), flow=flow)
    return plan_of(on, **{"mesh": {"dp_shard": 2}, "strategy": "full_shard", **stated})


def named(facts, frame=-1):
    """The links by names."""
    name = {n: box.name for n, box in enumerate(facts.boxes)} | {ENTRY: "in", EXIT: "out"}
    return {(name[a], name[b]) for a, b in facts.links.get(frame, ())}


def u_shaped(depth=3):
    """Levels down, levels up; each one up is given the one down too."""
    r = Recorder()
    skips, x = [], r.x
    for n in range(depth):
        x = r.run(f"down{n}", x)
        skips.append(x)
    x = r.run("middle", x)
    for n in reversed(range(depth)):
        x = r.run(f"up{n}", r.code("cat", r.code("relu", x), skips[n]))
    names = [*(f"down{n}" for n in range(depth)), "middle",
             *(f"up{n}" for n in reversed(range(depth)))]  # fmt: skip
    return planned(dict.fromkeys(names, "linear"), {f"{n}.weight": (4, 4) for n in names},
                   r.flow())  # fmt: skip


def residual(blocks=6):
    """Blocks that add to what they are given, with a part that a second one reads."""
    r, modules, tensors = Recorder(), {"embed": "linear", "layers": "container"}, {}
    x = r.run("embed", r.x)
    for n in range(blocks):
        at = f"layers.{n}"
        modules |= {at: "Block", f"{at}.attn": "linear", f"{at}.mlp": "linear"}
        tensors |= {f"{at}.attn.weight": (4, 4), f"{at}.mlp.weight": (4, 4)}
        r.enter(at)
        x = r.code("add", x, r.run(f"{at}.attn", x))
        x = r.code("add", x, r.run(f"{at}.mlp", x))
        r.open.pop()
    modules["head"] = "linear"
    tensors |= {"embed.weight": (4, 4), "head.weight": (4, 4)}
    r.run("head", x)
    return planned(modules, tensors, r.flow())


def check_drawn(facts, picture):
    """No box is on another but in its frame, no arrow crosses one, and each ends where it says."""
    figure = picture.figure
    check_readable(figure)
    found = {int(name.split()[1].rstrip(":")): box for kind in ("module ", "meeting ", "frame ")
             for name, box in boxes(figure, kind).items()}  # fmt: skip
    assert set(found) == set(range(len(facts.boxes)))
    spans = {n: (b.get_x(), b.get_y(), b.get_x() + b.get_width(), b.get_y() + b.get_height())
             for n, b in found.items()}  # fmt: skip
    for a, b in itertools.combinations(spans, 2):
        if a == facts.boxes[b].frame or b == facts.boxes[a].frame:
            out, inner = (a, b) if a == facts.boxes[b].frame else (b, a)
            around, within = spans[out], spans[inner]
            assert around[0] <= within[0] <= within[2] <= around[2]
            assert around[1] <= within[1] <= within[3] <= around[3]
            continue
        apart = (spans[a][2] <= spans[b][0] or spans[b][2] <= spans[a][0]
                 or spans[a][3] <= spans[b][1] or spans[b][3] <= spans[a][1])  # fmt: skip
        assert apart or facts.boxes[a].frame != facts.boxes[b].frame, (a, b)
    lines = [line for line in figure.findobj(Line2D) if (line.get_gid() or "").startswith("link")]
    assert len(lines) == sum(map(len, facts.links.values()))
    for line in lines:
        begin, end = map(int, line.get_gid().split()[1:])
        xs, ys = line.get_xdata(), line.get_ydata()
        for n, x, y, side in ((begin, xs[0], ys[0], 1), (end, xs[-1], ys[-1], 3)):
            if n >= 0:
                assert spans[n][0] < x < spans[n][2]
                assert y == pytest.approx(spans[n][side])
        frame = facts.boxes[max(begin, end)].frame
        for n, (x0, y0, x1, y1) in spans.items():
            if facts.boxes[n].frame != frame:
                continue
            for (xa, ya), (xb, yb) in itertools.pairwise(zip(xs, ys, strict=True)):
                for step in range(1, 20):
                    x, y = xa + (xb - xa) * step / 20, ya + (yb - ya) * step / 20
                    inside = x0 + 1e-6 < x < x1 - 1e-6 and y0 + 1e-6 < y < y1 - 1e-6
                    assert not inside, (line.get_gid(), n)


@pytest.mark.parametrize("theme", THEMES)
def test_skips_of_a_u_are_arrows_around_what_they_skip(theme):
    plan = u_shaped()
    facts = module_graph(plan)
    assert named(facts) == {
        ("down0", "down1"), ("down1", "down2"), ("down2", "middle"), ("middle", "join"),
        ("down2", "join"), ("join", "up2"), ("up2", "join"), ("down1", "join"), ("join", "up1"),
        ("up1", "join"), ("down0", "join"), ("join", "up0"),
    }  # fmt: skip
    assert sum(box.is_meeting for box in facts.boxes) == 3
    picture = draw(plan, "graph", theme=theme)
    check_drawn(facts, picture)
    texts = written(picture.figure)
    assert {"down0", "middle", "up2", "join"} <= set(texts)
    assert any("data flow of a recorded forward" in text for text in texts)


def test_a_frame_shows_one_of_many_with_what_comes_in_and_goes_out():
    plan = residual()
    facts = module_graph(plan)
    frame = next(n for n, box in enumerate(facts.boxes) if box.is_frame)
    assert facts.boxes[frame].name == "layers.{0..5}"
    assert facts.boxes[frame].num_modules == 6
    assert named(facts) == {("embed", "layers.{0..5}"), ("layers.{0..5}", "head")}
    assert named(facts, frame) == {
        ("in", "attn"), ("in", "+"), ("attn", "+"), ("+", "mlp"), ("mlp", "+"), ("+", "+"),
        ("+", "out"),
    }  # fmt: skip
    check_drawn(facts, draw(plan, "graph"))


def test_parameters_of_all_boxes_are_those_of_the_model():
    for plan in (residual(), u_shaped(), llama(), llama(**PIPED), plan_of(
            strange(), mesh={"dp_shard": 2}, strategy="full_shard")):  # fmt: skip
        facts = module_graph(plan)
        held = sum(b.num_params for b in facts.boxes if not b.is_frame)
        assert held == plan.graph.num_params


AROUND = {
    ("model.embed_tokens", "model.layers.{0..31}"), ("model.norm", "lm_head"),
    ("model.rotary_emb", "model.layers.{0..31}"), ("model.layers.{0..31}", "model.norm"),
}  # fmt: skip


def test_a_config_of_a_known_family_has_the_arrows_of_its_operations():
    facts = module_graph(llama())
    frame = next(n for n, box in enumerate(facts.boxes) if box.is_frame)
    assert named(facts) == AROUND
    assert named(facts, frame) == {
        ("in", "input_layernorm"), ("in", "+"), ("+", "out"), ("+", "+"),
        *(("input_layernorm", f"self_attn.{x}_proj") for x in "qkv"),
        *((f"self_attn.{x}_proj", "attention") for x in "qkv"),
        ("attention", "self_attn.o_proj"), ("self_attn.o_proj", "+"),
        ("+", "post_attention_layernorm"), ("post_attention_layernorm", "mlp.gate_proj"),
        ("post_attention_layernorm", "mlp.up_proj"), ("mlp.gate_proj", "mlp.act_fn"),
        ("mlp.act_fn", "×"), ("mlp.up_proj", "×"), ("×", "mlp.down_proj"), ("mlp.down_proj", "+"),
    }  # fmt: skip
    picture = draw(llama(), "graph")
    check_drawn(facts, picture)
    assert picture.title == (
        "LlamaForCausalLM: 423 modules of 8.03 B parameters, all laid out as S(0)@dp_shard"
    )
    assert any("as transformers computes" in text for text in written(picture.figure))


def test_layouts_of_tensor_parallelism_are_seen_on_each_projection():
    plan = llama(mesh={"dp_shard": 4, "tp": 4}, strategy="full_shard", tp_plan="auto")
    group = {box.name: box.group for box in module_graph(plan).boxes}
    assert group["self_attn.q_proj"] == group["mlp.up_proj"] == "S(0)@tp,dp_shard"
    assert group["self_attn.o_proj"] == group["mlp.down_proj"] == "S(0)@dp_shard S(1)@tp"
    check_drawn(module_graph(plan), draw(plan, "graph", theme="dark"))


def test_an_outline_has_arrows_between_blocks_and_none_inside():
    plan = llama()
    plan = dataclasses.replace(plan, graph=dataclasses.replace(plan.graph, config={}))
    facts = module_graph(plan)
    frame = next(n for n, box in enumerate(facts.boxes) if box.is_frame)
    assert named(facts) == AROUND
    assert frame not in facts.links
    picture = draw(plan, "graph")
    check_drawn(facts, picture)
    assert any(
        "the config does not give their data flow" in text for text in written(picture.figure)
    )


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_other_families_are_told_too(family, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GPT2))
    on = from_config(path if family == "gpt2" else LLAMA.with_name("mixtral-8x7b.json"))
    plan = plan_of(on, mesh={"dp_shard": 2}, strategy="full_shard")
    facts = module_graph(plan)
    assert facts.source == "config"
    frame = next(n for n, box in enumerate(facts.boxes) if box.is_frame)
    assert {"in", "out"} <= {end for link in named(facts, frame) for end in link}
    # Whatever is there is on the way from the first to the last, or says why it is not.
    ends = {n for found in facts.links.values() for link in found for n in link}
    assert ends >= set(range(len(facts.boxes)))
    assert facts.num_idle == (3 if family == "gpt2" else 0)
    assert sum(b.num_params for b in facts.boxes if not b.is_frame) == plan.graph.num_params
    check_drawn(facts, draw(plan, "graph"))


def test_stages_have_colours_and_each_its_part_of_the_blocks():
    plan = llama(8, **PIPED)
    facts = module_graph(plan)
    picture = draw(plan, "graph")
    check_drawn(facts, picture)
    found = boxes(picture.figure, "module ")
    drawn = {n.split(": ")[1]: b.get_facecolor() for n, b in found.items() if "stage" in n}
    assert set(drawn) == {f"stage {n}" for n in range(4)}
    assert len(set(drawn.values())) == 4
    assert picture.title.endswith("in 4 stages")


def test_without_a_forward_nothing_is_said_to_go_anywhere():
    plan = plan_of(strange(), mesh={"dp_shard": 2}, strategy="full_shard")
    facts = module_graph(plan)
    assert (facts.links, facts.source) == ({}, "")
    picture = draw(plan, "graph")
    check_drawn(facts, picture)
    texts = written(picture.figure)
    assert any("no forward was recorded" in text for text in texts)
    assert any(text.startswith(LONG[:6]) and text.endswith("_end") for text in texts)


def test_what_there_is_no_room_for_is_counted():
    names = [f"part{n}" for n in range(400)]
    r = Recorder()
    x = r.x
    for name in names:
        x = r.run(name, x)
    plan = planned(dict.fromkeys(names, "linear"), {f"{n}.weight": (4, 4) for n in names}, r.flow())
    facts = module_graph(plan)
    (more,) = [box for box in facts.boxes if box.name.startswith("…")]
    assert more.name == "… 387 more"
    assert more.num_params == 387 * 16
    check_drawn(facts, draw(plan, "graph"))
    assert format_count(more.num_params) in " ".join(written(draw(plan, "graph").figure))


def test_long_names_and_many_beside_each_other_stay_in_their_boxes():
    names = [f"{LONG}_{n}" for n in range(11)]
    r = Recorder()
    joined = r.code("cat", *(r.run(name, r.x) for name in names))
    r.run("слой", joined)
    kinds = dict.fromkeys([*names, "слой"], "linear")
    plan = planned(kinds, {f"{n}.weight": (4, 4) for n in kinds}, r.flow())
    facts = module_graph(plan)
    picture = draw(plan, "graph")
    check_drawn(facts, picture)
    assert picture.figure.get_figwidth() == 10
    assert all(f": {name}, Linear · 16</title>" in picture.svg() for name in names)


def test_a_module_that_runs_again_makes_no_circle():
    r = Recorder()
    x = r.run("a", r.x)
    for _ in range(3):
        x = r.run("a", r.run("b", x))
    plan = planned({"a": "linear", "b": "linear"}, {"a.weight": (4, 4), "b.weight": (4, 4)},
                   r.flow())  # fmt: skip
    facts = module_graph(plan)
    assert named(facts) == {("a", "b")}
    check_drawn(facts, draw(plan, "graph"))


def test_rows_are_longest_ways_and_wide_ones_are_cut():
    sizes = dict.fromkeys("adbcefg", (1.0, 0.5))
    links = [("a", "b"), ("b", "c"), ("a", "c"), ("d", "c")]
    laid = lay_out(sizes, links, most_in_row=3, gap=0.2, between=0.3)
    y = {key: at[1] for key, at in laid.at.items()}
    assert y["a"] > y["b"] > y["c"]
    assert y["d"] == y["b"]  # Right above what takes it.
    assert len(laid.paths["a", "c"]) == 6
    assert laid.at["a"][0] >= 0
    assert max(x for x, _ in laid.at.values()) + 1.0 == pytest.approx(laid.width)
    wide = lay_out(dict.fromkeys(range(7), (1.0, 0.5)), [], most_in_row=3, gap=0.2, between=0.3)
    assert wide.width == pytest.approx(3.4)


def test_the_twin_is_a_tree(capsys):
    assert main(["draw", "-f", "plans/auto.yaml", "--what", "graph", "--set", "mesh={dp_shard: 16}",
                 "--set", "strategy=full_shard", "--set", "batch.micro=1", "--set",
                 "activation_checkpointing=none"]) == 0  # fmt: skip
    lines = capsys.readouterr().out.splitlines()
    assert "S(0)@dp_shard" in lines[0]
    assert any(line.split()[:1] == ["q_proj"] for line in lines)


@pytest.mark.wide
def test_models_of_the_notebook_are_drawn_as_they_were_recorded():
    script = (
        "import sys; sys.path.insert(0, 'notebooks')\n"
        "import json, meshplan\n"
        "from tests.pictures.test_graph import check_drawn, named\n"
        "from meshplan.pictures.graphs.modules import module_graph\n"
        "unet = {'version': 1, 'mesh': {'pp': 2}, 'batch': {'micro': 4},\n"
        "  'pipeline': {'microbatches': 4},\n"
        "  'input': {'shape': [2, 3, 32, 32], 'dtype': 'float32'}}\n"
        "t5 = {'version': 1, 'mesh': {'tp': 2}, 'tp_plan': 'auto'}\n"
        "out = []\n"
        "for stated, name in ((unet, 'unet'), (t5, 't5')):\n"
        "    plan = meshplan.decide(stated, model=f'own_models:{name}')\n"
        "    facts = module_graph(plan)\n"
        "    check_drawn(facts, plan.draw('graph'))\n"
        "    out.append(sorted(named(facts)))\n"
        "print(json.dumps(out))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    unet, t5 = json.loads(done.stdout.splitlines()[-1])
    assert {("down1", "join"), ("down2", "join"), ("down3", "join")} <= set(map(tuple, unet))
    ends = {b for a, b in t5 if a == "encoder.final_layer_norm"}
    assert any(end.startswith("decoder.block") for end in ends)
