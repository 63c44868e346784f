"""Models whose forward writes: parameters, buffers, targets, caches, counters."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, spectral_norm, weight_norm

from tests.bench.wild_cases import Block, Wild, ce, images, mlp, mse, rows, whole, wild


def classes(model: nn.Module, count: int = 5) -> Wild:
    return Wild(model, rows(12), whole(count), F.cross_entropy)


@wild
def embedding_max_norm() -> Wild:
    model = nn.Sequential(nn.Embedding(20, 8, max_norm=0.8), nn.Flatten(), nn.Linear(32, 5))
    return Wild(model, whole(20, 4), whole(5, seed=3), F.cross_entropy)


@wild
def embedding_bag_max_norm() -> Wild:
    model = nn.Sequential(nn.EmbeddingBag(20, 8, max_norm=0.5), nn.Linear(8, 5))
    return Wild(model, whole(20, 4), whole(5, seed=3), F.cross_entropy)


class MaxNormConv(nn.Conv2d):
    """EEGNet: the weight is brought to a norm in each forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.5)
        return super().forward(x)


@wild
def eegnet() -> Wild:
    model = nn.Sequential(
        nn.Conv2d(1, 8, (1, 9), padding=(0, 4), bias=False),
        nn.GroupNorm(2, 8),
        MaxNormConv(8, 16, (4, 1), groups=8, bias=False),
        nn.ELU(),
        nn.AvgPool2d((1, 4)),
        nn.Flatten(),
        nn.Linear(16 * 8, 4),
    )
    return Wild(model, rows(1, 4, 32), whole(4), F.cross_entropy)


class Byol(nn.Module):
    """BYOL: the target follows in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.online = mlp(12, 16, 8)
        self.predictor = mlp(8, 8, 8)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        with torch.no_grad():
            for t, o in zip(self.target.parameters(), self.online.parameters(), strict=True):
                t.lerp_(o, 0.1)
            wanted = self.target(b)
        return F.cosine_similarity(self.predictor(self.online(a)), wanted)


@wild
def byol_in_forward() -> Wild:
    return Wild(Byol(), (rows(12), rows(12, seed=5)), rows(seed=6), lambda o, t: (1 - o).mean())


class Moco(nn.Module):
    """MoCo: a queue of keys and a momentum encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.q = mlp(12, 16, 8)
        self.k = copy.deepcopy(self.q).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(8, 32), dim=0))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        q = F.normalize(self.q(a), dim=1)
        with torch.no_grad():
            for k, o in zip(self.k.parameters(), self.q.parameters(), strict=True):
                k.data = k.data * 0.9 + o.data * 0.1
            keys = F.normalize(self.k(b), dim=1)
        positive = (q * keys).sum(1, keepdim=True)
        logits = torch.cat([positive, q @ self.queue.clone()], 1) / 0.2
        if self.training:
            at = int(self.pointer)
            self.queue[:, at : at + len(keys)] = keys.T
            self.pointer[0] = (at + len(keys)) % 32
        return logits


@wild
def moco_in_forward() -> Wild:
    return Wild(
        Moco(), (rows(12), rows(12, seed=5)), torch.zeros(24).long(), F.cross_entropy, coupled=True
    )


class VqVae(nn.Module):
    """A codebook by moving averages of what falls to each code."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = mlp(12, 16, 4), mlp(4, 16, 12)
        codes = torch.randn(8, 4)
        self.register_buffer("codes", codes)
        self.register_buffer("count", torch.ones(8))
        self.register_buffer("total", codes.clone())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encode(x)
        index = torch.cdist(z, self.codes).argmin(1)
        q = self.codes[index]
        if self.training:
            with torch.no_grad():
                hot = F.one_hot(index, 8).to(z.dtype)
                self.count.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                self.total.mul_(0.9).add_(hot.T @ z, alpha=0.1)
                self.codes.copy_(self.total / self.count.unsqueeze(1))
        return self.decode(z + (q - z).detach()), F.mse_loss(z, q)


@wild
def vq_vae_ema() -> Wild:
    x = rows(12)
    return Wild(VqVae(), x, x, lambda o, t: F.mse_loss(o[0], t) + 0.25 * o[1], coupled=True)


class Convex(nn.Module):
    """An input convex network: its weights are clamped in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 16), nn.Linear(16, 16)
        self.last = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.second.weight.clamp_(min=0)
            self.last.weight.clamp_(min=0)
        return self.last(F.softplus(self.second(F.softplus(self.first(x))))).squeeze(-1)


@wild
def convex_clamp() -> Wild:
    return Wild(Convex(), rows(12), rows(seed=4), mse)


