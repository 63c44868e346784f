"""A live model as a chain of blocks, from microbatches that were watched.

Two numbers of samples tell what grows with them and what does not. What lies in no block, before,
between and after them, is of the first place, and the loss with what follows the last block of the
last one: nothing is left out. Blocks of which the trace says the same are of one kind.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from meshplan.cost.types import Chain, Kind, Sent, Tally
from meshplan.memory.work import Moment, Work
from meshplan.plan import Plan
from meshplan.runtime.counting import Done
from meshplan.runtime.probe import Seen

FIRST: Final = ""
LAST: Final = "loss"
"""Of what lies in no block."""
Kept = Mapping[str, tuple[int, int]]


class Traces(NamedTuple):
    """Of one number of samples.

    Attributes:
        plain: Nothing runs again.
        again: Every block does; the same as `plain` where there are no blocks.
        kept: By block ("" for none), bytes in the loss: plain, and run again.
        turns: By block, the most that its backward holds beside what blocks before it keep.
    """

    samples: int
    plain: Seen
    again: Seen
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
    kinds: dict[Kind, Kind] = {}
    found = []
    for name in (FIRST, *order, LAST):
        kept = [
            _for_each(one.kept.get(name, nothing)[way], two.kept.get(name, nothing)[way], samples)
            for way in (0, 1)
        ]
        turns = [
            float(max(one.turns[name][way] / samples, two.turns[name][way] / (samples + 1)))
            for way in (0, 0, 1)
            if name in one.turns
        ]
        forward = _tally([share[False, name] for share in plain], samples)
        backward = _tally([share[True, name] for share in plain], samples)
        pairs = zip(again, plain, strict=True)
        repeated = _tally([a[True, name].less(p[True, name]) for a, p in pairs], samples)
        numels, frozen = sizes[name]
        none = Tally()
        kind = Kind(
            name="",
            has_options=name in order,
            numels=numels,
            frozen=frozen,
            forward=forward,
            backward=backward,
            again=(none, none, repeated if name in order else none),
            sent_forward=Sent(),
            sent_backward=Sent(),
            sent_again=(Sent(), Sent(), Sent()),
            saved_bytes=(kept[0], kept[0], kept[1]),
            transient_bytes=(0.0, 0.0, 0.0),
            boundary_bytes=0.0,
            turn_bytes=tuple(turns),
        )
        found.append(kinds.setdefault(kind, replace(kind, name=name)))
    distinct = list(kinds.values())
    return Chain(
        kinds=tuple(distinct),
        order=tuple(distinct.index(kind) for kind in found),
        names=("", *order, ""),
    )


def _order(work: Work, blocks: Collection[str]) -> list[str]:
    """The blocks as they run for the first time; those that nobody saw begin are of no block."""
    began = (mark.unit for mark in work.marks if mark.moment == Moment.BEFORE_FORWARD)
    return list(dict.fromkeys(unit for unit in began if unit in blocks))


def _shares(seen: Seen, order: Sequence[str]) -> Mapping[tuple[bool, str], Done]:
    """What is done by (whether backward runs, place): alike blocks do what was seen of one."""
    by_shown: dict[str, list[str]] = {}
    for block in order:
        by_shown.setdefault(seen.shown[block], []).append(block)
    out: dict[tuple[bool, str], Done] = defaultdict(Done)

    def add(is_backward: bool, name: str, done: Done) -> None:
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
        numels[name].append(placed.info.numel)
        frozen[name] += 0 if fqn in trained else placed.info.numel
    return {name: (tuple(each), frozen[name]) for name, each in numels.items()}


def _for_each(one: int, two: int, samples: int) -> float:
    """Bytes so that for any number of samples so much each is no more than there is."""
    slope = two - one
    constant = one - samples * slope
    return float(slope + min(constant, 0))


def _tally(done: Sequence[Done], samples: int) -> Tally:
    """What each sample takes, and what is done once.

    Args:
        done: With so many samples, and with one more.
    """
    one, two = done
    each = Done(*(max(0.0, b - a) for a, b in zip(one, two, strict=True)))
    once = Done(*(max(0.0, a - samples * b) for a, b in zip(one, each, strict=True)))
    return Tally(
        kernels=max(0.0, one.kernels),
        flops=each.flops + once.flops,
        attention_flops=each.attention_flops + once.attention_flops,
        product_bytes=each.product_bytes,
        moved_bytes=each.moved_bytes,
        weight_bytes=once.product_bytes + once.moved_bytes,
    )
