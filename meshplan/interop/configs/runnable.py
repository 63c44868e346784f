"""Refusals of what another tool's file says, and a plan may state, but no plan can run."""

from __future__ import annotations

from meshplan.interop.configs.statements import Draft
from meshplan.layout.styles import EXPERT_STYLE


def refuse_what_does_not_run(draft: Draft) -> None:
    """Refuse what can be written into a plan, but is refused when the plan is resolved."""
    if draft.get("offload.optimizer") and not draft.get("offload.params"):
        why = "optimizer states are not offloaded alone: shard them over more ranks, or write "
        why += "offload: params, which offloads parameters and gradients, too"
        draft.refuse("offload.optimizer", why)
    strategy = draft.get("strategy", "ddp")
    if draft.get("offload.params") and strategy == "ddp":
        why = "parameters that are not sharded are not offloaded: shard them, as full_shard does"
        draft.refuse("offload.params", why)
    if draft.get("optimizer") == "adafactor" and strategy != "ddp":
        draft.refuse("optimizer", "torch's Adafactor does not support sharded parameters")
    param = (draft.get("precision") or {}).get("param", "float32")
    is_cut = any(draft.get(f"mesh.{axis}", 1) > 1 for axis in ("pp", "tp"))
    if strategy != "ddp" or param != "float32" or is_cut:
        for name in [each for each in draft.facts if each.startswith("ddp.")]:
            draft.pop(name, "it is an option of DistributedDataParallel, which computes in float32")
    if "mesh.ep" in draft.facts:
        draft.notes.append(
            "the file does not name the experts: add a rule with the name of their modules, such "
            f"as {{match: '**.experts', place: {{ep: {EXPERT_STYLE}}}}}"
        )
    near, shards = draft.get("reshard_after_forward"), draft.get("mesh.dp_shard")
    if near is not None and strategy not in ("full_shard", "hybrid_shard"):
        draft.pop("reshard_after_forward", "it has no effect on parameters that are not sharded")
    elif isinstance(near, int) and isinstance(shards, int):
        if near == shards:
            why = "it has no effect with as many ranks as shards: blocks are gathered from all"
            draft.pop("reshard_after_forward", why)
        elif shards % near:
            draft.refuse("reshard_after_forward", f"{near} is no divisor of {shards} shards")
