"""The tp axis: styles and placements, heads, tied weights, and pairs that belong together."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.graphs import SHARD, TP, blocks, decide, graph, refusal, stored, tp, warnings


def test_styles_cut_the_dims_they_name() -> None:
    plan = decide(TP, tp("layers.*.up", "colwise"), tp("layers.*.down", "rowwise"))
    assert stored(plan, "layers.0.up.weight") == stored(plan, "layers.0.up.bias") == "S(0)@tp"
    assert stored(plan, "layers.0.down.weight") == "S(1)@tp"
    assert stored(plan, "layers.0.attn.wq.weight") == "R"
    assert {use.style.name for use in plan.styles.values()} == {"colwise", "rowwise"}
    assert plan.wrapper == "none"
    assert plan.warnings == ()


def test_a_transposed_linear_is_cut_the_other_way() -> None:
    conv = graph({"a": "conv1d", "b": "conv1d"}, {"a.weight": (8, 16), "a.bias": (16,),
                                                  "b.weight": (16, 8), "b.bias": (8,)})  # fmt: skip
    plan = decide(TP, tp("a", "colwise"), tp("b", "rowwise"), on=conv)
    layouts = {fqn: str(placed.stored) for fqn, placed in plan.tensors.items()}
    assert layouts == {
        "a.weight": "S(1)@tp", "a.bias": "S(0)@tp", "b.weight": "S(0)@tp", "b.bias": "R",
    }  # fmt: skip


def test_dp_shard_cuts_what_tp_left() -> None:
    mesh = {"mesh": {"dp_shard": 4, "tp": 2}}
    plan = decide(mesh, tp("layers.*.up", "colwise"), tp("layers.*.down", "rowwise"))
    up, down = plan.tensors["layers.0.up.weight"], plan.tensors["layers.0.down.weight"]
    assert (str(up.stored), str(up.computed)) == ("S(0)@tp,dp_shard", "S(0)@tp")
    assert str(down.stored) == "S(0)@dp_shard S(1)@tp"
    assert (up.local_shape(plan.mesh, 7), down.local_shape(plan.mesh, 7)) == ((2, 8), (2, 8))


def test_a_placement_on_a_module_finds_the_style_that_computes_it() -> None:
    plan = decide(TP, tp("head", "S(0)"), tp("layers.*.up", "S(1)"), tp("embed", "S(1)"))
    assert {fqn: use.style.name for fqn, use in plan.styles.items() if "." not in fqn} == {
        "head": "colwise_gather_output",
        "embed": "colwise_gather_output",
    }
    assert plan.styles["layers.2.up"].style.name == "rowwise_split_input"
    assert stored(plan, "layers.2.up.bias") == "R"


def test_a_cut_parameter_without_a_style_is_gathered_at_use() -> None:
    placed = decide(TP, tp("norm", "S(0)")).tensors["norm.weight"]
    assert (str(placed.stored), str(placed.computed)) == ("S(0)@tp", "R")
    assert placed.gathered_axes == ("tp",)


def test_tied_weights_are_cut_once() -> None:
    plan = decide(TP, tp(["embed", "head"], "vocab"), on=blocks(tied=True))
    assert stored(plan, "embed.weight") == "S(0)@tp"
    assert {fqn: use.style.kind for fqn, use in plan.styles.items()} == {
        "embed": "embedding",
        "head": "linear",
    }


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (
            [tp("embed", "vocab")],
            "rules[0].place.tp: embed.weight and head.weight are one tensor, but only embed has a "
            "tp style\n    fix: give 'head' a style that shards the tensor identically, such as "
            "vocab",
        ),
        (
            [tp("embed", "vocab"), tp("head", "rowwise_split_input")],
            "rules[1].place.tp: embed.weight and head.weight are one tensor, but tp: vocab "
            "(<mapping>) states S(0)@tp and this rule S(1)@tp\n"
            "    fix: give both the same placement",
        ),
        (
            [tp("embed", "R"), tp("head", "vocab")],
            "rules[1].place.tp: embed.weight and head.weight are one tensor, but tp: R (<mapping>) "
            "states R and this rule S(0)@tp\n    fix: give both the same placement",
        ),
    ],
)
def test_tied_weights_in_disagreement(rules: list[Any], message: str) -> None:
    assert refusal(TP, *rules, on=blocks(tied=True)) == message


FACTS = {"layers.0.attn.wq": {"head_dim": 2}, "layers.1.attn.wq": {"head_dim": 4},
         "layers.1.attn.wo": {"head_dim": 4}, "layers.2.attn.wq": {"packed": 3}}  # fmt: skip


def test_heads_stay_whole() -> None:
    model, four = blocks(facts=FACTS), {"mesh": {"tp": 4}}
    assert decide(four, tp("layers.0.attn.wq", "colwise"), on=model).styles
    for name, style in (("wq", "colwise"), ("wo", "rowwise")):
        assert refusal(four, tp(f"layers.1.attn.{name}", style), on=model).startswith(
            f"rules[0].place.tp: layers.1.attn.{name}: 2 heads of 4 do not divide by tp 4\n"
            "    fix: use tp: 2"
        )
    # Gathered at once, heads may be cut: nobody sees the pieces.
    assert decide(four, tp("layers.1.attn.wq", "colwise_gather_output"), on=model).styles


def test_fused_projections_are_not_cut_across() -> None:
    assert refusal(TP, tp("layers.2.attn.wq", "colwise"), on=blocks(facts=FACTS)) == (
        "rules[0].place.tp: layers.2.attn.wq (Linear) fuses 3 projections in one weight, and "
        "'colwise' would cut across them\n"
        "    fix: use packed_colwise"
    )


@pytest.mark.parametrize(
    ("plan", "rules", "message"),
    [
        (
            {"mesh": {"tp": 5}},
            [tp("layers.*.up", "colwise")],
            "rules[0].place.tp: layers.0.up: its dim 'out' of size 16 does not divide by tp 5\n"
            "    fix: use tp: 4",
        ),
        (
            TP,
            [tp("layers.*", "colwise")],
            "rules[0].place.tp: 'colwise' cannot be applied to layers.0 (Block): it needs a "
            "linear, conv1d or embedding module\n"
            "    fix: match a module that can, such as 'layers.0.attn.wq'",
        ),
        (
            TP,
            [tp("norm", "rowwise")],
            "rules[0].place.tp: 'rowwise' cannot be applied to norm (LayerNorm): it needs a "
            "linear or conv1d module\n    fix: remove the placement, or state 'R'",
        ),
        (
            TP,
            [tp({"param": "head.weight"}, "colwise")],
            "rules[0].place.tp: 'colwise' is a style for modules, not a placement of one "
            "parameter\n    fix: use S(0), S(1) or R, or match the module instead",
        ),
        (
            SHARD,
            [tp("head", "colwise")],
            "rules[0].place.tp: the mesh has no axis tp (it has dp_shard 4)\n"
            "    fix: add tp to the mesh, such as mesh: {dp_shard: 4, tp: 2}, or remove the "
            "placement",
        ),
        (
            TP,
            [],
            "mesh.tp: the tp axis of size 2 shards nothing: no rule places a module on tp\n"
            "    fix: set tp_plan: auto, or add rules such as {match: 'layers.*.attn.wq', place: "
            "{tp: colwise}}, or remove tp from the mesh",
        ),
        (
            TP,
            [tp("norm", "replicated_with_grad_allreduce")],
            "rules[0].place.tp: norm is replicated_with_grad_allreduce and sums partial "
            "gradients over tp, but no colwise module near it has a sharded output\n"
            "    fix: make the projections that feed it colwise, or remove the placement",
        ),
        (
            SHARD | {"sequence_parallel": True},
            [],
            "sequence_parallel: 'sequence_parallel' has no effect without a tp axis\n"
            "    fix: add tp to the mesh, or remove sequence_parallel",
        ),
    ],
)
def test_tensor_parallel_that_cannot_be(plan: Any, rules: list[Any], message: str) -> None:
    assert refusal(plan, *rules) == message


def test_half_a_pair_is_told_once_per_rule() -> None:
    assert warnings(TP, tp("layers.*.up", "colwise")) == (
        "rules[0].place.tp: layers.0.up is colwise and leaves its output sharded, but no rowwise "
        "module near it consumes that output\n"
        "    fix: make the projection that consumes it rowwise, or use colwise_gather_output"
    )
    assert warnings(TP, tp("layers.*.down", "rowwise")) == (
        "rules[0].place.tp: layers.0.down is rowwise and expects a sharded input, but no colwise "
        "module near it produces one\n"
        "    fix: make the projections that feed it colwise, or use rowwise_split_input"
    )


def test_no_stage_of_a_pipeline_can_compare_a_pair_at_the_root():
    shapes = {"up.weight": (16, 8), "down.weight": (8, 16)}
    model = graph(dict.fromkeys(("up", "down"), "linear"), shapes)
    pair = [tp("up", "colwise"), tp("down", "rowwise")]
    told = refusal({"mesh": {"pp": 2, "tp": 2}}, *pair, on=model)
    assert "up leaves its output sharded, and only the whole model contains both up and" in told
    decide({"mesh": {"tp": 2}}, *pair, on=model)
