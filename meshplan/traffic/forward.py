"""The record of one forward in one process, as `runtime.verify.module_calls` makes it.

A record numbers events in the order in which they happen: a call of a module or of attention begins
or ends, or autograd saves a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshplan.model.flow import Flow


@dataclass(frozen=True, slots=True)
class TensorUse:
    """An input or output of a call.

    Args:
        shape: Shape in one microbatch of one rank, unsharded along tp.
        dtype: Dtype in the precision that the plan computes in, such as "bfloat16".
        needs_grad: True if the tensor requires grad.
    """

    shape: tuple[int, ...]
    dtype: str
    needs_grad: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleVisit:
    """One call of a module.

    Args:
        fqn: Fqn of the module; the first one if it has several.
        sources: For each input, a number that is equal wherever the same tensor is an input.
        inputs: Every input tensor, in order.
        outputs: Every output tensor, in order.
        begin: Number of the event at which the call begins.
        end: Number of the event at which the call ends.
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
        fqn: Fqn of the innermost module whose forward makes the call.
        tensors: Queries, keys and values, in this order.
        begin: Number of the event at which the call begins.
        end: Number of the event at which the call ends.
    """

    fqn: str
    tensors: tuple[TensorUse, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """One call of cross_entropy on vocabulary-sharded logits.

    Args:
        count: Number of targets, which are one per token.
        dtype: Dtype of the logits.
    """

    count: int
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """One forward in one process, on one microbatch of one rank.

    Args:
        calls: Calls of modules, in the order in which they begin.
        saves: Numbers of the events at which autograd saves a tensor for backward, in order.
        attentions: Calls of scaled_dot_product_attention, in order.
        losses: Calls of cross_entropy on vocabulary-sharded logits, in order.
        strays: Names of other torch functions that are called on such logits and communicate.
        has_mask: True if the model was given an `attention_mask`.
        length: Length of the rank's shard of the sequence; None without cp.
        flow: The same forward, operation by operation; None if the plan has no pipeline.
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
