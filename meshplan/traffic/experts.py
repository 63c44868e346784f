"""Predict the traffic of expert parallelism.

Each call of an expert module sends three things to the ranks of the experts: the number of tokens
for each expert, the tokens, and their router weights. Results come back, and in backward gradients
go the opposite ways. One row of a tensor is sent for each slot, which is a token with one of the
experts chosen for it.

The rows that a rank sends of its own tokens do not depend on the routing. The rows that it sends
back for slots it received do: `Routed` has their bounds, unless the number of slots is known.

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
"""The number of slots that a rank receives in each call, in order, by fqn of an expert module."""


def dispatch(plan: Plan, forward: Forward, arrivals: Arrivals | None) -> Iterator[Traffic]:
    """Yield the all-to-alls of expert modules along ep, for all microbatches.

    Args:
        plan: The plan.
        forward: The recorded forward of one microbatch.
        arrivals: Received slots of each call, microbatch by microbatch; None if not known.

    Raises:
        ValueError: `arrivals` does not have one entry for each call of each microbatch.
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
            # Recomputation stops at the last tensor that autograd saved in the forward. An expert
            # module saves the order of the received tokens last, so everything is sent again.
            needs_backward = bool(call.outputs and call.outputs[0].needs_grad)
            times = 1 + (needs_backward and is_repeated(plan, forward, fqn, call.begin))
            what = f"how many tokens go to each expert of {fqn}"
            num_bytes = use.num_experts * COUNT_BYTES
            yield one(plan.mesh, "all_to_all", ("ep",), num_bytes, what, times * plan.accumulate)
            own = None if came is None else came[number :: len(calls)]
            yield from _tokens(plan, call, arguments, times, own)


def unknown_experts(plan: Plan, forward: Forward | None) -> Iterator[str]:
    """Yield a line of text, with the reason, for each traffic along ep that cannot be predicted."""
    if plan.mesh.size("ep") == 1:
        return
    for fqn in plan.assignment.experts:
        if forward is None:
            yield f"what the experts of '{fqn}' are sent (needs a recorded forward)"
        elif any(_arguments(call) is None for call in forward.of(fqn)):
            yield f"what '{fqn}' is sent (its arguments do not show which are the router's weights)"


def _arguments(call: ModuleVisit) -> tuple[TensorUse, TensorUse, TensorUse] | None:
    """Return (tokens, expert indices, router weights) among a call's inputs; None if ambiguous."""
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
    """Yield the all-to-alls of one call, except that of the number of tokens for each expert.

    Args:
        plan: The plan.
        call: The call of the expert module.
        arguments: Its tokens, expert indices and router weights.
        times: Number of times that the forward runs: 2 if it is recomputed, else 1.
        came: Slots that this rank receives, by microbatch; None if not known.
    """
    tokens, index, weights = arguments
    slots, result = math.prod(index.shape), call.outputs[0]

    def sent(row_bytes: int, what: str, times: int) -> Traffic:
        """Return the traffic of one row for each slot of this rank's own tokens."""
        count = times * plan.accumulate
        return one(plan.mesh, "all_to_all", ("ep",), slots * row_bytes, what, count)

    def returned(row_bytes: int, what: str, times: int) -> Iterator[Traffic]:
        """Yield the traffic of one row for each received slot; balanced routing if not known."""
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
