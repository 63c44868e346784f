"""The record of one forward of one process, as `runtime.verify.module_calls` makes it."""

from __future__ import annotations

from dataclasses import dataclass

from meshplan.model.flow import Flow


@dataclass(frozen=True, slots=True)
class TensorUse:
    """A tensor that a forward reads or makes.

    Args:
        shape: Shape in one microbatch of one rank, unsharded along tp.
        dtype: Dtype in the precision that the plan computes in.
        needs_grad: True if it requires grad, so that backward continues to the op that made it.
    """

    shape: tuple[int, ...]
    dtype: str
    needs_grad: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleVisit:
    """One call of a module.

    Args:
        fqn: The module, under its first name.
        sources: A number for each input tensor; equal if calls read the same tensor.
        inputs: Every input tensor, in order.
        outputs: Every output tensor, in order.
        begin: Index of the event of the forward at which the call began.
        end: Index of the event at which it ended.
        is_training: True if the module was in training mode.
        paths: For each input, its position ("0") or name among the arguments.
    """

    fqn: str
    sources: tuple[int, ...]
    inputs: tuple[TensorUse, ...]
    outputs: tuple[TensorUse, ...]
    begin: int
    end: int
    is_training: bool = True
    paths: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """One call of scaled_dot_product_attention.

    Args:
        fqn: The innermost module that made the call.
        tensors: Queries, keys and values.
        begin: Index of the event of the forward at which the call began.
        end: Index of the event at which it ended.
    """

    fqn: str
    tensors: tuple[TensorUse, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """One call of cross_entropy on the output of a head.

    Args:
        count: Number of losses that it computes, one per token.
        dtype: Dtype of its logits.
    """

    count: int
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """One forward of one process on one microbatch of one rank.

    Args:
        calls: Calls of modules, in the order in which they began.
        saves: The events at which autograd saved a tensor for backward.
        attentions: Calls of scaled_dot_product_attention, in order.
        losses: Calls of cross_entropy that the loss makes on the outputs of heads.
        strays: Other operations of the loss on these outputs, by torch's names.
        has_mask: True if the model was given an `attention_mask`.
        length: Length of the rank's shard of the sequence; None without cp.
        flow: The same forward, operation by operation; None if nothing asks for it.
    """

    calls: tuple[ModuleVisit, ...]
    saves: tuple[int, ...] = ()
    attentions: tuple[AttentionCall, ...] = ()
    losses: tuple[TokenLosses, ...] = ()
    strays: tuple[str, ...] = ()
    has_mask: bool = False
    length: int | None = None
    flow: Flow | None = None

    def of(self, fqn: str) -> tuple[ModuleVisit, ...]:
        """Return the calls of one module, in order."""
        return tuple(call for call in self.calls if call.fqn == fqn)
