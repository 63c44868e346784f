"""LightningModules under plans of 4 ranks and in one process, for the tests of Lightning.

Import it in a job only: it imports Lightning.
"""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Final
from unittest import mock

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from meshplan.interop.lightning import MeshplanFabricStrategy, MeshplanStrategy
from meshplan.runtime.apply.wrap import applied
from tests.helpers.stated import (
    EP,
    INPUT,
    PIPELINE,
    SEQ_LEN,
    TP,
    VOCAB,
    Model,
    next_token_loss,
)

PLANS: Final[Mapping[str, dict[str, Any]]] = {
    "ddp": {"strategy": "ddp"},
    "zero2": {"strategy": "zero2"},
    "full_shard": {"strategy": "full_shard"},
    "hybrid": {"strategy": "hybrid_shard", "mesh": [2, 2]},
    "tp_fsdp": {"mesh": {"dp_shard": 2, "tp": 2}, "rules": TP},
    "pp_fsdp": {"mesh": {"pp": 2, "dp_shard": 2}, "pipeline": PIPELINE},
    "cp_fsdp": {"mesh": {"dp_shard": 2, "cp": 2}, "batch": {"seq_len": SEQ_LEN}},
    "ep_fsdp": {"mesh": {"dp_shard": 4, "ep": "2 in dp_shard"}, "rules": EP},
}  # fmt: skip
MICRO: Final = 8
"""Samples of a microbatch on all data ranks."""


def plan_of(name: str, **more: Any) -> dict[str, Any]:
    return {"version": 1, "input": INPUT, **PLANS[name], **more}


def data_ranks(name: str) -> int:
    mesh = PLANS[name].get("mesh")
    return 2 if isinstance(mesh, dict) and "ep" not in mesh else 4


class Sequences(Dataset[Any]):
    """Sequences of tokens; with `masks`, each has another number of targets that count."""

    def __init__(self, num: int, masks: bool = False) -> None:
        generator = torch.Generator().manual_seed(5)
        self.tokens = torch.randint(VOCAB, (num, SEQ_LEN + 1), generator=generator)
        self.targets = self.tokens[:, 1:].clone()
        if masks:
            for number, row in enumerate(self.targets):
                row[: number * 3 % SEQ_LEN] = -100

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Any:
        return self.tokens[index, :-1], self.targets[index]


