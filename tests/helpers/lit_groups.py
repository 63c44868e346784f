"""LightningModules whose optimizers have groups of parameters by the modules of their network.

Import it in a job only: it imports Lightning.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import meshplan
from meshplan.interop.lightning import MeshplanStrategy
from tests.helpers.lit import launched

PLAN: Final[Mapping[str, Any]] = {
    "version": 1, "input": {"shape": [2, 8], "dtype": "float64"},
    "mesh": {"pp": 2, "dp_shard": 2},
    "pipeline": {"microbatches": 4, "schedule": "ZBVZeroBubble"},  # Ends where it begins.
}  # fmt: skip
ROWS: Final = 16
PER_STEP: Final = 8


class Scaled(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.register_buffer("factor", torch.full((), 1.0 + number))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * self.factor)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8, bias=False)
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), Scaled(n)) for n in range(2)]
        )
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("offset", torch.full((8,), 0.25))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x + self.offset)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def by_modules(module: Any, network: Any) -> Any:
    """Weights of linear layers decay, as minGPT's do."""
    decaying, rest = set(), set()
    for each in module.modules():
        for name, parameter in each.named_parameters(recurse=False):
            is_decaying = isinstance(each, nn.Linear) and name == "weight"
            (decaying if is_decaying else rest).add(parameter)
    groups = [{"params": list(decaying), "weight_decay": 0.2}, {"params": list(rest)}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def by_layers(module: Any, network: Any) -> Any:
    """Later layers learn faster, each by its own schedule."""
    groups = [{"params": network.embed.parameters(), "lr": 0.01}]
    groups += [
        {"params": each.parameters(), "lr": 0.05 * number}
        for number, each in enumerate(network.layers, 1)
    ]
    sgd = torch.optim.SGD(groups, lr=0.1)
    lambdas = [lambda step, number=number: 0.9 ** (number * step) for number in range(3)]
    scheduler = torch.optim.lr_scheduler.LambdaLR(sgd, lambdas)
    return {"optimizer": sgd, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def by_names(module: Any, network: Any) -> Any:
    names = [name for name, _ in module.named_parameters() if "layers" in name]
    own = [module.get_parameter(name) for name in names]
    rest = [each for each in module.parameters() if all(each is not one for one in own)]
    return torch.optim.SGD([{"params": own, "lr": 0.2}, {"params": rest}], lr=0.1)


def early_state(module: Any, network: Any) -> Any:
    """Adagrad has its state from the beginning, with a value that is not zero."""
    groups = [{"params": each.parameters()} for each in (network.layers, network.embed)]
    return torch.optim.Adagrad(groups, lr=0.05, initial_accumulator_value=0.1)


def freezing(module: Any, network: Any) -> Any:
    network.layers[0].requires_grad_(False)
    return torch.optim.SGD(module.parameters(), lr=0.1)


class Remembering(torch.optim.SGD):
    """Keeps the parameters that it is made of, too."""

    def __init__(self, parameters: Any, lr: float) -> None:
        self.own = list(parameters)
        super().__init__(self.own, lr=lr)


def remembering(module: Any, network: Any) -> Any:
    return Remembering(module.parameters(), lr=0.1)


CASES: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    each.__name__: each for each in (by_modules, by_layers, by_names, early_state, freezing)
}


class Outer(L.LightningModule):
    """Has a network, or is one."""

    def __init__(self, groups: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.groups = groups
        self._build()
        self.double()

    def _build(self) -> None:
        self.model = Net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return self.meshplan_loss(self(batch[0]), batch)

    def meshplan_inputs(self, batch: Any) -> torch.Tensor:
        return batch[0]

    def meshplan_loss(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(output, batch[0].flip(1))

    def configure_optimizers(self) -> Any:
        return self.groups(self, getattr(self, "model", self))


class Own(Outer):
    def _build(self) -> None:
        made = Net()
        self.embed, self.layers, self.head = made.embed, made.layers, made.head
        self.register_buffer("offset", made.offset)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Net.forward(self, x)  # type: ignore[arg-type]


class Watched(L.Callback):
    """Notes norms of weights and gradients as hooks of LightningModules log them, and buffers."""

    def __init__(self) -> None:
        self.norms: dict[str, list[float]] = {}
        self.buffers: dict[str, float] = {}
        self.kinds: set[str] = set()

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        for name, each in module.named_modules():
            for leaf, parameter in each.named_parameters(recurse=False):
                self._note(f"gradient of {name}.{leaf}", parameter.grad)
            if isinstance(each, nn.Linear):
                self._note(f"linear {name}", each.weight)
        self.kinds |= {type(each).__name__ for each in module.modules()}
        found = list(module.named_buffers())
        assert len(dict(found)) == len(found)
        self.buffers |= {_plain(name): float(each.sum()) for name, each in found}

    def on_train_batch_end(self, trainer: Any, module: Any, *unused: Any) -> None:
        for name, parameter in module.named_parameters():
            self._note(name, parameter)

    def _note(self, name: str, tensor: torch.Tensor) -> None:
        norm = tensor.detach().norm()
        whole = getattr(norm, "full_tensor", lambda: norm)()
        self.norms.setdefault(_plain(name), []).append(float(whole))


def _plain(name: str) -> str:
    """Return a name without the part that tells the copy of a second stage."""
    return re.sub("@stage[0-9]+", "", name)


def watched_alone() -> list[tuple[Any, ...]]:
    """Note in one process, with Lightning alone."""
    return [_watch(kind, 1) for kind in (Outer, Own)]


def watched() -> list[tuple[Any, ...]]:
    """Note on the ranks of a pool under a pipeline."""
    with launched():
        return [_watch(kind, 2) for kind in (Outer, Own)]


def _watch(kind: type, ranks: int) -> tuple[Any, ...]:
    seen = Watched()
    _fit(kind, by_layers, ranks, seen)
    return seen.norms, seen.buffers, seen.kinds


def _fit(
    kind: type, groups: Callable[[Any, Any], Any], ranks: int, *callbacks: Any
) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    module = kind(groups)
    trainer = L.Trainer(
        accelerator="cpu", devices=1 if ranks == 1 else 4, max_epochs=2, logger=False,
        strategy=MeshplanStrategy(dict(PLAN)) if ranks > 1 else "auto", enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, use_distributed_sampler=False,
        callbacks=list(callbacks),
    )  # fmt: skip
    rows = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    index = torch.distributed.get_rank() % ranks if ranks > 1 else 0
    own = rows.unflatten(0, (-1, ranks, PER_STEP // ranks))[:, index].flatten(0, 1)
    trainer.fit(module, DataLoader(TensorDataset(own), batch_size=PER_STEP // ranks))
    if ranks == 1:
        found = getattr(module, "model", module).state_dict()
    else:
        found = meshplan.full_state_dict(trainer.strategy.network)
    return {name: value.detach().clone() for name, value in found.items()}


def alone() -> dict[str, dict[str, torch.Tensor]]:
    """Train each case in one process, with Lightning alone."""
    return {
        f"{kind.__name__} {name}": _fit(kind, groups, 1)
        for kind in (Outer, Own)
        for name, groups in CASES.items()
    }


def planned() -> dict[str, dict[str, torch.Tensor]]:
    """Train each case under a pipeline, on the ranks of a pool."""
    with launched():
        return {
            f"{kind.__name__} {name}": _fit(kind, groups, 2)
            for kind in (Outer, Own)
            for name, groups in CASES.items()
        }


def refused() -> str:
    """Return the error of an optimizer with references of its own; "" without one."""
    with launched():
        try:
            _fit(Outer, remembering, 2)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""
