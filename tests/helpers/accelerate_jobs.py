"""A training loop with accelerate and a plan, saved and gone on with. Import it in a job only."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from functools import partial
from typing import Any, Final
from unittest import mock

import torch
import yaml
from accelerate import Accelerator
from accelerate.state import GradientState
from accelerate.utils import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    DynamoBackend,
    FullyShardedDataParallelPlugin,
)
from safetensors.torch import load_file
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR
from torch.utils.data import DataLoader

import meshplan
from meshplan import full_state_dict
from meshplan.interop.accelerate import MeshplanAccelerator, planned_state
from meshplan.runtime.apply.wrap import applied
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


def looped(name: str, folder: str, resume: bool, splits: bool) -> Any:
    """Run a loop of accelerate; the last half of it only if it goes on from a saved state.

    Args:
        name: A plan; "" for one process and accelerate alone.
        folder: The folder of the state.
        resume: If True, the steps after the saved one are taken.
        splits: If True, loaders have the batch size of all ranks together.
    """
    with launched() if name else nullcontext():
        os.environ["ACCELERATE_USE_CPU"] = "true"
        out: dict[str, Any] = {}
        return error_of(lambda: _own_loop(name, folder, resume, splits, out)) or out


def _own_loop(name: str, folder: str, resume: bool, splits: bool, out: dict[str, Any]) -> None:
    config = DataLoaderConfiguration(split_batches=splits)
    accelerator = make(name, dataloader_config=config)
    net = model().double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    tokens = torch.randint(64, (8 * 2 * STEPS, 12), generator=torch.Generator().manual_seed(1))
    size = 8 if splits else 8 // DATA_RANKS[name]
    loader = DataLoader([{"input_ids": row, "labels": row} for row in tokens], size)
    scheduler = CosineAnnealingLR(optimizer, len(loader))
    # The model in the middle: the order of what is prepared makes no difference.
    loader, net, optimizer, scheduler = accelerator.prepare(loader, net, optimizer, scheduler)
    if resume:
        accelerator.load_state(folder)
        loader = accelerator.skip_first_batches(loader, STEPS)
    out |= {"losses": [], "rates": []}
    for number, batch in enumerate(loader):
        loss = net(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        out["losses"].append(accelerator.gather(loss.detach()).mean().item())
        out["rates"] += scheduler.get_last_lr()
        if not resume and number + 1 == STEPS:
            accelerator.save_state(folder)
    out["state"] = accelerator.get_state_dict(net)


def make(name: str, **settings: Any) -> Any:
    """Make an Accelerator, under a plan if there is a name of one."""
    GradientState._reset_state()  # A loop that ended in an error leaves its loader there.
    if not name:
        return Accelerator(cpu=True, **settings)
    example = {"input_ids": torch.zeros(2, 12, dtype=torch.long)}
    plan = {"version": 1, **PLANS[name]} if name in PLANS else yaml.safe_load(name)
    return MeshplanAccelerator(plan=plan, example_inputs=example, cpu=True, **settings)


DATA_RANKS: Final = {"": 1, "ddp": 4, "full_shard": 4, "tp_fsdp": 2}


def values(folder: str) -> dict[str, Any]:
    """Return what an Accelerator gathers and reduces under tp_fsdp."""
    with launched():
        os.environ["ACCELERATE_USE_CPU"] = "true"
        accelerator = make("tp_fsdp")
        out: dict[str, Any] = {"before": (accelerator.num_processes, accelerator.process_index)}
        loader = DataLoader(range(7), 2)
        net, loader = accelerator.prepare(model(), loader)
        out["after"] = (accelerator.num_processes, accelerator.process_index)
        index = torch.tensor([accelerator.process_index, 7.0])
        out["gathered"] = accelerator.gather({"x": index})["x"].tolist()
        out["reduced"] = [accelerator.reduce(index, how).tolist() for how in ("sum", "mean", "max")]
        out["samples"] = [accelerator.gather_for_metrics(batch).tolist() for batch in loader]
        out["objects"] = [
            accelerator.gather_for_metrics([f"s{each}" for each in batch.tolist()])
            for batch in loader
        ]
        out["is_last"] = accelerator.is_last_process
        accelerator.save_model(net, folder)
        accelerator.unwrap_model(net).save_pretrained(
            os.path.join(folder, "hf"), is_main_process=accelerator.is_main_process,
            save_function=accelerator.save, state_dict=accelerator.get_state_dict(net),
        )  # fmt: skip
        own = full_state_dict(net)
        for where in ("", "hf") if accelerator.is_main_process else ():
            saved = load_file(os.path.join(folder, where, "model.safetensors"))
            assert all(torch.equal(saved[key], own[key]) for key in saved)
            out["saved"] = len(saved)
        out["full"] = len(accelerator.get_state_dict(net))
        return out


def syncs() -> list[bool]:
    """Return whether each of four microbatches, and one of `no_sync`, reduces gradients."""
    with launched():
        os.environ["ACCELERATE_USE_CPU"] = "true"
        accelerator = make("ddp", gradient_accumulation_steps=2)
        net, out = accelerator.prepare(model()), []
        for _ in range(4):
            with accelerator.accumulate(net):
                out.append(net.require_backward_grad_sync)
        with accelerator.no_sync(net):
            out.append(net.require_backward_grad_sync)
        return out


class Counting(torch.nn.Module):
    """Counts its forwards, of which one process has one in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))
        self.forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        return x * self.weight / self.forwards