class Ngpt(nn.Module):
    """nGPT: matrices are normalised before each forward in training."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.blocks = nn.ModuleList(Block(16, 4, causal=True) for _ in range(2))
        self.head = nn.Linear(16, 20, bias=False)

    @torch.no_grad()
    def normalise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.weight.copy_(F.normalize(module.weight, dim=-1))

    def forward(self, ids: Tensor) -> Tensor:
        if self.training:
            self.normalise()
        x = self.embed(ids)
        for block in self.blocks:
            x = F.normalize(block(x), dim=-1)
        return self.head(x)


@wild
def ngpt() -> Wild:
    return Wild(Ngpt(), whole(20, 8), whole(20, 8, seed=5), ce)


def normed(how: Any) -> nn.Module:
    return nn.Sequential(
        how(nn.Linear(12, 16)), nn.ReLU(), how(nn.Linear(16, 16)), nn.Linear(16, 5)
    )


@wild
def spectral_norm_old() -> Wild:
    return classes(normed(spectral_norm))


@wild
def spectral_norm_new() -> Wild:
    return classes(normed(parametrizations.spectral_norm))


@wild
def weight_norm_old() -> Wild:
    return classes(normed(weight_norm))


@wild
def weight_norm_new() -> Wild:
    return classes(normed(parametrizations.weight_norm))


@wild
def orthogonal_new() -> Wild:
    return classes(normed(parametrizations.orthogonal))


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


@wild
def symmetric_parametrization() -> Wild:
    model = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 5))
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    return classes(model)


class Counter(nn.Module):
    """Counts its forwards and warms up by them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.head = nn.Linear(12, 5)
        self.register_buffer("step", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.step += 1
        scale = torch.clamp(self.step / 4, max=1.0)
        for layer in self.layers:
            x = x + scale * layer(x).tanh()
        return self.head(x)


@wild
def counter_in_forward() -> Wild:
    return classes(Counter())


class PlainCounter(nn.Module):
    """The same by a number in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(2))
        self.head, self.step = nn.Linear(12, 5), 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.step += 1
        for layer in self.layers:
            x = x + min(1.0, self.step / 4) * layer(x).tanh()
        return self.head(x)


@wild
def python_counter_in_forward() -> Wild:
    return classes(PlainCounter())


class Shadow(nn.Module):
    """An average of its own weights, updated in the forward and used in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(12, 16, 5)
        for name, p in self.net.named_parameters():
            self.register_buffer("ema_" + name.replace(".", "_"), p.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            params = {
                n: getattr(self, "ema_" + n.replace(".", "_"))
                for n, _ in self.net.named_parameters()
            }
            return torch.func.functional_call(self.net, params, (x,))
        with torch.no_grad():
            for name, p in self.net.named_parameters():
                getattr(self, "ema_" + name.replace(".", "_")).lerp_(p, 0.1)
        return self.net(x)


@wild
def shadow_weights() -> Wild:
    return classes(Shadow())


class ActivationEma(nn.Module):
    """Divides by a running average of the size of its activations."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 16), nn.Linear(16, 5)
        self.register_buffer("size", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).relu()
        if self.training:
            self.size.lerp_(h.detach().abs().mean(), 0.1)
        return self.b(h / self.size)


@wild
def activation_ema() -> Wild:
    return classes(ActivationEma())._replace(coupled=True)


class Center(nn.Module):
    """DINO: teacher outputs are centred by a running mean of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = mlp(12, 16, 8), mlp(12, 16, 8).requires_grad_(False)
        self.register_buffer("center", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            t = self.teacher(x)
            wanted = F.softmax((t - self.center) / 0.1, -1)
            self.center.mul_(0.9).add_(t.mean(0), alpha=0.1)
        return -(wanted * F.log_softmax(self.student(x), -1)).sum(-1)


@wild
def dino_center() -> Wild:
    return Wild(Center(), rows(12), rows(seed=4), lambda o, t: o.mean(), coupled=True)


class KeepsLast(nn.Module):
    """Keeps its last output and mixes it into the next."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 16), nn.Linear(16, 5)
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).tanh()
        if self.training and self.last is not None:
            h = h + 0.1 * self.last
        self.last = h.detach()
        return self.b(h)


@wild
def cache_between_steps() -> Wild:
    return classes(KeepsLast())


class StaleAlias(nn.Module):
    """Caches a transposed weight at the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 12, bias=False), nn.Linear(12, 5)
        self.cached: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.cached is None:
            self.cached = self.a.weight.detach().t()
        return self.b(self.a(x).tanh() @ self.cached)


@wild
def cached_alias_of_weight() -> Wild:
    return classes(StaleAlias())


@wild
def weight_standardised_conv() -> Wild:
    class WsConv(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            w = self.weight
            w = (w - w.mean((1, 2, 3), keepdim=True)) / w.std((1, 2, 3), keepdim=True)
            return F.conv2d(x, w, self.bias, self.stride, self.padding)

    model = nn.Sequential(
        WsConv(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), WsConv(8, 8, 3, padding=1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
    )  # fmt: skip
    return Wild(model, images(), whole(5), F.cross_entropy)
