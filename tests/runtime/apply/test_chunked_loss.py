"""Head and loss over parts of the tokens, against one process and against torch's own loss.

Which seeded bug would this catch? A chunk left out or counted twice, a mean over a chunk in place
of the batch, a gradient scaled by what one chunk keeps, a weight that is read after its unit has
given it back, an option that is ignored, logits that are computed whole after all.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshplan
from meshplan.api.checking import check_plan
from meshplan.errors import ApplyError, PlanError
from meshplan.plan.plan import make_plan
from meshplan.planner.answers.module import explain_module
from meshplan.render.layouts.show import plan_to_json, plan_to_text
from meshplan.runtime.apply.loss.chunked_loss import (
    ChunkedLossMode,
    apply_chunked_loss,
    chunked_loss_problems,
)
from meshplan.runtime.fake_step.memory_tracker import MemoryTracker
from meshplan.runtime.trace.structure import graph_of
from meshplan.spec.reader import load_spec
from tests.helpers import models, parity
from tests.runtime.apply.test_parity import assert_same

CHUNKS: dict[str, Any] = {"version": 1, "loss_chunks": 3}

FULL = CHUNKS | {"strategy": "full_shard"}

CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "shards": (2, "own_llama", {"strategy": "full_shard"}),
    "tied, accumulated": (
        2, "hf_llama_tied", {"strategy": "full_shard", "batch": {"accumulate": 2}}),
    "head apart": (
        2, "hf_llama", {"strategy": "full_shard", "rules": [{"match": "lm_head", "unit": True}]}),
    "replicas": (2, "gpt2", {"strategy": "ddp", "batch": {"accumulate": 2}}),
    "a head with a bias": (2, "bert", {"strategy": "zero2"}),
    "recomputed, clipped": (
        2, "qwen3", {"strategy": "zero1", "activation_checkpointing": "full", "clip_grad_norm": 0.5}
    ),
    "tp leaves the head whole": (
        2, "own_llama", {"mesh": {"tp": 2}, "rules": models.tp_rules("own_llama")[:2]}),
    "hybrid": (4, "t5", {"mesh": {"dp_replicate": 2, "dp_shard": 2}}),
}  # fmt: skip
WIDE = ("recomputed, clipped", "hybrid", "a head with a bias")


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.wide] if c in WIDE else []) for c in CASES]
)
def test_parity(pool, case):
    world, name, plan = CASES[case]
    clip = plan.get("clip_grad_norm")
    assert_same(pool(world).run(parity.train, name, CHUNKS | plan, 3, 8, clip)[0])


class Words(nn.Module):
    """Gives logits, or the loss itself as transformers' models do."""

    def __init__(self, *, bias: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 8)
        self.head = nn.Linear(8, 31, bias=bias)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        logits = self.head(self.embed(tokens).tanh())
        if labels is None:
            return logits
        shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
        return F.cross_entropy(logits.float().view(-1, 31), shifted.view(-1))


def pair(chunks: int, **how: Any) -> tuple[nn.Module, nn.Module, Any]:
    """A model as it is, one whose loss is computed in chunks, and what turns that on."""
    torch.manual_seed(0)
    alone = Words(**how).double()
    torch.manual_seed(0)
    model = Words(**how).double()
    stated = FULL | {"loss_chunks": chunks}
    plan = make_plan(load_spec(stated), graph_of(model), world_size=1)
    assert not list(chunked_loss_problems(model, plan))
    apply_chunked_loss(model, plan)()
    return alone, model, lambda: ChunkedLossMode(plan)


TOKENS = torch.arange(24).reshape(4, 6).mul(7).remainder(31)
GOALS = TOKENS.add(3).remainder(31).index_fill(1, torch.tensor([2]), -100)


def _rows(logits: Any, **options: Any) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, -2), GOALS.flatten(), **options)


def _inside(logits: Any, **options: Any) -> torch.Tensor:
    return F.cross_entropy(logits.transpose(1, 2), GOALS, **options)


