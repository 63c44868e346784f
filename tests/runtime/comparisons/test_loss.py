"""Losses that are no mean over samples: sums, means over tokens, (sum, count)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshplan
from meshplan.runtime.base.mesh import local_of
from tests.helpers import models, parity

IGNORED = -100


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Eight samples with very unequal numbers of targets; one rank of two may have none."""
    tokens, targets = models.batch("own_llama", step)
    keep = [16, 9, 1, 0, 3, 2, 0, 1] if step else [5, 16, 3, 11, 0, 0, 0, 0]
    targets = targets.clone()
    for row, count in enumerate(keep):
        targets[row, count:] = IGNORED
    return tokens, targets


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def divided(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean of one who divides by hand: not a number where nothing is left, nor its gradient."""
    is_kept = (targets != IGNORED).flatten()
    classes = targets.flatten().clamp(min=0)
    losses = F.cross_entropy(logits.flatten(0, 1), classes, reduction="none")
    return (losses * is_kept).sum() / is_kept.sum()


def sum_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def pair(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return sum_loss(logits, targets), (targets != IGNORED).sum()


def small_sum(logits: Tensor, targets: Tensor) -> Tensor:
    return sum_loss(logits, targets) / 50


KINDS: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "tokens": ({"loss": "tokens"}, mean_loss, mean_loss),
    "tokens, divided": ({"loss": "tokens"}, divided, mean_loss),
    "pair": ({}, pair, mean_loss),
    "sum": ({"loss": "sum"}, small_sum, small_sum),
}
RULES = models.tp_rules("own_llama")
PP = {"schedule": "1F1B", "microbatches": 2}
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {"strategy": "ddp"}),
    "full_shard": (2, {"strategy": "full_shard"}),
    "hybrid": (4, {"strategy": "hybrid_shard", "mesh": [2, 2]}),
    "accumulate": (2, {"strategy": "full_shard", "batch": {"accumulate": 2}}),
    "ddp, accumulate": (2, {"strategy": "ddp", "batch": {"accumulate": 2}}),
    "pp": (2, {"mesh": {"pp": 2}, "pipeline": PP}),
    "pp x ddp": (4, {"mesh": {"pp": 2, "dp_replicate": 2}, "pipeline": PP, "strategy": "ddp"}),
    "tp x fsdp": (4, {"mesh": {"dp_shard": 2, "tp": 2}, "rules": RULES}),
    "loss_parallel": (
        4,
        {
            "mesh": {"dp_shard": 2, "tp": 2},
            "rules": [*RULES, {"match": "head", "place": {"tp": "vocab"}}],
            "loss_parallel": True,
        },
    ),
    "cp": (2, {"mesh": {"cp": 2}}),
    "loss_chunks": (2, {"strategy": "full_shard", "loss_chunks": 4}),
}


def train(plan: dict[str, Any], kind: str, clip: float | None = None) -> tuple[float, float]:
    """The largest difference of losses and of parameters from one process."""
    more, loss_fn, alone_fn = KINDS[kind]
    alone = models.build("own_llama")
    example = batch(0)[0][:2]
    full = {"version": 1, **plan, **more, **({"clip_grad_norm": clip} if clip else {})}
    model = meshplan.parallelize(models.build("own_llama"), full, example_inputs=example)
    sgd = models.optimizer(model), models.optimizer(alone)
    apart = 0.0
    for step in range(3):
        tokens, targets = batch(step)
        expected = alone_fn(alone(tokens), targets)
        expected.backward()
        if clip:
            nn.utils.clip_grad_norm_(alone.parameters(), clip)
        sgd[1].step()
        sgd[1].zero_grad()
        mine = meshplan.local_batch(model, (tokens, targets))
        found = meshplan.train_step(model, sgd[0], *mine, loss_fn)
        assert math.isfinite(found)
        apart = max(apart, abs(found - expected.item()))
    live, state = meshplan.full_state_dict(model), alone.state_dict()
    assert all(tensor.isfinite().all() for tensor in live.values())
    return apart, max([0.0, *((live[n] - state[n]).abs().max().item() for n in live)])


CELLS = [
    *((plan, "tokens") for plan in ("full_shard", "accumulate", "pp x ddp", "cp", "loss_chunks")),
    *((plan, "pair") for plan in ("ddp, accumulate", "pp", "tp x fsdp")),
    ("accumulate", "sum"),
    ("ddp", "tokens, divided"),
    *(
        pytest.param(plan, kind, marks=pytest.mark.wide)
        for plan, kind in (
            *((plan, "tokens") for plan in ("ddp", "hybrid", "pp", "tp x fsdp", "loss_parallel")),
            *((plan, "pair") for plan in ("pp x ddp", "cp", "full_shard")),
            ("pp", "sum"),
        )
    ),
]


@pytest.mark.filterwarnings("ignore:targets of")
@pytest.mark.parametrize(("plan", "kind"), CELLS)
def test_trains_as_one_process_does(pool, plan, kind):
    world, stated = PLANS[plan]
    for loss, state in pool(world).run(train, stated, kind):
        assert loss <= 1e-5
        assert state <= parity.TOLERANCE


def refused(plan: dict[str, Any], name: str, even: bool = False) -> str:
    """What a step says of a loss that its plan takes for another; "" where it takes the step."""
    loss_fn = LOSSES[name]
    example = batch(0)[0][:2]
    model = meshplan.parallelize(
        models.build("own_llama"), {"version": 1, **plan}, example_inputs=example
    )
    sgd = models.optimizer(model)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    tokens, targets = models.batch("own_llama", 0) if even else batch(1)
    mine = meshplan.local_batch(model, (tokens, targets))
    drawn = torch.get_rng_state()
    try:
        meshplan.train_step(model, sgd, *mine, loss_fn)
    except meshplan.ApplyError as error:
        for n, p in model.named_parameters():
            assert torch.equal(local_of(p), local_of(before[n]))
        return str(error)
    assert torch.equal(drawn, torch.get_rng_state()) is (name != "dropped")
    return ""


class Counting(nn.Module):
    """A criterion that remembers how often it was asked, and draws as often."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        return mean_loss(logits, targets) + 0 * torch.rand(())


def traces() -> tuple[float, bool]:
    """(calls that a criterion remembers, whether the generator went on by as many draws)."""
    model = meshplan.parallelize(models.build("own_llama"), {"version": 1, "strategy": "ddp"})
    criterion, sgd = Counting(), models.optimizer(model)
    torch.manual_seed(7)
    for step in range(2):
        mine = meshplan.local_batch(model, models.batch("own_llama", step))
        meshplan.train_step(model, sgd, *mine, lambda o, t: criterion(o, t))
    found = torch.rand(())
    torch.manual_seed(7)
    return float(criterion.calls), bool(found == torch.rand(3)[2])


def test_comparisons_leave_no_trace(pool):
    assert pool(2).run(traces) == [(2.0, True)] * 2


def contrastive(logits: Tensor, targets: Tensor) -> Tensor:
    z = F.normalize(logits.flatten(1), dim=-1)
    return F.cross_entropy(5 * z @ z.roll(1, 1).T, torch.arange(len(z)))


def dropped(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.dropout(logits).flatten(0, 1), targets.flatten())


def half_precision(logits: Tensor, targets: Tensor) -> Tensor:
    return mean_loss(logits.bfloat16(), targets)


def weighed(logits: Tensor, targets: Tensor) -> Tensor:
    weight = torch.linspace(0.1, 2, logits.shape[-1], dtype=logits.dtype)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), weight=weight)


