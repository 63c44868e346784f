"""Lightning accumulates and clips gradients, with a scheduler for each step."""

import argparse

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--devices", type=int, default=1)
options = parser.parse_args()


class Regressor(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1)
        )
        self.rates = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", nn.functional.l1_loss(self.net(x), y), sync_dist=True)

    def on_before_zero_grad(self, optimizer):
        self.rates.append(optimizer.param_groups[0]["lr"])

    def configure_optimizers(self):
        decayed = [each for each in self.parameters() if each.ndim > 1]
        others = [each for each in self.parameters() if each.ndim <= 1]
        optimizer = torch.optim.SGD(
            [{"params": decayed, "weight_decay": 0.01}, {"params": others}], lr=0.05, momentum=0.9
        )
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.1, total_steps=self.trainer.estimated_stepping_batches
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def loader(count, seed):
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(x, x.sin().sum(1, keepdim=True)), options.batch_size)


L.seed_everything(0)
model = Regressor()
trainer = L.Trainer(
    accelerator="cpu",
    devices=options.devices,
    strategy="ddp",
    max_epochs=3,
    accumulate_grad_batches=2,
    gradient_clip_val=0.5,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(model, loader(48, seed=1), loader(16, seed=2))
metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
results = [metrics, model.rates, {"steps": trainer.global_step}]
print(results)
