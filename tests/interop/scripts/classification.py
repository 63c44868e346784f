"""BERT learns the class of a sentence; accuracy is computed, and the best checkpoint is kept."""

import argparse

import numpy as np
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
batch_size = parser.parse_args().batch_size


def make(count, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(count):
        label = number % 3
        tokens = torch.randint(4, 40, (5 + number % 6,), generator=generator)
        tokens[1::2] = 40 + label
        rows.append({"input_ids": tokens, "labels": label})
    return rows


def collate(rows):
    pad = torch.nn.utils.rnn.pad_sequence
    ids = [row["input_ids"] for row in rows]
    return {
        "input_ids": pad(ids, batch_first=True),
        "attention_mask": pad([torch.ones_like(each) for each in ids], batch_first=True),
        "labels": torch.tensor([row["labels"] for row in rows]),
    }


def compute_metrics(prediction):
    guesses = np.argmax(prediction.predictions, axis=-1)
    hits = guesses == prediction.label_ids
    return {"accuracy": float(hits.mean()), "seen": len(hits)}


set_seed(0)
config = BertConfig(
    vocab_size=44,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=16,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    num_labels=3,
)
args = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=batch_size,
    per_device_eval_batch_size=batch_size,
    num_train_epochs=3,
    learning_rate=0.1,
    optim="sgd",
    eval_strategy="epoch",
    save_strategy="epoch",
    load_best_model_at_end=True,
    metric_for_best_model="eval_loss",
    logging_steps=1,
    use_cpu=True,
    report_to="none",
    disable_tqdm=True,
)
trainer = Trainer(
    model=BertForSequenceClassification(config),
    args=args,
    train_dataset=make(24, seed=1),
    eval_dataset=make(19, seed=2),
    data_collator=collate,
    compute_metrics=compute_metrics,
)
trainer.train()
test = trainer.predict(make(21, seed=3))
results = [*trainer.state.log_history, test.metrics, test.predictions.tolist()]
print(results)
