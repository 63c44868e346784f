import os

import torch

import meshplan

rank = int(os.environ["RANK"])
torch.manual_seed(rank)
model = meshplan.parallelize(torch.nn.Linear(64, 64), {"version": 1, "strategy": "full_shard"})
optimizer = torch.optim.AdamW(model.parameters())
batches = [torch.randn(4, 64) for _ in range(3 - rank)]
try:
    for x in batches:
        meshplan.train_step(model, optimizer, x, x, torch.nn.functional.mse_loss)
except meshplan.ApplyError as error:
    print(error)
