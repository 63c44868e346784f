"""The data axes: units of sharding, placements of tensors, tied and shared ones."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from meshplan.errors import PlanError
from meshplan.model.graph import ModelGraph, TensorInfo
from meshplan.plan.plan import make_plan
from meshplan.runtime.trace.structure import graph_of
from meshplan.spec.reader import load_spec
from tests.helpers.graphs import HYBRID, SHARD, TP, blocks, decide, graph, refusal, rule, stored, tp

# Units


def test_blocks_are_units_and_the_root_takes_the_rest() -> None:
    plan = decide(HYBRID)
    assert list(plan.units) == ["layers.0", "layers.1", "layers.2", ""]
    block, root = plan.units["layers.0"], plan.units[""]
    assert block.shard_axes == root.shard_axes == ("dp_shard",)
    assert block.replicate_axes == root.replicate_axes == ("dp_replicate",)
    assert block.reshard_after_forward is True
    assert root.reshard_after_forward is False
    assert plan.tensors["layers.2.up.bias"].unit == "layers.2"
    assert plan.tensors["embed.weight"].unit == plan.tensors["head.weight"].unit == ""


def test_units_can_be_made_and_unmade() -> None:
    plan = decide(SHARD, rule("layers.0", unit=False), rule("layers.1.attn", unit=True))
    assert list(plan.units) == ["layers.1.attn", "layers.1", "layers.2", ""]
    assert plan.tensors["layers.0.up.weight"].unit == ""
    assert plan.tensors["layers.1.attn.wq.weight"].unit == "layers.1.attn"
    assert plan.tensors["layers.1.up.weight"].unit == "layers.1"


def test_a_container_cannot_be_a_unit() -> None:
    assert refusal(SHARD, rule("layers", unit=True)) == (
        "rules[0].unit: 'layers' is a ModuleList, which is never called, so it cannot be a unit\n"
        "    fix: match its children, such as 'layers.*'"
    )


def test_what_is_placed_otherwise_must_be_a_unit() -> None:
    assert refusal(SHARD, rule("layers.0", unit=False, place="replicate")) == (
        "rules[0].unit: 'layers.0' differs from the module around it in placement, resharding, "
        "precision, dtype or offload, so it must be a unit\n    fix: remove unit: false"
    )


def test_a_replicated_block_in_a_sharded_model() -> None:
    plan = decide(HYBRID, rule("layers.0", place="replicate"))
    unit = plan.units["layers.0"]
    assert (unit.shard_axes, unit.replicate_axes) == ((), ("dp_replicate", "dp_shard"))
    assert unit.reshard_after_forward is False
    assert {str(p.stored) for p in plan.tensors.values() if p.unit == "layers.0"} == {"R"}
    assert stored(plan, "layers.1.up.weight") == "S(0)@dp_shard"


def test_another_precision_makes_a_unit_that_returns_what_is_around_it() -> None:
    mixed = SHARD | {"precision": "bf16-mixed"}
    plan = decide(mixed, rule("layers.0.attn", precision="32-true"))
    unit = plan.units["layers.0.attn"]
    assert (unit.precision.param, unit.precision.output) == ("float32", "bfloat16")
    assert plan.tensors["layers.0.attn.wq.weight"].compute_dtype == "float32"
    assert plan.tensors["layers.0.up.weight"].compute_dtype == "bfloat16"
    assert plan.tensors["layers.0.up.weight"].dtype == "float32"


def test_the_output_dtype_is_the_models_not_each_blocks() -> None:
    plan = decide(SHARD | {"precision": {"param": "bf16", "output": "fp32"}})
    assert plan.units[""].precision.output == "float32"
    assert plan.units["layers.0"].precision.output is None


@pytest.mark.parametrize("value", [True, False, 2])
def test_resharding_is_a_matter_of_one_unit(value: bool | int) -> None:
    plan = decide(SHARD, rule("layers.0", reshard_after_forward=value))
    assert plan.units["layers.0"].reshard_after_forward is value
    assert plan.units["layers.1"].reshard_after_forward is True


@pytest.mark.parametrize(("size", "value", "fix"), [
    (4, 3, "use 2"), (4, 4, "use 2"), (8, 16, "use 2 or 4"), (3, 2, "use true or false"),
])  # fmt: skip
def test_resharding_to_a_number_that_does_not_work(size: int, value: int, fix: str) -> None:
    plan = {"mesh": {"dp_shard": size}}
    assert refusal(plan, rule("layers.*", reshard_after_forward=value)) == (
        f"rules[0].reshard_after_forward: reshard_after_forward: {value} is not a divisor of "
        f"dp_shard {size} between 1 and {size}\n    fix: {fix}"
    )


def test_replicas_are_not_resharded() -> None:
    assert refusal({"mesh": {"dp_replicate": 2}}, rule("layers.*", reshard_after_forward=True)) == (
        "rules[0].reshard_after_forward: reshard_after_forward has no effect on parameters that "
        "are not sharded\n    fix: remove it, or shard the module"
    )


@pytest.mark.parametrize(("strategy", "frees"), [
    ("zero1", False), ("zero2", False), ("full_shard", True),
])  # fmt: skip
def test_only_zero_3_frees_parameters_after_forward(strategy: str, frees: bool) -> None:
    plan = decide(SHARD | {"strategy": strategy})
    assert plan.units["layers.0"].reshard_after_forward is frees
    gradient = plan.tensors["layers.0.up.weight"].gradient
    assert str(gradient) == ("R" if strategy == "zero1" else "S(0)@dp_shard")


# Placements on the data axes


def test_s1_of_a_module_is_about_its_weights() -> None:
    plan = decide(SHARD, rule("layers.*", place={"dp_shard": "S(1)"}))
    assert stored(plan, "layers.0.up.weight") == "S(1)@dp_shard"
    assert stored(plan, "layers.0.up.bias") == "S(0)@dp_shard"
    assert stored(plan, "head.weight") == "S(0)@dp_shard"
    last = decide(SHARD, rule({"param": "head.weight"}, place={"dp_shard": "S(-1)"}))
    assert stored(last, "head.weight") == "S(1)@dp_shard"


def test_one_rule_that_hits_many_layers_gives_one_message() -> None:
    plan = {"mesh": {"dp_shard": 3}}
    assert refusal(plan, rule("layers.*", place={"dp_shard": "S(1)"})) == (
        "rules[0].place.dp_shard: layers.0.attn.wq.weight: dim 1 of size 8 does not divide by "
        "dp_shard 3, and only dim 0 may be uneven\n    fix: use S(0)"
    )


@pytest.mark.parametrize(
    ("plan", "place", "message"),
    [
        (
            SHARD,
            rule({"param": "norm.weight"}, place={"dp_shard": "S(1)"}),
            "rules[0].place.dp_shard: norm.weight has shape [8], which has no dim 1\n"
            "    fix: use S(0)",
        ),
        (
            TP,
            tp({"param": "head.weight"}, "S(2)"),
            "rules[0].place.tp: head.weight has shape [32, 8], which has no dim 2\n"
            "    fix: use S(0) to S(1)",
        ),
        (
            {"mesh": {"dp_replicate": 4}},
            rule("layers.*", place="shard"),
            "rules[0].place: 'place: shard' needs the axis dp_shard (the mesh has "
            "dp_replicate 4)\n    fix: add dp_shard to the mesh, or remove the placement",
        ),
        (
            SHARD,
            rule("layers.*", place="hybrid_shard"),
            "rules[0].place: 'hybrid_shard' needs the axes dp_replicate and dp_shard (the mesh has "
            "dp_shard 4)\n    fix: write place: shard, or add dp_replicate to the mesh",
        ),
        (
            HYBRID,
            rule("head", place={"dp_replicate": "S(0)"}),
            "rules[0].place.dp_replicate: 'S(0)' cannot be placed on dp_replicate, whose ranks "
            "are replicas\n    fix: place the module on dp_shard",
        ),
    ],
)
def test_a_placement_that_cannot_be(plan: Any, place: Any, message: str) -> None:
    assert refusal(plan, place) == message


def test_a_shard_in_a_replicated_module() -> None:
    assert refusal(
        SHARD,
        rule("layers.0", place="replicate"),
        rule({"param": "layers.0.up.weight"}, place="shard"),
    ) == (
        "rules[1].place: layers.0.up.weight cannot be sharded separately: its module is "
        "replicated\n    fix: match the module 'layers.0.up' instead"
    )


def test_scalars_are_whole_and_reduced_alone() -> None:
    one = graph({"a": "linear"}, {"a.weight": (4, 4), "temperature": ()})
    placed = decide(SHARD, on=one).tensors["temperature"]
    assert (str(placed.stored), placed.unit, placed.reduced_alone) == ("R", None, True)
    # DistributedDataParallel reduces everything itself.
    assert not decide({"mesh": {"dp_replicate": 2}}, on=one).tensors["temperature"].reduced_alone
    for axis, plan in (("dp_shard", SHARD), ("tp", TP)):
        place = rule({"param": "temperature"}, place={axis: "S(0)"})
        assert refusal(plan, place, on=one) == (
            f"rules[0].place.{axis}: temperature has shape [], which has no dim 0\n"
            "    fix: use R: a scalar cannot be sharded"
        )


def test_buffers_are_whole_and_belong_to_no_unit() -> None:
    model = blocks()
    buffer = TensorInfo(fqn="norm.count", shape=(8,), dtype="int64", is_buffer=True)
    held = ModelGraph(
        name="Model", modules=model.modules, tensors={**model.tensors, "norm.count": buffer}
    )
    placed = decide(SHARD | {"precision": "bf16-true"}, on=held).tensors["norm.count"]
    assert (str(placed.stored), placed.unit, placed.dtype) == ("R", None, "int64")


# Tied and shared


def twins() -> ModelGraph:
    """Two blocks with a submodule in common."""
    modules = {"layers": "container", "layers.0": "Block", "layers.0.s": "linear",
               "layers.0.own": "linear", "layers.1": "Block", "layers.1.own": "linear"}  # fmt: skip
    tensors = {f"layers.{name}.weight": (4, 4) for name in ("0.s", "0.own", "1.own")}
    return graph(
        modules,
        tensors,
        tied={"layers.0.s.weight": ("layers.1.s.weight",)},
        shared={"layers.0.s": ("layers.1.s",)},
    )


def test_a_shared_tensor_dissolves_the_units_that_would_split_it() -> None:
    plan = decide(SHARD, on=twins())
    assert list(plan.units) == [""]
    assert [str(w) for w in plan.warnings] == [
        f"<mapping>: '{block}' shares layers.0.s.weight with other modules, so it is not a "
        "separate unit"
        for block in ("layers.0", "layers.1")
    ]


def test_a_shared_module_may_be_a_unit_itself() -> None:
    for name in ("layers.0.s", "layers.1.s"):
        plan = decide(SHARD, rule(name, place="replicate"), on=twins())
        assert list(plan.units) == ["layers.0.s", "layers.0", "layers.1", ""]
        assert stored(plan, "layers.0.s.weight") == "R"
        assert plan.warnings == ()


def test_tied_weights_stay_with_the_root() -> None:
    plan = decide(SHARD, on=blocks(tied=True))
    assert plan.tensors["embed.weight"].unit == ""
    assert list(plan.units) == ["layers.0", "layers.1", "layers.2", ""]


@pytest.mark.parametrize("match", ["embed", ["embed", "head"]])
def test_tied_weights_cannot_be_of_two_units(match: Any) -> None:
    assert refusal(SHARD, rule(match, place="replicate"), on=blocks(tied=True)) == (
        "rules[0].place: embed.weight and head.weight are one tensor, which cannot belong to "
        "two units, but 'embed' is a separate unit\n"
        "    fix: write match: {param: embed.weight} for the tensor itself, or match a module "
        "around all that share it"
    )


def test_every_stated_unit_that_would_split_a_tensor_is_told() -> None:
    model = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("a", "b")})
    model["b"].weight = model["a"].weight
    rules = [{"match": name, "unit": True} for name in ("a", "b")]
    spec = load_spec({"version": 1, "mesh": {"dp_shard": 2}, "rules": rules})
    with pytest.raises(PlanError) as caught:
        make_plan(spec, graph_of(model))
    said = str(caught.value)
    assert all(f"but '{name}' is a separate unit" in said for name in ("a", "b"))
