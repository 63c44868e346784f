# meshplan launch -f plan.yaml examples/train.py plan.yaml run
# Start it again after a crash, also with another plan: it goes on from the newest state.
import sys

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset, Subset

import meshplan

VOCAB, LENGTH, EPOCHS, BATCH = 256, 64, 2, 32


class Sums(Dataset):
    """Sequences in which each token is the sum of the two before it."""

    def __len__(self) -> int:
        return 512 + BATCH

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


plan, folder = sys.argv[1:]
meshplan.seed_everything(0)
model = meshplan.parallelize(Decoder(), plan)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
train, test = Subset(Sums(), range(512)), Subset(Sums(), range(512, 512 + BATCH))
loader = meshplan.dataloader(train, model, batch_size=BATCH, shuffle=True)
step, is_stopped = meshplan.load_if_any(folder, model, optimizer, data=loader), False
