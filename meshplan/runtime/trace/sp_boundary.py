"""Boundaries of sequence parallel regions, where the sequence is split over tp or gathered again.

Inside such a region every rank works on its own positions. Applied together with the styles.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from meshplan.assign import SequenceBoundary
from meshplan.errors import ApplyError, Problem


def cross(module: nn.Module, crossing: SequenceBoundary, tp: DeviceMesh) -> None:
    """Register hooks that split or gather one argument of a module, or gather its output.

    They are hooks rather than part of the forward, so that a recomputed forward starts from their
    results.
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
    """Return the arguments of a call with one of them changed.

    Args:
        args: Positional arguments.
        kwargs: Keyword arguments.
        path: Index or name of the argument to change; "" for the first one.
        change: Maps the argument to its replacement.
    """
    if path == "":
        path = "0" if args else next(iter(kwargs))
    if path.isdecimal():
        at = int(path)
        return (*args[:at], change(args[at]), *args[at + 1 :]), kwargs
    return args, {**kwargs, path: change(kwargs[path])}


def _part(x: torch.Tensor, tp: DeviceMesh) -> torch.Tensor:
    """Return this rank's positions of a sequence; backward gathers their gradients."""
    if x.shape[1] % tp.size():
        raise ApplyError(
            Problem(
                f"sequence_parallel shards the sequence over tp: {tp.size()}, which does not "
                f"divide its length {x.shape[1]}",
                fix=f"pad the sequence to a multiple of {tp.size()}",
            )
        )
    whole = DTensor.from_local(x, tp, [Replicate()], run_check=False)
    return whole.redistribute(placements=[Shard(1)]).to_local()


def _gathered(x: torch.Tensor, tp: DeviceMesh, gradient: Replicate | Partial) -> torch.Tensor:
    """Return all positions of a sequence.

    Args:
        x: This rank's positions, along dim 1.
        tp: The tp axis of the mesh.
        gradient: `Replicate` if each rank gets the full gradient, `Partial` if it gets an addend.
    """
    part = DTensor.from_local(x, tp, [Shard(1)], run_check=False)
    whole = part.redistribute(placements=[Replicate()])
    return whole.to_local(grad_placements=[gradient])
