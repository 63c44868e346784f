"""An autoencoder whose layers are the LightningModule's own, as first examples of Lightning are."""

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class LitAutoEncoder(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        self.decoder = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        x_hat = self.decoder(self.encoder(x))
        loss = nn.functional.mse_loss(x_hat, x)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main(size: int, **settings: Any) -> dict[str, float]:
    L.seed_everything(1, verbose=False)
    data = torch.randn(32, 16, generator=torch.Generator().manual_seed(2))
    trainer = L.Trainer(max_epochs=3, **settings)
    trainer.fit(LitAutoEncoder(), DataLoader(TensorDataset(data), batch_size=size))
    return {key: float(value) for key, value in trainer.callback_metrics.items()}