def _shifted(logits: Any, **options: Any) -> torch.Tensor:
    chosen = logits[:, :-1].contiguous().view(-1, 31)
    return F.cross_entropy(chosen, GOALS[:, 1:].flatten(), **options)


def _turned(logits: Any, **options: Any) -> torch.Tensor:
    chosen = logits.permute(1, 0, 2)[1:4].reshape(-1, logits.shape[-1])
    return F.cross_entropy(chosen, GOALS.t()[1:4].flatten(), **options)


def _module(logits: Any, **options: Any) -> torch.Tensor:
    return nn.CrossEntropyLoss(**options)(logits[-1].to(torch.float64), GOALS[-1])


LOSSES = {
    "rows": _rows, "classes inside": _inside, "shifted": _shifted, "turned": _turned,
    "a module, one sample": _module,
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {}, "sum": {"reduction": "sum"}, "smoothed": {"label_smoothing": 0.2},
    "other index ignored": {"ignore_index": int(GOALS[3, 3])},
}  # fmt: skip


def assert_alike(
    alone: nn.Module, model: nn.Module, losses: list[torch.Tensor], within: float = 1e-10
) -> None:
    torch.testing.assert_close(losses[1], losses[0], rtol=0, atol=within)
    for one, other in zip(alone.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=0, atol=within)


@pytest.mark.parametrize("chunks", [2, 5, 100])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("options", OPTIONS)
def test_it_is_torchs_own_loss(chunks, loss, options):
    """Twice, so that gradients are added up; squared, so that they are scaled."""
    alone, model, mode = pair(chunks, bias=chunks == 5, tied=chunks == 2)
    stated, losses = OPTIONS[options], []
    if options == "other index ignored":
        goals = GOALS.clone()
        GOALS[GOALS == -100] = 1
    try:
        for _ in range(2):
            losses = [LOSSES[loss](alone(TOKENS), **stated)]
            losses[0].square().backward()
            with mode():
                losses.append(LOSSES[loss](model(TOKENS), **stated))
                (losses[1] * losses[1]).backward()
    finally:
        if options == "other index ignored":
            GOALS.copy_(goals)
    assert_alike(alone, model, losses)


def test_a_model_that_gives_its_loss():
    alone, model, mode = pair(4, tied=True)
    losses = [alone(TOKENS, labels=TOKENS)]
    losses[0].backward()
    with mode():
        losses.append(model(TOKENS, labels=TOKENS))
        losses[1].backward()
    assert_alike(alone, model, losses, 1e-7)  # It computes its loss in float32.


def test_only_ignored_targets_give_nan_and_no_gradient_as_in_torch():
    alone, model, mode = pair(2)
    nothing = torch.full((24,), -100)
    F.cross_entropy(alone(TOKENS).flatten(0, 1), nothing).backward()
    with mode():
        loss = F.cross_entropy(model(TOKENS).flatten(0, 1), nothing)
        loss.backward()
    assert loss.isnan()
    for one, other in zip(alone.parameters(), model.parameters(), strict=True):
        assert torch.equal(one.grad.nan_to_num(9), other.grad.nan_to_num(9))


def test_what_is_frozen_gets_no_gradient_and_the_rest_its_own():
    for name in ("embed", "head"):
        alone, model, mode = pair(3)
        for each in (alone, model):
            each.get_submodule(name).requires_grad_(False)
        losses = [_rows(alone(TOKENS))]
        losses[0].backward()
        with mode():
            losses.append(_rows(model(TOKENS)))
            losses[1].backward()
        assert_alike(alone, model, losses)


