"""One forward of one process, as `runtime.verify.module_calls` records it: what no layout tells."""

from __future__ import annotations

from dataclasses import dataclass

from meshplan.model.flow import Flow


@dataclass(frozen=True, slots=True)
class TensorUse:
    """A tensor that went by.

    Args:
        shape: Of one microbatch of one rank, whole along tp.
        dtype: In the precision that the plan computes in.
        needs_grad: Whether backward goes on to what made it.
    """

    shape: tuple[int, ...]
    dtype: str
    needs_grad: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleVisit:
    """One call of a module.

    Args:
        fqn: The module, under its first name.
        sources: A number for each input tensor: equal where calls read the same one.
        inputs: Every tensor it was given, in order.
        outputs: Every tensor it gave.
        begin: When it began, in events of the forward.
        end: When it ended.
        is_training: Whether the module was in training mode.
        paths: Of each input, its place ("0") or name among the arguments.
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
        fqn: The innermost module that made it.
        tensors: Queries, keys and values.
        begin: When it began, in events of the forward.
        end: When it ended.
    """

    fqn: str
    tensors: tuple[TensorUse, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """One call of cross_entropy on what a head gave.

    Args:
        count: Losses that it computes, one per token.
        dtype: Of its logits.
    """

    count: int
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """One forward of one process on one microbatch of one rank.

    Args:
        calls: In the order in which they began.
        saves: The events at which autograd kept a tensor for backward.
        attentions: In order.
        losses: What the loss asks of the outputs of heads.
        strays: What else the loss does with them, in torch's words.
        has_mask: The model was given an `attention_mask`.
        length: Of the part of the sequence that the rank holds; None without cp.
        flow: The same forward, operation by operation; None where nothing asks for it.
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
        """The calls of one module."""
        return tuple(call for call in self.calls if call.fqn == fqn)
