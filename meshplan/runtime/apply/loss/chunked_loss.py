"""Chunked loss: apply the head and cross-entropy to one chunk of tokens after the other.

The head is the linear module that computes the logits. While `ChunkedLossMode` is active, calls of
it are deferred: the caller gets a tensor without memory (`LazyLogits`) that remembers the input.
When `torch.nn.functional.cross_entropy` is called on that tensor, the head is called with all its
hooks, so that FSDP2 gathers its weight once, and its forward returns the loss. The logits of each
chunk of tokens are computed, scored, turned into their own gradient in place and freed, so at most
one chunk's logits exist at any time. Backward only scales the gradients that forward computed.

Weight gradients are accumulated over chunks in the compute dtype.

Source: Hsu et al. 2024 (Liger Kernel), section 3.2, for gradients taken in forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import nn

from meshplan.errors import ApplyError, Problem
from meshplan.plan.plan import Plan
from meshplan.runtime.apply.loss.lazy_logits import LazyLogits, Scores
from meshplan.runtime.base.module_state import hooks_of
from meshplan.runtime.torch_private.private import intercept_calls


class ChunkedLossMode:
    """Context to be active while a model, its loss and their backward are computed.

    Args:
        plan: The plan of the model.
        is_trial: If True, the forward is a trial outside of training, and it is no error if it
            computes no loss.

    Raises:
        ApplyError: On exit, if no loss was computed in chunks and it is no trial.
    """

    now: ContextVar[ChunkedLossMode | None] = ContextVar("chunked_loss", default=None)
    """The active mode; None if no mode is active."""

    def __init__(self, plan: Plan, *, is_trial: bool = False) -> None:
        self._plan, self._is_trial = plan, is_trial
        self._num_taken = 0

    def __enter__(self) -> ChunkedLossMode:
        self._token = ChunkedLossMode.now.set(self)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        ChunkedLossMode.now.reset(self._token)
        if error is None and not self._num_taken and not self._is_trial:
            use = self._plan.assignment.chunked_loss
            assert use is not None
            raise ApplyError(
                Problem(
                    "the plan states loss_chunks, but no cross_entropy of the output of "
                    f"'{use.head}' was computed",
                    use.reason.origin,
                    "compute the loss with torch.nn.functional.cross_entropy from the logits that "
                    "the model returns, or leave loss_chunks out",
                )
            )

    def took(self) -> None:
        """Record that a loss was computed in chunks."""
        self._num_taken += 1


@dataclass(frozen=True, slots=True)
class _HeadRequest:
    """A request to the head's forward for a loss, computed in chunks, instead of logits."""

    scores: Scores
    chunks: int


_REQUEST: Final[ContextVar[_HeadRequest | None]] = ContextVar("request", default=None)
"""The request during a call of the head for a loss; None during calls for logits."""


