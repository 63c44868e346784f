"""A live model as a chain of blocks, from microbatches that were watched.

Two numbers of samples tell what grows with them and what does not. What lies in no block, before,
between and after them, is of the first place, and the loss with what follows the last block of the
last one: nothing is left out. Blocks of which the trace says the same are of one kind.
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
"""Of what lies in no block."""
Kept = Mapping[str, tuple[int, int]]
_NOTHING_SENT: Final = Sent()
_HARDLY: Final = 0.02
"""Share of the flops that may be priced as something else: no price is good to that."""


class Traces(NamedTuple):
    """Of one number of samples.

    Attributes:
        plain: Nothing runs again.
        again: Every block does; the same as `plain` where there are no blocks.
        kept: By block ("" for none), bytes in the loss: plain, and run again.
        turns: By block, the most that its backward holds beside what blocks before it keep.
    """

    samples: int
    plain: MicrobatchCosts
    again: MicrobatchCosts
    kept: Kept
    turns: Kept


def chain_of(plan: Plan, one: Traces, two: Traces) -> Chain:
    """The chain of a model.

    Args:
        plan: With its units.
        one, two: Of numbers of samples that differ by one.
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
            _for_each(one.kept.get(name, nothing)[way], two.kept.get(name, nothing)[way], samples)
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
    """The chain of a microbatch that was counted: what runs again in backward is backward's.

    Args:
        plan: That was run: without pp and cp.

    The bytes that blocks keep are not in it.
    """
    order = _order_run(counted)
    sizes, shares = _numels(plan, order, counted.trained), _shares(counted, order)
    none, samples = Tally(), plan.micro or 1
    width = min(DTYPE_BYTES[dtype] for dtype in plan.assignment.compute_dtypes)
    found = []
    for name in (FIRST, *order, LAST):
        forward, backward = shares[False, name], shares[True, name]
        numels, frozen = sizes[name]
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
    """Blocks of which the same is known are of one kind, named for the first of them."""
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
    told: Callable[[str], None],
) -> None:
    """Refuse a model of whose operators nobody knows how fast they run.

    Args:
        plan: That was run.
        flops: Of products and convolutions.
        convolved: Share of them that are a convolution's.
        unknown: Operators of others.
        origin: Where the user named the model.
        told: Is told of operators whose flops are not known.

    Raises:
        PlanError: Nothing in it is a product, or some of it is a convolution in float32.
    """
    name = type(model).__name__
    if not flops:
        what = f"{name} has no product of matrices, and no convolution"
        fix = "nothing says then how long a step takes: state all, and ask meshplan estimate"
        raise PlanError(Problem(what, origin, fix))
    if plan.assignment.compute_dtypes == {"float32"} and convolved > _HARDLY:
        what = f"{name} convolves in float32: cuDNN does that in TF32"
        fix = "how fast is not known: choose a precision that computes in bfloat16 or float16"
        raise PlanError(Problem(what, plan.spec.origin("precision"), fix))
    if unknown:
        names = ", ".join(sorted(unknown))
        told(f"how much {names} computes is not known: counted is what it moves")


def _turn(one: Traces, two: Traces, name: str) -> tuple[float, ...]:
    """Of a place: for each sample, by what runs again."""
    if name not in one.turns or name not in two.turns:
        return ()
    plain, again = (
        max(one.turns[name][way] / one.samples, two.turns[name][way] / two.samples)
        for way in (0, 1)
    )
    return plain, plain, again


def _order(work: MicrobatchTrace, blocks: Collection[str]) -> list[str]:
    """The blocks as they run for the first time; those that nobody saw begin are of no block."""
    began = (mark.unit for mark in work.marks if mark.moment == HookKind.BEFORE_FORWARD)
    return list(dict.fromkeys(unit for unit in began if unit in blocks))


def _order_run(counted: Counted) -> list[str]:
    """The blocks in the order in which those that stand for them ran; others are of no block."""
    ran = [at.block for at in counted.done if at.block and not at.is_backward]
    at = {block: number for number, block in enumerate(dict.fromkeys(ran))}
    there = [block for block, shown in counted.shown.items() if shown in at]
    return sorted(there, key=lambda block: at[counted.shown[block]])


def _shares(
    seen: MicrobatchCosts | Counted, order: Sequence[str]
) -> Mapping[tuple[bool, str], OperatorWork]:
    """What is done by (whether backward runs, place): alike blocks do what was seen of one."""
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
    """By place, the elements of each parameter, and how many of them get no gradient.

    What is in no unit of a block is gathered with the root's.
    """
    numels: dict[str, list[int]] = {name: [] for name in (FIRST, *order, LAST)}
    frozen = dict.fromkeys(numels, 0)
    for fqn, placed in plan.assignment.tensors.items():
        if placed.info.is_buffer:
            continue
        name = placed.unit or ""
        while name and name not in numels:
            name = name.rpartition(".")[0]
        # What this rank of tp has of it; the data axes are the cost model's affair.
        layout = placed.stored.without(*UNIT_AXES)
        numel = layout.local_numel(placed.info.shape, plan.mesh)
        numels[name].append(numel)
        frozen[name] += 0 if fqn in trained else numel
    return {name: (tuple(each), frozen[name]) for name, each in numels.items()}


def _for_each(one: int, two: int, samples: int) -> float:
    """Bytes so that for any number of samples so much each is no more than there is."""
    slope = two - one
    constant = one - samples * slope
    return float(slope + min(constant, 0))


def _tally(done: Sequence[OperatorWork], samples: int) -> Tally:
    """What each sample takes, and what is done once.

    Args:
        done: With so many samples, and with one more.
    """
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
    """The tally of a microbatch of so many samples.

    Args:
        weight_bytes: That products read of parameters, and write of their gradients.
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
