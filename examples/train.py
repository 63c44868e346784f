# torchrun --nproc-per-node 2 examples/train.py plan.yaml states
# Start it again after a crash, also with another plan: it goes on from the newest state.
import sys

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset

import meshplan

VOCAB, LENGTH, EPOCHS = 256, 64, 2


class Sums(Dataset):
    """Sequences in which each token is the sum of the two before it."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = [index % VOCAB, index * index % VOCAB]
        while len(tokens) <= LENGTH:
            tokens.append((tokens[-1] + tokens[-2]) % VOCAB)
        return torch.tensor(tokens[:-1]), torch.tensor(tokens[1:])


class Decoder(torch.nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCAB, width)
        layer = torch.nn.TransformerEncoderLayer(width, 4, dropout=0.0, batch_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, 2)
        self.head = torch.nn.Linear(width, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = torch.nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.layers(self.embed(tokens), mask=mask, is_causal=True))


def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


plan, states = sys.argv[1:]
torch.manual_seed(0)
model = meshplan.parallelize(Decoder(), plan)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = meshplan.dataloader(Sums(), model, batch_size=32, shuffle=True)
try:
    step = meshplan.load(states, model, optimizer, data=loader).step
except FileNotFoundError:
    step = 0
for epoch in range(loader.epoch, EPOCHS):
    for inputs, targets in loader:
        loss, step = meshplan.train_step(model, optimizer, inputs, targets, loss_fn), step + 1
        if step % 10 == 0 and torch.distributed.get_rank() == 0:
            print(f"epoch {epoch}, step {step}: loss {loss:.3f}", flush=True)
        if step % 20 == 0:
            meshplan.save(states, model, optimizer, step=step, data=loader, keep=2)
