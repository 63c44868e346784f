"""Contrastive learning, distillation, teachers, averages of models."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.bench.wild_cases import Attend, Block, Wild, images, mlp, mse, rows, whole, wild


class Simclr(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.project = mlp(12, 16, 16), mlp(16, 16, 8)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        f = lambda x: F.normalize(self.project(self.encoder(x).relu()), dim=1)  # noqa: E731
        return f(a), f(b)


def nt_xent(o: tuple[Tensor, Tensor], t: Tensor) -> Tensor:
    z = torch.cat(o)
    n = len(z)
    scores = (z @ z.T / 0.5).masked_fill(torch.eye(n, dtype=torch.bool), -1e9)
    return F.cross_entropy(scores, (torch.arange(n) + n // 2) % n)


def views(model: nn.Module, loss: object = nt_xent) -> Wild:
    return Wild(model, (rows(12), rows(12, seed=6)), rows(seed=4), loss)  # type: ignore[arg-type]


@wild
def simclr_loss_outside() -> Wild:
    return views(Simclr())


class SimclrInside(Simclr):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:  # type: ignore[override]
        return nt_xent(super().forward(a, b), a)


@wild
def simclr_loss_inside() -> Wild:
    return views(SimclrInside(), lambda o, t: o)


class Clip(nn.Module):
    """Two towers, a learned temperature, logits of all pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.Flatten(), nn.Linear(128, 8))
        self.embed, self.block = nn.Embedding(20, 8), Block(8)
        self.text_projection = nn.Parameter(torch.randn(8, 8) * 0.3)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        i = F.normalize(self.image(image), dim=-1)
        t = F.normalize(self.block(self.embed(text)).mean(1) @ self.text_projection, dim=-1)
        return self.logit_scale.exp() * i @ t.T


@wild
def clip_pairs_inside() -> Wild:
    def loss(o: Tensor, t: Tensor) -> Tensor:
        at = torch.arange(len(o))
        return (F.cross_entropy(o, at) + F.cross_entropy(o.T, at)) / 2

    return Wild(Clip(), {"image": images(), "text": whole(20, 6)}, rows(seed=4), loss)


class ClipFeatures(Clip):
    """Returns features and the scale, which is a parameter."""

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        i = F.normalize(self.image(image), dim=-1)
        t = F.normalize(self.block(self.embed(text)).mean(1) @ self.text_projection, dim=-1)
        return i, t, self.logit_scale


@wild
def clip_returns_parameter() -> Wild:
    def loss(o: tuple[Tensor, Tensor, Tensor], t: Tensor) -> Tensor:
        return F.mse_loss(o[2].exp() / 14 * (o[0] * o[1]).sum(-1), t)

    return Wild(ClipFeatures(), {"image": images(), "text": whole(20, 6)}, rows(seed=4), loss)


@wild
def siglip_bias_parameter() -> Wild:
    """Pairs by sigmoid, the scale and bias live in the criterion's arguments."""

    def loss(o: tuple[Tensor, Tensor, Tensor], t: Tensor) -> Tensor:
        logits = o[0] @ o[1].T * o[2].exp()
        return -F.logsigmoid(logits * (2 * torch.eye(len(t)) - 1)).sum() / len(t)

    return Wild(ClipFeatures(), {"image": images(), "text": whole(20, 6)}, rows(seed=4), loss)


class Vicreg(Simclr):
    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return self.project(self.encoder(a)), self.project(self.encoder(b))


@wild
def vicreg_covariance_loss() -> Wild:
    def loss(o: tuple[Tensor, Tensor], t: Tensor) -> Tensor:
        total = F.mse_loss(*o)
        for z in o:
            c = (z - z.mean(0)).T @ (z - z.mean(0)) / (len(z) - 1)
            off = c - torch.diag(c.diag())
            total = total + F.relu(1 - (z.var(0) + 1e-4).sqrt()).mean() + off.square().sum() / 8
        return total

    return views(Vicreg(), loss)


class SimSiam(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 8)
        )
        self.predictor = mlp(8, 8, 8)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        x, y = self.encoder(a), self.encoder(b)
        p, q = self.predictor(x), self.predictor(y)
        return -(F.cosine_similarity(p, y.detach()) + F.cosine_similarity(q, x.detach())) / 2


@wild
def simsiam_batchnorm() -> Wild:
    return views(SimSiam(), lambda o, t: o.mean())._replace(coupled=True)


