"""Every recipe of `plans/`, as it is: found by name, checked, shown, and what it decides."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

import meshplan
from meshplan import decide
from meshplan.cli.app import main
from meshplan.errors import SpecError
from meshplan.runtime.demo import entry_of
from meshplan.runtime.demo_model import next_byte_loss
from meshplan.spec.reader import load_spec
from meshplan.spec.recipes import find_plan, recipe_names, recipe_path
from tests.helpers.wide import leaving

ROOT = Path(__file__).parents[2]

ALONE = ("ddp", "zero1", "full_shard", "tp_auto", "hybrid_mixture")
"""Recipes of which the others train every part, or other tests do."""
DECIDED = {
    "ddp": ("dp_replicate 8", "ddp", "ddp", {"R"}),
    "zero1": ("dp_shard 8", "zero1", "units", {"S(0)@dp_shard"}),
    "zero2": ("dp_shard 8", "zero2", "units", {"S(0)@dp_shard"}),
    "full_shard": ("dp_shard 8", "full_shard", "units", {"S(0)@dp_shard"}),
    "hybrid_2x4": ("dp_replicate 2 x dp_shard 4", "hybrid_shard", "units", {"S(0)@dp_shard"}),
    "hybrid_mixture": (
        "dp_replicate 2 x dp_shard 4", "hybrid_shard", "units", {"S(0)@dp_shard", "R"},
    ),
    "context_parallel": (
        "dp_shard 4 x cp 2", "full_shard", "units", {"S(0)@dp_shard,cp"},
    ),
    "tp": ("tp 4", "ddp", "none", {"S(0)@tp", "S(1)@tp", "R"}),
    "tp_auto": (
        "dp_shard 4 x tp 2", "full_shard", "units",
        {"S(0)@tp,dp_shard", "S(0)@dp_shard S(1)@tp", "S(0)@dp_shard"},
    ),
    "tp_full_shard": (
        "dp_shard 4 x tp 2", "full_shard", "units",
        {"S(0)@tp,dp_shard", "S(0)@dp_shard S(1)@tp", "S(0)@dp_shard"},
    ),
    "moe_ep": (
        "dp_shard 8 (ep 2)", "full_shard", "units", {"S(0)@dp_shard", "S(0)@ep,efsdp"},
    ),
    "pp_fsdp_tp": (
        "pp 2 x dp_shard 2 x tp 2", "full_shard", "units",
        {"S(0)@tp,dp_shard", "S(0)@dp_shard S(1)@tp", "S(0)@dp_shard"},
    ),
    "tp_hybrid": (
        "dp_replicate 2 x dp_shard 2 x tp 2", "hybrid_shard", "units",
        {"S(0)@tp,dp_shard", "S(0)@dp_shard S(1)@tp", "S(0)@dp_shard"},
    ),
}  # fmt: skip
"""Per recipe: mesh, strategy, wrapper, and every layout that occurs."""

MODELS = {"moe_ep": "ByteMixture, 1,987,712 parameters"}
"""The model of a recipe that has one of its own."""


def model_of(name: str) -> str:
    return MODELS.get(name, "ByteLlama, 803,968 parameters")


def test_the_table_is_complete():
    assert {*DECIDED, "auto", "auto_experts"} == set(recipe_names())
    assert set(recipe_names()) == {path.stem for path in (ROOT / "plans").glob("*.yaml")}


@pytest.mark.parametrize("name", DECIDED)
def test_a_recipe_decides_what_it_says(name):
    plan = decide(recipe_path(name))
    layouts = {p.stored.spell(plan.mesh) for p in plan.assignment.tensors.values()}
    decided = (str(plan.mesh), plan.assignment.strategy.name, plan.assignment.wrapper, layouts)
    assert decided == DECIDED[name]
    assert plan.micro * plan.accumulate * plan.num_data_ranks == 32
    assert plan.assignment.warnings == ()


@pytest.mark.parametrize("name", DECIDED)
def test_a_recipe_checks_and_shows(name, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    path = f"plans/{name}.yaml"
    assert main(["check", "-f", path]) == 0
    assert capsys.readouterr() == (
        f"{path}: ok, {model_of(name).partition(',')[0]} on {DECIDED[name][0]}\n", "",
    )  # fmt: skip
    assert main(["show", "-f", path]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"{model_of(name)}, under {path}\n")
    assert err == ""


def text(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of a step."""
    found = torch.arange(32 * 17).mul(step * 7 + 11).remainder(251).view(32, 17)
    return found[:, :-1], found[:, 1:]


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train_alone(model: torch.nn.Module, clip: float | None) -> list[float]:
    """The losses of three steps of one process."""
    optimizer, losses = sgd(model), []
    for step in range(3):
        inputs, targets = text(step)
        loss = next_byte_loss(model(inputs), targets)
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def run_as_it_is(path: str) -> tuple[float, float] | None:
    """Three steps of the recipe's own model and batch against one process: largest differences.

    The first rank alone compares.
    """
    module, _, function = load_spec(path).model.entry.partition(":")
    build = getattr(importlib.import_module(module), function)
    torch.manual_seed(0)
    model = meshplan.parallelize(build(), path)
    optimizer, losses = sgd(model), []
    for step in range(3):
        mine = meshplan.local_batch(model, text(step))
        losses.append(meshplan.train_step(model, optimizer, *mine, next_byte_loss))
    live = meshplan.full_state_dict(model)
    if torch.distributed.get_rank():
        return None
    torch.manual_seed(0)
    alone = build()
    expected = train_alone(alone, model.meshplan.plan.spec.clip_grad_norm)
    apart = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    return apart, max((live[n] - t).abs().max().item() for n, t in alone.state_dict().items())


@pytest.mark.parametrize("name", leaving(DECIDED, lambda _, name: name in ALONE))
def test_a_recipe_trains_as_one_process_does(pool, name):
    world = 4 if name == "tp" else 8
    loss, state = pool(world).run(run_as_it_is, str(recipe_path(name)))[0]
    assert loss <= 1e-6
    assert state <= 1e-6


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("auto", "LlamaForCausalLM"),
        pytest.param("auto_experts", "MixtralForCausalLM", marks=pytest.mark.wide),
    ],
)
def test_auto_is_planned_where_it_is_read(monkeypatch, capsys, name, model):
    monkeypatch.chdir(ROOT)
    assert main(["check", "-f", f"plans/{name}.yaml"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"plans/{name}.yaml: ok, {model} on ")
    assert f"there is no {name}.lock.yaml: planning" in err


def test_a_recipe_is_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert find_plan("tp") == Path("plans/tp.yaml")
    monkeypatch.chdir(tmp_path)
    assert find_plan("tp") == ROOT / "plans/tp.yaml"
    assert find_plan("tp.yaml") == Path("tp.yaml"), "a path, which its reader will miss"
    Path("tp").touch()
    assert find_plan("tp") == Path("tp"), "a file of the user's goes first"


def test_no_such_recipe():
    with pytest.raises(SpecError) as caught:
        find_plan("tpp")
    assert str(caught.value) == (
        "meshplan: 1 problem\n--plan: there is no recipe 'tpp'\n"
        f"    fix: use {', '.join(recipe_names())}, or the path of a plan file"
    )


def test_the_demo_trains_the_model_of_a_recipe_that_has_one_of_its_own():
    entries = {name: entry_of(load_spec(recipe_path(name))) for name in ("ddp", "moe_ep")}
    assert entries == {
        "ddp": "meshplan.runtime.demo_model:build",
        "moe_ep": "meshplan.runtime.demo_moe:build",
    }
