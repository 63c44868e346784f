"""`sequence_parallel` beside `tp_plan: auto`: parts between the blocks, and the same training.

Which seeded bug would this catch? A gradient of a norm that one rank keeps for itself, a gather
whose gradients are counted once per rank, positions counted on a part, a block that sees the parts
of another.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshplan
from meshplan.errors import PlanError
from meshplan.plan.plan import Plan, make_plan
from meshplan.runtime.trace.ops import record
from meshplan.runtime.trace.rehearse import rehearser
from meshplan.runtime.trace.structure import graph_of
from meshplan.spec.reader import load_spec
from meshplan.traffic import differences
from tests.assign.test_auto import TOKENS
from tests.helpers import models, parity
from tests.helpers.counted import told_and_counted
from tests.runtime.apply import test_together as together
from tests.runtime.apply.test_parity import assert_same

SEQUENCE: dict[str, Any] = {
    "version": 1, "tp_plan": "auto", "mesh": {"tp": 2}, "sequence_parallel": True,
}  # fmt: skip
MIXED = SEQUENCE | {"mesh": {"dp_shard": 2, "tp": 2}}
STAGES = SEQUENCE | {"mesh": {"pp": 2, "tp": 2}, "pipeline": {"microbatches": 2}}
HALVES = {"pipeline": {"schedule": "InterleavedZeroBubble", "virtual": 2, "microbatches": 4}}
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


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "gpt2" else [pytest.mark.wide]) for n in BLOCKS]
)
def test_the_sequence_is_whole_where_code_counts_it(name: str) -> None:
    """GPT-2 lays out what leaves its last norm by the length of its input: it gathers before."""
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
    "pp, hf_llama": ("hf_llama", STAGES | FULL),
    "cp, hf_llama": (
        "hf_llama",
        SEQUENCE | {"mesh": {"cp": 2, "tp": 2}, "batch": {"seq_len": models.SEQ_LEN}},
    ),
    "t5": ("t5", SEQUENCE),
    "t5 on shards": ("t5", MIXED),
    "compiled": ("gpt2", MIXED | {"compile": True}),
    "pp, qwen3, recomputed in part": (
        "qwen3",
        STAGES | SELECTIVE | {"pipeline": {"microbatches": 4}},
    ),
    "pp in halves, hf_llama": ("hf_llama", STAGES | HALVES),
    "pp in halves, own_llama on eight": (
        "own_llama",
        STAGES | HALVES | TOKENS | {"mesh": {"pp": 2, "dp_shard": 2, "tp": 2}},
    ),
    "pp, gpt2 on eight": ("gpt2", STAGES | {"mesh": {"pp": 2, "dp_shard": 2, "tp": 2}}),
}
DEFAULT = ("hf_llama", "t5", "pp in halves, hf_llama")


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c in DEFAULT else [pytest.mark.wide]) for c in CASES]
)
def test_trains_as_one_process(pool: Any, case: str) -> None:
    name, plan = CASES[case]
    ranks = math.prod(plan["mesh"].values())
    assert_same(pool(ranks).run(together.train, name, plan)[0])


class Attention(nn.Module):
    """Heads are counted on what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).view(*x.shape[:2], -1, 8).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.o(y.transpose(1, 2).reshape(*x.shape[:2], -1))


