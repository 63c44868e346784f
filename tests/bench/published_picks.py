"""What the planner picks beside the configuration that people published, term by term.

    python -m tests.bench.published_picks [--only WORD] > tests/bench/published_picks.md

Both are priced by the same cost model. Of the published configuration the plan states what its
source states; the rest is as the planner finds it best.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, Final

from meshplan.api.planning import search_plan
from meshplan.errors import MeshplanError
from meshplan.planner.problem.decision import Decision
from meshplan.render.base.text import columns
from meshplan.units import format_gib
from tests.bench.planned_models import write_plan

PARTS: Final[Mapping[str, str]] = {
    "compute": "matrix products",
    "traffic": "other kernels",
    "recompute": "recomputation",
    "tensor_parallel": "tp, cp and ep",
    "data": "data ranks",
    "pipeline": "pipeline",
    "launch": "launches",
    "update": "optimizer",
    "host": "host",
}
"""Fields of `Shares`, in words."""
LEAST: Final = 0.002
"""Share of a step below which the difference of a part is not listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A run that somebody published.

    Args:
        model: A name of `planned_models.MODELS`.
        gpus: GPUs of the run.
        seq_len: Tokens of a sample.
        samples: Samples of a step.
        stated: Keys of a plan that state what the source says of the layout.
        measured: Tokens a second of one GPU, or its MFU where it is below 1.
        source: Where it was published.
        note: What differs from what is priced; "" if nothing is known to.
        gpu: The GPU's name.
        common: Keys of both plans, such as the profile.
    """

    model: str
    gpus: int
    seq_len: int
    samples: int
    stated: Mapping[str, Any]
    measured: float
    source: str
    note: str = ""
    gpu: str = "h100-sxm-80gb"
    common: Mapping[str, Any] = field(default_factory=dict)


_TITAN: Final = {"compile": True, "profile": "torchtitan-compiled"}
_FP8: Final = "measured in FP8, priced in bf16"
_LLAMA_3: Final = "Grattafiori et al. 2024 (The Llama 3 Herd of Models), table 4"
_BRIDGE: Final = "NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary.md, 25.11"


RUNS: Final = (
    Published(
        model="Llama-3.1-8B", gpus=8, seq_len=8192, samples=16, gpu="h100-sxm-96gb", common=_TITAN,
        stated={"mesh": {"dp_shard": 8}, "strategy": "full_shard",
                "activation_checkpointing": "selective"},
        measured=6667, source="pytorch/torchtitan, benchmarks of December 2024",
    ),
    Published(
        model="Llama-3.1-8B", gpus=128, seq_len=8192, samples=256, gpu="h100-sxm-96gb",
        common=_TITAN,
        stated={"mesh": {"dp_shard": 128}, "strategy": "full_shard",
                "activation_checkpointing": "selective"},
        measured=6514, source="pytorch/torchtitan, benchmarks of December 2024",
    ),
    Published(
        model="Llama-3.1-8B", gpus=64, seq_len=8192, samples=96, gpu="h100-sxm-96gb",
        common=_TITAN,
        stated={"mesh": {"dp_shard": 8, "tp": 8}, "strategy": "full_shard",
                "activation_checkpointing": "selective"},
        measured=4378, source="pytorch/torchtitan, benchmarks of async TP, June 2025",
        note="a benchmark of tp, not of the best layout",
    ),
    Published(
        model="Llama-3.1-70B", gpus=64, seq_len=8192, samples=128,
        stated={"mesh": {"pp": 8, "dp_shard": 2, "tp": 4}, "strategy": "zero1",
                "pipeline": {"schedule": "Interleaved1F1B", "virtual": 5}},
        measured=1602, source=_BRIDGE, note=_FP8,
    ),
    Published(
        model="Llama-3.1-70B", gpus=256, seq_len=8192, samples=512, gpu="h100-sxm-96gb",
        common=_TITAN,
        stated={"mesh": {"dp_shard": 32, "tp": 8}, "strategy": "full_shard",
                "activation_checkpointing": "full"},
        measured=597.3, source="pytorch/torchtitan, benchmarks of async TP, June 2025",
        note="a benchmark of tp, not of the best layout",
    ),
    Published(
        model="Llama-3.1-405B", gpus=1024, seq_len=8192, samples=512,
        stated={"mesh": {"pp": 8, "dp_shard": 8, "cp": 2, "tp": 8}, "strategy": "zero1",
                "pipeline": {"schedule": "Interleaved1F1B", "virtual": 8}},
        measured=292, source=_BRIDGE, note=_FP8,
    ),
    Published(
        model="Llama-3.1-405B", gpus=8192, seq_len=8192, samples=2048,
        stated={"mesh": {"pp": 16, "dp_shard": 64, "tp": 8}, "strategy": "zero2"},
        measured=0.43, source=_LLAMA_3,
    ),
    Published(
        model="Llama-3.1-405B", gpus=16384, seq_len=8192, samples=2048,
        stated={"mesh": {"pp": 16, "dp_shard": 128, "tp": 8}, "strategy": "zero2"},
        measured=0.41, source=_LLAMA_3,
    ),
    Published(
        model="Mixtral-8x7B", gpus=64, seq_len=4096, samples=256,
        stated={"mesh": {"pp": 4, "dp_shard": 16, "ep": "8 in dp_shard"}, "strategy": "zero1",
                "pipeline": {"schedule": "Interleaved1F1B", "virtual": 8}},
        measured=468 / 989,
        source="NVIDIA/Megatron-LM, megatron/core/transformer/moe/README.md",
    ),
    Published(
        model="DeepSeek-V3", gpus=2048, seq_len=4096, samples=15360,
        stated={"mesh": {"pp": 16, "dp_shard": 128, "ep": "64 in dp_shard"}, "strategy": "zero1"},
        measured=1e12 / (180e3 * 3600),
        source="DeepSeek-AI 2024 (DeepSeek-V3 Technical Report), section 1: 180,000 GPU hours for "
        "10^12 tokens",
        note="measured on H800 in FP8 with DualPipe, priced on H100 in bf16 with the schedules "
        "that meshplan has",
    ),
)  # fmt: skip


def lines_of(run: Published) -> Iterator[str]:
    """Yield the page's lines on one run."""
    print(f"{run.model} on {run.gpus}", file=sys.stderr)
    yield f"## {run.model} on {run.gpus:,} GPUs, {run.samples:,} samples of {run.seq_len:,} tokens"
    yield ""
    note = f"; {run.note}" if run.note else ""
    yield f"Published: {run.source}{note}."
    yield ""
    yield "```"
    ours, theirs = _planned(run), _planned(run, **run.stated)
    header = ("", "layout", "a step", "tokens/s/GPU", "MFU", "memory")
    rows = [header]
    for words, found in (("picked", ours), ("published, by our model", theirs)):
        rows.append((words, *_figures(found)))
    is_mfu = run.measured < 1
    rate, mfu = ("", f"{run.measured:.1%}") if is_mfu else (f"{run.measured:,.0f}", "")
    rows.append(("published, measured", "", "", rate, mfu, ""))
    yield from columns(rows, "<<>>>>")
    yield from (f"\nnot priced: {each}" for each in (ours, theirs) if isinstance(each, str))
    yield from _parts(ours, theirs)
    yield "```"
    yield ""


