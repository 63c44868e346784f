"""Models of images, as people write them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.bench.wild_cases import Attend, Block, Wild, images, mlp, mse, noise, rows, whole, wild


def classify(model: nn.Module, size: int = 16, *, coupled: bool = False) -> Wild:
    return Wild(model, images(3, size), whole(5), F.cross_entropy, coupled=coupled)


def conv(a: int, b: int, norm: type[nn.Module] = nn.BatchNorm2d, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(a, b, 3, stride, 1, bias=False), norm(b), nn.ReLU())


class Residual(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(dim, dim, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(dim)
        self.conv2 = nn.Conv2d(dim, dim, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(dim)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x + self.bn2(self.conv2(F.silu(self.bn1(self.conv1(x))))))


@wild
def resnet_batchnorm() -> Wild:
    model = nn.Sequential(
        conv(3, 8), *(Residual(8) for _ in range(3)), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 5),
    )  # fmt: skip
    return classify(model, coupled=True)


@wild
def vgg_batchnorm1d_head() -> Wild:
    model = nn.Sequential(
        conv(3, 8), nn.MaxPool2d(2), conv(8, 8), nn.MaxPool2d(4), nn.Flatten(),
        nn.Linear(32, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 5),
    )  # fmt: skip
    return classify(model, coupled=True)


@wild
def frozen_batchnorm_backbone() -> Wild:
    trunk = nn.Sequential(conv(3, 8), Residual(8), Residual(8)).requires_grad_(False)

    class Tuned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.head = trunk, nn.Linear(8, 5)

        def train(self, mode: bool = True) -> Tuned:
            super().train(mode)
            self.trunk.eval()
            return self

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.trunk(x).mean((2, 3)))

    return classify(Tuned().train())


class Unet(nn.Module):
    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.d1, self.d2, self.mid = conv(3, 8, norm), conv(8, 16, norm), conv(16, 16, norm)
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.u1, self.out = conv(16, 8, norm), nn.Conv2d(8, 4, 1)
        self.u2 = conv(32, 16, norm)

    def forward(self, x: Tensor) -> Tensor:
        a = self.d1(x)
        b = self.d2(F.max_pool2d(a, 2))
        c = F.interpolate(self.mid(F.max_pool2d(b, 2)), scale_factor=2.0)
        return self.out(self.u1(torch.cat([self.up(self.u2(torch.cat([b, c], 1))), a], 1)))


@wild
def unet_groupnorm() -> Wild:
    model = Unet(lambda n: nn.GroupNorm(4, n))  # type: ignore[arg-type]
    return Wild(model, images(), whole(4, 16, 16), F.cross_entropy)


@wild
def unet_ignore_index() -> Wild:
    labels = whole(4, 16, 16)
    labels[::3, :12] = 255
    model = Unet(nn.InstanceNorm2d)
    return Wild(model, images(), labels, lambda o, t: F.cross_entropy(o, t, ignore_index=255))


class Fpn(nn.Module):
    """Feature pyramid, several outputs in a list."""

    def __init__(self) -> None:
        super().__init__()
        gn = lambda n: nn.GroupNorm(4, n)  # noqa: E731
        self.body = nn.ModuleList([conv(3, 8, gn, 2), conv(8, 16, gn, 2), conv(16, 24, gn, 2)])  # type: ignore[arg-type]
        self.side = nn.ModuleList(nn.Conv2d(n, 8, 1) for n in (8, 16, 24))
        self.smooth = nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x: Tensor) -> list[Tensor]:
        found = []
        for layer in self.body:
            x = layer(x)
            found.append(x)
        out: list[Tensor] = []
        for side, f in zip(reversed(self.side), reversed(found), strict=True):
            y = side(f)
            out.append(y if not out else y + F.interpolate(out[-1], size=y.shape[-2:]))
        return [self.smooth(y) for y in out]


@wild
def fpn() -> Wild:
    def loss(out: list[Tensor], t: Tensor) -> Tensor:
        parts = [F.mse_loss(o, F.adaptive_avg_pool2d(t, o.shape[-1])) for o in out]
        return torch.stack(parts).sum()

    return Wild(Fpn(), images(), images(4, 8), loss)


class Aspp(nn.Module):
    """DeepLab: dilated branches and image pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.branches = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=d, dilation=d) for d in (1, 2, 4))
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 8, 1))
        self.project = nn.Conv2d(32, 4, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.stem(x).relu()
        found = [b(h) for b in self.branches]
        found.append(self.pool(h).expand_as(found[0]))
        return {"out": self.project(torch.cat(found, 1)), "aux": h.mean((2, 3))}


@wild
def deeplab() -> Wild:
    def loss(out: dict[str, Tensor], t: Tensor) -> Tensor:
        return F.cross_entropy(out["out"], t) + 0.1 * out["aux"].square().mean()

    return Wild(Aspp(), images(), whole(4, 16, 16), loss)


class Vit(nn.Module):
    def __init__(self, *, distilled: bool = False, drop: float = 0.0) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, 4)
        self.cls = nn.Parameter(torch.zeros(1, 1, 16))
        self.pos = nn.Parameter(0.02 * torch.randn(1, 17, 16))
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 5)
        self.keep = 1 - drop

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.pos
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