def apply_chunked_loss(model: nn.Module, plan: Plan) -> Callable[[], None]:
    """Replace the head's forward by one that can return a loss in chunks, in place.

    Returns:
        A function that makes calls of the head deferred. Call it once every wrapper and hook of the
        head is in place, so that all of them run when the head is finally called.

    Assumes: `chunked_loss_problems` found none.
    """
    use = plan.assignment.chunked_loss
    if use is None:
        return lambda: None
    head = model.get_submodule(use.head)
    assert isinstance(head, nn.Linear)
    forward, chunks = head.forward, use.chunks

    def give(x: torch.Tensor) -> torch.Tensor:
        request = _REQUEST.get()
        if request is None:
            return forward(x)
        return _loss_of(x, head, request)

    def defer_head(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        mode = ChunkedLossMode.now.get()
        given = [*args, *kwargs.values()]
        if mode is None or len(given) != 1 or _REQUEST.get() is not None:
            return call(*args, **kwargs)
        (x,) = given
        if torch.is_grad_enabled() and not x.requires_grad:
            # FSDP2 hooks the gradient of the head's input to notice that backward has begun.
            x = x.detach().requires_grad_(head.weight.requires_grad)

        def take(scores: Scores) -> torch.Tensor:
            mode.took()
            token = _REQUEST.set(_HeadRequest(scores, chunks))
            try:
                loss: torch.Tensor = call(x)
            finally:
                _REQUEST.reset(token)
            return loss

        return LazyLogits.of(x, head.out_features, _dtype_of(x, plan, use.head), take)

    head.forward = give
    return lambda: intercept_calls(head, defer_head)


def _dtype_of(x: torch.Tensor, plan: Plan, head: str) -> torch.dtype:
    """Return the dtype of the logits that the head computes from `x`."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    (weight,) = (p for p in plan.graph.owned(head) if len(p.shape) > 1)
    return getattr(torch, plan.assignment.tensors[weight.fqn].compute_dtype)


def _loss_of(x: torch.Tensor, head: nn.Linear, request: _HeadRequest) -> torch.Tensor:
    """Compute the requested loss of the head's input.

    Shape: x (..., width) -> ().
    """
    scores = request.scores
    target = scores.target.flatten()
    is_kept = target != scores.ignore_index
    scale = None
    if scores.is_mean:
        scale = 1 / is_kept.sum().to(torch.promote_types(scores.dtype, torch.float32))
    loss: torch.Tensor = _Chunks.apply(
        x,
        head.weight,
        head.bias,
        torch.where(is_kept, target, 0),
        is_kept,
        scale,
        scores,
        request.chunks,
        torch.is_grad_enabled(),
    )
    # Autocast computes cross-entropy in float32.
    return loss if torch.is_autocast_enabled(x.device.type) else loss.to(scores.dtype)


class _Chunks(torch.autograd.Function):
    """Cross-entropy of x W' + b, summed or averaged over tokens.

    With z the logits of a token, t its target, V the vocabulary and e the smoothing:
    loss = logsumexp(z) - (1 - e) z_t - e mean(z), and
    d loss / d z_c = softmax(z)_c - (1 - e) [c = t] - e / V.

    Source: Szegedy et al. 2016, section 7, for smoothing.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        is_kept: torch.Tensor,
        scale: torch.Tensor | None,
        scores: Scores,
        chunks: int,
        is_training: bool,
    ) -> torch.Tensor:
        """Return the loss, and compute all its gradients, which `backward` only scales.

        Args:
            ctx: The autograd context.
            x: The head's input.
            weight: The head's weight.
            bias: The head's bias.
            target: Class of each token that is scored; any valid one for ignored tokens.
            is_kept: True for tokens that are not ignored.
            scale: One over the number of kept tokens for a mean, None for a sum.
            scores: The requested cross-entropy.
            chunks: Number of chunks.
            is_training: True if gradients are enabled.

        Shape: x (..., width), weight (V, width), target and is_kept (tokens) -> ().
        """
        needs = [is_training and need for need in ctx.needs_input_grad[:3]]
        rows, index = x.reshape(-1, x.shape[-1]), scores.index
        smoothing, vocab = scores.smoothing, weight.shape[0]
        dx = dw = db = None
        if needs[0]:
            dx = torch.empty_like(rows) if index is None else torch.zeros_like(rows)
        wide = torch.promote_types(scores.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=x.device)
        each = torch.ones((), dtype=wide, device=x.device) if scale is None else scale
        size = max(1, -(-len(target) // chunks))
        for start in range(0, len(target), size):
            own = slice(start, start + size)
            part = rows[own] if index is None else rows.index_select(0, index[own])
            logits = F.linear(part, weight, bias)
            z = logits.to(wide)
            dtype = logits.dtype
            del logits
            highest = z.amax(-1, keepdim=True)
            # From here on `z` is overwritten: shifted logits, their exponentials, their gradient.
            z -= highest
            hit = z.gather(-1, target[own, None])[:, 0]
            losses = -(1 - smoothing) * hit
            if smoothing:
                losses -= z.sum(-1) * (smoothing / vocab)
            z.exp_()
            sums = z.sum(-1)
            losses += sums.log()
            total += torch.where(is_kept[own], losses, 0.0).sum()
            if not any(needs):
                continue
            # `where` instead of a product: the scale is infinite if all tokens are ignored, and
            # zero times infinity is NaN.
            factor = torch.where(is_kept[own], each, 0.0)
            z *= (factor / sums)[:, None]
            if smoothing:
                z -= (factor * (smoothing / vocab))[:, None]
            z.scatter_add_(-1, target[own, None], (factor * (smoothing - 1))[:, None])
            gradient = z.to(dtype)
            del z, highest, hit, losses, sums, factor
            if dx is not None and index is None and dx.dtype == dtype:
                torch.mm(gradient, weight.to(dtype), out=dx[own])
            elif dx is not None:
                dx[own if index is None else index[own]] = (gradient @ weight.to(dtype)).to(
                    dx.dtype
                )
            if needs[1] and dw is None:
                dw = gradient.t() @ part.to(dtype)
            elif dw is not None:
                dw.addmm_(gradient.t(), part.to(dtype))
            if needs[2]:
                summed = gradient.sum(0)
                db = summed if db is None else db.add_(summed)
            del gradient, part
        if scale is not None:
            total *= scale
        ctx.gradients = [
            None if dx is None else dx.view(x.shape),
            None if dw is None else dw.to(weight.dtype),
            None if db is None or bias is None else db.to(bias.dtype),
        ]
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        found, ctx.gradients = ctx.gradients, None
        if found is None:
            raise ApplyError(
                Problem(
                    "backward ran a second time through a loss computed in chunks, which keeps its "
                    "gradients for one backward only",
                    fix="call backward once per forward, or leave loss_chunks out",
                )
            )
        out = []
        # Each gradient is popped, because autograd copies one that is still referenced here.
        while found:
            each = found.pop(0)
            out.append(None if each is None else each.mul_(gradient))
            del each
        return (*out, *(None,) * 6)


def chunked_loss_problems(model: nn.Module, plan: Plan) -> Iterator[Problem]:
    """Yield a problem if the head of a live model cannot return a loss in place of logits."""
    use = plan.assignment.chunked_loss
    if use is None:
        return
    head = model.get_submodule(use.head)
    what = ""
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        what = f"is a {type(head).__name__} with a forward other than torch.nn.Linear's"
    elif "forward" in vars(head):
        what = "has a replaced forward"
    elif any(hooks_of(head)):
        what = "has hooks, which would see chunks instead of the full logits"
    if what:
        yield Problem(
            f"'{use.head}' {what}: the loss of its output cannot be computed in chunks",
            use.reason.origin,
            "compute the logits with a torch.nn.Linear without hooks, or leave loss_chunks out",
        )
