"""Types of the numbers from which the cost of a model's blocks follows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Work of a device in one microbatch. FLOPs and bytes of activations are for one sample.

    Args:
        kernels: Number of kernels launched, whatever their size.
        flops: FLOPs of matrix products and attention, for one sample.
        attention_flops: FLOPs of attention, which are included in `flops`.
        product_bytes: Bytes of activations that matrix products and attention read and write, for
            one sample.
        moved_bytes: Bytes that all other kernels read and write, for one sample.
        weight_bytes: Bytes of parameters that are read and of their gradients that are written,
            whatever the number of samples.
    """

    kernels: float = 0.0
    flops: float = 0.0
    attention_flops: float = 0.0
    product_bytes: float = 0.0
    moved_bytes: float = 0.0
    weight_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """Communication inside a microbatch: of tp and ep, and of BatchNorm.

    Nothing hides it but the matrix products of `overlapped`.

    Args:
        all_reduces, gathers, all_to_alls: Number of collectives.
        all_reduce_bytes, gather_bytes: Bytes of the whole tensors, for one sample.
        all_reduce_once_bytes, gather_once_bytes: Bytes of whole tensors whatever the number of
            samples, such as gradients of parameters.
        overlapped: (bytes, FLOPs) for one sample of each of these gathers that is sent while a
            matrix product runs, and of the product.
        all_to_all_bytes: Bytes that one rank sends along ep for one sample, including those that it
            sends to itself.
        all_to_all_once_bytes: Bytes that one rank sends along ep whatever the number of samples.
        statistics, statistics_bytes: Number of all-reduces over all data ranks by which
            BatchNorms are synchronized, and their bytes, whatever the number of samples.
    """

    all_reduces: int = 0
    all_reduce_bytes: float = 0.0
    gathers: int = 0
    gather_bytes: float = 0.0
    """Bytes of all-gathers and reduce-scatters together."""
    overlapped: tuple[tuple[float, float], ...] = ()
    all_reduce_once_bytes: float = 0.0
    gather_once_bytes: float = 0.0
    all_to_alls: int = 0
    all_to_all_bytes: float = 0.0
    all_to_all_once_bytes: float = 0.0
    statistics: int = 0
    statistics_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementBytes:
    """Bytes per element of a parameter or gradient, by role.

    Args:
        compute: Bytes of a parameter as it is gathered and computed with.
        reduce: Bytes of a gradient as it is summed over ranks.
        stored: Bytes of a parameter as the optimizer updates it.
        unscaling: Bytes read and written per element of a gradient to undo the fp16 loss scale.
    """

    compute: int
    reduce: int
    stored: int
    unscaling: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockKind:
    """One kind of block, as one rank of tp and ep computes it.

    Args:
        name: The fqn of the first block of the kind.
        has_options: If True, the kind is a block, which may be recomputed; False for the modules
            before and after the blocks.
        numels: Elements of each parameter on this rank of tp and ep.
        expert_numel: Elements of all experts' parameters, which are included in `numels`.
        num_experts: Number of experts on this rank.
        forward, backward: Work of one microbatch; backward without recomputation.
        recompute: Work of recomputation in backward, by index into `grid.RECOMPUTE`.
        sent_forward, sent_backward: Communication inside one microbatch.
        sent_recompute: Communication inside its recomputation, by index into `grid.RECOMPUTE`.
        saved_bytes: Bytes saved from forward to backward for one sample, by index into
            `grid.RECOMPUTE`.
        transient_bytes: Highest number of bytes that forward or backward needs for one sample
            beyond what the block saved, by index into `grid.RECOMPUTE`. Neither this nor
            `saved_bytes` includes gradients of parameters.
        boundary_bytes: Bytes that the block passes to the next block, for one sample.
        context_bytes: Bytes of the keys and values of attention, for one sample.
        exchanged_bytes: Bytes of queries, keys, values and the output of attention, for one sample.
        scores_flops: FLOPs in `forward.flops` that grow with the square of the sequence length.
        frozen: Elements in `numels` that get no gradient.
        step_flops: FLOPs of the matrix products with which the optimizer steps on the whole
            parameters, once per step.
    """

    name: str
    has_options: bool
    numels: tuple[int, ...]
    forward: Tally
    backward: Tally
    recompute: tuple[Tally, Tally, Tally]
    sent_forward: Sent
    sent_backward: Sent
    sent_recompute: tuple[Sent, Sent, Sent]
    saved_bytes: tuple[float, float, float]
    transient_bytes: tuple[float, float, float]
    boundary_bytes: float
    context_bytes: float = 0.0
    exchanged_bytes: float = 0.0
    scores_flops: float = 0.0
    expert_numel: int = 0
    num_experts: int = 0
    frozen: int = 0
    step_flops: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A model as a sequence of places: each block, and the modules before and after the blocks.

    Args:
        kinds: The distinct kinds of the places. A parameter that several places read is in the
            `numels` of the first: its copy in a later pipeline stage is in memory, and is not in
            the seconds.
        order: For each place in the order of forward, the index of its kind in `kinds`.
        names: For each place, the fqn of the block; "" before and after the blocks.
        backward_bytes: For each place, by index into `grid.RECOMPUTE`, the most bytes that its
            backward needs for one sample beyond the bytes that the places before it saved; ()
            before and after the blocks. The whole field is () if this is not known.
        starts: For each place, True if a pipeline stage may begin with it; () if a stage may begin
            with any block.
        saves_outputs: If True, `saved_bytes` of a block include its output if it is saved; if
            False, `saved_bytes` of the block that reads it do.
    """

    kinds: tuple[BlockKind, ...]
    order: tuple[int, ...]
    names: tuple[str, ...]
    backward_bytes: tuple[tuple[float, ...], ...] = ()
    starts: tuple[bool, ...] = ()
    saves_outputs: bool = False

    @property
    def flops(self) -> float:
        """Flops of the forward and backward of one sample, without recompute."""
        kinds = (self.kinds[number] for number in self.order)
        return sum(kind.forward.flops + kind.backward.flops for kind in kinds)
