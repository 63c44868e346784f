"""Replicas that compute on parts are found before the first update; others are left in peace."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import nn

import meshplan
from tests.helpers import models
from tests.runtime.apply.test_tensor_parallel import COLWISE, NORMS, PLAIN, ROWWISE, TP2, rule

COLUMNS = rule("**.{wk,wv,w1,w3}", tp="colwise")
QUERIES = rule("**.wq", tp="colwise")


def first_step(name: str, plan: dict[str, Any]) -> tuple[str, bool]:
    """(what the first step raises, whether the parameters are still as they were)."""
    model = meshplan.parallelize(BUILD[name](), plan)
    before = [p.detach().clone() for p in model.parameters()]
    sgd = models.optimizer(model)
    inputs, targets = BATCH[name]()
    text = ""
    try:
        meshplan.train_step(model, sgd, *meshplan.local_batch(model, (inputs, targets)), LOSS[name])
    except meshplan.ApplyError as error:
        text = str(error)
    same = all(torch.equal(a.detach(), b) for a, b in zip(model.parameters(), before, strict=True))
    return text, same


class Gated(nn.Module):
    """A parameter between the two projections: it computes on cut features."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.gate = nn.PReLU(init=0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.gate(self.up(x)))


class OneKey(nn.Module):
    """Attention of many heads over the keys and values of one, as in multi-query attention."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(16, 16), nn.Linear(16, 16)
        self.k, self.v = nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (-1, 4)).transpose(-2, -3)
        k, v = (part(x).unsqueeze(-3).expand_as(q) for part in (self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(-2, -3).flatten(-2))


def numbers(*length: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(8, *length, 16, generator=generator) for _ in range(2))


def squared(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (output - targets).square().mean()


ZOO = ("own_llama", "hf_llama", "qwen3")
BUILD = {name: lambda name=name: models.build(name) for name in ZOO}
BUILD |= {"gated": Gated, "one_key": OneKey}
BATCH = {name: lambda name=name: models.batch(name, 0) for name in ZOO}
BATCH |= {"gated": numbers, "one_key": lambda: numbers(4)}
LOSS = dict.fromkeys(ZOO, models.loss) | dict.fromkeys(("gated", "one_key"), squared)

_QWEN3 = [r for r in models.tp_rules("qwen3") if "norm" not in r["match"]]
_NO_LAST_NORM = [*PLAIN, rule("**.{norm1,norm2}", tp="sequence_parallel")]
MISTAKES: dict[str, tuple[str, dict[str, Any], str]] = {
    "norms of cut heads": ("qwen3", TP2 | {"rules": _QWEN3}, "self_attn.q_norm.weight"),
    "a parameter on cut features": (
        "gated",
        TP2 | {"rules": [rule("up", tp="colwise"), rule("down", tp="rowwise")]},
        "gate.weight",
    ),
    "whole keys under cut queries": (
        "one_key",
        TP2 | {"rules": [rule("q", tp="colwise"), rule("out", tp="rowwise")]},
        "k.weight",
    ),
    "a norm on a part of the sequence": (
        "own_llama",
        TP2 | {"sequence_parallel": True, "rules": _NO_LAST_NORM},
        "norm.weight",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_replicas_on_parts_are_refused_before_the_update(pool, case):
    name, plan, parameter = MISTAKES[case]
    for text, same in pool(4).run(first_step, name, plan):
        assert "gradients of replicated parameters differ between ranks of tp" in text
        assert parameter in text
        assert same


def test_the_loss_of_a_part_is_refused_before_the_update(pool):
    """Targets below half of the vocabulary: no index betrays that rank 0 has half the logits."""
    plan = TP2 | {"rules": [COLWISE, ROWWISE, rule("head", tp="colwise")]}
    for text, same in pool(4).run(first_step, "own_llama", plan):
        assert "the model's output is sharded, and each rank computes the loss of its shard" in text
        assert same


RIGHT: dict[str, dict[str, Any]] = {
    "tp": TP2 | {"rules": PLAIN},
    "sequence parallel": TP2 | {"sequence_parallel": True, "rules": [*PLAIN, NORMS]},
    "half precision": TP2 | {"precision": "bf16-mixed", "rules": PLAIN},
    "parts of the model only": TP2
    | {"rules": [COLUMNS, QUERIES, rule("**.{wo,w2}", tp="rowwise")]},
}


@pytest.mark.parametrize("case", RIGHT)
def test_true_replicas_are_left_in_peace(pool, case):
    for text, same in pool(4).run(first_step, "own_llama", RIGHT[case]):
        assert text == ""
        assert not same


class Late(Gated):
    """Its last layer starts at zero, so nothing behind it has a gradient at the first step."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.down.weight)


