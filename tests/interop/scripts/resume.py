"""GPT-2 with label smoothing and accumulated gradients stops after some steps, and goes on."""

import argparse

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
batch_size = parser.parse_args().batch_size


def make(count, seed):
    tokens = torch.randint(48, (count, 12), generator=torch.Generator().manual_seed(seed))
    labels = tokens.clone()
    for number, row in enumerate(labels):
        row[: number * 5 % 10] = -100  # The prompt is not learned.
    return [{"input_ids": i, "labels": j} for i, j in zip(tokens, labels, strict=True)]


def build(epochs):
    set_seed(0)
    config = GPT2Config(
        vocab_size=48,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    args = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=batch_size,
        gradient_accumulation_steps=2,
        label_smoothing_factor=0.1,
        num_train_epochs=epochs,
        learning_rate=0.2,
        optim="sgd",
        optim_args="momentum=0.9",
        lr_scheduler_type="constant",
        save_strategy="epoch",
        logging_steps=1,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    return Trainer(
        model=GPT2LMHeadModel(config),
        args=args,
        train_dataset=make(32, seed=1),
        eval_dataset=make(13, seed=2),
        data_collator=default_data_collator,
    )


build(epochs=1).train()
trainer = build(epochs=3)
trainer.train(resume_from_checkpoint=True)
trainer.evaluate()
results = trainer.state.log_history
print(results)
