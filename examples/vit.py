# A vision transformer on made images: torchrun --nproc-per-node 2 examples/vit.py plan.yaml
import math
import sys

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset

import meshplan

SIZE, PATCH, WIDTH, CLASSES, BATCH, EPOCHS = 16, 4, 64, 4, 32, 4


class Stripes(Dataset):
    """Images of stripes in one of four directions, at a random place and in noise."""

    def __init__(self, first: int, length: int) -> None:
        self.first, self.length = first, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        draw = torch.Generator().manual_seed(self.first + index)
        label = index % CLASSES
        angle, phase = math.pi * label / CLASSES, 6.3 * torch.rand((), generator=draw)
        y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
        image = torch.sin(x * math.cos(angle) + y * math.sin(angle) + phase)
        return image[None] + 0.5 * torch.randn(1, SIZE, SIZE, generator=draw), label


class ViT(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = torch.nn.Conv2d(1, WIDTH, PATCH, stride=PATCH)
        self.places = torch.nn.Parameter(torch.zeros((SIZE // PATCH) ** 2, WIDTH))
        layer = torch.nn.TransformerEncoderLayer(WIDTH, 4, 128, dropout=0.0, batch_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, 2)
        self.head = torch.nn.Linear(WIDTH, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places
        return self.head(self.layers(x).mean(dim=1))


torch.manual_seed(0)
model = meshplan.parallelize(ViT(), sys.argv[1])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
train = meshplan.dataloader(Stripes(0, 256), model, batch_size=BATCH, shuffle=True)
test = meshplan.dataloader(Stripes(10_000, 64), model, batch_size=BATCH)
for epoch in range(EPOCHS):
    for images, labels in train:
        loss = meshplan.train_step(model, optimizer, images, labels, F.cross_entropy)
    hits, count = 0, 0
    for images, labels in test:
        with torch.no_grad():
            hits += meshplan.reduce((model(images).argmax(-1) == labels).sum(), "sum")
        count += BATCH
    print(f"epoch {epoch}: loss {loss:.3f}, accuracy {hits / count:.2f}", flush=True)
