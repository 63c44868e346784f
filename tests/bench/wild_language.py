"""Models of text, as people write them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.bench.wild_cases import Attend, Block, Wild, ce, mlp, noise, rows, whole, wild

VOCAB = 24


def language(model: nn.Module, length: int = 8) -> Wild:
    return Wild(model, whole(VOCAB, length), whole(VOCAB, length, seed=5), ce)


class Gpt(nn.Module):
    def __init__(self, *, tied: bool = True, blocks: int = 3, dim: int = 16) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, dim), nn.Embedding(16, dim)
        self.h = nn.ModuleList(Block(dim, causal=True) for _ in range(blocks))
        self.ln, self.head = nn.LayerNorm(dim), nn.Linear(dim, VOCAB, bias=False)
        if tied:
            self.head.weight = self.wte.weight

    def trunk(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.h:
            x = block(x)
        return self.ln(x)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.trunk(ids))


@wild
def gpt_tied() -> Wild:
    return language(Gpt())


@wild
def gpt_ignore_index() -> Wild:
    made = language(Gpt(tied=False))
    targets = made.targets.clone()
    targets[::2, 3:] = -100
    return made._replace(targets=targets)


@wild
def gpt_sum_loss() -> Wild:
    def loss(o: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(o.flatten(0, 1), t.flatten(), reduction="sum") / 100

    return language(Gpt(tied=False))._replace(loss=loss)


@wild
def gpt_masked_mean() -> Wild:
    """Padding by a mask of the batch, divided by the number of tokens that count."""
    made = language(Gpt())
    targets = made.targets.clone()
    for i in range(len(targets)):
        targets[i, 1 + i % 7 :] = 0

    def loss(o: Tensor, t: Tensor) -> Tensor:
        keep = (t != 0).to(o.dtype)
        each = F.cross_entropy(o.mT, t, reduction="none")
        return (each * keep).sum() / keep.sum()

    return made._replace(targets=targets, loss=loss)


class LossInside(Gpt):
    """Returns (logits, loss), as nanoGPT does."""

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        logits = super().forward(ids)
        return logits, None if targets is None else ce(logits, targets)


@wild
def nanogpt_loss_inside() -> Wild:
    ids = whole(VOCAB, 8)
    given = {"ids": ids, "targets": whole(VOCAB, 8, seed=5)}
    return Wild(LossInside(), given, rows(seed=4), lambda o, t: o[1])


class Rotary(nn.Module):
    """Llama: rotary positions from a cache, grouped keys, gated ffn, RMSNorm."""

    def __init__(self, dim: int = 16, heads: int = 4, kv: int = 2) -> None:
        super().__init__()
        self.heads, self.kv, self.hd = heads, kv, dim // heads
        self.wq, self.wo = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.wkv = nn.Linear(dim, 2 * kv * self.hd, bias=False)
        self.n1, self.n2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.gate_up, self.down = nn.Linear(dim, 64, bias=False), nn.Linear(32, dim, bias=False)

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, _ = x.shape
        h = self.n1(x)
        q = self.turn(self.wq(h).view(b, t, self.heads, self.hd).transpose(1, 2), cos, sin)
        k, v = self.wkv(h).view(b, t, 2, self.kv, self.hd).permute(2, 0, 3, 1, 4)
        k = self.turn(k, cos, sin).repeat_interleave(self.heads // self.kv, 1)
        v = v.repeat_interleave(self.heads // self.kv, 1)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(o.transpose(1, 2).reshape(b, t, -1))
        gate, up = self.gate_up(self.n2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.layers = nn.ModuleList(Rotary() for _ in range(3))
        self.norm, self.out = nn.RMSNorm(16), nn.Linear(16, VOCAB, bias=False)
        angle = torch.outer(torch.arange(16.0), 1 / 100 ** (torch.arange(2) / 2))
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        t = ids.shape[1]
        for layer in self.layers:
            x = layer(x, self.cos[:t], self.sin[:t])
        return self.out(self.norm(x))


@wild
def llama_fused_kv() -> Wild:
    return language(Llama())


class ComplexRope(nn.Module):
    """Rotary positions as complex numbers kept in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block = nn.Embedding(VOCAB, 16), Block(16, causal=True)
        self.out = nn.Linear(16, VOCAB)
        angle = torch.outer(torch.arange(16.0), 1 / 100 ** (torch.arange(8) / 8))
        self.freqs = torch.polar(torch.ones_like(angle), angle)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        turned = torch.view_as_complex(x.unflatten(-1, (8, 2)).contiguous())
        x = torch.view_as_real(turned * self.freqs[: ids.shape[1]]).flatten(-2).to(x.dtype)
        return self.out(self.block(x))


@wild
def rope_by_complex_numbers() -> Wild:
    return language(ComplexRope())


class Bert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.embed = nn.Embedding(VOCAB, 16, padding_idx=0)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.decoder = nn.Linear(16, VOCAB)
        self.decoder.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.decoder(self.encoder(self.embed(ids), src_key_padding_mask=ids == 0))


@wild
def bert_padding_idx() -> Wild:
    return language(Bert())


@wild
def torch_transformer() -> Wild:
    class Seq2Seq(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCAB, 16)
            self.net = nn.Transformer(16, 4, 2, 2, 32, dropout=0.0, batch_first=True)
            self.out = nn.Linear(16, VOCAB)

        def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1]).to(
                torch.get_default_dtype()
            )
            return self.out(
                self.net(self.embed(src), self.embed(tgt), tgt_mask=mask, tgt_is_causal=True)
            )

    given = (whole(VOCAB, 6), whole(VOCAB, 8, seed=7))
    return Wild(Seq2Seq(), given, whole(VOCAB, 8, seed=5), ce)


