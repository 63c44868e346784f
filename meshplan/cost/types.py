"""What the blocks of a model cost, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """What a device does: everything but `weight_bytes` grows with the samples.

    Args:
        kernels: Launched, whatever the size.
        flops: Of matrix products and attention, for one sample.
        attention_flops: Those of attention.
        product_bytes: Activations that these read and write, for one sample.
        moved_bytes: Read and written by everything else, for one sample.
        weight_bytes: Read of parameters and written of their gradients, once a microbatch.
    """

    kernels: float = 0.0
    flops: float = 0.0
    attention_flops: float = 0.0
    product_bytes: float = 0.0
    moved_bytes: float = 0.0
    weight_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What tp and ep send: collectives of each kind, and bytes for one sample.

    Args:
        all_reduce_bytes, gather_bytes: Of the whole tensors.
        all_to_all_bytes: What one rank sends along ep, its own part included.
        all_to_all_once_bytes: Likewise, whatever the number of samples.
    """

    all_reduces: int = 0
    all_reduce_bytes: float = 0.0
    gathers: int = 0
    gather_bytes: float = 0.0
    """all_gather and reduce_scatter together: they cost the same."""
    all_to_alls: int = 0
    all_to_all_bytes: float = 0.0
    all_to_all_once_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementBytes:
    """Bytes of one element of a parameter or gradient, by role.

    Args:
        compute: A parameter as it is gathered and computed with.
        reduce: A gradient as it is summed over ranks.
        stored: A parameter as the optimizer updates it.
        unscaling: Bytes read and written of each gradient to undo the scale of the loss.
    """

    compute: int
    reduce: int
    stored: int
    unscaling: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockKind:
    """One kind of block, as one rank of tp computes it.

    Args:
        name: fqn of the first block of the kind.
        has_options: Whether it may be recomputed; what lies before and after the blocks may not.
        numels: Elements of each parameter that this rank of tp, and of ep, holds.
        expert_numel: Of all of them that are experts'.
        num_experts: That they are of.
        forward, backward: Backward without what is recomputed.
        again: By place in `grid.RECOMPUTE`, what backward runs once more.
        sent_forward, sent_backward: By tp and ep.
        sent_again: By place in `grid.RECOMPUTE`.
        saved_bytes: By place in `grid.RECOMPUTE`, kept from forward to backward for one sample.
        transient_bytes: Likewise, the most that its forward or backward holds beside what it
            saved. Gradients of parameters are in neither.
        boundary_bytes: Of what it hands to the next block, for one sample.
        context_bytes: Of the keys and values that its attention reads, for one sample.
        exchanged_bytes: Of these, of its queries and of what it makes.
        scores_flops: The part of `forward.flops` that grows with the square of the length.
        frozen: Elements of `numels` that get no gradient.
    """

    name: str
    has_options: bool
    numels: tuple[int, ...]
    forward: Tally
    backward: Tally
    again: tuple[Tally, Tally, Tally]
    sent_forward: Sent
    sent_backward: Sent
    sent_again: tuple[Sent, Sent, Sent]
    saved_bytes: tuple[float, float, float]
    transient_bytes: tuple[float, float, float]
    boundary_bytes: float
    context_bytes: float = 0.0
    exchanged_bytes: float = 0.0
    scores_flops: float = 0.0
    expert_numel: int = 0
    num_experts: int = 0
    frozen: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """All blocks in the order of forward.

    Args:
        kinds: Each kind once.
        order: The kind of each place.
        names: The fqn of each place; "" for what is in no block.
        tied_numel: Elements of the table that the last place reads too. Only the first has it in
            its `numels`; where a pipeline parts them, each stage holds one.
        turns: Of each place, by place in `grid.RECOMPUTE`, the most bytes that its backward holds
            for one sample beside what blocks before it keep; () for what is in no block, or where
            nobody told.
    """

    kinds: tuple[BlockKind, ...]
    order: tuple[int, ...]
    names: tuple[str, ...]
    tied_numel: int = 0
    turns: tuple[tuple[float, ...], ...] = ()