class Lit(pl.LightningModule):
    """As the docs of Lightning write one: a network, its steps, its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.losses: list[float] = []
        self.syncs: list[bool] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        self.syncs.append(getattr(self.model, "require_backward_grad_sync", True))
        loss = next_token_loss(self.model(inputs), targets)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, targets = batch
        logits = self.model(inputs)
        self.log("val_loss", next_token_loss(logits, targets), sync_dist=True)
        hits = (logits.argmax(-1) == targets).float().sum()
        self.log("hits", hits, reduce_fx="sum", sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        inputs, targets = batch
        self.log("test_loss", next_token_loss(self.model(inputs), targets), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(batch[0])[:, -1]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = self.trainer.strategy.reduce(outputs["loss"].detach().clone(), reduce_op="mean")
        self.losses.append(float(loss))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class Pipelined(Lit):
    """The same with the loss where only the last stage has the output."""

    def meshplan_loss(self, output: Tensor, batch: Any) -> Tensor:
        return next_token_loss(output, batch[1])


@contextmanager
def launched() -> Iterator[None]:
    """Set torchrun's variables in a rank of a pool."""
    before = dict(os.environ)
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(
        RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, GROUP_RANK="0",
        TORCHELASTIC_RUN_ID="test", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500",
    )  # fmt: skip
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def trainer(strategy: Any, devices: int, **more: Any) -> pl.Trainer:
    """A Trainer that writes nothing unless it is asked to."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    quiet = {
        "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
        "enable_model_summary": False,
    }  # fmt: skip
    settings = {"accelerator": "cpu", "max_epochs": 2, **quiet, **more}
    return pl.Trainer(strategy=strategy, devices=devices, **settings)


def loaders(ranks: int, num: int = 3 * MICRO, masks: bool = False) -> Any:
    """Loaders for training, which Lightning shuffles on several ranks only, and for validation."""
    data = Sequences(num, masks)
    sampler = DistributedSampler(data, 1, 0) if ranks == 1 else None
    return (
        DataLoader(data, batch_size=MICRO // ranks, sampler=sampler),
        DataLoader(Sequences(2 * MICRO, masks), batch_size=MICRO // ranks),
    )


def run(
    module: Lit, strategy: Any, devices: int, ranks: int, masks: bool = False, **more: Any
) -> dict[str, Any]:
    """Fit, validate, test and predict; return all numbers."""
    train, valid = loaders(ranks, masks=masks)
    made = trainer(strategy, devices, **more)
    made.fit(module, train, valid)
    out: dict[str, Any] = {"losses": module.losses, "syncs": module.syncs}
    if "train_loss_epoch" in made.callback_metrics:
        out["epoch"] = float(made.callback_metrics["train_loss_epoch"])
    out |= {
        key: float(value) for key, value in made.validate(module, valid, verbose=False)[0].items()
    }
    out |= {key: float(value) for key, value in made.test(module, valid, verbose=False)[0].items()}
    out["predicted"] = torch.cat(made.predict(module, valid))
    return out


SETTINGS: Final = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}


def alone(masks: bool = False, **more: Any) -> dict[str, Any]:
    """In one process, with Lightning alone."""
    torch.manual_seed(0)
    return run(Lit(), "auto", 1, 1, masks, **{**SETTINGS, **more})


def planned(name: str, masks: bool = False, extra: Any = None, **more: Any) -> dict[str, Any]:
    """Under a plan, on the ranks of a pool."""
    torch.manual_seed(0)
    module = Pipelined() if "pp" in name else Lit()
    loss = {"loss": "tokens"} if masks else {}
    with launched():
        strategy = MeshplanStrategy(plan_of(name, **loss, **(extra or {})))
        return run(module, strategy, 4, data_ranks(name), masks, **{**SETTINGS, **more})


def in_float64(name: str | None = None) -> list[float]:
    """Return the losses of a model in float64, under a plan or in one process."""
    torch.manual_seed(0)
    if name is None:
        return run(Lit().double(), "auto", 1, 1, False, **SETTINGS)["losses"]
    module = (Pipelined() if "pp" in name else Lit()).double()
    with launched():
        strategy = MeshplanStrategy(plan_of(name))
        return run(module, strategy, 4, data_ranks(name), False, **SETTINGS)["losses"]


QUIET: Final = {
    "accelerator": "cpu", "logger": False, "enable_checkpointing": False,
    "enable_progress_bar": False, "enable_model_summary": False,
}  # fmt: skip


def script_alone(name: str) -> dict[str, float]:
    """Run a script in one process, with the samples of each step that 4 ranks have."""
    module = importlib.import_module(f"tests.interop.scripts.{name}")

    def made(data: Any, batch_size: int) -> Any:
        seed = int(os.environ["PL_GLOBAL_SEED"])
        return DataLoader(data, batch_size, sampler=DistributedSampler(data, 1, 0, seed=seed))

    with mock.patch.dict(os.environ), mock.patch.object(module, "DataLoader", made):
        return module.main(16, devices=1, strategy="auto", **QUIET)


def script_planned(name: str, plan: Mapping[str, Any], ranks: int) -> dict[str, float]:
    """Run a script under a plan, unmodified but for its strategy."""
    module = importlib.import_module(f"tests.interop.scripts.{name}")
    with launched():
        return module.main(16 // ranks, devices=4, strategy=MeshplanStrategy(dict(plan)), **QUIET)


def fitted(
    name: str, folder: str, steps: int, resume: bool, cut: int | None = None,
    fail: Callable[[], None] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Fit until a step with checkpoints of each epoch, from the newest one if asked to.

    Args:
        name: A plan; "" for one process.
        folder: The folder of checkpoints.
        steps: The last step.
        resume: If True, go on from `last.ckpt` in the folder.
        cut: Step after which every rank fails, as in a crash.
        fail: What every rank does then, if not this.
    """
    torch.manual_seed(0)
    module = Pipelined() if "pp" in name else Lit()
    if cut is not None:
        module.on_train_batch_start = lambda batch, index: _fail_at(module, cut, fail or _crash)
    keeper = ModelCheckpoint(
        folder, filename="{epoch}-{step}", save_top_k=1, monitor="val_loss", save_last=True
    )
    with launched() if name else nullcontext():
        strategy = MeshplanStrategy(plan_of(name)) if name else "auto"
        made = trainer(
            strategy, 4 if name else 1, max_epochs=-1, max_steps=steps, callbacks=[keeper],
            enable_checkpointing=True,
        )  # fmt: skip
        train, valid = loaders(data_ranks(name) if name else 1)
        last = os.path.join(folder, "last.ckpt")
        error = ""
        try:
            made.fit(module, train, valid, ckpt_path=last if resume else None)
        except ZeroDivisionError as failure:
            error = type(failure).__name__
    rate = made.optimizers[0].param_groups[0]["lr"]
    return {
        "losses": module.losses, "step": made.global_step, "epoch": made.current_epoch,
        "rate": rate, "best": os.path.basename(keeper.best_model_path), "error": error,
        "val_loss": float(made.callback_metrics.get("val_loss", 0.0)),
    }  # fmt: skip