class Moe(nn.Module):
    """Top-2 routing with a capacity; what is over it is dropped."""

    def __init__(self, dim: int = 16, experts: int = 4, capacity: int = 6) -> None:
        super().__init__()
        self.gate, self.capacity = nn.Linear(dim, experts, bias=False), capacity
        self.experts = nn.ModuleList(mlp(dim, 32, dim) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        scores, chosen = self.gate(flat).softmax(-1).topk(2, -1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, slot = (chosen == number).nonzero(as_tuple=True)
            token, slot = token[: self.capacity], slot[: self.capacity]
            out.index_add_(0, token, expert(flat[token]) * scores[token, slot, None])
        return out.view_as(x)


class MoeLm(nn.Module):
    def __init__(self, moe: nn.Module) -> None:
        super().__init__()
        self.embed, self.attn = nn.Embedding(VOCAB, 16), Attend(16, causal=True)
        self.moe, self.out = moe, nn.Linear(16, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.attn(x)
        return self.out(x + self.moe(x))


@wild
def moe_capacity() -> Wild:
    return language(MoeLm(Moe(capacity=6)))


@wild
def moe_dropless() -> Wild:
    return language(MoeLm(Moe(capacity=1000)))


class SoftMoe(nn.Module):
    """Every expert sees a mixture; stacked weights, einsum."""

    def __init__(self, dim: int = 16, experts: int = 4, slots: int = 2) -> None:
        super().__init__()
        self.phi = nn.Parameter(noise(dim, experts, slots) * 0.2)
        self.w1 = nn.Parameter(noise(experts, dim, 32) * 0.2)
        self.w2 = nn.Parameter(noise(experts, 32, dim) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        logits = torch.einsum("btd,des->btes", x, self.phi)
        dispatch, combine = logits.softmax(1), logits.flatten(2).softmax(-1).view_as(logits)
        slots = torch.einsum("btd,btes->besd", x, dispatch)
        h = F.gelu(torch.einsum("besd,edf->besf", slots, self.w1))
        return torch.einsum("besf,efd,btes->btd", h, self.w2, combine)


@wild
def soft_moe() -> Wild:
    return language(MoeLm(SoftMoe()))


class LinearRnn(nn.Module):
    """RWKV / Mamba like: a scan over time in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.decay, self.inp = nn.Linear(16, 16), nn.Linear(16, 16)
        self.gate, self.out = nn.Linear(16, 16), nn.Linear(16, VOCAB)
        self.a = nn.Parameter(torch.linspace(-2, 2, 16))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        f, u = torch.sigmoid(self.decay(x) + self.a), self.inp(x)
        state, found = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            state = f[:, t] * state + (1 - f[:, t]) * u[:, t]
            found.append(state)
        return self.out(torch.stack(found, 1) * F.silu(self.gate(x)))


@wild
def linear_rnn() -> Wild:
    return language(LinearRnn())


class Relative(nn.Module):
    """T5's buckets and ALiBi's slopes as a bias made once and handed to every block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.bias = nn.Embedding(VOCAB, 16), nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(Block(16) for _ in range(2))
        self.out = nn.Linear(16, VOCAB)
        self.slopes = nn.Buffer(2.0 ** -torch.arange(1, 5), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        at = torch.arange(ids.shape[1])
        apart = (at[:, None] - at).abs()
        mask = self.bias(apart.clamp(max=7)).permute(2, 0, 1) - self.slopes[:, None, None] * apart
        mask = mask.masked_fill(at[:, None] < at, float("-inf"))
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, mask=mask[None])
        return self.out(x)


@wild
def relative_bias_alibi() -> Wild:
    return language(Relative())


class Universal(nn.Module):
    """One block, run as many times as the longest token needs: a rule over the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block = nn.Embedding(VOCAB, 16), Block(16)
        self.halt, self.out = nn.Linear(16, 1), nn.Linear(16, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        left = torch.ones_like(x[..., :1])
        total = torch.zeros_like(x)
        for _ in range(4):
            p = self.halt(x).sigmoid() * left
            total, left = total + p * x, left - p
            if left.max().item() < 0.35:
                break
            x = self.block(x)
        return self.out(total + left * x)


@wild
def universal_transformer() -> Wild:
    return language(Universal())


class Albert(nn.Module):
    """The same block at each of four depths, and a factorised embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up = nn.Embedding(VOCAB, 8), nn.Linear(8, 16)
        block = Block(16)
        self.blocks = nn.ModuleList([block] * 4)
        self.down = nn.Linear(16, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.up(self.embed(ids))
        for block in self.blocks:
            x = block(x)
        return self.down(x) @ self.embed.weight.T


@wild
def albert_shared_and_tied_by_matmul() -> Wild:
    return language(Albert())


class MultiToken(nn.Module):
    """Several heads over shifted targets, unembedding shared."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = Gpt(tied=False)
        self.heads = nn.ModuleList(Block(16, causal=True) for _ in range(2))
        self.out = nn.Linear(16, VOCAB, bias=False)
        self.trunk.head = nn.Identity()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.trunk(ids)
        return torch.stack([self.out(h(x)) for h in self.heads], 1)


@wild
def multi_token_prediction() -> Wild:
    return Wild(MultiToken(), whole(VOCAB, 8), whole(VOCAB, 2, 8, seed=5), ce)
