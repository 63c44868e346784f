"""A vision transformer learns the class of an image, from a collate function of its own."""

import argparse

import numpy as np
import torch
from transformers import (
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    set_seed,
)

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
batch_size = parser.parse_args().batch_size


class Stripes(torch.utils.data.Dataset):
    """Noise with a bright row, whose place is the class."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.images = torch.randn(count, 3, 16, 16, generator=generator)
        for number, image in enumerate(self.images):
            image[:, 4 * (number % 4)] += 2.0

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return {"image": self.images[index], "label": index % 4}


def collate(rows):
    return {
        "pixel_values": torch.stack([row["image"] for row in rows]),
        "labels": torch.tensor([row["label"] for row in rows]),
    }


def compute_metrics(prediction):
    return {"accuracy": float(np.mean(prediction.predictions.argmax(-1) == prediction.label_ids))}


set_seed(0)
config = ViTConfig(
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=32,
    image_size=16,
    patch_size=4,
    num_labels=4,
)
args = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=batch_size,
    per_device_eval_batch_size=batch_size,
    num_train_epochs=2,
    learning_rate=3e-3,
    adam_beta2=0.99,
    max_grad_norm=0.7,
    eval_strategy="steps",
    eval_steps=4,
    save_strategy="no",
    remove_unused_columns=False,
    logging_steps=2,
    use_cpu=True,
    report_to="none",
    disable_tqdm=True,
)
trainer = Trainer(
    model=ViTForImageClassification(config),
    args=args,
    train_dataset=Stripes(32, seed=1),
    eval_dataset=Stripes(15, seed=2),
    data_collator=collate,
    compute_metrics=compute_metrics,
)
trainer.train()
results = [*trainer.state.log_history, trainer.evaluate()]
print(results)
