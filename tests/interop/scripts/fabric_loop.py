"""A loop of Fabric that accumulates and clips gradients, evaluates, saves and loads."""

import argparse

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--devices", type=int, default=1)
options = parser.parse_args()


def loader(count, seed):
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(x, x.abs().argmax(1)), options.batch_size)


fabric = L.Fabric(accelerator="cpu", devices=options.devices)
fabric.launch()
fabric.seed_everything(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))
model = fabric.setup(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
optimizer = fabric.setup_optimizers(optimizer)
train, val = fabric.setup_dataloaders(loader(48, seed=1), loader(16, seed=2))


def evaluate():
    model.eval()
    losses, hits = [], []
    with torch.no_grad():
        for x, y in val:
            logits = model(x)
            losses.append(fabric.all_reduce(nn.functional.cross_entropy(logits, y)))
            hits.append(fabric.all_gather((logits.argmax(-1) == y).float()).mean())
    model.train()
    return {"val_loss": float(sum(losses) / len(losses)), "hits": float(sum(hits) / len(hits))}


results = []
for epoch in range(2):
    total = 0.0
    for number, (x, y) in enumerate(train):
        accumulates = number % 2 == 0
        with fabric.no_backward_sync(model, enabled=accumulates):
            loss = nn.functional.cross_entropy(model(x), y)
            fabric.backward(loss / 2)
        total += fabric.all_reduce(loss.detach())
        if not accumulates:
            fabric.clip_gradients(model, optimizer, max_norm=0.1)
            optimizer.step()
            optimizer.zero_grad()
    results.append({"loss": float(total) / len(train), **evaluate()})
    fabric.save(f"out/epoch-{epoch}.ckpt", {"model": model, "optimizer": optimizer})
fabric.load("out/epoch-0.ckpt", {"model": model, "optimizer": optimizer})
results.append(evaluate())
print(results)
