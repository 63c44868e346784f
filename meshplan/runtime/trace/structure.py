"""Convert a live `nn.Module`, on meta or real, to a `ModelGraph`.

Only attributes are read: no forward runs, and the model does not change. The attribute names by
which attention modules state their sizes are in `model.heads`.
"""

from __future__ import annotations

import re
from types import MappingProxyType

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from meshplan.layout.styles import dims_of
from meshplan.model.flow import Flow
from meshplan.model.graph import ModelGraph, ModuleInfo, TensorInfo, is_inside
from meshplan.model.heads import FUSED, HEAD_BY_HEAD, ROLES, pieces_of, role


def graph_of(model: nn.Module, flow: Flow | None = None) -> ModelGraph:
    """Return the graph of a live model: its module tree and its tensors.

    Args:
        model: The model, on meta or real.
        flow: The model's recorded forward pass (`runtime.trace.ops`); None if there is none.

    Returns:
        The graph, in the order of `named_modules` and `named_parameters`. A shared module or tied
        tensor is in it once, under its first name, with its other names as aliases.
    """
    modules = _modules(model)
    return ModelGraph(
        name=type(model).__name__,
        modules=MappingProxyType(modules),
        tensors=MappingProxyType(_tensors(model, modules)),
        flow=flow,
        tp_preset=MappingProxyType(_tp_preset(model)),
    )


def _tp_preset(model: nn.Module) -> dict[str, str]:
    """Return the tp plan of a transformers model (`_tp_plan`): style by pattern of module names.

    A plan of a submodule is skipped if a module around it has one, which already includes it.
    """
    out: dict[str, str] = {}
    done: list[str] = []
    for fqn, module in model.named_modules():
        plan = vars(module).get("_tp_plan")
        if plan and not any(is_inside(fqn, around) for around in done):
            done.append(fqn)
            at = re.sub(r"\.\d+(?=\.|$)", ".*", fqn)
            out |= {f"{at}.{name}" if at else name: str(word) for name, word in plan.items()}
    return out


def _modules(model: nn.Module) -> dict[str, ModuleInfo]:
    names: dict[int, list[str]] = {}
    by_id: dict[int, nn.Module] = {}
    for fqn, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(fqn)
        by_id[id(module)] = module
    out: dict[str, ModuleInfo] = {}
    for key, (fqn, *aliases) in names.items():
        module = by_id[key]
        parent = model.get_submodule(fqn.rpartition(".")[0])
        kind = _kind(module)
        is_projection = kind in ("linear", "conv1d") and parent is not module
        around = _sizes(parent) if is_projection else {}
        head_dim, leaf = role(around, "head_dim"), fqn.rpartition(".")[2]
        cls = type(module)
        out[fqn] = ModuleInfo(
            fqn=fqn,
            type=cls.__name__,
            qualified_type=f"{cls.__module__}.{cls.__qualname__}",
            kind=kind,
            head_dim=head_dim * HEAD_BY_HEAD.get(leaf, 1) if head_dim else None,
            packed=FUSED.get(leaf, 1) if is_projection else 1,
            pieces=pieces_of(leaf, _width(module), around) if is_projection else (),
            sizes=MappingProxyType(_sizes(module)),
            has_forward=type(module).forward is not nn.Module.forward and not _is_bypassed(module),
            numbers=MappingProxyType(
                {k: v for k, v in vars(module).items() if type(v) is int and v > 1}
            ),
            aliases=tuple(aliases),
        )
    return out


def _tensors(model: nn.Module, modules: dict[str, ModuleInfo]) -> dict[str, TensorInfo]:
    canonical = {alias: m.fqn for m in modules.values() for alias in m.aliases}
    names: dict[int, list[str]] = {}
    params = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for name, tensor in (params | buffers).items():
        names.setdefault(id(tensor), []).append(name)
    out: dict[str, TensorInfo] = {}
    for fqn, *aliases in names.values():
        tensor = params.get(fqn, buffers.get(fqn))
        assert tensor is not None
        module, _, leaf = fqn.rpartition(".")
        owner = model.get_submodule(module)
        kind = modules[canonical.get(module, module)].kind
        out[fqn] = TensorInfo(
            fqn=fqn,
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            dims=_expert_dims(owner, tensor) or dims_of(kind, leaf, tensor.ndim),
            aliases=tuple(aliases),
            trainable=tensor.requires_grad,
            is_buffer=fqn in buffers,
            is_persistent=fqn in params or leaf not in owner._non_persistent_buffers_set,
        )
    return out


def _kind(module: nn.Module) -> str:
    """Return `ModuleInfo.kind` of a module, which decides by which styles it can be sharded."""
    name = type(module).__name__
    weight = module._parameters.get("weight")  # Not getattr, which may run a property.
    if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        return "container"
    if isinstance(module, nn.Linear) and not _is_bypassed(module):
        return "linear"
    if type(module).forward is nn.MultiheadAttention.forward:
        return "mha"
    if isinstance(module, nn.Embedding):
        return "embedding"
    if name == "Conv1D" and hasattr(module, "nf"):
        return "conv1d"
    if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm):
        is_torchs = type(module).forward is _BatchNorm.forward
        return "batchnorm" if is_torchs else "own_batchnorm"
    by_group = isinstance(module, nn.GroupNorm) or name.startswith(("BatchNorm", "InstanceNorm"))
    is_norm = isinstance(module, nn.LayerNorm | nn.RMSNorm) or name.endswith("Norm")
    if is_norm and not by_group and isinstance(weight, nn.Parameter) and weight.ndim == 1:
        return "norm"
    return "other"


def _expert_dims(owner: nn.Module, tensor: torch.Tensor) -> tuple[str, ...]:
    """Return the names of the dims of a parameter with one entry per expert; () for any other.

    Such a parameter belongs to stacked experts, or to the router that chooses among them. To be
    recognised, the module must have an attribute that counts experts, and all of its direct
    parameters must have that size in dim 0.
    """
    own = [p for p in owner._parameters.values() if p is not None]
    counts = {
        value
        for name, value in vars(owner).items()
        if "expert" in name and "per_tok" not in name and type(value) is int
    }
    if not any(tensor is p for p in own) or not all(p.ndim and p.shape[0] in counts for p in own):
        return ()
    is_transposed = vars(owner).get("is_transposed")  # A flag of transformers.
    if tensor.ndim == 3 and is_transposed is not None:
        return ("expert", "in", "out") if is_transposed else ("expert", "out", "in")
    is_router = tensor.ndim == 2 and len(own) == 1 and type(owner).__name__.endswith("Router")
    return ("expert", "in") if is_router else ("expert",) + ("",) * (tensor.ndim - 1)


def _is_bypassed(module: nn.Module) -> bool:
    """Return True for `out_proj` of nn.MultiheadAttention, whose forward is never called."""
    return type(module).__name__ == "NonDynamicallyQuantizableLinear"


def _width(projection: nn.Module) -> int:
    """Return the size of the output dim of a Linear or a Conv1D."""
    name = "out_features" if isinstance(projection, nn.Linear) else "nf"
    return int(vars(projection)[name])


def _sizes(module: nn.Module) -> dict[str, int]:
    """Return a module's attributes that state sizes of attention (`model.heads.ROLES`), by name.

    Properties are not read, because they would run the user's code.
    """
    return {
        name: value
        for name, value in vars(module).items()
        if name in ROLES and type(value) is int and value > 0
    }
