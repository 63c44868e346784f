import tempfile

import torch

import meshplan


def build() -> torch.nn.Module:
    layer = torch.nn.TransformerEncoderLayer(64, nhead=4, dropout=0.0, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 4)


torch.manual_seed(0)
model = meshplan.parallelize(build(), "plans/hybrid_2x4.yaml")
optimizer = torch.optim.AdamW(model.parameters())
x = meshplan.local_batch(model, torch.randn(32, 128, 64))
for _ in range(3):
    meshplan.train_step(model, optimizer, x, x.flip(1), torch.nn.functional.mse_loss)

state = meshplan.full_state_dict(model)  # every rank calls it; rank 0 gets the tensors
loaded = build()
if state:
    with tempfile.TemporaryFile() as file:
        torch.save(state, file)
        file.seek(0)
        loaded.load_state_dict(torch.load(file))
loaded = meshplan.parallelize(loaded, "plans/hybrid_2x4.yaml")  # shards what rank 0 loaded
for name, module in (("trained", model), ("loaded", loaded)):
    error = torch.nn.functional.mse_loss(module(x), x.flip(1), reduction="sum")
    print(f"{name}: loss {meshplan.global_mean(error, x.numel(), module):.6f}")
