"""What the planner picks for known models on 1 to 16,384 GPUs: `docs/plans.md`.

    python -m tests.bench.plans_table [--devices h100-sxm-80gb,...] [--limit 30] > FILE

Beside it stands the configuration that people published for the same model and number of GPUs, with
its source. It may be of a card with more memory, compiled, or of another batch, as it says.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Final

from meshplan.api.planning import search_plan
from meshplan.errors import MeshplanError
from meshplan.planner.problem.decision import Decision, Evaluated
from meshplan.render.base.text import columns
from meshplan.units import format_gib
from tests.bench.planned_models import write_plan

DEVICES: Final[Mapping[str, str]] = {
    "h100-sxm-80gb": "50GB/s", "a100-sxm-40gb": "25GB/s", "l40s-48gb": "25GB/s",
}  # fmt: skip
"""By name, bandwidth between nodes for each GPU."""
COUNTS: Final = (1, 8, 64, 512, 16384)


@dataclass(frozen=True, slots=True)
class Case:
    """A model with its batch.

    Args:
        seq_len: Of one sample; 0 where samples are no sequences.
        each: Samples of a step for each GPU, but no fewer than `least` and no more than `most`.
        counts: Of GPUs.
    """

    model: str
    seq_len: int
    each: int
    least: int
    most: int
    counts: tuple[int, ...] = COUNTS

    def samples(self, gpus: int) -> int:
        return min(max(self.each * gpus, self.least), self.most)


CASES: Final = (
    Case("ViT-H/14", 0, 64, 512, 2**17),
    Case("UNet, 98 blocks", 0, 8, 64, 2**14),
    Case("T5-11B", 512, 8, 128, 2**14),
    Case("GPT-2 XL", 1024, 8, 64, 2**17),
    Case("Llama-3.1-8B", 8192, 2, 16, 2048),
    Case("Llama-3.1-70B", 8192, 2, 64, 2048),
    Case("Llama-3.1-405B", 8192, 2, 256, 2048),
    Case("Mixtral-8x7B", 4096, 4, 64, 2**13),
    Case("DeepSeek-V3", 4096, 8, 1024, 2**14, counts=(512, 2048)),
)


@dataclass(frozen=True, slots=True)
class Published:
    """What people did, with what they measured where they said.

    Args:
        gpu: The first word of the device's name.
    """

    gpu: str
    words: str
    source: str


PUBLISHED: Final[Mapping[tuple[str, int], Published]] = {
    ("Llama-3.1-8B", 8): Published(
        "h100",
        "FSDP 8, selective recomputation, 2 samples of 8,192: 5,762 tokens/s on H100 of 96 GB",
        "pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md @ b5bcd76c",
    ),
    ("Llama-3.1-8B", 64): Published(
        "a100",
        "FSDP 64, selective recomputation, 1 sample: 2,973 tokens/s, MFU 58.2% on A100 of 80 GB",
        "pytorch/torchtitan docs/performance.md @ 157a12c5",
    ),
    ("Llama-3.1-70B", 64): Published(
        "a100",
        "FSDP 64, full recomputation, 1 sample: 331 tokens/s, MFU 51.7% on A100 of 80 GB",
        "pytorch/torchtitan docs/performance.md @ 157a12c5",
    ),
    ("Llama-3.1-405B", 16384): Published(
        "h100",
        "TP 8, PP 16, DP 128, 16 M tokens a step: MFU 41% on H100",
        "Dubey et al. 2024 (The Llama 3 herd of models), table 4",
    ),
    ("DeepSeek-V3", 2048): Published(
        "h100",
        "PP 16, EP 64, ZeRO-1, no TP, FP8, 15,360 samples of 4,096: 1,543 tokens/s on H800",
        "DeepSeek-AI 2024 (DeepSeek-V3 technical report), table 1 and sections 3.2 and 4.2",
    ),
}
"""By model and number of GPUs."""


def rows(device: str, limit_s: float) -> Iterator[tuple[str, ...]]:
    """One for each model and number of GPUs."""
    for case in CASES:
        for gpus in case.counts:
            nodes, each = max(1, gpus // 8), min(8, gpus)
            began = time.monotonic()
            with tempfile.TemporaryDirectory() as folder:
                path = write_plan(
                    Path(folder),
                    case.model,
                    hardware={"nodes": nodes, "gpus_per_node": each, "gpu": device,
                              "inter": DEVICES[device]},
                    batch={"global": case.samples(gpus)}
                    | ({"seq_len": case.seq_len} if case.seq_len else {}),
                    solve={"time_limit": f"{limit_s:g}s"},
                    offload="none",
                )  # fmt: skip
                picked = _picked(path)
            print(f"{case.model}, {gpus}: {time.monotonic() - began:.1f} s", file=sys.stderr)
            published = PUBLISHED.get((case.model, gpus))
            mark = ""
            if published is not None and device.startswith(published.gpu):
                mark = f"[{list(PUBLISHED).index((case.model, gpus)) + 1}]"
            yield (case.model, f"{gpus:,}", *picked, mark)


def _picked(path: Path) -> tuple[str, ...]:
    """(plan, blocks, seconds, tokens/s, MFU, memory, gap) of what the planner chose."""
    nothing = ("",) * 6
    try:
        decision = search_plan(path)
    except MeshplanError as error:
        return (f"refused: {error.problems[0].what}", *nothing)
    way = decision.chosen
    if way is None:
        return ("nothing fits" if decision.is_whole else "the time was up", *nothing)
    spread = replace(way.plan.mesh, axes=tuple(a for a in way.plan.mesh if a.size > 1))
    mesh = str(spread) if spread.axes else "one GPU"
    strategy = way.stated["strategy"] if way.plan.num_data_ranks > 1 else ""
    again = dict.fromkeys(("selective", "full"), 0)
    for use in way.plan.assignment.recompute.values():
        again[use.policy.mode] += 1
    blocks = ", ".join(f"{count} {mode}" for mode, count in again.items() if count)
    return (
        f"{strategy} {mesh}".strip() + there(way),
        blocks or "none",
        f"{way.seconds:.3f} s",
        _speed(decision, way),
        f"{decision.mfu(way):.1%}",
        format_gib(way.memory.worst.band[1]),
        f"{decision.gap:.2%}" + ("" if decision.is_whole else ", time was up"),
    )


def there(way: Evaluated) -> str:
    """What lies on the host, in words."""
    a = way.plan.assignment
    parts = [(any(unit.on_host for unit in a.units.values()), "parameters"),
             (bool(a.host_activations), "activations")]  # fmt: skip
    words = " and ".join(word for is_there, word in parts if is_there)
    return f", {words} on the host" if words else ""


def _speed(decision: Decision, way: Evaluated) -> str:
    """Of one GPU, in tokens, or in samples where those are no sequences."""
    if decision.tokens:
        return f"{decision.tokens_per_s(way):,.0f}"
    return f"{decision.samples_per_s(way):,.1f} samples"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", default=",".join(DEVICES))
    parser.add_argument("--limit", type=float, default=30.0)
    args = parser.parse_args()
    command, limit = f"python -m tests.bench.plans_table --limit {args.limit:g}", args.limit
    print(f"""# What the planner picks

`{command}`: all is left open (mesh, strategy,
microbatch, what each block recomputes, where a pipeline is cut) but that nothing is offloaded,
bf16-mixed, AdamW, nodes of eight.
Times are the model's, with generic constants of meshplan's own runtime, and no GPU was run; memory
was replayed. A search ends after {limit:g} s with the best so far, on a machine that had other
work. Planned on {date.today()}.
A number in the last column is of what people published for this model, this number of GPUs
and such a card, below.
""")
    header = ("model", "GPUs", "plan", "recomputed", "a step", "tokens/s per GPU", "MFU", "memory",
              "gap", "")  # fmt: skip
    for device in args.devices.split(","):
        print(f"## {device}, {DEVICES[device]} for each GPU between nodes\n\n```")
        print(*columns([header, *rows(device, args.limit)], "<><<>>>>><"), sep="\n")
        print("```\n")
    print("## Published\n")
    for number, ((model, gpus), published) in enumerate(PUBLISHED.items(), 1):
        print(f"{number}. {model} on {gpus:,}: {published.words} ({published.source})")


if __name__ == "__main__":
    main()