class Block(nn.Module):
    """A block with one turn, by name."""

    def __init__(self, turn: str) -> None:
        super().__init__()
        self.turn, self.attn = turn, Attention()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)
        self.gain = nn.Parameter(torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        y = self.attn(self.norm(x))
        match self.turn:
            case "mean":
                y = y - y.mean(1, keepdim=True)
            case "positions":
                y = y * torch.arange(y.shape[1]).view(1, -1, 1)
            case "length":
                y = y / y.shape[1]
            case "dropout":
                y = nn.functional.dropout(y, 0.1)
            case "kept":
                self.seen = y
            case "written":
                y += x
            case "shifted":
                y = y.roll(1, 1)
            case "gain" | "gain in and out":
                y = (1 + self.gain) * y
        x = x + y
        return x + self.down(self.up(x).relu())


class Blocks(nn.Module):
    """Two of them between plain projections; the last one is read across the sequence."""

    def __init__(self, turn: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 32), nn.Linear(32, 8)
        self.blocks = nn.ModuleList(Block(turn) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        if block.turn == "gain in and out":
            x = x * block.gain
        return self.last(x).cumsum(1) / x.shape[1]


def blocks(turn: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Blocks(turn)


REFUSED = {
    "mean": "mean in blocks.0 may mix positions of the sequence",
    "positions": "mul in blocks.0 combines a shard with a whole sequence that no enclosing module",
    "length": "the operations of one process: div: gets 6 where one process gets 12",
    "dropout": "bernoulli_ in blocks.0 would draw random numbers for a shard of the sequence",
    "written": "add_ in blocks.0 writes in place into a tensor that other code made",
    "kept": "blocks.0.seen stores a shard of the sequence, which other code may read",
    "gain in and out": "blocks.1.gain is used both with sharded values and without",
    "shifted": "roll in blocks.0 may mix positions of the sequence",
}


@pytest.mark.parametrize("turn", REFUSED)
def test_what_looks_across_the_sequence_is_refused(turn: str) -> None:
    with pytest.raises(PlanError) as caught:
        decided(blocks(turn), torch.randn(2, 12, 8))
    (problem,) = caught.value.problems
    assert "auto cannot prove sequence_parallel correct for this model" in problem.what
    assert REFUSED[turn] in problem.what


class TwoSequences(nn.Module):
    """Blocks on two sequences of different lengths, which meet at the end; `more` on the second."""

    def __init__(self, more: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.left = nn.ModuleList(Block("") for _ in range(2))
        self.right = nn.ModuleList(Block("") for _ in range(2 + more))
        self.down = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = x[:, :5] * 2
        for block in self.left:
            x = block(x)
        for block in self.right:
            y = block(y)
        return self.down(x).mean(1) + self.down(y).mean(1)


def test_one_of_several_sequences_is_cut_and_the_others_are_named() -> None:
    """The second has more blocks, but 5 positions do not divide; its modules stay as they were."""
    plan = decided(TwoSequences(1), torch.randn(2, 12, 32))
    cut = {c.module for c in plan.assignment.crossings}
    assert cut
    assert all(module.startswith("left") for module in cut)
    styles = plan.assignment.styles
    assert styles["left.0.down"].style.output == ("P", "outside")
    assert styles["right.0.down"].style.output == ("P", "R")
    assert styles["right.0.up"].style.input == ("R", "R")
    (note,) = (w for w in plan.assignment.warnings if "sequence_parallel" in w.what)
    assert "right.*.attn.o" in note.what
    assert "left" not in note.what


def apart_after_steps(alone: torch.nn.Module, whole: torch.nn.Module, width: int) -> float:
    """Three steps on this rank; the largest difference from one process.

    Args:
        alone: The model of one process.
        whole: A copy of it, which is trained under the plan.
        width: Numbers per token.
    """
    x = torch.randn(4, 12, width, generator=torch.Generator().manual_seed(5))
    cut = meshplan.parallelize(whole, SEQUENCE, example_inputs=x)
    pairs = [(m, torch.optim.SGD(m.parameters(), lr=0.01)) for m in (cut, alone)]
    for _ in range(3):
        for each, sgd in pairs:
            each(x).square().mean().backward()
            sgd.step()
            sgd.zero_grad()
    live = meshplan.full_state_dict(cut)
    if torch.distributed.get_rank():
        return 0.0
    return max((live[n] - t).abs().max().item() for n, t in alone.state_dict().items())


def train_two(more: int) -> float:
    return apart_after_steps(TwoSequences(more), TwoSequences(more), 32)


def test_two_sequences_train_as_in_one_process(pool: Any) -> None:
    assert pool(2).run(train_two, 1)[0] <= parity.TOLERANCE


def train_blocks(turn: str) -> float:
    return apart_after_steps(blocks(turn), blocks(turn), 8)


def test_a_gain_on_parts_is_trained_by_all_of_them(pool: Any) -> None:
    """Its gradient goes through a sum that every rank computes whole."""
    plan = decided(blocks("gain"), torch.randn(2, 12, 8))
    assert plan.assignment.tensors["blocks.0.gain"].is_local
    assert ("blocks.1", None, "gather") in crossings(plan)
    assert pool(2).run(train_blocks, "gain")[0] <= parity.TOLERANCE


def refusal(length: int = 12, **more: Any) -> str:
    with pytest.raises(PlanError) as caught:
        decided(blocks(""), torch.randn(2, length, 8), **more)
    return str(caught.value)


def test_what_does_not_go_with_it_is_said() -> None:
    assert decided(blocks(""), torch.randn(2, 12, 8)).assignment.crossings
    rules = [{"match": "first", "place": {"tp": "colwise_gather_output"}}]
    assert "a rule states tp: colwise_gather_output" in refusal(rules=rules)
    inside = {"split": [["first", "blocks.0.attn"], ["blocks.0.up"]], "microbatches": 2}
    pipeline = {"mesh": {"pp": 2, "tp": 2}, "batch": {"micro": 2}, "pipeline": inside}
    assert "a stage boundary lies inside blocks.0, where shards" in refusal(**pipeline)
    assert "sequence length 10 does not divide by tp 4" in refusal(10, mesh={"tp": 4})


def test_where_it_is_cut_is_part_of_the_digest() -> None:
    plan = decided(blocks(""), torch.randn(2, 12, 8))
    fewer = replace(plan.assignment, crossings=plan.assignment.crossings[1:])
    assert replace(plan, assignment=fewer).digest() != plan.digest()


SENT = {
    "hf_llama, recomputed": ("hf_llama", MIXED | {"activation_checkpointing": "full"}),
    "gpt2": ("gpt2", MIXED | {"precision": "bf16-mixed"}),
    "bert, recomputed in part": (
        "bert", SEQUENCE | {"mesh": {"tp": 4}, "activation_checkpointing": "selective"}),
    "t5": ("t5", MIXED),
    "pp, hf_llama": ("hf_llama", STAGES),
    "hf_llama, logits cut": ("hf_llama", MIXED | LOGITS | {"batch": {"accumulate": 2}}),
}  # fmt: skip


@pytest.mark.wide
@pytest.mark.parametrize("case", SENT)
def test_what_is_sent_is_told(pool: Any, case: str) -> None:
    for told, counted in pool(4).run(told_and_counted, *SENT[case]):
        assert told.unknown == ()
        assert counted
        assert differences(told, counted) == ()
