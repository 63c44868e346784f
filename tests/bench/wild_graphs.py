"""Models of graphs: a sample is one small graph, and the forward flattens the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.bench.wild_cases import Wild, mlp, mse, rows, whole, wild

NODES, EDGES = 6, 10


def flat(x: Tensor, edges: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Nodes of all graphs, and the ends of all edges among them."""
    shift = torch.arange(len(x))[:, None] * NODES
    return x.flatten(0, 1), (edges[:, 0] + shift).flatten(), (edges[:, 1] + shift).flatten()


class Gcn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 16), nn.Linear(16, 16), nn.Linear(16, 16)])
        self.out = nn.Linear(16, 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        h, src, dst = flat(x, edges)
        degree = torch.ones(len(h)).index_add(0, dst, torch.ones(len(dst)))
        for layer in self.layers:
            m = layer(h)
            h = F.silu(m + torch.zeros_like(m).index_add_(0, dst, m[src]) / degree[:, None])
        return self.out(h.view(len(x), NODES, -1).mean(1))


def graphs(model: nn.Module, *, coupled: bool = False, **more: Any) -> Wild:
    given = (rows(NODES, 5), whole(NODES, 2, EDGES, seed=8))
    return Wild(model, given, whole(3, seed=6), F.cross_entropy, coupled=coupled)


@wild
def gcn_index_add() -> Wild:
    return graphs(Gcn())


class Gat(nn.Module):
    """Attention over neighbours by scatter_reduce of the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.a = nn.Linear(5, 16, bias=False), nn.Parameter(torch.randn(2, 4, 4) * 0.3)
        self.out = nn.Linear(16, 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        nodes, src, dst = flat(x, edges)
        h = self.lin(nodes).view(-1, 4, 4)
        score = F.leaky_relu((h[src] * self.a[0]).sum(-1) + (h[dst] * self.a[1]).sum(-1), 0.2)
        top = torch.full((len(h), 4), -1e9).scatter_reduce(
            0, dst[:, None].expand(-1, 4), score.detach(), "amax"
        )
        e = (score - top[dst]).exp()
        total = torch.zeros(len(h), 4).index_add(0, dst, e)[dst]
        out = torch.zeros_like(h).index_add(0, dst, h[src] * (e / total)[..., None])
        return self.out((h + out).flatten(1).view(len(x), NODES, -1).mean(1))


@wild
def gat_scatter() -> Wild:
    return graphs(Gat())


class Mpnn(nn.Module):
    """Messages by a GRU cell, shared by all rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.message, self.update = nn.Linear(5, 16), mlp(32, 16, 16), nn.GRUCell(16, 16)
        self.out = nn.Linear(16, 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        nodes, src, dst = flat(x, edges)
        h = self.inp(nodes)
        for _ in range(3):
            m = self.message(torch.cat([h[src], h[dst]], -1))
            h = self.update(torch.zeros_like(h).index_add(0, dst, m), h)
        return self.out(h.view(len(x), NODES, -1).sum(1))


@wild
def mpnn_gru_shared() -> Wild:
    return graphs(Mpnn())


class Dense(nn.Module):
    """A dense adjacency, of which nonzero makes the edges."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(5, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        graph, src, dst = (adjacency > 0.4).nonzero(as_tuple=True)
        h = self.a(x).relu()
        m = self.b(h[graph, src])
        h = h.index_put((graph, dst), m, accumulate=True)
        return self.out(h.mean(1))


@wild
def gnn_nonzero() -> Wild:
    given = (rows(NODES, 5), rows(NODES, NODES, seed=8))
    return Wild(Dense(), given, whole(3, seed=6), F.cross_entropy)


class Gin(nn.Module):
    """Batch norm over all nodes, a learned epsilon."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = nn.Parameter(torch.zeros(()))
        self.net = nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 16))
        self.out = nn.Linear(16, 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        nodes, src, dst = flat(x, edges)
        h = (1 + self.eps) * nodes + torch.zeros_like(nodes).index_add(0, dst, nodes[src])
        return self.out(self.net(h).view(len(x), NODES, -1).mean(1))


@wild
def gin_batchnorm() -> Wild:
    return graphs(Gin(), coupled=True)


class Sparse(nn.Module):
    """A sparse matrix times features."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        nodes, src, dst = flat(x, edges)
        n = len(nodes)
        matrix = torch.sparse_coo_tensor(torch.stack([dst, src]), torch.ones(len(src)), (n, n))
        h = torch.sparse.mm(matrix, self.a(nodes)).tanh()
        return self.b(h.view(len(x), NODES, -1).mean(1))


@wild
def gcn_sparse_mm() -> Wild:
    return graphs(Sparse())


class Egnn(nn.Module):
    """Positions move along differences; distances squared go into messages."""

    def __init__(self) -> None:
        super().__init__()
        self.edge = nn.ModuleList(mlp(2 * 8 + 1, 16, 8) for _ in range(2))
        self.node = nn.ModuleList(mlp(16, 16, 8) for _ in range(2))
        self.move = nn.ModuleList(nn.Linear(8, 1, bias=False) for _ in range(2))
        self.inp, self.out = nn.Linear(5, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        h = self.inp(x)
        for e, n, m in zip(self.edge, self.node, self.move, strict=True):
            apart = at[:, :, None] - at[:, None]
            both = [h[:, :, None].expand(-1, -1, NODES, -1), h[:, None].expand(-1, NODES, -1, -1)]
            msg = e(torch.cat([*both, apart.square().sum(-1, keepdim=True)], -1))
            at = at + (apart * m(msg)).mean(2)
            h = h + n(torch.cat([h, msg.sum(2)], -1))
        return self.out(h).sum((1, 2)) + at.square().mean((1, 2))


@wild
def egnn() -> Wild:
    return Wild(Egnn(), (rows(NODES, 5), rows(NODES, 3, seed=7)), rows(seed=9), mse)


class Force(nn.Module):
    """Energies whose gradient with respect to positions is the output."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(1, 16, 16, 1, act=nn.Tanh)

    def forward(self, at: Tensor) -> Tensor:
        with torch.enable_grad():
            at = at.requires_grad_(True)
            far = (at[:, :, None] - at[:, None]).square().sum(-1, keepdim=True)
            energy = self.net(far).sum()
            return -torch.autograd.grad(energy, at, create_graph=True)[0]


@wild
def force_field_double_backward() -> Wild:
    return Wild(Force(), rows(4, 3), rows(4, 3, seed=5), mse)


class Knn(nn.Module):
    """PointNet / DGCNN: neighbours by topk of distances, max over them."""

    def __init__(self) -> None:
        super().__init__()
        self.edge, self.out = mlp(6, 16, 16), nn.Linear(16, 4)

    def forward(self, p: Tensor) -> Tensor:
        near = torch.cdist(p, p).topk(4, largest=False).indices
        other = p[torch.arange(len(p))[:, None, None], near]
        x = torch.cat([other - p[:, :, None], p[:, :, None].expand_as(other)], -1)
        return self.out(self.edge(x).amax(2).amax(1))


@wild
def point_cloud_knn() -> Wild:
    return Wild(Knn(), rows(8, 3), whole(4, seed=5), F.cross_entropy)
