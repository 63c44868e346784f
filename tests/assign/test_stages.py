"""Where a model is cut, what crosses the cuts, and what is refused: no process needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from meshplan.assign.axes.stages import balance
from meshplan.errors import PlanError
from meshplan.model.stage_boundary import UnitFlow, unit_calls
from meshplan.plan.plan import Plan, make_plan
from meshplan.runtime.trace.ops import record
from meshplan.runtime.trace.structure import graph_of
from meshplan.spec.reader import load_spec
from tests.bench import wild_cases
from tests.helpers import models
from tests.runtime.apply.test_pipeline import UNet


def decided(name: str, more: dict[str, Any], world: int = 2, with_flow: bool = True) -> Plan:
    model = UNet() if name == "unet" else models.build(name)
    inputs = torch.zeros(2, 3, 16, 16) if name == "unet" else models.batch(name, 0, 2)[0]
    graph = graph_of(model, record(model, inputs) if with_flow else None)
    spec = load_spec({"version": 1, "mesh": {"pp": world}} | more)
    return make_plan(spec, graph, world_size=world)


def units(plan: Plan) -> list[list[str]]:
    stages = plan.assignment.stages
    assert stages is not None
    return [[m for m, s in stages.units if s == number] for number in range(stages.num)]


def refusal(name: str, more: dict[str, Any], world: int = 2) -> str:
    with pytest.raises(PlanError) as caught:
        decided(name, more, world)
    return str(caught.value)


@pytest.mark.parametrize("with_flow", [True, False])
def test_blocks_are_balanced_with_or_without_a_recorded_forward(with_flow):
    found = decided("own_llama", {}, with_flow=with_flow)
    assert units(found) == [["embed", "layers.0", "layers.1"],
                            ["layers.2", "layers.3", "norm", "head"]]  # fmt: skip


def test_a_rank_with_nothing_to_train_is_warned_about():
    def told(frozen: tuple[str, ...]) -> list[str]:
        model = models.build("own_llama")
        for name in frozen:
            model.get_submodule(name).requires_grad_(False)
        spec = load_spec({"version": 1, "mesh": {"pp": 2}})
        graph = graph_of(model, record(model, models.batch("own_llama", 0, 2)[0]))
        return [str(w) for w in make_plan(spec, graph, world_size=2).assignment.warnings]

    assert told(("embed", "layers.0")) == []
    (warning,) = told(("embed", "layers.0", "layers.1"))
    assert "no parameter of pp rank 0 is trainable" in warning


class Backwards(nn.Module):
    """Defined the other way round than it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.middle, self.first = nn.Linear(8, 2), nn.Linear(8, 8), nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.middle(self.first(x)))


def test_a_cut_without_a_recorded_forward_says_that_it_may_differ():
    spec = load_spec({"version": 1, "mesh": {"pp": 3}})
    model = Backwards()
    guessed = make_plan(spec, graph_of(model), world_size=3)
    told = [str(warning) for warning in guessed.assignment.warnings]
    assert units(guessed) == [["out"], ["middle"], ["first"]]
    assert len(told) == 1
    assert "parallelize follows the order in which they run, which may differ" in told[0]
    assert "--model" in told[0]
    exact = make_plan(spec, graph_of(model, record(model, torch.zeros(2, 4))), world_size=3)
    assert units(exact) == [["first"], ["middle"], ["out"]]
    assert exact.assignment.warnings == ()


def test_a_stage_refused_by_the_order_of_definition_says_so():
    split = {"pipeline": {"split": [["first"], ["middle"], ["out"]]}}
    spec = load_spec({"version": 1, "mesh": {"pp": 3}} | split)
    model = Backwards()
    with pytest.raises(PlanError) as caught:
        make_plan(spec, graph_of(model), world_size=3)
    assert "is defined after" in str(caught.value)
    assert "name the model with --model" in str(caught.value)
    make_plan(spec, graph_of(model, record(model, torch.zeros(2, 4))), world_size=3)


