"""The ep axis in words and layouts: no torch, no processes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from meshplan import check_plan
from meshplan.assign import Assignment
from meshplan.errors import PlanError, SpecError
from meshplan.layout.mesh import Axis, Loan, Mesh
from meshplan.model.blueprint import from_mapping
from meshplan.plan.plan import make_plan
from meshplan.spec.reader import load_spec
from tests.helpers.graphs import decide, graph, refusal, rule, stored

MESH = {"dp_shard": 8, "ep": "2 in dp_shard"}
PLAN: dict[str, Any] = {"mesh": MESH}
SPREAD = rule("**.experts", place={"ep": "ep_dispatch_experts"})
MODULES = {"embed": "embedding", "layers": "container"} | {
    f"layers.{i}{part}": kind
    for i in (0, 1)
    for part, kind in {
        "": "other", ".attn": "linear", ".moe": "other", ".moe.gate": "linear",
        ".moe.experts": "other",
    }.items()
}  # fmt: skip


def mixture(tied: bool = False, **shapes: tuple[int, ...]) -> Any:
    """Two blocks with experts; `shapes` replaces or adds parameters of the experts."""
    own = {"up": (8, 12, 6), "down": (8, 6, 12)} | shapes
    tensors: dict[str, tuple[int, ...]] = {"embed.weight": (32, 6)}
    for i in (0, 1):
        tensors |= {f"layers.{i}.attn.weight": (6, 6), f"layers.{i}.moe.gate.weight": (8, 6)}
        tensors |= {f"layers.{i}.moe.experts.{name}": shape for name, shape in own.items()}
    names = {"layers.0.moe.experts.up": ("layers.1.moe.experts.up",)} if tied else {}
    if tied:
        del tensors["layers.1.moe.experts.up"]
    return graph(MODULES, tensors, tied=names)


def on(plan: dict[str, Any], *rules: Any, **shapes: tuple[int, ...]) -> Assignment:
    return decide(plan, *rules, on=mixture(**shapes))


def no(plan: dict[str, Any], *rules: Any, **shapes: tuple[int, ...]) -> str:
    return refusal(plan, *rules, on=mixture(**shapes))


def test_experts_are_cut_by_ep_and_by_what_it_leaves_of_dp_shard():
    found = on(PLAN, SPREAD)
    assert str(found.mesh) == "dp_shard 8 (ep 2)"
    assert found.mesh.world_size == 8
    assert stored(found, "layers.0.moe.experts.up") == "S(0)@ep,efsdp"
    assert str(found.tensors["layers.0.moe.experts.up"].computed) == "S(0)@ep"
    assert stored(found, "layers.0.moe.gate.weight") == "S(0)@dp_shard"
    unit = found.units["layers.1.moe.experts"]
    assert (unit.shard_axes, unit.replicate_axes, unit.casts_inputs) == (("efsdp",), (), False)
    assert found.units["layers.1"].shard_axes == ("dp_shard",)
    assert [use.num_experts for use in found.experts.values()] == [8, 8]


@pytest.mark.parametrize(
    ("mesh", "shape", "layout", "local"),
    [
        ({"dp_shard": 8, "ep": "4 in dp_shard"}, (8, 12, 6), "S(0)@ep,efsdp", (1, 12, 6)),
        ({"dp_shard": 8, "ep": "8 in dp_shard"}, (8, 12, 6), "S(0)@ep,efsdp", (1, 12, 6)),
        # Fewer experts on a rank than ranks that share them: the next dim that divides.
        ({"dp_shard": 16, "ep": "2 in dp_shard"}, (8, 24, 6), "S(0)@ep S(1)@efsdp", (4, 3, 6)),
        ({"dp_shard": 16, "ep": "2 in dp_shard"}, (8, 6, 24), "S(0)@ep S(2)@efsdp", (4, 6, 3)),
        # None divides: padded along the first.
        ({"dp_shard": 6, "ep": "2 in dp_shard"}, (8, 7, 5), "S(0)@ep,efsdp", (2, 7, 5)),
        (
            {"dp_replicate": 2, "dp_shard": 4, "ep": "2 in dp_shard"},
            (8, 12, 6), "S(0)@ep,efsdp", (2, 12, 6),
        ),
    ],
)  # fmt: skip
def test_the_dim_that_is_cut(mesh, shape, layout, local):
    found = on({"mesh": mesh}, SPREAD, up=shape)
    placed = found.tensors["layers.0.moe.experts.up"]
    assert (str(placed.stored), placed.local_shape(found.mesh)) == (layout, local)


def test_a_rule_on_dp_shard_is_about_what_ep_leaves():
    along = on(PLAN, SPREAD, rule("**.experts", place={"dp_shard": "S(1)"}), down=(8, 8, 12))
    assert stored(along, "layers.0.moe.experts.up") == "S(0)@ep S(1)@efsdp"
    shared = on(PLAN, SPREAD, rule("layers.*", place="shard"), up=(8, 12, 8))
    assert stored(shared, "layers.0.moe.experts.up") == "S(0)@ep,efsdp"
    whole = on(PLAN, SPREAD, rule("**.experts", place={"dp_shard": "R"}))
    assert stored(whole, "layers.0.moe.experts.up") == "S(0)@ep"
    unit = whole.units["layers.0.moe.experts"]
    assert (unit.shard_axes, unit.replicate_axes) == ((), ("efsdp",))


def test_every_rank_holds_its_own_experts():
    mesh = Mesh((Axis("dp_replicate", 2), Axis("dp_shard", 4)), (Loan("ep", 2, "dp_shard"),))
    assert [mesh.coordinates(rank)["ep"] for rank in range(8)] == [0, 1] * 4
    assert [mesh.coordinates(rank)["efsdp"] for rank in range(8)] == [0, 0, 1, 1] * 2
    assert mesh.size("ep", "efsdp") == mesh.size("dp_shard") == 4
    placed = on({"mesh": {"dp_replicate": 2, "dp_shard": 4, "ep": "2 in dp_shard"}}, SPREAD)
    layout = placed.tensors["layers.0.moe.experts.up"].stored
    firsts = [layout.slices((8, 12, 6), mesh, rank)[0] for rank in range(8)]
    assert [s.start for s in firsts] == [0, 4, 2, 6] * 2
    assert all(s.stop == s.start + 2 for s in firsts)


def test_ep_of_one_cuts_nothing():
    found = on({"mesh": {"dp_shard": 8, "ep": 1}}, SPREAD)
    layouts = {p.stored.spell(found.mesh) for p in found.tensors.values()}
    assert layouts == {"S(0)@dp_shard", "S(0)@efsdp"}
    plain = on({"mesh": {"dp_shard": 8, "ep": "1 in dp_shard"}})
    assert {p.stored.spell(plain.mesh) for p in plain.tensors.values()} == {"S(0)@dp_shard"}


BORROWED: dict[str, dict[str, Any]] = {
    "mesh.ep: ep is not a separate mesh axis: it borrows the ranks of dp_shard\n"
    "    fix: write ep: 2 in dp_shard": {"dp_shard": 4, "ep": 2},
    "mesh.ep: ep is not a separate mesh axis: it borrows the ranks of dp_shard\n"
    "    fix: write mesh: {dp_shard: N, ep: 1 in dp_shard}": {"tp": 2, "ep": 1},
    "mesh.ep: ep cannot borrow ranks from dp_replicate, only from dp_shard\n"
    "    fix: write ep: 2 in dp_shard": {
        "dp_replicate": 2, "dp_shard": 4, "ep": "2 in dp_replicate",
    },
    "mesh.ep: 3 does not divide dp_shard: 8\n    fix: write a divisor of 8": {
        "dp_shard": "auto", "ep": "3 in dp_shard",
    },
}  # fmt: skip


@pytest.mark.parametrize("message", BORROWED)
def test_what_ep_cannot_borrow(message):
    plan = {"mesh": BORROWED[message], "hardware": {"gpus_per_node": 8}}
    if BORROWED[message].get("ep") != "3 in dp_shard":
        del plan["hardware"]
    assert no(plan, SPREAD) == message


REFUSED: dict[str, tuple[dict[str, Any], list[Any], dict[str, tuple[int, ...]]]] = {
    "mesh.ep: the ep axis of size 2 shards nothing: no rule places a module on ep": (PLAN, [], {}),
    "rules[0].place.ep: the mesh has no axis ep (it has dp_shard 8)": (
        {"mesh": {"dp_shard": 8}}, [SPREAD], {},
    ),
    "rules[1].place.ep: the mesh has no axis ep (it has tp 2)": (
        {"mesh": {"tp": 2}}, [rule("**.attn", place={"tp": "colwise_gather_output"}),
                              rule("**.experts", place={"ep": "R"})], {},
    ),
    "rules[0].place.ep: 'S(0)' is not a style of the axis ep": (
        PLAN, [rule("**.experts", place={"ep": "S(0)"})], {},
    ),
    "rules[0].place.ep: ep is stated for a parameter, but experts are distributed with "
    "their module": (
        PLAN, [rule({"param": "**.up"}, place={"ep": "ep_dispatch_experts"})], {},
    ),
    "rules[0].place.ep: 'layers' (ModuleList) is a container whose experts are called one by "
    "one by the code around it: ep has no single call at which to exchange tokens": (
        PLAN, [rule("layers", place={"ep": "ep_dispatch_experts"})], {},
    ),
    "rules[0].place.ep: 'layers.0.moe' (other) does not stack its experts: not all parameters have "
    "the experts as dim 0 (gate.weight [8, 6], experts.up [8, 12, 6], experts.down [8, 6, 12])": (
        PLAN, [rule("layers.0.moe", place={"ep": "ep_dispatch_experts"})], {},
    ),
    "rules[0].place.ep: 'layers.0.moe.experts' (other) does not stack its experts: not all "
    "parameters have the experts as dim 0 (up [8, 12, 6], down [8, 6, 12], norm [6])": (
        PLAN, [SPREAD], {"norm": (6,)},
    ),
    "rules[0].place.ep: 'layers.0.attn' (Linear) does not stack its experts: not all parameters "
    "have the experts as dim 0 (weight [6, 6])": (
        PLAN, [rule("**.attn", place={"ep": "ep_dispatch_experts"})], {},
    ),
    "rules[0].place.ep: 'layers.0.moe.experts' (other) has 7 experts, which do not divide by ep 2":
        (PLAN, [SPREAD], {"up": (7, 12, 6), "down": (7, 6, 12)}),
    "rules[1].place.dp_shard: layers.0.moe.experts.up contains experts that ep distributes: it "
    "cannot be replicated separately": (
        PLAN, [SPREAD, rule({"param": "**.up"}, place={"dp_shard": "R"})], {},
    ),
    "rules[1].unit: 'layers.0.moe.experts' differs from the module around it in placement, "
    "resharding, precision, dtype or offload, so it must be a unit": (
        PLAN, [SPREAD, rule("**.experts", unit=False)], {},
    ),
    "rules[1].reshard_after_forward: reshard_after_forward: 4 is not a divisor of efsdp 4 between "
    "1 and 4": (PLAN, [SPREAD, rule("layers.*", reshard_after_forward=4)], {}),
    "rules[1].reshard_after_forward: reshard_after_forward: 2 on 'layers.0.moe.experts' is not "
    "available yet in this version, since ep shards layers.0.moe.experts.up": (
        PLAN, [SPREAD, rule("layers.0", reshard_after_forward=2)], {},
    ),
    "rules[1].reshard_after_forward: reshard_after_forward: 2 on 'layers.0' is not available yet "
    "in this version, since tp shards layers.0.attn.weight": (
        {"mesh": {"dp_shard": 4, "tp": 2}},
        [rule("**.attn", place={"tp": "colwise_gather_output"}),
         rule("layers.0", reshard_after_forward=2)], {},
    ),
    "rules[0].place.ep: layers.0.moe.experts.up is sharded by both tp (tp: S(1)) and ep, which is "
    "not available yet in this version": (
        {"mesh": {"dp_shard": 2, "tp": 2, "ep": "2 in dp_shard"}},
        [SPREAD, rule("**.experts", place={"tp": "S(1)"})], {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_spread_is_refused_once(message):
    plan, rules, shapes = REFUSED[message]
    told = no(plan, *rules, **shapes).split("\n")
    assert told[0] == message
    assert len(told) == 2
    assert told[1].startswith("    fix: ")


def test_the_fix_names_the_module_below():
    told = no(PLAN, rule("layers.0.moe", place={"ep": "ep_dispatch_experts"}))
    assert told.endswith("fix: match 'layers.0.moe.experts'")


def test_tied_experts_are_refused():
    told = refusal(PLAN, SPREAD, on=mixture(tied=True))
    assert "are one tensor, which ep would shard under only one of these names" in told


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ({"tp": "ep_dispatch_experts"}, "'ep_dispatch_experts' is not a style of the axis tp"),
        ({"ep": "colwise"}, "'colwise' is not a style of the axis ep"),
        ({"dp_shard": "ep_dispatch_experts"}, "is not a style of the axis dp_shard"),
    ],
)
def test_a_style_on_another_axis_is_refused_by_the_reader(place, message):
    with pytest.raises(SpecError, match=message):
        load_spec({"version": 1, "mesh": {"dp_shard": 2}, "rules": [rule("x", place=place)]})


def test_the_digest_tells_ep_apart():
    def digest(ep: int) -> str:
        spec = load_spec({"version": 1, "mesh": MESH | {"ep": f"{ep} in dp_shard"},
                          "rules": [SPREAD]})  # fmt: skip
        return make_plan(spec, mixture()).digest()

    assert len({digest(2), digest(4), digest(8)}) == 3


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_a_config_file_is_enough(family, tmp_path):
    config = {"model_type": family, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = {"version": 1, "mesh": MESH, "rules": [SPREAD]}
    checked = check_plan(plan, config=tmp_path)
    assert checked.problems == ()
    assert checked.plan is not None
    fused = checked.plan.assignment.tensors["model.layers.0.mlp.experts.gate_up_proj"]
    assert str(fused.stored) == "S(0)@ep,efsdp"


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_a_config_file_gives_the_graph_of_the_live_model(family):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from meshplan.runtime.trace.structure import graph_of

    config = {"num_hidden_layers": 2, "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48,
              "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
    parsed = transformers.AutoConfig.for_model(family, **config)
    with torch.device("meta"):
        live = graph_of(transformers.AutoModelForCausalLM.from_config(parsed))
    assert from_mapping(config | {"model_type": family}).tensors == live.tensors
    assert live.tensors["model.layers.0.mlp.gate.weight"].dims == ("expert", "in")


def test_problems_of_a_mesh_are_raised_without_a_model():
    with pytest.raises(PlanError, match="ep is not a separate mesh axis"):
        decide({"mesh": {"dp_shard": 4, "ep": 2}})
