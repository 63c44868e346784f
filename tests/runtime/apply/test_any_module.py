"""Modules as people write them, by every wrapper, against one process.

Adapters on a frozen base, tensors in three places, blocks called twice, any form of input and
output.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshplan
from tests.helpers import models, parity

WIDTH, CLASSES, SAMPLES = 16, 4, 8


class Adapted(nn.Module):
    """A frozen projection and a trainable update of low rank beside it (Hu et al. 2021)."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted_llama() -> nn.Module:
    model = models.build("own_llama").requires_grad_(False)
    for block in model.layers:
        block.attn.wq, block.attn.wo = Adapted(block.attn.wq), Adapted(block.attn.wo)
        block.ffn.w2 = Adapted(block.ffn.w2)
    return model


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, *, scale: float) -> Tensor:
        return x + scale * self.down(torch.tanh(self.up(x)))


@dataclasses.dataclass
class Output:
    """What some models return."""

    logits: Tensor
    hidden: list[Tensor]
    note: str = "kept"


class Formed(nn.Module):
    """Takes keyword-only tensors and plain values, returns what `form` says."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, *, features: Tensor, scale: float = 0.5, names: Any = None) -> Any:
        hidden = []
        for block in self.blocks:
            features = block(features, scale=scale)
            hidden.append(features)
        logits = self.head(features)
        match self.form:
            case "tuple":
                return logits, hidden
            case "dict":
                return {"logits": logits, "hidden": hidden, "names": names}
            case _:
                return Output(logits, hidden)


class Shared(nn.Module):
    """One weight in three places, one block called twice, one tensor as two modules' bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.third = nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.third.weight = self.first.weight
        self.third.bias = self.second.bias
        self.block = Block()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.third(torch.tanh(self.second(torch.tanh(self.first(x))))))
        return self.head(self.block(self.block(x, scale=1.0), scale=0.5))


def features(step: int) -> Tensor:
    return torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(step))


def classes(step: int) -> Tensor:
    return torch.randint(CLASSES, (SAMPLES,), generator=torch.Generator().manual_seed(step + 100))


def logits_of(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    if isinstance(output, tuple):
        return output[0]
    return output["logits"] if isinstance(output, dict) else output.logits


def loss(output: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits_of(output).flatten(0, -2).double(), targets.flatten())


def keyword_batch(step: int) -> tuple[Any, Tensor]:
    return {"features": features(step), "scale": 0.3, "names": ["a", "b"]}, classes(step)


def plain_batch(step: int) -> tuple[Any, Tensor]:
    return features(step), classes(step)


def token_batch(step: int) -> tuple[Any, Tensor]:
    return models.batch("own_llama", step)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Any, Tensor]]]] = {
    "adapters": (adapted_llama, token_batch),
    "tuple": (lambda: Formed("tuple"), keyword_batch),
    "dict": (lambda: Formed("dict"), keyword_batch),
    "dataclass": (lambda: Formed("dataclass"), keyword_batch),
    "shared": (Shared, plain_batch),
}

LORA_TP = [
    {"match": "layers.*.attn.{wk,wv}", "place": {"tp": "colwise"}},
    {"match": "layers.*.attn.wq.{base,up}", "place": {"tp": "colwise"}},
    {"match": "layers.*.attn.wo.{base,down}", "place": {"tp": "rowwise"}},
    {"match": "layers.*.ffn.{w1,w3}", "place": {"tp": "colwise"}},
    {"match": "layers.*.ffn.w2.{base,down}", "place": {"tp": "rowwise"}},
]
BLOCK_TP = [
    {"match": "**.up", "place": {"tp": "colwise"}},
    {"match": "**.down", "place": {"tp": "rowwise"}},
]
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "zero2": {"strategy": "zero2"},
    "full_shard": {"strategy": "full_shard"},
    "hybrid_shard": {"strategy": "hybrid_shard", "mesh": [2, 2]},
    "recomputed": {"strategy": "full_shard", "activation_checkpointing": "full"},
    "tp x full_shard": {"mesh": {"dp_shard": 2, "tp": 2}},
}


def built(case: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return CASES[case][0]().train()


def train(case: str, layout: str) -> tuple[float, float]:
    """(largest difference of the loss, of the state) from one process, on rank 0."""
    batch = CASES[case][1]
    plan: dict[str, Any] = {"version": 1} | LAYOUTS[layout]
    if layout.startswith("tp"):
        plan["rules"] = LORA_TP if case == "adapters" else BLOCK_TP
    alone, model = built(case), meshplan.parallelize(built(case), plan)
    optimizers = models.optimizer(alone), models.optimizer(model)
    apart = 0.0
    for step in range(3):
        inputs, targets = batch(step)
        expected = loss(models.call(alone, inputs), targets)
        expected.backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        found = meshplan.train_step(
            model, optimizers[1], *meshplan.local_batch(model, (inputs, targets)), loss
        )
        apart = max(apart, abs(found - expected.item()))
    live = meshplan.full_state_dict(model)
    if torch.distributed.get_rank() != 0:
        return apart, 0.0
    state = alone.state_dict()
    assert live.keys() == state.keys()
    return apart, max((live[n] - state[n]).abs().max().item() for n in state)


WITHOUT_BLOCKS = {"tp x full_shard": "no tp pair"}
CELLS = [(c, x) for c in CASES for x in LAYOUTS if c != "shared" or x not in WITHOUT_BLOCKS]


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        pytest.param(*cell, marks=[pytest.mark.wide] if number % 4 else [])
        for number, cell in enumerate(CELLS)
    ],
)
def test_trains_as_one_process_does(pool, case, layout):
    for apart, state in pool(4).run(train, case, layout):
        assert apart <= parity.TOLERANCE
        assert state <= parity.TOLERANCE


def frozen_stays(layout: str) -> tuple[bool, int, int]:
    """(frozen parameters unchanged, bytes of their gradients, trainable parameters)."""
    model = meshplan.parallelize(built("adapters"), {"version": 1} | LAYOUTS[layout])
    sgd = models.optimizer(model)
    meshplan.train_step(model, sgd, *meshplan.local_batch(model, token_batch(0)), loss)
    live, before = meshplan.full_state_dict(model), built("adapters").state_dict()
    frozen = [n for n, p in built("adapters").named_parameters() if not p.requires_grad]
    same = all(torch.equal(live[n], before[n]) for n in frozen) if live else True
    grads = [p.grad for p in model.parameters() if not p.requires_grad]
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return same, sum(g.numel() for g in grads if g is not None), trainable


@pytest.mark.parametrize("layout", ["ddp", "full_shard", "hybrid_shard"])
def test_the_frozen_base_gets_neither_update_nor_gradient(pool, layout):
    for same, gradients, trainable in pool(4).run(frozen_stays, layout):
        assert same
        assert gradients == 0
        assert trainable > 0
