"""Projections that are sharded by themselves, if nothing pairs up: each gathers its output.

The input and output of such a module are whole, so the rest of the forward is that of one process,
whatever it does: shapes that depend on values, unknown operations, squares in a residual stream.
Each costs an all-gather, where a pair would cost one all-reduce for two.
"""

from __future__ import annotations

from collections.abc import Callable

from meshplan.assign.auto.regions import FlowUses

_SHARE = 2
"""Minimum share, as 1 in this many, of the trainable elements that these projections must have for
tp to be worth its ranks."""


def projections(places: FlowUses, size: int, may_cut: Callable[[str], bool]) -> list[str]:
    """Find projections that can be sharded by output features; [] if they have too few elements."""
    graph = places.graph
    found = [fqn for fqn in graph.modules if _can_be_cut(places, fqn, size) and may_cut(fqn)]
    cut = sum(t.numel for fqn in found for t in graph.owned(fqn) if t.trainable)
    total = sum(t.numel for t in graph.parameters if t.trainable)
    return found if found and _SHARE * cut >= total else []


def _can_be_cut(places: FlowUses, fqn: str, size: int) -> bool:
    info, tensors = places.graph.modules[fqn], places.graph.owned(fqn)
    if info.kind not in ("linear", "conv1d") or fqn not in places.calls:
        return False
    weight = next((t for t in tensors if t.fqn == f"{fqn}.weight" and "out" in t.dims), None)
    if weight is None or weight.shape[weight.dims.index("out")] % size or places.does_more(info):
        return False
    return not any(len(t.names) > 1 or places.used_outside(t, {fqn}) for t in tensors)
