"""What `assign` decides: a layout for every tensor, units of sharding, styles, recomputation."""

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
    """Why something is as it is: the words that decided, and where they stand."""

    text: str
    origin: Origin | None = None

    def __str__(self) -> str:
        return f"{self.text} ({self.origin.place})" if self.origin else self.text


@dataclass(frozen=True, slots=True)
class Preset:
    """What is said about the tp axis of one module, and why: below the rules, by `tp_plan`.

    Args:
        word: A style name or a placement, as a rule would state it.
        reason: Shown for every tensor that it places.
        is_proved: The data flow says that it is right, whatever names and neighbours suggest.
        pieces: Then what each rank computes of the output dim, () for a plain cut.
    """

    word: str
    reason: Reason
    is_proved: bool = False
    pieces: tuple[Piece, ...] = ()


@dataclass(frozen=True, slots=True)
class LocalUse:
    """A parameter that plain code computes with beside cut values, as each rank holds it.

    Args:
        dim: The dim of which each rank holds a part; None where it is whole, and each rank has
            an addend of its gradient.
        reason: Why.
    """

    dim: int | None
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Modules' parameters that are gathered, freed and reduced together.

    Args:
        fqn: The module that is the unit; it owns every parameter below it that no deeper
            unit owns.
        shard_axes: Data axes that cut its parameters; () for replicas.
        replicate_axes: Data axes along which it is replicated, its gradients all-reduced.
        reshard_after_forward: True frees the gathered parameters after forward, False keeps
            them until backward is done, an int reshards to that many ranks.
        precision: Dtypes by role; None in a role leaves the model's own.
        reason: What made it so.
        casts_inputs: What its module is called with becomes `precision.param`.
        on_host: Its parameters, their gradients and the optimizer's states lie in the host's
            memory, and are copied to the device for each gather.
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
        unit: The fqn of the unit that owns it; None when no data axis concerns it, or when
            its gradient is reduced by itself (`reduced_alone`).
        stored: At rest, and what the optimizer state looks like.
        computed: During forward and backward.
        gradient: Between backward and the optimizer step.
        dtype: Of the stored tensor.
        compute_dtype: Of the tensor during forward and backward.
        gathered_axes: Axes that cut it at rest and are gathered each time its module runs.
        reduced_alone: Its gradient is averaged over the data axes by itself: it is too small
            or too special for its unit.
        data_reason: Why the data axes place it so.
        tp_reason: Why tp places it so; None when tp does not concern it.
        is_local: Its module's code computes with the rank's own part of it, or with all of it
            and an addend of its gradient.
        ep_reason: Why ep places it so; None when ep does not concern it.
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
        """What `rank` holds at rest."""
        return self.stored.local_shape(self.info.shape, mesh, rank)


@dataclass(frozen=True, slots=True)
class StyleUse:
    """A style on a module, along one axis.

    Args:
        pieces: What a rank computes of the output dim where that is no plain cut: a part of
            each of these. The module then computes on local tensors.
        is_written: The code around writes into the module's output, so it must be a copy.
        is_proved: The data flow says that it is right, so the first forward need not show it.
    """

    style: Style
    axis: str
    reason: Reason
    pieces: tuple[Piece, ...] = ()
    is_written: bool = False
    is_proved: bool = False


@dataclass(frozen=True, slots=True)
class LocalAttribute:
    """An attribute that counts what tp cuts: the module's code must see this rank's number.

    Args:
        module: The fqn of the module that holds it.
        name: Of the attribute.
        whole: Its value on one process.
        local: Its value on each rank.
    """

    module: str
    name: str
    whole: int
    local: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceBoundary:
    """A place where activations are cut along the sequence over tp, or put together again.

    Args:
        module: The fqn of the module that is entered or left.
        path: The argument that is changed, by place ("0") or name; None: what the module leaves.
        change: "cut" or "gather".
        reason: Why here.
    """

    module: str
    path: str | None
    change: Literal["cut", "gather"]
    reason: Reason