class Triplet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(12, 16, 8)

    def forward(self, a: Tensor, p: Tensor, n: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.net(x) for x in (a, p, n))


@wild
def triplet_three_calls() -> Wild:
    given = (rows(12), rows(12, seed=6), rows(12, seed=7))
    return Wild(Triplet(), given, rows(seed=4), lambda o, t: F.triplet_margin_loss(*o))


class Distilled(nn.Module):
    """A student beside a frozen teacher in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(
            nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 5)
        )
        self.teacher.requires_grad_(False).eval()
        self.student = mlp(12, 16, 5)

    def train(self, mode: bool = True) -> Distilled:
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            wanted = self.teacher(x)
        return self.student(x), wanted


def distil(o: tuple[Tensor, Tensor], t: Tensor) -> Tensor:
    kl = F.kl_div(o[0].log_softmax(-1), o[1].softmax(-1), reduction="batchmean")
    return F.cross_entropy(o[0], t) + kl


@wild
def distillation_frozen_teacher() -> Wild:
    return Wild(Distilled().train(), rows(12), whole(5), distil)


class HiddenTeacher(nn.Module):
    """A teacher hidden in a list, so that it is no child of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.student = mlp(12, 16, 5)
        self._teacher = [mlp(12, 32, 5).requires_grad_(False)]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.student(x), self._teacher[0](x)


@wild
def distillation_hidden_teacher() -> Wild:
    return Wild(HiddenTeacher(), rows(12), whole(5), distil)


class FeatureHooks(nn.Module):
    """Features are taken by forward hooks that the model registers on itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 5)
        )
        self.seen: dict[int, Tensor] = {}
        for i in (1, 3):
            self.net[i].register_forward_hook(lambda m, a, out, i=i: self.seen.update({i: out}))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.seen.clear()
        y = self.net(x)
        return y, torch.cat([self.seen[1], self.seen[3]], 1)


@wild
def features_by_hooks() -> Wild:
    return Wild(
        FeatureHooks(),
        rows(12),
        whole(5),
        lambda o, t: F.cross_entropy(o[0], t) + o[1].square().mean(),
    )


class Perceptual(nn.Module):
    """A frozen feature network whose gradients pass through."""

    def __init__(self) -> None:
        super().__init__()
        self.gen = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 3, 3, padding=1)
        )
        self.vgg = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 8, 3)).requires_grad_(
            False
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.vgg(self.gen(x)) - self.vgg(y)).square().flatten(1).mean(1)


@wild
def perceptual_loss_inside() -> Wild:
    return Wild(
        Perceptual(), (images(3, 8), images(3, 8).flip(0)), rows(seed=4), lambda o, t: o.mean()
    )


class Jepa(nn.Module):
    """A target encoder that is a deep copy, predicted positions by gather."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 16)
        self.context = nn.ModuleList(Block(16) for _ in range(2))
        self.target = copy.deepcopy(self.context).requires_grad_(False)
        self.predict, self.token = Attend(16), nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        h = t = self.embed(x)
        with torch.no_grad():
            for block in self.target:
                t = block(t)
        h = h[:, :5]
        for block in self.context:
            h = block(h)
        p = self.predict(self.token.expand(len(x), 3, -1), h)
        return (p - t[:, 5:]).square().mean((1, 2))


@wild
def jepa() -> Wild:
    return Wild(Jepa(), rows(8, 6), rows(seed=4), lambda o, t: o.mean())


class Prototypes(nn.Module):
    """SwAV: assignments by Sinkhorn over the batch, without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.prototypes = mlp(12, 16, 8), nn.Linear(8, 6, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.prototypes(F.normalize(self.net(x), dim=1))
        with torch.no_grad():
            q = (scores / 0.5).exp()
            for _ in range(3):
                q = q / q.sum(0, keepdim=True)
                q = q / q.sum(1, keepdim=True)
        return scores, q


@wild
def swav_sinkhorn() -> Wild:
    return Wild(
        Prototypes(),
        rows(12),
        rows(seed=4),
        lambda o, t: -(o[1] * o[0].log_softmax(1)).sum(1).mean(),
    )


@wild
def siamese_shared_module() -> Wild:
    class Siamese(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            net = mlp(12, 16, 8)
            self.left, self.right, self.out = net, net, nn.Linear(8, 1)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.out((self.left(a) - self.right(b)).abs()).squeeze(-1)

    return Wild(Siamese(), (rows(12), rows(12, seed=6)), rows(seed=4), mse)
