"""Counts of the collectives that torch really issues on this rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from meshplan.layout.mesh import Mesh
from meshplan.runtime.torch_private.private import group_of
from meshplan.traffic import Route

_KINDS: Final = {
    "all_reduce": "all_reduce",
    "allreduce": "all_reduce",
    "all_gather": "all_gather",
    "allgather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "send": "send",
    "recv": "recv",
    "gather": "gather",
    "scatter": "scatter",
    "reduce": "reduce",
}
"""`Route.kind` by the beginning of a torch op's name, underscores around it stripped.

The order matters: the first match counts.
"""


class _Count(TorchDispatchMode):
    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.counted: Counter[Route] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if (route := sent_by(func, args, kwargs, out, self.mesh)) is not None:
            self.counted[route] += 1
        return out


@contextmanager
def counting(mesh: Mesh) -> Iterator[Counter[Route]]:
    """Count the collectives of this rank inside the `with` block.

    Args:
        mesh: The mesh, by whose axes the groups are named.

    Yields:
        The number of collectives on each route, complete when the block has ended.

    Assumes: backward runs in this thread, as on the CPU, since the mode is active here only.
    """
    with _Count(mesh) as mode:
        yield mode.counted


def sent_by(func: Any, args: Any, kwargs: Any, out: Any, mesh: Mesh) -> Route | None:
    """Return the route of an operator's call, or None if the call sends nothing.

    Args:
        func: The operator.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        out: Results of the call.
        mesh: The mesh, by whose axes the group is named.
    """
    kind = _kind(func)
    if not kind:
        return None
    axes = _axes(dist.get_process_group_ranks(group_of(args, kwargs)), mesh)
    # A rank that is alone in its group sends nothing.
    return Route(kind, axes, _bytes(kind, args, out)) if axes else None


def _kind(op: Any) -> str:
    """Return the `Route.kind` of a collective op of torch; "" for every other op."""
    if op.namespace not in ("c10d", "_c10d_functional"):
        return ""
    plain = op.overloadpacket.__name__.strip("_")
    return next((word for start, word in _KINDS.items() if plain.startswith(start)), "")


def _axes(ranks: list[int], mesh: Mesh) -> tuple[str, ...]:
    """Return the mesh axes along which the coordinates of these ranks differ."""
    places = [mesh.coordinates(rank) for rank in ranks]
    differ = {name for name in places[0] if len({place[name] for place in places}) > 1}
    borrowed = {part for loan in mesh.loans for part in (loan.rest, loan.name)}
    # If ep borrows its ranks from dp_shard, ranks that differ along ep, or along the other factor
    # of dp_shard, differ along dp_shard too. Name the factor, which is more specific.
    lenders = {loan.within for loan in mesh.loans if {loan.rest, loan.name} & differ}
    return mesh.spread(differ - lenders if differ & borrowed else differ)


def _bytes(kind: str, args: tuple[Any, ...], out: Any) -> int:
    """Return `Route.num_bytes`: of the whole tensor, or those sent in an all_to_all."""
    if kind == "all_to_all":
        # The sent tensors come last: c10d ops take (output, input), functional ops only the input.
        return [_size(arg) for arg in args if _holds_tensors(arg)][-1]
    return max(_size(arg) for arg in (*args, out))


def _holds_tensors(arg: Any) -> bool:
    parts = arg if isinstance(arg, tuple | list) else [arg]
    return any(isinstance(part, torch.Tensor) for part in parts)


def _size(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, tuple | list):
        return sum(map(_size, value))
    return 0
