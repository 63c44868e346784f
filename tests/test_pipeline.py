"""Pipelines on real processes: the numbers of one process, whatever the model and the schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshplan
from meshplan.schedules import SCHEDULES
from tests import models, parity


def plan(mesh: dict[str, int], schedule: str = "1F1B", **more: Any) -> dict[str, Any]:
    pipeline = {"schedule": schedule} | more.pop("pipeline", {})
    return {"version": 1, "mesh": mesh, "pipeline": pipeline, **more}


def assert_equal(pool: Any, world: int, name: str, spec: dict[str, Any], **more: Any) -> None:
    apart = pool(world).run(parity.train, name, spec, **more)
    assert max(result["loss"] for result in apart) <= parity.TOLERANCE
    assert apart[0]["state"] <= parity.TOLERANCE, apart[0]["worst"]


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("own_llama", "GPipe"), ("own_llama", "InterleavedZeroBubble"), ("gpt2", "1F1B"),
        ("bert", "LoopedBFS"), ("t5", "1F1B"), ("t5", "ZBVZeroBubble"), ("vit", "Interleaved1F1B"),
        ("resnet", "1F1B"), ("odd", "DualPipeV"), ("odd", "1F1B"),
        ("hf_llama_tied", "Interleaved1F1B"), ("hf_llama_tied", "ZBVZeroBubble"),
    ],
)  # fmt: skip
def test_two_stages_train_as_one_process_does(pool, name, schedule):
    assert_equal(pool, 2, name, plan({"pp": 2}, schedule))


def test_four_stages_clip_and_accumulate_as_one_process_does(pool):
    spec = plan({"pp": 4}, clip_grad_norm=0.1, batch={"accumulate": 2})
    assert_equal(pool, 4, "gpt2", spec, clip=0.1)


@pytest.mark.parametrize(
    "spec",
    [
        plan({"pp": 2, "dp_shard": 2}, activation_checkpointing="full"),
        plan({"pp": 2, "dp_shard": 2}, "InterleavedZeroBubble", clip_grad_norm=0.1),
        plan({"pp": 2, "dp_shard": 2}, "DualPipeV", strategy="zero1"),
        plan({"pp": 2, "dp_replicate": 2}, strategy="ddp"),
        plan({"pp": 2, "dp_shard": 2}, "Interleaved1F1B", activation_checkpointing="selective"),
    ],
    ids=lambda spec: f"{spec['pipeline']['schedule']} {spec['mesh']}",
)
def test_stages_are_sharded_replicated_and_recomputed(pool, spec):
    assert_equal(pool, 4, "own_llama", spec, clip=spec.get("clip_grad_norm"))


def test_tied_and_shared_weights_are_sharded_in_every_stage(pool):
    assert_equal(pool, 4, "odd", plan({"pp": 2, "dp_shard": 2}, clip_grad_norm=0.1), clip=0.1)
    spec = plan({"pp": 2, "dp_shard": 2}, "ZBVZeroBubble", clip_grad_norm=0.1)
    assert_equal(pool, 4, "hf_llama_tied", spec, clip=0.1)


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_pp_with_shards_and_tp_on_eight_ranks(pool, schedule):
    spec = plan({"pp": 2, "dp_shard": 2, "tp": 2}, schedule, rules=models.tp_rules("own_llama"))
    assert_equal(pool, 8, "own_llama", spec)


def test_pp_with_hybrid_shards_and_tp_on_sixteen_ranks(pool):
    mesh = {"pp": 2, "dp_replicate": 2, "dp_shard": 2, "tp": 2}
    assert_equal(pool, 16, "own_llama", plan(mesh, rules=models.tp_rules("own_llama")))


class UNet(nn.Module):
    """Skips from every level down to the same level up: values that cross stages they skip."""

    def __init__(self) -> None:
        super().__init__()

        def level(inputs: int, outputs: int, stride: int = 1) -> nn.Module:
            convolution = nn.Conv2d(inputs, outputs, 3, stride, 1)
            return nn.Sequential(convolution, nn.GroupNorm(2, outputs), nn.SiLU())

        self.down1, self.down2, self.down3 = level(3, 8), level(8, 16, 2), level(16, 32, 2)
        self.middle = level(32, 32)
        self.up3, self.up2, self.up1 = level(64, 16), level(32, 8), level(16, 8)
        self.out = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(a)
        c = self.down3(b)
        up = self.up3(torch.cat([self.middle(c), c], 1))
        up = self.up2(torch.cat([nn.functional.interpolate(up, scale_factor=2.0), b], 1))
        up = self.up1(torch.cat([nn.functional.interpolate(up, scale_factor=2.0), a], 1))
        return self.out(up)


class BatchNorms(nn.Module):
    """Statistics of a microbatch, in place activations, a buffer that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.second = nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.out = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.second(self.first(x)))


CLASSES = {"UNet": UNet, "BatchNorms": BatchNorms}


def train_images(name: str, spec: dict[str, Any], sizes: tuple[int, ...]) -> tuple[float, float]:
    """Steps on images of these sizes, against one process with the same microbatches."""
    torch.manual_seed(0)
    alone = CLASSES[name]()
    torch.manual_seed(0)
    example = torch.zeros(2, 3, 16, 16)
    model = meshplan.parallelize(CLASSES[name](), spec, example_inputs=example)
    count = model.meshplan.plan.assignment.stages.microbatches
    pair = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (alone, model)]
    apart = 0.0
    for step, size in enumerate(sizes):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 3, size, size, generator=generator)
        with torch.no_grad():
            y = torch.zeros_like(alone.train()(x[:2])[:1]).expand(8, -1, -1, -1).contiguous()
            alone.load_state_dict(alone.state_dict())
        loss = meshplan.train_step(model, pair[1], x, y, nn.functional.mse_loss)
        expected = 0.0
        for number in range(count):
            part = nn.functional.mse_loss(alone(x.chunk(count)[number]), y.chunk(count)[number])
            (part / count).backward()
            expected += part.item() / count
        pair[0].step()
        pair[0].zero_grad()
        apart = max(apart, abs(loss - expected))
    live = meshplan.full_state_dict(model)
    own = {n: t for n, t in alone.state_dict().items() if "num_batches" not in n}
    return apart, max(((live[n] - t).abs().max().item() for n, t in own.items() if live), default=0)


@pytest.mark.parametrize("schedule", [n for n in SCHEDULES if n != "GPipe"])
def test_skips_cross_stages_and_shapes_may_change(pool, schedule):
    spec = plan({"pp": 2}, schedule, pipeline={"microbatches": 4})
    loss, state = pool(2).run(train_images, "UNet", spec, (16, 16, 24, 16))[0]
    assert max(loss, state) <= parity.TOLERANCE
