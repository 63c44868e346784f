"""Manual optimization: two players in one network, each with its own step of one optimizer."""

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Players(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(x)


class LitPlayers(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = Players()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        (x,) = batch
        optimizer = self.optimizers()
        for sign in (1.0, -0.5):
            a, b = self.net(x)
            loss = (a - x).pow(2).mean() + sign * (a - b).pow(2).mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="norm")
            optimizer.step()
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def main(size: int, **settings: Any) -> dict[str, float]:
    L.seed_everything(1, verbose=False)
    data = torch.randn(32, 8, generator=torch.Generator().manual_seed(2))
    trainer = L.Trainer(max_epochs=2, **settings)
    trainer.fit(LitPlayers(), DataLoader(TensorDataset(data), batch_size=size))
    return {key: float(value) for key, value in trainer.callback_metrics.items()}
