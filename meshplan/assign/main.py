"""Run the steps of `assign` in order: mesh, rules, tp, units, then a layout for every tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Literal

from meshplan.assign.auto import apply_derived, cut_inside, derive
from meshplan.assign.axes.context import assign_context
from meshplan.assign.axes.expert_parallel import ExpertParallel, assign_ep
from meshplan.assign.axes.split import gathered_throughout, split_problems
from meshplan.assign.axes.stages import assign_stages, idle_warnings, order_warnings
from meshplan.assign.base.cascade import Cascade
from meshplan.assign.base.dtypes import FLOATS, stored_dtype
from meshplan.assign.base.not_yet import not_yet
from meshplan.assign.base.pieces import pieces_cut_twice
from meshplan.assign.base.rounding import rounding_warnings
from meshplan.assign.base.tensor_cuts import TensorParallel
from meshplan.assign.base.types import Assignment, Placed, Reason, Unit
from meshplan.assign.tensor_parallel.chunked_loss import assign_chunked_loss
from meshplan.assign.tensor_parallel.loss import assign_loss
from meshplan.assign.tensor_parallel.presets import presets_of
from meshplan.assign.tensor_parallel.tensor_parallel import assign_tp, no_dim, sequence_problems
from meshplan.assign.units.batchnorm import assign_batchnorm
from meshplan.assign.units.offload import assign_host_activations, shared_on_host
from meshplan.assign.units.recompute import assign_recompute
from meshplan.assign.units.units import PLACE, UnitDecision, assign_units, check_reshards
from meshplan.errors import Origin, PlanError, Problem
from meshplan.layout.layout import Layout
from meshplan.layout.mesh import GRADIENT_AXES, Axis, Mesh
from meshplan.layout.styles import parse_placement
from meshplan.model.graph import ModelGraph, TensorInfo, is_inside
from meshplan.model.rehearsal import Rehearser
from meshplan.spec.compatibility import clashes
from meshplan.spec.spec import Spec
from meshplan.spec.strategies import Strategy, resolve_mesh


def assign(
    spec: Spec,
    graph: ModelGraph,
    *,
    world_size: int | None = None,
    gpus_per_node: int | None = None,
    rehearse: Rehearser | None = None,
) -> Assignment:
    """Return every decision for the model `graph` under the plan `spec`.

    Args:
        spec: The plan.
        graph: The model.
        world_size: Number of ranks of the running job; None on the command line.
        gpus_per_node: Number of ranks on one machine of the running job; None on the command line.
        rehearse: Runs a live model on local shapes, as one rank of tp (`runtime.trace.rehearse`);
            needed for `tp_plan: auto`.

    Raises:
        PlanError: The plan does not work for this model. The error has every problem found:
            contradictions, rules that match nothing, modules that cannot have their placement,
            features that this version lacks.
    """
    problems = [*not_yet(spec), *clashes(spec)]
    cascade = Cascade(spec, graph)
    problems += cascade.problems
    try:
        mesh, strategy = resolve_mesh(spec, world_size, gpus_per_node)
    except PlanError as error:
        raise PlanError([*error.problems, *problems]) from None
    precisions = (spec.precision, *(rule.precision for rule in spec.rules if rule.precision))
    if any(p.is_mixed for p in precisions) and not mesh.present(GRADIENT_AXES):
        # FSDP2 makes the casts of mixed precision. An axis of one rank lets it cast and no more.
        mesh = replace(mesh, axes=(Axis("dp_replicate", 1), *mesh.axes))

    presets = presets_of(spec, graph, cascade, mesh)
    derived = derive(spec, graph, cascade, mesh, rehearse)
    tp = assign_tp(spec, graph, cascade, mesh, {**presets.by_module, **derived.preset})
    apply_derived(graph, derived, tp)
    problems += assign_loss(spec, graph, mesh, tp)
    ep = assign_ep(spec, graph, cascade, mesh, tp)
    units = assign_units(spec, graph, cascade, mesh, strategy, ep)
    recompute, recompute_problems = assign_recompute(spec, graph, cascade)
    on_host, offload_problems = assign_host_activations(spec, graph, cascade, units.by_fqn)
    stages, stage_problems = assign_stages(spec, graph, cascade, mesh, recompute)
    stage_problems += cut_inside(spec, derived, stages)
    wrapper = _wrapper(graph, mesh, units, tp, strategy)
    tensors = {
        tensor.fqn: _place(spec, graph, cascade, mesh, strategy, tp, ep, units, wrapper, tensor)
        for tensor in graph.tensors.values()
    }
    apply = tuple(
        (fqn, stated.value, Reason(stated.text, spec.origin(stated.path)))
        for fqn, stated in cascade.modules_with("apply")
    )
    batchnorm = assign_batchnorm(spec, graph, mesh, stages)
    compiled, compile_problems = _compiled(spec, graph)
    problems += compile_problems + batchnorm.problems + stage_problems + offload_problems
    check_reshards(spec, cascade, mesh, units, tensors)
    chunked_loss, chunk_problems = assign_chunked_loss(
        spec, graph, tp.styles, {*recompute, *on_host}, units.by_fqn, tensors
    )
    problems += chunk_problems
    problems += presets.problems + tp.problems + ep.problems + units.problems + recompute_problems
    problems += _one_dtype(units, tensors) if wrapper == "units" else _no_units(spec, cascade)
    problems += _no_empty_parts(mesh, tensors)
    problems += split_problems(spec, cascade, stages, tensors)
    problems += shared_on_host(spec, stages, tensors, units.by_fqn, graph.blocks())
    problems += _no_such_dim(spec, graph, cascade)
    if spec.ddp and wrapper != "ddp":
        problems.append(
            Problem(
                "'ddp' options are for DistributedDataParallel, which this plan does not use",
                spec.origin("ddp"),
                "remove them, or use strategy: ddp without tp and mixed precision",
            )
        )
    context, context_problems = assign_context(spec, graph, mesh)
    problems += context_problems
    problems += sequence_problems(spec, mesh)
    if problems:
        raise PlanError(problems)
    return Assignment(
        mesh=mesh,
        strategy=strategy,
        wrapper=wrapper,
        tensors=MappingProxyType(tensors),
        units=MappingProxyType(
            gathered_throughout(units.by_fqn, stages) if wrapper == "units" else {}
        ),
        styles=MappingProxyType(tp.styles),
        experts=MappingProxyType(ep.uses),
        recompute=MappingProxyType(recompute),
        host_activations=MappingProxyType(on_host),
        attributes=tuple(tp.attributes),
        apply=apply,
        compiled=compiled,
        synchronized=batchnorm.synchronized,
        sequence_parallel=spec.sequence_parallel,
        crossings=derived.crossings,
        results=derived.results,
        loss_parallel=spec.loss_parallel,
        chunked_loss=chunked_loss,
        context=context,
        stages=stages,
        warnings=(
            *cascade.shadowed(),
            *tp.warnings,
            *units.notes,
            *_other_size(spec, world_size),
            *batchnorm.warnings,
            *rounding_warnings(spec, graph, mesh),
            *order_warnings(spec, graph, stages),
            *idle_warnings(spec, graph, stages),
        ),
    )


def _compiled(spec: Spec, graph: ModelGraph) -> tuple[tuple[str, ...], list[Problem]]:
    """Return the fqns of the modules to compile, which are the repeated blocks, and problems.

    Blocks are compiled one by one so that all share one compiled graph, and so that FSDP2's hooks
    stay outside of the graph. torchtitan does so for the same reasons.
    """
    blocks = tuple(b for b in graph.blocks() if graph.modules[b].has_forward)
    if not spec.compile or blocks:
        return (blocks if spec.compile else ()), []
    return (), [
        Problem(
            f"'compile' compiles the repeated blocks, but {graph.name} has none",
            spec.origin("compile"),
            "remove compile, and call model.compile() after parallelize",
        )
    ]


def _wrapper(
    graph: ModelGraph, mesh: Mesh, units: UnitDecision, tp: TensorParallel, strategy: Strategy
) -> Literal["none", "ddp", "units"]:
    """Return "ddp" if the whole model is only replicated, "units" (FSDP2) in all other cases.

    "none" means that there is no data axis or nothing to train. DistributedDataParallel does not
    keep DTensor parameters in its state dict, cannot mix precisions and expects one backward per
    forward. Therefore tp, mixed precision and pp use FSDP2 units even if nothing is sharded.
    """
    mixed = any(unit.precision.is_mixed for unit in units.by_fqn.values())
    if not mesh.present(GRADIENT_AXES):
        return "none"
    sharded = any(unit.is_sharded for unit in units.by_fqn.values())
    if sharded or mixed or tp.cuts or tp.styles or strategy.cuts or mesh.size("pp") > 1:
        return "units"
    return "ddp" if any(t.trainable for t in graph.parameters) else "none"


def _place(
    spec: Spec,
    graph: ModelGraph,
    cascade: Cascade,
    mesh: Mesh,
    strategy: Strategy,
    tp: TensorParallel,
    ep: ExpertParallel,
    units: UnitDecision,
    wrapper: str,
    tensor: TensorInfo,
) -> Placed:
    whole = Layout.whole(len(tensor.shape))
    if tensor.is_buffer:
        reason = Reason("buffers are never sharded")
        return Placed(info=tensor, unit=None, stored=whole, computed=whole, gradient=whole,
                      dtype=tensor.dtype, compute_dtype=tensor.dtype,
                      data_reason=reason)  # fmt: skip
    unit = units.by_fqn[units.of(tensor.fqn, graph)]
    cut = tp.cuts.get(tensor.fqn)
    used = ep.layouts.get(tensor.fqn, cut.layout if cut else whole)
    is_float, dtype = tensor.dtype in FLOATS, stored_dtype(tensor, unit.precision)
    is_alone, dim, reason = _data_cut(spec, cascade, mesh, tensor, used, unit, units)
    main = units.dtypes.get(unit.fqn, dtype)
    if dtype != main and tensor.trainable and cascade.param(tensor, PLACE) is None:
        # FSDP2 reduces the gradients of a unit as one tensor, so these must have one dtype.
        is_alone = is_alone or bool(mesh.present(GRADIENT_AXES))
        dim, reason = None, Reason(f"{dtype} in a unit of {main}, so it is reduced separately")
    stored = used
    for axis in unit.shard_axes if dim is not None else ():
        stored = stored.cut(axis, dim or 0)
    compute = (unit.precision.param or dtype) if is_float and not is_alone else dtype
    return Placed(
        info=tensor,
        unit=None if is_alone or wrapper == "none" else unit.fqn,
        stored=stored,
        computed=whole if cut and cut.gathered else used,
        gradient=stored if "gradient" in strategy.cuts else used,
        dtype=dtype,
        compute_dtype=compute,
        gathered_axes=("tp",) if cut and cut.gathered else (),
        reduced_alone=is_alone and wrapper == "units",
        data_reason=reason,
        tp_reason=cut.reason if cut else None,
        is_local=cut is not None and cut.is_local,
        ep_reason=ep.reason(tensor.fqn),
    )


def _data_cut(
    spec: Spec,
    cascade: Cascade,
    mesh: Mesh,
    tensor: TensorInfo,
    used: Layout,
    unit: Unit,
    units: UnitDecision,
) -> tuple[bool, int | None, Reason]:
    """Return how the data axes treat a parameter.

    Returns:
        (True if its gradient is reduced alone, outside of its unit; the dim that the unit's axes
        shard, None if none; the reason).
    """
    own = cascade.param(tensor, PLACE)
    around = cascade.inherited(tensor.module, PLACE)
    reason = unit.reason
    if not tensor.numel:
        return bool(mesh.present(GRADIENT_AXES)), None, Reason("the tensor is empty")
    if not tensor.shape:
        stated_dim = parse_placement(str(own.value)) if own else None
        if own is not None and stated_dim is not None:
            units.report(no_dim(tensor, stated_dim, spec.origin(own.path)))
        return bool(mesh.present(GRADIENT_AXES)), None, Reason("a scalar cannot be sharded")
    if own is not None:
        origin = spec.origin(own.path)
        reason = Reason(own.text, origin)
        if own.value == "R":
            if unit.is_sharded and "ep" in used.axes:
                units.report(_not_alone(tensor, origin))
            return unit.is_sharded, None, reason
        if not unit.is_sharded:
            units.report(
                Problem(
                    f"{tensor.fqn} cannot be sharded separately: its module is replicated",
                    origin,
                    f"match the module '{tensor.module}' instead",
                )
            )
            return False, None, reason
    if not unit.is_sharded:
        return False, None, reason
    stated = own or around
    stated_dim = parse_placement(str(stated.value)) if stated and not stated.rule.data else None
    if not stated_dim and "ep" not in used.axes and not used.packed:
        return False, 0, reason
    sizes, ranks = used.local_shape(tensor.shape, mesh), mesh.size(*unit.shard_axes)
    dim = (
        stated_dim
        if stated_dim is not None
        else _first_even(sizes, ranks)
        if "ep" in used.axes
        else 0
    )
    if not -len(tensor.shape) <= dim < len(tensor.shape):
        if own is not None:
            units.report(no_dim(tensor, dim, reason.origin))
        dim = 0  # S(1) on a module means its weight; its bias has one dim.
    dim %= len(tensor.shape)
    if used.pieces(dim) > 1:
        # No DTensor placement shards a packed dim a second time: a gather would permute its rows.
        if stated is not None and stated.text.startswith("dp_shard:"):
            units.report(pieces_cut_twice(tensor, dim, spec.origin(stated.path)))
        dim = 1 - dim
        reason = Reason(
            f"{reason.text}, dim {dim}: tp shards pieces of dim {1 - dim}", reason.origin
        )
    if dim and sizes[dim] % ranks:
        # FSDP2 pads dim 0 only.
        units.report(
            Problem(
                f"{tensor.fqn}: dim {dim} of size {sizes[dim]} does not divide by "
                f"{' x '.join(unit.shard_axes)} {ranks}, and only dim 0 may be uneven",
                spec.origin(stated.path) if stated else None,
                "use S(0)",
            )
        )
    return False, dim, reason


def _first_even(sizes: tuple[int, ...], ranks: int) -> int:
    """Return the first dim whose size is a multiple of `ranks`, else 0.

    For stacked experts dim 0 is often not a multiple: there can be fewer experts than ranks.
    """
    return next((dim for dim, size in enumerate(sizes) if size % ranks == 0), 0)


def _not_alone(tensor: TensorInfo, origin: Origin | None) -> Problem:
    # A gradient that is reduced alone is averaged over all data ranks, but along ep these have
    # different experts.
    return Problem(
        f"{tensor.fqn} contains experts that ep distributes: it cannot be replicated separately",
        origin,
        f"match the module '{tensor.module}' instead",
    )


def _other_size(spec: Spec, world_size: int | None) -> list[Problem]:
    """Return a warning if the job has another number of ranks than `hardware` has devices.

    A plan without sizes in its mesh runs on any number of ranks.
    """
    if spec.hardware is None or world_size in (None, spec.hardware.world_size):
        return []
    return [
        Problem(
            f"'hardware' states {spec.hardware.world_size} devices, but this job has {world_size} "
            f"ranks: the plan uses {world_size}",
            spec.origin("hardware"),
            f"launch {spec.hardware.world_size} ranks, or correct hardware",
        )
    ]


def _one_dtype(units: UnitDecision, tensors: Mapping[str, Placed]) -> Iterator[Problem]:
    """Yield a problem per unit whose parameters have two dtypes.

    FSDP2 reduces the gradients of a unit as one tensor, so these must have one dtype.
    """
    first: dict[str, Placed] = {}
    reported: set[str] = set()
    for fqn, placed in tensors.items():
        if placed.unit is None or not placed.info.trainable:
            continue
        other = first.setdefault(placed.unit, placed)
        if placed.dtype != other.dtype and placed.unit not in reported:
            reported.add(placed.unit)
            yield Problem(
                f"{other.info.fqn} is {other.dtype} and {fqn} is {placed.dtype}, but one unit "
                f"('{placed.unit}') reduces their gradients together",
                units.by_fqn[placed.unit].reason.origin,
                "state precision: {master: fp32}, or make one of the modules a unit (unit: true)",
            )


def _no_units(spec: Spec, cascade: Cascade) -> Iterator[Problem]:
    """Yield a problem if a rule states `unit` but the plan does not use FSDP2 units."""
    for _, stated in cascade.modules_with("unit"):
        yield Problem(
            "'unit' has no effect: this plan does not shard, so it has no units",
            spec.origin(stated.path),
            "remove it, or use a strategy that shards",
        )
        return


def _no_empty_parts(mesh: Mesh, tensors: Mapping[str, Placed]) -> Iterator[Problem]:
    """Yield a problem for each parameter whose shard on the last rank of tp is empty.

    FSDP2 cannot reduce the gradient of an empty shard.
    """
    tp = mesh.size("tp")
    for fqn, placed in tensors.items():
        dim = placed.stored.dim_of("tp")
        if dim is None or placed.unit is None or placed.tp_reason is None:
            continue
        size = placed.info.shape[dim]
        if -(-size // tp) * (tp - 1) >= size:
            yield Problem(
                f"{fqn}: dim {dim} of size {size} leaves no elements for the last rank of tp {tp}",
                placed.tp_reason.origin,
                f"leave {fqn} out of tp",
            )


def _no_such_dim(spec: Spec, graph: ModelGraph, cascade: Cascade) -> Iterator[Problem]:
    """Yield a problem for `dp_shard: S(d)` on a module if none of its parameters has a dim d."""
    reported: set[str] = set()
    for fqn, stated in cascade.modules_with(PLACE):
        dim = parse_placement(str(stated.value))
        if dim is None or stated.path in reported:
            continue
        inside = [t for t in graph.parameters if is_inside(t.fqn, fqn)]
        if inside and not any(-len(t.shape) <= dim < len(t.shape) for t in inside):
            reported.add(stated.path)
            yield Problem(
                f"no parameter of '{fqn}' has a dim {dim}", spec.origin(stated.path), "use S(0)"
            )
