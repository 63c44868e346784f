"""Predict the traffic of tensor parallelism: activations and gradients of styled modules.

Source: torch 2.13, DTensor's `Redistribute`. Its backward redistributes the gradient from the
placement of the output to that of the input, or to `Replicate` if the input was `Partial`.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from meshplan.assign import Placed, SequenceBoundary, StyleUse
from meshplan.layout.dtypes import DTYPE_BYTES
from meshplan.layout.styles import GATHERED, dims_of
from meshplan.model.graph import is_inside
from meshplan.plan.plan import Plan
from meshplan.traffic.forward import Forward, ModuleVisit, TensorUse
from meshplan.traffic.types import Route, Traffic, one, trainable
from meshplan.traffic.units import Passes, UnitUse

HEADS_TOGETHER = "mha"
"""Kind of nn.MultiheadAttention. The gradients of query, key and value are all-reduced one by one,
or once if all three are the same tensor. If the module is an FSDP unit, FSDP2's hooks make
different tensors of them."""


def unknown_heads_together(plan: Plan, forward: Forward | None) -> Iterator[str]:
    """Yield a line of text for each nn.MultiheadAttention whose traffic cannot be predicted."""
    for fqn, use in plan.assignment.styles.items():
        if use.style.kind != HEADS_TOGETHER or forward is None:
            continue
        if plan.assignment.sequence_parallel or any(len(v.outputs) > 1 for v in forward.of(fqn)):
            yield f"what '{fqn}' sends for its attention weights or for shards of the sequence"


def partial_gradients(plan: Plan, passes: Passes, uses: Mapping[str, UnitUse]) -> Iterator[Traffic]:
    """Yield the all-reduces along tp of gradients that are partial sums on each rank.

    They belong to replicated parameters that are used on shards of activations.

    Args:
        plan: The plan.
        passes: Passes of the step. A gradient in no unit is all-reduced after each backward.
        uses: Gathers and reductions of the units, by fqn. A gradient in a unit is all-reduced
            whenever its unit reduces gradients.
    """
    cuts = "gradient" in plan.assignment.strategy.cuts and not passes.splits
    for placed in trainable(plan):
        if not _has_addends(plan, placed):
            continue
        count = passes.order.count("B")
        if placed.unit is not None:
            # A unit may reduce several times in one backward, but autograd completes this
            # gradient only before the last time, so it counts once.
            ready = [times > 0 for times in uses[placed.unit].reductions]
            is_at_once = cuts and plan.assignment.units[placed.unit].is_sharded
            count = sum(ready if is_at_once else ready[-1:])
        num_bytes = placed.info.numel * DTYPE_BYTES[placed.compute_dtype]
        yield one(plan.mesh, "all_reduce", ("tp",), num_bytes, placed.info.fqn, count)


def _has_addends(plan: Plan, placed: Placed) -> bool:
    """Return True if a parameter's gradient on each rank of tp is only one addend of a sum."""
    if placed.stored.dim_of("tp") is not None:
        return False
    if placed.is_local:
        return True
    for name in placed.info.names:
        fqn, _, leaf = name.rpartition(".")
        use = plan.assignment.styles.get(fqn)
        if use is None:
            continue
        style = use.style
        dims = dims_of(style.kind, leaf, len(placed.info.shape))
        is_cut = style.cut_dim in dims or style.kind == HEADS_TOGETHER
        if style.gradient == "P" or (use.pieces and is_cut):
            return True  # The rank uses a slice of it, or the style states partial sums.
        if style.cut_dim is None and style.input[1] != "R":
            return True
    return False


def gathered_at_use(plan: Plan, forward: Forward) -> Iterator[Traffic]:
    """Yield the all-gathers of parameters that are stored sharded over tp but computed with whole.

    Each call of a module that has the parameter gathers it.
    """
    for placed in plan.assignment.tensors.values():
        if not placed.gathered_axes:
            continue
        dim = placed.stored.dim_of("tp") or 0
        num_bytes = _whole_bytes(placed.info.shape, dim, plan.mesh.size("tp"), placed)
        owners = {name.rpartition(".")[0] for name in placed.info.names}
        calls = [call for call in forward.calls if call.fqn in owners]
        times = len(calls) + sum(is_repeated(plan, forward, call.fqn, call.begin) for call in calls)
        count = times * plan.accumulate
        yield one(plan.mesh, "all_gather", ("tp",), num_bytes, placed.info.fqn, count)


