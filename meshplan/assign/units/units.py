"""The data axes: choose the modules that are FSDP2 units, and the sharding of each unit.

A unit is a module whose parameters are gathered, freed and reduced together. The repeated blocks
are units, and the root is a unit with all other parameters. A module also becomes a unit if a rule
gives it another placement, precision or resharding than the unit around it has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from meshplan.assign.axes.expert_parallel import ExpertParallel
from meshplan.assign.base.cascade import Cascade, Stated
from meshplan.assign.base.dtypes import UNIFIED, Dtypes, main_dtype
from meshplan.assign.base.tensor_cuts import Reported
from meshplan.assign.base.types import Placed, Reason, Unit
from meshplan.assign.units.offload import params_on_host
from meshplan.errors import Problem
from meshplan.layout.mesh import EXPERT_SHARD, GRADIENT_AXES, SHARD_AXES, Mesh
from meshplan.model.graph import ModelGraph, TensorInfo, is_inside
from meshplan.spec.spec import Precision, Spec
from meshplan.spec.strategies import Strategy

PLACE = "place.dp_shard"
_RESHARD = "reshard_after_forward"
_DEFAULT_BLOCK = "repeated block"
_STATED = (PLACE, _RESHARD, "precision", "offload.params", "offload.optimizer")
"""Fields of rules on which the settings of a unit depend."""


@dataclass(slots=True)
class UnitDecision(Reported):
    """The units by fqn, each before the units around it, and the problems that were found.

    `dtypes` has, by unit, the stored dtype of most elements. It is empty if all trainable
    parameters of the model have one dtype.
    """

    by_fqn: dict[str, Unit] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    notes: list[Problem] = field(default_factory=list)

    def of(self, name: str, graph: ModelGraph) -> str:
        """Return the unit of the tensor of this name: the innermost unit that contains it."""
        module = name.rpartition(".")[0]
        while module:
            unit = graph.first_name(module)
            if unit in self.by_fqn:
                return unit
            module = module.rpartition(".")[0]
        return ""


def assign_units(
    spec: Spec,
    graph: ModelGraph,
    cascade: Cascade,
    mesh: Mesh,
    strategy: Strategy,
    experts: ExpertParallel,
) -> UnitDecision:
    """Return all units of a model, each with its axes, resharding and precision."""
    out = UnitDecision()
    builder = _UnitBuilder(spec, graph, cascade, mesh, strategy, experts, out)
    builder.visit("", None)
    if builder.as_stored:
        first, others = builder.as_stored[0], len(builder.as_stored) - 1
        norms = f"{first} and {others} more norms keep" if others else f"{first} keeps"
        out.notes.append(
            Problem(
                f"{norms} running statistics: parameters of these norms stay in their stored "
                "dtype, and each norm is a separate unit",
            )
        )
    inner_first = sorted(out.by_fqn, key=lambda fqn: -_depth(graph, fqn))
    out.by_fqn = {fqn: out.by_fqn[fqn] for fqn in inner_first}
    _merge_tied(spec, graph, out)
    if builder.dtypes.is_mixed:
        owned: dict[str, list[TensorInfo]] = {}
        for tensor in graph.parameters:
            owned.setdefault(out.of(tensor.fqn, graph), []).append(tensor)
        out.dtypes = {u: main_dtype(t, out.by_fqn[u].precision) for u, t in owned.items()}
    return out


def _depth(graph: ModelGraph, fqn: str) -> int:
    """Return the largest depth among the names of a module.

    A shared module has several names, and so is inside several modules.
    """
    names = (fqn, *graph.modules[fqn].aliases)
    return max(name.count(".") + 1 if name else 0 for name in names)


@dataclass(frozen=True, slots=True)
class _Mode:
    """The settings of a module's parameters; a module can only be in a unit with equal settings."""

    is_sharded: bool
    axes: tuple[str, ...]
    precision: Precision
    reshard: bool | int | None
    on_host: bool = False
    dtype: str = ""

    @property
    def holds_experts(self) -> bool:
        return EXPERT_SHARD in self.axes


