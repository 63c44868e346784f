"""A loop of one's own under torchrun: DistributedSampler, DistributedDataParallel, clipping."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
batch_size = parser.parse_args().batch_size

dist.init_process_group("gloo")
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
model = DistributedDataParallel(net)
x = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
data = TensorDataset(x, x[:, :4].argmax(1))
sampler = DistributedSampler(data, shuffle=True, seed=5)
loader = DataLoader(data, batch_size, sampler=sampler)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
results = []
for epoch in range(3):
    sampler.set_epoch(epoch)
    total = torch.zeros(())
    for inputs, targets in loader:
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach()
    dist.all_reduce(total)
    results.append({"loss": total.item() / dist.get_world_size() / len(loader)})
if dist.get_rank() == 0:
    print(results)
dist.destroy_process_group()
