"""Turn recorded microbatches of a live model into a `Chain` of blocks for the planner.

Microbatches with n and with n + 1 samples separate work per sample from work per microbatch. A
chain has a place for each block, one before them and one after them. The loss, and operators
after the last block, count in the last place; all other operators outside of blocks count in the
first. Blocks with equal records are of one kind.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from torch import nn

from meshplan.assign.axes.stage_starts import StageStarts, stage_starts
from meshplan.cost.types import BlockKind, Chain, Sent, Tally
from meshplan.errors import Origin, PlanError, Problem
from meshplan.layout.dtypes import DTYPE_BYTES
from meshplan.layout.mesh import UNIT_AXES
from meshplan.memory.log.microbatch import HookKind, MicrobatchTrace
from meshplan.plan.plan import Plan
from meshplan.planner.space.trials import with_axes
from meshplan.runtime.fake_step.costs import MicrobatchCosts
from meshplan.runtime.fake_step.kernels import OperatorWork
from meshplan.traffic.pipeline import crossing_values, sent_bytes

FIRST: Final = ""
LAST: Final = "loss"
"""Names of the two places of a chain that are no blocks: the first and the last."""
Kept = Mapping[str, tuple[int, int]]
_NOTHING_SENT: Final = Sent()
_HARDLY: Final = 0.02
"""Share of the FLOPs whose speed may be unknown, since estimated times are no more accurate."""


class Traces(NamedTuple):
    """Recorded microbatches with the same number of samples.

    Attributes:
        samples: Number of samples.
        plain: The microbatch without recomputation.
        recomputed: The microbatch with every block recomputed; the same as `plain` if there are no
            blocks.
        kept: For each block ("" outside of blocks), bytes that it has saved for backward when the
            loss is computed, as (without recomputation, with it).
        backward_bytes: For each block, the most bytes that exist while its backward runs, without
            those that earlier blocks saved, as (without recomputation, with it).
    """

    samples: int
    plain: MicrobatchCosts
    recomputed: MicrobatchCosts
    kept: Kept
    backward_bytes: Kept


class Staged(NamedTuple):
    """The places where pipeline stages may cut a model, and the bytes that they send.

    Attributes:
        starts: The blocks that a stage can begin with.
        boundary_bytes: Bytes that a stage sends to the next one, for one sample: the most of all
            cuts.
    """

    starts: StageStarts
    boundary_bytes: float

    def place_of(self, fqn: str) -> str:
        """Return the place of the chain that a parameter outside of the blocks belongs to."""
        home, blocks = self.starts.homes[fqn], self.starts.blocks
        return LAST if blocks and home == blocks[-1] else home


def staged_of(plan: Plan) -> Staged:
    """Return where pipeline stages may cut the model of a plan, and what they send.

    If the plan has stages, the cuts between them count, too: they need not be at blocks.
    """
    flow = plan.graph.flow
    assert flow is not None
    starts = stage_starts(with_axes(plan.spec, {"pp": 2}), plan.graph)
    stated = () if plan.assignment.stages is None else crossing_values(plan)
    (_, first), *_ = flow.inputs
    most = max((sent_bytes(plan, each) for each in (*starts.crossing.values(), *stated)), default=0)
    return Staged(starts, most / flow.values[first].shape[0])


def chain_of(plan: Plan, one: Traces, two: Traces | None, staged: Staged | None = None) -> Chain:
    """Return the chain of a model from microbatches with two numbers of samples.

    Args:
        plan: The plan under which the microbatches were recorded.
        one: Microbatches with n samples.
        two: Microbatches with n + 1 samples. If None, n is 1, and the costs are those of
            microbatches with one sample only.
        staged: Where pipeline stages may cut the model; None for the chain without a pipeline.
    """
    samples = one.samples
    order = _order(one.plain.trace, plan.graph.blocks())
    sizes = _numels(plan, order, one.plain.trace.gradients.keys(), staged)
    is_staged = staged is not None
    plain, recomputed = (
        [
            _shares(getattr(traces, name), order, is_staged)
            for traces in (one, two)
            if traces is not None
        ]
        for name in ("plain", "recomputed")
    )
    nothing = (0, 0)
    found = []
    for name in (FIRST, *order, LAST):
        # In a pipeline it is not known which stage saves what is computed outside of the blocks.
        counted = () if is_staged and name not in order else (0, 1)
        kept = [
            _for_each([t.kept.get(name, nothing)[recompute] for t in (one, two) if t], samples)
            for recompute in counted
        ] or [0.0, 0.0]
        forward = _tally([share[False, name] for share in plain], samples)
        backward = _tally([share[True, name] for share in plain], samples)
        pairs = zip(recomputed, plain, strict=True)
        more = [a[True, name].less(p[True, name]) for a, p in pairs]
        repeated, sent_again = _tally(more, samples), _sent(more, samples)
        held = sizes[name]
        none = Tally()
        kind = BlockKind(
            name="",
            has_options=name in order,
            numels=held.numels,
            frozen=held.frozen,
            forward=forward,
            backward=backward,
            recompute=(none, none, repeated if name in order else none),
            sent_forward=_sent([share[False, name] for share in plain], samples),
            sent_backward=_sent([share[True, name] for share in plain], samples),
            sent_recompute=(*(_NOTHING_SENT,) * 2, sent_again if name in order else _NOTHING_SENT),
            saved_bytes=(kept[0], kept[0], kept[1]),
            transient_bytes=(0.0, 0.0, 0.0),
            boundary_bytes=staged.boundary_bytes if staged is not None else 0.0,
        )
        found.append(kind)
    backward_bytes = tuple(_backward_bytes(one, two, name) for name in (FIRST, *order, LAST))
    return replace(_chain(found, order, staged), backward_bytes=backward_bytes)


def chain_as_run(plan: Plan, counted: MicrobatchCosts, staged: Staged | None = None) -> Chain:
    """Return the chain of a model from one microbatch that was counted under its plan.

    Recomputation is counted as backward. The bytes that blocks save for backward are 0, because
    they are not counted.

    Args:
        plan: The plan that was run, without pp and cp; maybe with ep.
        counted: The counts of one microbatch under the plan.
        staged: Where pipeline stages may cut the model; None for the chain without a pipeline.
    """
    order = _order_run(counted)
    sizes = _numels(plan, order, counted.trace.gradients.keys(), staged)
    shares = _shares(counted, order, staged is not None)
    boundary = counted.input_bytes / (plan.micro or 1)
    none, samples = Tally(), plan.micro or 1
    width = min(DTYPE_BYTES[dtype] for dtype in plan.assignment.compute_dtypes)
    found = []
    for name in (FIRST, *order, LAST):
        forward, backward = shares[False, name], shares[True, name]
        held = sizes[name]
        # Forward reads each parameter once. Backward reads it once more and writes its gradient.
        numel = sum(held.numels)
        read, written = numel * width, (numel - held.frozen) * width
        found.append(
            BlockKind(
                name="",
                has_options=name in order,
                numels=held.numels,
                frozen=held.frozen,
                expert_numel=held.expert_numel,
                num_experts=held.num_experts,
                forward=_tally_of(forward, samples, read),
                backward=_tally_of(backward, samples, read + written),
                recompute=(none, none, none),
                sent_forward=_sent_of(forward, samples),
                sent_backward=_sent_of(backward, samples),
                sent_recompute=(_NOTHING_SENT,) * 3,
                saved_bytes=(0.0, 0.0, 0.0),
                transient_bytes=(0.0, 0.0, 0.0),
                boundary_bytes=boundary if staged is None else staged.boundary_bytes,
                context_bytes=forward.context_bytes / samples,
                exchanged_bytes=forward.exchanged_bytes / samples,
            )
        )
    return _chain(found, order, staged)


def _chain(found: Sequence[BlockKind], order: Sequence[str], staged: Staged | None) -> Chain:
    """Return the chain of places, where equal ones are of one kind, named after the first of them.

    Args:
        found: The costs of the first place, of each block of `order`, and of the last place.
        order: Fqns of the blocks.
        staged: Where pipeline stages may cut the model; None for the chain without a pipeline.
    """
    kinds: dict[BlockKind, BlockKind] = {}
    each = [
        kinds.setdefault(kind, replace(kind, name=name))
        for kind, name in zip(found, (FIRST, *order, LAST), strict=True)
    ]
    distinct = list(kinds.values())
    return Chain(
        kinds=tuple(distinct),
        order=tuple(distinct.index(kind) for kind in each),
        names=("", *order, ""),
        starts=() if staged is None else (True, *(n in staged.starts.blocks for n in order), False),
        saves_outputs=staged is not None,
    )


def check_speed(
    model: nn.Module,
    plan: Plan,
    *,
    flops: float,
    convolved: float,
    unknown: Collection[str],
    origin: Origin | None,
    report: Callable[[str], None],
) -> None:
    """Check that the speed of a model's operators is known.

    Args:
        model: The model, whose class the message names.
        plan: The plan that was run.
        flops: FLOPs of matrix products, convolutions and attention.
        convolved: Share of `flops` that are convolutions, from 0 to 1.
        unknown: Names of operators outside of aten, whose FLOPs are not known.
        origin: Place where the user named the model; None if the user passed the model itself.
        report: Called with one line if operators have unknown FLOPs.

    Raises:
        PlanError: The model has no FLOPs, or a notable share of them are float32 convolutions.
    """
    name = type(model).__name__
    if not flops:
        what = f"{name} has no matrix multiplication or convolution, so there is nothing to time"
        fix = "state every choice in the plan instead of auto, and run meshplan estimate"
        raise PlanError(Problem(what, origin, fix))
    if plan.assignment.compute_dtypes == {"float32"} and convolved > _HARDLY:
        what = f"{name} convolves in float32, for which cuDNN uses TF32 at an unknown speed"
        fix = "choose a precision that computes in bfloat16 or float16, such as bf16-mixed"
        raise PlanError(Problem(what, plan.spec.origin("precision"), fix))
    if unknown:
        names = ", ".join(sorted(unknown))
        report(f"the FLOPs of {names} are unknown: only the bytes that they move are counted")


def _backward_bytes(one: Traces, two: Traces | None, name: str) -> tuple[float, ...]:
    """Return `Chain.backward_bytes` of one place: bytes per sample, by option of recompute.

    The options are those of `cost.grid.RECOMPUTE`; selective counts as none. Return () if a place
    was not recorded.
    """
    each = [traces for traces in (one, two) if traces is not None]
    if any(name not in traces.backward_bytes for traces in each):
        return ()
    plain, recomputed = (
        max(traces.backward_bytes[name][recompute] / traces.samples for traces in each)
        for recompute in (0, 1)
    )
    return plain, plain, recomputed


def _order(trace: MicrobatchTrace, blocks: Collection[str]) -> list[str]:
    """Return the blocks in the order of their first forward. Blocks that never run are left out."""
    began = (point.unit for point in trace.hook_points if point.kind == HookKind.BEFORE_FORWARD)
    return list(dict.fromkeys(unit for unit in began if unit in blocks))


def _order_run(counted: MicrobatchCosts) -> list[str]:
    """Return the blocks in the order in which they ran.

    A block that was left out is at the place of the equal block that ran instead.
    """
    ran = [at.block for at in counted.done if at.block and not at.is_backward]
    at = {block: number for number, block in enumerate(dict.fromkeys(ran))}
    there = [block for block, shown in counted.shown.items() if shown in at]
    return sorted(there, key=lambda block: at[counted.shown[block]])


def _shares(
    seen: MicrobatchCosts, order: Sequence[str], is_staged: bool
) -> Mapping[tuple[bool, str], OperatorWork]:
    """Return work by (True for backward, place of the chain).

    A block that was left out gets the work of the equal block that ran instead.

    Args:
        seen: The record of a microbatch.
        order: Fqns of the blocks, in the order of their first forward.
        is_staged: If True, work between two blocks counts in the first of them, since it is in that
            stage; if False, it counts in the first place.
    """
    by_shown: dict[str, list[str]] = {}
    for block in order:
        by_shown.setdefault(seen.shown[block], []).append(block)
    before = dict(zip(order, (FIRST, *order), strict=False))
    out: dict[tuple[bool, str], OperatorWork] = defaultdict(OperatorWork)

    def add(is_backward: bool, name: str, done: OperatorWork) -> None:
        out[is_backward, name] = out[is_backward, name].plus(done)

    for where, done in seen.done.items():
        blocks = by_shown.get(where.block, [])
        if not blocks:
            at_end = where.is_backward and not where.block
            add(where.is_backward, LAST if at_end else FIRST, done)
        for block in blocks:
            is_last = where.is_after and not where.is_backward and block == order[-1]
            between = LAST if is_last else FIRST
            if is_staged and not is_last:
                # What runs after a block's backward is what runs before its forward.
                between = before[block] if where.is_backward else block
            add(where.is_backward, between if where.is_after else block, done)
    return out


class _Held(NamedTuple):
    """The parameters of one place of a chain, on one rank of tp and ep.

    Attributes:
        numels: Elements of each.
        frozen: Elements of those without a gradient.
        expert_numel: Elements of those that ep shards.
        num_experts: Number of experts that ep leaves on the rank.
    """

    numels: tuple[int, ...] = ()
    frozen: int = 0
    expert_numel: int = 0
    num_experts: int = 0


def _numels(
    plan: Plan, order: Sequence[str], trained: Collection[str], staged: Staged | None
) -> Mapping[str, _Held]:
    """Return the parameters by place.

    A parameter belongs to the innermost block around its unit.
    If there is none, it belongs to the first place, since the root unit gathers it; in a pipeline,
    to the first or last place or to the first block of the stage that needs it.
    """
    out = {name: _Held() for name in (FIRST, *order, LAST)}
    experts, ep = plan.assignment.experts, plan.mesh.size("ep")
    counted: set[str] = set()
    for fqn, placed in plan.assignment.tensors.items():
        if placed.info.is_buffer:
            continue
        name = placed.unit or ""
        while name and name not in out:
            name = name.rpartition(".")[0]
        if not name and staged is not None:
            name = staged.place_of(fqn)
        # Shard over tp and ep only; the cost model divides by the data axes itself.
        layout = placed.stored.without(*UNIT_AXES)
        numel = layout.local_numel(placed.info.shape, plan.mesh)
        held, module = out[name], fqn.rpartition(".")[0]
        use = experts.get(module) if ep > 1 else None
        new = use.num_experts // ep if use is not None and module not in counted else 0
        counted.add(module)
        out[name] = _Held(
            (*held.numels, numel),
            held.frozen + (0 if fqn in trained else numel),
            held.expert_numel + (numel if use is not None else 0),
            held.num_experts + new,
        )
    return out


def _for_each(kept: Sequence[int], samples: int) -> float:
    """Return bytes per sample, of which n samples never overestimate the bytes of n samples.

    Args:
        kept: Bytes of a microbatch with `samples` samples, and of one with `samples` + 1, if any.
        samples: Number of samples of the first.
    """
    if len(kept) == 1:
        return kept[0] / samples
    one, two = kept
    # Bytes are linear in the samples: constant + n * slope >= n * (slope + min(constant, 0)).
    slope = two - one
    constant = one - samples * slope
    return float(slope + min(constant, 0))


def _tally(done: Sequence[OperatorWork], samples: int) -> Tally:
    """Return a tally that separates the work per sample from the work once per microbatch.

    Args:
        done: Work of a microbatch with `samples` samples, and of one with `samples` + 1. Without
            the second, all work of the first is work per sample.
        samples: Number of samples of the first microbatch.
    """
    if len(done) == 1:
        return _tally_of(done[0], samples, 0.0)
    # The difference is the work of one sample. What remains of the first is done once.
    one, two = done
    each = OperatorWork(*(max(0.0, b - a) for a, b in zip(one, two, strict=True)))
    once = OperatorWork(*(max(0.0, a - samples * b) for a, b in zip(one, each, strict=True)))
    return Tally(
        kernels=max(0.0, one.kernels),
        flops=each.flops + once.flops,
        attention_flops=each.attention_flops + once.attention_flops,
        product_bytes=each.product_bytes,
        moved_bytes=each.moved_bytes,
        weight_bytes=once.product_bytes + once.moved_bytes,
    )


def _tally_of(done: OperatorWork, samples: int, weight_bytes: float) -> Tally:
    """Return the tally, per sample, of a microbatch.

    Args:
        done: Work of the microbatch.
        samples: Number of samples in the microbatch.
        weight_bytes: Bytes of parameters that products read, and of gradients that they write. They
            count once per microbatch.
    """
    once = min(weight_bytes, done.product_bytes)
    return Tally(
        kernels=done.kernels,
        flops=done.flops / samples,
        attention_flops=done.attention_flops / samples,
        product_bytes=(done.product_bytes - once) / samples,
        moved_bytes=done.moved_bytes / samples,
        weight_bytes=once,
    )


def _sent_of(done: OperatorWork, samples: int) -> Sent:
    return Sent(
        all_reduces=round(done.all_reduces),
        all_reduce_bytes=done.all_reduce_bytes / samples,
        gathers=round(done.gathers),
        gather_bytes=done.gather_bytes / samples,
        all_to_alls=round(done.all_to_alls),
        all_to_all_bytes=done.all_to_all_bytes / samples,
        statistics=round(done.statistics),
        statistics_bytes=done.statistics_bytes,
    )


def _sent(done: Sequence[OperatorWork], samples: int) -> Sent:
    """Return the communication of tp: the number of collectives, and their bytes.

    Args:
        done: Work of a microbatch with `samples` samples, and of one with `samples` + 1. Without
            the second, all work of the first is work per sample.
        samples: Number of samples of the first microbatch.
    """
    if len(done) == 1:
        return _sent_of(done[0], samples)
    one, two = done

    def parts(first: float, second: float) -> tuple[float, float]:
        """Return (bytes for one sample, bytes whatever the number of samples)."""
        slope = max(0.0, second - first)
        return slope, max(0.0, first - samples * slope)

    all_reduce, all_reduce_once = parts(one.all_reduce_bytes, two.all_reduce_bytes)
    gather, gather_once = parts(one.gather_bytes, two.gather_bytes)
    return Sent(
        all_reduces=max(0, round(one.all_reduces)),
        all_reduce_bytes=all_reduce,
        all_reduce_once_bytes=all_reduce_once,
        gathers=max(0, round(one.gathers)),
        gather_bytes=gather,
        gather_once_bytes=gather_once,
    )
