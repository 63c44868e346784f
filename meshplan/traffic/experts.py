"""Predict the traffic of experts that are spread over ranks.

Each call sends the number of tokens for each expert, the tokens and their weights, and brings back
results; gradients are sent in the opposite direction. What a rank sends of its own tokens does not
depend on the routing. What it sends of the tokens that it received does: `Routed` gives bounds,
unless the number of received tokens is known.

Source: `runtime.apply.experts.experts`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from meshplan.layout.dtypes import DTYPE_BYTES
from meshplan.plan.plan import Plan
from meshplan.traffic.forward import Forward, ModuleVisit, TensorUse
from meshplan.traffic.tensor_parallel import is_repeated
from meshplan.traffic.types import Routed, Traffic, one

COUNT_BYTES = DTYPE_BYTES["int64"]

Arrivals = Mapping[str, Sequence[int]]
"""For each module of experts, the slots that a rank receives in each of its calls, in order,
microbatch by microbatch."""


def dispatch(plan: Plan, forward: Forward, arrivals: Arrivals | None) -> Iterator[Traffic]:
    """Yield what calls of spread experts send along ep, for all microbatches.

    Raises:
        ValueError: `arrivals` has not one entry for each call of each microbatch.
    """
    if plan.mesh.size("ep") == 1:
        return
    for fqn, use in plan.assignment.experts.items():
        calls = forward.of(fqn)
        came = None if arrivals is None else arrivals[fqn]
        if came is not None and len(came) != len(calls) * plan.accumulate:
            expected = f"{len(calls)} calls in each of {plan.accumulate} microbatches"
            raise ValueError(f"arrivals of {fqn}: {len(came)} entries for {expected}")
        for number, call in enumerate(calls):
            arguments = _arguments(call)
            if arguments is None:
                continue  # Reported by `unknown_experts`.
            # Recomputation stops at the last tensor that autograd saved. The order in which tokens
            # came is saved last, so all of this is sent again.
            again = bool(call.outputs and call.outputs[0].needs_grad)
            times = 1 + (again and is_repeated(plan, forward, fqn, call.begin))
            what = f"how many tokens go to each expert of {fqn}"
            num_bytes = use.num_experts * COUNT_BYTES
            yield one(plan.mesh, "all_to_all", ("ep",), num_bytes, what, times * plan.accumulate)
            own = None if came is None else came[number :: len(calls)]
            yield from _tokens(plan, call, arguments, times, own)


def unknown_experts(plan: Plan, forward: Forward | None) -> Iterator[str]:
    """Yield the parts of this traffic that cannot be predicted, and why."""
    if plan.mesh.size("ep") == 1:
        return
    for fqn in plan.assignment.experts:
        if forward is None:
            yield f"what the experts of '{fqn}' are sent (needs a recorded forward)"
        elif any(_arguments(call) is None for call in forward.of(fqn)):
            yield f"what '{fqn}' is sent (its arguments do not show which are the router's weights)"


def _arguments(call: ModuleVisit) -> tuple[TensorUse, TensorUse, TensorUse] | None:
    """Find tokens, expert indices and weights among a module's inputs; None if ambiguous."""
    indices = [tensor for tensor in call.inputs if tensor.dtype.startswith("int")]
    others = [tensor for tensor in call.inputs if not tensor.dtype.startswith("int")]
    if len(indices) != 1 or len(others) != 2 or not call.outputs:
        return None
    (index,), (tokens, weights) = indices, others
    if tokens.shape == index.shape:
        tokens, weights = weights, tokens
    is_clear = weights.shape == index.shape and tokens.shape != index.shape
    return (tokens, index, weights) if is_clear else None


def _tokens(
    plan: Plan,
    call: ModuleVisit,
    arguments: tuple[TensorUse, TensorUse, TensorUse],
    times: int,
    came: Sequence[int] | None,
) -> Iterator[Traffic]:
    """Yield what one call sends, apart from the counts of tokens per expert.

    Args:
        came: Slots that come to this rank, by microbatch; None if that is not known.
    """
    tokens, index, weights = arguments
    slots, result = math.prod(index.shape), call.outputs[0]

    def sent(row_bytes: int, what: str, times: int) -> Traffic:
        """One row for each slot of this rank's own tokens, wherever it is sent."""
        count = times * plan.accumulate
        return one(plan.mesh, "all_to_all", ("ep",), slots * row_bytes, what, count)

    def returned(row_bytes: int, what: str, times: int) -> Iterator[Traffic]:
        """One row for each slot that came here; as many as were sent if the routing is balanced."""
        if came is not None:
            for rows in came:
                yield one(plan.mesh, "all_to_all", ("ep",), rows * row_bytes, what, times)
            return
        routed = Routed(row_bytes, plan.mesh.size("ep") * slots)
        yield replace(sent(row_bytes, what, times), routed=routed)

    for tensor, width, name in ((tokens, tokens.shape[-1], "tokens"), (weights, 1, "weights")):
        row_bytes, what = width * DTYPE_BYTES[tensor.dtype], f"{name} of {call.fqn}"
        yield sent(row_bytes, what, times)
        yield from returned(row_bytes, f"gradients of {what}", int(tensor.needs_grad))
    row_bytes, what = result.shape[-1] * DTYPE_BYTES[result.dtype], f"results of {call.fqn}"
    yield from returned(row_bytes, what, times)
    yield sent(row_bytes, f"gradients of {what}", int(result.needs_grad))