def steps_until_refused() -> int:
    model = meshplan.parallelize(Late(), MISTAKES["a parameter on cut features"][1])
    sgd = models.optimizer(model)
    batch = meshplan.local_batch(model, numbers())
    for step in range(4):
        try:
            meshplan.train_step(model, sgd, *batch, squared)
        except meshplan.ApplyError:
            return step
    return -1


def test_a_gradient_of_zero_settles_nothing(pool):
    assert pool(4).run(steps_until_refused) == [1] * 4


def whole_sequence() -> str:
    plan = TP2 | {"sequence_parallel": True, "rules": [*PLAIN[:2], NORMS]}
    model = meshplan.parallelize(models.build("own_llama"), plan)
    inputs, _ = meshplan.local_batch(model, models.batch("own_llama", 0))
    try:
        model(inputs)
    except meshplan.ApplyError as error:
        return str(error)
    return ""


def test_a_sequence_that_arrives_whole_is_refused(pool):
    assert "all ranks got the same full sequence" in pool(4).run(whole_sequence)[0]


def old_optimizer() -> str:
    model = models.build("own_llama")
    sgd = models.optimizer(model)
    model = meshplan.parallelize(model, {"version": 1, "strategy": "full_shard"})
    batch = meshplan.local_batch(model, models.batch("own_llama", 0))
    try:
        meshplan.train_step(model, sgd, *batch, models.loss)
    except meshplan.ApplyError as error:
        return str(error)
    return ""


def test_an_optimizer_made_too_early_is_refused(pool):
    assert "it was created before parallelize" in pool(2).run(old_optimizer)[0]


def repaired() -> bool:
    """A wrapping that fails half way leaves nothing behind: the next one works."""
    plan = {"version": 1, "strategy": "full_shard"}
    model = models.build("own_llama")
    room = importlib.import_module("meshplan.runtime.apply.wrap")
    proof, room.check_live = room.check_live, fail
    try:
        meshplan.parallelize(model, plan)
        return False
    except RuntimeError:
        pass
    finally:
        room.check_live = proof
    return hasattr(meshplan.parallelize(model, plan), "meshplan")


def fail(*args: Any) -> None:
    raise RuntimeError("half way")


def test_a_failed_wrapping_can_be_repeated(pool):
    assert pool(2).run(repaired) == [True, True]


def plain_loop() -> str:
    model = meshplan.parallelize(BUILD["gated"](), MISTAKES["a parameter on cut features"][1])
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, targets = numbers()
    squared(model(inputs), targets).backward()
    try:
        sgd.step()
    except meshplan.ApplyError as error:
        return str(error)
    return ""


def test_the_plain_loop_is_watched_too(pool):
    assert "differ between ranks of tp: gate.weight (" in pool(4).run(plain_loop)[0]


class Twins(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)


def sharing() -> nn.Module:
    model = Twins()
    model.b.weight = nn.Parameter(model.a.weight.data)
    return model


def with_gradient() -> nn.Module:
    model = Twins()
    model.b(model.a(torch.ones(1, 8))).sum().backward()
    return model


def with_hook() -> nn.Module:
    model = Twins()
    model.a.weight.register_hook(lambda gradient: gradient * 3)
    return model


def with_alias() -> nn.Module:
    model = Twins()
    model.kept = {"first": [model.a.weight]}
    return model


def refused(make: Any) -> str:
    try:
        meshplan.parallelize(make(), {"version": 1, "strategy": "full_shard"})
    except meshplan.PlanError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (sharing, "b.weight and a.weight share memory but are two parameters"),
        (with_gradient, "a.weight has a gradient already"),
        (with_hook, "a.weight has a gradient hook, which would be lost"),
        (with_alias, "kept keeps a reference to a.weight, which parallelize shards"),
    ],
)
def test_what_wrapping_would_lose_is_refused(pool, make, text):
    assert all(text in result for result in pool(2).run(refused, make))