def _crash() -> None:
    raise ZeroDivisionError("the job dies")


def _fail_at(module: Any, step: int, fail: Callable[[], None]) -> None:
    if module.trainer.global_step == step:
        fail()


def fabric_alone() -> list[float]:
    torch.manual_seed(0)
    model = Model()
    return _fabric_loop(Fabric(accelerator="cpu", devices=1), model, None)[0]


def _fabric_loop(fabric: Any, model: Any, folder: str | None) -> Any:
    model = fabric.setup(model)
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    data = Sequences(6 * MICRO)
    ranks = fabric.strategy.distributed_sampler_kwargs["num_replicas"] if folder else 1
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=MICRO // ranks))
    losses = []
    for number, (inputs, targets) in enumerate(loader):
        is_last = number % 2 == 1
        with fabric.no_backward_sync(model, enabled=not is_last):
            loss = next_token_loss(model(inputs), targets)
            fabric.backward(loss / 2)
        losses.append(float(fabric.all_reduce(loss.detach().clone())))
        if is_last:
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
        if folder and number == 3:
            fabric.save(folder, {"model": model, "optimizer": optimizer, "number": number})
    if folder:
        before = [float(fabric.all_reduce(next_token_loss(model(inputs), targets).detach()))]
        state = {"model": model, "optimizer": optimizer, "number": 0}
        fabric.load(folder, state)
        after = [float(fabric.all_reduce(next_token_loss(model(inputs), targets).detach()))]
        return losses, before, after, state["number"]
    return losses, None


def fabric_planned(name: str, folder: str) -> Any:
    torch.manual_seed(0)
    with launched():
        fabric = Fabric(
            accelerator="cpu", devices=4, strategy=MeshplanFabricStrategy(plan_of(name))
        )
        fabric.launch()
        torch.manual_seed(0)
        return _fabric_loop(fabric, Model(), folder)


def fabric_refused() -> dict[str, str]:
    """Return the error of each loop of Fabric that a plan does not suit, on the ranks of a pool."""
    half = {"precision": "16-mixed"}
    cases: dict[str, tuple[str, dict[str, Any]]] = {
        "pp": ("pp_fsdp", {"input": None}),  # No inputs of the model are known.
        "cp": ("cp_fsdp", {}),
        "clip": ("ddp", {"clip_grad_norm": 0.5}),
        "accumulate": ("ddp", {"batch": {"accumulate": 2}}),
        "two": ("ddp", half),
        "late": ("ddp", half),
    }
    out = {}
    with launched():
        for kind, (name, more) in cases.items():
            plan = {key: value for key, value in plan_of(name, **more).items() if value is not None}
            strategy = MeshplanFabricStrategy(plan)
            fabric = Fabric(accelerator="cpu", devices=4, strategy=strategy)
            fabric.launch()
            try:
                _fabric_step(fabric, kind)
                out[kind] = ""
            except Exception as error:
                out[kind] = f"{type(error).__name__}: {error}"
    return out


