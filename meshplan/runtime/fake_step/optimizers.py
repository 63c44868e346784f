"""The optimizers whose step can be traced, by their name in a plan: those of torch, and Lion."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import nn

from meshplan.layout.optimizers import called

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
_LR: Final = 1e-3


class MuonBesideAdamW(torch.optim.Optimizer):
    """Muon for matrices and AdamW for all other parameters, in one optimizer.

    `torch.optim.Muon` takes matrices only (torch 2.13, optim/_muon.py).
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float = _LR) -> None:
        given = list(params)
        super().__init__(given, {"lr": lr})
        matrices = [param for param in given if param.ndim == 2]
        others = [param for param in given if param.ndim != 2]
        self._parts: list[torch.optim.Optimizer] = []
        if matrices:
            self._parts.append(torch.optim.Muon(matrices, lr=lr))
        if others:
            self._parts.append(torch.optim.AdamW(others, lr=lr))
        for part in self._parts:
            part.state = self.state

    def step(self, closure: Any = None) -> None:
        """Take one step of Muon and one of AdamW."""
        for part in self._parts:
            part.step()


class Lion(torch.optim.Optimizer):
    """The Lion optimizer: updates by the sign of a mix of momentum and gradient.

    Source: Chen et al. 2023, algorithm 2. The operations are those of the authors' lion_pytorch.py,
    so that a step allocates the same temporaries.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = _LR,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Take one step."""
        for group in self.param_groups:
            (now, later), lr = group["betas"], group["lr"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                param.mul_(1 - lr * group["weight_decay"])
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param)
                update = state["exp_avg"] * now + param.grad * (1 - now)
                param.add_(update.sign_(), alpha=-lr)
                state["exp_avg"].mul_(later).add_(param.grad, alpha=1 - later)


def _of(make: Any, **options: Any) -> Make:
    return partial(make, lr=_LR, **options)


OPTIMIZERS: Final[Mapping[str, tuple[Make, str]]] = MappingProxyType(
    {
        "adamw": (_of(torch.optim.AdamW), "torch's AdamW with its defaults"),
        "adam": (_of(torch.optim.Adam), "torch's Adam with its defaults"),
        "adamw_fused": (_of(torch.optim.AdamW, fused=True), "torch's AdamW with fused: true"),
        "adam_fused": (_of(torch.optim.Adam, fused=True), "torch's Adam with fused: true"),
        "sgd": (_of(torch.optim.SGD), "torch's SGD with its defaults"),
        "sgd_momentum": (_of(torch.optim.SGD, momentum=0.9), "torch's SGD with momentum 0.9"),
        "adagrad": (_of(torch.optim.Adagrad), "torch's Adagrad with its defaults"),
        "rmsprop": (_of(torch.optim.RMSprop), "torch's RMSprop with its defaults"),
        "adafactor": (_of(torch.optim.Adafactor), "torch's Adafactor with its defaults"),
        "muon": (MuonBesideAdamW, "torch's Muon for matrices, AdamW for all others"),
        "lion": (_of(Lion), called("lion")),
    }
)
"""(function that makes the optimizer of a list of parameters, description) by name in a plan."""
