"""Models of tables, clicks and sets."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.bench.wild_cases import Attend, Block, Wild, mlp, mse, noise, rows, whole, wild


class FtTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(noise(4, 16)), nn.Parameter(torch.zeros(4, 16))
        self.cats = nn.ModuleList(nn.Embedding(n, 16) for n in (3, 5, 7))
        self.cls = nn.Parameter(torch.zeros(16))
        self.blocks = nn.ModuleList(Block(16) for _ in range(2))
        self.head = nn.Sequential(nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x_num: Tensor, x_cat: Tensor) -> Tensor:
        parts = [self.cls.expand(len(x_num), 1, -1), x_num[..., None] * self.weight + self.bias]
        parts += [e(x_cat[:, i : i + 1]) for i, e in enumerate(self.cats)]
        x = torch.cat(parts, 1)
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0]).squeeze(-1)


@wild
def ft_transformer() -> Wild:
    given = {"x_num": rows(4), "x_cat": whole(3, 3)}
    return Wild(FtTransformer(), given, rows(seed=5), mse)


class Dlrm(nn.Module):
    """Bags by offsets, dot products of all pairs."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.bottom = mlp(4, 16, 8)
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(12, 8, mode="sum", sparse=sparse) for _ in range(3)
        )
        self.top = mlp(8 + 6, 16, 1)

    def forward(self, dense: Tensor, bags: Tensor) -> Tensor:
        x = self.bottom(dense)
        found = [x]
        for i, bag in enumerate(self.bags):
            flat = bags[:, i].flatten()
            offsets = torch.arange(0, len(flat), bags.shape[2])
            found.append(bag(flat, offsets))
        z = torch.stack(found, 1)
        i, j = torch.tril_indices(4, 4, -1)
        return self.top(torch.cat([x, (z @ z.mT)[:, i, j]], 1)).squeeze(-1)


@wild
def dlrm() -> Wild:
    return Wild(Dlrm(), (rows(4), whole(12, 3, 4)), rows(seed=5), mse)


@wild
def dlrm_sparse() -> Wild:
    return Wild(Dlrm(sparse=True), (rows(4), whole(12, 3, 4)), rows(seed=5), mse)


class TabNet(nn.Module):
    """Sequential attention; ghost batch norm over chunks of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(6)
        self.shared = nn.Linear(6, 16)
        self.steps = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.masks = nn.ModuleList(nn.Linear(8, 6) for _ in range(2))
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.bn(x)
        prior, total, entropy = torch.ones_like(x), 0, torch.zeros(())
        a = F.glu(self.shared(x), 1)
        for step, mask in zip(self.steps, self.masks, strict=True):
            m = (mask(a) * prior).softmax(-1)
            entropy = entropy - (m * (m + 1e-6).log()).sum(1).mean()
            prior = prior * (1.3 - m)
            h = F.glu(step(self.shared(x * m)), 1)
            total, a = total + h.relu(), h
        return self.out(total), entropy


@wild
def tabnet() -> Wild:
    def loss(o: tuple[Tensor, Tensor], t: Tensor) -> Tensor:
        return F.cross_entropy(o[0], t) + 1e-2 * o[1]

    return Wild(TabNet(), rows(6), whole(3), loss, coupled=True)


class DeepFm(nn.Module):
    """One table for all fields by offsets in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.table = nn.Embedding(15, 1), nn.Embedding(15, 8)
        self.register_buffer("offsets", torch.tensor([0, 3, 8]))
        self.deep, self.bias = mlp(24, 16, 1), nn.Parameter(torch.zeros(1))

    def forward(self, fields: Tensor) -> Tensor:
        at = fields + self.offsets
        e = self.table(at)
        cross = 0.5 * (e.sum(1).square() - e.square().sum(1)).sum(1)
        return self.first(at).sum((1, 2)) + cross + self.deep(e.flatten(1))[:, 0] + self.bias


@wild
def deepfm() -> Wild:
    return Wild(
        DeepFm(),
        whole(3, 3),
        rows(seed=5).sigmoid(),
        lambda o, t: F.binary_cross_entropy_with_logits(o, t),
    )


class TwoTower(nn.Module):
    """Users and items share a table; in-batch negatives make the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.user, self.item = nn.Embedding(20, 8), mlp(8, 16, 8), mlp(8, 16, 8)

    def forward(self, u: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
        return self.user(self.table(u)), self.item(self.table(i))


@wild
def two_tower_in_batch() -> Wild:
    def loss(o: tuple[Tensor, Tensor], t: Tensor) -> Tensor:
        return F.cross_entropy(o[0] @ o[1].T, torch.arange(len(t)))

    return Wild(TwoTower(), (whole(20), whole(20, seed=7)), rows(seed=5), loss)


class SetTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.induce = nn.Linear(3, 16), nn.Parameter(noise(4, 16))
        self.a, self.b, self.pool = Attend(16), Attend(16), Attend(16)
        self.seed, self.out = nn.Parameter(noise(1, 16)), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        h = self.a(self.induce.expand(len(x), -1, -1), x)
        x = x + self.b(x, h)
        return self.out(self.pool(self.seed.expand(len(x), -1, -1), x)[:, 0])


@wild
def set_transformer() -> Wild:
    return Wild(SetTransformer(), rows(6, 3), rows(2, seed=4), mse)


class Node(nn.Module):
    """Oblivious soft trees."""

    def __init__(self) -> None:
        super().__init__()
        self.select, self.threshold = nn.Parameter(noise(6, 4, 3)), nn.Parameter(torch.zeros(4, 3))
        self.leaves = nn.Parameter(noise(4, 8))
        bits = torch.tensor([[i >> d & 1 for d in range(3)] for i in range(8)])
        self.register_buffer("bits", bits.to(torch.get_default_dtype()))

    def forward(self, x: Tensor) -> Tensor:
        p = (torch.einsum("bf,ftd->btd", x, self.select.softmax(0)) - self.threshold).sigmoid()
        at = torch.where(self.bits > 0, p[:, :, None], 1 - p[:, :, None]).prod(-1)
        return (at * self.leaves).sum((1, 2))


@wild
def soft_trees() -> Wild:
    return Wild(Node(), rows(6), rows(seed=4), mse)


class Cox(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(6, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).squeeze(-1)


@wild
def survival_cox_loss() -> Wild:
    """The partial likelihood looks at everyone in the batch who is still at risk."""

    def loss(risk: Tensor, t: Tensor) -> Tensor:
        order = t.argsort(descending=True)
        r = risk[order]
        return -(r - r.logcumsumexp(0)).mean()

    return Wild(Cox(), rows(6), rows(seed=4), loss)


class Gaussian(nn.Module):
    """Mean and variance, one head with a float64 matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = mlp(6, 16, 16)
        self.head = nn.Linear(16, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x).double())


@wild
def float64_head() -> Wild:
    def loss(o: Tensor, t: Tensor) -> Tensor:
        return F.gaussian_nll_loss(o[:, 0], t.double(), F.softplus(o[:, 1]) + 0.1)

    return Wild(Gaussian(), rows(6), rows(seed=4), loss)


class Normalised(nn.Module):
    """BatchNorm without affine before everything, GhostBatchNorm by chunks inside."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(6, affine=False)
        self.a, self.b = nn.Linear(6, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(self.bn(x)).tanh()).squeeze(-1)


@wild
def batchnorm_without_affine() -> Wild:
    return Wild(Normalised(), rows(6), rows(seed=4), mse, coupled=True)
