"""All of it at once: axes, styles, recomputation and compilation in one plan, against one process.

What `compatibility.CLASHES` does not list goes together; here are the pairs that no other test has.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers import models, parity
from tests.runtime.apply.test_compile import without_code_generation
from tests.runtime.apply.test_parity import assert_same

PIPELINE = {"schedule": "1F1B", "microbatches": 2}
RULES = models.tp_rules("own_llama")
NORMS = {"match": "**.{norm,norm1,norm2}", "place": {"tp": "sequence_parallel"}}
PP_TP = {"mesh": {"pp": 2, "tp": 2}, "pipeline": PIPELINE}
PP_FSDP_TP = {"mesh": {"pp": 2, "dp_shard": 2, "tp": 2}, "pipeline": PIPELINE}
CP_FSDP_TP = {"mesh": {"dp_shard": 2, "cp": 2, "tp": 2}, "batch": {"seq_len": models.SEQ_LEN}}
AUTO = {"tp_plan": "auto"}

CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "pp, compile": (
        4,
        "own_llama",
        {"mesh": {"pp": 2, "dp_shard": 2}, "pipeline": PIPELINE, "compile": True},
    ),
    "pp, tp, loss_parallel": (4, "own_llama", PP_TP | {"loss_parallel": True, "rules": RULES}),
    "pp, tp, sequence_parallel": (
        4,
        "own_llama",
        PP_TP | {"sequence_parallel": True, "rules": [*(RULES or []), NORMS]},
    ),
    "pp, dp_shard, tp derived, encoder and decoder": (8, "t5", PP_FSDP_TP | AUTO),
    "pp, dp_replicate, dp_shard, tied, recomputed": (
        8,
        "hf_llama_tied",
        {
            "mesh": {"pp": 2, "dp_replicate": 2, "dp_shard": 2},
            "pipeline": PIPELINE,
            "activation_checkpointing": "full",
        },
    ),
    "dp_shard, cp, tp, loss_parallel": (
        8,
        "own_llama",
        CP_FSDP_TP | {"loss_parallel": True, "rules": RULES},
    ),
    "dp_shard, cp, tp derived": (8, "hf_llama", CP_FSDP_TP | AUTO),
    "dp_shard, tp derived, compile": (
        4,
        "gpt2",
        {"mesh": {"dp_shard": 2, "tp": 2}, "compile": True} | AUTO,
    ),
}


def train(name: str, plan: dict[str, Any]) -> dict[str, Any]:
    if not plan.get("compile"):
        return parity.train(name, plan, 2)
    with without_code_generation():
        return parity.train(name, plan, 2)


WIDE = ("pp, compile", "pp, dp_shard, tp derived, encoder and decoder", "dp_shard, cp, tp derived",
        "pp, dp_replicate, dp_shard, tied, recomputed", "dp_shard, tp derived, compile",
        "dp_shard, cp, tp, loss_parallel")  # fmt: skip
"""Cases that combine what these and the tests of each axis show."""


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.wide] if c in WIDE else []) for c in CASES]
)
def test_together(pool, case):
    world, name, plan = CASES[case]
    assert_same(pool(world).run(train, name, {"version": 1, **plan})[0])
