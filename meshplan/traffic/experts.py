"""The traffic of experts that are spread over ranks.

Each call sends how many tokens go to each expert, the tokens and their weights, and brings back
results; gradients go the way back. What a rank sends of its own tokens does not depend on the
routing. What it sends of the tokens that came to it does: `Routed` says within which bounds.

Source: `runtime.expert`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from meshplan.graph import DTYPE_BYTES
from meshplan.plan import Plan
from meshplan.traffic.forward import Forward, Seen, Visit
from meshplan.traffic.tensor_parallel import is_repeated
from meshplan.traffic.types import Routed, Traffic, one

COUNT_BYTES = DTYPE_BYTES["int64"]


def dispatch(plan: Plan, forward: Forward) -> Iterator[Traffic]:
    """What calls of spread experts send along ep, for all microbatches."""
    if plan.mesh.size("ep") == 1:
        return
    for fqn, use in plan.assignment.experts.items():
        for call in forward.of(fqn):
            arguments = _arguments(call)
            if arguments is None:
                continue  # Named by `unknown_experts`.
            # Whatever comes before the last thing that autograd keeps is done again, and the
            # order in which tokens came is kept last.
            again = bool(call.outputs and call.outputs[0].needs_grad)
            times = 1 + (again and is_repeated(plan, forward, fqn, call.begin))
            what = f"how many tokens go to each expert of {fqn}"
            num_bytes = use.num_experts * COUNT_BYTES
            yield one(plan.mesh, "all_to_all", ("ep",), num_bytes, what, times * plan.accumulate)
            yield from _tokens(plan, call, arguments, times)


def unknown_experts(plan: Plan, forward: Forward | None) -> Iterator[str]:
    """Why this cannot be told."""
    if plan.mesh.size("ep") == 1:
        return
    for fqn in plan.assignment.experts:
        if forward is None:
            yield f"what the experts of '{fqn}' are sent, without a record of the forward"
        elif any(_arguments(call) is None for call in forward.of(fqn)):
            yield f"what '{fqn}' is sent: which of its arguments are weights cannot be told"


def _arguments(call: Visit) -> tuple[Seen, Seen, Seen] | None:
    """Tokens, expert indices and weights among what the module was given; None if unclear."""
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
    plan: Plan, call: Visit, arguments: tuple[Seen, Seen, Seen], times: int
) -> Iterator[Traffic]:
    tokens, index, weights = arguments
    slots, result = math.prod(index.shape), call.outputs[0]
    parts = [
        (_row_bytes(tokens.shape[-1], tokens), tokens.needs_grad, f"tokens of {call.fqn}"),
        (_row_bytes(1, weights), weights.needs_grad, f"weights of {call.fqn}"),
    ]
    for row_bytes, needs_grad, what in parts:
        yield _sent(plan, slots, row_bytes, what, times)
        yield _returned(plan, slots, row_bytes, f"gradients of {what}", int(needs_grad))
    row_bytes, what = _row_bytes(result.shape[-1], result), f"results of {call.fqn}"
    yield _returned(plan, slots, row_bytes, what, times)
    yield _sent(plan, slots, row_bytes, f"gradients of {what}", int(result.needs_grad))


def _row_bytes(width: int, tensor: Seen) -> int:
    return width * DTYPE_BYTES[tensor.dtype]


def _sent(plan: Plan, slots: int, row_bytes: int, what: str, times: int) -> Traffic:
    """One row for each slot of this rank's own tokens, wherever they go."""
    count = times * plan.accumulate
    return one(plan.mesh, "all_to_all", ("ep",), slots * row_bytes, what, count)


def _returned(plan: Plan, slots: int, row_bytes: int, what: str, times: int) -> Traffic:
    """One row for each slot that came here: as many as left, if the routing is balanced."""
    balanced = _sent(plan, slots, row_bytes, what, times)
    routed = Routed(row_bytes, plan.mesh.size("ep") * slots)
    return Traffic(route=balanced.route, count=balanced.count, what=what, routed=routed)
