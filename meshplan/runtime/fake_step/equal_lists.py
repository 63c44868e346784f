"""Lists of equal blocks, and models in which some of them are left out."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Final

from torch import nn

from meshplan.memory.repeat.extrapolate import Blocks
from meshplan.plan.plan import Plan

LEAST: Final = 3
"""Periods that the smallest model keeps: a first one, a last one, and one in the middle."""
_LISTS: Final = (nn.ModuleList, nn.Sequential)
_SCALARS: Final = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True)
class Repeats:
    """The blocks that can be left out of a model.

    Args:
        blocks: The lists, and the number of blocks after which they repeat.
        counts: Number of blocks in each list.
    """

    blocks: Blocks
    counts: tuple[int, ...]

    @property
    def spare(self) -> int:
        """Number of periods that can be left out of every list."""
        return min(self.counts) // self.blocks.period - LEAST


def repeats_of(model: nn.Module, plan: Plan) -> Repeats | None:
    """Return the lists of blocks that are equal in model and plan; None if none is long enough.

    Assumes: Blocks whose modules, parameters, plain attributes and layouts are equal do the same.
    """
    decisions = list(_decisions(plan))
    found: dict[str, tuple[int, int]] = {}
    for fqn, blocks in model.named_modules():
        is_list = isinstance(blocks, _LISTS) and len(blocks) >= 2 * LEAST
        if not is_list or any(fqn.startswith(f"{other}.") for other in found):
            continue
        planned = _signs_of_plan(decisions, fqn, len(blocks))
        period = _period([*zip(planned, _signs_of_modules(blocks), strict=True)])
        if period is not None:
            found[fqn] = (len(blocks), period)
    if not found:
        return None
    period = math.lcm(*(each for _, each in found.values()))
    return Repeats(Blocks(tuple(found), period), tuple(count for count, _ in found.values()))


def cut(model: nn.Module, lists: tuple[str, ...], num: int) -> None:
    """Remove the last `num` blocks of each list, in place."""
    for fqn in lists:
        blocks: Any = model.get_submodule(fqn)
        del blocks[len(blocks) - num :]


def is_alike(whole: Plan, small: Plan) -> bool:
    """Return True if the plan for the model with fewer blocks decides the same for the rest."""
    names = {*small.graph.modules, *small.assignment.tensors}
    of_both = [[each for each in _decisions(p) if each[0] in names] for p in (whole, small)]
    a, b = whole.assignment, small.assignment
    return (
        sorted(map(repr, of_both[0])) == sorted(map(repr, of_both[1]))
        and (a.mesh, a.wrapper, a.strategy) == (b.mesh, b.wrapper, b.strategy)
        and (whole.accumulate, whole.micro) == (small.accumulate, small.micro)
    )


def _period(signs: list[Hashable]) -> int | None:
    """Return the number of entries after which a list repeats, at most a third of it, or None."""
    for period in range(1, len(signs) // LEAST + 1):
        if all(a == b for a, b in zip(signs, signs[period:], strict=False)):
            return period
    return None


def _signs_of_plan(decisions: list[_Decision], fqn: str, count: int) -> list[Hashable]:
    """Return what a plan decides for each block of a list."""
    inside = Blocks((fqn,))
    out: list[list[Hashable]] = [[] for _ in range(count)]
    for name, said, others in decisions:
        _, number, rest = inside.split(name)
        if number is None:
            continue
        own = f"{fqn}.{number}" if fqn else str(number)
        told = tuple(
            other[len(own) :] if other == own or other.startswith(f"{own}.") else f"{other}!"
            for other in others
        )
        out[number].append((rest, said, told))
    return [tuple(each) for each in out]


_Decision = tuple[str, Hashable, tuple[str, ...]]


def _decisions(plan: Plan) -> Iterator[_Decision]:
    """For every tensor and module, yield (fqn, all that is decided, the fqns that it refers to)."""
    a = plan.assignment
    for fqn, p in a.tensors.items():
        said = (
            p.info.shape, p.info.dtype, p.info.trainable, str(p.stored), str(p.computed),
            str(p.gradient), p.dtype, p.compute_dtype, p.gathered_axes, p.reduced_alone, p.is_local,
            p.unit is None,
        )  # fmt: skip
        yield fqn, said, (*p.info.aliases, *(() if p.unit is None else (p.unit,)))
    for fqn, unit in a.units.items():
        kept = unit.reshard_after_forward
        said_of = (unit.shard_axes, unit.replicate_axes, kept, unit.precision, unit.casts_inputs)
        yield fqn, said_of, ()
    for fqn, use in a.styles.items():
        yield fqn, (use.style.name, use.axis, use.pieces, use.is_written), ()
    for fqn, again in a.recompute.items():
        yield fqn, again.policy, ()
    for fqn, experts in a.experts.items():
        yield fqn, experts.num_experts, ()
    for each in a.attributes:
        yield each.module, (each.name, each.whole, each.local), ()
    for fqn in a.compiled:
        yield fqn, "compiled", ()
    for fqn in a.synchronized:
        yield fqn, "synchronized", ()
    for fqn, code, _ in a.apply:
        yield fqn, code, ()


def _signs_of_modules(blocks: Any) -> list[Hashable]:
    """Return what each block consists of: its modules, their tensors and their plain attributes.

    An attribute that only counts the blocks is not included.
    """
    rows = [dict(_numbers(block)) for block in blocks]
    counting = {
        key for key in rows[0]
        if any(all(row.get(key) == n + first for n, row in enumerate(rows)) for first in (0, 1))
    }  # fmt: skip
    return [
        (
            tuple((fqn, type(m)) for fqn, m in block.named_modules()),
            tuple((n, tuple(p.shape), p.dtype) for n, p in block.named_parameters()),
            tuple((n, tuple(b.shape), b.dtype) for n, b in block.named_buffers()),
            tuple(item for item in row.items() if item[0] not in counting),
        )
        for block, row in zip(blocks, rows, strict=True)
    ]


def _numbers(block: nn.Module) -> Iterator[tuple[tuple[str, str], Hashable]]:
    """Yield the plain attributes of a block's modules, and the functions that they hold."""
    for fqn, module in block.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, _SCALARS):
                yield (fqn, name), value
            elif isinstance(value, tuple | list | set) and all(
                isinstance(each, _SCALARS) for each in value
            ):
                yield (fqn, name), repr(value)
            elif isinstance(value, FunctionType):
                yield (fqn, name), (value.__module__, value.__qualname__)
