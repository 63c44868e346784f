# A GPT on letters, after nanoGPT: torchrun --nproc-per-node 2 examples/nanogpt.py plan.yaml states
import inspect
import sys
from itertools import islice

import torch
import torch.nn.functional as F

import meshplan

LENGTH, WIDTH, HEADS, LAYERS, BATCH, STEPS = 64, 64, 4, 2, 16, 60


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.qkv, self.proj = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.ln_1(x)).unflatten(-1, (3, -1, WIDTH // HEADS))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class GPT(torch.nn.Module):
    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.wte, self.wpe = torch.nn.Embedding(vocab, WIDTH), torch.nn.Embedding(LENGTH, WIDTH)
        self.h = torch.nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.ln_f, self.head = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(LENGTH, device=tokens.device))
        return self.head(self.ln_f(self.h(x))).mT.contiguous()  # [batch, vocab, length]


plan, states = sys.argv[1:]
text = inspect.getsource(F)  # Any text will do.
code = {letter: number for number, letter in enumerate(sorted(set(text)))}
samples = torch.tensor([code[each] for each in text]).unfold(0, LENGTH + 1, LENGTH)
held_out, train = samples[:BATCH], [(each[:-1], each[1:]) for each in samples[BATCH:]]
torch.manual_seed(0)
model = meshplan.parallelize(GPT(len(code)), plan)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loader = meshplan.dataloader(train, model, batch_size=BATCH, shuffle=True)
x, y = meshplan.local_batch(model, (held_out[:, :-1], held_out[:, 1:]))
try:
    first = meshplan.load(states, model, optimizer, data=loader).step
except FileNotFoundError:
    first = 0
for step, (inputs, targets) in enumerate(islice(loader, STEPS - first), first + 1):
    loss = meshplan.train_step(model, optimizer, inputs, targets, F.cross_entropy)
    if step % 20 == 0:
        unseen = meshplan.eval_step(model, x, y, F.cross_entropy)
        print(f"step {step}: loss {loss:.3f}, of unseen text {unseen:.3f}", flush=True)
        meshplan.save(states, model, optimizer, step=step, data=loader, keep=2)
