"""`sequence_parallel` beside `tp_plan: auto`: parts between the blocks, and the same training.

Which seeded bug would this catch? A gradient of a norm that one rank keeps for itself, a gather
whose gradients are counted once per rank, positions counted on a part, a block that sees the parts
of another.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshplan.errors import PlanError
from meshplan.plan import Plan, make_plan
from meshplan.reader import load_spec
from meshplan.runtime.record import record
from meshplan.runtime.rehearse import rehearser
from meshplan.runtime.trace import graph_of
from tests import models, parity
from tests.test_auto import TOKENS
from tests.test_parity import assert_same

SEQUENCE: dict[str, Any] = {
    "version": 1, "tp_plan": "auto", "mesh": {"tp": 2}, "sequence_parallel": True,
}  # fmt: skip
MIXED = SEQUENCE | {"mesh": {"dp_shard": 2, "tp": 2}}
FULL = {"rules": [{"match": "**.layers.*", "activation_checkpointing": "full"}]}
SELECTIVE = {"rules": [{"match": "**.layers.*", "activation_checkpointing": "selective"}]}
LOGITS = {"loss_parallel": True}


def decided(model: nn.Module, inputs: Any, **more: Any) -> Plan:
    graph = graph_of(model, record(model, inputs))
    return make_plan(load_spec(SEQUENCE | more), graph, rehearse=rehearser(model, inputs))


def of_name(name: str, **more: Any) -> Plan:
    return decided(models.build(name), models.batch(name, 0, 2)[0], **more)


def crossings(plan: Plan) -> list[tuple[str, str | None, str]]:
    return [(c.module, c.path, c.change) for c in plan.assignment.crossings]


BLOCKS: dict[str, list[tuple[str, str | None, str]]] = {
    "hf_llama": [
        ("model.layers.0", "0", "cut"),
        *((f"model.layers.{n}.{m}", path, "gather")
          for n in (0, 1) for m, path in (("mlp", "0"), ("self_attn", "hidden_states"))),
    ],
    "gpt2": [
        ("transformer.h.0", "0", "cut"),
        *((f"transformer.h.{n}.{m}", "0", "gather") for n in (0, 1) for m in ("attn", "mlp")),
        ("transformer.h.1", None, "gather"),
    ],
    "bert": [
        ("bert.encoder.layer.0.attention", "0", "cut"),
        *((f"bert.encoder.layer.{n}.{m}", "0", "gather")
          for n in (0, 1) for m in ("attention.self", "intermediate")),
        ("bert.encoder.layer.1", None, "gather"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", BLOCKS)
def test_the_sequence_is_whole_where_code_counts_it(name: str) -> None:
    """GPT-2 lays out what leaves its last norm by the length of its input, and so gathers before."""
    plan = of_name(name)
    assert crossings(plan) == BLOCKS[name]
    norms = {f for f, i in plan.graph.modules.items() if i.kind == "norm" and "layer" in f}
    summed = {f for f, p in plan.assignment.tensors.items() if p.is_local}
    if name == "hf_llama":  # The head takes parts: so does the norm before it.
        assert summed == {f"{f}.weight" for f in norms} | {"model.norm.weight"}
        assert plan.assignment.styles["lm_head"].style.input == ("outside", "R")
    else:
        assert not any(f.startswith(("transformer.ln_f", "cls", "bert.embeddings")) for f in summed)
        head = "lm_head" if name == "gpt2" else "cls.predictions.decoder"
        assert plan.assignment.styles[head].style.input == ("R", "R")


CASES = {
    "hf_llama": ("hf_llama", MIXED),
    "gpt2": ("gpt2", SEQUENCE),
    "own_llama, recomputed": ("own_llama", MIXED | TOKENS | FULL),
    "hf_llama_tied, recomputed, logits cut": ("hf_llama_tied", SEQUENCE | FULL | LOGITS),
    "qwen3, recomputed in part": ("qwen3", MIXED | SELECTIVE),
    "bert": ("bert", MIXED),
    "hf_llama on four": ("hf_llama", SEQUENCE | {"mesh": {"tp": 4}}),
    "qwen3 on replicas": ("qwen3", SEQUENCE | {"mesh": {"dp_replicate": 2, "tp": 2}}),
}
DEFAULT = ("hf_llama", "gpt2")


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c in DEFAULT else [pytest.mark.wide]) for c in CASES]
)
def test_trains_as_one_process(pool: Any, case: str) -> None:
    name, plan = CASES[case]
    ranks = 4 if len(plan["mesh"]) == 2 or plan["mesh"]["tp"] == 4 else 2
    assert_same(pool(ranks).run(parity.train, name, plan)[0])
