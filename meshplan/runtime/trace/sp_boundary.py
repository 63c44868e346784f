"""Boundaries of sequence parallel regions, where the sequence is split over tp or gathered again.

Inside such a region every rank of tp works on its shard of the positions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

from meshplan.assign import SequenceBoundary
from meshplan.errors import ApplyError, Problem
from meshplan.runtime.torch_private.redistribution import Redistribution, redistributed


def cross(module: nn.Module, crossing: SequenceBoundary, tp: DeviceMesh) -> None:
    """Register hooks that split or gather one argument of a module, or gather its output.

    If the module is recomputed, its recomputed forward starts from the results of the hooks,
    because hooks are no part of `forward`.

    Args:
        module: The module.
        crossing: The argument, and the change; without a path, the output is gathered.
        tp: The tp axis of the mesh.
    """
    if crossing.path is None:
        turn = partial(_gathered, tp=tp, gradient=Replicate())
        module.register_forward_hook(lambda module, args, output: turn(output))
        return
    is_cut = crossing.change == "cut"
    change = partial(_part, tp=tp) if is_cut else partial(_gathered, tp=tp, gradient=Partial())
    path = crossing.path

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return with_argument(args, kwargs, path, change)

    module.register_forward_pre_hook(enter, with_kwargs=True)


def with_argument(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    path: str,
    change: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (args, kwargs) of a call, one argument of which is replaced.

    Args:
        args: Positional arguments.
        kwargs: Keyword arguments.
        path: Index or name of the argument to replace; "" for the first one.
        change: Maps the argument to its replacement.
    """
    if path == "":
        path = "0" if args else next(iter(kwargs))
    if path.isdecimal():
        at = int(path)
        return (*args[:at], change(args[at]), *args[at + 1 :]), kwargs
    return args, {**kwargs, path: change(kwargs[path])}


def check_even(x: torch.Tensor, tp: DeviceMesh) -> None:
    """Raise an ApplyError if a sequence does not divide into equal shards.

    gloo aborts the process on uneven shards, and a module that gets a shard does not know the full
    length. Every rank of tp sees the same length, so every rank raises.
    """
    if x.shape[1] % tp.size():
        raise ApplyError(
            Problem(
                f"sequence_parallel shards the sequence over tp: {tp.size()}, which does not "
                f"divide its length {x.shape[1]}",
                fix=f"pad the sequence to a multiple of {tp.size()}",
            )
        )


def _part(x: torch.Tensor, tp: DeviceMesh) -> torch.Tensor:
    """Return this rank's shard of a sequence, along dim 1; backward gathers the gradient shards."""
    check_even(x, tp)
    return redistributed(x, tp, Redistribution(Replicate(), Shard(1), Shard(1), Replicate()))


def _gathered(x: torch.Tensor, tp: DeviceMesh, gradient: Replicate | Partial) -> torch.Tensor:
    """Return the whole sequence, gathered over tp along dim 1.

    Args:
        x: This rank's shard of the sequence.
        tp: The tp axis of the mesh.
        gradient: Placement of the result's gradient: `Replicate` if every rank computes all of it,
            `Partial` if the gradient is the sum over the ranks.
    """
    return redistributed(x, tp, Redistribution(Shard(1), Replicate(), gradient, Shard(1)))