def counted() -> list[int]:
    """Return the forwards that were counted after each of three steps of three microbatches.

    The loop leaves out the second one, as for a loss that is not finite.
    """
    with launched():
        os.environ["ACCELERATE_USE_CPU"] = "true"
        plan = json.dumps({"version": 1, "strategy": "ddp"})
        accelerator, net, out = make(plan, gradient_accumulation_steps=3), Counting(), []
        own, optimizer = net, torch.optim.SGD(net.parameters(), lr=0.1)
        net, optimizer = accelerator.prepare(net, optimizer)
        generator = torch.Generator().manual_seed(accelerator.process_index)
        for number in range(9):
            with accelerator.accumulate(net):
                accelerator.backward(net(torch.randn(2, 4, generator=generator)).sum())
                if number // 3 != 1:
                    optimizer.step()
                optimizer.zero_grad()
            if number % 3 == 2:
                out.append(own.forwards)
        return out


def overflowed() -> dict[str, Any]:
    """Return what a loop under a float16 loss scale shows of its first steps."""
    with launched():
        os.environ["ACCELERATE_USE_CPU"] = "true"
        accelerator = make('{"version": 1, "strategy": "ddp", "precision": "16-mixed"}')
        net = model()
        net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        own, out = applied(net), {"skipped": [], "norms": [], "scales": []}
        seed = accelerator.process_index
        tokens = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(seed))
        for scale in (2.0**40, 2.0**10, 2.0**8):
            own.loss_scale = scale
            accelerator.backward(net(input_ids=tokens, labels=tokens).loss)
            norm = accelerator.clip_grad_norm_(net.parameters(), 1.0)
            out["norms"].append(norm.item())
            optimizer.step()
            out["skipped"].append(accelerator.optimizer_step_was_skipped)
            out["scales"].append(own.loss_scale)
            optimizer.zero_grad()
        return out


def loop_errors() -> dict[str, str]:
    """Return the error of each loop of accelerate that a plan does not suit."""
    with launched():
        os.environ["ACCELERATE_USE_CPU"] = "true"
        return {name: error_of(lambda each=each: each()) for name, each in _errors().items()}


def _errors() -> dict[str, Any]:
    def with_optimizer(kind: Any, **settings: Any) -> Any:
        net = model()
        return make("full_shard").prepare(net, kind(net.parameters(), **settings))

    def clips_a_part() -> Any:
        accelerator = make("full_shard")
        net = accelerator.prepare(model())
        accelerator.clip_grad_norm_(net.lm_head.parameters(), 1.0)

    def scheduler_first() -> Any:
        sgd = torch.optim.SGD(model().parameters(), lr=0.1)
        make("full_shard").prepare(StepLR(sgd, 1))

    def two(*kinds: Any) -> Any:
        accelerator, net = make("full_shard"), model()
        accelerator.prepare(net)
        accelerator.prepare(*[kind(net) for kind in kinds])

    def cut(**mesh: int) -> Any:
        # Nothing says with which inputs it is called, of which a refusal has no need.
        plan = json.dumps({"version": 1, "mesh": {"dp_shard": 2, **mesh}})
        return make(plan).prepare(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))

    def stated(**more: Any) -> Any:
        return make(json.dumps({"version": 1, "strategy": "ddp", **more})).prepare(model())

    def compiling() -> Any:
        plugin = make("ddp").state.dynamo_plugin  # Of a shared state, which later ones have too.
        with mock.patch.object(plugin, "backend", DynamoBackend.EAGER):
            make("ddp")

    def launched_by_accelerate() -> Any:  # Of a configuration with DeepSpeed, which is not here.
        with mock.patch.dict(os.environ, {"ACCELERATE_USE_DEEPSPEED": "true"}):
            make("ddp")

    sgd = partial(torch.optim.SGD, lr=0.1)
    handlers = {"kwargs_handlers": [DistributedDataParallelKwargs(find_unused_parameters=True)]}
    return {
        "good": lambda: with_optimizer(torch.optim.AdamW),
        "states": lambda: with_optimizer(torch.optim.Adagrad),
        "references": lambda: with_optimizer(torch.optim.LBFGS),
        "optimizer_first": lambda: make("full_shard").prepare(sgd(model().parameters())),
        "scheduler_first": scheduler_first,
        "part": clips_a_part,
        "second": lambda: two(lambda net: model()),
        "two": lambda: two(*[lambda net: sgd(net.parameters())] * 2),
        "early": lambda: make("full_shard").backward(torch.ones(())),
        "split": lambda: make("tp_fsdp").split_between_processes([1, 2]),
        "dispatch": lambda: make(
            "ddp", dataloader_config=DataLoaderConfiguration(dispatch_batches=True)
        ),
        "uneven": lambda: make(
            "ddp", dataloader_config=DataLoaderConfiguration(even_batches=False)
        ),
        "handlers": lambda: make("ddp", **handlers),
        "pp": lambda: cut(pp=2),
        "cp": lambda: cut(cp=2),
        "clip": lambda: stated(clip_grad_norm=0.5),
        "accumulate": lambda: stated(batch={"accumulate": 3}),
        "tokens": lambda: stated(loss="tokens"),
        "open": lambda: make('{"version": 1, "mesh": "auto", "strategy": "auto"}').num_processes,
        "compile": compiling,
        "fsdp": lambda: make("ddp", fsdp_plugin=FullyShardedDataParallelPlugin()),
        "environment": launched_by_accelerate,
    }
