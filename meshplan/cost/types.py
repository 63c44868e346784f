"""Numbers that describe the cost of the blocks of a model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Work of a device: everything but `kernels` and `weight_bytes` grows with the samples.

    Args:
        kernels: Number of kernels launched, whatever their size.
        flops: FLOPs of matrix products and attention, for one sample.
        attention_flops: The part of `flops` that is attention.
        product_bytes: Bytes of activations that products and attention read and write, for one
            sample.
        moved_bytes: Bytes that everything else reads and writes, for one sample.
        weight_bytes: Bytes read of parameters and written of their gradients, once per microbatch.
    """

    kernels: float = 0.0
    flops: float = 0.0
    attention_flops: float = 0.0
    product_bytes: float = 0.0
    moved_bytes: float = 0.0
    weight_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """Communication of tp and ep: number of collectives of each kind, and bytes for one sample.

    Args:
        all_reduces, gathers, all_to_alls: Number of collectives.
        all_reduce_bytes, gather_bytes: Bytes of the whole tensors, for one sample.
        all_to_all_bytes: Bytes that one rank sends along ep, its own part included, for one sample.
        all_to_all_once_bytes: Bytes that one rank sends along ep whatever the number of samples.
    """

    all_reduces: int = 0
    all_reduce_bytes: float = 0.0
    gathers: int = 0
    gather_bytes: float = 0.0
    """Bytes of all_gather and reduce_scatter together, which cost equally much."""
    all_to_alls: int = 0
    all_to_all_bytes: float = 0.0
    all_to_all_once_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementBytes:
    """Bytes per element of a parameter or gradient, by role.

    Args:
        compute: Bytes of a parameter as it is gathered and computed with.
        reduce: Bytes of a gradient as it is summed over ranks.
        stored: Bytes of a parameter as the optimizer updates it.
        unscaling: Bytes read and written per element of a gradient to undo the scale of the loss.
    """

    compute: int
    reduce: int
    stored: int
    unscaling: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockKind:
    """One kind of block, as one rank of tp computes it.

    Args:
        name: The fqn of the first block of the kind.
        has_options: If True, the block may be recomputed; False for what lies before and after the
            blocks.
        numels: Elements of each parameter on this rank of tp and ep.
        expert_numel: Elements of all experts' parameters among them.
        num_experts: Number of these experts.
        forward, backward: Work for one microbatch; backward without recomputation.
        again: Work that backward recomputes, by index into `grid.RECOMPUTE`.
        sent_forward, sent_backward: Communication of tp and ep.
        sent_again: Communication of tp and ep that is recomputed, by index into `grid.RECOMPUTE`.
        saved_bytes: Bytes saved from forward to backward for one sample, by index into
            `grid.RECOMPUTE`.
        transient_bytes: Highest number of bytes that forward or backward needs for one sample
            beyond what the block saved, by index into `grid.RECOMPUTE`. Neither this nor
            `saved_bytes` includes gradients of parameters.
        boundary_bytes: Bytes that the block passes to the next block, for one sample.
        context_bytes: Bytes of the keys and values that its attention reads, for one sample.
        exchanged_bytes: Bytes of these, the queries and the attention output, for one sample.
        scores_flops: The part of `forward.flops` that grows with the square of the sequence length.
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
        order: Index into `kinds` of each place.
        names: The fqn of each place; "" for what is in no block.
        tied_numel: Elements of the embedding table that the last place reads too. Only the first
            place has it in its `numels`; if a pipeline separates them, each of the two stages holds
            one.
        turns: For each place, by index into `grid.RECOMPUTE`, the most bytes that its backward
            needs for one sample in addition to what the blocks before it save; () for what is in no
            block, or if this is not known.
    """

    kinds: tuple[BlockKind, ...]
    order: tuple[int, ...]
    names: tuple[str, ...]
    tied_numel: int = 0
    turns: tuple[tuple[float, ...], ...] = ()
