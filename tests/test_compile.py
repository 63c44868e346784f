"""`compile: true`: every block is compiled, once, and the numbers are those of one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import meshplan
from meshplan.errors import PlanError
from tests import models, parity
from tests.test_parity import assert_same
from tests.wide import leaving

TP = models.tp_rules("own_llama")
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "ddp": ("own_llama", 2, {"strategy": "ddp"}),
    "full_shard, recomputed": (
        "hf_llama",
        2,
        {"strategy": "full_shard", "activation_checkpointing": "full"},
    ),
    # Asynchronous collectives in the styles' hooks gave wrong gradients here, silently.
    "tp x full_shard": ("own_llama", 4, {"mesh": {"dp_shard": 2, "tp": 2}, "rules": TP}),
    "tp, recomputed but for products": (
        "own_llama",
        2,
        {"mesh": {"tp": 2}, "rules": TP, "activation_checkpointing": "selective"},
    ),
}


@contextmanager
def without_code_generation() -> Iterator[None]:
    """Trace and differentiate as always, but leave out the half minute of a C++ compiler."""
    compile_module = nn.Module.compile
    nn.Module.compile = lambda self: compile_module(self, backend="aot_eager")
    try:
        yield
    finally:
        nn.Module.compile = compile_module


def train(name: str, plan: dict[str, Any]) -> tuple[dict[str, float], int, int]:
    """(the differences, graphs compiled, graph breaks)."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with without_code_generation():
        found = parity.train(name, {"version": 1, "compile": True, **plan})
    counters = torch._dynamo.utils.counters
    return found, counters["stats"]["unique_graphs"], len(counters["graph_break"])


@pytest.mark.parametrize("case", leaving(CASES, lambda _, case: "tp" in case))
def test_compiled_blocks_train_as_one_process_does(pool, case):
    name, world, plan = CASES[case]
    result, graphs, breaks = pool(world).run(train, name, plan)[0]
    assert_same(result)
    assert (graphs, breaks) == (1, 0), "equal blocks share one whole graph"


def test_a_model_without_blocks_is_refused():
    with pytest.raises(PlanError, match="no repeated blocks, so nothing says what to compile"):
        meshplan.parallelize(nn.Linear(4, 4), {"version": 1, "strategy": "ddp", "compile": True})
