"""The models of this process that a plan was applied to, ordered by when they last ran."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshplan.errors import ApplyError, Problem
from meshplan.plan.plan import Plan
from meshplan.shown import shown


@shown
@dataclass(slots=True, eq=False)
class ParallelModel:
    """A model that a plan was applied to.

    Attributes:
        model: The module that `parallelize` returned.
        plan: The plan applied to the model.
        mesh: The DeviceMesh that it was applied on.
        own: `id` of each sharded parameter of the model. While a unit is gathered, FSDP2 puts other
            parameter objects in their place.
        runs_stage: True while the forward of one of its pipeline stages is running.
    """

    model: weakref.ref[nn.Module]
    plan: Plan
    mesh: DeviceMesh
    own: frozenset[int]
    runs_stage: bool = False


_known: list[ParallelModel] = []
"""The registered models; the one that ran or was registered last is at the end."""


def register(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    """Record a model that a plan was applied to, and track each of its forwards from now on."""
    own = frozenset(id(p) for p in model.parameters())
    found = ParallelModel(weakref.ref(model), plan, mesh, own)
    _known.append(found)
    stages = getattr(model, "stage_modules", None)

    def begin(*_: Any) -> None:
        found.runs_stage = stages is not None
        ran(found)

    def end(*_: Any) -> None:
        found.runs_stage = False

    for root in stages or (model,):
        root.register_forward_pre_hook(begin)
        if stages is not None:
            root.register_forward_hook(end, always_call=True)


def ran(found: ParallelModel) -> None:
    """Record that a model runs now, by moving it to the end of the list."""
    if _known[-1] is not found and found in _known:
        _known.remove(found)
        _known.append(found)


def known_models() -> list[ParallelModel]:
    """Return the models that still exist; the last to run or to be registered comes last."""
    _known[:] = [each for each in _known if each.model() is not None]
    return list(_known)


def find_model(model: nn.Module | None, verb: str) -> ParallelModel:
    """Return the record of a model; without one, of the model that ran last.

    Args:
        model: The module that `parallelize` returned, or None.
        verb: Name of the function that asks, for the error message.

    Raises:
        ApplyError: No plan was applied to the model, or to any.
    """
    models = [each for each in known_models() if model is None or each.model() is model]
    if not models:
        raise ApplyError(
            Problem(
                f"{verb} was called, but no plan was applied to "
                f"{'a model' if model is None else 'this model'}: only a plan states which ranks "
                "have different samples",
                fix="call meshplan.parallelize first, and use the model that it returns",
            )
        )
    return models[-1]


def known_parameters() -> set[int]:
    """Return the `id` of each parameter of all models that a plan was applied to.

    Includes the sharded parameters and, of gathered units, the full ones.
    """
    found: set[int] = set()
    for each in known_models():
        model = each.model()
        found |= each.own
        found |= {id(p) for p in model.parameters()} if model is not None else set()
    return found


def is_stepped(optimizer: torch.optim.Optimizer, found: ParallelModel) -> bool:
    """Return True if the optimizer has parameters of this model."""
    return any(id(p) in found.own for group in optimizer.param_groups for p in group["params"])