def test_statistics_of_microbatches_are_told():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    graph = graph_of(model, record(model, torch.zeros(2, 4)))
    for count, is_told in ((1, False), (4, True)):
        pipeline = {"schedule": "GPipe", "microbatches": count}
        spec = load_spec({"version": 1, "mesh": {"pp": 2}, "pipeline": pipeline})
        told = "\n".join(map(str, make_plan(spec, graph, world_size=2).assignment.warnings))
        assert ("for each of the 4 pipeline microbatches" in told) == is_told


def test_each_stage_holds_what_it_reads_and_no_more():
    found = decided("hf_llama_tied", {}).assignment.stages
    assert found.tensors["model.embed_tokens.weight"] == (0, 1)
    assert found.tensors["model.layers.0.mlp.up_proj.weight"] == (0,)
    assert found.tensors["model.norm.weight"] == (1,)
    assert found.tensors["model.rotary_emb.inv_freq"] == (0, 1)


class Scaled(nn.Module):
    """A buffer of the root, and those of modules that run in one stage each."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(4))
        self.first = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.second = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    def forward(self, x):
        return self.second(self.first(x)) * self.scale


@pytest.mark.parametrize("with_flow", [True, False])
def test_a_buffer_is_held_wherever_its_module_runs(with_flow):
    """The root runs in every stage, whichever of them reads its buffer."""
    model = Scaled()
    graph = graph_of(model, record(model, torch.zeros(2, 4)) if with_flow else None)
    stages = make_plan(
        load_spec({"version": 1, "mesh": {"pp": 2}}), graph, world_size=2
    ).assignment.stages
    assert stages is not None
    assert stages.tensors["scale"] == (0, 1)
    assert stages.tensors["first.1.running_mean"] == (0,)
    assert stages.tensors["second.1.running_mean"] == (1,)


def test_a_table_that_the_head_shares_weighs_where_it_is_read_first():
    cut = units(decided("hf_llama_tied", {}, with_flow=False))
    assert cut[0][0] == "model.embed_tokens"
    assert cut == units(decided("hf_llama_tied", {}))


def test_encoder_and_decoder_follow_each_other():
    first, second = units(decided("t5", {}))
    assert first[0] == "encoder.embed_tokens"
    assert second[-1] == "lm_head"
    assert "encoder.block.0" in first
    assert "decoder.block.1" in second


def test_rules_and_lists_cut_where_they_say():
    by_rule = decided("own_llama", {"rules": [{"match": "layers.3", "stage": "last"}]}, 2)
    assert units(by_rule)[1] == ["layers.3", "norm", "head"]
    by_list = {"pipeline": {"split": [["embed"], ["layers.1", "head"]]}}
    assert units(decided("own_llama", by_list))[0] == ["embed", "layers.0"]
    inside = {"pipeline": {"split": [["embed", "layers.0.attn"], ["layers.0.norm2"]]}}
    assert units(decided("own_llama", inside))[0] == ["embed", "layers.0.norm1", "layers.0.attn"]


def test_stages_are_part_of_what_ranks_agree_on():
    one, other = ({"pipeline": {"split": [["embed"], [f"layers.{n}"]]}} for n in (1, 2))
    assert decided("own_llama", one).digest() != decided("own_llama", other).digest()


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"pipeline": {"split": [["head"], ["embed"]]}}, "'head' is assigned to stage 0, but runs"),
        ({"pipeline": {"split": [["embed"], ["hed"]]}}, "did you mean 'head'?"),
        ({"pipeline": {"split": [["embed"]]}}, "split has 1 stages, but the plan has 2"),
        ({"rules": [{"match": "head", "stage": 5}]}, "to stage 5, but there are only 2"),
        ({"rules": [{"match": "embed", "stage": "last"}]}, "no module is in stage 0"),
        ({"pipeline": {"schedule": "ZBVZeroBubble", "virtual": 3}}, "has 2 stages per rank"),
        ({"pipeline": {"schedule": "DualPipeV", "microbatches": 2}}, "at least 4 microbatches"),
        ({"pipeline": {"schedule": "Interleaved1F1B", "microbatches": 5}}, "a multiple of 2"),
        ({"pipeline": {"schedule": "Interleaved1F1B", "virtual": 1}}, "at least 2 stages"),
        ({"pipeline": {"schedule": "ZBVZeroBubble"}, "activation_checkpointing": "full"},
         "activations would be recomputed in each half"),
        ({"activation_checkpointing": "full",
          "pipeline": {"split": [["embed", "layers.0.attn"], ["layers.0.norm2"]]}},
         "is recomputed as a whole, so it cannot be split"),
        ({"mesh": {"tp": 2}, "pipeline": {}}, "'pipeline' has no effect without a pp axis"),
        ({"mesh": {"tp": 2}, "rules": [{"match": "head", "stage": 1}]}, "'stage' has no effect"),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_so_is_refused(more, why):
    assert why in refusal("own_llama", more)


def test_all_names_that_no_module_has_are_told():
    said = refusal("own_llama", {"pipeline": {"split": [["embde", "layer"], ["hed"]]}})
    assert all(f"'{name}' is not a module of" in said for name in ("embde", "layer", "hed"))


def test_fewer_modules_than_stages_are_refused():
    more = {"mesh": {"pp": 64}}
    assert "fewer than 64 stages" in refusal("resnet", more, 64)


def test_a_skip_is_relayed_through_the_stages_between():
    model = UNet()
    flow = record(model, torch.zeros(2, 3, 16, 16))
    calls = unit_calls(flow, {""})
    assert [call.module for call in calls][:4] == ["down1", "down2", "down3", "middle"]
    cut = UnitFlow(flow, calls)
    relay = cut.relay([0, 1, 1, 1, 1, 2, 2, 2], 3)
    made = {call.outputs[0][1]: call.module for call in calls}
    assert [[made[value] for value in values] for values in relay.crossing] == [
        ["down1"], ["down1", "down2", "up3"],
    ]  # fmt: skip
    assert not list(cut.bonds())


class Glue(nn.Module):
    """A parameter of the root, a mask made between modules, and a residual across the cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x):
        mask = (x > 0).to(x.dtype)
        y = self.first(x)
        return self.second(y * mask) + y * self.gain


