"""Projections that are sharded one by one, if no pair can be: each all-gathers its output.

The input and output of such a module are whole, so no operation of the rest of the forward has to
be known: shapes may depend on values, and operations may have no sharding rule. But each projection
costs an all-gather, while a pair of projections costs one all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable

from meshplan.assign.auto.regions import FlowUses

_SHARE = 2
"""These projections must have at least 1 in this many of the model's trainable elements; with fewer
tp is not worth its ranks.
"""


def projections(flow_uses: FlowUses, size: int, may_cut: Callable[[str], bool]) -> list[str]:
    """Return the fqns of projections to shard along their output; [] if they have too few elements.

    Args:
        flow_uses: The recorded forward.
        size: Number of ranks of tp.
        may_cut: Function that returns True if the plan lets `auto` decide about a module.
    """
    graph = flow_uses.graph
    found = [fqn for fqn in graph.modules if _can_be_cut(flow_uses, fqn, size) and may_cut(fqn)]
    cut = sum(t.numel for fqn in found for t in graph.owned(fqn) if t.trainable)
    total = sum(t.numel for t in graph.parameters if t.trainable)
    return found if found and _SHARE * cut >= total else []


def _can_be_cut(flow_uses: FlowUses, fqn: str, size: int) -> bool:
    info, tensors = flow_uses.graph.modules[fqn], flow_uses.graph.owned(fqn)
    if info.kind not in ("linear", "conv1d") or fqn not in flow_uses.calls:
        return False
    weight = next((t for t in tensors if t.fqn == f"{fqn}.weight" and "out" in t.dims), None)
    if weight is None or weight.shape[weight.dims.index("out")] % size or flow_uses.does_more(info):
        return False
    return not any(len(t.names) > 1 or flow_uses.used_outside(t, {fqn}) for t in tensors)
