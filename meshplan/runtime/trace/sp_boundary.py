"""Where the sequence is cut over tp, and where it is put together again.

Between two such places every rank works on its own positions. Applied with the styles.
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
    """Hooks that turn one argument, or what the module leaves, before anyone sees it.

    Hooks, and not part of the forward: what is recomputed starts from what they made.
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
    """The arguments of a call with one of them changed.

    Args:
        path: Its place or its name; "" for the first of all.
    """
    if path == "":
        path = "0" if args else next(iter(kwargs))
    if path.isdecimal():
        at = int(path)
        return (*args[:at], change(args[at]), *args[at + 1 :]), kwargs
    return args, {**kwargs, path: change(kwargs[path])}


def _part(x: torch.Tensor, tp: DeviceMesh) -> torch.Tensor:
    """This rank's positions; their gradients are put together."""
    if x.shape[1] % tp.size():
        raise ApplyError(
            Problem(
                f"a sequence of {x.shape[1]} does not divide by tp {tp.size()}, and "
                "sequence_parallel cuts it",
                fix=f"pad it to a multiple of {tp.size()}",
            )
        )
    whole = DTensor.from_local(x, tp, [Replicate()], run_check=False)
    return whole.redistribute(placements=[Shard(1)]).to_local()


def _gathered(x: torch.Tensor, tp: DeviceMesh, gradient: Replicate | Partial) -> torch.Tensor:
    """All positions.

    Args:
        gradient: Whether each rank has all of it, or an addend.
    """
    part = DTensor.from_local(x, tp, [Shard(1)], run_check=False)
    whole = part.redistribute(placements=[Replicate()])
    return whole.to_local(grad_placements=[gradient])
