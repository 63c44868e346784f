"""Lightning trains a classifier of a data module, keeps the best checkpoint and tests it."""

import argparse

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--devices", type=int, default=1)
options = parser.parse_args()


class Blobs(L.LightningDataModule):
    def __init__(self, batch_size):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage):
        generator = torch.Generator().manual_seed(3)
        classes = torch.arange(64) % 3
        points = torch.randn(64, 8, generator=generator) + 2 * torch.eye(3, 8)[classes]
        self.train = TensorDataset(points[:32], classes[:32])
        self.val = TensorDataset(points[32:48], classes[32:48])
        self.held_out = TensorDataset(points[48:], classes[48:])

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=self.batch_size)

    def test_dataloader(self):
        return DataLoader(self.held_out, batch_size=self.batch_size)


class Classifier(L.LightningModule):
    def __init__(self, width=32, lr=0.2):
        super().__init__()
        self.save_hyperparameters()
        self.model = nn.Sequential(
            nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3)
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = cross_entropy(self.model(x), y)
        self.log("train_loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.evaluate(batch, "val")

    def test_step(self, batch, batch_idx):
        self.evaluate(batch, "test")

    def evaluate(self, batch, stage):
        x, y = batch
        logits = self.model(x)
        hits = (logits.argmax(-1) == y).float().mean()
        self.log(f"{stage}_loss", cross_entropy(logits, y), sync_dist=True)
        self.log(f"{stage}_acc", hits, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


L.seed_everything(0)
keeper = ModelCheckpoint("out", monitor="val_loss", save_top_k=1)
stop = EarlyStopping(monitor="val_loss", patience=2)
model, data = Classifier(), Blobs(options.batch_size)
trainer = L.Trainer(
    accelerator="cpu",
    devices=options.devices,
    strategy="ddp",
    max_epochs=4,
    callbacks=[keeper, stop],
    logger=False,
    enable_progress_bar=False,
)
trainer.fit(model, datamodule=data)
fitted = {key: float(value) for key, value in trainer.callback_metrics.items()}
(tested,) = trainer.test(model, datamodule=data, ckpt_path="best", verbose=False)
results = [fitted, tested, {"best_loss": float(keeper.best_model_score)}]
print(results)
