"""Ranks that are alike, beside what every single rank holds.

Which seeded bug would this catch? Parts taken for full that are shorter or empty, a cut along one
dim taken for a cut along another, parts of another place of the pipeline, and ranks told apart that
hold the same.
"""

from __future__ import annotations

from typing import Any

import pytest

from meshplan.assign import Assignment
from meshplan.layout.mesh import UNIT_AXES
from meshplan.memory.answer.rank_classes import equal_ranks
from meshplan.model.blueprint import from_mapping
from meshplan.plan.plan import make_plan
from meshplan.spec.reader import load_spec

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 24,
    "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 50, "tie_word_embeddings": False,
}  # fmt: skip
QWEN = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 6,
    "num_experts_per_tok": 3, "moe_intermediate_size": 40, "norm_topk_prob": True,
}  # fmt: skip


def one_by_one(assignment: Assignment) -> tuple[tuple[int, ...], ...]:
    """The same, every rank looked at."""
    mesh, groups = assignment.mesh, dict[tuple[Any, ...], list[int]]()
    stages = assignment.stages
    for rank in range(mesh.world_size):
        place = mesh.index(rank, ("pp",))
        part = mesh.index(rank, ("cp",))  # masks over what is gathered are of another size on each
        held = tuple(
            (layout.local_shape(p.info.shape, mesh, rank),
             layout.padded_numel(p.info.shape, mesh, UNIT_AXES, rank))
            for fqn, p in assignment.tensors.items()
            if stages is None or stages.holds(fqn, place)
            for layout in (p.stored, p.computed, p.gradient)
        )  # fmt: skip
        groups.setdefault((place, part, held), []).append(rank)
    return tuple(map(tuple, groups.values()))


@pytest.mark.parametrize(
    ("config", "spec"),
    [
        (LLAMA, {"mesh": {"dp_shard": 4}}),
        (LLAMA, {"mesh": {"dp_shard": 7}}),
        (LLAMA, {"mesh": {"dp_shard": 64}}),
        (LLAMA, {"mesh": {"dp_replicate": 2, "dp_shard": 9}}),
        (LLAMA, {"mesh": {"dp_shard": 5, "tp": 2}, "tp_plan": "auto"}),
        # Of 50 rows each of the 8 ranks has 7 and the last 1, as along one axis.
        (LLAMA, {"mesh": {"dp_shard": 2, "cp": 4}, "batch": {"seq_len": 64}}),
        (LLAMA, {"mesh": {"pp": 2, "dp_shard": 11}, "strategy": "zero1",
                 "pipeline": {"schedule": "1F1B", "microbatches": 2}}),
        # Blocks divide by 8; the ends, which two of the places hold, do not.
        (LLAMA | {"num_hidden_layers": 3}, {"mesh": {"pp": 3, "dp_shard": 8},
                 "pipeline": {"schedule": "1F1B", "microbatches": 3}}),
        (QWEN, {"mesh": {"dp_shard": 10, "ep": "2 in dp_shard"},
                "rules": [{"match": "model.layers.*.mlp.experts",
                           "place": {"ep": "ep_dispatch_experts"}}]}),
    ],
)  # fmt: skip
def test_groups_are_those_of_ranks_that_hold_the_same(config, spec):
    plan = make_plan(load_spec({"version": 1} | spec), from_mapping(config))
    found = equal_ranks(plan.assignment)
    assert found == one_by_one(plan.assignment)
    assert len(found) > 1
