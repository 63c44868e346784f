"""Every picture once, with the command that draws it: writes `docs/gallery.md` and its pictures.

python -m tests.bench.gallery
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from PIL import Image

from meshplan.cli.app import main as meshplan

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDER: Final = ROOT / "docs" / "gallery"
PAGE: Final = ROOT / "docs" / "gallery.md"
MOST_BYTES: Final = 200_000

_HYBRID: Final = (
    "--set mesh='{dp_replicate: 2, dp_shard: 8}' --set strategy=hybrid_shard "
    "--set batch.micro=1 --set activation_checkpointing=full"
)
_PIPED: Final = (
    "--set mesh='{pp: 4, dp_shard: 2, tp: 2}' --set strategy=full_shard --set tp_plan=auto "
    "--set batch.micro=8 --set activation_checkpointing=none "
    "--set pipeline='{schedule: 1F1B, microbatches: 8}'"
)
_HUGE: Final = (
    "--set hardware.nodes=2048 --set mesh='{dp_replicate: 32, dp_shard: 512}' --set "
    "batch.global=16384 --set strategy=hybrid_shard --set batch.micro=1 "
    "--set activation_checkpointing=full"
)


@dataclass(frozen=True, slots=True)
class Shown:
    """One picture: its file, the question it answers, and what the command line says."""

    file: str
    question: str
    what: str
    flags: str


SHOWN: Final = (
    Shown("mesh.png", "Which ranks hold the same, and what crosses the nodes?", "mesh", _HYBRID),
    Shown("mesh_huge.png", "The same for 16,384 ranks.", "mesh", f"{_HUGE} --theme dark"),
    Shown("layout.png", "Who holds which part of one parameter?", "layout",
          f"{_PIPED} --module model.layers.0.mlp.down_proj"),
    Shown("memory.png", "Does it fit, and of what is it made?", "memory", _PIPED),
    Shown("memory_over.png", "And where it does not?", "memory",
          f"{_PIPED} --set batch.micro=32 --set batch.global=128 --theme dark"),
    Shown("memory_equal.png", "And where all ranks are equal?", "memory", _HYBRID),
    Shown("waterfall.png", "Why is it more than the textbook says?", "waterfall", _HYBRID),
    Shown("timeline.png", "When is the peak of a step?", "timeline", _HYBRID),
    Shown("treemap.png", "What is large, and is anything held whole for no reason?", "treemap",
          f"{_HYBRID} --set rules='[{{match: lm_head, place: replicate}}]'"),
    Shown("gantt.png", "Who waits in the pipeline, and what is kept?", "gantt", _PIPED),
    Shown("gantt_step.png", "What is the time of a step without a pipeline spent on?", "gantt",
          _HYBRID),
    Shown("comm.png", "Who sends how much to whom?", "comm", _PIPED),
    Shown("pareto.png", "Which candidates were there, and why this one?", "pareto", ""),
    Shown("ladder.png", "How far is it from the physical limit?", "ladder", ""),
    Shown("graph.png", "Which modules are there, and where do they run?", "graph", _PIPED),
)  # fmt: skip


def main() -> int:
    """Draw all of them and write the page; 1 where a picture is too large."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    lines = [
        "# Pictures",
        "Every picture that `meshplan draw` knows, with the command under it; none of these needs",
        "a GPU, or torch. `python -m tests.bench.gallery` draws them again. `plan.draw(...)` shows",
        "the same in a notebook, and a name that ends in `.svg` or `.html` writes those.",
        "",
    ]
    too_large = []
    for shown in SHOWN:
        out = FOLDER / shown.file
        command = f"draw -f plans/auto.yaml --what {shown.what} {shown.flags}".strip()
        code = meshplan([*shlex.split(command), "-q", "-o", str(out)])
        if code:
            return code
        # 256 colours are more than a picture has: a third of the bytes.
        Image.open(out).convert("RGB").quantize(256).save(out, optimize=True)
        if out.stat().st_size > MOST_BYTES:
            too_large.append(shown.file)
        lines += [
            f"## {shown.question}",
            f"![{shown.what}](gallery/{shown.file})",
            "```sh",
            f"meshplan {command} -o {shown.file}",
            "```",
            "",
        ]
    PAGE.write_text("\n".join(lines).rstrip() + "\n")
    if too_large:
        print(f"larger than {MOST_BYTES:,} bytes: {', '.join(too_large)}", file=sys.stderr)
    return 1 if too_large else 0


if __name__ == "__main__":
    sys.exit(main())
