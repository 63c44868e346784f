"""Expert parallelism: tokens are sent to the rank that stores their expert, and results sent back.

Every rank of ep stores an equal share of the experts of each expert-parallel module. On each rank,
the module's own forward applies the local experts to the tokens that arrive, so the activation,
biases and clamps of the model are kept. `expert_protocol` tests that the forward can do this.

A slot is one choice of the router: each token has top_k slots, and each slot one expert.

Source: Lepikhin et al. 2020 (GShard), section 3.1. Unlike there, no token is dropped and nothing is
padded: the all-to-all has uneven splits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from meshplan.errors import ApplyError, Problem
from meshplan.plan.plan import Plan
from meshplan.runtime.apply.experts.expert_protocol import Protocol, find_protocols, with_experts
from meshplan.runtime.apply.tensor_parallel.tensor_parallel import distribute
from meshplan.runtime.base.fake_mode import is_fake_execution, numbers
from meshplan.runtime.base.mesh import local_of, submesh


def apply_expert_parallel(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    """Shard the experts over ep and make the forward of their module dispatch tokens, in place.

    Assumes: `expert_problems` yielded nothing; parameters are equal on all ranks, or on meta.
    """
    if plan.mesh.size("ep") == 1:
        return
    ep = submesh(mesh, ("ep",))
    found = find_protocols(model, plan)
    for fqn, use in plan.assignment.experts.items():
        module = model.get_submodule(fqn)
        protocol = found[fqn]
        assert isinstance(protocol, Protocol), protocol
        for name, _ in module.named_parameters(fqn):
            distribute(model, (name,), ep, Shard(0))
        dispatch = _Dispatch(fqn, module, protocol, use.num_experts, ep, use.capacity)
        module.forward = _bound(module.forward, dispatch)


def _bound(forward: Callable[..., Any], dispatch: _Dispatch) -> Callable[..., Any]:
    @wraps(forward)
    def dispatched(*args: Any, **kwargs: Any) -> torch.Tensor:
        return dispatch(*args, **kwargs)

    return dispatched


class _Dispatch:
    """The forward of an expert-parallel module: dispatch, local experts, combine.

    Attributes:
        capacity: Number of slots on a rank that memory was estimated for, as a multiple of an even
            share; None if the plan states none, or after the warning was given.
        forward: The module's original forward.
        num_local: Number of experts on this rank.
        ranks: Size of ep.
    """

    def __init__(
        self,
        fqn: str,
        module: nn.Module,
        protocol: Protocol,
        num_experts: int,
        ep: DeviceMesh,
        capacity: float | None = None,
    ) -> None:
        self.capacity = capacity
        self.fqn, self.module, self.protocol = fqn, module, protocol
        self.forward = module.forward
        self.num_experts, self.num_local = num_experts, num_experts // ep.size()
        self.group, self.ranks = ep.get_group(), ep.size()

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Send each token to its experts, compute there, send the results back and sum over slots.

        Every rank of ep must make this call at the same point of its program, and either all of
        them with gradients or all without.

        Raises:
            ApplyError: On every rank of ep, if on any of them a slot has no valid expert index or
                no weight.
        """
        hidden, index, weights = self.protocol.arguments(args, kwargs)
        tokens, slots = hidden.reshape(-1, hidden.shape[-1]), index.reshape(-1)
        top_k = index.shape[-1] if index.ndim else 1
        counts = self._counts(hidden, index, weights)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)
        # The only device-to-host synchronization: `all_to_all_single` needs its splits on the host.
        both = torch.stack((counts, theirs)).view(2, self.ranks, self.num_local)
        even = [slots.shape[0] // self.ranks] * self.ranks
        splits: list[list[int]] = numbers(both.sum(2), [even, self._expected(slots, top_k)])
        self._refuse(splits)
        sent, received = splits
        self._warn(sum(received), slots.shape[0])
        # Sort the slots by expert, which makes those for each rank contiguous.
        order = slots.argsort(stable=True)
        # The loss of each rank is a mean over its own samples. An expert's gradient is summed over
        # all ranks of ep, but FSDP2 or DDP averages it over the other axes only. The backward of
        # the second exchange therefore divides gradients by the size of ep. The backward of the
        # first exchange undoes this for the gradients of tokens and of routing weights.
        rows, scores = _Exchange.apply(
            self.group, sent, received, float(self.ranks),
            tokens.repeat_interleave(top_k, 0).index_select(0, order),
            weights.reshape(-1).index_select(0, order),
        )  # fmt: skip
        # Received rows are ordered by sending rank, then by local expert.
        here = torch.arange(self.num_local, device=slots.device).repeat(self.ranks)
        ids = here.repeat_interleave(theirs, output_size=rows.shape[0])
        computed = self._compute(rows, ids, scores)
        (back,) = _Exchange.apply(self.group, received, sent, 1.0 / self.ranks, computed)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.shape[0], device=order.device)
        # `sum` returns a new tensor. Adding to a view in place would lose FSDP2's gradient hooks.
        return back.index_select(0, inverse).view(*hidden.shape[:-1], top_k, back.shape[-1]).sum(-2)

    def _expected(self, slots: torch.Tensor, top_k: int) -> list[int]:
        """Return how many slots each rank is assumed to send here in a fake step.

        Fake indices have no values that could be counted. The total is the number of slots that
        this rank sends, times the plan's `capacity`. The capacity is capped at the factor that
        arises if every token of every rank chooses this rank's experts.

        Shape: slots (tokens * top_k) -> a list of `ranks` counts.
        """
        sent, most = slots.shape[0], self.ranks * min(top_k, self.num_local) / top_k
        if self.capacity is None:
            return [sent // self.ranks] * self.ranks
        share = min(self.capacity, most)
        each, more = divmod(round(sent * share), self.ranks)
        return [each + (rank < more) for rank in range(self.ranks)]

    def _warn(self, arrived: int, even: int) -> None:
        """Warn once if more slots arrived than `capacity` times an even share."""
        if self.capacity is None or is_fake_execution() or arrived <= self.capacity * even:
            return
        warnings.warn(
            f"'{self.fqn}' received {arrived / even:.2f} times an even share of tokens, more than "
            f"the memory estimate covers: raise experts: {{capacity: {self.capacity:g}}}",
            stacklevel=2,
        )
        self.capacity = None

    def _counts(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Count this rank's slots per expert; return -1 for every expert if the routing is invalid.

        The counts are sent to the other ranks, so a -1 makes all ranks raise.

        Shape: hidden (..., width), index and weights (..., top_k) -> (num_experts).
        """
        slots = index.reshape(-1)
        is_like = weights.shape == index.shape and index.ndim > 0
        if is_like and hidden.shape[:-1].numel() * index.shape[-1] == slots.shape[0]:
            inside = ((slots >= 0) & (slots < self.num_experts)).all()
            counted = slots.new_zeros(self.num_experts).scatter_add_(
                0, slots.clamp(0, self.num_experts - 1), torch.ones_like(slots)
            )
            return torch.where(inside, counted, -1)
        return torch.full((self.num_experts,), -1, device=slots.device)

    def _refuse(self, splits: list[list[int]]) -> None:
        wrong = [rank for rank, count in enumerate(splits[1]) if count < 0]
        if wrong:
            rank = dist.get_global_rank(self.group, wrong[0])
            what = (
                f"ep cannot dispatch the routing of '{self.fqn}' on rank {rank}: every top-k slot "
                f"needs one expert index from 0 to {self.num_experts - 1} and one weight"
            )
            raise ApplyError(
                Problem(what, fix="let the router choose an expert for every slot, and give "
                        "slots that do not count the weight 0")
            )  # fmt: skip

    def _compute(self, rows: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Run the module's own forward on the received tokens, one slot per row.

        Shape: rows (slots, width), ids and scores (slots) -> (slots, width).
        """
        num_rows = rows.shape[0]
        if not num_rows:
            # Compute one dummy row, so that the experts get gradients of zero, which other ranks
            # wait for in a reduction. Adding the empty sums keeps `rows` and `scores` in the
            # graph: the backward of their exchange is a collective that this rank must enter too.
            rows = rows.new_zeros(1, rows.shape[1]) + rows.sum()
            scores = scores.new_zeros(1) + scores.sum()
            ids = ids.new_zeros(1)
        local = {name: local_of(p) for name, p in self.module.named_parameters()}
        with with_experts(self.module, local, self.protocol.counters, self.num_local):
            out: torch.Tensor = self.forward(*self.protocol.ordered(
                rows, ids.unsqueeze(-1), scores.unsqueeze(-1)
            ))  # fmt: skip
        return out[:num_rows]


class _Exchange(torch.autograd.Function):
    """All-to-all of rows with uneven splits; backward sends gradients back, times `scale`.

    Several tensors go through one function call, so that in backward, too, all ranks issue the
    collectives of these tensors in the same order.
    """

    @staticmethod
    def forward(
        ctx: Any,
        group: dist.ProcessGroup,
        sent: list[int],
        received: list[int],
        scale: float,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.group, ctx.sent, ctx.received, ctx.scale = group, sent, received, scale
        return tuple(_all_to_all(tensor, sent, received, group) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        back = [
            _all_to_all(gradient * ctx.scale, ctx.received, ctx.sent, ctx.group) if wanted else None
            for gradient, wanted in zip(gradients, ctx.needs_input_grad[4:], strict=True)
        ]
        return (None, None, None, None, *back)


def _all_to_all(
    rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out
