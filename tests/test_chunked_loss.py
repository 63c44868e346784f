"""Head and loss over parts of the tokens, against one process.

Which seeded bug would this catch? A chunk left out or counted twice, a mean over a chunk in place
of the batch, a gradient scaled by what one chunk keeps, a weight that is read after its unit has
given it back, logits that are computed whole after all.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests import parity
from tests.test_parity import assert_same

CHUNKS: dict[str, Any] = {"version": 1, "loss_chunks": 3}

CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "shards": (2, "own_llama", {"strategy": "full_shard"}),
    "tied, accumulated": (
        2, "hf_llama_tied", {"strategy": "full_shard", "batch": {"accumulate": 2}}),
    "head apart": (
        2, "hf_llama", {"strategy": "full_shard", "rules": [{"match": "lm_head", "unit": True}]}),
    "replicas": (2, "gpt2", {"strategy": "ddp", "batch": {"accumulate": 2}}),
    "a head with a bias": (2, "bert", {"strategy": "zero2"}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_parity(pool, case):
    world, name, plan = CASES[case]
    assert_same(pool(world).run(parity.train, name, CHUNKS | plan)[0])
