"""Modules that compute on local tensors along tp, and the attributes that their code reads.

For most modules, DTensor parameters suffice. But DTensor cannot shard each projection of a fused
weight, or share a kv head among ranks; in these cases the module's code runs on plain tensors with
this rank's rows. For an embedding sharded by rows, DTensor supports only the forward: its backward
leaves the gradient of all rows on every rank.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn import functional as F

from meshplan.assign import StyleUse
from meshplan.errors import ApplyError, Problem
from meshplan.layout.layout import own_parts
from meshplan.layout.styles import dims_of
from meshplan.plan.plan import Plan


def set_local_attributes(model: nn.Module, plan: Plan) -> None:
    """Set attributes such as the number of heads to this rank's value.

    Raises:
        ApplyError: The value of an attribute differs from that when the plan was made.
    """
    for attribute in plan.assignment.attributes:
        module = model.get_submodule(attribute.module)
        found = vars(module).get(attribute.name)
        if found != attribute.whole:
            raise ApplyError(
                Problem(
                    f"{attribute.module}.{attribute.name} is {found}, but the plan was made when "
                    f"it was {attribute.whole}",
                    fix="change it before parallelize, not in 'apply'",
                )
            )
        vars(module)[attribute.name] = attribute.local


def compute_locally(module: nn.Module, use: StyleUse, tp: DeviceMesh) -> None:
    """Make a module's forward compute on local tensors: its inputs and this rank's rows of weights.

    `module.forward` is wrapped, instead of hooked, so that a recomputed forward does the same.

    Args:
        module: The module, whose parameters are DTensors already.
        use: The module's tensor-parallel style, with the pieces of its fused dim.
        tp: The mesh of tp.
    """
    forward, kind, cut_dim = module.forward, use.style.kind, use.style.cut_dim
    rows = own_parts(use.pieces, tp.get_local_rank(), tp.size())

    def own(name: str, parameter: DTensor) -> torch.Tensor:
        dims = dims_of(kind, name, parameter.ndim)
        if cut_dim not in dims or parameter.placements != (Replicate(),):
            return parameter.to_local()
        # Each rank computes the gradient of its rows; the sum over ranks is the full gradient.
        whole = parameter.to_local(grad_placements=[Partial()])
        dim = dims.index(cut_dim)
        return torch.cat([whole.narrow(dim, r.start, r.stop - r.start) for r in rows], dim)

    @wraps(forward)
    def local(*args: Any, **kwargs: Any) -> Any:
        names = [name for name, value in module._parameters.items() if value is not None]
        shadowed = {name: value for name, value in vars(module).items() if name in names}
        try:
            for name in names:
                # An instance attribute hides the parameter of the same name.
                vars(module)[name] = own(name, shadowed.get(name, module._parameters[name]))
            return forward(*_plain(args), **{k: _plain((v,))[0] for k, v in kwargs.items()})
        finally:
            for name in names:
                vars(module).pop(name, None)
            vars(module).update(shadowed)

    module.forward = local


def looks_up_own_rows(module: nn.Module, tp: DeviceMesh) -> bool:
    """Return True if `look_up_own_rows` can replace a module's forward.

    An overridden forward may do more than look up rows. `max_norm` and `scale_grad_by_freq` depend
    on the rows that all ranks look up. And every rank must have at least one row.
    """
    if not isinstance(module, nn.Embedding) or type(module).forward is not nn.Embedding.forward:
        return False
    part = -(-module.num_embeddings // tp.size())
    has_rows = part * (tp.size() - 1) < module.num_embeddings
    is_plain = module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
    return has_rows and is_plain


def look_up_own_rows(module: nn.Embedding, tp: DeviceMesh) -> None:
    """Make an embedding look up the rows on this rank and return zeros for all others, in place.

    The outputs of the ranks add up to the embedding, and each rank's gradient covers its own rows.
    DTensor's own rule has no backward for a table sharded by rows (torch 2.13,
    distributed/tensor/_ops/_embedding_ops.py) and leaves the full table's gradient on every rank.
    FSDP2 units then accumulate it over microbatches: 4 + 8 GB for the vocabulary of Llama 405B.
    """
    first = -(-module.num_embeddings // tp.size()) * tp.get_local_rank()
    padding = -1 if module.padding_idx is None else module.padding_idx - first

    @wraps(module.forward)
    def own(input: DTensor) -> DTensor:
        table = module.weight
        assert isinstance(table, DTensor)
        rows = table.to_local()
        at = input.to_local() - first
        elsewhere = (at < 0) | (at >= len(rows))
        at.masked_fill_(elsewhere, 0)
        found = F.embedding(at, rows, padding if 0 <= padding < len(rows) else None)
        found.masked_fill_(elsewhere.unsqueeze(-1), 0)
        return DTensor.from_local(found, tp, [Partial()], run_check=False)

    module.forward = own


def _plain(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Convert DTensor inputs to local tensors, whose gradients are partial sums over tp."""
    return tuple(
        v.to_local(grad_placements=[Partial()]) if isinstance(v, DTensor) else v for v in values
    )
