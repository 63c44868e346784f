import tempfile

import torch
import torch.distributed as dist

import meshplan


def build() -> torch.nn.Module:
    layer = torch.nn.TransformerEncoderLayer(64, nhead=4, dropout=0.0, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 4)


def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, count: int) -> float:
    for _ in range(count):
        inputs = meshplan.local_batch(model, batch)
        loss = meshplan.train_step(model, optimizer, inputs, inputs.flip(1), loss_fn)
    return loss


torch.manual_seed(0)
batch, loss_fn = torch.randn(32, 128, 64), torch.nn.functional.mse_loss
model = meshplan.parallelize(build(), "plans/hybrid_2x4.yaml")
optimizer = torch.optim.AdamW(model.parameters())
steps(model, optimizer, 3)
folder = [tempfile.mkdtemp()]  # stands for one that all ranks share
dist.broadcast_object_list(folder)
meshplan.save(folder[0], model, optimizer, step=3)
print(f"went on: loss {steps(model, optimizer, 3):.3f}")

model = meshplan.parallelize(build(), "plans/ddp.yaml")  # another plan
optimizer = torch.optim.AdamW(model.parameters())
state = meshplan.load(folder[0], model, optimizer)
print(f"loaded step {state.step}: loss {steps(model, optimizer, 3):.3f}")