def test_no_more_than_a_chunk_of_logits_is_there_and_without_gradients_less():
    _, model, mode = pair(6)
    whole = 24 * 31 * 8
    for training in (True, False):
        ledger = MemoryTracker({})
        with torch.set_grad_enabled(training), ledger, mode():
            loss = _rows(model(TOKENS))
        made = [event.delta for event in ledger.log().events]
        assert max(made) < whole // 2
        assert sum(size == whole // 6 for size in made) == 6
        assert loss.requires_grad == training


def test_outside_of_the_mode_the_head_gives_logits():
    alone, model, _ = pair(2)
    assert torch.equal(model(TOKENS), alone(TOKENS))


REFUSED = {
    "max": (lambda logits: logits.max(), "'max' needs all logits at once"),
    "detach": (lambda logits: _rows(logits.detach()), "'detach' needs all logits"),
    "a mask": (lambda logits: _rows(logits[GOALS > 3]), "'__getitem__' needs all logits"),
    "some classes": (lambda logits: _rows(logits[..., :30]), "'__getitem__' needs all logits"),
    "classes in a row": (lambda logits: _rows(logits.reshape(31, -1)), "'reshape' needs all"),
    "added": (lambda logits: _rows(logits * 2), "'mul' needs all logits"),
    "weight": (lambda logits: _rows(logits, weight=torch.ones(31)), "cross_entropy with weight"),
    "each": (lambda logits: _rows(logits, reduction="none").mean(), "reduction='none'"),
    "probabilities": (
        lambda logits: F.cross_entropy(logits.flatten(0, 1), torch.ones(24, 31)),
        "class probabilities as the target"),
    "other targets": (
        lambda logits: F.cross_entropy(logits.flatten(0, 1), GOALS), "targets of [4, 6]"),
    "no cross-entropy": (lambda logits: logits.shape.numel(), "but no cross_entropy of"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_known_to_be_right_is_refused(kind):
    loss, says = REFUSED[kind]
    _, model, mode = pair(2)
    with pytest.raises(ApplyError) as raised, mode():
        loss(model(TOKENS))
    assert says in str(raised.value)
    assert "loss_chunks" in str(raised.value)


def test_a_second_backward_is_refused():
    _, model, mode = pair(2)
    with mode():
        loss = _rows(model(TOKENS))
        loss.backward(retain_graph=True)
        with pytest.raises(ApplyError, match="keeps its gradients for one backward only"):
            loss.backward()


class Scaled(nn.Linear):
    """A head that does something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


@pytest.mark.parametrize("kind", ["another forward", "hooks"])
def test_a_head_that_is_no_plain_linear_is_refused(kind):
    model = Words()
    if kind == "hooks":
        model.head.register_forward_hook(lambda *_: None)
    else:
        model.head = Scaled(8, 31)
    plan = make_plan(load_spec(FULL), graph_of(model), world_size=1)
    (problem,) = chunked_loss_problems(model, plan)
    says = {"hooks": "has hooks", "another forward": "a forward other than torch.nn.Linear's"}[kind]
    assert says in problem.what


class TwoHeads(Words):
    """Which of them gives the logits?"""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(8, 31)


def problems_of(plan: dict[str, Any], model: nn.Module) -> list[str]:
    try:
        make_plan(
            load_spec((CHUNKS if "mesh" in plan else FULL) | plan), graph_of(model), world_size=4
        )
    except PlanError as error:
        return [problem.what for problem in error.problems]
    return []


@pytest.mark.parametrize(
    ("plan", "model", "says"),
    [
        ({}, TwoHeads, "but 'head' and 'other' qualify"),
        ({}, lambda: models.build("resnet"), "computes the logits, but none qualifies"),
        ({"precision": "16-mixed"}, Words, "small ones underflow in float16"),
        ({"strategy": "ddp", "ddp": {"find_unused_parameters": True}}, Words, "searches the"),
        ({"mesh": {"pp": 4}}, Words, "loss_chunks and pp do not go together"),
        ({"mesh": {"cp": 4}}, Words, "loss_chunks and cp do not go together"),
        ({"mesh": {"tp": 4}, "rules": [{"match": "head", "place": {"tp": "vocab"}}]}, Words,
         "tp shards it, while each loss chunk needs all logits"),
        ({"rules": [{"match": "**", "reshard_after_forward": True}]}, Words,
         "has resharded its weight"),
        ({"rules": [{"match": "head", "activation_checkpointing": "full"}]}, Words,
         "'head' is recomputed"),
        ({"loss_chunks": "fused"}, Words, "a kernel outside torch"),
    ],
)  # fmt: skip
def test_plans_that_cannot_be(plan, model, says):
    told = problems_of(plan, model())
    assert any(says in what for what in told), told


def test_the_digest_and_the_words_know_it_without_a_live_model():
    model = {"model": {"entry": "meshplan.runtime.demo_model:build"}}
    plan = {"version": 1, "mesh": {"dp_shard": 2}} | model
    some, whole = check_plan(plan | {"loss_chunks": 4}).plan, check_plan(plan).plan
    assert some is not None
    assert whole is not None
    assert some.digest() != whole.digest()
    assert some.assignment.chunked_loss.head == "head"
    assert check_plan(plan | {"loss_chunks": 1}).plan.digest() == whole.digest()
    lines = "\n".join(plan_to_text(some))
    assert "head and cross-entropy over 4 chunks of the tokens" in lines
    assert plan_to_json(some)["chunked_loss"]["chunks"] == 4
    assert plan_to_json(whole)["chunked_loss"] is None
    (fact, _), *_ = [f for f in explain_module(some, "head").facts if "loss" in f[0]]
    assert fact == "head is computed with the loss, over 4 chunks of the tokens"


def own_loop(stated: bool) -> tuple[float, str]:
    """The largest difference of a loop of one's own from one process; or what is refused."""
    torch.manual_seed(1)
    alone = Words()
    torch.manual_seed(1)
    plan: dict[str, Any] = {"version": 1, "strategy": "full_shard"}
    model = meshplan.parallelize(Words(), plan | ({"loss_chunks": 4} if stated else {}))
    apart = 0.0
    try:
        for each in range(2):
            with meshplan.chunked_loss(model):
                loss = _rows(model(TOKENS // (1 + each)))
                loss.backward()
            expected = _rows(alone(TOKENS // (1 + each)))
            expected.backward()
            apart = max(apart, abs(loss.item() - expected.item()))
            for module in (model, alone):
                with torch.no_grad():
                    for parameter in module.parameters():
                        parameter -= 0.1 * parameter.grad
                module.zero_grad()
    except ApplyError as error:
        return apart, str(error)
    return apart, ""


def test_in_a_loop_of_ones_own(pool):
    for apart, told in pool(2).run(own_loop, True):
        assert not told
        assert apart <= parity.TOLERANCE
    assert "does not state loss_chunks" in pool(2).run(own_loop, False)[0][1]


def with_labels(name: str, plan: dict[str, Any]) -> tuple[float, float]:
    """A model of transformers that computes its own loss: how far loss and weights are apart."""
    example, _ = models.batch(name, 0, 2)
    model = meshplan.parallelize(models.build(name), plan, example_inputs=example)
    alone, losses = models.build(name), []
    steps = [models.optimizer(each) for each in (model, alone)]
    for step in range(2):
        inputs, targets = models.batch(name, step, 8)
        given = dict(inputs) if isinstance(inputs, dict) else {"input_ids": inputs}
        whole = given | {"labels": targets}
        own, goals = meshplan.local_batch(model, (whole, targets))
        loss = meshplan.train_step(model, steps[0], own, goals, lambda output, _: output.loss)
        expected = alone(**whole).loss
        expected.backward()
        steps[1].step()
        steps[1].zero_grad()
        losses.append(abs(loss - expected.item()))
    state, found = alone.state_dict(), meshplan.full_state_dict(model)
    return max(losses), max((abs(found[n] - state[n]).max().item() for n in found), default=0.0)


@pytest.mark.parametrize(
    "name",
    ["gpt2", *(pytest.param(n, marks=pytest.mark.wide) for n in ("hf_llama_tied", "t5", "bert"))],
)
def test_models_of_transformers_that_are_given_labels(pool, name):
    for loss, state in pool(2).run(with_labels, name, FULL):
        assert loss <= parity.TOLERANCE
        assert state <= parity.TOLERANCE