@wild
def vit() -> Wild:
    return classify(Vit())


class Mae(nn.Module):
    """Masked autoencoder: keeps the patches of the smallest scores, puts the rest back."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.token = nn.Linear(48, 16), nn.Parameter(torch.zeros(1, 1, 16))
        self.encoder = nn.ModuleList(Block(16) for _ in range(2))
        self.decoder = nn.ModuleList(Block(16) for _ in range(2))
        self.out = nn.Linear(16, 48)

    def forward(self, x: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        p = x.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
        order = scores.argsort(1)
        back, keep = order.argsort(1), order[:, :8]
        h = self.embed(p).gather(1, keep[..., None].expand(-1, -1, 16))
        for block in self.encoder:
            h = block(h)
        h = torch.cat([h, self.token.expand(len(h), 8, -1)], 1)
        h = h.gather(1, back[..., None].expand(-1, -1, 16))
        for block in self.decoder:
            h = block(h)
        return self.out(h), p


@wild
def mae() -> Wild:
    scores = rows(16, seed=9)
    return Wild(Mae(), (images(), scores), rows(seed=8), lambda o, t: F.mse_loss(o[0], o[1]))


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, 4)
        self.tokens = nn.ModuleList(mlp(16, 32, 16) for _ in range(2))
        self.channels = nn.ModuleList(mlp(16, 32, 16) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(4))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        for i, (t, c) in enumerate(zip(self.tokens, self.channels, strict=True)):
            x = x + t(self.norms[2 * i](x).mT).mT
            x = x + c(self.norms[2 * i + 1](x))
        return self.head(x.mean(1))


@wild
def mlp_mixer() -> Wild:
    return classify(Mixer())


class ConvNext(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dw = nn.Conv2d(dim, dim, 7, padding=3, groups=dim)
        self.norm, self.ffn = nn.LayerNorm(dim), mlp(dim, 4 * dim, dim)
        self.gamma = nn.Parameter(1e-2 * torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        y = self.ffn(self.norm(self.dw(x).permute(0, 2, 3, 1)))
        return x + (self.gamma * y).permute(0, 3, 1, 2)


@wild
def convnext() -> Wild:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 2, 2), *(ConvNext(8) for _ in range(3)), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(8, 5),
    )  # fmt: skip
    return classify(model)


class Window(nn.Module):
    """Swin: attention in shifted windows with a table of relative positions."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.shift, self.heads = shift, 4
        self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)
        self.table = nn.Parameter(0.02 * torch.randn(49, 4))
        y, x = torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")
        at = torch.stack([y.flatten(), x.flatten()])
        apart = at[:, :, None] - at[:, None] + 3
        self.register_buffer("index", apart[0] * 7 + apart[1], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        x = torch.roll(x, (-self.shift, -self.shift), (1, 2))
        x = x.view(b, h // 4, 4, w // 4, 4, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, c)
        q, k, v = self.qkv(x).view(-1, 16, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        bias = self.table[self.index].permute(2, 0, 1)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None])
        o = self.proj(o.transpose(1, 2).reshape(-1, 16, c))
        o = o.view(b, h // 4, w // 4, 4, 4, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
        return torch.roll(o, (self.shift, self.shift), (1, 2))


class Swin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 2, 2)
        self.windows = nn.ModuleList(Window(s) for s in (0, 2))
        self.ffns = nn.ModuleList(mlp(16, 32, 16) for _ in range(2))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).permute(0, 2, 3, 1)
        for w, f in zip(self.windows, self.ffns, strict=True):
            x = x + w(x)
            x = x + f(x)
        return self.head(x.mean((1, 2)))


