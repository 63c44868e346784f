"""Small attention models that make their positions and attend in the ways that real ones do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB, DIM, HEADS, LENGTH, MOST = 66, 32, 4, 16, 48


class Block(nn.Module):
    """Attention of one of several kinds, and a feed-forward."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.conv = nn.Conv1d(DIM, DIM, 3, padding=1) if kind == "conv" else None

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self.attend(F.layer_norm(x, (DIM,))))
        if self.conv is not None:
            x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        return x + self.down(F.silu(self.up(F.layer_norm(x, (DIM,)))))

    def attend(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, HEADS, -1))
        q, k, v = (t.transpose(1, 2) for t in qkv.unbind(2))
        length = x.shape[1]
        if self.kind == "written out":
            weights = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
            out = weights @ v
        elif self.kind == "window":
            # No mask while all is inside the window, as transformers does.
            rows = torch.arange(length)
            near = (rows[:, None] >= rows) & (rows[:, None] - rows < LENGTH - 4)
            mask = near if length > LENGTH - 4 else None
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        elif self.kind == "distance":
            bias = -(torch.arange(length)[:, None] - torch.arange(length)).abs() / 4
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        elif self.kind == "dropout":
            p = 0.5 * self.training
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=self.kind != "full")
        return out.transpose(1, 2).flatten(-2)


class Model(nn.Module):
    """Tokens in, logits out.

    Args:
        kind: Of the attention.
        positions: How they are made.
    """

    def __init__(self, kind: str = "causal", positions: str = "arange") -> None:
        super().__init__()
        self.positions = positions
        self.embed = nn.Embedding(VOCAB, DIM)
        if positions in ("arange", "numbers", "counted"):
            self.where = nn.Embedding(MOST, DIM)
        if positions in ("learned", "narrow"):
            self.learned = nn.Parameter(torch.zeros(1, MOST, DIM))
        self.register_buffer("numbers", torch.arange(MOST)[None], persistent=False)
        self.register_buffer("table", torch.randn(MOST, DIM))
        self.blocks = nn.ModuleList(Block(kind) for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, tokens: Tensor) -> Tensor:
        length, x = tokens.shape[1], self.embed(tokens)
        if self.positions == "arange":
            x = x + self.where(torch.arange(0, length, dtype=torch.long, device=x.device))
        elif self.positions == "numbers":
            x = x + self.where(self.numbers[:, 0:length])
        elif self.positions == "table":
            x = x + self.table[:length]
        elif self.positions == "learned":
            x = x + self.learned[:, :length, :]
        elif self.positions == "same line":
            x = x + (torch.arange(length)[:, None] - torch.arange(DIM)).sin()
        elif self.positions == "narrow":
            x = x + self.learned.narrow(1, 0, length)
        elif self.positions == "counted":
            x = x + self.where(torch.ones_like(tokens).cumsum(1))
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.temperature


class WithLoss(Model):
    """Takes the targets too and returns (logits, loss), as nanoGPT does."""

    def forward(self, tokens: Tensor, targets: Tensor, shift: bool = False) -> Any:
        logits = super().forward(tokens)
        seen, targets = (logits[:, :-1], targets[:, 1:]) if shift else (logits, targets)
        return logits, F.cross_entropy(seen.flatten(0, 1).double(), targets.flatten())


class Pooled(Model):
    """One vector of logits per sample."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens).mean(1)


def _transformer(name: str, **more: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        from tests.helpers.models import SPECIAL_TOKENS

        sizes = {
            "vocab_size": VOCAB, "hidden_size": DIM, "intermediate_size": 2 * DIM,
            "num_hidden_layers": 2, "num_attention_heads": HEADS, "num_key_value_heads": 2,
            "head_dim": 8, "max_position_embeddings": 64, "use_cache": False,
        }  # fmt: skip
        implementation = more.pop("attn_implementation", "sdpa")
        config = getattr(transformers, f"{name}Config")(**SPECIAL_TOKENS | sizes | more)
        config._attn_implementation = implementation
        return getattr(transformers, f"{name}ForCausalLM")(config)

    return build


BUILDERS: Final[dict[str, Callable[[], nn.Module]]] = {
    **{p: (lambda p=p: Model("causal", p)) for p in (
        "arange", "numbers", "table", "learned", "same line", "narrow", "counted")},
    **{k: (lambda k=k: Model(k)) for k in (
        "full", "written out", "window", "distance", "conv", "dropout")},
    "with loss": WithLoss,
    "pooled": Pooled,
    "Llama with cache": _transformer("Llama", use_cache=True),
    "Llama written out": _transformer("Llama", attn_implementation="eager"),
    "Mistral": _transformer("Mistral", sliding_window=None),
    "Mistral with window": _transformer("Mistral", sliding_window=12),
    "Roberta": _transformer("Roberta", is_decoder=True, pad_token_id=1, bos_token_id=0),
}  # fmt: skip


def build(name: str) -> nn.Module:
    """A model in train mode, with the same numbers every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return BUILDERS[name]().train()


def batch(step: int, size: int = 4, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    """Global tokens and targets."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(3, VOCAB, (2, size, length), generator=generator)
    return tokens[0], tokens[1]
