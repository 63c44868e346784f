"""Losses and forwards are compared under cp, compile and loss_chunks as they are elsewhere.

Which seeded bug would this catch? A loss that adds up over tokens where ranks of cp are averaged,
an average where they are added up, tokens that only one part of the sequence has, samples that
look at one another in a block that is compiled or before a head whose logits are never there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import meshplan
from tests.helpers.context_models import DIM, LENGTH, MOST, VOCAB, Block
from tests.helpers.wide import leaving
from tests.runtime.apply.test_compile import without_code_generation

LAYOUTS: dict[str, dict[str, Any]] = {
    "cp": {"mesh": {"cp": 2}},
    "compile": {"strategy": "full_shard", "compile": True},
    "loss_chunks": {"strategy": "full_shard", "loss_chunks": 2},
}
TWICE = {"batch": {"accumulate": 2}}
"""Along cp alone all samples of a step would be there together."""
SECONDS = 10.0


class Centered(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Net(nn.Module):
    """Tokens in, logits out, or the loss where targets are given.

    Args:
        kind: What is done between two blocks.
    """

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.where = nn.Embedding(VOCAB, DIM), nn.Embedding(MOST, DIM)
        self.blocks = nn.ModuleList(Block("causal") for _ in range(2))
        self.inner = Centered() if kind == "mixes" else nn.Identity()
        self.head = nn.Linear(DIM, VOCAB)
        self.weighs_samples = kind == "weighs samples"
        self.raises = kind == "raises"

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        # The training has each sample once.
        is_compared = (tokens[0] == tokens[1:]).all(1).any()
        if self.raises and dist.get_rank() == 1 and is_compared:
            raise ArithmeticError("not with these")
        x = self.embed(tokens) + self.where(torch.arange(tokens.shape[1]))
        x = self.head(self.blocks[1](self.inner(self.blocks[0](x))))
        if labels is None:
            return x
        if self.weighs_samples:
            return token_loss(x, labels) * len(tokens)
        return token_loss(x, labels)


def token_loss(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def over_samples(output: Tensor, targets: Tensor) -> Tensor:
    """Adds up over tokens, and averages over samples."""
    return F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum") / len(targets)


def summed_means(output: Tensor, targets: Tensor) -> Tensor:
    """Averages over tokens, and adds up over samples."""
    return token_loss(output, targets) * len(targets)


def all_of(output: Tensor, targets: Tensor) -> Tensor:
    return over_samples(output, targets) * len(targets)


def tokens_over_samples(output: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    return all_of(output, targets), len(targets)


def means_over_tokens(output: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    return summed_means(output, targets), targets.numel()


def tokens_over_tokens(output: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    return all_of(output, targets), targets.numel()


def means_over_samples(output: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    return summed_means(output, targets), len(targets)


def near(output: Tensor, targets: Tensor) -> Tensor:
    """Looks at neighbouring tokens, as a penalty on jumps does."""
    return token_loss(output, targets) + (output[:, 1:] - output[:, :-1]).square().mean()


def squares(output: Tensor, targets: Tensor) -> Tensor:
    return (output[..., 0] - targets).square().sum(1).mean()


def mean_squares(output: Tensor, targets: Tensor) -> Tensor:
    return (output[..., 0] - targets).square().mean()


def step(
    layout: str,
    loss: Callable[[Any, Any], Any],
    *,
    kind: str = "plain",
    stated: dict[str, Any] | None = None,
    samples: int = 4,
    batch: str = "tokens",
) -> tuple[str, float]:
    """What a first step says, and how long it takes."""
    plan = {"version": 1, **LAYOUTS[layout], **(stated or {})}
    generator = torch.Generator().manual_seed(1)
    shape = 2, samples, LENGTH
    tokens, targets = torch.randint(1, VOCAB, shape, generator=generator).unbind(0)
    if batch.startswith("prompts"):
        targets[:, : LENGTH // int(batch[-1])] = -100
    if batch == "floats":
        targets = torch.randn(targets.shape, generator=generator)
    with without_code_generation():
        model = meshplan.parallelize(Net(kind), plan)
        own = meshplan.local_batch(model, (tokens, targets))
        inputs = {"tokens": own[0], "labels": own[1]} if batch == "labels" else own[0]
        sgd = torch.optim.SGD(model.parameters(), 0.1)
        began = time.monotonic()
        try:
            meshplan.train_step(model, sgd, inputs, own[1], loss)
        except meshplan.ApplyError as error:
            return str(error), time.monotonic() - began
    return "", time.monotonic() - began


def hardest(output: Tensor, targets: Tensor) -> Tensor:
    """Of the best half of the samples."""
    each = F.cross_entropy(output.transpose(1, 2), targets, reduction="none").mean(1)
    return each.topk((len(each) + 1) // 2).values.mean()


def whole_only(output: Tensor, targets: Tensor) -> Tensor:
    """Raises on rank 1 about fewer samples than there are."""
    if dist.get_rank() == 1 and len(targets) < 2:
        raise ArithmeticError("not with these")
    return token_loss(output, targets)


def given_loss(output: Any, targets: Any) -> Any:
    return output


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "adds up over tokens": (
        {"layout": "cp", "loss": over_samples},
        "loss_fn returns a sum over tokens, but the losses that ranks of cp compute for their",
    ),
    "of one sample": (
        {"layout": "cp", "loss": over_samples, "samples": 1},
        "loss_fn returns a sum over tokens, but the losses that ranks of cp compute for their",
    ),
    "adds up over tokens of numbers": (
        {"layout": "cp", "loss": squares, "batch": "floats"},
        "loss_fn returns a sum over tokens, but the losses that ranks of cp compute for their",
    ),
    "averages over tokens": (
        {"layout": "cp", "loss": summed_means, "stated": {"loss": "sum"}},
        "the plan states loss: sum, so the losses that ranks of cp compute for their parts",
    ),
    "counts samples": (
        {"layout": "cp", "loss": tokens_over_samples},
        "the sum is over tokens and the count is not",
    ),
    "counts tokens": (
        {"layout": "cp", "loss": means_over_tokens},
        "the sum is over samples and the count is of tokens",
    ),
    "prompts": (
        {"layout": "cp", "loss": token_loss, "batch": "prompts of 1 / 8"},
        "parts of the sequence contain unequal numbers of them",
    ),
    "prompts all over a part": (
        {"layout": "cp", "loss": token_loss, "batch": "prompts of 1 / 2",
         "stated": {"context": {"balance": False}}},
        "parts of the sequence contain unequal numbers of them",
    ),
    "of the hardest samples": (
        {"layout": "cp", "loss": hardest, "samples": 2, "stated": TWICE},
        "loss_fn returns a mean whose total weight differs between parts of a batch",
    ),
    "mixes under cp": (
        {"layout": "cp", "loss": token_loss, "kind": "mixes", "stated": TWICE},
        "'inner' (Centered) gives a sample another output",
    ),
    "sum under compile": (
        {"layout": "compile", "loss": summed_means},
        "returns a sum over samples, but the plan expects their mean",
    ),
    "mixes under compile": (
        {"layout": "compile", "loss": token_loss, "kind": "mixes"},
        "'inner' (Centered) gives a sample another output",
    ),
    "own sum under compile": (
        {"layout": "compile", "loss": given_loss, "kind": "weighs samples", "batch": "labels"},
        "returns a sum over samples, but the plan expects their mean",
    ),
    "sum under loss_chunks": (
        {"layout": "loss_chunks", "loss": summed_means},
        "returns a sum over samples, but the plan expects their mean",
    ),
    "mixes under loss_chunks": (
        {"layout": "loss_chunks", "loss": token_loss, "kind": "mixes"},
        "'inner' (Centered) gives a sample another output",
    ),
    "own sum under loss_chunks": (
        {"layout": "loss_chunks", "loss": given_loss, "kind": "weighs samples", "batch": "labels"},
        "returns a sum over samples, but the plan expects their mean",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", leaving(WRONG, lambda _, case: case == "sum under compile"))
def test_what_is_not_put_together_from_parts_is_refused_on_all_ranks(pool, case):
    how, says = WRONG[case]
    for told, _ in pool(2).run(step, **how):
        assert says in told, told


RIGHT: list[dict[str, Any]] = [
    *({"layout": layout, "loss": token_loss} for layout in LAYOUTS),
    {"layout": "cp", "loss": token_loss, "stated": TWICE},
    *({"layout": layout, "loss": given_loss, "batch": "labels"} for layout in LAYOUTS),
    *({"layout": "cp", "loss": loss} for loss in (tokens_over_tokens, means_over_samples, near)),
    {"layout": "cp", "loss": all_of, "stated": {"loss": "sum"}},
    {"layout": "cp", "loss": mean_squares, "batch": "floats"},
    {"layout": "cp", "loss": token_loss, "batch": "prompts of 1 / 2",
     "stated": {"loss": "tokens", "context": {"balance": False}}},
    {"layout": "cp", "loss": all_of, "batch": "prompts of 1 / 2",
     "stated": {"loss": "sum", "context": {"balance": False}}},
    {"layout": "cp", "loss": token_loss, "batch": "prompts of 1 / 2"},
]  # fmt: skip


@pytest.mark.parametrize(
    "how",
    RIGHT,
    ids=lambda how: " ".join(
        (how["layout"], how["loss"].__name__, how.get("batch", ""), str(how.get("stated", "")))
    ),
)
def test_what_is_right_passes(pool, how):
    assert [told for told, _ in pool(2).run(step, **how)] == ["", ""]


RAISING: list[dict[str, Any]] = [
    {"layout": "cp", "loss": token_loss, "kind": "raises", "stated": TWICE},
    # The head, whose weight is gathered, is called by the loss.
    {"layout": "loss_chunks", "loss": whole_only},
]


def raising(how: dict[str, Any]) -> tuple[str, float]:
    """What each rank is told where rank 1 alone raises in a comparison, and how late."""
    began = time.monotonic()
    try:
        return step(**how)
    except ArithmeticError as error:
        return str(error), time.monotonic() - began


@pytest.mark.parametrize("how", RAISING, ids=lambda how: how["layout"])
def test_what_one_rank_alone_raises_in_a_comparison_ends_all(pool, how):
    others, culprit = pool(2).run(raising, how)
    pool(2).close()
    assert culprit[0] == "not with these"
    assert "rank 1 failed: ArithmeticError: not with these" in others[0]
    assert max(seconds for _, seconds in (others, culprit)) < SECONDS