def _whole_bytes(shape: Sequence[int], dim: int, ranks: int, placed: Placed) -> int:
    """Return the bytes of a tensor whose size in `dim` is rounded up to a multiple of `ranks`."""
    sizes = list(shape)
    sizes[dim] = -(-sizes[dim] // ranks) * ranks
    return math.prod(sizes) * DTYPE_BYTES[placed.compute_dtype]


def is_repeated(plan: Plan, forward: Forward, fqn: str, event: int) -> bool:
    """Return True if recomputation repeats what a module does at an event of the forward.

    A recomputed forward stops as soon as it has made the last tensor that autograd saved, so later
    events are not repeated.
    """
    recomputed = plan.assignment.recompute
    around = next((outer for outer in recomputed if is_inside(fqn, outer)), None)
    if around is None:
        return False
    for outer in forward.of(around):
        if outer.begin <= event <= outer.end:
            kept = [save for save in forward.saves if outer.begin < save < outer.end]
            return bool(kept) and event < kept[-1]
    return False


def _keeps_sums(plan: Plan, fqn: str) -> bool:
    """Return True if a checkpoint around a module saves the results of all-reduces."""
    policies = plan.assignment.recompute.items()
    return any(
        recompute.policy.keeps_sums for outer, recompute in policies if is_inside(fqn, outer)
    )


def activations(plan: Plan, forward: Forward) -> Iterator[Traffic]:
    """Yield the traffic along tp of inputs and outputs of styled modules, forward and backward."""
    return _Activations(plan, forward).traffic()


class _Activations:
    """Counts the traffic of activations and their gradients along tp, call by call."""

    def __init__(self, plan: Plan, forward: Forward) -> None:
        self.plan, self.forward, self.tp = plan, forward, plan.mesh.size("tp")
        self.outside = "S(1)" if plan.assignment.sequence_parallel else "R"
        self.weights: Mapping[str, Placed] = {
            name.rpartition(".")[0]: placed
            for placed in plan.assignment.tensors.values()
            for name in placed.info.names
        }
        self.crossings: dict[str, list[SequenceBoundary]] = {}
        for crossing in plan.assignment.crossings:
            self.crossings.setdefault(crossing.module, []).append(crossing)
        owners = {placed.unit for placed in plan.assignment.tensors.values()}
        self.units = [call for call in forward.calls if call.fqn in owners]
        around = {fqn.rpartition(".")[0] for fqn in plan.assignment.styles}
        self.forgotten = sorted(call.end for call in forward.calls if call.fqn in around)
        """Events at which the runtime clears its cache of tp inputs (`forget_entered`), sorted."""
        self.counted: Counter[tuple[Route, str]] = Counter()

    def traffic(self) -> Iterator[Traffic]:
        """Yield the traffic of all calls, over all microbatches."""
        seen: set[tuple[int, int, int]] = set()
        for call in self.forward.calls:
            use = self.plan.assignment.styles.get(call.fqn)
            if use is not None and call.inputs and call.outputs:
                self._input(call, use, seen)
                self._output(call, use)
            for crossing in self.crossings.get(call.fqn, ()):
                self._cross(call, crossing)
        for (route, what), count in self.counted.items():
            yield Traffic(route=route, count=count * self.plan.accumulate, what=what)

    def _unit(self, call: ModuleVisit) -> int:
        """Return the event at which the innermost FSDP unit around a call begins; 0 if none."""
        around = (u.begin for u in self.units if u.begin <= call.begin and call.end <= u.end)
        return max(around, default=0)

    def _words(self, pair: tuple[str, str]) -> tuple[str, str]:
        """Return two layout words of a style, with "outside" replaced by the layout it means."""
        first, second = (self.outside if word == "outside" else word for word in pair)
        return first, second

    def _input(self, call: ModuleVisit, use: StyleUse, seen: set[tuple[int, int, int]]) -> None:
        """Count the traffic of a call's input and of the input's gradient.

        `seen` collects the inputs whose gradient is counted already.
        """
        if use.style.input[0] == GATHERED:
            return  # The operation that gathered the input also reduces its gradient.
        given = call.inputs[0]
        arrives, wanted = self._words(use.style.input)
        self._send(call, given.shape, arrives, wanted, call.begin)
        if not given.needs_grad:
            return
        if use.style.kind == HEADS_TOGETHER:
            distinct = dict(zip(call.sources, call.inputs, strict=True)).values()
            is_unit = any(unit.begin == call.begin for unit in self.units)
            for tensor in call.inputs if is_unit else distinct:
                if tensor.needs_grad:
                    self._send(call, tensor.shape, "P", "R")
            return
        # A sharded module that gets the whole input computes only an addend of the gradient.
        adds_up = use.style.cut_dim is not None or use.style.gradient == "P"
        gradient = "P" if wanted == "R" and adds_up else wanted
        if arrives == wanted:
            # Modules that read the same tensor share one cached DTensor, so autograd adds their
            # gradients and reduces once. They do not share it across FSDP units, whose hooks make a
            # new tensor, nor after the cache was cleared.
            times = bisect.bisect(self.forgotten, call.begin)
            source = (call.sources[0], self._unit(call), times)
            if source in seen:
                return
            seen.add(source)
        self._send(call, given.shape, gradient, arrives)

    def _output(self, call: ModuleVisit, use: StyleUse) -> None:
        """Count the traffic of a call's output and of the output's gradient."""
        made = call.outputs[0]
        computed, leaves = self._words(use.style.output)
        self._send(call, made.shape, computed, leaves, call.end)
        if made.needs_grad:
            self._send(call, made.shape, leaves, "R" if computed == "P" else computed)

    def _cross(self, call: ModuleVisit, crossing: SequenceBoundary) -> None:
        """Count the collectives that gather or slice the sequence, forward and backward."""
        if crossing.path is None:
            self._count(call, call.outputs[0], "all_gather", call.end)
            return
        given = call.inputs[call.paths.index(crossing.path)]
        if crossing.change == "gather":
            self._count(call, given, "all_gather", call.begin)
        if given.needs_grad:
            kind = "reduce_scatter" if crossing.change == "gather" else "all_gather"
            self._count(call, given, kind, None)

    def _count(self, call: ModuleVisit, whole: TensorUse, kind: str, event: int | None) -> None:
        """Count a collective of a whole tensor: an activation at `event`, or a gradient if None."""
        is_twice = event is not None and call.fqn not in self.plan.assignment.recompute
        times = 1 + (is_twice and is_repeated(self.plan, self.forward, call.fqn, event or 0))
        num_bytes = math.prod(whole.shape) * DTYPE_BYTES[whole.dtype]
        direction = "gradients" if event is None else "activations"
        self.counted[Route(kind, ("tp",), num_bytes), f"{direction} of {call.fqn}"] += times

    def _send(
        self,
        call: ModuleVisit,
        shape: tuple[int, ...],
        source: str,
        target: str,
        event: int | None = None,
    ) -> None:
        """Count a change of layout from `source` to `target`, two words of `layout.styles`.

        The tensor is an activation if `event` is given, otherwise a gradient.
        """
        kind, cut = _change(source, target)
        if not kind:
            return
        is_twice = event is not None and is_repeated(self.plan, self.forward, call.fqn, event)
        times = 1 + (is_twice and not (source == "P" and _keeps_sums(self.plan, call.fqn)))
        weight = self.weights[call.fqn]
        num_bytes = math.prod(shape) * DTYPE_BYTES[weight.compute_dtype]
        if cut:
            num_bytes = _whole_bytes(shape, int(cut[2:-1]), self.tp, weight)
        direction = "gradients" if event is None else "activations"
        self.counted[Route(kind, ("tp",), num_bytes), f"{direction} of {call.fqn}"] += times


def _change(source: str, target: str) -> tuple[str, str]:
    """Return (collective, shard placement that it removes or creates); "" stands for none."""
    if source == target or source == "R":
        return "", ""
    if target == "R":
        return ("all_reduce", "") if source == "P" else ("all_gather", source)
    return ("reduce_scatter", target) if source == "P" else ("all_to_all", source)
