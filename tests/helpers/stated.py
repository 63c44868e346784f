"""A model that every layout takes, and a job that trains it, saves it and goes on from a state.

`LAYOUTS` are the twelve between which states are carried: fused projections that tp cuts piece by
piece, experts that ep deals out, stages, and one process.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import meshplan
from meshplan.runtime.base.mesh import full
from meshplan.runtime.demo_moe import ExpertStack
from meshplan.runtime.state.live import LiveState

VOCAB, DIM, HEADS, SEQ_LEN, BATCH = 32, 16, 4, 8, 8


class Block(nn.Module):
    """Attention with fused q, k and v, and a feed-forward layer, of experts or dense."""

    def __init__(self, has_experts: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.has_experts = has_experts
        if has_experts:
            self.router, self.experts = nn.Linear(DIM, 4), ExpertStack(4, DIM, 8)
        else:
            self.up, self.down = nn.Linear(DIM, 24), nn.Linear(24, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        if not self.has_experts:
            return x + self.down(F.gelu(self.up(x)))
        tokens = x.flatten(0, -2)
        weights, index = self.router(tokens).softmax(-1).topk(2, -1)
        return x + self.experts(tokens, index, weights).view_as(x)


class Model(nn.Module):
    """A decoder of two blocks, with a buffer that a state has and one that it has not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Block(has_experts) for has_experts in (False, True))
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.register_buffer("gain", torch.full((), 0.5))
        self.register_buffer("unit", torch.ones(()), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * self.gain * self.unit


TP: Final = [
    {"match": "layers.*.qkv", "place": {"tp": "packed_colwise(3)"}},
    {"match": "layers.*.out", "place": {"tp": "rowwise"}},
    {"match": "layers.0.up", "place": {"tp": "colwise"}},
    {"match": "layers.0.down", "place": {"tp": "rowwise"}},
]
EP: Final = [{"match": "layers.*.experts", "place": {"ep": "ep_dispatch_experts"}}]
PIPELINE: Final = {"schedule": "1F1B", "microbatches": 2}
INPUT: Final = {"shape": [2, SEQ_LEN], "dtype": "int64"}


class Layout(NamedTuple):
    """A number of ranks, and what its plan says."""

    world: int
    plan: Mapping[str, Any]


LAYOUTS: Final[Mapping[str, Layout]] = {
    "one": Layout(1, {"strategy": "full_shard"}),
    "ddp": Layout(2, {"strategy": "ddp"}),
    "zero1": Layout(2, {"strategy": "zero1"}),
    "zero2": Layout(4, {"strategy": "zero2"}),
    "full_shard": Layout(4, {"strategy": "full_shard"}),
    "hybrid": Layout(8, {"strategy": "hybrid_shard", "mesh": [2, 4]}),
    "tp_fsdp": Layout(8, {"mesh": {"dp_shard": 4, "tp": 2}, "rules": TP[2:]}),
    "packed": Layout(2, {"mesh": {"tp": 2}, "rules": TP}),
    "pp": Layout(2, {"mesh": {"pp": 2}, "pipeline": PIPELINE}),
    "pp_fsdp_tp": Layout(
        8, {"mesh": {"pp": 2, "dp_shard": 2, "tp": 2}, "pipeline": PIPELINE, "rules": TP}
    ),
    "cp": Layout(2, {"mesh": {"cp": 2}, "batch": {"seq_len": SEQ_LEN}}),
    "ep_fsdp": Layout(4, {"mesh": {"dp_shard": 4, "ep": "2 in dp_shard"}, "rules": EP}),
}


def plan_of(layout: str) -> dict[str, Any]:
    return {"version": 1, "input": INPUT, **LAYOUTS[layout].plan}


class Tokens(Dataset[tuple[Tensor, Tensor]]):
    """Three batches and a half of sequences, each moved on by a random number of tokens."""

    def __len__(self) -> int:
        return 7 * BATCH // 2

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(VOCAB, (SEQ_LEN + 1,), generator=generator)
        tokens = (tokens + torch.randint(VOCAB, ())) % VOCAB
        return tokens[:-1], tokens[1:]


class Job:
    """A model under a layout, its optimizer, its data and its schedule of the learning rate."""

    def __init__(self, plan: Mapping[str, Any], seed: int = 0, lr: float = 1e-2) -> None:
        torch.manual_seed(seed)
        self.model = meshplan.parallelize(Model(), plan)
        decayed = [p for p in self.model.parameters() if p.ndim > 1]
        others = [p for p in self.model.parameters() if p.ndim <= 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=lr
        )
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [1, 3], 0.5)
        self.loader = meshplan.dataloader(Tokens(), self.model, batch_size=BATCH, shuffle=True)

    def train(self, num: int) -> list[float]:
        """The losses of so many more steps."""
        losses = []
        for inputs, targets in itertools.islice(self._batches(), num):
            losses.append(
                meshplan.train_step(self.model, self.optimizer, inputs, targets, next_token_loss)
            )
            self.scheduler.step()
        return losses

    def _batches(self) -> Iterator[Any]:
        while True:
            yield from self.loader

    def numbers(self) -> dict[str, Any]:
        """Everything that a state should have, whole; of a pipeline, this rank's part of it."""
        live = LiveState(self.model)
        out: dict[str, Any] = {}
        for fqn in live.tensors:
            parameter = live.copies(fqn)[0]
            out[fqn] = full(parameter.detach()).clone()
            for word, value in self.optimizer.state.get(parameter, {}).items():
                out[f"{fqn}/{word}"] = full(value.detach()).clone()
        out["rates"] = [group["lr"] for group in self.optimizer.param_groups]
        return out


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def saved(layout: str, path: Path, **more: Any) -> tuple[dict[str, Any], list[float]]:
    """Two steps, a state, and two more: the numbers when it was saved, and the losses after it."""
    job = Job(plan_of(layout))
    job.train(2)
    objects = {"scheduler": job.scheduler, "data": job.loader}
    meshplan.save(path, job.model, job.optimizer, step=2, **objects, **more)
    return job.numbers(), job.train(2)


def loaded(layout: str, path: Path, **more: Any) -> tuple[dict[str, Any], list[float]]:
    """The numbers after loading into a job with other ones, and the losses of two more steps."""
    job = Job(plan_of(layout), seed=1, lr=0.3)
    objects = {"scheduler": job.scheduler, "data": job.loader}
    state = meshplan.load(path, job.model, job.optimizer, **objects, **more)
    assert state.step == 2
    return job.numbers(), job.train(2)
