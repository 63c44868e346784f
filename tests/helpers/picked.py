"""A model whose masks pick what its buffer says, trained for real and imagined at the most."""

from __future__ import annotations

import gc
import traceback
import warnings
from typing import Any

import torch
from torch import nn

import meshplan
from meshplan.plan.plan import make_plan
from meshplan.runtime.fake_step.step import fake_step, watch_steps
from meshplan.runtime.trace.bounds import everything, picking
from meshplan.runtime.trace.structure import graph_of
from meshplan.spec.reader import load_spec
from tests.helpers.exact import least_of

WIDTH, LENGTH = 24, 16
PLAN: dict[str, Any] = {
    "version": 1, "strategy": "full_shard", "mesh": {"dp_shard": 2}, "batch": {"per_rank": True},
}  # fmt: skip
Phases = dict[str, tuple[int, int]]


class Picker(nn.Module):
    """Computes with what a mask picks, in each of the ways to pick."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("keep", torch.arange(LENGTH) < count)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = self.keep.expand(x.shape[0], LENGTH)
        x[:, 0].detach().round().unique()
        out = self.first(x)
        out[mask] = torch.tanh(self.second(x[mask]))
        rows, columns = torch.nonzero(mask, as_tuple=True)
        more = self.third(out[rows, columns])
        kept = torch.masked_select(out, mask[..., None])
        return out.mean((1, 2)) + more.sum() + kept.square().sum()


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(2.0 * LENGTH * WIDTH).reshape(2, LENGTH, WIDTH) / 100, torch.zeros(2)


def _loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (output - targets).square().mean()


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-9)


def measured(count: int) -> Phases:
    """Of a real rank, of whose rows `count` are picked.

    As in `exact.measured`, the least of several steps: gloo may let go of a tensor late.
    """
    model = meshplan.parallelize(Picker(count), PLAN, example_inputs=(_batch()[0],))
    gc.collect()
    gc.disable()
    try:
        logs = watch_steps(model, _optimizer(model), *_batch(), _loss, 8)
    finally:
        gc.enable()
    return least_of(logs)


def at_most() -> Phases | str:
    """Imagined with everything picked, in a process that is in no group; or what was raised."""
    warnings.simplefilter("ignore")
    try:
        model = Picker(0)
        plan = make_plan(load_spec(PLAN), graph_of(model))
        with picking(everything):
            return dict(fake_step(model, plan, *_batch(), _loss, _optimizer).by_phase)
    except Exception:
        return traceback.format_exc()