def wrong_count(logits: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    return sum_loss(logits, targets), 7


LOSSES = {
    "mean": mean_loss, "sum": sum_loss, "pair": pair, "contrastive": contrastive,
    "dropped": dropped, "half": half_precision, "weighed": weighed, "wrong count": wrong_count,
}  # fmt: skip
TOKENS = "set loss: tokens; or let loss_fn return (sum, count)"
REFUSED: dict[str, tuple[str, dict[str, Any], str, bool, str]] = {
    "masked": ("ddp", {}, "mean", False, TOKENS),
    "masked, shards": ("full_shard", {}, "mean", False, TOKENS),
    "masked, microbatches": ("accumulate", {}, "mean", False, TOKENS),
    "masked, stages": ("pp", {}, "mean", False, TOKENS),
    "masked, bf16": ("ddp", {}, "half", False, TOKENS),
    "masked, chunks": ("loss_chunks", {}, "mean", False, TOKENS),
    "masked, cut logits": ("loss_parallel", {}, "mean", False, TOKENS),
    "a sum": ("ddp", {}, "sum", True, "set loss: sum"),
    "no sum": ("ddp", {"loss": "sum"}, "mean", True, "set loss: mean"),
    "weights of classes": ("ddp", {}, "weighed", True, "let loss_fn return (sum, count)"),
    "contrastive": ("ddp", {}, "contrastive", True, "meshplan.gather_batch"),
    "a constant count": ("ddp", {}, "wrong count", True, "the count that loss_fn returns does not"),
    "no tokens": ("ddp", {"loss": "tokens"}, "sum", False, "the targets that are not -100"),
}


WIDE = ("masked, shards", "masked, cut logits", "no sum", "no tokens")


@pytest.mark.filterwarnings("ignore:targets of")
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.wide if case in WIDE else ()) for case in REFUSED],
)
def test_a_loss_that_parts_do_not_make_up_is_refused_before_an_update(pool, case):
    plan, more, name, even, words = REFUSED[case]
    world, stated = PLANS[plan]
    for told in pool(world).run(refused, {**stated, **more}, name, even):
        assert words in told


