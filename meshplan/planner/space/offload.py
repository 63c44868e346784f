"""Offload of the whole model to the host: parameters with their optimizer, activations, or both.

The planner has no figures for the offload of single modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from meshplan.cost.grid import ACTIVATIONS_ON_HOST, DDP, PARAMS_ON_HOST, SHARD
from meshplan.memory.answer.estimate import MemoryEstimate
from meshplan.memory.answer.hosts import host_limit
from meshplan.plan.plan import Plan
from meshplan.spec.spec import AUTO, Offload, Spec
from meshplan.units import format_gib

if TYPE_CHECKING:
    from meshplan.planner.space.space import Freedom

WORDS: Final = {
    "none": 0,
    "params": PARAMS_ON_HOST,
    "activations": ACTIVATIONS_ON_HOST,
    "both": PARAMS_ON_HOST | ACTIVATIONS_ON_HOST,
}
"""{word that a user may write for `offload`: value of the grid's `offload`}."""
ONLY_IN_FULL: Final = (
    "offloaded activations have figures where every block is recomputed in full, only"
)


def stated_offloads(spec: Spec) -> tuple[int, ...]:
    """Return the values of the grid's `offload` that agree with the plan, in increasing order."""
    offload = spec.offload
    params = _open(offload.params, PARAMS_ON_HOST)
    if offload.optimizer in (True, False) and offload.params in (None, AUTO):
        params = (PARAMS_ON_HOST * offload.optimizer,)
    activations = _open(offload.activations, ACTIVATIONS_ON_HOST)
    return tuple(sorted(a | b for a in params for b in activations))


def _open(value: object, bit: int) -> tuple[int, ...]:
    """Return the values that a bit of `offload` may have: both if the plan leaves it open."""
    return (0, bit) if value in (None, AUTO) else (bit * bool(value),)


def as_stated(what: int) -> Offload:
    """Return the spec's `offload` for a value of the grid's `offload`."""
    return Offload(params=bool(what & PARAMS_ON_HOST), activations=bool(what & ACTIVATIONS_ON_HOST))


def offload_words(spec: Spec, what: int) -> dict[str, Any]:
    """Return {path: value} statements that give the plan file this offload; {} if it has it.

    Args:
        spec: The spec of the plan file.
        what: Value of the grid's `offload`.
    """
    offload = spec.offload
    parts = {"params": bool(what & PARAMS_ON_HOST), "activations": bool(what & ACTIVATIONS_ON_HOST)}
    stated = {name: getattr(offload, name) for name in parts}
    if all((now or False) == stated[name] or (not now and stated[name] is None)
           for name, now in parts.items()):  # fmt: skip
        return {} if offload.optimizer != AUTO else {"offload": "none"}
    if not any(parts.values()):
        return {"offload": "none"}
    if parts == {"params": True, "activations": False}:
        return {"offload": "params"}
    return {"offload": {name: True for name, there in parts.items() if there}}


def may_offload(free: Freedom, sizes: Sequence[int], mode: int, what: int) -> bool:
    """Return True if a configuration may have this offload.

    Offloaded parameters need FSDP2, and in a pipeline `Freedom.stages_may_offload`. Without
    offload, FSDP2 over a single data rank has no use if there are several devices.

    Args:
        free: The space.
        sizes: Sizes of pp, dp_replicate, dp_shard and cp.
        mode: Index into `cost.grid.MODES`.
        what: Value of the grid's `offload`.
    """
    pp, _, shard, cp = sizes
    if not what & PARAMS_ON_HOST:
        return mode != SHARD or shard > 1 or free.world == 1
    return mode != DDP and (shard > 1 or cp == 1) and (pp == 1 or free.stages_may_offload)


def over_host(spec: Spec, plan: Plan, memory: MemoryEstimate) -> str | None:
    """Return None if a plan fits into the memory of the nodes' hosts, else a reason.

    Returns:
        None if the plan fits. If it does not: the reason why no plan of the same configuration
        fits, or "" if another plan of the configuration may fit.
    """
    host = memory.host
    if host is None or not host.is_over:
        return None
    # Another cut of the stages may balance the hosts, but it does not change the total.
    is_all = plan.mesh.size("pp") == 1 or host.mean_bytes > host.limit_bytes
    return too_much_on_host(spec) * is_all


def too_much_on_host(spec: Spec) -> str:
    """Return the message that the host's memory is too small for a configuration."""
    is_stated = spec.hardware is not None and spec.hardware.host_memory_bytes is not None
    known = "" if is_stated else ", assumed: hardware.host_memory states it"
    return f"a node's host would hold more than its {format_gib(host_limit(spec.hardware))}{known}"
