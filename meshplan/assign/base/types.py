"""Decisions of `assign`: a layout for every tensor, sharding units, styles, recomputation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from meshplan.errors import Origin, Problem
from meshplan.layout.layout import Layout, Piece
from meshplan.layout.mesh import Mesh
from meshplan.layout.schedules import SCHEDULES
from meshplan.layout.styles import Style
from meshplan.model.graph import TensorInfo
from meshplan.shown import shown
from meshplan.spec.spec import ActivationCheckpointing, Precision
from meshplan.spec.strategies import Strategy


@shown
@dataclass(frozen=True, slots=True)
class Reason:
    """The reason for a decision: a short text for the user, and the place in the plan, if any."""

    text: str
    origin: Origin | None = None

    def __str__(self) -> str:
        return f"{self.text} ({self.origin.place})" if self.origin else self.text


@shown
@dataclass(frozen=True, slots=True)
class Preset:
    """A style or placement of one module on the tp axis, from `tp_plan` or from a rule.

    Args:
        word: A style name or a placement, as a rule would state it.
        reason: Reason shown for every tensor of the module.
        is_proved: If True, the data flow proves that the style is correct, so that heuristic checks
            by names and neighbouring modules are skipped.
        pieces: Pieces of the output dim that are sharded one by one, if the style is proved; () if
            the dim is sharded as a whole.
    """

    word: str
    reason: Reason
    is_proved: bool = False
    pieces: tuple[Piece, ...] = ()


@shown
@dataclass(frozen=True, slots=True)
class LocalUse:
    """The layout of a parameter that code outside of styled modules combines with sharded values.

    Args:
        dim: The dim that tp shards; None if the parameter is replicated and each rank has a partial
            gradient.
        reason: The reason for this layout.
    """

    dim: int | None
    reason: Reason


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """The parameters that FSDP2 gathers, frees and reduces together.

    Args:
        fqn: The module to which FSDP2 is applied. The unit has every parameter inside the module
            that is in no unit further inside.
        shard_axes: Data axes that shard the parameters; () if they are replicated.
        replicate_axes: Data axes along which parameters are replicated and gradients all-reduced.
        reshard_after_forward: True frees the gathered parameters after forward, False keeps them
            until backward is done, an int reshards to that many ranks.
        precision: Dtypes by role; None in a role means the model's dtype.
        reason: The reason why the module is a unit.
        casts_inputs: If True, the inputs of the module are cast to `precision.param`.
        on_host: If True, parameters, gradients and optimizer states are in host memory, and
            parameters are copied to the device for each all-gather.
    """

    fqn: str
    shard_axes: tuple[str, ...]
    replicate_axes: tuple[str, ...]
    reshard_after_forward: bool | int
    precision: Precision
    reason: Reason
    casts_inputs: bool = True
    on_host: bool = False

    @property
    def is_sharded(self) -> bool:
        return bool(self.shard_axes)


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """One tensor and its layouts.

    Args:
        info: The tensor.
        unit: The fqn of the tensor's unit; None for a buffer, without FSDP2 and DDP, or if the
            gradient is reduced alone (`reduced_alone`).
        stored: Layout of the parameter between steps, and of the optimizer state.
        computed: Layout during forward and backward.
        gradient: Layout of the gradient between backward and the optimizer step.
        dtype: Dtype of the stored tensor.
        compute_dtype: Dtype of the tensor during forward and backward.
        gathered_axes: Axes of `stored` over which the tensor is all-gathered each time its module
            runs, besides those of its unit.
        reduced_alone: If True, the gradient is averaged over the data axes separately, because the
            tensor cannot be reduced with its unit: it is a scalar, is replicated, or has another
            dtype.
        data_reason: The reason for the layout on the data axes.
        tp_reason: The reason for the layout on tp; None if the plan states nothing about it.
        is_local: If True, the module's code computes with the local shard as a plain tensor, or
            with the whole tensor, of whose gradient each rank then has a partial sum.
        ep_reason: The reason for the layout on ep; None if ep does not shard the tensor.
    """

    info: TensorInfo
    unit: str | None
    stored: Layout
    computed: Layout
    gradient: Layout
    dtype: str
    compute_dtype: str
    gathered_axes: tuple[str, ...] = ()
    reduced_alone: bool = False
    data_reason: Reason
    tp_reason: Reason | None = None
    is_local: bool = False
    ep_reason: Reason | None = None

    def local_shape(self, mesh: Mesh, rank: int = 0) -> tuple[int, ...]:
        """Return the shape of the shard that `rank` stores."""
        return self.stored.local_shape(self.info.shape, mesh, rank)


@shown
@dataclass(frozen=True, slots=True)
class StyleUse:
    """A style on a module, along one axis.

    Args:
        style: The style.
        axis: The mesh axis.
        reason: The reason for the style.
        pieces: Pieces of the output dim that are sharded one by one, in which case the module
            computes on local tensors; () if the dim is sharded as a whole.
        is_written: If True, the surrounding code writes in place into the module's output, which
            must therefore be a copy.
        is_proved: If True, the data flow proves that the style is correct, so that the first
            forward does not check it.
    """

    style: Style
    axis: str
    reason: Reason
    pieces: tuple[Piece, ...] = ()
    is_written: bool = False
    is_proved: bool = False


@shown
@dataclass(frozen=True, slots=True)
class LocalAttribute:
    """An attribute, such as `num_heads`, that must be set to the number on one rank of tp.

    Args:
        module: The fqn of the module that has the attribute.
        name: Name of the attribute.
        whole: The value in one process.
        local: The value to set on each rank.
    """

    module: str
    name: str
    whole: int
    local: int


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceBoundary:
    """A place where an activation is sharded along the sequence over tp, or gathered again.

    Args:
        module: The fqn of the module whose argument or output is changed.
        path: The argument, by position ("0") or name; None for the module's output.
        change: "cut" to shard it, or "gather".
        reason: The reason for a boundary here.
    """

    module: str
    path: str | None
    change: Literal["cut", "gather"]
    reason: Reason


@shown
@dataclass(frozen=True, slots=True)
class ExpertUse:
    """A module whose experts are distributed over ep.

    Args:
        num_experts: Number of experts on all ranks; each rank of ep has an equal share, in order.
        reason: The reason why they are distributed.
        capacity: `experts.capacity` of the plan: tokens per rank for which memory is estimated, as
            a multiple of an even share. None if not stated.
    """

    num_experts: int
    reason: Reason
    capacity: float | None = None


@shown
@dataclass(frozen=True, slots=True)
class Recompute:
    """Activation checkpointing of one module."""

    policy: ActivationCheckpointing
    reason: Reason


@shown
@dataclass(frozen=True, slots=True)
class ChunkedLoss:
    """Head and loss, computed together for one chunk of the tokens after another.

    Args:
        head: The fqn of the module that computes the logits.
        chunks: Number of chunks.
        reason: The reason for chunking.
    """

    head: str
    chunks: int
    reason: Reason


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class ContextParallel:
    """Attention over shards of the sequence, one shard per rank of cp.

    Args:
        attention: "all_gather" of keys and values, or "all_to_all" of heads.
        balance: If True, rank i of n has chunks i and 2n-1-i of 2n, otherwise chunk i of n.
        reason: The reason for this kind of attention.
    """

    attention: str
    balance: bool
    reason: Reason

    def chunks(self, size: int, rank: int) -> tuple[int, ...]:
        """Return the indices of the chunks of the sequence on `rank` of `size` ranks, in order.

        Source: Llama 3 (Dubey et al. 2024), section 3.3.2: each rank gets chunks i and 2n-1-i.
        """
        return (rank, 2 * size - 1 - rank) if self.balance else (rank,)

    def num_chunks(self, size: int) -> int:
        """Return the number of chunks into which the sequence is divided for `size` ranks."""
        return 2 * size if self.balance else size


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """The pipeline: the stage of each module, and the order of the microbatches.

    Args:
        schedule: A name of `schedules.SCHEDULES`.
        num_ranks: Ranks along pp.
        virtual: Stages per rank.
        microbatches: Number of microbatches into which a rank's batch is split.
        opened: Fqns of modules whose forward runs in every stage, while each of the modules inside
            runs in one stage.
        free: Fqns of modules without weights that every stage runs for itself, because their
            outputs depend only on the model's inputs.
        units: (module, stage) for each module that runs as a whole in one stage, in execution
            order; a module that runs twice is listed twice.
        tensors: The stages that use each tensor, by fqn. If several stages use one, each has a copy
            and the gradients are added.
        reason: The reason for this split.
    """

    schedule: str
    num_ranks: int
    virtual: int
    microbatches: int
    opened: tuple[str, ...]
    free: tuple[str, ...]
    units: tuple[tuple[str, int], ...]
    tensors: Mapping[str, tuple[int, ...]]
    reason: Reason

    @property
    def num(self) -> int:
        """Number of stages."""
        return self.num_ranks * self.virtual

    def rank_of(self, stage: int) -> int:
        """Return the index along pp of the rank that runs a stage."""
        return SCHEDULES[self.schedule].rank_of(stage, self.num_ranks)

    def of_rank(self, place: int) -> tuple[int, ...]:
        """Return the stages of the rank at this index along pp."""
        return tuple(stage for stage in range(self.num) if self.rank_of(stage) == place)

    def holds(self, fqn: str, place: int) -> bool:
        """Return True if the rank at this index along pp has a copy of a tensor."""
        return any(self.rank_of(stage) == place for stage in self.tensors[fqn])


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """All decisions for a model under a plan.

    Args:
        mesh: The mesh, with all sizes known.
        strategy: The data-parallel strategy of parameters for which no rule states another.
        wrapper: The implementation of the data axes: "none" (no data axis), "ddp"
            (DistributedDataParallel around the whole model) or "units" (FSDP2, unit by unit).
        tensors: Layouts of the tensors, by fqn.
        units: FSDP2 units by fqn, each before the units around it.
        styles: Tensor-parallel styles, by module fqn.
        experts: Modules whose experts are distributed over ep, by fqn.
        recompute: Modules that are recomputed in backward, by fqn.
        attributes: Attributes that must be set to local values, such as numbers of heads.
        host_activations: For each module whose saved activations are offloaded to host memory, the
            reason, by fqn.
        apply: (module fqn, "pkg.mod:function", reason): functions of the user that are called with
            the module.
        compiled: Fqns of the modules that `torch.compile` compiles, one by one.
        synchronized: Fqns of the BatchNorms whose statistics are over all data ranks.
        sequence_parallel: If True, activations between styled modules are sharded along the
            sequence.
        crossings: Further places where these activations are sharded or gathered, other than inputs
            and outputs of styled modules.
        results: For each module, by fqn, and each of its calls, the dim of each result that tp
            shards, None for a whole one; empty unless `tp_plan: auto` derived it from a recorded
            forward.
        loss_parallel: If True, logits stay sharded over the vocabulary while the loss is computed.
        chunked_loss: Head and loss computed in chunks; None if they are computed at once.
        context: The kind of attention over sequence shards; None without cp.
        stages: The pipeline; None without a pp axis.
        warnings: Settings that work but are probably not intended.
    """

    mesh: Mesh
    strategy: Strategy
    wrapper: Literal["none", "ddp", "units"]
    tensors: Mapping[str, Placed]
    units: Mapping[str, Unit]
    styles: Mapping[str, StyleUse]
    recompute: Mapping[str, Recompute]
    attributes: tuple[LocalAttribute, ...] = ()
    apply: tuple[tuple[str, str, Reason], ...] = ()
    compiled: tuple[str, ...] = ()
    synchronized: tuple[str, ...] = ()
    sequence_parallel: bool = False
    loss_parallel: bool = False
    chunked_loss: ChunkedLoss | None = None
    context: ContextParallel | None = None
    stages: Stages | None = None
    warnings: tuple[Problem, ...] = field(default=())
    host_activations: Mapping[str, Reason] = field(default_factory=dict)
    experts: Mapping[str, ExpertUse] = field(default_factory=dict)
    crossings: tuple[SequenceBoundary, ...] = ()
    results: Mapping[str, tuple[tuple[int | None, ...], ...]] = field(default_factory=dict)

    @property
    def shared(self) -> dict[str, tuple[int, ...]]:
        """For each trainable parameter that several stages use, its stages, by fqn."""
        return {
            fqn: holders
            for fqn, holders in (self.stages.tensors.items() if self.stages is not None else ())
            if len(holders) > 1
            and not self.tensors[fqn].info.is_buffer
            and self.tensors[fqn].info.trainable
        }

    @property
    def shards_parameters(self) -> bool:
        """True if ranks hold shards of parameters, or FSDP2 manages the parameters."""
        return self.wrapper == "units" or any(p.stored.axes for p in self.tensors.values())

    @property
    def offloads_parameters(self) -> bool:
        """True if the parameters of any unit are offloaded to the host.

        torch's optimizers then step on one parameter after the other, not with foreach.
        """
        return any(unit.on_host for unit in self.units.values())

    @property
    def compute_dtypes(self) -> set[str]:
        """The compute dtypes of all parameters."""
        return {p.compute_dtype for p in self.tensors.values() if not p.info.is_buffer}

    def is_on_host(self, placed: Placed) -> bool:
        """Return True if a tensor is stored in host memory, because its unit is offloaded."""
        unit = None if placed.unit is None else self.units.get(placed.unit)
        return unit is not None and unit.on_host
