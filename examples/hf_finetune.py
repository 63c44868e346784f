# A causal language model of transformers that learns to answer, from a checkpoint or from scratch:
# torchrun --nproc-per-node 2 examples/hf_finetune.py plan.yaml out [checkpoint]
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch.utils.data import Dataset

import meshplan

LENGTH, BATCH, IGNORED = 24, 16, -100


class Answers(Dataset):
    """Questions with their answers; only the tokens of the answer are learned."""

    def __len__(self) -> int:
        return 800

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        question = tokenizer(f"{index} + 1 =", add_special_tokens=False).input_ids
        answer = tokenizer(f" {index + 1}").input_ids
        padding = LENGTH + 1 - len(question) - len(answer)
        ids = torch.tensor(question + answer + [0] * padding)
        labels = torch.tensor([IGNORED] * len(question) + answer + [IGNORED] * padding)
        return ids[:-1], labels[1:]


def loss_fn(output, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = F.cross_entropy(output.logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
    return total, (targets != IGNORED).sum()


plan, out, *checkpoint = sys.argv[1:]
if checkpoint:
    config = transformers.AutoConfig.from_pretrained(*checkpoint)
    tokenizer = transformers.AutoTokenizer.from_pretrained(*checkpoint)
else:
    config = transformers.LlamaConfig(
        vocab_size=384, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4,
    )  # fmt: skip
    tokenizer = transformers.ByT5Tokenizer()
torch.manual_seed(0)
with torch.device("meta"):  # No rank ever has the whole model.
    model = transformers.AutoModelForCausalLM.from_config(config)
model = meshplan.parallelize(model, plan)
if checkpoint:
    meshplan.load_pretrained(model, *checkpoint)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loader = meshplan.dataloader(Answers(), model, batch_size=BATCH, shuffle=True)
for step, (inputs, targets) in enumerate(loader, 1):
    loss = meshplan.train_step(model, optimizer, inputs, targets, loss_fn)
    if step % 10 == 0:
        print(f"step {step}: loss {loss:.3f}", flush=True)
meshplan.save_pretrained(model, out)
if dist.get_rank() == 0:
    tokenizer.save_pretrained(out)
