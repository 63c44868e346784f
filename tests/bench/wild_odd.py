"""Models that do one odd thing each: ties, dtypes, numbers read in the forward, recursion."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.bench.wild_cases import (
    Attend,
    Block,
    Wild,
    ce,
    images,
    mlp,
    mse,
    noise,
    rows,
    whole,
    wild,
)


def classes(model: nn.Module) -> Wild:
    return Wild(model, rows(12), whole(5), F.cross_entropy)


class TiedAutoencoder(nn.Module):
    """The decoder uses the encoder's weights transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 8), nn.Linear(8, 4)
        self.bias = nn.ParameterList([torch.zeros(8), torch.zeros(12)])

    def forward(self, x: Tensor) -> Tensor:
        z = self.b(self.a(x).tanh())
        h = F.linear(z, self.b.weight.t(), self.bias[0]).tanh()
        return F.linear(h, self.a.weight.t(), self.bias[1])


@wild
def tied_autoencoder_transposed() -> Wild:
    return Wild(TiedAutoencoder(), rows(12), rows(12), mse)


@wild
def tied_bias_across_modules() -> Wild:
    model = nn.Sequential(
        nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 5)
    )
    model[2].bias = model[0].bias
    return classes(model)


@wild
def tied_slice_of_parameter() -> Wild:
    """One big parameter, used in slices."""

    class Sliced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.big, self.out = nn.Parameter(noise(3, 12, 12) * 0.3), nn.Linear(12, 5)

        def forward(self, x: Tensor) -> Tensor:
            for i in range(3):
                x = x + (x @ self.big[i]).tanh()
            return self.out(x)

    return classes(Sliced())


class Recursive(nn.Module):
    """A module that holds itself through a list, and calls itself by depth."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 5)

    def grow(self, x: Tensor, depth: int) -> Tensor:
        if depth == 0:
            return x
        return self.grow(self.a(x).tanh(), depth - 1) + self.grow(self.b(x).tanh(), depth - 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.grow(x, 3))


@wild
def recursion() -> Wild:
    return classes(Recursive())


class Fractal(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.here = nn.Linear(12, 12)
        self.below = nn.ModuleList(Fractal(depth - 1) for _ in range(2)) if depth else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.here(x).tanh()
        if self.below is not None:
            h = h + self.below[1](self.below[0](x))
        return h


@wild
def fractal_nested_modules() -> Wild:
    return classes(nn.Sequential(Fractal(2), nn.Linear(12, 5)))


class Branch(nn.Module):
    """Another branch for inputs whose sum is positive: .item() in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) if x.sum().item() > 0 else self.b(x)
        return self.out(h.tanh())


@wild
def branch_by_item() -> Wild:
    return classes(Branch())


class PerSample(nn.Module):
    """A Python loop over samples, with a branch each."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.out = (
            nn.ModuleList(nn.Linear(12, 12) for _ in range(2)),
            nn.Linear(12, 5),
        )

    def forward(self, x: Tensor) -> Tensor:
        found = [self.experts[int(row[0] > 0)](row) for row in x]
        return self.out(torch.stack(found).tanh())


@wild
def branch_per_sample() -> Wild:
    return classes(PerSample())


class Unused(nn.Module):
    """A branch is used in odd steps only, and one layer never."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.never = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 12)
        self.out, self.calls = nn.Linear(12, 5), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        h = self.a(x)
        if self.calls % 2:
            h = h + self.b(x)
        return self.out(h.tanh())


@wild
def unused_parameters() -> Wild:
    class Never(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.never, self.out = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.a(x).tanh())

    return classes(Never())


@wild
def used_in_odd_steps() -> Wild:
    return classes(Unused())


@wild
def frozen_half() -> Wild:
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(3)), nn.Linear(12, 5)
    )
    model[0].requires_grad_(False)
    model[2][0].weight.requires_grad_(False)
    return classes(model)


@wild
def bf16_trunk_in_fp32() -> Wild:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.head = mlp(12, 16, 16).bfloat16(), nn.Linear(16, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.trunk(x.bfloat16()).to(self.head.weight.dtype))

    return classes(Mixed())


class ComplexNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        cd = torch.complex64 if torch.get_default_dtype() == torch.float32 else torch.complex128
        self.a, self.b = nn.Linear(12, 8, dtype=cd), nn.Linear(8, 5, dtype=cd)

    def forward(self, x: Tensor) -> Tensor:
        z = self.a(x.to(self.a.weight.dtype))
        return self.b(z * torch.sigmoid(z.abs())).abs()


@wild
def complex_network() -> Wild:
    return classes(ComplexNet())


@wild
def scalar_parameters() -> Wild:
    class Scalars(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.out = nn.Linear(12, 12), nn.Linear(12, 5)
            self.scale, self.shift = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.a(x).tanh() * self.scale + self.shift)

    return classes(Scalars())


@wild
def own_checkpointing() -> Wild:
    class Saved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.out = (
                nn.ModuleList(mlp(12, 24, 12) for _ in range(3)),
                nn.Linear(12, 5),
            )

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = x + checkpoint(block, x, use_reentrant=False)
            return self.out(x)

    return classes(Saved())


@wild
def own_checkpointing_reentrant() -> Wild:
    class Saved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(12, 12)
            self.blocks, self.out = (
                nn.ModuleList(mlp(12, 24, 12) for _ in range(3)),
                nn.Linear(12, 5),
            )

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = x + checkpoint(block, x, use_reentrant=True)
            return self.out(x)

    return classes(Saved())


class HyperNet(nn.Module):
    """The weights of one layer are the output of another."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.make, self.out = (
            nn.Parameter(noise(4)),
            nn.Linear(4, 12 * 12),
            nn.Linear(12, 5),
        )

    def forward(self, x: Tensor) -> Tensor:
        w = self.make(self.embed).view(12, 12)
        return self.out(F.linear(x, w).tanh())


@wild
def hyper_network() -> Wild:
    return classes(HyperNet())


class Lora(nn.Module):
    """Merged into the weight by eval(), taken out by train()."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(noise(rank, base.in_features) * 0.3)
        self.b = nn.Parameter(noise(base.out_features, rank, seed=3) * 0.3)
        self.merged = False

    def train(self, mode: bool = True) -> Lora:
        if mode == self.merged:
            sign = -1 if mode else 1
            self.base.weight.data += sign * (self.b @ self.a).data
            self.merged = not mode
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        return y if self.merged else y + F.linear(F.linear(x, self.a), self.b)


@wild
def lora_merged_on_eval() -> Wild:
    return classes(nn.Sequential(Lora(nn.Linear(12, 16)), nn.Tanh(), Lora(nn.Linear(16, 5))))


class Renamed(nn.Module):
    """Parameters made in a plain loop by setattr, with names of numbers."""

    def __init__(self) -> None:
        super().__init__()
        for i in range(3):
            self.register_parameter(f"w{i}", nn.Parameter(noise(12, 12, seed=i) * 0.3))
        self.table = nn.ParameterDict({"a": noise(12, 5), "b": torch.zeros(5)})

    def forward(self, x: Tensor) -> Tensor:
        for i in range(3):
            x = (x @ getattr(self, f"w{i}")).tanh()
        return x @ self.table["a"] + self.table["b"]


@wild
def parameter_containers() -> Wild:
    return classes(Renamed())


class GradientReversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return -0.5 * grads[0]


