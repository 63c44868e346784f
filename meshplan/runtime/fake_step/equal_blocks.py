"""Find runs of equal blocks in a model, and shorten the model to a few blocks of each run.

Two blocks are equal if their modules have the same classes, their tensors have the same shapes and
dtypes, no attribute differs except the block's own number, and the plan treats them equally. Equal
blocks could still behave differently, so their traces are compared (`memory.repeat.repeat_blocks`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, Final, TypeVar

import torch
from torch import nn

from meshplan.assign import Assignment
from meshplan.assign.base.types import LocalAttribute, SequenceBoundary
from meshplan.memory.repeat.repeat_blocks import KEPT, BlocksDifferError, RepeatedBlocks
from meshplan.model.graph import is_inside
from meshplan.plan.plan import Plan
from meshplan.runtime.fake_step.memory_tracker import MemoryTracker
from meshplan.runtime.torch_private.values import tensors_with_gradient

T = TypeVar("T", LocalAttribute, SequenceBoundary)

_LEAST: Final = KEPT + 2
"""Fewest periods of a run for which leaving some out is worth it."""
_LONGEST_PERIOD: Final = 8
_DEPTH: Final = 3
"""Levels of nesting to which attributes that are not modules are compared."""


def runs_of(model: nn.Module, plan: Plan) -> list[RepeatedBlocks]:
    """Return the longest run of equal blocks of each ModuleList or Sequential.

    Lists inside the container of another run are skipped.
    """
    out: list[RepeatedBlocks] = []
    for fqn, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        if any(is_inside(fqn, run.container) for run in out):
            continue
        run = _run(fqn, list(module.children()), plan)
        if run is not None:
            out.append(run)
    return out


class _Number(int):
    """The number of a block, such as `layer_idx`, which records each computation with it.

    A block whose code computes with its number may behave differently from its neighbours. The
    shortened model lacks most of the numbers, so its trace would then be wrong.
    """

    used: list[int]

    def __deepcopy__(self, memo: Any) -> _Number:
        return self


def _recording(name: str) -> Any:
    plain = getattr(int, name)

    def record(self: _Number, *others: Any) -> Any:
        self.used.append(int.__index__(self))
        return plain(self, *others)

    return record


for _name in (
    "eq", "ne", "lt", "le", "gt", "ge", "add", "radd", "sub", "rsub", "mul", "rmul", "mod", "rmod",
    "floordiv", "truediv", "pow", "and", "or", "xor", "bool", "float",
):  # fmt: skip
    setattr(_Number, f"__{_name}__", _recording(f"__{_name}__"))
_Number.__hash__ = int.__hash__  # type: ignore[method-assign]


@contextmanager
def shortened(model: nn.Module, runs: Sequence[RepeatedBlocks]) -> Iterator[list[int]]:
    """Shorten a model to `KEPT` periods of each run inside the `with` block.

    Yields:
        A list to which each block number that the model's code computes with is appended, while it
        runs. If the list is not empty, the run is not valid for the whole model.
    """
    before = {}
    labels: list[tuple[dict[str, Any], str, int]] = []
    used: list[int] = []
    try:
        for run in runs:
            container = model.get_submodule(run.container)
            before[run.container] = container._modules
            labels += _labels(list(container.children()), run)
            kept = [
                (place, child)
                for name, child in container._modules.items()
                if (place := run.kept(int(name))) is not None
            ]
            container._modules = {str(place): child for place, child in kept}
        for attributes, key, value in labels:
            attributes[key] = number = _Number(value)
            number.used = used
        yield used
    finally:
        for attributes, key, value in labels:
            attributes[key] = value
        for fqn, modules in before.items():
            model.get_submodule(fqn)._modules = modules


def shown_of(blocks: Sequence[str], runs: Sequence[RepeatedBlocks]) -> dict[str, str]:
    """Map each block of the whole model to the block that runs for it in the short model."""
    out = {}
    for block in blocks:
        shown = block
        for run in runs:
            place = run.place_of(block)
            if place is not None:
                shown = run.at(block, run.shown(place))
        out[block] = shown
    return out


def short_plan(plan: Plan, runs: Sequence[RepeatedBlocks]) -> Plan:
    """Return the plan for the short model: left-out blocks are dropped, the others renumbered."""

    def name(fqn: str) -> str | None:
        for run in runs:
            place = run.place_of(fqn)
            if place is None:
                continue
            kept = run.kept(place)
            return None if kept is None else _renumbered(run, fqn, place, kept)
        return fqn

    def named(items: Mapping[str, Any]) -> Mapping[str, Any]:
        return MappingProxyType({new: v for f, v in items.items() if (new := name(f)) is not None})

    def names(fqns: Sequence[str]) -> tuple[str, ...]:
        return tuple(new for fqn in fqns if (new := name(fqn)) is not None)

    def moved(items: tuple[T, ...]) -> tuple[T, ...]:
        return tuple(
            replace(each, module=new) for each in items if (new := name(each.module)) is not None
        )

    whole = plan.assignment
    tensors = {
        fqn: replace(
            placed,
            info=replace(placed.info, fqn=fqn, aliases=names(placed.info.aliases)),
            unit=None if placed.unit is None else name(placed.unit),
        )
        for fqn, placed in named(whole.tensors).items()
    }
    short: Assignment = replace(
        whole,
        tensors=MappingProxyType(tensors),
        units=named({f: replace(u, fqn=name(f) or "") for f, u in whole.units.items()}),
        styles=named(whole.styles),
        recompute=named(whole.recompute),
        experts=named(whole.experts),
        host_activations=named(whole.host_activations),
        results=named(whole.results),
        attributes=moved(whole.attributes),
        crossings=moved(whole.crossings),
        compiled=names(whole.compiled),
        synchronized=names(whole.synchronized),
    )
    return replace(plan, assignment=short)


class Edges:
    """Records at which events the periods of a short model's run begin, in forward and backward.

    Args:
        model: The short model, on which hooks are registered.
        run: The run of equal blocks.
        tracker: The memory tracker that numbers the events.
    """

    def __init__(self, model: nn.Module, run: RepeatedBlocks, tracker: MemoryTracker) -> None:
        self._run, self._tracker = run, tracker
        self.clear()
        for period in range(KEPT):
            at = run.first + period * run.period
            first, last = (
                model.get_submodule(f"{run.container}.{place}" if run.container else str(place))
                for place in (at, at + run.period - 1)
            )
            first.register_forward_pre_hook(partial(self._enter, period), prepend=True)
            last.register_forward_hook(partial(self._leave, period))

    def clear(self) -> None:
        """Discard the record of the last microbatch."""
        self._entered: list[tuple[int, int]] = []
        self._left = 0
        self._back: dict[int, int] = {}
        self._end: int | None = None

    def found(self, num_left_out: int) -> RepeatedBlocks:
        """Return the run with the recorded events.

        Args:
            num_left_out: Number of earlier events that the trace leaves out. It is subtracted from
                the recorded indices.

        Raises:
            BlocksDifferError: The periods did not run once each, one after the other.
        """
        order = sorted(self._back, key=lambda period: self._back[period])
        if [p for p, _ in self._entered] != list(range(KEPT)) or order[::-1] != list(range(KEPT)):
            raise BlocksDifferError(
                f"{self._run.container}: its blocks do not run one after the other"
            )
        forward = (*(event for _, event in self._entered), self._left)
        backward = tuple(self._back[period] for period in order)
        backward += (self._end if self._end is not None else backward[-1],)
        return replace(
            self._run,
            forward=tuple(event - num_left_out for event in forward),
            backward=tuple(event - num_left_out for event in backward),
        )

    def _enter(self, period: int, module: nn.Module, args: Any) -> None:
        self._entered.append((period, self._tracker.num_events))
        if not period:
            for tensor in tensors_with_gradient(args):
                tensor.register_hook(self._end_backward)

    def _leave(self, period: int, module: nn.Module, args: Any, output: Any) -> None:
        self._left = self._tracker.num_events
        for tensor in tensors_with_gradient(output):
            tensor.register_hook(partial(self._begin_backward, period))

    def _begin_backward(self, period: int, gradient: torch.Tensor) -> None:
        self._back.setdefault(period, self._tracker.num_events)

    def _end_backward(self, gradient: torch.Tensor) -> None:
        self._end = self._tracker.num_events if self._end is None else self._end


def _labels(
    blocks: Sequence[nn.Module], run: RepeatedBlocks
) -> Iterator[tuple[dict[str, Any], str, int]]:
    """Yield (attributes of a module, name, value) of each attribute that is its block's number.

    An int attribute is the block's number if it differs between equal blocks.
    """
    first, other = blocks[run.first], blocks[run.first + run.period]
    for (name, one), next_one in zip(first.named_modules(), other.modules(), strict=True):
        for key, value in vars(one).items():
            if type(value) is int and value != vars(next_one)[key]:
                for block in blocks:
                    attributes = vars(block.get_submodule(name)) if _has(block, name) else {}
                    if type(attributes.get(key)) is int:
                        yield attributes, key, attributes[key]


def _has(block: nn.Module, name: str) -> bool:
    return any(name == inner for inner, _ in block.named_modules())


def _renumbered(run: RepeatedBlocks, fqn: str, place: int, kept: int) -> str:
    prefix = f"{run.container}." if run.container else ""
    return f"{prefix}{kept}{fqn[len(prefix) + len(str(place)) :]}"


def _run(container: str, blocks: list[nn.Module], plan: Plan) -> RepeatedBlocks | None:
    if len(blocks) < _LEAST or len(set(map(id, blocks))) < len(blocks):
        return None
    known: dict[int, Any] = {}

    def decisions(place: int) -> Any:
        if place not in known:
            known[place] = _decisions_for(f"{container}.{place}" if container else str(place), plan)
        return known[place]

    def is_over(at: int, before: int) -> bool:
        """Return True if the block at index `at` is missing or differs from the one at `before`."""
        if at == len(blocks) or not is_alike(blocks[before], blocks[at], at - before):
            return True
        return decisions(at) is None or bool(decisions(at) != decisions(before))

    # Take the shortest period for which any run is long enough, and its longest run.
    best: RepeatedBlocks | None = None
    for period in range(1, min(_LONGEST_PERIOD, len(blocks) // _LEAST) + 1):
        first = 0
        for at in range(period, len(blocks) + 1):
            if is_over(at, at - period):
                count = (at - first) // period
                if count >= _LEAST and (best is None or count * period > best.count * best.period):
                    best = RepeatedBlocks(container, first, period, count)
                first = at - period + 1
        if best is not None:
            return best
    return None


def _decisions_for(block: str, plan: Plan) -> Any:
    """Return all of the plan's decisions for a block, by names relative to the block.

    Return None if a tensor of the block is tied to a tensor outside of it.
    """
    a = plan.assignment

    def inside(items: Mapping[str, Any]) -> dict[str, Any]:
        return {fqn[len(block) :]: v for fqn, v in items.items() if is_inside(fqn, block)}

    def own(fqn: str | None) -> str | None:
        return fqn[len(block) :] if fqn is not None and is_inside(fqn, block) else fqn

    tensors = inside(a.tensors)
    for placed in tensors.values():
        if not all(is_inside(name, block) for name in placed.info.names):
            return None
    return (
        {
            fqn: (p.info.shape, p.info.dtype, p.info.trainable, p.stored, p.computed, p.dtype,
                  p.compute_dtype, p.gathered_axes, p.reduced_alone, own(p.unit), p.is_local)
            for fqn, p in tensors.items()
        },
        {
            fqn: (u.shard_axes, u.replicate_axes, u.reshard_after_forward, u.precision,
                  u.casts_inputs)
            for fqn, u in inside(a.units).items()
        },
        {fqn: (s.style, s.axis, s.pieces, s.is_written) for fqn, s in inside(a.styles).items()},
        {fqn: r.policy for fqn, r in inside(a.recompute).items()},
        {fqn: x.num_experts for fqn, x in inside(a.experts).items()},
        {(x.module[len(block) :], x.name): (x.whole, x.local)
         for x in a.attributes if is_inside(x.module, block)},
        [(x.module[len(block) :], x.path, x.change)
         for x in a.crossings if is_inside(x.module, block)],
        inside(a.results),
        [f[len(block) :] for f in (*a.compiled, *a.synchronized, *a.host_activations)
         if is_inside(f, block)],
    )  # fmt: skip


def is_alike(
    one: nn.Module, other: nn.Module, step: int = 0, but: frozenset[str] = frozenset()
) -> bool:
    """Return True if two modules are equal in all but their tensors' values and their number.

    Args:
        one: The first module.
        other: The second module.
        step: Index of `other` in its list minus that of `one`; int attributes may differ by it.
        but: Names of attributes that are not compared.
    """
    ones, others = list(one.named_modules()), list(other.named_modules())
    return len(ones) == len(others) and all(
        name == other_name and _has_alike(left, right, step, but)
        for (name, left), (other_name, right) in zip(ones, others, strict=True)
    )


def _has_alike(one: nn.Module, other: nn.Module, step: int, but: frozenset[str]) -> bool:
    if type(one) is not type(other):
        return False
    left, right = (
        # Keys of hooks are unique, so compare their values. Children are compared separately.
        {
            key: list(value.values()) if "_hooks" in key and isinstance(value, dict) else value
            for key, value in vars(module).items()
            if key != "_modules" and "_hooks_" not in key and key not in but
        }
        for module in (one, other)
    )
    return left.keys() == right.keys() and all(
        _is_same(left[key], right[key], step, _DEPTH) for key in left
    )


def _is_same(one: Any, other: Any, step: int, depth: int) -> bool:
    """Return True if two attributes are equal, or differ by `step` as the numbers of two blocks."""
    if one is other:
        return True
    if type(one) is not type(other) or depth < 0:
        return False
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype
    if isinstance(one, nn.Module):
        return True  # A module inside the block is compared under its own name.
    if isinstance(one, int):
        is_number = depth == _DEPTH and not isinstance(one, bool)
        return bool(one == other or (is_number and other == one + step))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(
            _is_same(one[key], other[key], step, depth - 1) for key in one
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(
            _is_same(left, right, step, depth - 1) for left, right in zip(one, other, strict=True)
        )
    if isinstance(one, set | frozenset | str | float | complex | bytes):
        return bool(one == other)
    code = getattr(one, "__code__", None)
    if code is not None:  # The same function, created again for each block.
        return bool(code is other.__code__)
    return hasattr(one, "__dict__") and _is_same(vars(one), vars(other), step, depth - 1)
