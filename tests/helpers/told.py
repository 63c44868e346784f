"""The step of one rank of a pipeline, traced from transformers' own code."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from meshplan.memory import EventLog
from meshplan.plan.plan import Plan, make_plan
from meshplan.runtime.fake_step.step import CPU, fake_step
from meshplan.runtime.trace.ops import record
from meshplan.runtime.trace.rehearse import rehearser
from meshplan.runtime.trace.structure import graph_of
from meshplan.spec.reader import load_spec

LENGTH = 32


def traced(
    config: Mapping[str, Any],
    spec: Mapping[str, Any],
    world: int,
    ranks: tuple[int, ...],
    device: str = CPU,
) -> tuple[str, list[EventLog]] | str:
    """(digest of the plan, log of each rank), in a process without a group; or what was raised."""
    warnings.simplefilter("ignore")
    try:
        return _traced(config, spec, world, ranks, device)
    except Exception:
        return traceback.format_exc()


def _traced(
    config: Mapping[str, Any],
    spec: Mapping[str, Any],
    world: int,
    ranks: tuple[int, ...],
    device: str,
) -> tuple[str, list[EventLog]]:
    from transformers import AutoConfig, AutoModelForCausalLM

    made = AutoConfig.for_model(**config)
    model = AutoModelForCausalLM.from_config(made, attn_implementation="sdpa")
    example = (torch.zeros(2, LENGTH, dtype=torch.long),)
    graph, rehearse = graph_of(model, record(model, example)), rehearser(model, example)
    plan = make_plan(load_spec(dict(spec)), graph, world_size=world, rehearse=rehearse)
    ids = torch.zeros(samples(plan), LENGTH // plan.mesh.size("cp"), dtype=torch.long)

    def loss_fn(output: Any, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.logits.flatten(0, 1).float(), targets.flatten())

    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)

    given = model, plan, ids, ids.clone(), loss_fn, adam
    logs = [fake_step(*given, rank, device) for rank in ranks]
    return plan.digest(), logs


def samples(plan: Plan) -> int:
    """Two for each microbatch of a step."""
    stages = plan.assignment.stages
    return 2 * (stages.microbatches if stages is not None else 1) * plan.accumulate