@wild
def gradient_reversal() -> Wild:
    class Dann(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f, self.c, self.d = mlp(12, 16, 8), nn.Linear(8, 5), mlp(8, 8, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.f(x)
            return self.c(h), self.d(GradientReversal.apply(h))

    def loss(o: tuple[Tensor, Tensor], t: Tensor) -> Tensor:
        return F.cross_entropy(o[0], t) + F.cross_entropy(o[1], t % 2)

    return Wild(Dann(), rows(12), whole(5), loss)


class Straight(nn.Module):
    """Binarised weights by a straight-through estimator, quantised activations."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.a, self.b):
            w = layer.weight
            w = w + (w.sign() * w.abs().mean() - w).detach()
            x = F.hardtanh(F.linear(x, w, layer.bias))
        return self.out(x)


@wild
def binary_weights() -> Wild:
    return classes(Straight())


class Kan(nn.Module):
    """Splines on a grid kept as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("grid", torch.linspace(-2, 2, 6))
        self.coef = nn.ParameterList([noise(12, 6, 8) * 0.2, noise(8, 6, 5, seed=2) * 0.2])

    def forward(self, x: Tensor) -> Tensor:
        for c in self.coef:
            x = torch.einsum("big,igo->bo", torch.exp(-(x[..., None] - self.grid).square()), c)
        return x


@wild
def kan() -> Wild:
    return classes(Kan())


class EarlyExit(nn.Module):
    """In evaluation it stops when every sample is sure."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(mlp(12, 16, 12) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(12, 5) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for block, head in zip(self.blocks, self.heads, strict=True):
            x = x + block(x)
            found.append(head(x))
            if not self.training and found[-1].softmax(-1).amax(-1).min() > 0.2:
                return found[-1]
        return torch.stack(found).mean(0)


@wild
def early_exit_in_evaluation() -> Wild:
    return classes(EarlyExit())


class Topk(nn.Module):
    """Token pruning: a number of tokens that depends on the values."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.score, self.block, self.out = (
            nn.Linear(6, 16),
            nn.Linear(6, 1),
            Block(16),
            nn.Linear(16, 5),
        )

    def forward(self, x: Tensor) -> Tensor:
        s = self.score(x).squeeze(-1).sigmoid()
        keep = s > 0.5
        h = self.embed(x) * s[..., None]
        mask = keep[:, None, None] | torch.eye(8, dtype=torch.bool)
        return self.out(self.block(h, mask=mask).mean(1))


@wild
def token_pruning_mask() -> Wild:
    return Wild(Topk(), rows(8, 6), whole(5), F.cross_entropy)


class BooleanIndex(nn.Module):
    """Only masked positions reach the head: shapes depend on numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.blocks = nn.ModuleList(Block(16) for _ in range(2))
        self.head = mlp(16, 16, 20)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        y = torch.zeros(*ids.shape, 20)
        chosen = ids % 3 == 0
        y[chosen] = self.head(x[chosen]).to(y.dtype)
        return y


@wild
def masked_positions_to_head() -> Wild:
    return Wild(BooleanIndex(), whole(20, 8), whole(20, 8, seed=4), ce)


class Alternating(nn.Module):
    """Keys, values of the batch before are kept as memory (Transformer-XL)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attn, self.out = nn.Embedding(20, 16), Attend(16), nn.Linear(16, 20)
        self.memory: Tensor | None = None

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        old = self.memory if self.training and self.memory is not None else x.detach()
        y = x + self.attn(x, torch.cat([old, x], 1))
        self.memory = x.detach()
        return self.out(y)


@wild
def transformer_xl_memory() -> Wild:
    return Wild(Alternating(), whole(20, 8), whole(20, 8, seed=4), ce)


@wild
def mha_as_users_call_it() -> Wild:
    class Mha(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(6, 16)
            self.attn = nn.MultiheadAttention(16, 4, batch_first=True, bias=True)
            self.out = nn.Linear(16, 5)

        def forward(self, x: Tensor) -> Tensor:
            h = self.embed(x)
            y, w = self.attn(h, h, h, need_weights=True)
            return self.out((h + y).mean(1)) + w.mean()

    return Wild(Mha(), rows(8, 6), whole(5), F.cross_entropy)


@wild
def bilinear_and_1x1() -> Wild:
    class Bi(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bi, self.out = nn.Conv2d(3, 6, 1), nn.Bilinear(6, 6, 8), nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            h = self.conv(x).mean((2, 3))
            return self.out(self.bi(h, h.flip(1)))

    return Wild(Bi(), images(), whole(5), F.cross_entropy)


@wild
def log_determinant_flow() -> Wild:
    """A coupling flow whose loss needs the determinant of a matrix of weights."""

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.nets = (
                nn.Parameter(torch.eye(12) + 0.1 * noise(12, 12)),
                nn.ModuleList(mlp(6, 16, 12) for _ in range(2)),
            )

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = x @ self.w
            total = torch.linalg.slogdet(self.w)[1].expand(len(x))
            for net in self.nets:
                a, b = x.chunk(2, -1)
                s, t = net(a).chunk(2, -1)
                x = torch.cat([b * s.tanh().exp() + t, a], -1)
                total = total + s.tanh().sum(-1)
            return x, total

    return Wild(
        Flow(),
        rows(12),
        rows(seed=3),
        lambda o, t: (0.5 * o[0].square().sum(-1) - o[1]).mean() / math.pi,
    )
