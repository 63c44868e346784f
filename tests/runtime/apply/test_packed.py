"""Fused projections, shared kv heads and head counts: cut by tp, and exactly one process.

Which seeded bug would this catch? A plain cut across q, k and v, a kv head that only one of the
ranks that share it reports a gradient for, a state dict whose rows are permuted, a module that
still sees all heads.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import meshplan
from meshplan.layout.layout import Layout, Piece, own_parts
from meshplan.layout.mesh import Mesh
from meshplan.memory.answer.states import state_bytes
from meshplan.plan.plan import make_plan
from meshplan.runtime.trace.structure import graph_of
from meshplan.spec.reader import load_spec
from tests.helpers import attention_models as own
from tests.helpers import models, parity
from tests.helpers.graphs import decide, graph, refusal, tp
from tests.helpers.wide import leaving
from tests.runtime.apply.test_parity import assert_same

GPT2 = [
    tp("**.c_attn", "packed_colwise"),
    tp("**.attn.c_proj", "rowwise"),
    tp("**.mlp.c_fc", "colwise"),
    tp("**.mlp.c_proj", "rowwise"),
]
T5 = [
    tp("**.{q,k,v}", "colwise"),
    tp("**.{SelfAttention,EncDecAttention}.o", "rowwise"),
    tp("**.relative_attention_bias", "colwise"),
    tp("**.DenseReluDense.wi", "colwise"),
    tp("**.DenseReluDense.wo", "rowwise"),
]
MLP = [tp("**.gate_up_proj", "packed_colwise"), tp("**.{down,out}", "rowwise")]
FUSED = [*MLP, tp("**.qkv", "packed_colwise")]
BY_HEAD = [*MLP, tp("**.query_key_value", "colwise")]
APART = [*MLP, tp("**.attn.{q,k,v}", "colwise")]

ZOO: dict[str, tuple[str, dict[str, int], list[Any]]] = {
    "gpt2": ("gpt2", {"tp": 4}, GPT2),
    "gpt2 sharded": ("gpt2", {"dp_shard": 2, "tp": 2}, GPT2),
    "t5 whole": ("t5", {"tp": 4}, T5),
    "t5 sharded": ("t5", {"dp_shard": 2, "tp": 2}, T5),
}


@pytest.mark.parametrize("case", leaving(ZOO, lambda number, _: bool(number % 2)))
def test_parity_of_the_zoo(pool: Any, case: str) -> None:
    name, mesh, rules = ZOO[case]
    plan = {"version": 1, "mesh": mesh, "rules": rules}
    assert_same(pool(4).run(parity.train, name, plan)[0])


def train(kind: str, kv_heads: int, plan: dict[str, Any], on_meta: bool = False) -> dict[str, Any]:
    """Three steps beside one process on the same batches, and how far apart everything is."""
    alone = own.build(kind, kv_heads)
    if on_meta:
        with torch.device("meta"):
            model = own.Decoder(own.KINDS[kind], kv_heads)
        torch.manual_seed(3)
    else:
        model = own.build(kind, kv_heads)
    model = meshplan.parallelize(model, plan)
    losses = []
    sgd, sgd_alone = (torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, alone))
    for step in range(3):
        inputs, targets = own.batch(step)
        mine = meshplan.local_batch(model, (inputs, targets))
        live = meshplan.train_step(model, sgd, *mine, models.loss)
        loss = models.loss(alone(inputs), targets)
        loss.backward()
        sgd_alone.step()
        sgd_alone.zero_grad()
        losses.append(abs(live - loss.item()))
    state = meshplan.full_state_dict(model)
    whole = {n: p.full_tensor() for n, p in model.named_parameters() if isinstance(p, DTensor)}
    if torch.distributed.get_rank():
        return {}
    one = dict(alone.state_dict())
    assert state.keys() == one.keys()
    return {
        "loss": max(losses),
        "state": max(float((state[n] - one[n]).detach().abs().max()) for n in one),
        "full": max(float((t - one[n]).detach().abs().max()) for n, t in whole.items()),
    }


CASES: dict[str, tuple[str, int, dict[str, int], list[Any]]] = {
    "equal pieces": ("fused", 8, {"tp": 4}, FUSED),
    "equal pieces, sharded": ("fused", 8, {"dp_shard": 2, "tp": 2}, FUSED),
    "unequal pieces": ("fused", 4, {"tp": 4}, FUSED),
    "unequal pieces, sharded": ("fused", 4, {"dp_shard": 2, "tp": 2}, FUSED),
    "fused, two kv heads": ("fused", 2, {"tp": 4}, FUSED),
    "fused, one kv head": ("fused", 1, {"dp_shard": 2, "tp": 2}, FUSED),
    "head by head": ("by_head", 8, {"dp_shard": 2, "tp": 2}, BY_HEAD),
    "apart, two kv heads": ("apart", 2, {"tp": 4}, APART),
    "apart, one kv head": ("apart", 1, {"dp_shard": 2, "tp": 2}, APART),
    "stated pieces": (
        "fused", 4, {"tp": 4}, [*FUSED, tp("**.qkv", "packed_colwise(32, 16, 16)")],
    ),
    "stated number": (
        "fused", 8, {"dp_replicate": 2, "tp": 2}, [*FUSED, tp("**.qkv", "packed_colwise(3)")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", leaving(CASES, lambda number, _: bool(number % 2)))
def test_parity(pool: Any, case: str) -> None:
    kind, kv_heads, mesh, rules = CASES[case]
    plan = {"version": 1, "mesh": mesh, "rules": rules}
    apart = pool(4).run(train, kind, kv_heads, plan)[0]
    assert max(apart.values()) <= parity.TOLERANCE, apart


@pytest.mark.parametrize("kv_heads", [8, 2])
def test_values_from_meta(pool: Any, kv_heads: int) -> None:
    plan = {"version": 1, "mesh": {"dp_shard": 2, "tp": 2}, "rules": FUSED}
    apart = pool(4).run(train, "fused", kv_heads, plan, True)[0]
    assert max(apart.values()) <= parity.TOLERANCE, apart


def with_sequence_parallel(kv_heads: int) -> dict[str, Any]:
    rules = [
        *FUSED,
        tp("embed", "vocab"),
        tp("head", "vocab"),
        tp("**.{norm1,norm2}", "sequence_parallel"),
    ]
    plan = {"version": 1, "mesh": {"tp": 4}, "sequence_parallel": True, "rules": rules}
    return train("fused", kv_heads, plan)


@pytest.mark.parametrize("kv_heads", [8, 2])
def test_sequence_parallel(pool: Any, kv_heads: int) -> None:
    apart = pool(4).run(with_sequence_parallel, kv_heads)[0]
    assert max(apart.values()) <= parity.TOLERANCE, apart


def planned(kind: str, kv_heads: int, mesh: dict[str, int], rules: list[Any]) -> Any:
    spec = load_spec({"version": 1, "mesh": mesh, "rules": rules})
    return make_plan(spec, graph_of(own.build(kind, kv_heads)))


def test_layouts_and_bytes() -> None:
    at = "layers.0.attn.qkv"
    equal = planned("fused", 8, {"dp_shard": 2, "tp": 2}, FUSED).assignment
    assert str(equal.tensors[f"{at}.weight"].stored) == "S(0)@tp(3) S(1)@dp_shard"
    assert equal.tensors[f"{at}.weight"].local_shape(equal.mesh) == (48, 16)
    assert equal.styles[at].pieces == (Piece(32, 2),) * 3
    assert str(equal.tensors[f"{at}.bias"].stored) == "S(0)@dp_shard"
    shared = planned("apart", 2, {"tp": 4}, APART).assignment
    weight = shared.tensors["layers.0.attn.k.weight"]
    assert (str(weight.stored), weight.local_shape(shared.mesh)) == ("R", (8, 32))
    assert weight.tp_reason is not None
    assert weight.tp_reason.text == "tp: colwise, whole: each rank takes its part of 8"
    for assignment in (equal, shared):
        held = sum(
            4 * torch.Size(p.local_shape(assignment.mesh)).numel()
            for p in assignment.tensors.values()
        )
        assert state_bytes(assignment, "sgd").parameters_bytes == held


def test_what_modules_see() -> None:
    found = {
        (a.name, a.whole, a.local)
        for a in planned("fused", 2, {"tp": 4}, FUSED).assignment.attributes
    }
    assert found == {("num_heads", 8, 2), ("num_kv_heads", 2, 1), ("num_key_value_groups", 4, 2)}
    unseen = planned("apart", 4, {"tp": 4}, [tp("**.attn.out", "rowwise_split_input")])
    assert unseen.assignment.attributes == ()
    # Another value than the cut says is another thing.
    heads = {"q": {"head_dim": 4}, "": {"sizes": {"num_heads": 7, "n_heads": 8}}}
    odd = graph({"a": "Attention", "a.q": "linear"}, {"a.q.weight": (32, 8)},
                facts={"a.q": heads["q"], "a": heads[""]})  # fmt: skip
    seen = decide({"mesh": {"tp": 2}}, tp("a.q", "colwise"), on=odd).attributes
    assert [(a.module, a.name, a.local) for a in seen] == [("a", "n_heads", 4)]


def test_decisions_are_part_of_the_digest() -> None:
    mesh = {"dp_shard": 2, "tp": 2}
    three = planned("fused", 4, mesh, [*FUSED, tp("**.qkv", "packed_colwise(2)")])
    assert three.digest() != planned("fused", 4, mesh, FUSED).digest()


ONE = graph({"a": "Attention", "a.in_proj": "linear"}, {"a.in_proj.weight": (24, 8)})


@pytest.mark.parametrize(
    ("size", "word", "message"),
    [
        (
            2,
            "packed_colwise",
            "rules[0].place.tp: the plan does not state which projections a.in_proj (Linear) "
            "fuses\n"
            "    fix: write the number of equal pieces, packed_colwise(3), or their sizes, "
            "'packed_colwise(4096, 1024, 1024)', or use colwise if the module fuses none",
        ),
        (
            2,
            "packed_colwise(5)",
            "rules[0].place.tp: a.in_proj: its output dim of size 24 is not divisible into 5 "
            "equal pieces\n    fix: state pieces that add up to 24",
        ),
        (
            2,
            "packed_colwise(16, 4)",
            "rules[0].place.tp: a.in_proj: its output dim of size 24 is not the sum of 16 and 4\n"
            "    fix: state pieces that add up to 24",
        ),
        (
            4,
            "packed_colwise(12,6,6)",
            "rules[0].place.tp: a.in_proj: a piece of size 6 does not divide by tp 4\n"
            "    fix: use tp: 3",
        ),
    ],
)
def test_pieces_that_cannot_be(size: int, word: str, message: str) -> None:
    assert refusal({"mesh": {"tp": size}}, tp("a.in_proj", word), on=ONE) == message


def test_a_second_cut_of_pieces_is_refused() -> None:
    rules = [tp("a.in_proj", "packed_colwise(3)")]
    rules.append({"match": "a.in_proj", "place": {"dp_shard": "S(0)"}})
    assert refusal({"mesh": {"dp_shard": 2, "tp": 2}}, *rules, on=ONE) == (
        "rules[1].place.dp_shard: a.in_proj.weight: tp shards each piece of dim 0, so dp_shard "
        "must shard another dim\n    fix: use S(1)"
    )


def test_shared_heads_need_queries_beside_them() -> None:
    told = refusal(
        {"mesh": {"tp": 4}},
        tp("a.k", "colwise"),
        on=graph(
            {"a": "Attention", "a.k": "linear"},
            {"a.k.weight": (8, 8)},
            facts={"a.k": {"head_dim": 4}},
        ),
    )
    assert "2 heads of 4 do not divide by tp 4" in told


@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_ranges_tile_the_dim(pieces: int) -> None:
    mesh = Mesh.of({"dp_shard": 2, "tp": 3})
    layout = Layout.whole(2).cut("tp", 1, pieces).cut("dp_shard", 0)
    held = torch.zeros(5, 18, dtype=torch.int64)
    for rank in range(6):
        rows, columns = layout.ranges((5, 18), mesh, rank)
        for row in rows:
            for column in columns:
                held[row, column] += 1
        assert layout.local_shape((5, 18), mesh, rank)[1] == 6
    assert bool((held == 1).all())


def test_own_parts_follow_the_heads() -> None:
    pieces = (Piece(32, 4), Piece(8, 2))
    parts = [own_parts(pieces, rank, 4) for rank in range(4)]
    assert [p[0].start for p in parts] == [0, 8, 16, 24]
    assert [p[1].start for p in parts] == [32, 32, 36, 36]


def changed_attribute() -> str:
    def spoil(model: nn.Module) -> None:
        model.layers[1].attn.num_heads = 6

    model = own.build("fused")
    plan = meshplan.plan.plan.make_plan(
        load_spec({"version": 1, "mesh": {"tp": 2}, "rules": FUSED}), graph_of(model), world_size=2
    )
    from meshplan.runtime.apply.tensor_parallel.local_tensors import set_local_attributes

    before = dict(vars(model.layers[0].attn))
    spoil(model)
    try:
        set_local_attributes(model, plan)
    except meshplan.ApplyError as error:
        return f"{error} {vars(model.layers[0].attn) == before}"
    return ""


def test_an_attribute_that_changed_is_refused(pool: Any) -> None:
    told = pool(2).run(changed_attribute)[0]
    assert "layers.1.attn.num_heads is 6, but the plan was made when it was 8" in told
