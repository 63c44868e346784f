"""The peak of a step composed from one traced microbatch, beside that of the step traced whole.

    python -m tests.bench.tiers [NAME ...] [--write]

Each case runs in a process of its own, in the shapes of real models, without memory or a GPU.
`--write` keeps the table in tests/bench/tiers.md, with the rows of cases that did not run as they
were. Exit code 1 when a peak is off by more than the limit.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import multiprocessing
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional as F

LIMIT: Final = 1e-3
TABLE: Final = Path(__file__).with_suffix(".md")
COMMAND: Final = "python -m tests.bench.tiers --write"
HEAD: Final = (
    "| case | plan | traced, GiB | composed, GiB | error | traced, s | work, s | composed, s |",
    "|---|---|---:|---:|---:|---:|---:|---:|",
)


@dataclass(frozen=True)
class Case:
    """One model in its real shapes, and a plan.

    Args:
        build: Makes the model; called on meta.
        inputs: Makes one rank's microbatch: inputs and targets, on meta.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, torch.Tensor]]
    plan: Mapping[str, Any]
    world: int


def _of_config(kind: str, config: str, **values: Any) -> nn.Module:
    transformers = importlib.import_module("transformers")
    model: nn.Module = getattr(transformers, kind)(getattr(transformers, config)(**values))
    return model


def llama(hidden: int, ffn: int, layers: int, heads: int, vocab: int = 128256) -> nn.Module:
    return _of_config(
        "LlamaForCausalLM", "LlamaConfig", hidden_size=hidden, intermediate_size=ffn,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=8,
        vocab_size=vocab, max_position_embeddings=8192, tie_word_embeddings=False, use_cache=False,
        attn_implementation="sdpa",
    )  # fmt: skip


