"""Models of a few lines as graphs, and plans decided on them: no torch, no processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from meshplan.assign import Assignment, assign
from meshplan.errors import PlanError
from meshplan.layout.styles import dims_of
from meshplan.model.graph import ModelGraph, ModuleInfo, TensorInfo
from meshplan.spec.reader import load_spec

TYPES = {
    "linear": "Linear", "conv1d": "Conv1D", "embedding": "Embedding", "norm": "LayerNorm",
    "container": "ModuleList",
    "batchnorm": "BatchNorm2d",
}  # fmt: skip
SHARD: dict[str, Any] = {"mesh": {"dp_shard": 4}}
HYBRID: dict[str, Any] = {"mesh": {"dp_replicate": 2, "dp_shard": 4}}
TP: dict[str, Any] = {"mesh": {"tp": 2}}


def graph(
    modules: Mapping[str, str],
    tensors: Mapping[str, tuple[int, ...]],
    *,
    tied: Mapping[str, tuple[str, ...]] | None = None,
    shared: Mapping[str, tuple[str, ...]] | None = None,
    facts: Mapping[str, Mapping[str, int]] | None = None,
) -> ModelGraph:
    """A model: modules by kind (or by class name), tensors by shape, further names of both."""
    infos = {"": ModuleInfo(fqn="", type="Model")}
    for fqn, kind in modules.items():
        infos[fqn] = ModuleInfo(
            fqn=fqn,
            type=TYPES.get(kind, kind),
            kind=kind if kind in TYPES else "other",
            has_forward=kind != "container",
            aliases=(shared or {}).get(fqn, ()),
            **(facts or {}).get(fqn, {}),
        )
    held = {}
    for fqn, shape in tensors.items():
        module, _, leaf = fqn.rpartition(".")
        dims = dims_of(infos[module].kind, leaf, len(shape))
        held[fqn] = TensorInfo(fqn=fqn, shape=shape, dims=dims, aliases=(tied or {}).get(fqn, ()))
    return ModelGraph(name="Model", modules=infos, tensors=held)


def blocks(tied: bool = False, facts: Mapping[str, Mapping[str, int]] | None = None) -> ModelGraph:
    """embed, three blocks of attn.wq, attn.wo, up (with bias) and down, norm, head."""
    modules, tensors = {"embed": "embedding", "layers": "container"}, {"embed.weight": (32, 8)}
    for at in ("layers.0", "layers.1", "layers.2"):
        modules |= {at: "Block", f"{at}.attn": "Attention"}
        modules |= dict.fromkeys((f"{at}.attn.wq", f"{at}.attn.wo"), "linear")
        modules |= dict.fromkeys((f"{at}.up", f"{at}.down"), "linear")
        tensors |= {f"{at}.attn.wq.weight": (8, 8), f"{at}.attn.wo.weight": (8, 8)}
        tensors |= {f"{at}.up.weight": (16, 8), f"{at}.up.bias": (16,)}
        tensors |= {f"{at}.down.weight": (8, 16)}
    modules |= {"norm": "norm", "head": "linear"}
    tensors |= {"norm.weight": (8,)} if tied else {"norm.weight": (8,), "head.weight": (32, 8)}
    names = {"embed.weight": ("head.weight",)} if tied else {}
    return graph(modules, tensors, tied=names, facts=facts)


def rule(match: Any, **fields: Any) -> dict[str, Any]:
    return {"match": match, **fields}


def tp(match: Any, word: str) -> dict[str, Any]:
    return rule(match, place={"tp": word})


def decide(plan: dict[str, Any], *rules: Any, on: ModelGraph | None = None) -> Assignment:
    return assign(load_spec({"version": 1, **plan, "rules": list(rules)}), on or blocks())


def refusal(plan: dict[str, Any], *rules: Any, on: ModelGraph | None = None) -> str:
    with pytest.raises(PlanError) as caught:
        decide(plan, *rules, on=on)
    return "\n".join(str(p).removeprefix("<mapping>: ") for p in caught.value.problems)


def warnings(plan: dict[str, Any], *rules: Any, on: ModelGraph | None = None) -> str:
    found = decide(plan, *rules, on=on).warnings
    return "\n".join(str(w).removeprefix("<mapping>: ") for w in found)


def stored(assignment: Assignment, fqn: str) -> str:
    return str(assignment.tensors[fqn].stored)
