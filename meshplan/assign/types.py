"""What `assign` decides: a layout for every tensor, units of sharding, styles, recomputation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from meshplan.errors import Origin, Problem
from meshplan.graph import TensorInfo
from meshplan.layout import Layout
from meshplan.mesh import Mesh
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
        casts_inputs: What its module is called with becomes `precision.param`.
    """

    fqn: str
    shard_axes: tuple[str, ...]
    replicate_axes: tuple[str, ...]
    reshard_after_forward: bool | int
    precision: Precision
    reason: Reason
    casts_inputs: bool = True

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
    ep_reason: Reason | None = None

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
class ExpertUse:
    """A module whose experts are spread over ep, and to which tokens are sent.

    Args:
        num_experts: On all ranks together; each rank of ep holds an equal share, in order.
    """

    num_experts: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class Recompute:
    """Activation checkpointing of one module."""

    policy: ActivationCheckpointing
    reason: Reason


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
        apply: (module fqn, "pkg.mod:function", reason): code the plan names.
        sequence_parallel: Activations between styled modules are cut along the sequence.
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
    warnings: tuple[Problem, ...] = field(default=())
    experts: Mapping[str, ExpertUse] = field(default_factory=dict)
