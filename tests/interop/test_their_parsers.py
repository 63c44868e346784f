"""Exported files are read by the parsers of the tools themselves, and hold what the plan says.

Which seeded bug would this catch? A key that the tool refuses or reads as nothing, a key that it
requires and the file lacks, a default of the tool that is not the plan's.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from meshplan.interop.configs.exporting import export_spec
from meshplan.interop.configs.tools import TOOLS
from meshplan.spec.contradictions import split_batch
from meshplan.spec.reader import load_spec
from meshplan.spec.spec import Spec

pytestmark = pytest.mark.wide

PIPELINE = {"batch": {"micro": 8, "global": 32, "seq_len": 128}}
CUT = {"mesh": {"dp_replicate": 4, "tp": 2}, "tp_plan": "auto"}
PLANS: Mapping[str, Mapping[str, Any]] = {
    "plain": {"strategy": "ddp"},
    "offload": {"strategy": "full_shard", "offload": "params", "precision": "bf16-mixed"},
    "fp16": {"strategy": "zero2", "precision": "16-mixed"},
    "fp16_ddp": {"strategy": "ddp", "precision": "16-mixed"},
    "bf16_ddp": {"strategy": "ddp", "precision": "bf16-mixed"},
    "bf16_true": {"strategy": "zero1", "precision": "bf16-true"},
    "bf16_reduced": {"strategy": "full_shard",
                     "precision": {"param": "bf16", "reduce": "bf16", "master": "fp32"}},
    "pp": {"strategy": "ddp", "mesh": {"pp": 2, "dp_replicate": 4},
           "pipeline": {"schedule": "1F1B", "microbatches": 4}, **PIPELINE},
    "pp_zero1": {"strategy": "zero1", "mesh": {"pp": 2, "dp_shard": 4},
                 "pipeline": {"schedule": "1F1B", "microbatches": 4}, **PIPELINE},
    "pp_recomputed": {"strategy": "zero1", "mesh": {"pp": 2, "dp_shard": 4},
                      "pipeline": {"microbatches": 4}, "activation_checkpointing": "full",
                      **PIPELINE},
    "pp_virtual": {"strategy": "zero1", "mesh": {"pp": 2, "dp_shard": 4}, **PIPELINE,
                   "pipeline": {"schedule": "Interleaved1F1B", "virtual": 2, "microbatches": 4}},
    "pp_gpipe": {"strategy": "ddp", "mesh": {"pp": 2, "dp_replicate": 4},
                 "pipeline": {"schedule": "GPipe", "microbatches": 4}, **PIPELINE},
    "loss_chunks": {"strategy": "full_shard", "loss_chunks": 4},
    "recomputed": {"strategy": "full_shard", "activation_checkpointing": "full"},
    "recomputed_ddp": {"strategy": "ddp", "activation_checkpointing": "full"},
    "selective": {"strategy": "full_shard", "activation_checkpointing": "selective"},
    "compiled": {"strategy": "full_shard", "compile": True},
    "tp": {"strategy": "ddp", **CUT, "batch": {"micro": 8, "global": 32, "seq_len": 128}},
    "tp_sequence": {"strategy": "ddp", **CUT, "sequence_parallel": True,
                    "batch": {"micro": 8, "global": 32, "seq_len": 128}},
    "tp_experts": {"strategy": "zero1", "mesh": {"dp_shard": 4, "tp": 2, "ep": "2 in dp_shard"},
                   "tp_plan": "auto", "sequence_parallel": True,
                   "batch": {"micro": 8, "global": 32, "seq_len": 128}},
    "cp_heads": {"strategy": "ddp", "mesh": {"dp_replicate": 4, "cp": 2},
                 "context": {"attention": "all_to_all"},
                 "batch": {"micro": 8, "global": 32, "seq_len": 128}},
    "cp_zero1": {"strategy": "zero1", "mesh": {"dp_shard": 4, "cp": 2},
                 "batch": {"micro": 8, "global": 32, "seq_len": 128}},
    "accumulated": {"strategy": "zero1", "clip_grad_norm": 1.0, "optimizer": "adamw",
                    "batch": {"micro": 2, "accumulate": 4, "seq_len": 128}},
    "micro_only": {"strategy": "zero1", "batch": {"micro": 2, "seq_len": 128}},
    "tokens": {"strategy": "ddp", "loss": "tokens"},
    "buckets": {"strategy": "ddp", "ddp": {"bucket_mb": 50}},
}  # fmt: skip
BASE = {"version": 1, "hardware": {"nodes": 1, "gpus_per_node": 8},
        "batch": {"micro": 4, "global": 32, "seq_len": 128}}  # fmt: skip
LEAST = {"deepspeed": 18, "torchtitan": 18, "megatron": 20, "nanotron": 11}
"""Plans that each can say, at least."""


def specs() -> dict[str, Spec]:
    found = {name: load_spec({**BASE, **plan}) for name, plan in PLANS.items()}
    found |= {f"file_{path.stem}": load_spec(str(path)) for path in Path("plans").glob("*.yaml")}
    return {name: spec for name, spec in found.items() if not spec.free_fields}


def meant(spec: Spec) -> dict[str, Any]:
    """What a plan says, in the terms of tools whose microbatch goes through a pipeline alone."""
    assert spec.hardware is not None
    strategy, ranks = spec.strategy, spec.hardware.nodes * spec.hardware.gpus_per_node
    stated = spec.mesh if isinstance(spec.mesh, Mapping) else {}
    sizes = {axis: stated.get(axis, 1) for axis in ("pp", "cp", "tp", "dp_replicate", "dp_shard")}
    if strategy is None:
        strategy = "full_shard" if sizes["dp_shard"] > 1 else "ddp"
    data_ranks = ranks // (sizes["pp"] * sizes["cp"] * sizes["tp"])
    if not stated:
        sizes["dp_replicate" if strategy == "ddp" else "dp_shard"] = data_ranks
    accumulate, micro, problems = split_batch(spec, data_ranks)
    assert not problems
    assert micro is not None
    count = spec.pipeline.microbatches if spec.pipeline and sizes["pp"] > 1 else 1
    assert isinstance(count, int)
    precision, is_cut = spec.precision, sizes["pp"] > 1
    borrowed = stated.get("ep", 1)
    context = spec.context.attention if spec.context else "all_gather"
    return {f"mesh.{axis}": size for axis, size in sizes.items()} | {
        "ranks": ranks,
        "data_ranks": data_ranks,
        "mesh.ep": getattr(borrowed, "size", borrowed),
        "strategy": strategy,
        "sequence_parallel": spec.sequence_parallel,
        "context.attention": context if sizes["cp"] > 1 else None,
        "pipeline.schedule": spec.pipeline.schedule if spec.pipeline and is_cut else None,
        "pipeline.virtual": spec.pipeline.virtual if spec.pipeline else 1,
        "batch.whole": micro,
        "batch.micro": micro // count,
        "batch.accumulate": accumulate * count,
        "batch.global": micro * accumulate * data_ranks,
        "batch.seq_len": spec.batch.seq_len,
        "clip_grad_norm": spec.clip_grad_norm,
        "param": precision.param or "float32",
        "reduce": precision.reduce or "float32",
        "master": precision.master or "float32",
        "offload.params": bool(spec.offload.params),
        "compile": spec.compile,
        "activation_checkpointing": (
            spec.activation_checkpointing.mode
            if spec.activation_checkpointing.mode != "none" else None
        ),
        "loss": spec.loss,
        "optimizer": spec.optimizer if "optimizer" in spec.origins else None,
    }  # fmt: skip


@pytest.mark.parametrize("tool", LEAST)
def test_their_parser_holds_what_the_plan_says(tool):
    files, plans, unsaid = {}, {}, {}
    for name, spec in specs().items():
        exported = export_spec(spec, tool, TOOLS)
        if exported.is_decisive:  # The command line gives no file.
            continue
        plans[name] = meant(spec)
        unsaid[name] = {each.partition(":")[0] for each, _ in exported.unsaid}
        files[name] = {"text": exported.text, "ranks": plans[name]["ranks"],
                       "data_ranks": plans[name]["data_ranks"]}  # fmt: skip
    assert len(files) >= LEAST[tool], list(files)
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.their_parsers", tool],
        input=json.dumps(files), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    held = json.loads(done.stdout.splitlines()[-1])
    if "missing" in held:
        pytest.skip(f"{tool} cannot be imported: {held['missing']}")
    assert held.keys() == files.keys()
    wrong = [(name, each) for name, each in held.items() if "refused" in each]
    for name, values in held.items():
        for key, value in values.items():
            if key in ("refused", "later") or key in unsaid[name]:
                continue
            expected = plans[name][key]
            if key == "optimizer" and expected is None:
                continue  # The training program states it.
            if value != expected:
                wrong.append((name, {key: (value, expected)}))
    assert not wrong, "\n".join(map(str, wrong))
    assert sum("later" not in each for each in held.values()) >= 11
