"""Vocabulary-parallel loss: cross-entropy on logits that are sharded over tp along the vocabulary.

While `LossParallel` is active, the head returns its logits as a sharded DTensor of the full shape,
and `torch.nn.functional.cross_entropy` all-reduces four numbers per token instead of gathering the
logits. `logsumexp` over the vocabulary is replaced as well. DTensor handles every other operation.

torch's own `loss_parallel` also changes the backward of `log_softmax`, which is right only if
`nll_loss` follows: with label smoothing or any other use, gradients are silently wrong.

Source: Shoeybi et al. 2019 (Megatron-LM), section 3, for the fused loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.overrides import TorchFunctionMode

from meshplan.errors import ApplyError, Problem
from meshplan.runtime.base.pytree import tensors_in

_NAMES: Final = (
    "input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction",
    "label_smoothing",
)  # fmt: skip
_DEFAULTS: Final[dict[str, Any]] = {
    "ignore_index": -100,
    "reduction": "mean",
    "label_smoothing": 0.0,
}


_LOGSUMEXP: Final = (torch.logsumexp, torch.Tensor.logsumexp, torch.special.logsumexp)
_MIXED: Final = "mixed torch.Tensor and DTensor"
"""Part of the message that DTensor raises when it is mixed with a plain tensor."""
_NOT_HERE: Final = Problem(
    "loss_fn reads parameters of the model that was given to parallelize, which has none under pp: "
    "each stage has its own",
    fix="return from the forward what the loss needs of the parameters, or use the optimizer's "
    "weight_decay for a penalty on weights",
)
_MIXES: Final = Problem(
    "the loss uses logits sharded over the vocabulary in an op other than cross_entropy and "
    "logsumexp (see the traceback above)",
    fix="use torch.nn.functional.cross_entropy, call .full_tensor() on the logits first, or set "
    "loss_parallel: false",
)


class LossParallel(TorchFunctionMode):
    """Torch function mode to be active while a model, its loss and their backward are computed.

    Attributes:
        num_on: Number of active instances.
    """

    num_on = 0

    def __enter__(self) -> LossParallel:
        super().__enter__()
        LossParallel.num_on += 1
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        LossParallel.num_on -= 1
        super().__exit__(kind, error, trace)
        # Backward may raise this too: the formulas of some torch ops create plain tensors.
        if isinstance(error, RuntimeError) and _MIXED in str(error):
            raise ApplyError(_MIXES) from error

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _LOGSUMEXP:
            return _logsumexp(func, *args, **kwargs)
        if func is not F.cross_entropy:
            return func(*args, **kwargs)
        given = dict(zip(_NAMES, args, strict=False)) | kwargs
        logits = given["input"]
        dim = 1 if logits.ndim > 1 else 0
        if not isinstance(logits, DTensor) or not any(p == Shard(dim) for p in logits.placements):
            return func(*args, **kwargs)
        return _cross_entropy(logits, dim, given)


def is_on() -> bool:
    """Return True while `LossParallel` is active, so that a head may leave its logits sharded."""
    return LossParallel.num_on > 0


def _cross_entropy(logits: DTensor, dim: int, given: dict[str, Any]) -> torch.Tensor:
    """Compute `F.cross_entropy` of sharded logits.

    Args:
        logits: Logits sharded over tp along `dim`.
        dim: The dim of classes.
        given: The call's arguments by name.

    Returns:
        A plain tensor, the same on every rank of tp.

    Raises:
        ApplyError: An option is not supported on sharded logits.
    """
    options = _DEFAULTS | {k: v for k, v in given.items() if k in _DEFAULTS}
    target = given["target"]
    refused = [name for name in ("weight", "size_average", "reduce") if given.get(name) is not None]
    if target.is_floating_point():
        refused.append("class probabilities as the target")
    if logits.device_mesh.ndim > 1 or isinstance(target, DTensor):
        refused.append("logits or targets sharded over mesh axes other than tp")
    if refused:
        raise ApplyError(
            Problem(
                f"loss_parallel does not support cross_entropy with {refused[0]}",
                fix="change that argument, or set loss_parallel: false",
            )
        )
    size, mesh = logits.shape[dim], logits.device_mesh
    # Class dim last: one row per token.
    local = logits.to_local(grad_placements=logits.placements).movedim(dim, -1)
    piece = -(-size // mesh.size())
    is_kept = target != options["ignore_index"]
    losses = _Losses.apply(
        local,
        torch.where(is_kept, target, 0),
        (min(mesh.get_local_rank() * piece, size), size),
        float(options["label_smoothing"]),
        mesh.get_group(),
    )
    out: torch.Tensor = torch.where(is_kept, losses, 0.0)
    if options["reduction"] != "none":
        out = out.sum()
    if options["reduction"] == "mean":
        out = out / is_kept.sum()
    # Autocast computes cross-entropy in float32.
    return out if torch.is_autocast_enabled(out.device.type) else out.to(local.dtype)


class _Losses(torch.autograd.Function):
    """Cross-entropy of each token, computed from sharded logits.

    With x the logits, t the target, V the vocabulary and e the smoothing:
    loss = logsumexp(x) - (1 - e) x_t - e mean(x), and
    d loss / d x_c = softmax(x)_c - (1 - e) [c = t] - e / V.

    Source: Szegedy et al. 2016, section 7, for smoothing.
    """

    @staticmethod
    def forward(
        ctx: Any,
        local: torch.Tensor,
        target: torch.Tensor,
        place: tuple[int, int],
        smoothing: float,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        """Return the loss of each token, the same on every rank of the group.

        Args:
            ctx: The autograd context.
            local: This rank's shard of the logits.
            target: The class of each token; any valid one for ignored tokens.
            place: (first class of the shard, size of the vocabulary).
            smoothing: Label smoothing.
            group: The ranks that hold the shards.

        Shape: local (..., classes of the shard), target (...) -> (...).
        """
        start, size = place
        x = local.to(torch.promote_types(local.dtype, torch.float32))
        # A rank's shard may be empty if the vocabulary is not a multiple of tp.
        highest = x.new_full(target.shape, -torch.inf) if not x.shape[-1] else x.amax(-1)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        powers = (x - highest[..., None]).exp()
        index = target - start
        is_here = (index >= 0) & (index < x.shape[-1])
        index = torch.where(is_here, index, 0)
        hit = torch.zeros_like(highest)
        if x.shape[-1]:
            hit = torch.where(is_here, x.gather(-1, index[..., None])[..., 0], 0.0)
        sums = torch.stack((powers.sum(-1), hit, x.sum(-1)))
        dist.all_reduce(sums, group=group)
        total, hit, every = sums
        ctx.save_for_backward(powers / total[..., None], index, is_here)
        ctx.size, ctx.smoothing, ctx.dtype = size, smoothing, local.dtype
        losses = total.log() + highest - (1 - smoothing) * hit - smoothing * every / size
        return losses

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        probabilities, index, is_here = ctx.saved_tensors
        out = probabilities - ctx.smoothing / ctx.size
        if out.shape[-1]:
            hit = (1 - ctx.smoothing) * is_here.to(out.dtype)
            out.scatter_add_(-1, index[..., None], -hit[..., None])
        out *= gradient[..., None].to(out.dtype)
        return out.to(ctx.dtype), None, None, None, None


def _logsumexp(func: Any, input: Any, dim: Any, keepdim: bool = False, **kwargs: Any) -> Any:
    """Compute `torch.logsumexp`; over the sharded dim of logits, return a plain tensor.

    The result is then the same on every rank of tp. A penalty on logits (z-loss) needs it.

    Source: Chowdhery et al. 2022 (PaLM), section 5, for the penalty.
    """
    dims = dim if isinstance(dim, tuple | list) else (dim,)
    is_cut = isinstance(input, DTensor) and input.device_mesh.ndim == 1 and len(dims) == 1
    cut = dims[0] % input.ndim if is_cut and isinstance(dims[0], int) else None
    if cut is None or input.placements != (Shard(cut),) or kwargs:
        return func(input, dim, keepdim, **kwargs)
    local = input.to_local(grad_placements=input.placements).movedim(cut, -1)
    out = _LogSumExp.apply(local, input.device_mesh.get_group())
    return out.unsqueeze(cut) if keepdim else out


class _LogSumExp(torch.autograd.Function):
    """log(sum(exp(x))) over the last dim of all shards; its derivative is softmax(x)."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Shape: local (..., classes of the shard) -> (...)."""
        x = local.to(torch.promote_types(local.dtype, torch.float32))
        highest = x.new_full(x.shape[:-1], -torch.inf) if not x.shape[-1] else x.amax(-1)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        total = (x - highest[..., None]).exp().sum(-1)
        dist.all_reduce(total, group=group)
        out = total.log() + highest
        ctx.save_for_backward(local, out)
        return out.to(local.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        local, out = ctx.saved_tensors
        own = (local.to(out.dtype) - out[..., None]).exp() * gradient[..., None].to(out.dtype)
        return own.to(local.dtype), None


def take_loss(loss_fn: Callable[[Any, Any], Any], output: Any, targets: Any) -> Any:
    """Call a loss function on an output that may contain sharded logits; return plain tensors.

    Returns:
        The loss, or a tuple if `loss_fn` returns a tuple or a list.

    Raises:
        ApplyError: The loss function mixes sharded logits with plain tensors, or reads parameters
            that are not here.
    """
    try:
        loss = loss_fn(output, targets)
    except RuntimeError as error:
        if not is_on() or _MIXED not in str(error):
            raise
        raise ApplyError(_MIXES) from error
    if isinstance(loss, tuple | list):
        return tuple(_whole(each, output) for each in loss)
    return _whole(loss, output)


def _whole(loss: Any, output: Any) -> Any:
    if not isinstance(loss, torch.Tensor):
        return loss
    if loss.is_meta and not any(tensor.is_meta for _, tensor in tensors_in(output)):
        raise ApplyError(_NOT_HERE)
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


def leave_logits(output: DTensor) -> torch.Tensor:
    """Return a head's output: sharded logits while `LossParallel` is active, else full ones."""
    if is_on():
        return output
    return output.redistribute(placements=[Replicate()]).to_local()
