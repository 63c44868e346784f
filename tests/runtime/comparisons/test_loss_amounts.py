"""Means over something of which ranks hold unequal amounts, where each rank's samples are alike.

Which seeded bug would this catch? Halves of one rank's samples alone, whose laws all agree where
rows are equally long; a tolerance of half precision, in which all parts of a fresh model's loss
are alike; masks that are no -100; a class dim that is as long as a part of the sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshplan

WIDTH = 8


class Net(nn.Module):
    def __init__(self, classes: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.head = nn.Linear(WIDTH, 16), nn.Linear(16, classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x).tanh()[:, None]
        return self.head(h + F.scaled_dot_product_attention(h, h, h, is_causal=True))[:, 0]


def over_tokens(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def over_samples(output: Tensor, targets: Tensor) -> Tensor:
    """Averages over the tokens of each sample, then over samples: right on all ranks."""
    each = F.cross_entropy(output.transpose(1, 2), targets, reduction="none").sum(1)
    return (each / (targets != -100).sum(1)).mean()


def over_mask(output: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
    wanted, mask = targets
    return ((output - wanted).square().mean(-1) * mask).sum() / mask.sum()


def over_all(output: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(output, targets)


def batch(kind: str, samples: int, length: int, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, labels, and which labels are kept: fewer in the second half, for most kinds."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, length, WIDTH, generator=generator)
    labels = torch.randint(0, classes, (samples, length), generator=generator)
    is_kept = torch.ones(samples, length, dtype=torch.bool)
    if kind == "turns":
        is_kept.view(4, -1, length)[1::2, :, 3:] = False
    elif kind == "prompts":
        is_kept[:, :7] = False
    elif kind != "padded":
        is_kept[samples // 2 :, 3:] = False
    if kind == "one each":
        is_kept[1, 3:] = False
    return x, labels.masked_fill(~is_kept, -100), is_kept


def told(
    kind: str,
    loss: Callable[[Any, Any], Any],
    plan: dict[str, Any],
    samples: int = 20,
    length: int = 12,
    classes: int = WIDTH,
) -> str:
    """What the first step says."""
    model = meshplan.parallelize(Net(classes), {"version": 1, **plan})
    x, labels, is_kept = batch(kind, samples, length, classes)
    targets = (x.flip(1), is_kept.float()) if loss is over_mask else labels
    own = meshplan.local_batch(model, (x, targets))
    if kind == "padded":
        keep = 12 if torch.distributed.get_rank() else 4
        own = own[0][:, :keep], own[0][:, :keep] + 1
    try:
        meshplan.train_step(model, torch.optim.SGD(model.parameters(), 0.1), *own, loss)
    except meshplan.ApplyError as error:
        return str(error)
    return ""


DDP: dict[str, Any] = {"strategy": "ddp"}
CP: dict[str, Any] = {"mesh": {"cp": 2}}
HALF = {"strategy": "full_shard", "precision": "bf16-true"}
CASES: dict[str, tuple[tuple[Any, ...], str]] = {
    "lengths": (("lengths", over_tokens, DDP), "set loss: tokens"),
    "lengths of microbatches": (
        ("turns", over_tokens, {**DDP, "batch": {"accumulate": 2}}, 32), "set loss: tokens",
    ),
    "a mask": (("lengths", over_mask, DDP), "let loss_fn return (sum, count)"),
    "unequal lengths": (("padded", over_all, DDP), "set batch: {per_rank: true}"),
    "unequal lengths, alone": (("padded", over_all, {**DDP, "batch": {"per_rank": True}}), ""),
    "of samples": (("lengths", over_samples, DDP), ""),
    "a vocabulary in half precision": (
        ("one each", over_tokens, HALF, 4, 132, 1 << 15), "set loss: tokens",
    ),
    "a mask along cp": (("prompts", over_mask, CP, 4, 24), "the elements that a mask keeps"),
    "as many classes as tokens": (("prompts", over_tokens, CP, 4, 16), "set loss: tokens"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:targets of", "ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("case", CASES)
def test_a_mean_over_unequal_amounts_is_refused_and_one_over_samples_is_not(pool, case):
    how, words = CASES[case]
    for text in pool(2).run(told, *how):
        assert words in text
        assert bool(text) is bool(words), text
