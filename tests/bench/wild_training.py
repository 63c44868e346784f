"""Kinds of training: adversarial, reinforcement, diffusion, meta learning, learned criteria."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.bench.wild_cases import BATCH, Block, Env, Wild, images, mlp, mse, rows, whole, wild


class Gan(nn.Module):
    """Both networks in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.gen, self.disc = mlp(4, 16, 12), mlp(12, 16, 1, act=nn.SiLU)

    def forward(self, z: Tensor, real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        fake = self.gen(z)
        return self.disc(fake), self.disc(fake.detach()), self.disc(real)


def part_of(model: nn.Module, word: str) -> list[tuple[str, nn.Parameter]]:
    return [(n, p) for n, p in model.named_parameters() if word in n.split(".")]


@wild
def gan_one_module_two_optimizers() -> Wild:
    """Generator and discriminator step by optimizers of their own from one forward each."""

    def loop(made: Wild, env: Env) -> Mapping[str, nn.Module]:
        z, real = made.inputs
        model = env.spread(made.model, (z[:BATCH], real[:BATCH]))
        g, d = env.sgd(model, part_of(model, "gen")), env.sgd(model, part_of(model, "disc"))
        for (z, real), _ in env.batches(made.inputs, made.targets):
            _, fake, true = model(z, real)
            (F.softplus(fake).mean() + F.softplus(-true).mean()).backward()
            d.step()
            model.zero_grad()
            F.softplus(-model(z, real)[0]).mean().backward()
            g.step()
            model.zero_grad()
        return {"": model}

    return Wild(Gan(), (rows(4), rows(12, seed=5)), rows(seed=3), mse, loop)


@wild
def gan_two_models() -> Wild:
    """Generator and discriminator are parallelized each by itself."""

    def loop(made: Wild, env: Env) -> Mapping[str, nn.Module]:
        z, real = made.inputs
        assert isinstance(made.model, Gan)
        gen, disc = env.spread(made.model.gen, z[:BATCH]), env.spread(made.model.disc, real[:BATCH])
        g, d = env.sgd(gen), env.sgd(disc)
        for (z, real), _ in env.batches(made.inputs, made.targets):
            fake = gen(z)
            (F.softplus(disc(fake.detach())).mean() + F.softplus(-disc(real)).mean()).backward()
            d.step()
            d.zero_grad()
            F.softplus(-disc(fake)).mean().backward()
            g.step()
            g.zero_grad()
            d.zero_grad()
        return {"gen": gen, "disc": disc}

    return Wild(Gan(), (rows(4), rows(12, seed=5)), rows(seed=3), mse, loop)


@wild
def gan_frozen_in_turn() -> Wild:
    """The discriminator is frozen while the generator trains, and the other way round."""

    def loop(made: Wild, env: Env) -> Mapping[str, nn.Module]:
        z, real = made.inputs
        model = env.spread(made.model, (z[:BATCH], real[:BATCH]))
        g, d = env.sgd(model, part_of(model, "gen")), env.sgd(model, part_of(model, "disc"))
        for number, ((z, real), y) in enumerate(env.batches(made.inputs, made.targets)):
            for _, p in part_of(model, "gen"):
                p.requires_grad_(number % 2 == 0)
            for _, p in part_of(model, "disc"):
                p.requires_grad_(number % 2 == 1)
            optimizer = d if number % 2 else g

            def loss(o: Any, t: Tensor, number: int = number) -> Tensor:
                if number % 2:
                    return F.softplus(o[1]).mean() + F.softplus(-o[2]).mean()
                return F.softplus(-o[0]).mean()

            env.step(model, optimizer, (z, real), y, loss)
        return {"": model}

    return Wild(Gan(), (rows(4), rows(12, seed=5)), rows(seed=3), mse, loop)


@wild
def gan_gradient_penalty() -> Wild:
    """WGAN-GP: the norm of a gradient with respect to the input is in the loss."""

    def loop(made: Wild, env: Env) -> Mapping[str, nn.Module]:
        real = made.inputs
        model = env.spread(made.model, real[:BATCH])
        sgd = env.sgd(model)
        for real, _ in env.batches(made.inputs, made.targets):
            x = real.clone().requires_grad_(True)
            score = model(x)
            slope = torch.autograd.grad(score.sum(), x, create_graph=True)[0]
            (score.mean() + (slope.norm(dim=1) - 1).square().mean()).backward()
            sgd.step()
            sgd.zero_grad()
        return {"": model}

    return Wild(mlp(12, 16, 16, 1, act=nn.Tanh), rows(12), rows(seed=3), mse, loop)


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.actor, self.critic = (
            mlp(8, 16, 16, act=nn.Tanh),
            nn.Linear(16, 4),
            nn.Linear(16, 1),
        )
        self.log_std = nn.Parameter(torch.zeros(4))

    def forward(self, obs: Tensor) -> dict[str, Tensor]:
        h = self.trunk(obs).tanh()
        return {"mean": self.actor(h), "std": self.log_std.exp(), "value": self.critic(h)[:, 0]}


@wild
def ppo_returns_std_of_parameter() -> Wild:
    def loss(o: dict[str, Tensor], t: Any) -> Tensor:
        dist = torch.distributions.Normal(o["mean"], o["std"])
        ratio = (dist.log_prob(t["action"]).sum(-1) - t["old"]).exp()
        clipped = ratio.clamp(0.8, 1.2) * t["advantage"]
        policy = -torch.minimum(ratio * t["advantage"], clipped).mean()
        return policy + 0.5 * F.mse_loss(o["value"], t["return"]) - 0.01 * dist.entropy().mean()

    targets = {
        "action": rows(4, seed=4),
        "old": rows(seed=5) - 6,
        "advantage": rows(seed=6),
        "return": rows(seed=7),
    }
    return Wild(ActorCritic(), rows(8), targets, loss)


@wild
def ppo_normalised_advantages() -> Wild:
    """Advantages are normalised over the batch inside of the loss."""
    made = ppo_returns_std_of_parameter()

    def loss(o: dict[str, Tensor], t: Any) -> Tensor:
        a = (t["advantage"] - t["advantage"].mean()) / (t["advantage"].std() + 1e-6)
        logp = torch.distributions.Normal(o["mean"], o["std"]).log_prob(t["action"]).sum(-1)
        return -(logp * a).mean() * 0.1 + F.mse_loss(o["value"], t["return"])

    return made._replace(loss=loss)


class Q(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = mlp(8, 16, 4), mlp(8, 16, 4).requires_grad_(False)
        self.target.load_state_dict(self.online.state_dict())

    def forward(self, obs: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            wanted = self.target(after).amax(-1)
        return self.online(obs), wanted


@wild
def dqn_target_copied_in_loop() -> Wild:
    """The target network takes the weights of the online one every second step."""

    def loss(o: tuple[Tensor, Tensor], t: Any) -> Tensor:
        q = o[0].gather(1, t["action"][:, None])[:, 0]
        return F.smooth_l1_loss(q, t["reward"] + 0.9 * o[1])

    def loop(made: Wild, env: Env) -> Mapping[str, nn.Module]:
        obs, after = made.inputs
        model = env.spread(made.model, (obs[:BATCH], after[:BATCH]))
        sgd = env.sgd(model, [(n, p) for n, p in model.named_parameters() if p.requires_grad])
        for number, (x, y) in enumerate(env.batches(made.inputs, made.targets)):
            env.step(model, sgd, x, y, made.loss)
            if number % 2 == 0:
                inner: Any = getattr(model, "module", model)
                inner.target.load_state_dict(inner.online.state_dict())
        return {"": model}

    targets = {"action": whole(4), "reward": rows(seed=4)}
    return Wild(Q(), (rows(8), rows(8, seed=6)), targets, loss, loop)


class Denoiser(nn.Module):
    """A diffusion model: time embedding by sin and cos, noise schedule in buffers."""

    def __init__(self) -> None:
        super().__init__()
        beta = torch.linspace(1e-3, 0.2, 10)
        self.register_buffer("alpha", torch.cumprod(1 - beta, 0))
        self.time, self.inp = mlp(8, 16, 16), nn.Conv2d(3, 16, 3, padding=1)
        self.mid = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(2))
        self.norms = nn.ModuleList(nn.GroupNorm(4, 16) for _ in range(2))
        self.out = nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        a = self.alpha[t][:, None, None, None]
        angle = t[:, None] * (0.5 ** torch.arange(4))
        e = self.time(torch.cat([angle.sin(), angle.cos()], -1))[:, :, None, None]
        h = self.inp(a.sqrt() * x + (1 - a).sqrt() * noise)
        for conv, norm in zip(self.mid, self.norms, strict=True):
            h = h + conv(F.silu(norm(h) + e))
        return self.out(h)


@wild
def diffusion_with_schedule() -> Wild:
    noise = rows(3, 8, 8, seed=7)
    return Wild(Denoiser(), (images(3, 8), whole(10), noise), noise, mse)


class FlowMatch(nn.Module):
    """A DiT with adaptive norms that start at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Linear(6, 16), nn.Linear(16, 6)
        self.time = mlp(1, 16, 16)
        self.blocks = nn.ModuleList(Block(16) for _ in range(2))
        self.mods = nn.ModuleList(nn.Linear(16, 32) for _ in range(2))
        for m in self.mods:
            nn.init.zeros_(m.weight)
            nn.init.zeros_(m.bias)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h, c = self.embed(x), F.silu(self.time(t[:, None]))
        for block, mod in zip(self.blocks, self.mods, strict=True):
            shift, gate = mod(c)[:, None].chunk(2, -1)
            h = h + (1 + gate) * (block(h + shift) - h)
        return self.out(h)


@wild
def dit_flow_matching() -> Wild:
    return Wild(FlowMatch(), (rows(8, 6), rows(seed=4).sigmoid()), rows(8, 6, seed=5), mse)


class ArcFace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 8))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        cos = F.linear(F.normalize(x), F.normalize(self.weight))
        hot = F.one_hot(t, 5).to(x.dtype)
        return F.cross_entropy(8 * (cos - 0.2 * hot), t)


@wild
def criterion_arcface_by_itself() -> Wild:
    """A criterion with parameters: one optimizer holds those of both."""

    def loop(made: Wild, env: Env) -> Mapping[str, nn.Module]:
        criterion = made.loss
        assert isinstance(criterion, nn.Module)
        model = env.spread(made.model, made.inputs[:BATCH])
        sgd = torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.05)
        for x, y in env.batches(made.inputs, made.targets):
            env.step(model, sgd, x, y, criterion)
        return {"": model}

    return Wild(mlp(12, 16, 8), rows(12), whole(5), ArcFace(), loop)


class WithCriterion(nn.Module):
    """The criterion inside of what is parallelized."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.criterion = mlp(12, 16, 8), ArcFace()

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.criterion(self.net(x), t)


@wild
def criterion_inside_the_model() -> Wild:
    return Wild(WithCriterion(), (rows(12), whole(5)), rows(seed=3), lambda o, t: o)


class CenterLoss(nn.Module):
    """Features and centres: the criterion is a child that the loss calls."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = mlp(12, 16, 8), nn.Linear(8, 5)
        self.centers = nn.Parameter(torch.randn(5, 8))

    def forward(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        z = self.net(x)
        return self.head(z), (z - self.centers[t]).square().sum(-1)


@wild
def center_loss() -> Wild:
    y = whole(5)
    return Wild(
        CenterLoss(), (rows(12), y), y, lambda o, t: F.cross_entropy(o[0], t) + 0.1 * o[1].mean()
    )


class Crf(nn.Module):
    """A linear chain: transitions are parameters, the forward gives its likelihood."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.emit = nn.Embedding(20, 16), nn.Linear(16, 4)
        self.trans = nn.Parameter(torch.randn(4, 4) * 0.1)

    def forward(self, ids: Tensor, tags: Tensor) -> Tensor:
        e = self.emit(self.embed(ids))
        score = e.gather(2, tags[..., None])[..., 0].sum(1) + self.trans[
            tags[:, :-1], tags[:, 1:]
        ].sum(1)
        a = e[:, 0]
        for t in range(1, e.shape[1]):
            a = (a[:, :, None] + self.trans).logsumexp(1) + e[:, t]
        return a.logsumexp(1) - score


@wild
def crf() -> Wild:
    return Wild(Crf(), (whole(20, 6), whole(4, 6, seed=4)), rows(seed=3), lambda o, t: o.mean())


@wild
def maml_inner_step() -> Wild:
    """A step of the inner loop by functional_call, inside of the forward."""

    class Maml(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(6, 8, 1, act=nn.Tanh)

        def forward(self, x: Tensor, y: Tensor, query: Tensor) -> Tensor:
            with torch.enable_grad():
                params = dict(self.net.named_parameters())
                inner = F.mse_loss(self.net(x)[:, 0], y)
                grads = torch.autograd.grad(inner, list(params.values()), create_graph=True)
                fast = {n: p - 0.1 * g for (n, p), g in zip(params.items(), grads, strict=True)}
                return torch.func.functional_call(self.net, fast, (query,))[:, 0]

    return Wild(Maml(), (rows(6), rows(seed=4), rows(6, seed=5)), rows(seed=6), mse)


@wild
def mean_teacher_by_loop() -> Wild:
    """A teacher beside the student in one module, averaged between the steps."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = mlp(12, 16, 5)
            self.teacher = copy.deepcopy(self.student).requires_grad_(False)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.student(x), self.teacher(x + 0.1)

    def loop(made: Wild, env: Env) -> Mapping[str, nn.Module]:
        model = env.spread(made.model, made.inputs[:BATCH])
        sgd = env.sgd(model, [(n, p) for n, p in model.named_parameters() if p.requires_grad])
        for x, y in env.batches(made.inputs, made.targets):
            env.step(model, sgd, x, y, made.loss)
            inner: Any = getattr(model, "module", model)
            with torch.no_grad():
                for t, s in zip(
                    inner.teacher.parameters(), inner.student.parameters(), strict=True
                ):
                    t.lerp_(s, 0.3)
        return {"": model}

    return Wild(
        Both(),
        rows(12),
        whole(5),
        lambda o, t: F.cross_entropy(o[0], t) + F.mse_loss(o[0], o[1]),
        loop,
    )


@wild
def sam_two_passes() -> Wild:
    """Sharpness-aware: weights move up, a second gradient is taken there, and back."""

    def loop(made: Wild, env: Env) -> Mapping[str, nn.Module]:
        model = env.spread(made.model, made.inputs[:BATCH])
        sgd = env.sgd(model)
        for x, y in env.batches(made.inputs, made.targets):
            made.loss(model(x), y).backward()
            moved = []
            with torch.no_grad():
                for p in model.parameters():
                    assert p.grad is not None
                    step = 0.1 * p.grad
                    p.add_(step)
                    moved.append(step)
            sgd.zero_grad()
            made.loss(model(x), y).backward()
            with torch.no_grad():
                for p, step in zip(model.parameters(), moved, strict=True):
                    p.sub_(step)
            sgd.step()
            sgd.zero_grad()
        return {"": model}

    return Wild(mlp(12, 16, 5), rows(12), whole(5), F.cross_entropy, loop)


@wild
def focal_loss_batch_weighted() -> Wild:
    """Classes are weighted by how often the batch has them."""

    def loss(o: Tensor, t: Tensor) -> Tensor:
        count = torch.bincount(t, minlength=5).to(o.dtype)
        return F.cross_entropy(o, t, weight=1 / (1 + count))

    return Wild(mlp(12, 16, 5), rows(12), whole(5), loss)


@wild
def class_weights_in_loss() -> Wild:
    """`weight=` of cross_entropy divides by the weights of the batch."""
    weight = torch.tensor([0.2, 1.0, 3.0, 0.5, 2.0])
    return Wild(
        mlp(12, 16, 5), rows(12), whole(5), lambda o, t: F.cross_entropy(o, t, weight=weight)
    )


@wild
def dice_loss() -> Wild:
    """Intersection over union of the whole batch."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 1, 3, padding=1))

    def loss(o: Tensor, t: Tensor) -> Tensor:
        p = o.sigmoid()
        return 1 - 2 * (p * t).sum() / (p.sum() + t.sum() + 1)

    return Wild(model, images(), (images(1, 16) > 0).to(torch.get_default_dtype()), loss)


@wild
def rmse_loss() -> Wild:
    """The root of a mean is not the mean of roots."""
    return Wild(mlp(12, 16, 3), rows(12), rows(3, seed=4), lambda o, t: F.mse_loss(o, t).sqrt())


@wild
def early_stopped_hard_examples() -> Wild:
    """Online hard example mining: the largest half of the losses of the batch."""

    def loss(o: Tensor, t: Tensor) -> Tensor:
        each = F.cross_entropy(o, t, reduction="none")
        return each.topk(len(each) // 2).values.mean()

    return Wild(mlp(12, 16, 5), rows(12), whole(5), loss)
