"""What the hunt runs: a table of functions, each of which makes a model, its batch and its loss.

A case is a function without arguments, registered by `@wild`, that returns a `Wild`. Most of them
train by `by_train_step`; others bring the loop that their users write, as a function of the model
and an `Env`, whose verbs mean the same in one process and on many ranks.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BATCH: Final = 8
STEPS: Final = 3
TOTAL: Final = BATCH * STEPS

MODULES: Final = (
    "wild_vision", "wild_language", "wild_signals", "wild_graphs", "wild_tables", "wild_pairs",
    "wild_writers", "wild_odd", "wild_outputs", "wild_loops", "wild_training", "wild_packages",
)  # fmt: skip


class Env(Protocol):
    """The verbs of a loop, in one process or on many ranks."""

    def spread(self, model: nn.Module, example: Any) -> nn.Module: ...
    def batches(self, inputs: Any, targets: Any) -> Iterator[tuple[Any, Any]]: ...
    def sgd(self, model: nn.Module, params: Any = None) -> torch.optim.SGD: ...
    def step(self, model: nn.Module, optimizer: Any, x: Any, y: Any, loss: Any) -> None: ...
    def clip(self, model: nn.Module, norm: float) -> None: ...
    def evaluate(self, model: nn.Module, inputs: Any) -> Any: ...
    def state(self, model: nn.Module) -> dict[str, Tensor]: ...


Loop = Callable[["Wild", Env], Mapping[str, nn.Module]]
"""Trains and returns the models to compare, by name."""


class Wild(NamedTuple):
    """One case.

    Attributes:
        model: In training mode.
        inputs: Of all steps, one after the other along dim 0: a tensor, a tuple or a mapping.
        targets: Likewise.
        loss: (output, targets) -> the mean over the samples, or what a user wrote.
        loop: Of one's own; None for `meshplan.train_step`.
        coupled: Whether it normalises by statistics of the batch, which data parallelism takes
            of each rank's part.
    """

    model: nn.Module
    inputs: Any
    targets: Any
    loss: Callable[[Any, Any], Tensor]
    loop: Loop | None = None
    coupled: bool = False


CASES: dict[str, Callable[[], Wild]] = {}


def wild(function: Callable[[], Wild]) -> Callable[[], Wild]:
    """Register a case under the function's name."""
    assert function.__name__ not in CASES, function.__name__
    CASES[function.__name__] = function
    return function


def load() -> Mapping[str, Callable[[], Wild]]:
    """Every case by name; those of packages only where these are installed."""
    for name in MODULES:
        if importlib.util.find_spec(f"tests.bench.{name}"):
            importlib.import_module(f"tests.bench.{name}")
    return CASES


def make(name: str) -> Wild:
    """A case, the same in every process."""
    torch.manual_seed(0)
    return load()[name]()


# Numbers that every process draws alike.


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rows(*shape: int, seed: int = 1) -> Tensor:
    """Numbers for the samples of all steps."""
    return noise(TOTAL, *shape, seed=seed)


def whole(high: int, *shape: int, seed: int = 2) -> Tensor:
    """Whole numbers below `high` for the samples of all steps."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, high, (TOTAL, *shape), generator=generator)


def images(channels: int = 3, size: int = 16) -> Tensor:
    return rows(channels, size, size, seed=3)


def mse(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target.to(output.dtype))


def ce(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of logits whose classes lie along the last dim."""
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def mlp(*widths: int, act: type[nn.Module] = nn.GELU) -> nn.Sequential:
    parts: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        parts += [nn.Linear(a, b), act()]
    return nn.Sequential(*parts[:-1])


class Attend(nn.Module):
    """Attention by separate projections."""

    def __init__(self, dim: int, heads: int = 4, causal: bool = False) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.causal = heads, dim // heads, causal
        self.q, self.k, self.v = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor, context: Tensor | None = None, mask: Any = None) -> Tensor:
        y = x if context is None else context
        q, k, v = (
            f(t).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
            for f, t in ((self.q, x), (self.k, y), (self.v, y))
        )
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal)
        return self.out(o.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A block of a transformer, norms first."""

    def __init__(self, dim: int, heads: int = 4, causal: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attend(dim, heads, causal)
        self.ffn = mlp(dim, 2 * dim, dim)

    def forward(self, x: Tensor, context: Tensor | None = None, mask: Any = None) -> Tensor:
        x = x + self.attn(self.norm1(x), context, mask)
        return x + self.ffn(self.norm2(x))
