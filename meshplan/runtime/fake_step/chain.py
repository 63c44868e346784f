"""Turn recorded microbatches of a live model into a `Chain` of blocks for the planner.

Two numbers of samples separate what grows with the samples from what does not. Work outside of all
blocks belongs to the first place; the loss, and what follows the last block, to the last place. So
nothing is left out. Blocks with equal records are of one kind.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from torch import nn

from meshplan.cost.types import BlockKind, Chain, Sent, Tally
from meshplan.errors import Origin, PlanError, Problem
from meshplan.layout.dtypes import DTYPE_BYTES
from meshplan.layout.mesh import UNIT_AXES
from meshplan.memory.log.microbatch import HookKind, MicrobatchTrace
from meshplan.plan.plan import Plan
from meshplan.runtime.fake_step.costs import MicrobatchCosts
from meshplan.runtime.fake_step.kernels import Counted, OperatorWork

FIRST: Final = ""
LAST: Final = "loss"
"""Names of the two places for work that lies in no block."""
Kept = Mapping[str, tuple[int, int]]
_NOTHING_SENT: Final = Sent()
_HARDLY: Final = 0.02
"""Share of the FLOPs that may be priced as something else, as no price is more accurate than that.
"""


class Traces(NamedTuple):
    """Microbatches with one number of samples.

    Attributes:
        samples: Number of samples.
        plain: The microbatch without recomputation.
        again: The microbatch with every block recomputed; the same as `plain` if there are no
            blocks.
        kept: For each block ("" for none), bytes saved when the loss is computed: (plain,
            recomputed).
        turns: For each block, the most bytes of its backward in addition to what blocks before it
            save: (plain, recomputed).
    """

    samples: int
    plain: MicrobatchCosts
    again: MicrobatchCosts
    kept: Kept
    turns: Kept


def chain_of(plan: Plan, one: Traces, two: Traces) -> Chain:
    """Return the chain of a model.

    Args:
        plan: The plan whose units were recorded.
        one: Microbatches with some number of samples.
        two: Microbatches with one sample more.
    """
    samples = one.samples
    order = _order(one.plain.work, plan.graph.blocks())
    sizes = _numels(plan, order, one.plain.work.gradients.keys())
    plain = [_shares(traces.plain, order) for traces in (one, two)]
    again = [_shares(traces.again, order) for traces in (one, two)]
    nothing = (0, 0)
    found = []
    for name in (FIRST, *order, LAST):
        kept = [
            _for_each(
                one.kept.get(name, nothing)[way],
                two.kept.get(name, nothing)[way],
                samples,
            )
            for way in (0, 1)
        ]
        forward = _tally([share[False, name] for share in plain], samples)
        backward = _tally([share[True, name] for share in plain], samples)
        pairs = zip(again, plain, strict=True)
        repeated = _tally([a[True, name].less(p[True, name]) for a, p in pairs], samples)
        numels, frozen = sizes[name]
        none = Tally()
        kind = BlockKind(
            name="",
            has_options=name in order,
            numels=numels,
            frozen=frozen,
            forward=forward,
            backward=backward,
            again=(none, none, repeated if name in order else none),
            sent_forward=_NOTHING_SENT,
            sent_backward=_NOTHING_SENT,
            sent_again=(_NOTHING_SENT,) * 3,
            saved_bytes=(kept[0], kept[0], kept[1]),
            transient_bytes=(0.0, 0.0, 0.0),
            boundary_bytes=0.0,
        )
        found.append(kind)
    turns = tuple(_turn(one, two, name) for name in (FIRST, *order, LAST))
    return replace(_chain(found, order), turns=turns)


def chain_as_run(plan: Plan, counted: Counted) -> Chain:
    """Return the chain of a microbatch as it was counted; recomputation is part of backward.

    Args:
        plan: The plan that was run, without pp and cp.
        counted: The counts of one microbatch under the plan.

    It does not contain the bytes that blocks save for backward.
    """
    order = _order_run(counted)
    sizes, shares = _numels(plan, order, counted.trained), _shares(counted, order)
    none, samples = Tally(), plan.micro or 1
    width = min(DTYPE_BYTES[dtype] for dtype in plan.assignment.compute_dtypes)
    found = []
    for name in (FIRST, *order, LAST):
        forward, backward = shares[False, name], shares[True, name]
        numels, frozen = sizes[name]
        # Forward reads every parameter; backward reads it again, and writes its gradient.
        read, written = sum(numels) * width, (sum(numels) - frozen) * width
        found.append(
            BlockKind(
                name="",
                has_options=name in order,
                numels=numels,
                frozen=frozen,
                forward=_tally_of(forward, samples, read),
                backward=_tally_of(backward, samples, read + written),
                again=(none, none, none),
                sent_forward=_sent_of(forward, samples),
                sent_backward=_sent_of(backward, samples),
                sent_again=(_NOTHING_SENT,) * 3,
                saved_bytes=(0.0, 0.0, 0.0),
                transient_bytes=(0.0, 0.0, 0.0),
                boundary_bytes=counted.handed_bytes / samples,
                context_bytes=forward.context_bytes / samples,
                exchanged_bytes=forward.exchanged_bytes / samples,
            )
        )
    return _chain(found, order)


def _chain(found: Sequence[BlockKind], order: Sequence[str]) -> Chain:
    """Group blocks with equal numbers into kinds, each named after its first block."""
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
    """Refuse a model if the speed of its operators is not known.

    Args:
        model: The model, which names the problem.
        plan: The plan that was run.
        flops: FLOPs of products and convolutions.
        convolved: Share of them that are convolutions.
        unknown: Names of operators outside of aten.
        origin: Place where the user named the model; None if there is none.
        report: Progress callback; reports operators whose FLOPs are not known.

    Raises:
        PlanError: The model has no products, or computes convolutions in float32.
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


