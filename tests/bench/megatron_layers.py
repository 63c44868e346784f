"""The demo model's layers under tp, written by hand on local tensors, as Megatron-LM writes them.

Nothing of meshplan and no DTensor: what a step costs at least with these collectives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from meshplan.runtime.demo_model import ByteLlama

Group = dist.ProcessGroup


class Copy(torch.autograd.Function):
    """Forward nothing, backward all-reduce."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Group) -> Tensor:
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.contiguous()
        dist.all_reduce(total, group=ctx.tp)
        return total, None


class Reduce(torch.autograd.Function):
    """Forward all-reduce, in place; backward nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Group) -> Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=tp)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Gather(torch.autograd.Function):
    """Forward all-gather; backward reduce-scatter, or a cut if ranks have all of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Group, dim: int, is_whole: bool) -> Tensor:
        ctx.given = tp, dim, is_whole
        return gathered(x, tp, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        tp, dim, is_whole = ctx.given
        if is_whole:
            return gradient.chunk(tp.size(), dim)[tp.rank()].contiguous(), None, None, None
        return scattered(gradient, tp, dim), None, None, None


class Scatter(torch.autograd.Function):
    """Forward reduce-scatter along the sequence; backward all-gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Group) -> Tensor:
        ctx.tp = tp
        return scattered(x, tp, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gathered(gradient, ctx.tp, 1), None


def gathered(x: Tensor, tp: Group, dim: int) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(tp.size())]
    dist.all_gather(parts, x.contiguous(), group=tp)
    return torch.cat(parts, dim)


def scattered(x: Tensor, tp: Group, dim: int) -> Tensor:
    parts = [part.contiguous() for part in x.chunk(tp.size(), dim)]
    own = torch.empty_like(parts[0])
    dist.reduce_scatter(own, parts, group=tp)
    return own


def by_hand(model: ByteLlama, tp: Group, *, is_sequence: bool) -> ByteLlama:
    """Shard the model over tp in place; with `is_sequence`, its norms work on parts of a sequence.

    The head gathers its logits.
    """
    rank, ranks = tp.rank(), tp.size()

    def cut(linear: nn.Module, dim: int) -> None:
        linear.weight = nn.Parameter(linear.weight.detach().chunk(ranks, dim)[rank].clone())

    def enter(x: Tensor) -> Tensor:
        return Gather.apply(x, tp, 1, False) if is_sequence else Copy.apply(x, tp)

    def leave(x: Tensor) -> Tensor:
        return Scatter.apply(x, tp) if is_sequence else Reduce.apply(x, tp)

    def around(module: nn.Module, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        forward = module.forward
        module.forward = lambda x, *rest: after(forward(before(x), *rest))

    for layer in model.layers:
        for name in ("wq", "wk", "wv"):
            cut(getattr(layer.attn, name), 0)
        for name in ("w1", "w3"):
            cut(getattr(layer.ffn, name), 0)
        for module, last in ((layer.attn, layer.attn.wo), (layer.ffn, layer.ffn.w2)):
            cut(last, 1)
            around(module, enter, leave)
    first = rank * (model.embed.num_embeddings // ranks)
    cut(model.embed, 0)
    cut(model.head, 0)

    def look_up(tokens: Tensor) -> Tensor:
        at = tokens - first
        elsewhere = (at < 0) | (at >= len(model.embed.weight))
        rows = F.embedding(at.masked_fill_(elsewhere, 0), model.embed.weight)
        return leave(rows.masked_fill_(elsewhere.unsqueeze(-1), 0))

    model.embed.forward = look_up
    around(model.head, enter, lambda x: Gather.apply(x, tp, -1, True))
    if is_sequence:
        for norm in (m for m in model.modules() if isinstance(m, nn.RMSNorm)):
            norm.weight.register_hook(lambda gradient: total(gradient, tp))
    return model


def total(gradient: Tensor, tp: Group) -> Tensor:
    dist.all_reduce(gradient, group=tp)
    return gradient
