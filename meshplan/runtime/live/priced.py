"""Price one given plan of a live model: the memory of every rank, and the costs of the blocks.

The search cannot vary a plan that states cp or ep. Such a plan, or one with pp or tp that states
everything, is priced here without a search. `estimate_by_trace` traces a step of each distinct rank
for the memory. For the costs, the operations of one rank's microbatch are counted, including the
communication of tp and ep and the recomputed forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final, NamedTuple

from torch import nn

from meshplan.cost.types import Chain
from meshplan.errors import MeshplanError
from meshplan.plan.plan import Plan
from meshplan.planner.problem.live_model import Priced
from meshplan.planner.space.trials import with_axes
from meshplan.runtime.base.batch import mapped
from meshplan.runtime.base.subprocess_pool import run_in_subprocesses
from meshplan.runtime.estimate.estimate import estimate_by_trace
from meshplan.runtime.estimate.request import (
    EstimateRequest,
    PlanDecider,
    built_without_memory,
    for_subprocess,
)
from meshplan.runtime.estimate.scale_down import ModelSource
from meshplan.runtime.fake_step.chain import Staged, chain_as_run, check_speed, staged_of
from meshplan.runtime.fake_step.costs import MicrobatchCosts, watch_rank, with_recompute
from meshplan.runtime.fake_step.default_loop import loop_of
from meshplan.runtime.trace.bounds import UnknownShapeError, everything, picking
from meshplan.runtime.trace.trace_errors import refused
from meshplan.spec.spec import Spec

_FEW: Final = 2
"""Samples of the microbatch whose FLOPs are counted; some norms cannot run on a single sample."""


def priced_as_stated(
    source: ModelSource,
    device: str,
    limit_bytes: int,
    spec: Spec,
    *,
    report: Callable[[str], None],
) -> Priced:
    """Return the memory and the costs of a plan of a model that another process can build.

    Args:
        source: The source of the model.
        device: A device name of `layout.hardware`, or "cuda".
        limit_bytes: Bytes that one device may reserve.
        spec: The plan, which leaves no field open.
        report: Called with lines on the progress.

    Raises:
        SpecError, PlanError: See `priced`.
    """
    request = EstimateRequest(spec=spec, source=source, device=device, limit_bytes=limit_bytes)
    return priced(request, report)


def priced(
    request: EstimateRequest, report: Callable[[str], None], decider: PlanDecider | None = None
) -> Priced:
    """Return the memory and the costs of a plan as it is stated.

    Args:
        request: The request. Its spec leaves no field open.
        report: Called with lines on the progress.
        decider: Decides plans for the model; None to make it from the request.

    Raises:
        SpecError: The model cannot be built.
        PlanError: The plan does not fit the model, its step cannot be traced, or the speed of some
            of its operators is not known.
    """
    if decider is None:
        model = built_without_memory(request.source).train()
        decider = PlanDecider(model, request.spec, request.source.origin)
    plan = decider.decide(request.spec)
    memory = estimate_by_trace(request, report, known=(decider.model, plan))
    report(f"counting the operations of a rank in a microbatch of {type(decider.model).__name__}")
    axes = {axis: plan.mesh.size(axis) for axis in ("tp", "ep") if plan.mesh.size(axis) > 1}
    parted = for_subprocess(decider.decide(_unparted(request.spec, axes, _micro(plan))))
    alone = for_subprocess(decider.decide(_unparted(request.spec, {}, _FEW)))
    staged = staged_of(plan) if plan.assignment.stages is not None else None
    (found,) = run_in_subprocesses(_ran, [(request, parted, alone, staged)])
    check_speed(
        decider.model, plan, flops=found.flops, convolved=found.convolved, unknown=found.unknown,
        origin=request.source.origin, report=report,
    )  # fmt: skip
    return Priced(plan, memory, found.chain, found.flops)


def _micro(plan: Plan) -> int:
    """Return the number of samples in one microbatch: of the pipeline if there is one."""
    stages = plan.assignment.stages
    assert plan.micro is not None
    return plan.micro // (stages.microbatches if stages is not None else 1)


class _Ran(NamedTuple):
    """The counted operations of a model, as the subprocess of `_ran` returns them.

    Attributes:
        chain: Costs of the blocks under the plan, on one rank of tp and ep.
        flops: FLOPs of one sample, forward and backward, without tp, ep and recomputation.
        convolved: Share of the FLOPs under the plan that are convolutions, from 0 to 1.
        unknown: Names of operators under the plan whose FLOPs are not known.
    """

    chain: Chain
    flops: float
    convolved: float
    unknown: frozenset[str]


def _ran(request: EstimateRequest, parted: Plan, alone: Plan, staged: Staged | None) -> _Ran:
    """Count the operations of a microbatch; runs in a subprocess.

    Operators whose result has a shape that depends on values select all that they can.

    Args:
        request: The request.
        parted: The plan with no axes but tp and ep, for one microbatch.
        alone: The plan without tp and ep, for `_FEW` samples.
        staged: Where pipeline stages may cut the model; None if the plan has none.
    """
    model = built_without_memory(request.source).train()
    try:
        return _counted(request, model, parted, alone, staged)
    except UnknownShapeError:
        with picking(everything):
            return _counted(request, model, parted, alone, staged)


def _counted(
    request: EstimateRequest, model: nn.Module, parted: Plan, alone: Plan, staged: Staged | None
) -> _Ran:
    try:
        counted = count(model, parted, request.device)
        plain = count(model, with_recompute(alone, frozenset()), request.device)
    except MeshplanError:
        raise
    except Exception as error:  # The model's own code may raise anything.
        raise refused(error, model, request.source.origin) from None
    chain = chain_as_run(parted, counted, staged)
    return _Ran(chain, plain.flops / _FEW, counted.convolved, counted.unknown)


def _unparted(spec: Spec, axes: Mapping[str, int], micro: int) -> Spec:
    """Return the spec without pp and cp: every rank of tp and ep runs all blocks on one microbatch.

    The cost model adds the stages of pp and the communication of cp afterwards. The spec keeps two
    ranks of data parallelism beside those of ep, so that FSDP2 units exist: their casts are
    counted, and they show which parameters are gathered together.

    Args:
        spec: The plan.
        axes: Sizes of tp and ep, by name; axes of size 1 are left out.
        micro: Samples of the microbatch.
    """
    data = "dp_replicate" if spec.strategy == "ddp" and "ep" not in axes else "dp_shard"
    sizes = {data: 2 * axes.get("ep", 1), **axes}
    trial = with_axes(spec, sizes, sequence_parallel=spec.sequence_parallel)
    return replace(
        trial,
        batch=replace(trial.batch, micro=micro),
        activation_checkpointing=spec.activation_checkpointing,
    )


def count(model: nn.Module, plan: Plan, device: str) -> MicrobatchCosts:
    """Count the operations of rank 0 in one microbatch, as from the second microbatch on.

    Args:
        model: The unsharded model of one process, on any device. It is copied, and its values are
            not read.
        plan: A plan without pp and cp.
        device: Name of the device whose kernels are emulated.
    """
    loop = loop_of(model, plan)
    inputs, targets = mapped((loop.inputs, loop.targets), lambda tensor: tensor.clone())
    return watch_rank(model, plan, inputs, targets, loop.loss_fn, device)