def _turn(one: Traces, two: Traces, name: str) -> tuple[float, ...]:
    """Return `Chain.turns` of one place: bytes for one sample, by what is recomputed."""
    if name not in one.turns or name not in two.turns:
        return ()
    plain, again = (
        max(
            one.turns[name][way] / one.samples,
            two.turns[name][way] / two.samples,
        )
        for way in (0, 1)
    )
    return plain, plain, again


def _order(work: MicrobatchTrace, blocks: Collection[str]) -> list[str]:
    """Return the blocks in the order of their first forward, without those that never begin."""
    began = (mark.unit for mark in work.marks if mark.moment == HookKind.BEFORE_FORWARD)
    return list(dict.fromkeys(unit for unit in began if unit in blocks))


def _order_run(counted: Counted) -> list[str]:
    """Return the blocks in the order in which they, or the blocks run in their place, ran."""
    ran = [at.block for at in counted.done if at.block and not at.is_backward]
    at = {block: number for number, block in enumerate(dict.fromkeys(ran))}
    there = [block for block, shown in counted.shown.items() if shown in at]
    return sorted(there, key=lambda block: at[counted.shown[block]])


def _shares(
    seen: MicrobatchCosts | Counted, order: Sequence[str]
) -> Mapping[tuple[bool, str], OperatorWork]:
    """Return work by (is backward, place); equal blocks get the work of the one that ran."""
    by_shown: dict[str, list[str]] = {}
    for block in order:
        by_shown.setdefault(seen.shown[block], []).append(block)
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
            add(where.is_backward, between if where.is_after else block, done)
    return out


def _numels(
    plan: Plan, order: Sequence[str], trained: Collection[str]
) -> Mapping[str, tuple[tuple[int, ...], int]]:
    """For each place, return the elements of each parameter, and how many of them get no gradient.

    Parameters in no unit of a block are gathered with the root's.
    """
    numels: dict[str, list[int]] = {name: [] for name in (FIRST, *order, LAST)}
    frozen = dict.fromkeys(numels, 0)
    for fqn, placed in plan.assignment.tensors.items():
        if placed.info.is_buffer:
            continue
        name = placed.unit or ""
        while name and name not in numels:
            name = name.rpartition(".")[0]
        # Shard over tp only; the cost model divides by the data axes itself.
        layout = placed.stored.without(*UNIT_AXES)
        numel = layout.local_numel(placed.info.shape, plan.mesh)
        numels[name].append(numel)
        frozen[name] += 0 if fqn in trained else numel
    return {name: (tuple(each), frozen[name]) for name, each in numels.items()}


def _for_each(one: int, two: int, samples: int) -> float:
    """Return bytes per sample that overestimate no number of samples."""
    # For n >= 1, constant + n * slope is at least n * (slope + min(constant, 0)).
    slope = two - one
    constant = one - samples * slope
    return float(slope + min(constant, 0))


def _tally(done: Sequence[OperatorWork], samples: int) -> Tally:
    """Separate the work per sample from the work done once.

    Args:
        done: Work with `samples` samples, and with one more.
        samples: Number of samples of the first.
    """
    # The difference is the work of one sample; the rest of `one` is done once per microbatch.
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
    """Return the tally of a microbatch with `samples` samples.

    Args:
        done: Work of the microbatch.
        samples: Number of its samples.
        weight_bytes: Bytes that products read of parameters and write of their gradients.
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
    )
