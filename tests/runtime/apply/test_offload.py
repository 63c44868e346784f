"""Offloading to the host: the numbers of one process, the device's bytes and the host's, refusals.

Which seeded bug would this catch? A copy forgotten on the way there or back, a copy freed late, an
optimizer's state on the wrong side, a unit that stays on the device, weights copied as activations.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch

from meshplan.assign import assign
from meshplan.errors import PlanError
from meshplan.memory.analytic.estimate import estimate_analytic
from meshplan.memory.answer.states import state_bytes
from meshplan.model.blueprint import from_mapping
from meshplan.plan.plan import Plan, make_plan
from meshplan.render.layouts.show import plan_to_text
from meshplan.render.memory.memory import memory_to_json, memory_to_text
from meshplan.runtime.apply import offload
from meshplan.runtime.base.host_copies import to_host
from meshplan.runtime.estimate.changes import changes_of
from meshplan.spec.reader import load_spec
from meshplan.traffic import forecast
from tests.helpers import models, offloaded, parity
from tests.helpers.graphs import blocks
from tests.memory.test_analytic import LLAMA
from tests.runtime.apply.test_parity import assert_same

FULL: dict[str, Any] = {"version": 1, "strategy": "full_shard"}
BOTH = {"offload": {"params": True, "activations": True}}
TP: dict[str, Any] = {
    "version": 1, "mesh": {"dp_shard": 2, "tp": 2}, "rules": models.tp_rules("own_llama")
}  # fmt: skip
HSDP: dict[str, Any] = {"version": 1, "mesh": {"dp_replicate": 2, "dp_shard": 2}}
PP: dict[str, Any] = {
    "version": 1, "mesh": {"pp": 2, "dp_shard": 2},
    "pipeline": {"microbatches": 4, "schedule": "1F1B"},
}  # fmt: skip
ROUNDS: dict[str, Any] = {
    "version": 1, "mesh": {"pp": 2, "dp_shard": 2},
    "pipeline": {"microbatches": 4, "schedule": "Interleaved1F1B", "virtual": 2},
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "all": ("own_llama", FULL | BOTH),
    "block by block": ("own_llama", FULL | {"clip_grad_norm": 1e9, "rules": [
        {"match": "layers.0", "offload": "params"},
        {"match": "layers.1", "offload": {"activations": True}}]}),
    "recomputed": ("t5", FULL | BOTH | {"activation_checkpointing": "full"}),
    "replicas of shards, accumulated, bf16": ("t5", HSDP | {
        "offload": "params", "precision": "bf16-mixed", "batch": {"accumulate": 2}}),
    "half recomputed": ("hf_llama", FULL | BOTH | {"activation_checkpointing": "selective"}),
    "odd sizes": ("odd", FULL | {"offload": "params"}),
    "fewer ranks after forward": ("own_llama", FULL | {
        "offload": "params", "precision": "bf16-mixed",
        "rules": [{"match": "layers.*", "reshard_after_forward": 2}]}),
    "zero1, accumulated": ("hf_llama", {
        "version": 1, "strategy": "zero1", "offload": "params", "batch": {"accumulate": 2}}),
    "stages": ("own_llama", PP | BOTH | {"clip_grad_norm": 1e9}),
    "stages, parameters": ("own_llama", PP | {"offload": "params", "precision": "bf16-mixed"}),
    "stages, recomputed, accumulated": ("own_llama", PP | BOTH | {
        "pipeline": {"microbatches": 2, "schedule": "1F1B"},
        "activation_checkpointing": "full", "batch": {"accumulate": 2}}),
    "rounds": ("own_llama", ROUNDS | BOTH),
}  # fmt: skip
PARITY: dict[str, tuple[str, dict[str, Any]]] = {
    "all": CASES["all"],
    "block by block": CASES["block by block"],
    "ddp": ("own_llama", {"version": 1, "strategy": "ddp", "offload": {"activations": True}}),
    "tp": ("own_llama", TP | BOTH),
    "cp": ("own_llama", {"version": 1, "mesh": {"dp_shard": 2, "cp": 2}} | BOTH),
    "pp": ("own_llama", PP | {"offload": {"activations": True}}),
    "pp, all": ("own_llama", PP | BOTH | {"clip_grad_norm": 1.0}),
    "rounds, all": ("own_llama", ROUNDS | BOTH),
    "replicas of shards": ("t5", HSDP | BOTH),
    "convolutions": ("resnet", FULL | BOTH),
    "recomputed": ("t5", FULL | BOTH | {"activation_checkpointing": "full"}),
}


def marked(*cells: Any, default: Any) -> list[Any]:
    return [pytest.param(*c, marks=[] if c in default else [pytest.mark.wide]) for c in cells]


@pytest.mark.parametrize("case", marked(*((c,) for c in PARITY), default=[("block by block",)]))
def test_it_computes_what_one_process_computes(pool: Any, case: str) -> None:
    assert_same(pool(4).run(parity.train, *PARITY[case])[0])


@pytest.mark.parametrize(
    ("case", "is_apart"),
    marked(
        *((c, is_apart) for c in CASES for is_apart in (False, True)),
        default=[("odd sizes", True)],
    ),
)
def test_every_phase_is_exact_on_both_sides(
    pool: Any, apart: ProcessPoolExecutor, case: str, is_apart: bool
) -> None:
    model, plan = CASES[case]
    waiting = apart.submit(offloaded.imagined, model, plan, 4, is_apart=is_apart)
    real = pool(4).run(offloaded.measured, model, plan, 2, is_apart=is_apart)[0]
    found = waiting.result()
    assert isinstance(found, tuple), found
    whole, composed = found
    if whole != real:
        real = pool(4).run(offloaded.measured, model, plan, 12, is_apart=is_apart)[0]
    assert whole == real
    assert composed in (whole, "activations")
    assert (whole[1] > 0) == is_apart


def plan_of(**more: Any) -> Plan:
    hardware = {"gpus_per_node": 4, "gpu": "a100-sxm-80gb"}
    spec = FULL | {"hardware": hardware, "batch": {"micro": 1, "seq_len": 32}} | more
    return make_plan(load_spec(spec), from_mapping(LLAMA))


def told(plan: Plan) -> Any:
    return estimate_analytic(plan, device="a100-sxm-80gb", limit_bytes=2**34)


def test_a_step_told_without_torch_tells_both_sides() -> None:
    there, here = plan_of(offload="params"), plan_of()
    offloaded_group, group = told(there).worst, told(here).worst
    states = state_bytes(there.assignment, "adamw")
    assert states == state_bytes(here.assignment, "adamw")
    assert states.host_bytes == states.total_bytes - states.buffers_bytes
    # Nothing of the states is left on the device. On the host the optimizer takes two tensors of
    # a parameter besides, while it holds one of the parameter before.
    left = offloaded_group.terms
    assert not {"parameters", "optimizer"} & {str(term) for term in left}
    kept = [p.stored.local_numel(p.info.shape, there.mesh) * 4
            for p in there.assignment.tensors.values() if not p.info.is_buffer]  # fmt: skip
    assert 2 * max(kept) <= offloaded_group.host_bytes - 4 * sum(kept) <= 3 * max(kept)
    assert states.host_bytes == 4 * sum(kept) + 4 * len(kept)
    assert group.host_bytes == 0
    assert offloaded_group.peak.requested_bytes < group.peak.requested_bytes
    (json,) = memory_to_json(told(there))["groups"]
    assert json["host_bytes"] == offloaded_group.host_bytes
    assert any(line.startswith("host memory: ") for line in memory_to_text(told(there), "x"))
    assert not any(line.startswith("host memory: ") for line in memory_to_text(told(here), "x"))


def test_what_is_offloaded_is_shown_and_part_of_the_decision() -> None:
    plans = [plan_of(), plan_of(offload="params"), plan_of(offload={"activations": True})]
    assert len({plan.digest() for plan in plans}) == 3
    shown = "\n".join(plan_to_text(plans[1]))
    assert "at rest in host memory" in shown
    assert "on the host" in shown
    assert "offload: activations" in "\n".join(plan_to_text(plans[2]))
    assert "host" not in "\n".join(plan_to_text(plans[0]))


def test_what_a_unit_on_the_host_holds_lies_there() -> None:
    for there in (True, False):
        a = plan_of(**({"offload": "params"} if there else {})).assignment
        placed = [each for each in a.tensors.values() if each.unit is not None]
        assert placed
        assert all(a.is_on_host(each) is there for each in placed)


def test_both_ways_are_offered_where_they_go() -> None:
    def offered(plan: Plan) -> dict[str, Any]:
        changes = {each.setting: each.spec.offload for each in changes_of(plan)}
        return {setting: spec for setting, spec in changes.items() if "offload" in setting}

    both = offered(plan_of())
    assert list(both) == ["offload: params", "offload: {activations: true}"]
    assert both["offload: params"].params is True
    assert both["offload: {activations: true}"].activations is True
    assert list(offered(plan_of(offload="params"))) == [
        "offload: {params: true, activations: true}"
    ]
    assert list(offered(plan_of(offload={"activations": True}))) == [
        "offload: {params: true, activations: true}"
    ]
    replicas = plan_of(strategy="ddp", mesh={"dp_replicate": 4})
    assert list(offered(replicas)) == ["offload: {activations: true}"]


def refusal(**more: Any) -> str:
    with pytest.raises(PlanError) as caught:
        assign(load_spec({"version": 1, "mesh": {"dp_shard": 2}} | more), blocks())
    return str(caught.value)


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"offload": "optimizer"}, "optimizer states cannot be offloaded alone"),
        ({"offload": {"params": True, "optimizer": False}}, "'optimizer: false' is not possible"),
        ({"offload": "params", "mesh": {"dp_replicate": 2}, "strategy": "ddp"}, "is not sharded"),
        ({"offload": "auto"}, "'offload: auto' is left to the planner"),
        ({"offload": {"activations": True}, "compile": True}, "offloaded activations and compile"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(more: dict[str, Any], what: str) -> None:
    assert what in refusal(**more)


def test_a_rule_may_take_back_what_the_plan_states() -> None:
    spec = {"offload": {"params": True, "activations": True},
            "rules": [{"match": "layers.0", "offload": "none"},
                      {"match": "layers.1", "offload": {"activations": False}}]}  # fmt: skip
    a = assign(load_spec({"version": 1, "mesh": {"dp_shard": 2}} | spec), blocks())
    assert not a.units["layers.0"].on_host
    assert a.units["layers.1"].on_host
    assert a.units[""].on_host
    assert not {"layers.0", "layers.1"} & a.host_activations.keys()


def test_only_activations_move_and_come_back_as_they_were(monkeypatch: Any) -> None:
    """Not weights, nor views of them; nor what is too small to be worth it."""
    moved: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        moved.append(tensor)
        return to_host(tensor)

    monkeypatch.setattr(offload, "to_host", note)
    torch.manual_seed(0)
    block = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    x = torch.randn(32, 64, requires_grad=True)
    expected = torch.autograd.grad(block(x).sum(), [x, *block.parameters()])
    block.forward = offload.kept_on_host(block)
    out = block(x)
    own = {p.untyped_storage()._cdata for p in block.parameters()}
    assert moved
    assert not own & {tensor.untyped_storage()._cdata for tensor in moved}
    assert {tuple(tensor.shape) for tensor in moved} == {(32, 64)}
    found = torch.autograd.grad(out.sum(), [x, *block.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    with torch.no_grad():
        moved.clear()
        block(x)
        assert not moved


def test_norms_of_what_lies_on_the_host_are_sent_apart() -> None:
    """What lies on one side only is one number; on both sides, two (`meshplan verify` counts)."""
    some = [{"match": "model.layers.0", "offload": "params"}]
    for more, count in (({}, 1), ({"offload": "params"}, 1), ({"rules": some}, 2)):
        told = forecast(plan_of(clip_grad_norm=1.0, **more))
        norms = [t for t in told.traffic if t.what == "the norm of the gradients"]
        assert sum(each.count for each in norms) == count