def _planned(run: Published, **stated: Any) -> Decision | str:
    """Return the planner's decision, or why there is none."""
    hardware = {"nodes": -(-run.gpus // 8), "gpus_per_node": 8, "gpu": run.gpu, "inter": "50GB/s"}
    batch = {"global": run.samples, "seq_len": run.seq_len}
    with tempfile.TemporaryDirectory() as folder:
        fields = {
            "hardware": hardware, "batch": batch, "offload": "none",
            "solve": {"time_limit": "300s"}, **run.common, **stated,
        }  # fmt: skip
        path = write_plan(Path(folder), run.model, **fields)
        try:
            decision = search_plan(path)
        except MeshplanError as error:
            problem = error.problems[0]
            return f"{problem.what} ({problem.fix})" if problem.fix else problem.what
    if decision.chosen is None:
        return "does not fit" if decision.is_whole else "not found in 300 s"
    return decision


def _figures(found: Decision | str) -> tuple[str, str, str, str, str]:
    """Return (layout, seconds, tokens a second, MFU, memory) in words."""
    if isinstance(found, str):
        return "not priced", "", "", "", ""
    way = found.chosen
    assert way is not None
    mesh = " x ".join(f"{axis.name} {axis.size}" for axis in way.plan.mesh if axis.size > 1)
    loans = "".join(f", ep {loan.size}" for loan in way.plan.mesh.loans)
    stages = way.plan.assignment.stages
    schedule = f", {stages.schedule}" if stages else ""
    schedule += f" with {stages.virtual} stages a rank" if stages and stages.virtual > 1 else ""
    rate = found.tokens_per_s(way)
    return (
        f"{mesh}{loans}, {way.plan.assignment.strategy.name}{schedule}",
        f"{way.seconds:.3f} s",
        f"{rate:,.0f}",
        f"{found.mfu(way):.1%}",
        format_gib(way.memory.worst.band[1]),
    )


def _parts(ours: Decision | str, theirs: Decision | str) -> Iterator[str]:
    """Yield lines on the parts of a step in which the two differ, the largest difference first."""
    if isinstance(ours, str) or isinstance(theirs, str):
        return
    both = [found.ladder.shares if found.ladder else None for found in (ours, theirs)]
    if both[0] is None or both[1] is None:
        return
    one, other = asdict(both[0]), asdict(both[1])
    whole = max(ours.best_s, theirs.best_s)
    names = sorted(PARTS, key=lambda name: -abs(other[name] - one[name]))
    rows = [("seconds of a step", "picked", "published", "apart")]
    rows += [
        (PARTS[name], f"{one[name]:.3f}", f"{other[name]:.3f}", f"{other[name] - one[name]:+.3f}")
        for name in names
        if abs(other[name] - one[name]) > LEAST * whole
    ]
    yield ""
    yield from columns(rows, "<>>>")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    only = parser.parse_args().only
    print(f"""# Picks beside published configurations

`python -m tests.bench.published_picks`: what the planner picks for runs that people published,
beside their configuration priced by the same cost model. The whole space is open: mesh, strategy,
recomputation, pipeline; nothing is offloaded. H100, eight a node, 50 GB/s for each GPU between
nodes, bf16-mixed, AdamW with fp32 states, generic constants unless the run is torchtitan's. Parts
are those of the fastest plan of each; the one listed may be simpler, up to 2 % slower. Planned on
{date.today()}.
""")
    for run in RUNS:
        if only in f"{run.model} {run.gpus}":
            print(*lines_of(run), sep="\n")


if __name__ == "__main__":
    main()
