"""Tier 1 beside tier 3: a step composed by rules beside the one that is traced whole.

    python -m tests.bench.tiers [NAME ...] [--write]

Each case runs in a process of its own, in the shapes of real models, without memory or a GPU, on
the first and the last of the ranks that differ. `--write` keeps the table in tests/bench/tiers.md,
with the rows of cases that did not run as they were. Exit code 1 when a peak is off by more than
the limit.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import multiprocessing
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional as F

LIMIT: Final = 1e-3
"""Fraction by which tier 1 may be off."""
TABLE: Final = Path(__file__).with_suffix(".md")
COMMAND: Final = "python -m tests.bench.tiers --write"
HEAD: Final = (
    "| case | plan | tier 3, GiB | tier 1 | reserved by 1 | CPU s of 1 | of 3 |",
    "|---|---|---:|---:|---:|---:|---:|",
)
INTRO: Final = (
    "# Tier 1 beside tier 3",
    "",
    f"    {COMMAND}",
    "",
    "Tier 3 traces the whole step with the real wrappers. The figures of tier 1 say how far its",
    "peak is from that peak, and what it reserves from what tier 3 reserves. CPU time is that of a",
    "process that has imported torch, for the first and the last of the ranks that differ. A dash:",
    "no rule composes the step.",
    "",
)


@dataclass(frozen=True)
class Case:
    """One model in its real shapes, and a plan.

    Args:
        entry: The name of a function of this module, that builds the model.
        plan: As in a plan file.
    """

    entry: str
    plan: Mapping[str, Any]


def _of_config(kind: str, config: str, **values: Any) -> nn.Module:
    transformers = importlib.import_module("transformers")
    model: nn.Module = getattr(transformers, kind)(getattr(transformers, config)(**values))
    return model


def _llama(hidden: int, ffn: int, layers: int, heads: int, vocab: int = 128256) -> nn.Module:
    return _of_config(
        "LlamaForCausalLM", "LlamaConfig", hidden_size=hidden, intermediate_size=ffn,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=8,
        vocab_size=vocab, max_position_embeddings=8192, tie_word_embeddings=False, use_cache=False,
        attn_implementation="sdpa",
    )  # fmt: skip


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


def llama_8b() -> nn.Module:
    return _llama(4096, 14336, 32, 32)


def llama_70b() -> nn.Module:
    return _llama(8192, 28672, 80, 64)


def llama_405b() -> nn.Module:
    return _llama(16384, 53248, 126, 128)


def t5_3b() -> nn.Module:
    return _of_config(
        "T5ForConditionalGeneration", "T5Config", d_model=1024, d_kv=128, d_ff=16384,
        num_layers=24, num_heads=32, dropout_rate=0.0, use_cache=False, decoder_start_token_id=0,
    )  # fmt: skip


def mixtral() -> nn.Module:
    return _of_config(
        "MixtralForCausalLM", "MixtralConfig", use_cache=False,
        experts_implementation="batched_mm",
    )  # fmt: skip


def mixtral_loop() -> nn.Module:
    return _of_config("MixtralForCausalLM", "MixtralConfig", use_cache=False)


BF16: Final = {"version": 1, "precision": "bf16-mixed"}
AGAIN: Final = BF16 | {"activation_checkpointing": "full"}


def _on(length: int, micro: int = 1, accumulate: int = 1, **mesh: int) -> dict[str, Any]:
    batch = {"micro": micro, "seq_len": length}
    if accumulate > 1:
        batch["accumulate"] = accumulate
    return {"mesh": mesh, "batch": batch}


TP: Final = {"tp_plan": "auto"}
SPREAD: Final = {"mesh": {"dp_shard": 64, "ep": "8 in dp_shard"}}
EXPERTS: Final = {"rules": [{"match": "**.experts", "place": {"ep": "ep_dispatch_experts"}}]}
IMAGES: Final = {"input": {"shape": [4, 4, 64, 64], "dtype": "float32"}, "batch": {"micro": 4}}
CASES: Final[Mapping[str, Case]] = {
    "8B": Case("llama_8b", AGAIN | _on(8192, dp_shard=8)),
    "8B, kept": Case("llama_8b", BF16 | _on(2048, dp_shard=8)),
    "8B, accumulated": Case(
        "llama_8b", AGAIN | _on(4096, 1, 4, dp_shard=8) | {"clip_grad_norm": 1.0}
    ),
    "8B, ddp": Case("llama_8b", AGAIN | _on(8192, dp_replicate=8)),
    "8B, zero1": Case("llama_8b", AGAIN | _on(8192, dp_shard=8) | {"strategy": "zero1"}),
    "8B, hybrid": Case("llama_8b", AGAIN | _on(8192, dp_replicate=4, dp_shard=8)),
    "8B, loss in chunks": Case("llama_8b", AGAIN | _on(8192, dp_shard=8) | {"loss_chunks": 8}),
    "8B, tp": Case("llama_8b", AGAIN | TP | _on(8192, dp_shard=2, tp=4)),
    "8B, pp": Case("llama_8b", AGAIN | _on(4096, 4, pp=4, dp_shard=2)
                   | {"pipeline": {"schedule": "1F1B", "microbatches": 4}}),
    "70B": Case("llama_70b", AGAIN | _on(8192, dp_shard=64)),
    "70B, tp": Case("llama_70b", AGAIN | TP | _on(8192, dp_shard=8, tp=8)),
    "70B, hybrid": Case("llama_70b", AGAIN | _on(8192, dp_replicate=8, dp_shard=64)),
    "405B": Case("llama_405b", AGAIN | _on(8192, dp_shard=512)),
    "405B, tp": Case("llama_405b", AGAIN | TP | _on(8192, dp_shard=64, tp=8)),
    "UNet": Case("UNet", {"version": 1, "mesh": {"dp_shard": 8}} | IMAGES),
    "UNet, ddp": Case("UNet", {"version": 1, "mesh": {"dp_replicate": 8}} | IMAGES),
    "T5 3B": Case("t5_3b", BF16 | _on(512, 4, dp_shard=8)),
    "T5 3B, ddp": Case("t5_3b", AGAIN | _on(512, 4, dp_replicate=8)),
    "T5 3B, tp": Case("t5_3b", BF16 | TP | _on(512, 4, dp_shard=2, tp=4)),
    "Mixtral 8x7B": Case("mixtral", AGAIN | _on(512, dp_shard=64)),
    "Mixtral 8x7B, hybrid": Case("mixtral", AGAIN | _on(512, dp_replicate=2, dp_shard=32)),
    "Mixtral 8x7B, ep": Case("mixtral_loop", AGAIN | EXPERTS | _on(512) | SPREAD),
}  # fmt: skip


def measured(name: str) -> dict[str, Any]:
    """One row, in a process that is in no group."""
    from meshplan.errors import Origin
    from meshplan.memory.answer.rank_classes import equal_ranks
    from meshplan.memory.log.allocator import reserve
    from meshplan.runtime.estimate import composed, estimate
    from meshplan.runtime.estimate.request import EstimateRequest, decided
    from meshplan.runtime.estimate.scale_down import ModelSource
    from meshplan.spec.reader import load_spec

    warnings.simplefilter("ignore")
    # All in this process, whose time is taken.
    for room in (composed, estimate):
        room.run_in_subprocesses = lambda function, tasks: [function(*task) for task in tasks]  # type: ignore[attr-defined]
    case = CASES[name]
    source = ModelSource(
        entry=f"tests.bench.tiers:{case.entry}", origin=Origin("tests/bench/tiers.py")
    )
    question = EstimateRequest(spec=load_spec(dict(case.plan)), source=source)
    _, plan = decided(question.spec, source)
    groups = equal_ranks(plan.assignment)
    ranks = list(dict.fromkeys((groups[0][0], groups[-1][0])))
    found: dict[int, Any] = {}
    why: dict[int, str] = {}
    for tier in (1, 3):
        began = time.process_time()
        try:
            logs = _logs(tier, question, plan, ranks)
        except composed.NotComposedError as error:
            why[tier] = str(error)
            continue
        seconds = time.process_time() - began
        peaks = [[log.peak.live_bytes, reserve(log).reserved_bytes] for log in logs]
        found[tier] = {"peaks": peaks, "seconds": seconds}
    words = ", ".join(_words(case.plan))
    return {"name": name, "plan": words, "ranks": ranks, "tiers": found, "why": why}


def _logs(tier: int, question: Any, plan: Any, ranks: Sequence[int]) -> list[Any]:
    from meshplan.runtime.estimate import composed, estimate

    if tier == 1:
        return [each.log for each in composed.composed(question, plan, ranks)]
    return [estimate._fake_step(question, plan, rank).log for rank in ranks]


def _words(plan: Mapping[str, Any]) -> Iterator[str]:
    """A plan in a few words."""
    yield " x ".join(f"{axis} {size}" for axis, size in plan["mesh"].items())
    batch = plan["batch"]
    yield f"{batch['micro']} x {batch['seq_len']}" if "seq_len" in batch else f"{batch['micro']}"
    if "accumulate" in batch:
        yield f"accumulated {batch['accumulate']} times"
    for key in ("strategy", "precision", "clip_grad_norm", "loss_chunks"):
        if key in plan:
            is_named = key in ("clip_grad_norm", "loss_chunks")
            yield f"{key} {plan[key]}" if is_named else str(plan[key])
    if "activation_checkpointing" in plan:
        yield "recomputed"
    if "pipeline" in plan:
        yield str(plan["pipeline"]["schedule"])


def error_of(found: Mapping[str, Any], tier: int, which: int = 0) -> float | None:
    """How far a tier is from the third, at the worst of the ranks; None where it does not answer.

    Args:
        which: 0 for what tensors ask for, 1 for what is reserved.
    """
    tiers = found["tiers"]
    if tier not in tiers:
        return None
    pairs = zip(tiers[tier]["peaks"], tiers[3]["peaks"], strict=True)
    errors = [(one[which] - whole[which]) / whole[which] for one, whole in pairs]
    return max(errors, key=abs)


def row_of(found: Mapping[str, Any]) -> str:
    tiers = found["tiers"]

    def share(error: float | None) -> str:
        return "-" if error is None else f"{error:+.4%}"

    whole = max(peak for peak, _ in tiers[3]["peaks"])
    errors = [share(error_of(found, 1)), share(error_of(found, 1, 1))]
    times = [f"{tiers[tier]['seconds']:.1f}" if tier in tiers else "-" for tier in (1, 3)]
    cells = [found["name"], found["plan"], f"{whole / 2**30:.4f}", *errors, *times]
    return f"| {' | '.join(cells)} |"


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
        print(rows[name], *found[-1]["why"].values(), flush=True)
        if options.write:
            kept = [rows[name] for name in CASES if name in rows]
            TABLE.write_text("\n".join([*INTRO, *HEAD, *kept]) + "\n")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    errors = [error_of(each, 1) for each in found]
    return int(any(error is not None and abs(error) > LIMIT for error in errors))


if __name__ == "__main__":
    raise SystemExit(main())
