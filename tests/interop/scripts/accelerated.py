"""A loop of accelerate: accumulated and clipped gradients, metrics, states saved and loaded."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    default_data_collator,
    get_linear_schedule_with_warmup,
)

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
batch_size = parser.parse_args().batch_size


def make(count, seed):
    tokens = torch.randint(48, (count, 12), generator=torch.Generator().manual_seed(seed))
    labels = tokens[:, 0] % 3
    return [{"input_ids": i, "labels": j} for i, j in zip(tokens, labels, strict=True)]


accelerator = Accelerator(
    gradient_accumulation_steps=2,
    dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=7),
)
set_seed(5)
config = BertConfig(
    vocab_size=48,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=32,
    max_position_embeddings=16,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    num_labels=3,
)
model = BertForSequenceClassification(config)
loaders = [
    DataLoader(make(count, seed), batch_size, seed == 1, collate_fn=default_data_collator)
    for count, seed in ((40, 1), (21, 2))
]
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
scheduler = get_linear_schedule_with_warmup(optimizer, len(loaders[0]), len(loaders[0]) * 3)
model, optimizer, train, val, scheduler = accelerator.prepare(model, optimizer, *loaders, scheduler)


def evaluate():
    model.eval()
    every = []
    for batch in val:
        with torch.no_grad():
            logits = model(**batch).logits
        every.append(accelerator.gather_for_metrics((logits, batch["labels"])))
    logits, labels = (torch.cat(each) for each in zip(*every, strict=True))
    loss = torch.nn.functional.cross_entropy(logits, labels)
    hits = (logits.argmax(-1) == labels).sum()
    return {"val_loss": loss.item(), "hits": hits.item(), "count": len(labels)}


results = []
for epoch in range(3):
    model.train()
    losses, norms = [], []
    for batch in train:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                norms.append(norm.item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    rate = scheduler.get_last_lr()[0]
    results.append({"losses": losses, "norms": norms, "rate": rate, **evaluate()})
    accelerator.save_state(f"out/epoch-{epoch}")
accelerator.load_state("out/epoch-0")
results.append({"rate": optimizer.param_groups[0]["lr"], **evaluate()})
print(results)