class _UnitBuilder:
    def __init__(
        self,
        spec: Spec,
        graph: ModelGraph,
        cascade: Cascade,
        mesh: Mesh,
        strategy: Strategy,
        experts: ExpertParallel,
        out: UnitDecision,
    ) -> None:
        self.spec, self.graph, self.cascade = spec, graph, cascade
        self.mesh, self.strategy, self.experts, self.out = mesh, strategy, experts, out
        self.as_stored: list[str] = []
        self.dtypes = Dtypes(graph)
        self.blocks = set(graph.blocks())
        self.with_params = graph.with_params()
        self._modes: dict[tuple[int, ...], tuple[_Mode, Reason]] = {}
        self.children: dict[str, list[str]] = {}
        for fqn in graph.modules:
            if fqn:
                self.children.setdefault(fqn.rpartition(".")[0], []).append(fqn)

    def visit(self, fqn: str, around: _Mode | None) -> None:
        """Make `fqn` a unit if it must be one, then visit its children."""
        if fqn and fqn not in self.with_params:
            self._wants_unit(fqn)
            return
        mode, reason = self._mode(fqn)
        info = self.graph.modules[fqn]
        wanted = self._wants_unit(fqn)
        differs = around is not None and mode != around
        if around is None or ((wanted or differs) and info.has_forward and wanted is not False):
            if isinstance(wanted, Reason) and wanted.origin and not differs:
                reason = wanted
            elif fqn in self.blocks and not differs:
                reason = replace(reason, text=f"{reason.text}, {_DEFAULT_BLOCK}")
            if differs and self.graph.tracks_statistics(fqn):
                self.as_stored.append(fqn)
            self._add(fqn, mode, around, reason)
            around = mode
        elif differs and wanted is False:
            self.out.report(
                Problem(
                    f"'{fqn}' differs from the module around it in placement, resharding, "
                    "precision, dtype or offload, so it must be a unit",
                    self.spec.origin(f"rules[{self._unit_rule(fqn)}].unit"),
                    "remove unit: false",
                )
            )
        for child in self.children.get(fqn, ()):
            self.visit(child, around)

    def _unit_rule(self, fqn: str) -> int:
        stated = self.cascade.own(fqn, "unit")
        return stated.rule.index if stated else 0

    def _wants_unit(self, fqn: str) -> Reason | bool | None:
        """Return why a module is to be a unit, False if a rule forbids it, None if undecided."""
        stated = self.cascade.own(fqn, "unit")
        if stated is not None:
            origin = self.spec.origin(stated.path)
            if stated.value and not self.graph.modules[fqn].has_forward:
                kind = self.graph.modules[fqn].type
                self.out.report(
                    Problem(
                        f"'{fqn}' is a {kind}, which is never called, so it cannot be a unit",
                        origin,
                        f"match its children, such as '{fqn}.*'",
                    )
                )
                return None
            return Reason(stated.text, origin) if stated.value else False
        return Reason(_DEFAULT_BLOCK) if fqn in self.blocks else None

    def _mode(self, fqn: str) -> tuple[_Mode, Reason]:
        """Return the settings of a module and the reason; cached by what they depend on."""
        holds_experts = self.experts.around(fqn) is not None
        stated = (id(self.cascade.inherited(fqn, field)) for field in _STATED)
        computes_as_stored, dtype = self.graph.tracks_statistics(fqn), self.dtypes.other(fqn)
        key = (holds_experts, computes_as_stored, hash(dtype), *stated)
        if key not in self._modes:
            mode, reason = self._find_mode(fqn, holds_experts)
            # FSDP2 reduces the gradients of a unit as one tensor, so a module of another dtype must
            # be another unit. The plan's precision does not apply to it: a model that makes a
            # module float64 or complex needs that dtype.
            if dtype and not (mode.precision.master and dtype in UNIFIED):
                reason = replace(reason, text=f"{reason.text}, {dtype} by itself")
                mode = replace(mode, precision=Precision(), dtype=dtype)
            # Kernels of norms with running statistics need parameters and statistics in one dtype,
            # and in half precision the small updates of statistics would be rounded away. FSDP1
            # excludes BatchNorm from mixed precision, too.
            if computes_as_stored and mode.precision.is_mixed:
                reason = replace(reason, text=f"{reason.text}, norm with running statistics")
                mode = replace(mode, precision=replace(mode.precision, param=None, output=None))
            self._modes[key] = mode, reason
        return self._modes[key]

    def _find_mode(self, fqn: str, holds_experts: bool) -> tuple[_Mode, Reason]:
        placed = self.cascade.inherited(fqn, PLACE)
        reshard = self.cascade.inherited(fqn, _RESHARD)
        precision = self.cascade.inherited(fqn, "precision")
        if placed is not None:
            is_sharded = placed.value != "R"
            reason = Reason(placed.text, self.spec.origin(placed.path))
            self._check_place(placed)
        else:
            is_sharded = bool(self.strategy.cuts)
            stated = self.spec.strategy is not None
            where = "strategy" if stated else "mesh"
            text = f"strategy: {self.strategy.name}" if stated else f"mesh ({self.strategy.name})"
            reason = Reason(text, self.spec.origin(where))
        # Ranks along ep have different experts, so only efsdp shards them: dp_shard = efsdp x ep.
        axes = (EXPERT_SHARD,) if holds_experts else self.mesh.present(SHARD_AXES)
        if reshard is not None:
            self._check_reshard(reshard, is_sharded, axes)
        return _Mode(
            is_sharded,
            axes,
            precision.value if precision else self.spec.precision,
            reshard.value if reshard else None,
            self._on_host(fqn, is_sharded),
        ), reason

    def _on_host(self, fqn: str, is_sharded: bool) -> bool:
        on_host, problem = params_on_host(self.spec, self.cascade, fqn, is_sharded=is_sharded)
        if problem is not None and fqn in self.with_params:
            self.out.report(problem)
        return on_host

    def _check_place(self, stated: Stated) -> None:
        origin = self.spec.origin(stated.path)
        if stated.value != "R" and not self.mesh.present(SHARD_AXES):
            self.out.report(
                Problem(
                    f"'{stated.text}' needs the axis dp_shard (the mesh has {self.mesh})",
                    origin,
                    "add dp_shard to the mesh, or remove the placement",
                )
            )
        elif stated.rule.data == "hybrid_shard" and "dp_replicate" not in self.mesh.names:
            self.out.report(
                Problem(
                    "'hybrid_shard' needs the axes dp_replicate and dp_shard "
                    f"(the mesh has {self.mesh})",
                    origin,
                    "write place: shard, or add dp_replicate to the mesh",
                )
            )

    def _check_reshard(self, stated: Stated, is_sharded: bool, axes: tuple[str, ...]) -> None:
        size, value = self.mesh.size(*axes), stated.value
        origin = self.spec.origin(stated.path)
        if not is_sharded:
            self.out.report(
                Problem(
                    "reshard_after_forward has no effect on parameters that are not sharded",
                    origin,
                    "remove it, or shard the module",
                )
            )
        elif not isinstance(value, bool) and (size % value or not 1 < value < size):
            words = " x ".join(axes)
            divisors = [d for d in range(2, size) if size % d == 0]
            self.out.report(
                Problem(
                    f"reshard_after_forward: {value} is not a divisor of {words} {size} between "
                    f"1 and {size}",
                    origin,
                    f"use {' or '.join(map(str, divisors))}" if divisors else "use true or false",
                )
            )

    def _add(self, fqn: str, mode: _Mode, around: _Mode | None, reason: Reason) -> None:
        present = self.mesh.present(GRADIENT_AXES)
        if mode.holds_experts:
            present = tuple(EXPERT_SHARD if axis == "dp_shard" else axis for axis in present)
        shard_axes = mode.axes if mode.is_sharded else ()
        if mode.reshard is not None:
            reshard = mode.reshard
        else:
            # Backward needs the root's parameters first, right after forward: do not free them.
            reshard = bool(fqn) and "parameter" in self.strategy.cuts
        precision = mode.precision
        same = around is not None and precision == around.precision
        if same:
            # `output` is the dtype of the model's output, which only the outer unit returns.
            precision = replace(precision, output=None)
        elif around is not None and precision.output is None:
            # The code after the module expects the dtype of the unit around it.
            precision = replace(precision, output=around.precision.param)
        self.out.by_fqn[fqn] = Unit(
            fqn=fqn,
            shard_axes=shard_axes,
            replicate_axes=tuple(a for a in present if a not in shard_axes),
            reshard_after_forward=reshard if shard_axes else False,
            precision=precision,
            reason=reason,
            # A module that is a unit only because of ep gets routing weights as an input, which
            # must keep their dtype.
            casts_inputs=not (same and mode.holds_experts),
            on_host=mode.on_host,
        )


