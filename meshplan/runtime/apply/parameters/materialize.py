"""Initial values before wrapping: every rank must start from the values that one process would.

Real tensors are compared across ranks; those that differ are broadcast from rank 0. Tensors on meta
are initialised in full, one after the other, with the same random numbers on every rank; each rank
keeps its shard of each tensor and frees the rest (`runtime.apply.parameters.initial_values`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from meshplan.errors import ApplyError, Problem
from meshplan.plan.plan import Plan
from meshplan.runtime.apply.data.data import params_on_host
from meshplan.runtime.apply.parameters.initial_values import holder, initialise
from meshplan.runtime.base.digest import checksum
from meshplan.runtime.base.mesh import device, extremes, gathered, local_of
from meshplan.state.held import is_held


@dataclass(slots=True)
class InitialValues:
    """Initial values of a model that has tensors on meta, until `fill` copies them into it.

    Attributes:
        local: This rank's shard of every tensor that it stores, by fqn; empty if no rank has
            tensors on meta, and after `fill`.
    """

    local: dict[str, torch.Tensor] = field(default_factory=dict)

    def fill(self, model: nn.Module, plan: Plan) -> None:
        """Give every tensor of the model memory and its value; do nothing if `local` is empty.

        A value is freed once it is copied, so that the shards and their values together take little
        more memory than the shards alone.
        """
        if not self.local:
            return
        on_host = {id(param) for param in params_on_host(model, plan)}
        tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        values = {id(tensors[fqn]): value for fqn, value in self.local.items()}
        self.local.clear()
        # The tensors on meta are kept as well: the id of a freed one could be that of another.
        made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def filled(tensor: torch.Tensor) -> torch.Tensor:
            number = id(tensor)
            if number not in made:
                where = torch.device("cpu") if number in on_host else device()
                made[number] = (tensor, torch.empty_like(tensor, device=where))
                if (value := values.pop(number, None)) is not None:
                    local_of(made[number][1]).copy_(value)
            return made[number][1]

        model._apply(filled)  # Like `to_empty`, which supports one device only.
        _retie(model, plan)


def agree_on_values(model: nn.Module, plan: Plan) -> InitialValues:
    """Make real values equal on all ranks, in place, and compute those of tensors on meta.

    Returns:
        The values to fill in after wrapping; empty if no rank has tensors on meta.

    Raises:
        ApplyError: A tensor on meta is not initialised by the model, or the ranks have different
            tensors on meta and none of them has all values.
    """
    tensors = _tensors(model, plan)
    missing = [fqn for fqn, t in tensors.items() if t.is_meta]
    everywhere = gathered(missing)
    if not any(everywhere):
        _take_from_rank_0(tensors)
        return InitialValues()
    if all(names == everywhere[0] for names in everywhere):
        _take_from_rank_0({f: t for f, t in tensors.items() if not t.is_meta})
        out = InitialValues()
        names = {fqn: placed.info.names for fqn, placed in plan.assignment.tensors.items()}

        def keep(fqn: str, value: torch.Tensor) -> None:
            if is_held(fqn, plan, dist.get_rank()):
                out.local[fqn] = _part(value, fqn, plan)

        initialise(model, names, keep)
        for fqn, tensor in tensors.items():
            if not tensor.is_meta:
                keep(fqn, tensor)
        return out
    # The ranks differ in what is on meta: the first rank with all values broadcasts them.
    full = next((rank for rank, names in enumerate(everywhere) if not names), None)
    if full is None:
        raise ApplyError(
            Problem(
                "the ranks have different tensors on the meta device, and no rank has the values "
                "of all tensors",
                fix="build the model identically on every rank, or with real values for all "
                "tensors on one rank",
            )
        )
    return _receive(tensors, plan, full)


def _tensors(model: nn.Module, plan: Plan) -> dict[str, torch.Tensor]:
    found = dict(model.named_parameters()) | dict(model.named_buffers())
    return {fqn: found[fqn] for fqn in plan.assignment.tensors}


def _part(value: torch.Tensor, fqn: str, plan: Plan) -> torch.Tensor:
    """Return this rank's shard of a full value, in the dtype in which the plan stores it."""
    placed = plan.assignment.tensors[fqn]
    value = value.detach()
    ranges = placed.stored.ranges(placed.info.shape, plan.mesh, dist.get_rank())
    dtype = getattr(torch, placed.dtype)
    part = value
    for dim, slices in enumerate(ranges):
        pieces = [part.narrow(dim, s.start, s.stop - s.start) for s in slices]
        part = torch.cat(pieces, dim) if len(pieces) > 1 else pieces[0]
    part = part.to(dtype=dtype).contiguous()
    # A view would keep the full value's memory alive.
    whole = value.untyped_storage().data_ptr()
    return part.clone() if part.untyped_storage().data_ptr() == whole else part


def _take_from_rank_0(tensors: dict[str, torch.Tensor]) -> None:
    """Make tensors equal on all ranks, in place: broadcast those whose checksums differ."""
    if dist.get_world_size() == 1 or not tensors:
        return
    sums = torch.tensor([checksum(t) for t in tensors.values()], dtype=torch.int64)
    low, high = extremes(sums.to(device()))
    differs = (low != high).tolist()
    for tensor, different in zip(tensors.values(), differs, strict=True):
        if different:
            sent = tensor.detach().to(device(), copy=True).contiguous()
            dist.broadcast(sent, src=0)
            # New memory, because if a later step raises, the old memory is put back unchanged.
            tensor.data = sent.to(tensor.device)


def _receive(tensors: dict[str, torch.Tensor], plan: Plan, source: int) -> InitialValues:
    """Broadcast each full tensor from rank `source`, and return this rank's shards of them."""
    out = InitialValues()
    is_source = dist.get_rank() == source
    for fqn, tensor in tensors.items():
        if is_source:
            full = tensor.detach().to(device()).contiguous()
        else:
            full = torch.empty(tensor.shape, dtype=tensor.dtype, device=device())
        dist.broadcast(full, src=source)
        if is_held(fqn, plan, dist.get_rank()):
            out.local[fqn] = _part(full, fqn, plan)
    return out


def _retie(model: nn.Module, plan: Plan) -> None:
    """Tie shared tensors again, since `Module._apply` made a separate tensor for each name."""
    for placed in plan.assignment.tensors.values():
        tensor = holder(model, placed.info.fqn)[placed.info.fqn.rpartition(".")[2]]
        for name in placed.info.aliases:
            holder(model, name)[name.rpartition(".")[2]] = tensor
