"""Parameter groups of a Trainer's optimizer: those of one process, whatever the meshes are."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

_DECAY = "weight_decay"


def join_split_groups(
    optimizer: torch.optim.Optimizer, decaying: set[int], weight_decay: float
) -> None:
    """Join the groups that the Trainer has split by the meshes of their parameters.

    The optimizer of a plan steps on parameters of several meshes, and a state under another plan,
    and the rates of a scheduler, are those of two groups: of parameters that decay, and of others.

    Args:
        optimizer: The optimizer, without a state. One with other groups is left as it is.
        decaying: Ids of the parameters that decay.
        weight_decay: Their weight decay.
    """
    groups = optimizer.param_groups
    every = [p for group in groups for p in group["params"]]
    meshes = {p.device_mesh if isinstance(p, DTensor) else None for p in every}
    if len(meshes) < 2 or any(_rest(group) != _rest(groups[0]) for group in groups):
        return
    for group in groups:
        of_group = {id(p) in decaying for p in group["params"]}
        if len(of_group) > 1 or group[_DECAY] != (weight_decay if True in of_group else 0.0):
            return
    sides: list[dict[str, Any]] = []
    for decays in (True, False):
        params = [p for p in every if (id(p) in decaying) is decays]
        decay = weight_decay if decays else 0.0
        sides.append({**groups[0], "params": params, _DECAY: decay})
    groups[:] = sides


def _rest(group: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a group beside those in which the Trainer's two groups differ."""
    return {key: value for key, value in group.items() if key not in ("params", _DECAY)}
