"""LightningModules that gather, read parts of their network, or average weights.

Import it in a job only: it imports Lightning.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from meshplan.interop.lightning import MeshplanStrategy
from tests.helpers.lit import launched

PLANS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "hybrid": {"strategy": "hybrid_shard", "mesh": [2, 2]},
    "pp": {"mesh": {"pp": 2, "dp_shard": 2}, "pipeline": {"microbatches": 2}},
    "tp_fsdp": {"mesh": {"dp_shard": 2, "tp": 2}, "tp_plan": "auto"},
}
INPUT = {"shape": [2, 8], "dtype": "float32"}
SAMPLES = 16
PER_STEP = 8


class Regression(L.LightningModule):
    """Two layers, whose outputs in evaluation are gathered from all ranks."""

    def __init__(self) -> None:
        super().__init__()
        L.seed_everything(0, verbose=False)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.outputs: list[torch.Tensor] = []
        self.rows, self.total = 0, 0.0

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.model(batch[0]), batch[0].flip(1))
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_validation_epoch_start(self) -> None:
        self.outputs.clear()

    def validation_step(self, batch: Any, index: int) -> None:
        self.outputs.append(self.model(batch[0]))

    def on_validation_epoch_end(self) -> None:
        every = self.all_gather(torch.cat(self.outputs)).reshape(-1, 8)
        self.rows, self.total = len(every), float(every.double().sum())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=0.1)


class Two(L.LightningModule):
    """A network of two modules, which is the LightningModule itself, with an optimizer for each."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))

    def training_step(self, batch: Any, index: int) -> None:
        self.manual_backward(self(batch[0]).square().mean())

    def meshplan_loss(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        return output.square().mean()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(each.parameters(), lr=0.1) for each in self.children()]


class Whole(L.LightningModule):
    """A network of two modules, which is the LightningModule itself."""

    def __init__(self) -> None:
        super().__init__()
        L.seed_everything(0, verbose=False)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.losses: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh())

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return self.meshplan_loss(self(batch[0]), batch)

    def meshplan_loss(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(output, batch[0].flip(1))

    def meshplan_inputs(self, batch: Any) -> torch.Tensor:
        return batch[0]

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        self.losses.append(float(self.all_gather(outputs["loss"]).mean()))

    def validation_step(self, batch: Any, index: int) -> None:
        loss = nn.functional.mse_loss(self(batch[0]), batch[0].flip(1))
        self.log("loss", loss, on_epoch=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)


class Parts(Whole):
    """Its loss runs one of the modules, which the last stage may lack."""

    def meshplan_loss(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        return super().meshplan_loss(self.first(output), batch)


class Players(Whole):
    """Two modules with a loss and an optimizer each, as GANs in Lightning's documentation."""

    def __init__(self, optimizers: int = 2) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.number = optimizers

    def training_step(self, batch: Any, index: int) -> None:
        optimizers = self.optimizers()
        optimizers = optimizers if isinstance(optimizers, list) else [optimizers] * 2
        for optimizer, inputs in zip(optimizers, (batch[0], self.first(batch[0])), strict=True):
            loss = self.second(inputs).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        """Do nothing."""

    def configure_optimizers(self) -> Any:
        if self.number == 1:
            return torch.optim.SGD(self.parameters(), lr=0.1)
        return [torch.optim.SGD(each.parameters(), lr=0.1) for each in self.children()]


class Unfreezing(BaseFinetuning):
    """Trains the first layer from the second epoch on, as Lightning's documentation shows."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.model[0])

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.model[0], optimizer, lr=0.1)


def _trainer(name: str, epochs: int, callbacks: list[Any]) -> L.Trainer:
    plan = {"version": 1, "input": INPUT, **PLANS[name]} if name else {}
    return L.Trainer(
        accelerator="cpu", devices=4 if name else 1, max_epochs=epochs, logger=False,
        strategy=MeshplanStrategy(plan) if name else "auto", callbacks=callbacks,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        use_distributed_sampler=False,
    )  # fmt: skip


def _loader(name: str) -> DataLoader[Any]:
    """The samples of this data rank."""
    ranks = {"": 1, "tp_fsdp": 2, "pp": 2}.get(name, 4)
    rows = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1))
    own = rows.unflatten(0, (-1, ranks, PER_STEP // ranks))
    rank = torch.distributed.get_rank() if name else 0
    index = rank % ranks if name == "pp" else rank // (4 // ranks)
    return DataLoader(TensorDataset(own[:, index].flatten(0, 1)), batch_size=PER_STEP // ranks)


def _fit(name: str, callbacks: list[Any]) -> dict[str, float]:
    trainer, module, loader = _trainer(name, 2, callbacks), Regression(), _loader(name)
    trainer.fit(module, loader, loader)
    loss = float(trainer.callback_metrics["loss"])
    return {"loss": loss, "rows": module.rows, "total": module.total}


def _whole(name: str) -> dict[str, Any]:
    module, loader = Whole(), _loader(name)
    found = []
    for epochs in (1, 2):
        trainer = _trainer(name, epochs, [])
        trainer.fit(module, loader, loader)
        found.append(trainer.validate(module, loader, verbose=False)[0]["loss"])
        other = DataLoader(loader.dataset, batch_size=epochs * 2)
        found.append(trainer.validate(module, other, verbose=False)[0]["loss"])
        trainer.fit_loop.max_epochs = epochs + 1
        trainer.fit(module, loader)
    return {"losses": module.losses, "found": found}


def whole_alone() -> dict[str, Any]:
    """Fit, validate and fit again by two Trainers, in one process."""
    return _whole("")


def whole(name: str) -> dict[str, Any]:
    """Do the same under a plan."""
    with launched():
        return _whole(name)


def error_of(name: str, kind: str, *args: Any) -> str:
    """Return the error of training a LightningModule that a plan does not suit; "" if none."""
    with launched():
        try:
            module = {"parts": Parts, "players": Players}[kind](*args)
            _trainer(name, 1, []).fit(module, _loader(name))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


def alone(unfreezes: bool) -> dict[str, float]:
    """Train in one process, with Lightning alone."""
    return _fit("", [Unfreezing()] if unfreezes else [])


def planned(name: str, unfreezes: bool) -> dict[str, float]:
    """Train under a plan, on the ranks of a pool."""
    with launched():
        return _fit(name, [Unfreezing()] if unfreezes else [])


def averaging(name: str, kind: str, more: dict[str, Any]) -> str | None:
    """Return the error of a callback that averages weights; "" without one.

    None: this version of Lightning has no such callback.
    """
    if not hasattr(callbacks, kind):
        return None
    with launched():
        try:
            _fit(name, [getattr(callbacks, kind)(**more)])
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


def two_under_pp() -> str:
    """Return the error of manual optimization of two modules under a pipeline; "" if none."""
    plan = {"version": 1, "input": INPUT, "mesh": {"pp": 2, "dp_shard": 2}}
    with launched():
        trainer = L.Trainer(
            accelerator="cpu", devices=4, max_epochs=1, logger=False,
            strategy=MeshplanStrategy(plan), enable_progress_bar=False, enable_checkpointing=False,
        )  # fmt: skip
        try:
            trainer.fit(Two(), DataLoader(TensorDataset(torch.randn(8, 8)), batch_size=2))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""