def _fabric_step(fabric: Any, kind: str) -> None:
    """Run one step, with a second optimizer or a late backward if `kind` says so."""
    torch.manual_seed(0)
    model = fabric.setup(Model())
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.5))
    if kind == "two":
        fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.5))
    inputs, targets = Sequences(2)[:]
    fabric.backward(next_token_loss(model(inputs), targets))
    fabric.clip_gradients(model, optimizer, max_norm=0.5)
    if kind == "late":
        fabric.backward(next_token_loss(model(inputs), targets))
    optimizer.step()


class Manual(Lit):
    """A LightningModule that clips and steps by itself."""

    by, clip = "norm", 0.01

    def __init__(self, by: str = "norm") -> None:
        super().__init__()
        self.automatic_optimization = False
        self.by = by

    def on_train_start(self) -> None:
        state = applied(self.trainer.strategy.network)
        if state.loss_scale != 1.0:
            state.loss_scale = 1024.0  # With the first scale, the first steps overflow.

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.clip_gradients(optimizer, self.clip, self.by)
        optimizer.step()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def clipped_by_hand(by: str) -> tuple[float, float]:
    """Return norm and largest element of the first update by manual optimization under float16."""
    torch.manual_seed(0)
    module = Manual(by)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    with launched():
        strategy = MeshplanStrategy(plan_of("ddp", precision="16-mixed"))
        trainer(strategy, 4, max_steps=1).fit(module, loaders(4)[0])
    after = [getattr(each, "full_tensor", lambda e=each: e)() for each in module.parameters()]
    update = torch.cat([(b - a.detach()).flatten() for b, a in zip(before, after, strict=True)])
    return float(update.norm()), float(update.abs().max())


class Failing(Lit):
    """A LightningModule that fails on one rank, in its second batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 1 and dist.get_rank() == 1:
            raise ValueError("a bad sample")
        return super().training_step(batch, batch_idx)


class Penalized(Lit):
    """A LightningModule whose loss reads a parameter, of which each rank has a shard."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.model.head.weight.pow(2).sum()


def refused(kind: str) -> str:
    """Return the error of a Trainer that a plan does not suit."""
    plans = {"loss": "pp_fsdp", "fails": "full_shard", "penalty": "full_shard", "clip": "ddp",
             "accumulate": "ddp", "same": "ddp", "two": "ddp", "two_scaled": "ddp",
             "manual_clip": "ddp", "manual_accumulate": "ddp"}  # fmt: skip
    extra = {"clip": {"clip_grad_norm": 0.1}, "accumulate": {"batch": {"accumulate": 3}},
             "two_scaled": {"precision": "16-mixed"}, "manual_clip": {"clip_grad_norm": 0.1},
             "manual_accumulate": {"batch": {"accumulate": 3}}}  # fmt: skip
    modules = {"fails": Failing, "penalty": Penalized, "manual_clip": Manual,
               "manual_accumulate": Manual}  # fmt: skip
    torch.manual_seed(0)
    module = modules.get(kind, Lit)()
    if kind.startswith("two"):
        module.configure_optimizers = lambda: [
            torch.optim.SGD(module.parameters(), lr=0.1) for _ in range(2)
        ]
        module.automatic_optimization = False
        module.on_train_batch_end = lambda *args: None
    with launched():
        strategy = MeshplanStrategy(plan_of(plans[kind], **extra.get(kind, {})))
        settings = {**SETTINGS, "use_distributed_sampler": kind != "same"}
        if kind.startswith(("two", "manual")):
            settings = {}
        made = trainer(strategy, 4, **settings)
        train, _ = loaders(4)
        try:
            made.fit(module, train)
            made.save_checkpoint("unused.ckpt")
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""