def lone(name: str) -> str:
    """What a step of one sample a rank says, where rank 1 has fewer targets."""
    model = meshplan.parallelize(models.build("own_llama"), {"version": 1, "strategy": "ddp"})
    tokens, targets = batch(1)
    rows = slice(0, 8, 7) if name == "sum" else slice(0, 2)
    mine = meshplan.local_batch(model, (tokens[rows], targets[rows]))
    try:
        meshplan.train_step(model, models.optimizer(model), *mine, LOSSES[name])
    except meshplan.ApplyError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("name", "words"), [("mean", "set loss: tokens"), ("sum", "set loss: sum"), ("pair", "")]
)
def test_single_samples_are_compared_by_their_tokens(pool, name, words):
    for told in pool(2).run(lone, name):
        assert words in told
        assert bool(told) is bool(words)


@pytest.mark.parametrize(
    ("plan", "name"), [("ddp", "half"), ("accumulate", "dropped"), ("pp", "mean")]
)
def test_an_even_mean_is_left_alone(pool, plan, name):
    world, stated = PLANS[plan]
    assert pool(world).run(refused, stated, name, True) == [""] * world


def of_model(loss_fn: Any) -> tuple[str, float]:
    """(what a step says, the difference from one process) of a model that computes its loss."""
    alone = models.build("hf_llama")
    plan = {"version": 1, "strategy": "full_shard", "batch": {"accumulate": 2}}
    model = meshplan.parallelize(models.build("hf_llama"), plan)
    sgd = models.optimizer(model), models.optimizer(alone)
    for step in range(2):
        tokens, labels = batch(step)
        labels[:, 0] = 5  # Which the model leaves out.
        inputs = {"input_ids": tokens, "labels": labels}
        alone(**inputs).loss.backward()
        sgd[1].step()
        sgd[1].zero_grad()
        try:
            mine = meshplan.local_batch(model, (inputs, labels))
            meshplan.train_step(model, sgd[0], *mine, loss_fn)
        except meshplan.ApplyError as error:
            return str(error), 0.0
    live, state = meshplan.full_state_dict(model), alone.state_dict()
    return "", max([0.0, *((live[n] - state[n]).abs().max().item() for n in live)])


def of_output(output: Any, labels: Tensor) -> Tensor:
    return output.loss


def with_count(output: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
    n = (labels[:, 1:] != IGNORED).sum()
    return output.loss * n, n


SCALE = 2.0**10


def in_half(kind: str) -> tuple[float, list[Tensor]]:
    """(the scale of the loss, the parameters) after steps in float16."""
    more, loss_fn, _ = KINDS[kind]
    plan = {"version": 1, "strategy": "full_shard", "precision": "16-mixed", **more}
    model = meshplan.parallelize(models.build("own_llama"), plan)
    sgd = models.optimizer(model)
    model.meshplan.loss_scale = SCALE
    for step in range(3):
        meshplan.train_step(model, sgd, *meshplan.local_batch(model, batch(step)), loss_fn)
    return model.meshplan.loss_scale, [local_of(p).detach().clone() for p in model.parameters()]


def test_counts_and_the_scale_of_float16_go_together(pool):
    (scale, found), _ = pool(2).run(in_half, "pair")
    (other, expected), _ = pool(2).run(in_half, "tokens")
    assert scale == other == SCALE
    assert max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True)) < 1e-3


def test_a_loss_that_the_model_computes_is_compared_too(pool):
    for told, _ in pool(2).run(of_model, of_output):
        assert "n = (labels[:, 1:] != -100).sum()" in told
    for told, apart in pool(2).run(of_model, with_count):
        assert told == ""
        assert apart <= parity.TOLERANCE