def test_glue_is_computed_again_from_what_crosses():
    flow = record(Glue(), torch.zeros(2, 4))
    calls = unit_calls(flow, {""})
    relay = UnitFlow(flow, calls).relay([0, 1], 2)
    assert relay.crossing == ((calls[0].outputs[0][1],),)
    assert "gain" in relay.reads[1]
    assert "gain" not in relay.reads[0]


def test_balance_is_best_among_all_cuts():
    assert balance([5, 1, 1, 1, 5], [True] * 4, 3) == [0, 1, 1, 1, 2]
    assert balance([1, 1, 1, 1], [True, False, True], 2) == [0, 1, 1, 1]
    assert balance([1, 1, 1, 1], [False, False, False], 2) is None
    assert balance([1, 2], [True], 3) is None


def test_a_size_that_depends_on_numbers_crosses_no_cut():
    """Each expert is given as many tokens as chose it, and stays with what adds them up."""
    made = wild_cases.make("moe_dropless")
    ids = made.inputs[: wild_cases.BATCH]
    graph = graph_of(made.model, record(made.model, ids))
    spec = load_spec({"version": 1, "mesh": {"pp": 2}})
    stages = make_plan(spec, graph, world_size=2).assignment.stages
    assert stages is not None
    held = {place for name, place in stages.units if "moe.experts" in name or name == "moe"}
    assert len(held) == 1
    assert len({place for _, place in stages.units}) == 2
    why = {bond.why for bond in UnitFlow(graph.flow, unit_calls(graph.flow, ("", "moe"))).bonds()}
    assert any("returns a tensor whose size depends on its data" in text for text in why)
