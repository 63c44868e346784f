"""T5 learns to reverse a sequence with the Seq2SeqTrainer, and generates while it is evaluated."""

import argparse

import numpy as np
import torch
from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    set_seed,
)

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
batch_size = parser.parse_args().batch_size


def make(count, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(count):
        tokens = torch.randint(2, 30, (3 + number % 5,), generator=generator)
        rows.append((tokens, torch.cat((tokens.flip(0), torch.tensor([1])))))
    return rows


def collate(rows):
    sources, targets = zip(*rows, strict=True)
    pad = torch.nn.utils.rnn.pad_sequence
    inputs = pad(sources, batch_first=True)
    return {
        "input_ids": inputs,
        "attention_mask": (inputs != 0).long(),
        "labels": pad(targets, batch_first=True, padding_value=-100),
    }


def compute_metrics(prediction):
    guesses, labels = prediction.predictions, prediction.label_ids
    lengths = (guesses > 1).sum(-1)
    firsts = guesses[:, 1] == labels[:, 0]
    return {"length": float(np.mean(lengths)), "firsts": float(firsts.mean()), "seen": len(labels)}


set_seed(0)
config = T5Config(
    vocab_size=32,
    d_model=16,
    d_kv=4,
    d_ff=32,
    num_layers=2,
    num_heads=4,
    dropout_rate=0.0,
    decoder_start_token_id=0,
)
args = Seq2SeqTrainingArguments(
    output_dir="out",
    per_device_train_batch_size=batch_size,
    per_device_eval_batch_size=batch_size,
    num_train_epochs=2,
    learning_rate=0.05,
    optim="sgd",
    eval_strategy="epoch",
    save_strategy="no",
    predict_with_generate=True,
    generation_max_length=9,
    logging_steps=1,
    use_cpu=True,
    report_to="none",
    disable_tqdm=True,
)
trainer = Seq2SeqTrainer(
    model=T5ForConditionalGeneration(config),
    args=args,
    train_dataset=make(24, seed=1),
    eval_dataset=make(16, seed=2),
    data_collator=collate,
    compute_metrics=compute_metrics,
)
trainer.train()
test = trainer.predict(make(13, seed=3))
found = np.where(test.predictions == -100, config.pad_token_id, test.predictions)
results = [*trainer.state.log_history, found.tolist()]
print(results)
