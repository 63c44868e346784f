import torch

import meshplan

torch.manual_seed(0)
layer = torch.nn.TransformerEncoderLayer(64, nhead=4, dropout=0.0, batch_first=True)
model = meshplan.parallelize(torch.nn.TransformerEncoder(layer, 4), "plans/hybrid_2x4.yaml")
optimizer = torch.optim.AdamW(model.parameters())
x = meshplan.local_batch(model, torch.randn(32, 128, 64))
for step in range(3):
    error = torch.nn.functional.mse_loss(model(x), x.flip(1), reduction="sum")
    loss = meshplan.global_mean(error, x.numel())
    loss.backward()
    meshplan.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss:.3f}")
