"""`model.generate` of a parallelized model: the same tokens on every rank that shares a sample."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshplan.errors import ApplyError, Problem
from meshplan.plan.plan import Plan
from meshplan.runtime.apply.parameters.randomness import random_states, restore_random
from meshplan.runtime.base.batch_agreement import check_batches_agree
from meshplan.runtime.base.mesh import device, submesh
from meshplan.runtime.watch.guard import guarded


def align_generate(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    """Wrap the model's `generate`, if it has one, as transformers' models do.

    - Ranks along tp must have the same prompts, which is checked, and draw the same tokens: they
      continue the random numbers of the first of them.
    - Ranks that share parameters all take part in gathering them, until the last has generated its
      last token (`synced_gpus` of transformers).
    - cp is refused: a prompt grows by one token at a time, which no ranks can share.
    """
    generate = getattr(model, "generate", None)
    if not inspect.ismethod(generate):
        return
    takes_synced = "synced_gpus" in inspect.signature(generate).parameters
    shares_units = plan.assignment.wrapper == "units" and plan.num_data_ranks > 1

    @functools.wraps(generate)
    def aligned(*args: Any, **kwargs: Any) -> Any:
        with guarded("generate"):
            if plan.mesh.size("cp") > 1:
                raise ApplyError(_one_token_at_a_time(plan))
            if plan.mesh.size("tp") > 1:
                check_batches_agree((args, kwargs), plan, mesh)
                _share_random_numbers(mesh)
            if takes_synced and shares_units:
                kwargs.setdefault("synced_gpus", True)
            return generate(*args, **kwargs)

    model.generate = aligned


def _share_random_numbers(mesh: DeviceMesh) -> None:
    """Let the generators of the ranks along tp go on from the state of the first of them."""
    group = submesh(mesh, ("tp",)).get_group()
    states = tuple(state.to(device()) for state in random_states())
    for state in states:
        dist.broadcast(state, group=group, group_src=0)
    restore_random(tuple(state.cpu() for state in states))


def _one_token_at_a_time(plan: Plan) -> Problem:
    return Problem(
        "generate computes one token at a time, which ranks along cp cannot share",
        plan.spec.origin("mesh.cp"),
        "save the model with meshplan.save_pretrained, and generate from it under a plan without "
        "cp, or in one process",
    )
