"""What may lie on the host: of the whole model, parameters with their optimizer, activations, both.

What single modules offload the planner has no figures for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from meshplan.cost.grid import ACTIVATIONS_THERE, MODES, PARAMS_THERE
from meshplan.memory.answer.estimate import MemoryEstimate
from meshplan.memory.answer.hosts import host_limit
from meshplan.plan.plan import Plan
from meshplan.spec.spec import AUTO, Offload, Spec
from meshplan.units import format_gib

if TYPE_CHECKING:
    from meshplan.planner.space.space import Freedom

WORDS: Final = {
    "none": 0,
    "params": PARAMS_THERE,
    "activations": ACTIVATIONS_THERE,
    "both": PARAMS_THERE | ACTIVATIONS_THERE,
}
"""How one asks for each."""
ONLY_IN_FULL: Final = (
    "offloaded activations have figures where every block is recomputed in full, only"
)
_DDP, _SHARD = MODES.index("ddp"), MODES.index("shard")


def stated_offloads(spec: Spec) -> tuple[int, ...]:
    """What the plan leaves open, as values of the grid's `offload`; 0 first, if it is one."""
    offload = spec.offload
    params = _open(offload.params, PARAMS_THERE)
    if offload.optimizer in (True, False) and offload.params in (None, AUTO):
        params = (PARAMS_THERE * offload.optimizer,)
    activations = _open(offload.activations, ACTIVATIONS_THERE)
    return tuple(sorted(a | b for a in params for b in activations))


def _open(value: object, bit: int) -> tuple[int, ...]:
    return (0, bit) if value in (None, AUTO) else (bit * bool(value),)


def as_stated(what: int) -> Offload:
    """A spec's words for it."""
    return Offload(params=bool(what & PARAMS_THERE), activations=bool(what & ACTIVATIONS_THERE))


def offload_words(spec: Spec, what: int) -> dict[str, Any]:
    """Return what the plan file would have to say, by path; {} where it says so already."""
    offload = spec.offload
    parts = {"params": bool(what & PARAMS_THERE), "activations": bool(what & ACTIVATIONS_THERE)}
    stated = {name: getattr(offload, name) for name in parts}
    if all((now or False) == stated[name] or (not now and stated[name] is None)
           for name, now in parts.items()):  # fmt: skip
        return {} if offload.optimizer != AUTO else {"offload": "none"}
    if not any(parts.values()):
        return {"offload": "none"}
    if parts == {"params": True, "activations": False}:
        return {"offload": "params"}
    return {"offload": {name: True for name, there in parts.items() if there}}


def offload_of(plan: Plan) -> int:
    """What of a whole plan lies on the host, as in the grid; of a part of the model, nothing."""
    a = plan.assignment
    full = {fqn for fqn, again in a.recompute.items() if again.policy.mode == "full"}
    blocks = set(plan.graph.blocks())
    there = PARAMS_THERE * (bool(a.units) and all(unit.on_host for unit in a.units.values()))
    waits = bool(blocks) and blocks == a.host_activations.keys() and blocks <= full
    return there | ACTIVATIONS_THERE * waits


def may_lie_there(free: Freedom, sizes: Sequence[int], mode: int, what: int) -> bool:
    """Whether FSDP2 shards the parameters, and stages may have them on the host.

    Over one rank of many it shards what is offloaded, and nothing else.

    Args:
        sizes: Of pp, dp_replicate, dp_shard and cp.
    """
    pp, _, shard, cp = sizes
    if not what & PARAMS_THERE:
        return mode != _SHARD or shard > 1 or free.world == 1
    return mode != _DDP and (shard > 1 or cp == 1) and (pp == 1 or free.stages_there)


def over_host(spec: Spec, plan: Plan, memory: MemoryEstimate) -> str | None:
    """Whether a node's host holds too much: why no plan of its row can be, "" where another may."""
    host = memory.host
    if host is None or not host.is_over:
        return None
    # Stages may be cut otherwise; what all of them hold together may not.
    is_all = plan.mesh.size("pp") == 1 or host.mean_bytes > host.limit_bytes
    return too_much_there(spec) * is_all


def too_much_there(spec: Spec) -> str:
    """Why no plan of a row can be."""
    is_stated = spec.hardware is not None and spec.hardware.host_memory_bytes is not None
    known = "" if is_stated else ", assumed: hardware.host_memory states it"
    return f"a node's host would hold more than its {format_gib(host_limit(spec.hardware))}{known}"
