"""The model and the plans of the measured cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

PER_NODE: Final = 4
"""Ranks of one node."""
SEQ_LEN: Final = 16
CONFIG: Final[Mapping[str, Any]] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 256,
    "hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 16,
    "num_key_value_heads": 16, "num_hidden_layers": 4, "max_position_embeddings": 64,
    "use_cache": False, "tie_word_embeddings": False, "dtype": "float32",
}  # fmt: skip
"""3.7 MB of parameters: links of tens of Mbit/s, not the processors, set the pace of a step."""

_TP: Final = [
    {"match": "model.layers.*.self_attn.{q_proj,k_proj,v_proj}", "place": {"tp": "colwise"}},
    {"match": "model.layers.*.self_attn.o_proj", "place": {"tp": "rowwise"}},
    {"match": "model.layers.*.mlp.{gate_proj,up_proj}", "place": {"tp": "colwise"}},
    {"match": "model.layers.*.mlp.down_proj", "place": {"tp": "rowwise"}},
]


def _plan(world: int, mesh: dict[str, int], strategy: str | None, **more: Any) -> dict[str, Any]:
    data = mesh.get("dp_replicate", 1) * mesh.get("dp_shard", 1)
    pipeline = "pp" in mesh
    plan: dict[str, Any] = {
        "version": 1,
        "hardware": {"nodes": world // PER_NODE, "gpus_per_node": PER_NODE, "memory": "16GB"},
        "mesh": mesh,
        "batch": {"micro": world // data, "seq_len": SEQ_LEN},
        "optimizer": "sgd",
    }
    if strategy is not None:
        plan["strategy"] = strategy
    if "tp" in mesh:
        plan["rules"] = _TP
    if pipeline:
        plan["pipeline"] = {"schedule": "1F1B", "microbatches": world // data}
    return plan | more


def plans_of(nodes: int) -> dict[str, dict[str, Any]]:
    """Return plans for nodes of `PER_NODE` ranks, by name; all train on the same global batch.

    Meshes are written outermost axis first: what stands last is inside a node.
    """
    world = nodes * PER_NODE
    meshes: dict[str, tuple[dict[str, int], str | None]] = {
        "ddp": ({"dp_replicate": world}, "ddp"),
        "zero1": ({"dp_shard": world}, "zero1"),
        "zero2": ({"dp_shard": world}, "zero2"),
        "full_shard": ({"dp_shard": world}, "full_shard"),
        "hybrid, a node a replica": ({"dp_replicate": nodes, "dp_shard": PER_NODE}, "hybrid_shard"),
        "hybrid zero2, a node a replica": (
            {"dp_replicate": nodes, "dp_shard": PER_NODE}, "hybrid_shard_zero2"
        ),
        "hybrid, half a node a replica": (
            {"dp_replicate": world // 2, "dp_shard": 2}, "hybrid_shard"
        ),
        "hybrid zero2, half a node a replica": (
            {"dp_replicate": world // 2, "dp_shard": 2}, "hybrid_shard_zero2"
        ),
        "tp inside x ddp": ({"dp_replicate": nodes, "tp": PER_NODE}, "ddp"),
        "tp across x ddp": ({"tp": nodes, "dp_replicate": PER_NODE}, "ddp"),
        "tp inside x full_shard": ({"dp_shard": nodes, "tp": PER_NODE}, "full_shard"),
        "tp across x full_shard": ({"tp": nodes, "dp_shard": PER_NODE}, "full_shard"),
        "tp across x zero2": ({"tp": nodes, "dp_shard": PER_NODE}, "zero2"),
        "tp 2 inside x ddp": ({"dp_replicate": world // 2, "tp": 2}, "ddp"),
        "tp 2 inside x full_shard": ({"dp_shard": world // 2, "tp": 2}, "full_shard"),
        "tp 2 inside x zero2": ({"dp_shard": world // 2, "tp": 2}, "zero2"),
        "tp 2 inside x hybrid": (
            {"dp_replicate": nodes, "dp_shard": PER_NODE // 2, "tp": 2}, "hybrid_shard"
        ),
        "tp of all": ({"tp": world}, None),
        "pp across x ddp": ({"pp": nodes, "dp_replicate": PER_NODE}, "ddp"),
        "pp inside x ddp": ({"dp_replicate": nodes, "pp": PER_NODE}, "ddp"),
        "pp across x full_shard": ({"pp": nodes, "dp_shard": PER_NODE}, "full_shard"),
        "pp across x zero2": ({"pp": nodes, "dp_shard": PER_NODE}, "zero2"),
        "pp 2 inside x ddp": ({"dp_replicate": world // 2, "pp": 2}, "ddp"),
        "pp across x tp inside": ({"pp": nodes, "tp": PER_NODE}, None),
        "tp across x pp inside": ({"tp": nodes, "pp": PER_NODE}, None),
    }  # fmt: skip
    if nodes > 2:
        meshes["hybrid, two nodes a replica"] = (
            {"dp_replicate": nodes // 2, "dp_shard": 2 * PER_NODE}, "hybrid_shard"
        )  # fmt: skip
    return {name: _plan(world, mesh, strategy) for name, (mesh, strategy) in meshes.items()}
