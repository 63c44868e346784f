"""Embeddings with `max_norm`, which rescale the rows they look up, under data parallelism.

One process rescales the rows that the whole batch looks up. Here each rank rescales all rows that
any data rank looks up, so that the tables of all ranks are bitwise equal afterwards. The rescaling
of `nn.Embedding` itself is off during the forward, since it would rescale and round this rank's
rows a second time.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshplan.layout.mesh import GRADIENT_AXES
from meshplan.plan.plan import Plan
from meshplan.runtime.base.mesh import submesh
from meshplan.runtime.torch_private.private import running_node


def share_looked_up_rows(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    """Hook embeddings with `max_norm` so that they rescale the rows that any data rank looks up.

    Assumes: data parallelism is not applied yet, so that FSDP2 gathers the weights before these
    hooks run.
    """
    if plan.mesh.size(*GRADIENT_AXES) == 1:
        return
    group = submesh(mesh, GRADIENT_AXES, flat=True).get_group()
    limits: dict[nn.Module, float] = {}

    def scale(
        module: nn.Embedding | nn.EmbeddingBag, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        limit = limits[module]
        module.max_norm = None
        if running_node() is not None:  # A recomputed forward: the rows are scaled already.
            return
        index = args[0] if args else kwargs["input"]
        is_used = torch.zeros(module.num_embeddings, dtype=torch.uint8, device=index.device)
        is_used[index.flatten()] = 1
        dist.all_reduce(is_used, op=dist.ReduceOp.MAX, group=group)
        rows = is_used.nonzero().flatten()
        with torch.no_grad():
            torch.embedding_renorm_(module.weight, rows, limit, module.norm_type)

    def restore(module: nn.Embedding | nn.EmbeddingBag, *_: Any) -> None:
        module.max_norm = limits[module]

    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            weight = module._parameters.get("weight")
            if weight is not None and not isinstance(weight, DTensor):
                limits[module] = module.max_norm
                module.register_forward_pre_hook(scale, with_kwargs=True)
                module.register_forward_hook(restore, always_call=True)
