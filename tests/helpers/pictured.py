"""What tests of pictures share: plans to draw, and whether what is written can be read."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any
from unittest.mock import patch

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from meshplan.model.blueprint import from_config
from meshplan.model.graph import ModelGraph
from meshplan.plan.plan import Plan, make_plan
from meshplan.spec.reader import load_spec
from tests.helpers.graphs import graph

LLAMA = Path(__file__).resolve().parents[2] / "plans" / "models" / "llama-3.1-8b.json"
STATED: dict[str, Any] = {
    "version": 1,
    "hardware": {"nodes": 2, "gpus_per_node": 8, "gpu": "h100-sxm-80gb", "inter": "50GB/s"},
    "mesh": {"dp_replicate": 2, "dp_shard": 8},
    "strategy": "hybrid_shard",
    "precision": "bf16-mixed",
    "batch": {"micro": 1, "accumulate": 4, "seq_len": 8192},
    "activation_checkpointing": "full",
}
LONG = "block_" + "x" * 190 + "_end"

PIPED = {
    "mesh": {"pp": 4, "dp_shard": 2, "tp": 2},
    "strategy": "full_shard",
    "batch": {"micro": 4, "seq_len": 2048},
    "pipeline": {"schedule": "1F1B", "microbatches": 4},
    "tp_plan": "auto",
}


def llama(blocks: int | None = None, **changes: Any) -> Plan:
    """Llama-3.1-8B by its config, on two nodes of eight unless changes say otherwise."""
    stated = {key: value for key, value in {**STATED, **changes}.items() if value is not None}
    return make_plan(load_spec(stated), from_config(LLAMA, blocks=blocks))


def plan_of(on: ModelGraph, **stated: Any) -> Plan:
    return make_plan(load_spec({"version": 1, **stated}), on)


def strange() -> ModelGraph:
    """Names of 200 characters, of other alphabets, dollars, and a parameter of no elements."""
    modules = {LONG: "linear", "слой": "linear", "层": "linear", "a$b$c": "linear", "<i>&": "norm"}
    tensors = {
        f"{LONG}.weight": (64, 32), "слой.weight": (32, 32), "层.weight": (16, 8),
        "a$b$c.weight": (0, 8), "<i>&.weight": (8,),
    }  # fmt: skip
    return graph(modules, tensors)


def written(figure: Figure) -> list[str]:
    """All texts that are seen, numbers still with their units."""
    return [text.get_text().replace("\xa0", " ") for text in _texts(figure)]


def boxes(figure: Figure, begin: str = "") -> dict[str, Rectangle]:
    """The rectangles with a name that begins like this, by name."""
    found = figure.findobj(Rectangle)
    return {p.get_gid(): p for p in found if p.get_gid() and p.get_gid().startswith(begin)}


def _texts(figure: Figure) -> list[Text]:
    return [t for t in figure.findobj(Text) if t.get_text().strip() and t.get_visible()]


def check_readable(figure: Figure) -> None:
    """No text is cut off, tiny, or written over another."""
    page, extents = figure.bbox, []
    for text, at in _drawn(figure):
        assert text.get_fontsize() >= 8.0, text
        is_inside = at.x0 >= -1 and at.x1 <= page.x1 + 1 and at.y0 >= -1 and at.y1 <= page.y1 + 1
        assert is_inside, f"cut off: {text.get_text()!r}"
        extents.append((text.get_text(), at))
    extents.sort(key=lambda item: item[1].x0)
    for number, (one, a) in enumerate(extents):
        for other, b in extents[number + 1 :]:
            if b.x0 >= a.x1 - 1:
                break
            is_over = min(a.y1, b.y1) - max(a.y0, b.y0) > 2
            assert not is_over, f"{one!r} is over {other!r}"


def check_clear(figure: Figure, gid: str) -> None:
    """No line of this name runs through a text."""
    texts = _drawn(figure)
    for line in figure.findobj(Line2D):
        if line.get_gid() != gid:
            continue
        points = line.get_transform().transform(line.get_xydata())
        for (x0, y0), (x1, y1) in itertools.pairwise(points):
            for text, at in texts:
                is_beside = max(x0, x1) < at.x0 + 1 or min(x0, x1) > at.x1 - 1
                is_apart = max(y0, y1) < at.y0 + 2 or min(y0, y1) > at.y1 - 2
                assert is_beside or is_apart, f"{gid} runs through {text.get_text()!r}"


def _drawn(figure: Figure) -> list[tuple[Text, Any]]:
    """The texts that really are drawn, and where: matplotlib leaves out labels beyond an axis."""
    found = []

    def draw(text: Text, renderer: Any, *args: Any, **kwargs: Any) -> None:
        if text.get_visible() and text.get_text().strip():
            found.append((text, text.get_window_extent(renderer)))

    with patch.object(Text, "draw", draw):
        figure.canvas.draw()
    return found
