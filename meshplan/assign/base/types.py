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
from meshplan.spec.spec import ActivationCheckpointing, Precision
from meshplan.spec.strategies import Strategy


@dataclass(frozen=True, slots=True)
class Reason:
    """The reason for a decision: the text that decided, and its place in the plan."""

    text: str
    origin: Origin | None = None

    def __str__(self) -> str:
        return f"{self.text} ({self.origin.place})" if self.origin else self.text


@dataclass(frozen=True, slots=True)
class Preset:
    """A style or placement of one module on the tp axis, from `tp_plan`; rules override it.

    Args:
        word: A style name or a placement, as a rule would state it.
        reason: Reason shown for every tensor that it places.
        is_proved: If True, the data flow shows that it is right, whatever names and neighbours
            suggest.
        pieces: If proved, the pieces of the output dim that each rank computes a part of; () for a
            plain sharding.
    """

    word: str
    reason: Reason
    is_proved: bool = False
    pieces: tuple[Piece, ...] = ()


@dataclass(frozen=True, slots=True)
class LocalUse:
    """A parameter that plain code uses together with sharded values, as each rank holds it.

    Args:
        dim: The dim that is sharded; None if the parameter is whole and each rank has a partial
            gradient.
        reason: The reason for this layout.
    """

    dim: int | None
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Parameters of modules that are gathered, freed and reduced together.

    Args:
        fqn: The module that is the unit; it owns every parameter below it that no deeper unit owns.
        shard_axes: Data axes that shard its parameters; () for replicas.
        replicate_axes: Data axes along which it is replicated, its gradients all-reduced.
        reshard_after_forward: True frees the gathered parameters after forward, False keeps them
            until backward is done, an int reshards to that many ranks.
        precision: Dtypes by role; None in a role leaves the model's own.
        reason: The reason why it is a unit.
        casts_inputs: If True, the inputs of its module are cast to `precision.param`.
        on_host: If True, its parameters, their gradients and the optimizer states are in host
            memory, and parameters are copied to the device for each gather.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """One tensor and its layouts.

    Args:
        info: The tensor.
        unit: The fqn of the unit that owns it; None if no data axis concerns it, or if its gradient
            is reduced by itself (`reduced_alone`).
        stored: Layout at rest, and of the optimizer state.
        computed: Layout during forward and backward.
        gradient: Layout of the gradient between backward and the optimizer step.
        dtype: Dtype of the stored tensor.
        compute_dtype: Dtype of the tensor during forward and backward.
        gathered_axes: Axes that shard it at rest and are gathered each time its module runs.
        reduced_alone: If True, its gradient is averaged over the data axes by itself, since it is
            too small or too special for its unit.
        data_reason: The reason for its layout on the data axes.
        tp_reason: The reason for its layout on tp; None if tp does not concern it.
        is_local: If True, its module's code computes with the rank's own shard of it, or with all
            of it and a partial gradient.
        ep_reason: The reason for its layout on ep; None if ep does not concern it.
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
        """Shape of the tensor that `rank` holds at rest."""
        return self.stored.local_shape(self.info.shape, mesh, rank)


@dataclass(frozen=True, slots=True)
class StyleUse:
    """A style on a module, along one axis.

    Args:
        style: The style.
        axis: The mesh axis.
        reason: The reason for the style.
        pieces: Pieces of the output dim, of each of which a rank computes a part; the module then
            computes on local tensors. () for a plain sharding.
        is_written: If True, the surrounding code writes into the module's output, which must be a
            copy.
        is_proved: If True, the data flow shows that it is right, and the first forward need not
            check it.
    """

    style: Style
    axis: str
    reason: Reason
    pieces: tuple[Piece, ...] = ()
    is_written: bool = False
    is_proved: bool = False


@dataclass(frozen=True, slots=True)
class LocalAttribute:
    """An attribute that counts what tp shards; the module's code must see this rank's number.

    Args:
        module: The fqn of the module that has it.
        name: Name of the attribute.
        whole: The value on one process.
        local: The value on each rank.
    """

    module: str
    name: str
    whole: int
    local: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceBoundary:
    """A place where activations are sharded along the sequence over tp, or gathered again.

    Args:
        module: The fqn of the module that is entered or left.
        path: The argument that is changed, by position ("0") or name; None for the module's output.
        change: "cut" or "gather".
        reason: The reason for a boundary here.
    """

    module: str
    path: str | None
    change: Literal["cut", "gather"]
    reason: Reason


@dataclass(frozen=True, slots=True)
class ExpertUse:
    """A module whose experts are spread over ep, and to which tokens are sent.

    Args:
        num_experts: Experts on all ranks together; each rank of ep has an equal share, in order.
        reason: The reason why they are spread.
        capacity: The most slots that a rank is expected to be sent, as a multiple of an even share;
            None if the plan does not say.
    """

    num_experts: int
    reason: Reason
    capacity: float | None = None


@dataclass(frozen=True, slots=True)
class Recompute:
    """Activation checkpointing of one module."""

    policy: ActivationCheckpointing
    reason: Reason


@dataclass(frozen=True, slots=True)
class ChunkedLoss:
    """A loss computed together with the head, one chunk of the tokens after the other.

    Args:
        head: The fqn of the module that gives the logits.
        chunks: Number of chunks.
        reason: The reason for chunking.
    """

    head: str
    chunks: int
    reason: Reason


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
        """The chunks of the sequence that `rank` of `size` ranks holds, in order.

        Source: Llama 3 (Dubey et al. 2024), section 3.3.2: each rank gets chunks i and 2n-1-i.
        """
        return (rank, 2 * size - 1 - rank) if self.balance else (rank,)

    def num_chunks(self, size: int) -> int:
        """Number of chunks into which the sequence is split for `size` ranks."""
        return 2 * size if self.balance else size


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """The pipeline: the stage of each module, and the order of the microbatches.

    Args:
        schedule: A name of `schedules.SCHEDULES`.
        num_ranks: Ranks along pp.
        virtual: Stages per rank.
        microbatches: Number of microbatches into which a rank's batch is split.
        opened: Modules that are split inside: they run in every stage, except for what is below
            them.
        free: Modules without weights that every stage runs for itself: their outputs follow from
            the model's inputs and need not be sent.
        units: (module, stage) for each module that runs as a whole, in execution order; a module
            that runs twice is listed twice.
        tensors: The stages that hold each tensor, by fqn; more than one for a tensor that several
            use, whose gradients are added.
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
        """The index along pp of the rank that holds a stage."""
        return SCHEDULES[self.schedule].rank_of(stage, self.num_ranks)

    def of_rank(self, place: int) -> tuple[int, ...]:
        """The stages of the rank at this index along pp."""
        return tuple(stage for stage in range(self.num) if self.rank_of(stage) == place)

    def holds(self, fqn: str, place: int) -> bool:
        """Return True if the rank at this index along pp holds a tensor."""
        return any(self.rank_of(stage) == place for stage in self.tensors[fqn])


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Every decision, by name.

    Args:
        mesh: The concrete mesh.
        strategy: The base strategy.
        wrapper: The implementation of the data axes: "none" (no data axis), "ddp"
            (DistributedDataParallel around the whole model) or "units" (FSDP2, unit by unit).
        tensors: Layouts of the tensors, by fqn.
        units: Units by fqn, inner ones before the ones around them.
        styles: Tensor-parallel styles, by module fqn.
        experts: Modules whose experts are spread over ep, by fqn.
        recompute: Modules that are recomputed, by fqn.
        attributes: Numbers of heads and the like that modules must see as this rank has them.
        host_activations: Modules whose tensors saved for backward wait in host memory, by fqn.
        apply: (module fqn, "pkg.mod:function", reason): code that the plan names.
        compiled: Fqns of the modules that `torch.compile` compiles, one by one.
        synchronized: Fqns of the BatchNorms whose statistics are over all data ranks.
        sequence_parallel: If True, activations between styled modules are sharded along the
            sequence.
        crossings: Boundaries of that sharding other than the styled modules themselves.
        loss_parallel: If True, logits stay sharded over the vocabulary while the loss is computed.
        chunked_loss: Head and loss computed in chunks; None if they are computed at once.
        context: The kind of attention over sequence shards; None without cp.
        stages: The pipeline; None without a pp axis.
        warnings: Settings that work but are probably not meant.
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

    @property
    def shared(self) -> dict[str, tuple[int, ...]]:
        """The stages of each trained parameter that several hold and whose gradients are added."""
        return {
            fqn: holders
            for fqn, holders in (self.stages.tensors.items() if self.stages is not None else ())
            if len(holders) > 1
            and not self.tensors[fqn].info.is_buffer
            and self.tensors[fqn].info.trainable
        }

    @property
    def compute_dtypes(self) -> set[str]:
        """The dtypes in which parameters are computed with."""
        return {p.compute_dtype for p in self.tensors.values() if not p.info.is_buffer}

    def is_on_host(self, placed: Placed) -> bool:
        """Return True if a tensor is in host memory."""
        unit = None if placed.unit is None else self.units.get(placed.unit)
        return unit is not None and unit.on_host
