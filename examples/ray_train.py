# Eight workers of Ray Train under one plan: python examples/ray_train.py plan.yaml states
# Start it again, also with another plan: it goes on from the newest state.
import os
import sys

import ray.train.torch
import torch

import meshplan

VOCAB, EPOCHS, BATCH, WORKERS = 64, 2, 16, 8


class Decoder(torch.nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCAB, width)
        layer = torch.nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, 2)
        self.head = torch.nn.Linear(width, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = torch.nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.layers(self.embed(tokens), mask=mask, is_causal=True))


def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(files: dict[str, str]) -> None:  # Runs in each worker, in Ray's process group.
    meshplan.seed_everything(0)
    model = meshplan.parallelize(Decoder(), files["plan"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = [(row[:-1], row[1:]) for row in torch.arange(96)[:, None] * torch.arange(17) % VOCAB]
    loader = meshplan.dataloader(data, model, batch_size=BATCH, shuffle=True)
    try:
        step = meshplan.load(files["states"], model, optimizer, data=loader).step
    except FileNotFoundError:
        step = 0
    for _ in range(loader.epoch, EPOCHS):
        for batch in loader:
            loss, step = meshplan.train_step(model, optimizer, *batch, loss_fn), step + 1
            if meshplan.is_main():
                print(f"step {step}: loss {loss:.6f}", flush=True)
            if step % 4 == 0:
                meshplan.save(files["states"], model, optimizer, step=step, data=loader)
                ray.train.report({"step": step, "loss": loss})  # Waits for Ray, some 2 seconds.


if __name__ == "__main__":
    plan, states = map(os.path.abspath, sys.argv[1:])  # A worker has a directory of its own.
    if "RAY_ADDRESS" not in os.environ:  # No cluster is there: this machine has to do.
        ray.init("local", num_cpus=WORKERS, include_dashboard=False)
    has_gpus = ray.cluster_resources().get("GPU", 0) >= WORKERS
    ray.train.torch.TorchTrainer(
        train, train_loop_config={"plan": plan, "states": states},
        scaling_config=ray.train.ScalingConfig(num_workers=WORKERS, use_gpu=has_gpus),
        run_config=ray.train.RunConfig(storage_path=f"{states}/ray"),
    ).fit()  # fmt: skip
