"""A live `nn.Module`, on meta or real, as a `ModelGraph`.

Knows torch's modules and what attention modules call their head size. Reads structure only:
nothing is run and nothing is changed.
"""

from __future__ import annotations

from types import MappingProxyType

import torch
from torch import nn

from meshplan.graph import ModelGraph, ModuleInfo, TensorInfo
from meshplan.styles import dims_of

_HEAD_DIM_ATTRIBUTES = (
    "head_dim", "attention_head_size", "key_value_proj_dim", "dim_head", "d_head", "head_size",
)  # fmt: skip
"""What attention modules (torch, transformers, diffusers, timm) call the size of one head."""

_PACKED_NAMES = MappingProxyType(
    {"c_attn": 3, "qkv": 3, "qkv_proj": 3, "Wqkv": 3, "query_key_value": 3, "gate_up_proj": 2}
)
"""Projections that fuse several weights in one, by the names models give them."""


def graph_of(model: nn.Module) -> ModelGraph:
    """The module tree and tensors of a live model.

    Returns:
        Each shared module and each tied tensor once, under its first name, with the other names
        as aliases; in `named_modules` and `named_parameters` order.
    """
    modules = _modules(model)
    return ModelGraph(
        name=type(model).__name__,
        modules=MappingProxyType(modules),
        tensors=MappingProxyType(_tensors(model, modules)),
    )


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
        is_projection = kind in ("linear", "conv1d")
        cls = type(module)
        out[fqn] = ModuleInfo(
            fqn=fqn,
            type=cls.__name__,
            qualified_type=f"{cls.__module__}.{cls.__qualname__}",
            kind=kind,
            head_dim=_head_dim(parent) if is_projection and parent is not module else None,
            packed=_PACKED_NAMES.get(fqn.rpartition(".")[2], 1) if is_projection else 1,
            has_forward=type(module).forward is not nn.Module.forward and not _is_bypassed(module),
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
    """What styles may do with it (`ModuleInfo.kind`)."""
    name = type(module).__name__
    weight = module._parameters.get("weight")  # An attribute may be computed: it is not read.
    if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        return "container"
    if isinstance(module, nn.Linear) and not _is_bypassed(module):
        return "linear"
    if isinstance(module, nn.Embedding):
        return "embedding"
    if name == "Conv1D" and hasattr(module, "nf"):
        return "conv1d"
    by_group = isinstance(module, nn.GroupNorm) or name.startswith(("BatchNorm", "InstanceNorm"))
    is_norm = isinstance(module, nn.LayerNorm | nn.RMSNorm) or name.endswith("Norm")
    if is_norm and not by_group and isinstance(weight, nn.Parameter) and weight.ndim == 1:
        return "norm"
    return "other"


def _expert_dims(owner: nn.Module, tensor: torch.Tensor) -> tuple[str, ...]:
    """Named dims of a parameter that has an entry per expert, () for any other.

    A module says so that counts experts and whose own parameters all begin with that number:
    stacked experts, or the router that chooses among them.
    """
    own = [p for p in owner._parameters.values() if p is not None]
    counts = {
        value
        for name, value in vars(owner).items()
        if "expert" in name and "per_tok" not in name and type(value) is int
    }
    if not any(tensor is p for p in own) or not all(p.ndim and p.shape[0] in counts for p in own):
        return ()
    is_transposed = vars(owner).get("is_transposed")  # transformers' word for (in, out).
    if tensor.ndim == 3 and is_transposed is not None:
        return ("expert", "in", "out") if is_transposed else ("expert", "out", "in")
    is_router = tensor.ndim == 2 and len(own) == 1 and type(owner).__name__.endswith("Router")
    return ("expert", "in") if is_router else ("expert",) + ("",) * (tensor.ndim - 1)


def _is_bypassed(module: nn.Module) -> bool:
    """nn.MultiheadAttention's out_proj: its weight is used, its forward is never called."""
    return type(module).__name__ == "NonDynamicallyQuantizableLinear"


def _head_dim(parent: nn.Module) -> int | None:
    """The size of one attention head, where the module around a projection states it."""
    for attribute in _HEAD_DIM_ATTRIBUTES:
        value = vars(parent).get(attribute)  # Not a property: that would run user code.
        if isinstance(value, int) and value > 0:
            return value
    return None
