"""A small Llama learns short sentences of several lengths, and is evaluated after each epoch."""

import argparse

from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import Dataset
from transformers import (
    DataCollatorForLanguageModeling,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

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


class Sentences(Dataset):
    def __init__(self, first, last):
        self.numbers = range(first, last)

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, index):
        number = self.numbers[index]
        length = 4 + number * 7 % 11
        return tokenizer(" ".join(words[(number + place * 3) % 60] for place in range(length)))


set_seed(0)
config = LlamaConfig(
    vocab_size=len(vocabulary),
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
    pad_token_id=tokenizer.pad_token_id,
)
model = LlamaForCausalLM(config)
args = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=batch_size,
    per_device_eval_batch_size=batch_size,
    num_train_epochs=2,
    learning_rate=0.3,
    optim="sgd",
    weight_decay=0.01,
    lr_scheduler_type="cosine",
    warmup_steps=2,
    eval_strategy="epoch",
    save_strategy="no",
    logging_steps=1,
    include_num_input_tokens_seen="non_padding",
    use_cpu=True,
    report_to="none",
    disable_tqdm=True,
)
trainer = Trainer(
    model=model,
    args=args,
    train_dataset=Sentences(0, 32),
    eval_dataset=Sentences(32, 45),
    processing_class=tokenizer,
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
)
trainer.train()
results = trainer.state.log_history
print(results)
