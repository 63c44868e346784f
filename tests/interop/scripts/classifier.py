"""A classifier with a data module, metrics of torchmetrics and an early stop."""

from typing import Any

import lightning as L
import torch
import torchmetrics
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Blobs(L.LightningDataModule):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def setup(self, stage: str) -> None:
        generator = torch.Generator().manual_seed(3)
        classes = torch.arange(48) % 3
        points = torch.randn(48, 8, generator=generator) + 2 * torch.eye(3, 8)[classes]
        self.data = TensorDataset(points, classes)

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=self.size)

    def val_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=self.size)


class LitClassifier(L.LightningModule):
    def __init__(self, width: int = 32, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 3))
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)
        self.seen = torchmetrics.SumMetric()

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.accuracy(logits, y)
        self.seen(float(len(y)))
        self.log("val_loss", nn.functional.cross_entropy(logits, y), sync_dist=True)
        self.log("val_acc", self.accuracy)
        self.log("seen", self.seen)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)]


def main(size: int, **settings: Any) -> dict[str, float]:
    L.seed_everything(1, verbose=False)
    stop = EarlyStopping(monitor="val_loss", min_delta=0.05, patience=1)
    trainer = L.Trainer(max_epochs=6, callbacks=[stop], gradient_clip_val=0.5, **settings)
    trainer.fit(LitClassifier(), datamodule=Blobs(size))
    metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
    return {**metrics, "epochs": float(trainer.current_epoch)}
