import torch

import meshplan

torch.manual_seed(0)
layer = torch.nn.TransformerEncoderLayer(64, nhead=4, dropout=0.0, batch_first=True)
model = meshplan.parallelize(torch.nn.TransformerEncoder(layer, 4), "plans/hybrid_2x4.yaml")
optimizer = torch.optim.AdamW(model.parameters())
x = meshplan.local_batch(model, torch.randn(32, 128, 64))
for step in range(3):
    loss = meshplan.train_step(model, optimizer, x, x.flip(1), torch.nn.functional.mse_loss)
    print(f"step {step}: loss {loss:.3f}")
