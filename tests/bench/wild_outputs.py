"""Outputs and inputs in other forms than one tensor."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.bench.wild_cases import Block, Wild, ce, mlp, mse, rows, whole, wild


@dataclass
class Answer:
    logits: Tensor
    hidden: list[Tensor]
    name: str = "answer"


class AsDataclass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(mlp(12, 16, 12) for _ in range(2))
        self.out = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Any:
        hidden = []
        for block in self.blocks:
            x = x + block(x)
            hidden.append(x)
        return Answer(self.out(x), hidden)


@wild
def output_dataclass() -> Wild:
    return Wild(
        AsDataclass(),
        rows(12),
        whole(5),
        lambda o, t: F.cross_entropy(o.logits, t) + o.hidden[0].square().mean(),
    )


class Pair(NamedTuple):
    mean: Tensor
    logvar: Tensor


class AsNamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.mean, self.logvar = mlp(12, 16, 16), nn.Linear(16, 3), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Pair:
        h = self.trunk(x)
        return Pair(self.mean(h), self.logvar(h))


@wild
def output_namedtuple() -> Wild:
    return Wild(
        AsNamed(),
        rows(12),
        rows(3, seed=4),
        lambda o, t: F.gaussian_nll_loss(o.mean, t, o.logvar.exp()),
    )


class Keywords(nn.Module):
    """Keyword arguments only, one of them nested."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(12, 16), nn.Linear(6, 16), nn.Linear(16, 5)

    def forward(
        self, *, x: Tensor, extra: dict[str, Any], scale: float = 1.0
    ) -> OrderedDict[str, Tensor]:
        h = self.a(x) + self.b(extra["more"][0]) * extra["weight"][:, None] * scale
        return OrderedDict(logits=self.out(h.tanh()), hidden=h)


@wild
def input_keywords_nested() -> Wild:
    given = {
        "x": rows(12),
        "extra": {"more": [rows(6, seed=3)], "weight": rows(seed=4)},
        "scale": 0.5,
    }
    return Wild(Keywords(), given, whole(5), lambda o, t: F.cross_entropy(o["logits"], t))


class Multitask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = mlp(12, 16, 16)
        self.heads = nn.ModuleDict({"age": nn.Linear(16, 1), "kind": nn.Linear(16, 5)})
        self.log_vars = nn.ParameterDict({"age": torch.zeros(()), "kind": torch.zeros(())})

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = self.trunk(x)
        return {"tasks": {n: f(h) for n, f in self.heads.items()}, "log_vars": dict(self.log_vars)}


@wild
def multitask_returns_parameters() -> Wild:
    """Uncertainty weights are parameters that leave the model in its output."""

    def loss(o: Any, t: Any) -> Tensor:
        age = F.mse_loss(o["tasks"]["age"][:, 0], t["age"])
        kind = F.cross_entropy(o["tasks"]["kind"], t["kind"])
        v = o["log_vars"]
        return age * (-v["age"]).exp() + v["age"] + kind * (-v["kind"]).exp() + v["kind"]

    return Wild(Multitask(), rows(12), {"age": rows(seed=4), "kind": whole(5)}, loss)


@wild
def input_none_and_flag() -> Wild:
    class Flagged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.out = Block(16), nn.Linear(16, 5)

        def forward(
            self, x: Tensor, mask: Tensor | None = None, return_hidden: bool = False
        ) -> Any:
            h = self.block(x, mask=mask)
            y = self.out(h.mean(1))
            return (y, h) if return_hidden else y

    given = {"x": rows(8, 16), "mask": None, "return_hidden": True}
    return Wild(Flagged(), given, whole(5), lambda o, t: F.cross_entropy(o[0], t))


@wild
def input_list_of_tensors() -> Wild:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nets, self.out = nn.ModuleList(nn.Linear(4, 8) for _ in range(3)), nn.Linear(8, 2)

        def forward(self, xs: list[Tensor]) -> Tensor:
            return self.out(sum(n(x) for n, x in zip(self.nets, xs, strict=True)).tanh())

    return Wild(Listed(), {"xs": [rows(4, seed=s) for s in range(3)]}, rows(2, seed=7), mse)


class Vae(nn.Module):
    """Loss terms as attributes of the module, read after the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = mlp(12, 16, 8), mlp(4, 16, 12)
        self.kl: Tensor = torch.zeros(())

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean, logvar = self.encode(x).chunk(2, -1)
        self.kl = -0.5 * (1 + logvar - mean.square() - logvar.exp()).sum(-1).mean()
        return self.decode(mean + noise * (logvar / 2).exp()), self.kl


@wild
def vae_scalar_output() -> Wild:
    x = rows(12)
    return Wild(Vae(), (x, rows(4, seed=5)), x, lambda o, t: F.mse_loss(o[0], t) + 0.1 * o[1])


class AuxLoss(nn.Module):
    """Balance of experts over the whole batch, added to the output as a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gate = nn.Embedding(20, 16), nn.Linear(16, 4)
        self.experts, self.out = nn.ModuleList(mlp(16, 16, 16) for _ in range(4)), nn.Linear(16, 20)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(ids)
        p = self.gate(x).softmax(-1)
        top = p.argmax(-1)
        share = F.one_hot(top, 4).to(p.dtype).mean((0, 1))
        aux = 4 * (share * p.mean((0, 1))).sum()
        y = sum(e(x) * (p[..., i] * (top == i))[..., None] for i, e in enumerate(self.experts))
        return self.out(x + y), aux


@wild
def moe_balance_loss() -> Wild:
    return Wild(
        AuxLoss(), whole(20, 8), whole(20, 8, seed=4), lambda o, t: ce(o[0], t) + 0.1 * o[1]
    )


@wild
def output_reshaped_to_batch_of_tokens() -> Wild:
    """Samples and tokens are one dim in the output, and in the targets."""

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.block, self.out = nn.Embedding(20, 16), Block(16), nn.Linear(16, 20)

        def forward(self, ids: Tensor) -> Tensor:
            return self.out(self.block(self.embed(ids))).view(-1, 20)

    return Wild(
        Flat(), whole(20, 8), whole(20, 8, seed=4), lambda o, t: F.cross_entropy(o, t.flatten())
    )


@wild
def time_first_output() -> Wild:
    """The batch is dim 1 of what the model computes with and returns."""

    class TimeFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.rnn, self.out = nn.Embedding(20, 12), nn.GRU(12, 16), nn.Linear(16, 20)

        def forward(self, ids: Tensor) -> Tensor:
            return self.out(self.rnn(self.embed(ids).transpose(0, 1))[0])

    return Wild(
        TimeFirst(),
        whole(20, 8),
        whole(20, 8, seed=4),
        lambda o, t: F.cross_entropy(o.flatten(0, 1), t.T.flatten()),
    )


@wild
def output_list_of_unequal() -> Wild:
    """Mean over a list of losses that the model makes per sample."""

    class PerToken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(20, 16), nn.Linear(16, 20)

        def forward(self, ids: Tensor, lengths: Tensor) -> list[Tensor]:
            y = self.out(self.embed(ids))
            return [row[: int(n)] for row, n in zip(y, lengths, strict=True)]

    def loss(o: list[Tensor], t: Tensor) -> Tensor:
        return torch.stack(
            [F.cross_entropy(a, b[: len(a)]) for a, b in zip(o, t, strict=True)]
        ).mean()

    return Wild(PerToken(), (whole(20, 8), whole(7, seed=3) + 1), whole(20, 8, seed=4), loss)
