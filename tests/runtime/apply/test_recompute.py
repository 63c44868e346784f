"""Activation checkpointing really recomputes, and keeps what it says."""

from __future__ import annotations

from typing import Any

import pytest

import meshplan
from tests.helpers import models, parity
from tests.helpers.wide import leaving
from tests.runtime.apply.test_parity import assert_same
from tests.runtime.apply.test_tensor_parallel import NORMS, PLAIN

FULL = {"activation_checkpointing": "full"}
SHARD = {"version": 1, "strategy": "full_shard"}
TP2: dict[str, Any] = {"version": 1, "mesh": {"dp_shard": 2, "tp": 2}}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("own_llama", SHARD | FULL),
    "full, ddp, every second": (
        "own_llama",
        {
            "version": 1,
            "strategy": "ddp",
            "activation_checkpointing": {"mode": "full", "every": 2},
        },
    ),
    "full, transformers": ("hf_llama", SHARD | FULL),
    "full, encoder and decoder": ("t5", SHARD | FULL),
    "selective and tp": (
        "own_llama",
        TP2 | {"activation_checkpointing": "selective", "rules": PLAIN},
    ),
    "full and sequence parallel": (
        "own_llama",
        TP2 | FULL | {"sequence_parallel": True, "rules": [*PLAIN, NORMS]},
    ),
    "full and tp of a post-norm block": ("bert", TP2 | FULL | {"rules": models.tp_rules("bert")}),
}


@pytest.mark.parametrize("case", leaving(CASES, lambda _, case: "post-norm" in case))
def test_parity(pool, case):
    assert_same(pool(4).run(parity.train, *CASES[case])[0])


def counts(plan: dict[str, Any]) -> dict[str, int]:
    """How often each block's feed-forward ran in one step, how many products and sums of ranks."""
    from torch.utils._python_dispatch import TorchDispatchMode

    model = meshplan.parallelize(models.build("own_llama"), plan)
    out = {"products": 0, "sums": 0}
    inner = getattr(model, "module", model)
    ran: list[str] = []  # Not numbers: those of hooks are set back before a recomputation.
    for number, layer in enumerate(inner.layers):

        def note(*_: Any, name: str = f"layer {number}") -> None:
            ran.append(name)

        layer.ffn.register_forward_pre_hook(note)

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            word = func.overloadpacket.__name__
            out["products"] += word in ("mm", "addmm")
            out["sums"] += word.startswith(("all_reduce", "reduce_scatter"))
            return func(*args, **(kwargs or {}))

    inputs, targets = meshplan.local_batch(model, models.batch("own_llama", 0))
    with Products():
        models.loss(model(inputs), targets).backward()
    return out | {f"layer {number}": ran.count(f"layer {number}") for number in range(4)}


@pytest.mark.parametrize(
    ("policy", "runs", "extra_products"),
    [
        ("none", [1, 1, 1, 1], 0),
        ("full", [2, 2, 2, 2], 4 * 7),
        ("selective", [2, 2, 2, 2], 0),
        ({"mode": "full", "every": 2}, [2, 1, 2, 1], 2 * 7),
        # sdpa is kept, products are not: all seven of a block run again.
        ({"mode": "selective", "save": ["sdpa"]}, [2, 2, 2, 2], 4 * 7),
    ],
)
def test_what_runs_twice(pool, policy, runs, extra_products):
    base = pool(2).run(counts, SHARD)[0]["products"]
    plan = SHARD | {"activation_checkpointing": policy}
    result = pool(2).run(counts, plan)[0]
    assert [result[f"layer {n}"] for n in range(4)] == runs
    # Early stop may spare the last product of a block: nothing after it is needed.
    assert extra_products - 4 <= result["products"] - base <= extra_products


@pytest.mark.parametrize("is_cut", [pytest.param(False, marks=pytest.mark.wide), True])
def test_what_ranks_add_up_is_kept_in_place_of_the_product(pool, is_cut):
    plan = TP2 | {"rules": [*PLAIN, *([NORMS] if is_cut else [])], "sequence_parallel": is_cut}
    none, selective, full, attention = (
        pool(4).run(counts, plan | {"activation_checkpointing": policy})[0]
        for policy in ("none", "selective", "full", {"mode": "selective", "save": ["sdpa"]})
    )
    # Of a block the output projection of attention runs again; its sum is there.
    assert selective["products"] - none["products"] == 4
    assert selective["sums"] == none["sums"]
    assert full["sums"] - none["sums"] == attention["sums"] - none["sums"] == 4


def test_rules_choose_blocks(pool):
    plan = SHARD | {
        "activation_checkpointing": "full",
        "rules": [
            {"match": "layers.{0,1}", "activation_checkpointing": "none"},
            {"match": "layers.0.ffn", "activation_checkpointing": "full"},
        ],
    }
    result = pool(2).run(counts, plan)[0]
    assert [result[f"layer {n}"] for n in range(4)] == [2, 1, 2, 2] or result["layer 0"] == 1
    assert (result["layer 1"], result["layer 2"], result["layer 3"]) == (1, 2, 2)


def names() -> tuple[list[str], list[str]]:
    plain = models.build("own_llama")
    before = [n for n, _ in plain.named_parameters()]
    model = meshplan.parallelize(plain, SHARD | FULL)
    return before, [n for n, _ in model.named_parameters()]


def test_names_stay(pool):
    before, after = pool(2).run(names)[0]
    assert before == after
