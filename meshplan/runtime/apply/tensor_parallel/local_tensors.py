"""Modules that compute on local tensors along tp, and the attributes that their code reads.

DTensor parameters suffice for any module, but each operator on them costs the host several times as
much. So torch's own modules, whose computation is known, run on plain tensors with this rank's part
of the parameters. So do modules for which DTensor has no rule: it cannot shard each projection of a
fused weight, or share a kv head among ranks, and the backward of an embedding sharded by rows
leaves the gradient of all rows on every rank.
"""

from __future__ import annotations

from contextvars import ContextVar
from functools import wraps
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.nn import functional as F

from meshplan.assign import StyleUse
from meshplan.errors import ApplyError, Problem
from meshplan.layout.layout import own_parts
from meshplan.layout.styles import dims_of
from meshplan.plan.plan import Plan
from meshplan.runtime.torch_private.redistribution import Redistribution, local_part, redistributed


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


_makes_addends: ContextVar[bool] = ContextVar("makes_addends", default=False)


def makes_addends() -> bool:
    """Return True inside a module that computes this rank's addend of a sum over tp."""
    return _makes_addends.get()


_KNOWN: Final = {
    nn.Linear: {"weight", "bias"},
    nn.Embedding: {"weight"},
    nn.LayerNorm: {"weight", "bias"},
    nn.RMSNorm: {"weight"},
}
"""The parameters of those of torch's modules that take one token, or one row, at a time."""


def is_known(module: nn.Module) -> bool:
    """Return True if the forward of a module is torch's own, and is right on this rank's part.

    It is not known of parametrized modules, whose weights are computed from other parameters, and
    of embeddings with `max_norm` or `scale_grad_by_freq`, which depend on what all ranks look up.
    """
    forward = getattr(module.forward, "__func__", None)
    return any(
        isinstance(module, kind) and forward is kind.forward and names <= module._parameters.keys()
        for kind, names in _KNOWN.items()
    ) and not (isinstance(module, nn.Embedding) and not _looks_up_only(module))


def own_part(parameter: DTensor, fqn: str, gradient: Placement | None = None) -> torch.Tensor:
    """Return this rank's part of a parameter along tp, as `local_part` does.

    Args:
        parameter: The parameter.
        fqn: Its fully qualified name.
        gradient: Placement of the part's gradient; None for that of the parameter.

    Raises:
        ApplyError: The parameter is sharded over data axes too: its FSDP unit has not gathered it.
    """
    if len(parameter.placements) > 1:
        raise ApplyError(
            Problem(
                f"{fqn} is used outside the forward of the unit that gathers it, where each rank "
                "holds only a shard",
                fix="set unit: false for that unit, which leaves its parameters to the enclosing "
                "unit (needed for a block whose forward the model does not call)",
            )
        )
    return local_part(parameter, gradient)


def compute_locally(module: nn.Module, fqn: str, use: StyleUse, tp: DeviceMesh) -> None:
    """Make a module's forward compute on local tensors: its inputs and this rank's part of weights.

    `module.forward` is wrapped, instead of hooked, so that a recomputed forward does the same.

    Args:
        module: The module, whose parameters are DTensors already.
        fqn: The module's fully qualified name.
        use: The module's tensor-parallel style, with the pieces of its fused dim.
        tp: The mesh of tp.
    """
    forward, kind, cut_dim = module.forward, use.style.kind, use.style.cut_dim
    rows = own_parts(use.pieces, tp.get_local_rank(), tp.size()) if use.pieces else ()
    # A replicated parameter whose result is added up over the ranks: each adds its share.
    share = Redistribution(Replicate(), Partial(), Replicate(), Replicate())
    is_added = use.style.output[0] == "P"

    def own(name: str, parameter: torch.Tensor) -> torch.Tensor:
        if not isinstance(parameter, DTensor):
            return parameter
        of_model = f"{fqn}.{name}".removeprefix(".")
        if parameter.placements != (Replicate(),):
            return own_part(parameter, of_model)
        if is_added:
            return redistributed(own_part(parameter, of_model), tp, share)
        # Each rank computes the gradient of its rows or tokens; their sum is the full gradient.
        whole = own_part(parameter, of_model, Partial())
        dims = dims_of(kind, name, parameter.ndim)
        if cut_dim not in dims or not rows:
            return whole
        dim = dims.index(cut_dim)
        return torch.cat([whole.narrow(dim, r.start, r.stop - r.start) for r in rows], dim)

    @wraps(forward)
    def local(*args: Any, **kwargs: Any) -> Any:
        names = [name for name, value in module._parameters.items() if value is not None]
        shadowed = {name: value for name, value in vars(module).items() if name in names}
        token = _makes_addends.set(True) if is_added else None
        try:
            for name in names:
                # An instance attribute hides the parameter of the same name.
                vars(module)[name] = own(name, shadowed.get(name, module._parameters[name]))
            return forward(*_plain(args), **{k: _plain((v,))[0] for k, v in kwargs.items()})
        finally:
            if token is not None:
                _makes_addends.reset(token)
            for name in names:
                vars(module).pop(name, None)
            vars(module).update(shadowed)

    module.forward = local


def looks_up_own_rows(module: nn.Module, tp: DeviceMesh) -> bool:
    """Return True if `look_up_own_rows` can replace a module's forward.

    An overridden forward may do more than look up rows, and every rank must have at least one row.
    """
    if not isinstance(module, nn.Embedding) or type(module).forward is not nn.Embedding.forward:
        return False
    part = -(-module.num_embeddings // tp.size())
    return part * (tp.size() - 1) < module.num_embeddings and _looks_up_only(module)


def _looks_up_only(module: nn.Embedding) -> bool:
    return module.max_norm is None and not module.scale_grad_by_freq and not module.sparse


def look_up_own_rows(module: nn.Embedding, fqn: str, tp: DeviceMesh) -> None:
    """Make an embedding look up the rows on this rank and return zeros for all others, in place.

    The outputs of the ranks add up to the embedding, and each rank's gradient covers its own rows.
    The output is a DTensor if the input is one.
    DTensor's own rule has no backward for a table sharded by rows (torch 2.13,
    distributed/tensor/_ops/_embedding_ops.py) and leaves the full table's gradient on every rank.
    FSDP2 units then accumulate it over microbatches: 4 + 8 GB for the vocabulary of Llama 405B.
    """
    first = -(-module.num_embeddings // tp.size()) * tp.get_local_rank()
    padding = -1 if module.padding_idx is None else module.padding_idx - first

    @wraps(module.forward)
    def own(input: torch.Tensor) -> torch.Tensor:
        table = module.weight
        assert isinstance(table, DTensor)
        rows = own_part(table, f"{fqn}.weight".removeprefix("."))
        at = (input.to_local() if isinstance(input, DTensor) else input) - first
        elsewhere = (at < 0) | (at >= len(rows))
        at.masked_fill_(elsewhere, 0)
        found = F.embedding(at, rows, padding if 0 <= padding < len(rows) else None)
        found.masked_fill_(elsewhere.unsqueeze(-1), 0)
        if not isinstance(input, DTensor):
            return found
        return DTensor.from_local(found, tp, [Partial()], run_check=False)

    module.forward = own


def _plain(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Convert DTensor inputs to local tensors, whose gradients are partial sums over tp."""
    return tuple(
        v.to_local(grad_placements=[Partial()]) if isinstance(v, DTensor) else v for v in values
    )
