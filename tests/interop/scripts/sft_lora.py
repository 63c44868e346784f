"""TRL's SFTTrainer trains adapters of rank 4 in a frozen Llama."""

import argparse

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
batch_size = parser.parse_args().batch_size

words = [f"w{number}" for number in range(60)]
vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *words])}
base = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
base.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=base, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
)


def make(count, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(count):
        drawn = [words[each] for each in torch.randint(60, (12,), generator=generator)]
        cut = 2 + number * 5 % 7
        rows.append({"prompt": " ".join(drawn[:cut]) + " ", "completion": " ".join(drawn[cut:])})
    return Dataset.from_list(rows)


set_seed(0)
config = LlamaConfig(
    vocab_size=len(vocabulary),
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
)
args = SFTConfig(
    output_dir="out",
    per_device_train_batch_size=batch_size,
    per_device_eval_batch_size=batch_size,
    gradient_accumulation_steps=2,
    num_train_epochs=2,
    learning_rate=0.3,
    optim="sgd",
    max_length=16,
    gradient_checkpointing=False,
    bf16=False,
    eval_strategy="epoch",
    save_strategy="epoch",
    logging_steps=1,
    use_cpu=True,
    report_to="none",
    disable_tqdm=True,
)
trainer = SFTTrainer(
    model=LlamaForCausalLM(config),
    args=args,
    train_dataset=make(32, seed=1),
    eval_dataset=make(13, seed=2),
    processing_class=tokenizer,
    peft_config=LoraConfig(r=4, lora_alpha=16, target_modules="all-linear"),
)
trainer.train()
results = trainer.state.log_history
print(results)