def check_reshards(
    spec: Spec, cascade: Cascade, mesh: Mesh, units: UnitDecision, tensors: Mapping[str, Placed]
) -> None:
    """Report `reshard_after_forward: N` on units with parameters that another axis shards, too.

    FSDP2 does not support this combination and would raise an error in forward.
    """
    for fqn, placed in tensors.items():
        unit = units.by_fqn.get(placed.unit) if placed.unit is not None else None
        stated = cascade.inherited(unit.fqn, _RESHARD) if unit is not None else None
        if unit is None or stated is None or isinstance(stated.value, bool):
            continue
        others = [a for a in placed.stored.axes if a not in unit.shard_axes and mesh.size(a) > 1]
        if others:
            units.report(
                Problem(
                    f"{stated.text} on '{unit.fqn}' is not available yet in this version, since "
                    f"{others[0]} shards {fqn}",
                    spec.origin(stated.path),
                    f"write true or false for '{unit.fqn}'",
                )
            )


def _merge_tied(spec: Spec, graph: ModelGraph, out: UnitDecision) -> None:
    """Remove the units of blocks that share a tied tensor with other units.

    FSDP2 needs all names of a tensor in one unit. If a rule made the unit, report a problem.
    """
    for tensor in _split(graph, out):
        owners = {out.of(name, graph) for name in tensor.names}
        common = _common(owners)
        for fqn in [f for f in out.by_fqn if f and f != common and is_inside(f, common)]:
            if not any(is_inside(owner, fqn) for owner in owners):
                continue
            unit = out.by_fqn[fqn]
            if _DEFAULT_BLOCK not in unit.reason.text:
                out.report(
                    Problem(
                        f"{' and '.join(tensor.names)} are one tensor, which cannot belong to two "
                        f"units, but '{fqn}' is a separate unit",
                        unit.reason.origin,
                        f"write match: {{param: {tensor.fqn}}} for the tensor itself, or match a "
                        "module around all that share it",
                    )
                )
                continue
            del out.by_fqn[fqn]
            out.notes.append(
                Problem(
                    f"'{fqn}' shares {tensor.fqn} with other modules, so it is not a separate unit",
                    spec.origin(""),
                    "",
                )
            )


def _split(graph: ModelGraph, out: UnitDecision) -> Iterator[TensorInfo]:
    for tensor in graph.parameters:
        if tensor.aliases and len({out.of(name, graph) for name in tensor.names}) > 1:
            yield tensor


def _common(fqns: set[str]) -> str:
    """Return the fqn of the innermost module that contains all of these."""
    parts = [fqn.split(".") if fqn else [] for fqn in fqns]
    common: list[str] = []
    for names in zip(*parts, strict=False):
        if len(set(names)) > 1:
            break
        common.append(names[0])
    return ".".join(common)
