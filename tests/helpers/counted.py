"""A plan on real ranks: what is predicted that one step sends, and what it sends."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import meshplan
from meshplan.layout.mesh import DATA_AXES
from meshplan.plan.plan import Plan
from meshplan.runtime.trace.collectives import counting
from meshplan.runtime.verify.module_calls import record_forward
from meshplan.traffic import Forecast, Route, forecast
from tests.helpers import models, moe
from tests.runtime.apply import test_batchnorm

WIDTH = 16


class Twice(nn.Module):
    """A block that runs before and behind another one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(models.VOCAB, WIDTH)
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.other = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.head = nn.Linear(WIDTH, models.VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.other(self.block(self.embed(x)))))


class Heads(nn.Module):
    """torch's own attention, of one tensor and of two."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(models.VOCAB, WIDTH)
        self.layers = nn.ModuleList(
            [nn.MultiheadAttention(WIDTH, 4, batch_first=True) for _ in range(2)]
        )
        self.head = nn.Linear(WIDTH, models.VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = h + layer(h, h, h, need_weights=False)[0]
            h = h + layer(h, h.tanh(), h, need_weights=False)[0]
        return self.head(h)


OWN = {"twice": Twice, "heads": Heads, "batchnorms": test_batchnorm.net}
FROZEN = {", half frozen": 2, ", a third frozen": 3}
MASKED = ", masked"


def plain(name: str) -> str:
    """The name without what is said of its inputs and parameters."""
    return name.partition(",")[0] if name.endswith((MASKED, *FROZEN)) else name


def build(name: str) -> nn.Module:
    """A model of any page of the tests, by name; its first parameters may be frozen."""
    known = plain(name)
    torch.manual_seed(0)
    if known in OWN:
        model = OWN[known]()
    else:
        model = moe.build(known) if known in moe.BUILDERS else models.build(known)
    parameters = list(model.parameters())
    share = next((share for words, share in FROZEN.items() if name.endswith(words)), 0)
    for parameter in parameters[: len(parameters) // share] if share else ():
        parameter.requires_grad_(False)
    return model


def batch(name: str) -> tuple[Any, Tensor]:
    """A global batch of eight samples; it may have a mask that hides nothing."""
    known = plain(name)
    if known == "batchnorms":
        return test_batchnorm.batch(0)
    kind = "mixtral" if known in moe.BUILDERS else "own_llama" if known in OWN else known
    inputs, targets = models.batch(kind, 0)
    if name.endswith(MASKED):
        inputs = inputs | {"attention_mask": torch.ones_like(inputs["input_ids"])}
    return inputs, targets


def told_and_counted(name: str, plan: dict[str, Any]) -> tuple[Forecast, Counter[Route]]:
    """The forecast of this rank, and what its third step really sent."""
    told, _, counted = told_twice_and_counted(name, plan, 0.1, routes=False)
    return told, counted


def told_twice_and_counted(
    name: str, plan: dict[str, Any], rate: float = 0.0, *, routes: bool = True
) -> tuple[Forecast, Forecast, Counter[Route]]:
    """The forecast of this rank, that which is told how tokens are routed, and the count.

    Args:
        rate: Of learning: without, the routing stays what it was.
        routes: Tokens are routed.
    """
    spec = meshplan.load_spec({"version": 1, **plan})
    model = meshplan.parallelize(build(name), spec, example_inputs=batch(name)[0])
    decided = model.meshplan.plan
    trained = [p for p in model.parameters() if p.requires_grad] or [nn.Parameter(torch.ones(1))]
    sgd = torch.optim.SGD(trained, lr=rate, momentum=0.9)
    mine = meshplan.local_batch(model, batch(name))
    forward = record_forward(build(name), decided, *mine, models.loss)
    for _ in range(2):
        meshplan.train_step(model, sgd, *mine, models.loss)
    with counting(decided.mesh) as counted:
        meshplan.train_step(model, sgd, *mine, models.loss)
    rank = dist.get_rank()
    told = forecast(decided, forward, rank)
    routing = arrivals(name, decided, rank) if routes else None
    return told, forecast(decided, forward, rank, arrivals=routing), counted


def arrivals(name: str, plan: Plan, rank: int) -> dict[str, list[int]]:
    """How many slots the router sends to the experts of `rank`, by module, call by call."""
    model, mesh = build(name), plan.mesh
    here = mesh.coordinates(rank)
    came: Counter[str] = Counter()
    for fqn, use in plan.assignment.experts.items():
        share = use.num_experts // mesh.size("ep")

        def count(
            module: nn.Module, args: Any, kwargs: Any, fqn: str = fqn, n: int = share
        ) -> None:
            index = next(t for t in (*args, *kwargs.values()) if not t.is_floating_point())
            came[fqn] += int((index // n == here["ep"]).sum())

        model.get_submodule(fqn).register_forward_pre_hook(count, with_kwargs=True)
    others = [axis for axis in here if axis not in ("ep", "dp_shard")]
    inputs = batch(name)[0]["input_ids"].chunk(plan.num_data_ranks)
    stages = plan.assignment.stages
    count_of = plan.accumulate * (stages.microbatches if stages is not None else 1)
    out: dict[str, list[int]] = {fqn: [] for fqn in plan.assignment.experts}
    for microbatch in range(count_of):
        came.clear()
        for peer in range(mesh.world_size):
            there = mesh.coordinates(peer)
            if all(there[axis] == here[axis] for axis in others):
                own = inputs[mesh.index(peer, DATA_AXES)]
                model(input_ids=own.chunk(count_of)[microbatch])
        for fqn, rows in out.items():
            rows.append(came[fqn])
    return out
