"""`model.generate` of a parallelized model: the same tokens on every rank that shares a sample."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Final

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from meshplan.errors import ApplyError, Problem
from meshplan.plan.plan import Plan
from meshplan.runtime.apply.data.data import reshard_units
from meshplan.runtime.apply.parameters.randomness import random_states, restore_random
from meshplan.runtime.base.batch_agreement import check_batches_agree
from meshplan.runtime.base.mesh import device, submesh
from meshplan.runtime.checks.detours import allowing_calls_of, count_calls
from meshplan.runtime.watch.guard import guarded

_CALL: Final = "meshplan_call"
"""Method of a unit that calls a function with the unit's parameters gathered."""


def align_generate(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    """Wrap the model's `generate`, if it has one, as transformers' models do.

    - Ranks along tp must have the same prompts, which is checked, and draw the same tokens: they
      continue the random numbers of the first of them.
    - Ranks that share parameters all take part in gathering them, until the last has generated its
      last token (`synced_gpus` of transformers). The encoder, which `generate` calls by itself, has
      the parameters that it shares with units around it.
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
            with _gathering_for_encoder(model, plan) if shares_units else nullcontext():
                return generate(*args, **kwargs)

    model.generate = aligned


@contextmanager
def _gathering_for_encoder(model: nn.Module, plan: Plan) -> Iterator[None]:
    """Let the encoder run by itself inside: FSDP2 would gather for it only what its own units hold.

    Embeddings and norms of the encoder are often in the unit of the whole model, which FSDP2
    gathers when the whole model is called.
    """
    encoder = _encoder_of(model)
    if encoder is None:
        yield
        return
    name = next(name for name, module in model.named_modules() if module is encoder)
    parents = [name.rpartition(".")[0]] if name else []
    while parents and parents[-1]:
        parents.append(parents[-1].rpartition(".")[0])
    around = [m for m in map(model.get_submodule, parents) if isinstance(m, FSDPModule)]
    for unit in around:
        if _CALL not in vars(unit):
            vars(unit)[_CALL] = lambda call, *args, **kwargs: call(*args, **kwargs)
            register_fsdp_forward_method(unit, _CALL)
    forward = encoder.forward
    is_called, hooks = count_calls(model)

    @functools.wraps(forward)
    def gathered(*args: Any, **kwargs: Any) -> Any:
        if is_called():
            return forward(*args, **kwargs)
        call = forward
        for unit in around:  # From the inside out, so that the unit of the whole model begins.
            call = functools.partial(getattr(unit, _CALL), call)
        try:
            return call(*args, **kwargs)
        finally:
            reshard_units(model, plan)

    is_own = "forward" in vars(encoder)
    encoder.forward = gathered
    try:
        with allowing_calls_of(encoder):
            yield
    finally:
        for hook in hooks:
            hook.remove()
        if is_own:
            encoder.forward = forward
        else:
            del encoder.forward


def _encoder_of(model: nn.Module) -> nn.Module | None:
    """Return the encoder of a model of transformers that has one beside its decoder."""
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return None
    encoder = getattr(model, "get_encoder", lambda: None)()
    return encoder if isinstance(encoder, nn.Module) and encoder is not model else None


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
