"""The proof can fail: every way a live model may differ from its plan is told, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import meshplan
from meshplan.errors import ApplyError
from meshplan.runtime.checks.layouts import check_live
from tests.helpers import models

SHARD: dict[str, Any] = {"version": 1, "strategy": "full_shard"}
TP: dict[str, Any] = {
    "version": 1,
    "mesh": {"dp_shard": 2, "tp": 2},
    "rules": models.tp_rules("own_llama"),
}


def swap(model: nn.Module, fqn: str, change: Callable[[Any], torch.Tensor]) -> None:
    """Put another tensor where a parameter was."""
    module, _, leaf = fqn.rpartition(".")
    old = model.get_parameter(fqn).detach()
    setattr(model.get_submodule(module), leaf, nn.Parameter(change(old), requires_grad=False))


def wrong_shape(model: nn.Module) -> None:
    swap(
        model, "norm.weight", lambda t: distribute_tensor(torch.ones(32), t.device_mesh, [Shard(0)])
    )


def wrong_dtype(model: nn.Module) -> None:
    swap(model, "norm.weight", lambda t: t.to(torch.bfloat16))


def left_whole(model: nn.Module) -> None:
    swap(model, "layers.0.attn.wk.weight", lambda t: t.full_tensor())


def replicated(model: nn.Module) -> None:
    swap(model, "norm.weight", lambda t: t.redistribute(placements=[Replicate()]))


def cut_along_another_dim(model: nn.Module) -> None:
    swap(model, "layers.0.attn.wq.weight", lambda t: t.redistribute(placements=[Shard(1)]))


def axes_swapped(model: nn.Module) -> None:
    """A square weight whose local shape does not betray it."""
    swap(
        model,
        "layers.0.attn.wo.weight",
        lambda t: DTensor.from_local(t.to_local(), t.device_mesh, [Shard(1), Shard(0)]),
    )


def missing(model: nn.Module) -> None:
    del model.norm.weight


def unplanned(model: nn.Module) -> None:
    model.extra = nn.Linear(2, 2, bias=False)


def buffer_cast(model: nn.Module) -> None:
    model.ramp = model.ramp.to(torch.float64)


def nothing(model: nn.Module) -> None:
    pass


def check(name: str, plan: dict[str, Any], change: Callable[[nn.Module], None]) -> str:
    """What the check says of a parallelized model after a change."""
    model = meshplan.parallelize(models.build(name), plan)
    change(model)
    try:
        check_live(model, model.meshplan.plan)
    except ApplyError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("name", "plan", "change", "message"),
    [
        ("own_llama", SHARD, nothing, ""),
        ("own_llama", TP, nothing, ""),
        (
            "own_llama",
            SHARD,
            wrong_shape,
            "meshplan: 2 problems\n"
            "norm.weight: shape is (32,), but the plan states (64,)\n"
            "norm.weight: local shape is (8,), but the plan states (16,)",
        ),
        (
            "own_llama",
            SHARD,
            wrong_dtype,
            "meshplan: 1 problem\nnorm.weight: dtype is bfloat16, but the plan states float32",
        ),
        (
            "own_llama",
            SHARD,
            left_whole,
            "meshplan: 2 problems\n"
            "layers.0.attn.wk.weight: local shape is (32, 64), but the plan states (8, 64)\n"
            "layers.0.attn.wk.weight: sharding is none, but the plan states dp_shard on dim 0",
        ),
        (
            "own_llama",
            SHARD,
            replicated,
            "meshplan: 2 problems\n"
            "norm.weight: local shape is (64,), but the plan states (16,)\n"
            "norm.weight: sharding is none, but the plan states dp_shard on dim 0",
        ),
        (
            "own_llama",
            SHARD,
            cut_along_another_dim,
            "meshplan: 2 problems\n"
            "layers.0.attn.wq.weight: local shape is (64, 16), but the plan states (16, 64)\n"
            "layers.0.attn.wq.weight: sharding is dp_shard on dim 1, but the plan states dp_shard "
            "on dim 0",
        ),
        (
            "own_llama",
            TP,
            axes_swapped,
            "meshplan: 1 problem\n"
            "layers.0.attn.wo.weight: sharding is dp_shard on dim 1, tp on dim 0, but the plan "
            "states dp_shard on dim 0, tp on dim 1",
        ),
        (
            "own_llama",
            SHARD,
            missing,
            "meshplan: 1 problem\nnorm.weight is in the plan but not in the live model",
        ),
        (
            "own_llama",
            SHARD,
            unplanned,
            "meshplan: 1 problem\nextra.weight is in the live model but not in the plan",
        ),
        (
            "odd",
            SHARD,
            buffer_cast,
            "meshplan: 1 problem\nramp: dtype is float64, but the plan states float32",
        ),
    ],
)
def test_what_is_found(pool: Any, name: str, plan: Any, change: Any, message: str) -> None:
    assert pool(4).run(check, name, plan, change) == [message] * 4


def shrink_on_rank_3(model: nn.Module) -> None:
    """Only the last rank holds too little of an uneven dim (37 rows: 10, 10, 10, 7)."""
    local = model.get_parameter("blocks.0.up.bias").to_local()
    if dist.get_rank() == 3:
        local = local[:6]
    shape, stride = torch.Size([37]), (1,)
    swap(
        model,
        "blocks.0.up.bias",
        lambda t: DTensor.from_local(local, t.device_mesh, [Shard(0)], shape=shape, stride=stride),
    )


def test_each_rank_checks_its_own_part(pool: Any) -> None:
    said = pool(4).run(check, "odd", SHARD, shrink_on_rank_3)
    assert said[:3] == [""] * 3
    assert said[3] == (
        "meshplan: 1 problem\nblocks.0.up.bias: local shape is (6,), but the plan states (7,)"
    )


def all_of_it(model: nn.Module) -> None:
    wrong_dtype(model)
    unplanned(model)
    del model.head.weight


def test_all_differences_at_once(pool: Any) -> None:
    assert pool(2).run(check, "own_llama", SHARD, all_of_it)[0] == (
        "meshplan: 3 problems\n"
        "head.weight is in the plan but not in the live model\n"
        "norm.weight: dtype is bfloat16, but the plan states float32\n"
        "extra.weight is in the live model but not in the plan"
    )


class Wrapper(nn.Module):
    """A model whose child bears the name that DistributedDataParallel gives its own."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(4, 4)


def wrap(strategy: str) -> list[str]:
    model = meshplan.parallelize(Wrapper(), {"version": 1, "strategy": strategy})
    return sorted(meshplan.full_state_dict(model))


@pytest.mark.parametrize("strategy", ["ddp", "full_shard"])
def test_a_child_may_be_called_module(pool: Any, strategy: str) -> None:
    assert pool(2).run(wrap, strategy)[0] == ["module.bias", "module.weight"]