def _tokens(batch: int, length: int, *names: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    def tokens() -> torch.Tensor:
        return torch.zeros(batch, length, dtype=torch.int64, device="meta")

    return {name: tokens() for name in names or ("input_ids",)}, tokens()


def _image() -> torch.Tensor:
    return torch.zeros(4, 4, 64, 64, device="meta")


class Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(32, inputs), nn.GroupNorm(32, outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.conv2(F.silu(self.norm2(self.conv1(F.silu(self.norm1(x))))))
        return out + self.shortcut(x)


class UNet(nn.Module):
    """As wide as Stable Diffusion's, without attention; what goes down is met again on the way up.

    Source: Rombach et al. 2022, table 12: 320 channels, multiplied by 1, 2, 4, 4.
    """

    def __init__(self) -> None:
        super().__init__()
        widths = [320, 320, 640, 1280, 1280]
        pairs = list(itertools.pairwise(widths))
        self.stem = nn.Conv2d(4, 320, 3, padding=1)
        self.down = nn.ModuleList([Residual(a, b) for a, b in pairs])
        self.middle = nn.ModuleList([Residual(1280, 1280) for _ in range(8)])
        self.up = nn.ModuleList([Residual(2 * b, a) for a, b in reversed(pairs)])
        self.head = nn.Conv2d(320, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, skips = self.stem(x), []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        for block in self.middle:
            x = block(x)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2)
            x = block(torch.cat((x, skips.pop()), 1))
        return self.head(x)


FULL: Final = {"version": 1, "strategy": "full_shard", "precision": "bf16-mixed"}
RECOMPUTED: Final = FULL | {"activation_checkpointing": "full"}
CASES: Final[Mapping[str, Case]] = {
    "8B": Case(lambda: llama(4096, 14336, 32, 32), lambda: _tokens(1, 8192), RECOMPUTED, 8),
    "8B, kept": Case(lambda: llama(4096, 14336, 32, 32), lambda: _tokens(1, 2048), FULL, 8),
    "70B": Case(lambda: llama(8192, 28672, 80, 64), lambda: _tokens(1, 8192), RECOMPUTED, 64),
    "405B": Case(lambda: llama(16384, 53248, 126, 128), lambda: _tokens(1, 8192), RECOMPUTED,
                 512),
    "UNet": Case(
        UNet,
        lambda: (_image(), _image()),
        {"version": 1, "strategy": "full_shard"}, 8,
    ),
    "T5 3B": Case(
        lambda: _of_config("T5ForConditionalGeneration", "T5Config", d_model=1024, d_kv=128,
                           d_ff=16384, num_layers=24, num_heads=32, dropout_rate=0.0,
                           use_cache=False, decoder_start_token_id=0),
        lambda: _tokens(4, 512, "input_ids", "decoder_input_ids"), FULL, 8,
    ),
    "Mixtral 8x7B": Case(
        lambda: _of_config("MixtralForCausalLM", "MixtralConfig", use_cache=False,
                           experts_implementation="batched_mm"),
        lambda: _tokens(1, 512), RECOMPUTED, 64,
    ),
}  # fmt: skip


def loss(output: Any, targets: torch.Tensor) -> torch.Tensor:
    logits = getattr(output, "logits", output)
    if targets.is_floating_point():
        return F.mse_loss(logits.float(), targets)
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


def measured(name: str) -> dict[str, Any]:
    """One row, in a process that is in no group."""
    from meshplan.memory.replay import replay
    from meshplan.memory.replay.prepare import Prepared
    from meshplan.plan import make_plan
    from meshplan.reader import load_spec
    from meshplan.runtime.blocks import trace_work
    from meshplan.runtime.imagine import imagine_step
    from meshplan.runtime.trace import graph_of

    warnings.simplefilter("ignore")
    case, times = CASES[name], [time.perf_counter()]
    with torch.device("meta"):
        model = case.build().train()
    plan = make_plan(load_spec(dict(case.plan)), graph_of(model), world_size=case.world)
    inputs, targets = case.inputs()
    times = [time.perf_counter()]
    work = trace_work(model, plan, inputs, targets, loss)
    times.append(time.perf_counter())
    prepared = Prepared(work)
    replay(prepared, plan, "adamw")
    times.append(time.perf_counter())
    composed = replay(prepared, plan, "adamw").peak.live_bytes
    times.append(time.perf_counter())
    whole = imagine_step(
        model,
        plan,
        inputs,
        targets,
        loss,
        lambda m: torch.optim.AdamW(m.parameters(), foreach=True),
    ).peak.live_bytes
    times.append(time.perf_counter())
    traced, _, warm, imagined = (b - a for a, b in itertools.pairwise(times))
    words = ", ".join(str(v) for k, v in case.plan.items() if k != "version")
    return {
        "name": name, "plan": f"{words} on {case.world}", "whole": whole, "composed": composed,
        "seconds": [imagined, traced, warm],
    }  # fmt: skip


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), foreach=True)


def row_of(found: Mapping[str, Any]) -> str:
    whole, composed = found["whole"], found["composed"]
    error = 100 * (composed - whole) / whole
    times = " | ".join(f"{each:.2f}" for each in found["seconds"])
    sizes = f"{whole / 2**30:.4f} | {composed / 2**30:.4f}"
    return f"| {found['name']} | {found['plan']} | {sizes} | {error:+.4f} % | {times} |"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    before = TABLE.read_text().splitlines() if TABLE.exists() else []
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in before if " GiB" not in line}
    found = []
    print(*HEAD, sep="\n")
    for name in options.names or CASES:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
            found.append(executor.submit(measured, name).result())
        rows[name] = row_of(found[-1])
        print(rows[name], flush=True)
    if options.write:
        kept = [rows[name] for name in CASES if name in rows]
        intro = ("# Composed steps beside steps traced whole", "", f"    {COMMAND}", "")
        TABLE.write_text("\n".join([*intro, *HEAD, *kept]) + "\n")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return int(any(abs(r["composed"] - r["whole"]) > LIMIT * r["whole"] for r in found))


if __name__ == "__main__":
    raise SystemExit(main())