@wild
def swin() -> Wild:
    return classify(Swin())


class Detr(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Conv2d(3, 16, 4, 4)
        self.queries = nn.Embedding(6, 16)
        self.decoder = nn.ModuleList(Block(16) for _ in range(2))
        self.boxes, self.classes = mlp(16, 16, 4), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> dict[str, object]:
        memory = self.backbone(x).flatten(2).mT
        q = self.queries.weight.expand(len(x), -1, -1)
        aux = []
        for block in self.decoder:
            q = block(q, memory)
            aux.append({"boxes": self.boxes(q).sigmoid(), "logits": self.classes(q)})
        return {**aux[-1], "aux_outputs": aux[:-1]}


@wild
def detr() -> Wild:
    def loss(out: dict[str, object], t: Tensor) -> Tensor:
        total = torch.zeros(())
        for each in (out, *out["aux_outputs"]):  # type: ignore[misc]
            cost = torch.cdist(each["boxes"].detach(), t, p=1)
            order = cost.argmin(1)
            chosen = each["boxes"].gather(1, order[..., None].expand(-1, -1, 4))
            total = total + F.l1_loss(chosen, t) + each["logits"].square().mean()
        return total

    return Wild(Detr(), images(), rows(3, 4).sigmoid(), loss)


class Se(nn.Module):
    """Squeeze and excite, depthwise, hard swish."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dw = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)
        self.squeeze = nn.Sequential(nn.Conv2d(dim, 4, 1), nn.SiLU(), nn.Conv2d(4, dim, 1))

    def forward(self, x: Tensor) -> Tensor:
        h = F.hardswish(self.dw(x))
        return x + h * self.squeeze(h.mean((2, 3), keepdim=True)).sigmoid()


@wild
def efficientnet() -> Wild:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), Se(8), Se(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 5),
    )  # fmt: skip
    return classify(model)


@wild
def pixel_shuffle_super_resolution() -> Wild:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.PReLU(8), nn.Conv2d(8, 12, 3, padding=1),
        nn.PixelShuffle(2),
    )  # fmt: skip
    return Wild(model, images(3, 8), images(3, 16), F.l1_loss)


class Nerf(nn.Module):
    """Positional encoding, skip, volume rendering by cumprod."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = mlp(24, 32, 32), mlp(56, 32, 4)
        self.register_buffer("freq", 2.0 ** torch.arange(4), persistent=False)

    def forward(self, points: Tensor) -> Tensor:
        x = (points[..., None] * self.freq).flatten(-2)
        x = torch.cat([x.sin(), x.cos()], -1)
        raw = self.b(torch.cat([self.a(x).relu(), x], -1))
        alpha = 1 - torch.exp(-raw[..., 3].relu() * 0.1)
        left = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha], 1), 1)[:, :-1]
        return ((alpha * left)[..., None] * raw[..., :3].sigmoid()).sum(1)


@wild
def nerf() -> Wild:
    return Wild(Nerf(), rows(6, 3), rows(3, seed=5).sigmoid(), mse)


class Spatial(nn.Module):
    """Spatial transformer: a grid from a regression, sampled."""

    def __init__(self) -> None:
        super().__init__()
        self.find = nn.Sequential(nn.Flatten(), nn.Linear(768, 6))
        nn.init.zeros_(self.find[1].weight)
        self.find[1].bias.data = torch.tensor([1.0, 0, 0, 0, 1, 0])
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.Flatten(), nn.Linear(392, 5))

    def forward(self, x: Tensor) -> Tensor:
        grid = F.affine_grid(self.find(x).view(-1, 2, 3), list(x.shape), align_corners=False)
        return self.net(F.grid_sample(x, grid, align_corners=False))


@wild
def spatial_transformer() -> Wild:
    return classify(Spatial())


class Perceiver(nn.Module):
    """Latents attend to the input by weights that are shared among layers."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(noise(8, 16))
        self.embed, self.cross = nn.Linear(3, 16), Attend(16)
        self.blocks = nn.ModuleList(Block(16) for _ in range(2))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        data = self.embed(x.flatten(2).mT)
        h = self.latents.expand(len(x), -1, -1)
        for _ in range(2):
            h = h + self.cross(h, data)
            for block in self.blocks:
                h = block(h)
        return self.head(h.mean(1))


@wild
def perceiver_shared_blocks() -> Wild:
    return classify(Perceiver(), 8)