@dataclass(frozen=True, slots=True)
class ExpertUse:
    """A module whose experts are spread over ep, and to which tokens are sent.

    Args:
        num_experts: On all ranks together; each rank of ep holds an equal share, in order.
        capacity: The most slots that a rank is expected to be sent, as a multiple of what it would
            get if all got as many; None where the plan does not say.
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
    """The loss is computed together with the head, over one part of the tokens after the other.

    Args:
        head: The fqn of the module that gives the logits.
        chunks: How many parts.
        reason: The words that decided.
    """

    head: str
    chunks: int
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextParallel:
    """Attention over parts of the sequence, one part per rank of cp.

    Args:
        attention: "all_gather" of keys and values, or "all_to_all" of heads.
        balance: Whether rank i of n holds chunks i and 2n-1-i of 2n, else chunk i of n.
        reason: The words that decided.
    """

    attention: str
    balance: bool
    reason: Reason

    def chunks(self, size: int, rank: int) -> tuple[int, ...]:
        """Which chunks of the sequence `rank` of `size` ranks holds, in order.

        Source: Llama 3 (Dubey et al. 2024), section 3.3.2: each rank gets chunks i and 2n-1-i.
        """
        return (rank, 2 * size - 1 - rank) if self.balance else (rank,)

    def num_chunks(self, size: int) -> int:
        """Into how many chunks the sequence is cut for `size` ranks."""
        return 2 * size if self.balance else size


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """The pipeline: what runs where, and in which order microbatches go through.

    Args:
        schedule: A name of `schedules.SCHEDULES`.
        num_ranks: Along pp.
        virtual: Stages per rank.
        microbatches: Parts into which a rank's batch is cut.
        opened: Modules that are cut inside: they run in every stage, but for what is below.
        free: Modules without weights that every stage runs for itself: what they give follows
            from the model's inputs, and need not be sent.
        units: (module, stage) for each module that runs as a whole, in execution order; a
            module that runs twice stands there twice.
        tensors: By fqn, the stages that hold it; more than one for a tensor that several use,
            whose gradients are added.
        reason: What cut it so.
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
        """How many there are."""
        return self.num_ranks * self.virtual

    def rank_of(self, stage: int) -> int:
        """The place along pp of the rank that holds a stage."""
        return SCHEDULES[self.schedule].rank_of(stage, self.num_ranks)

    def of_rank(self, place: int) -> tuple[int, ...]:
        """The stages of the rank at this place along pp."""
        return tuple(stage for stage in range(self.num) if self.rank_of(stage) == place)

    def holds(self, fqn: str, place: int) -> bool:
        """Whether the rank at this place along pp holds a tensor."""
        return any(self.rank_of(stage) == place for stage in self.tensors[fqn])


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Every decision, by name.

    Args:
        mesh: The concrete mesh.
        strategy: The base strategy.
        wrapper: How the data axes are applied: "none" (no data axis), "ddp"
            (DistributedDataParallel around the whole model) or "units" (FSDP2, unit by unit).
        tensors: By fqn.
        units: By fqn, inner ones before the ones around them.
        styles: By module fqn.
        experts: By module fqn.
        recompute: By module fqn.
        attributes: Numbers of heads and the like that modules must see as this rank has them.
        host_activations: By fqn, modules whose backward finds in the host's memory what their
            forward kept for it.
        apply: (module fqn, "pkg.mod:function", reason): code the plan names.
        compiled: Fqns of the modules that `torch.compile` gets, one by one.
        synchronized: Fqns of the BatchNorms whose statistics are over all data ranks.
        sequence_parallel: Activations between styled modules are cut along the sequence.
        crossings: Where that cut begins and ends, if not at the styled modules alone.
        loss_parallel: Logits stay cut over the vocabulary while the loss is computed.
        chunked_loss: How head and loss are computed in parts; None where they are as one.
        context: How attention over parts of the sequence is computed; None without cp.
        stages: The pipeline; None without a pp axis.
        warnings: Things that work but are probably not meant.
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
        """The stages of each trained parameter that several hold: their gradients are added up."""
        return {
            fqn: holders
            for fqn, holders in (self.stages.tensors.items() if self.stages is not None else ())
            if len(holders) > 1
            and not self.tensors[fqn].info.is_buffer
            and self.tensors[fqn].info.trainable
        }

    @property
    def compute_dtypes(self) -> set[str]:
        """What parameters are computed with in."""
        return {p.compute_dtype for p in self.tensors.values() if not p.info.is_buffer}

    def is_on_host(self, placed: Placed) -> bool:
        """Whether a tensor lies in the host's memory."""
        unit = None if placed.unit is None else self.units.get(placed.unit)
        return unit is not None and unit.on_host
