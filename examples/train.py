# meshplan launch -f plan.yaml examples/train.py plan.yaml run
# Start it again after a crash, also with another plan: it goes on from the newest state.
import sys

import torch
import torch.nn.functional as F
from torch.utils.data import default_collate

import meshplan

VOCAB, LENGTH, EPOCHS, BATCH = 256, 64, 2, 32


def sums(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a sequence in which each token is the sum of the two before it, and what follows."""
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
data = [sums(index) for index in range(512 + BATCH)]
loader = meshplan.dataloader(data[:512], model, batch_size=BATCH, shuffle=True)
try:
    step = meshplan.load(folder, model, optimizer, data=loader).step
except FileNotFoundError:
    step = 0
with meshplan.Run(folder, model, step=step) as run:
    for epoch in range(loader.epoch, EPOCHS):
        for batch in loader:
            loss, step = meshplan.train_step(model, optimizer, *batch, loss_fn), step + 1
            if step % 10 == 0 and meshplan.is_main():
                print(f"epoch {epoch}, step {step}: loss {loss:.3f}", flush=True)
            if (is_last := meshplan.stop_requested()) or step % 20 == 0:
                meshplan.save(folder, model, optimizer, step=step, data=loader, keep=2)
            if is_last:
                sys.exit("stopped, and saved")
        own = meshplan.local_batch(model, default_collate(data[512:]))
        run.log(test_loss=meshplan.eval_step(model, *own, loss_fn))
