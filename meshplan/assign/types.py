"""What `assign` decides: a layout for every tensor, units of sharding, styles, recomputation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from meshplan.errors import Origin, Problem
from meshplan.graph import TensorInfo
from meshplan.layout import Layout
from meshplan.mesh import Mesh
from meshplan.schedules import SCHEDULES
from meshplan.spec import ActivationCheckpointing, Precision
from meshplan.strategies import Strategy
from meshplan.styles import Style


@dataclass(frozen=True, slots=True)
class Reason:
    """Why something is as it is: the words that decided, and where they stand."""

    text: str
    origin: Origin | None = None

    def __str__(self) -> str:
        return f"{self.text} ({self.origin.place})" if self.origin else self.text


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
    """

    fqn: str
    shard_axes: tuple[str, ...]
    replicate_axes: tuple[str, ...]
    reshard_after_forward: bool | int
    precision: Precision
    reason: Reason

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

    def local_shape(self, mesh: Mesh, rank: int = 0) -> tuple[int, ...]:
        """What `rank` holds at rest."""
        return self.stored.local_shape(self.info.shape, mesh, rank)


@dataclass(frozen=True, slots=True)
class StyleUse:
    """A style on a module, along one axis."""

    style: Style
    axis: str
    reason: Reason


@dataclass(frozen=True, slots=True)
class Recompute:
    """Activation checkpointing of one module."""

    policy: ActivationCheckpointing
    reason: Reason


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
        recompute: By module fqn.
        apply: (module fqn, "pkg.mod:function", reason): code the plan names.
        sequence_parallel: Activations between styled modules are cut along the sequence.
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
    apply: tuple[tuple[str, str, Reason], ...] = ()
    sequence_parallel: bool = False
    stages: Stages | None = None
    warnings: tuple[Problem, ...] = field(default=())
