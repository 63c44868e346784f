"""Trains the GPT for three steps on random tokens."""

import torch
import torch.distributed as dist
from gpt import build
from torch.nn.functional import cross_entropy

import meshplan

torch.manual_seed(0)
model = meshplan.parallelize(build(), "plan.yaml")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def loss_fn(logits, targets):
    return cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


for step in range(3):
    ids = torch.randint(512, (16, 65), generator=torch.Generator().manual_seed(step))
    inputs, targets = meshplan.local_batch(model, (ids[:, :-1], ids[:, 1:]))
    loss = meshplan.train_step(model, optimizer, inputs, targets, loss_fn)
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss:.4f}")
dist.destroy_process_group()
