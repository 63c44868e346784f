"""Estimate the seconds of one microbatch in each pipeline stage of a plan, for `cost.simulate`.

For plans without stages, `step_parts` says what the seconds of a step are spent on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshplan.cost.chain import chain_of
from meshplan.cost.config import option_of, plan_as_config
from meshplan.cost.grid import OPTIONS
from meshplan.cost.pipeline import crossing_seconds
from meshplan.cost.profile import Profile
from meshplan.cost.step import Terms, terms
from meshplan.cost.types import Chain
from meshplan.errors import PlanError, Problem
from meshplan.layout.dtypes import DTYPE_BYTES
from meshplan.layout.mesh import order_of
from meshplan.memory.analytic.microbatches import loss_chunks_of, refusals, styled_of
from meshplan.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Seconds of one microbatch in each pipeline stage.

    Args:
        forward_s, backward_s: Seconds of each stage, in the order of the model; one entry without
            pipeline.
        crossing_s: Seconds to send the output of a stage to the next stage.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    crossing_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """Seconds of a step without pipeline stages, by what they are spent on.

    Args:
        compute_s: Computation of forward and backward.
        recompute_s: Recomputation of forwards in backward.
        model_parallel_s: Communication of tp, ep and cp, for which computation waits.
        data_parallel_s: Waits for gathers and reductions that computation does not hide, or for the
            host to launch kernels.
        ends_s: The part of the first gathers and the last reductions that nothing hides.
        update_s: The optimizer's step.
    """

    compute_s: float
    recompute_s: float
    model_parallel_s: float
    data_parallel_s: float
    ends_s: float
    update_s: float


def chain_of_plan(plan: Plan) -> Chain:
    """Return the chain of a plan's model, as one rank of the plan's tp and ep computes it.

    Raises:
        PlanError: The model is of no known family, the plan is incomplete, or the plan uses a
            feature that the cost model cannot price.
    """
    (_, seq_len), tp = plan.fed(), plan.mesh.size("tp")
    if not plan.graph.config:
        what = (
            "the cost model needs a Hugging Face config of a known family, and the model has none"
        )
        raise PlanError(Problem(what, None, "add --config PATH"))
    if problems := list(refusals(plan)):
        raise PlanError(problems)
    (dtype,) = plan.assignment.compute_dtypes
    return chain_of(
        plan.graph,
        seq_len=seq_len,
        element_bytes=DTYPE_BYTES[dtype],
        tp=tp,
        ep=plan.mesh.size("ep"),
        styled=styled_of(plan) if tp > 1 else None,
        loss_chunks=loss_chunks_of(plan),
    )


def stage_of_places(plan: Plan, chain: Chain) -> tuple[int, ...]:
    """Return the stage of each place of a chain.

    Places before the blocks are in the first stage, places after the blocks in the last stage.
    """
    stages = plan.assignment.stages
    if stages is None:
        return (0,) * len(chain.order)
    at: Mapping[str, int] = dict(stages.units)
    out, is_behind = [], False
    for name in chain.names:
        is_behind = is_behind or bool(name)
        out.append(at[name] if name else stages.num - 1 if is_behind else 0)
    return tuple(out)


def stage_seconds(plan: Plan, profile: Profile, gpus_per_node: int) -> StageSeconds:
    """Return the estimated seconds of one microbatch in each stage of a plan.

    Args:
        plan: The plan, which must state its batch.
        profile: Constants of the device.
        gpus_per_node: Devices of one node.

    Raises:
        PlanError: `chain_of_plan` cannot read the plan's model.
    """
    chain = chain_of_plan(plan)
    stages, row = plan.assignment.stages, plan_as_config(plan)
    found = _terms_of_kinds(plan, chain, profile, gpus_per_node)
    num = stages.num if stages is not None else 1
    forward, backward = [0.0] * num, [0.0] * num
    for number, name, stage in zip(
        chain.order, chain.names, stage_of_places(plan, chain), strict=True
    ):
        option = option_of(plan, name)
        forward[stage] += float(found[number].forward_s[0, option])
        backward[stage] += float(found[number].backward_s[0, option])
    boundary = max(kind.boundary_bytes for kind in chain.kinds)
    crossing = float(
        crossing_seconds(row, boundary, profile, gpus_per_node, order_of(plan.mesh.sizes))[0]
    )
    return StageSeconds(tuple(forward), tuple(backward), crossing)


def step_parts(plan: Plan, profile: Profile, gpus_per_node: int) -> StepParts:
    """Return what the seconds of a step of a plan without pipeline stages are spent on.

    Args and errors are those of `stage_seconds`.
    """
    chain = chain_of_plan(plan)
    found = _terms_of_kinds(plan, chain, profile, gpus_per_node)
    compute = recompute = model_parallel = data_parallel = ends = update = 0.0
    for number, name in zip(chain.order, chain.names, strict=True):
        of_kind, option = found[number], option_of(plan, name)
        # The same option without recomputation: what its backward takes less is recomputation.
        plain = OPTIONS.index((0, OPTIONS[option][1]))
        again = float(of_kind.backward_s[0, option] - of_kind.backward_s[0, plain])
        passes = float(of_kind.forward_s[0, option] + of_kind.backward_s[0, plain])
        compute += float(of_kind.compute_s[0])
        recompute += again
        model_parallel += float(of_kind.exposed_tp_s[0])
        data_parallel += passes - float(of_kind.compute_s[0] + of_kind.exposed_tp_s[0])
        ends += float(of_kind.ends_s[0, option])
        update += float(of_kind.update_s[0])
    times = plan.accumulate
    return StepParts(
        compute_s=compute * times,
        recompute_s=recompute * times,
        model_parallel_s=model_parallel * times,
        data_parallel_s=data_parallel * times,
        ends_s=ends,
        update_s=update,
    )


def _terms_of_kinds(plan: Plan, chain: Chain, profile: Profile, gpus_per_node: int) -> list[Terms]:
    """Return the seconds of one block of each kind of a chain, for the plan's configuration."""
    a, row = plan.assignment, plan_as_config(plan)
    dtype = next(p.info.dtype for p in a.tensors.values() if not p.info.is_buffer)
    return [
        terms(
            row,
            kind,
            profile,
            gpus_per_node,
            plan.spec.precision,
            dtype=dtype,
            exchanges=a.context is not None and a.context.attention == "all_to_all",
            order=order_of(plan.mesh.sizes),
        )
        for kind in chain.kinds
    ]
