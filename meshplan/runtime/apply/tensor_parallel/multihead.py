"""`nn.MultiheadAttention` under tensor parallelism: each rank computes its own heads.

torch's forward computes the head size from the width of its input, so it cannot run on a subset of
the heads. The forward in this module has the same signature and computes the same values.

Source: `torch.nn.functional.multi_head_attention_forward`, torch 2.13.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import functional as F

from meshplan.assign import StyleUse
from meshplan.errors import ApplyError, Problem
from meshplan.layout.layout import own_parts
from meshplan.runtime.apply.tensor_parallel.local_tensors import own_part
from meshplan.runtime.torch_private.redistribution import Redistribution, redistributed


def attend_by_heads(module: nn.MultiheadAttention, fqn: str, use: StyleUse, tp: DeviceMesh) -> None:
    """Replace the forward of a module instance by one that computes this rank's heads.

    Args:
        module: The attention module, whose parameters are DTensors already.
        fqn: The module's fully qualified name.
        use: The module's tensor-parallel style.
        tp: The mesh of tp.
    """
    cut = _LocalHeads(module, fqn, use, tp)

    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if query.is_nested or key.is_nested or value.is_nested:
            what = "nn.MultiheadAttention under tp cannot take nested tensors"
            raise ApplyError(
                Problem(what, fix="build TransformerEncoder(enable_nested_tensor=False)")
            )
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
        is_batched = query.dim() == 3
        if not is_batched:
            query, key, value = (t.unsqueeze(0) for t in (query, key, value))
            if key_padding_mask is not None:
                key_padding_mask = key_padding_mask.unsqueeze(0)
        elif not module.batch_first:
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        q, k, v = cut.project(query, key, value)
        mask = cut.mask(attn_mask, key_padding_mask, q)
        if module.add_zero_attn:
            k, v = (F.pad(t, (0, 0, 0, 1)) for t in (k, v))
            mask = F.pad(mask, (0, 1)) if mask is not None else None
        dropout = module.dropout if module.training else 0.0
        weights: Tensor | None = None
        if need_weights:
            scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
            own = torch.softmax(scores if mask is None else scores + mask, dim=-1)
            own = F.dropout(own, dropout)
            context = own @ v
            weights = cut.weights(own, average_attn_weights)
        else:
            context = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        out = cut.combine(context.transpose(1, 2).flatten(-2))
        if not is_batched:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return out if module.batch_first else out.transpose(0, 1), weights

    module.forward = forward
    # The fast path of TransformerEncoderLayer bypasses this forward, unless the module has hooks.
    module.register_forward_pre_hook(lambda module, args: None)


class _LocalHeads:
    """The computations of an attention module for this rank's heads.

    Attributes:
        rows: This rank's rows of q, k and v in a parameter that concatenates the three.
        num_heads: Number of heads on this rank.
    """

    def __init__(
        self, module: nn.MultiheadAttention, fqn: str, use: StyleUse, tp: DeviceMesh
    ) -> None:
        self.module, self.fqn, self.tp = module, fqn, tp
        self.rows = own_parts(use.pieces, tp.get_local_rank(), tp.size())
        self.num_heads = module.num_heads // tp.size()

    def _input(self, x: Tensor) -> Tensor:
        """Return a replicated input as a tensor whose gradients are summed over the ranks of tp."""
        return redistributed(
            x, self.tp, Redistribution(Replicate(), Replicate(), Partial(), Replicate())
        )

    def _part(self, parameter: Tensor) -> Tensor:
        """Return this rank's part of a parameter."""
        return own_part(parameter, self.fqn) if isinstance(parameter, DTensor) else parameter

    def _own(self, parameter: Tensor) -> tuple[Tensor, ...]:
        """Return this rank's rows of q, k and v from a parameter that concatenates them."""
        assert isinstance(parameter, DTensor)
        if parameter.placements != (Replicate(),):
            return self._part(parameter).chunk(3)
        whole = own_part(parameter, self.fqn, Partial())
        return tuple(whole[rows] for rows in self.rows)

    def project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Compute q, k and v of this rank's heads.

        Returns:
            q, k and v, each of shape (batch, heads, sequence, head_dim).
        """
        m = self.module
        # By id, so that a tensor that is passed as query, key and value has only one all-reduce.
        inputs = {id(t): self._input(t) for t in (query, key, value)}
        if m.in_proj_weight is not None:
            weights = self._own(m.in_proj_weight)
        else:
            weights = tuple(
                self._part(w) for w in (m.q_proj_weight, m.k_proj_weight, m.v_proj_weight)
            )
        biases = (None,) * 3 if m.in_proj_bias is None else self._own(m.in_proj_bias)
        return tuple(
            F.linear(inputs[id(t)], w, b).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for t, w, b in zip((query, key, value), weights, biases, strict=True)
        )

    def mask(self, attention: Tensor | None, padding: Tensor | None, q: Tensor) -> Tensor | None:
        """Return one mask to add to the scores of this rank's heads; None if neither is given.

        Args:
            attention: `attn_mask` of the call.
            padding: `key_padding_mask` of the call.
            q: The queries, for their batch size and dtype.
        """
        out = None
        if attention is not None:
            out = _additive(attention, q.dtype)
            if out.dim() == 3:  # (batch * heads, queries, keys).
                out = out.unflatten(0, (q.shape[0], -1))
                first = self.tp.get_local_rank() * self.num_heads
                out = out[:, first : first + self.num_heads]
        if padding is not None:
            added = _additive(padding, q.dtype)[:, None, None, :]
            out = added if out is None else out + added
        return out

    def weights(self, own: Tensor, average: bool) -> Tensor:
        """Return the attention weights of all heads, or their mean over heads, on every rank.

        Args:
            own: The weights of this rank's heads, of shape (batch, heads, queries, keys).
            average: If True, return the mean, of shape (batch, queries, keys).
        """
        if average:
            return self._added(own.sum(1) / self.module.num_heads)
        return redistributed(
            own, self.tp, Redistribution(Shard(1), Replicate(), Replicate(), Shard(1))
        )

    def combine(self, context: Tensor) -> Tensor:
        """Apply the output projection: sum over the heads of all ranks, then add the bias once."""
        projection = self.module.out_proj
        out = self._added(F.linear(context, self._part(projection.weight)))
        bias: Tensor | None = projection.bias
        return out if bias is None else out + self._part(bias)

    def _added(self, addend: Tensor) -> Tensor:
        """Return the sum of the ranks' addends, on every rank."""
        add = Redistribution(Partial(), Replicate(), Replicate(), Replicate())
        return redistributed(addend, self.tp, add)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a boolean mask, in which True excludes, to one that is added to scores."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))
