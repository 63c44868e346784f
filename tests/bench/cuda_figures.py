"""Published peaks of torchtitan on H100, imagined without a GPU: real wrappers, every layer.

    python -m tests.bench.cuda_figures [NAME ...]

Prints a table in GiB. About a minute a row on one core.
"""

from __future__ import annotations

import sys
import time
import warnings
from typing import Any, NamedTuple

import torch

from meshplan.memory import reserve, with_workspaces
from meshplan.plan.plan import make_plan
from meshplan.runtime.fake_step.step import fake_step
from meshplan.runtime.trace.structure import graph_of
from meshplan.spec.reader import load_spec
from tests.bench.llama import KeepsPrediction, Llama, Shape, loss

_LLAMA2_7B = Shape(layers=32, hidden=4096, heads=32, kv_heads=32, ffn=11008, vocab=32000,
                   seq_len=2048)  # fmt: skip
_LLAMA3_8B = Shape(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256,
                   seq_len=8192)  # fmt: skip
_GIB = 2**30


class Case(NamedTuple):
    """A published run: peak active and reserved in GiB, where stated.

    The loop that keeps its prediction through backward is [Empirical] for the first two: torchtitan
    has deleted it before backward since, and nobody has read the loop of that time.
    """

    shape: Shape
    ranks: int
    batch: int
    recompute: str
    active_gib: float | None
    reserved_gib: float | None
    keeps_prediction: bool
    source: str


_PR_165 = "pytorch/torchtitan pull request 165"
_TABLE_1 = "torchtitan benchmarks/llama3_h100_202412_torchtitan.md"
CASES = {
    "7B full": Case(_LLAMA2_7B, 8, 8, "full", 22.73, 31.02, True, _PR_165),
    "7B selective": Case(_LLAMA2_7B, 8, 8, "selective", 49.54, 59.41, True, _PR_165),
    "8B x 8": Case(_LLAMA3_8B, 8, 2, "selective", None, 82.4, False, _TABLE_1),
    "8B x 128": Case(_LLAMA3_8B, 128, 2, "selective", None, 67.0, False, _TABLE_1),
}


def predicted(case: Case) -> tuple[float, float]:
    """(active, reserved) in GiB of the second step."""
    spec: dict[str, Any] = {
        "version": 1,
        "mesh": {"dp_shard": case.ranks},
        "precision": "bf16-mixed",
        "rules": [
            {"match": ["tok_embeddings", "norm", "output"], "unit": False},
            {"match": f"layers.{case.shape.layers - 1}", "reshard_after_forward": False},
        ],
    }
    if case.recompute == "full":
        spec["activation_checkpointing"] = "full"
    with torch.device("meta"):
        model = Llama(case.shape, recompute="ops" if case.recompute == "selective" else "none")
    plan = make_plan(load_spec(spec), graph_of(model), world_size=case.ranks)
    tokens = torch.empty(case.batch, case.shape.seq_len, dtype=torch.long, device="meta")
    log = fake_step(
        model, plan, tokens, tokens, KeepsPrediction() if case.keeps_prediction else loss,
        lambda wrapped: torch.optim.AdamW(wrapped.parameters(), lr=1e-4), device="h100",
    )  # fmt: skip
    log = with_workspaces(log, "h100")
    found = reserve(log, limit_bytes=int(95.04 * _GIB))
    print(
        f"    peak in {log.phase_at_peak} of {log.module_at_peak!r}:",
        {str(term): round(size / _GIB, 2) for term, size in log.terms_at_peak.items() if size},
        file=sys.stderr,
    )
    return found.allocated_bytes / _GIB, found.reserved_bytes / _GIB


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    print("| run | active GiB | published | error | reserved GiB | published | error | s |")
    print("|---|---|---|---|---|---|---|---|")
    for name in names or CASES:
        case, start = CASES[name], time.monotonic()
        cells = [name]
        for value, stated in zip(
            predicted(case), (case.active_gib, case.reserved_gib), strict=True
        ):
            cells += [f"{value:.2f}", f"{stated or '-'}"]
            cells.append(f"{100 * (value / stated - 1):+.1f} %" if stated else "-")
        print("|", " | ".join((*cells, f"{time.monotonic() - start:.0f}")), "|", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
