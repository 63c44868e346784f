"""LightningModules that gather, read parts of their network, or average weights.

Import it in a job only: it imports Lightning.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import BaseFinetuning, EMAWeightAveraging
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from meshplan.interop.lightning import MeshplanStrategy
from tests.helpers.lit import launched

PLANS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
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


class Unfreezing(BaseFinetuning):
    """Trains the first layer from the second epoch on, as Lightning's documentation shows."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.model[0])

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.model[0], optimizer, lr=0.1)


def _fit(name: str, callbacks: list[Any]) -> dict[str, float]:
    ranks = {"": 1, "tp_fsdp": 2}.get(name, 4)
    plan = {"version": 1, "input": INPUT, **PLANS[name]} if name else {}
    trainer = L.Trainer(
        accelerator="cpu", devices=4 if name else 1, max_epochs=2, logger=False,
        strategy=MeshplanStrategy(plan) if name else "auto", callbacks=callbacks,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    module = Regression()
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(SAMPLES, 8, generator=generator)
    own = rows.unflatten(0, (-1, ranks, PER_STEP // ranks))
    index = torch.distributed.get_rank() // (4 // ranks) if name else 0
    loader = DataLoader(TensorDataset(own[:, index].flatten(0, 1)), batch_size=PER_STEP // ranks)
    trainer.fit(module, loader, loader)
    loss = float(trainer.callback_metrics["loss"])
    return {"loss": loss, "rows": module.rows, "total": module.total}


def alone(unfreezes: bool) -> dict[str, float]:
    """Train in one process, with Lightning alone."""
    return _fit("", [Unfreezing()] if unfreezes else [])


def planned(name: str, unfreezes: bool) -> dict[str, float]:
    """Train under a plan, on the ranks of a pool."""
    with launched():
        return _fit(name, [Unfreezing()] if unfreezes else [])


def averaging(name: str) -> str:
    """Return the error of a callback that averages weights; "" without one."""
    with launched():
        try:
            _fit(name, [EMAWeightAveraging(decay=0.8)])
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
