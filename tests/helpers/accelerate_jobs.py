"""A training loop with accelerate and a plan, saved and gone on with. Import it in a job only."""

from __future__ import annotations

import os
from typing import Any

import torch
from accelerate import Accelerator
from torch.optim.lr_scheduler import StepLR

import meshplan
from meshplan.interop.accelerate import planned_state
from tests.helpers.hf_jobs import PLANS, error_of, model
from tests.helpers.lit import launched

STEPS = 3


def _loop(name: str, folder: str, resume: bool) -> dict[str, Any]:
    accelerator = Accelerator(cpu=True)
    net = model().double()
    example = {"input_ids": torch.zeros(2, 12, dtype=torch.long)}
    net = meshplan.parallelize(net, {"version": 1, **PLANS[name]}, example_inputs=example)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scheduler = StepLR(optimizer, 2)
    planned_state(accelerator, net, optimizer, scheduler=scheduler)
    if resume:
        accelerator.load_state(folder)
    drawn = torch.rand(2).tolist()  # The generator goes on where it was.
    losses = []
    tokens = torch.randint(64, (8, 12), generator=torch.Generator().manual_seed(1))
    for step in range(2 * STEPS):
        if resume and step < STEPS:
            continue
        inputs, targets = meshplan.local_batch(net, ({"input_ids": tokens}, tokens.roll(step, 0)))
        losses.append(meshplan.train_step(net, optimizer, inputs, targets, _loss))
        scheduler.step()
        if not resume and step + 1 == STEPS:
            for _ in range(2):  # The second one replaces the first.
                accelerator.save_state(folder)
            drawn = torch.rand(2).tolist()
    if resume:  # The folder has a state of an earlier process, which this one replaces.
        accelerator.save_state(folder)
        before = [parameter.detach().clone() for parameter in net.parameters()]
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.zero_()
        accelerator.load_state(folder)
        pairs = zip(before, net.parameters(), strict=True)
        assert all(torch.equal(_local(one), _local(two)) for one, two in pairs)
    state = meshplan.full_state_dict(net)
    return {"losses": losses, "drawn": drawn, "state": state, "rate": scheduler.get_last_lr()}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "to_local", lambda: tensor)()


def _loss(output: Any, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(output.logits.flatten(0, -2), targets.flatten())


def trained(name: str, folder: str, resume: bool) -> dict[str, Any]:
    """Train six steps and save after three of them, or only the last three of a saved state."""
    with launched():
        os.environ["ACCELERATE_USE_CPU"] = "true"
        return _loop(name, folder, resume)


def errors(folder: str) -> dict[str, str]:
    """Return the error of each Accelerator that a planned state does not suit."""
    with launched():
        os.environ["ACCELERATE_USE_CPU"] = "true"
        net = meshplan.parallelize(model(), {"version": 1, "strategy": "full_shard"})
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        accelerator = Accelerator(cpu=True)
        out = {"good": error_of(lambda: planned_state(accelerator, net, sgd))}
        out["twice"] = error_of(lambda: planned_state(accelerator, net, sgd))
        out["missing"] = error_of(lambda: accelerator.load_state(folder))
        prepared = Accelerator(cpu=True)
        prepared.prepare_model(net, device_placement=False, evaluation_mode=True)
        prepared.prepare_optimizer(sgd)
        out["prepared"] = error_of(lambda: planned_state(prepared, net, sgd))
        half = Accelerator(cpu=True)
        half.state._mixed_precision = "bf16"  # A shared state: the constructor would refuse it.
        out["half"] = error_of(lambda: planned_state(half, net, sgd))
        half.state._mixed_precision = "no"
        return out
