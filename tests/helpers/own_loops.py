"""Training loops as people write them, and what one process gets from them.

A loop is a function of a model and an `Env`, registered by `@loop`. It trains, and returns numbers
to compare, if there are any beside the model's parameters. `outcome` runs one under a plan on this
rank and compares with the same loop in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.nn.utils import (
    clip_grad_norm_,
    clip_grad_value_,
    clip_grads_with_norm_,
    get_total_norm,
)
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

import meshplan
from meshplan.errors import MeshplanError

STEPS: Final = 4
BATCH: Final = 8
TOLERANCE: Final = 1e-9
"""In float64, in which the sums over ranks differ by 1e-16."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.silu(self.up(self.norm(x)))))


class Net(nn.Module):
    """Blocks whose projections tp shards, between layers that it leaves alone."""

    def __init__(self, checkpoints: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(12, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.gain = nn.Parameter(torch.ones(16))
        self.head = nn.Linear(16, 12)
        self.checkpoints = checkpoints
        if tied:
            self.embed.weight, self.embed.bias = (
                nn.Parameter(torch.randn(16, 12) / 4),
                self.embed.bias,
            )
            self.unembed = nn.Linear(16, 12)
            self.twin = nn.Linear(12, 16)
            self.twin.weight = self.embed.weight
        for each in self.modules():
            if isinstance(each, nn.Dropout):
                each.p = 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + (self.twin(x) if hasattr(self, "twin") else 0)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return self.head(x * self.gain)


PLANS: Final[dict[str, tuple[int, dict[str, Any]]]] = {
    "ddp": (2, {"strategy": "ddp"}),
    "full_shard": (2, {"strategy": "full_shard"}),
    "tp": (2, {"mesh": {"tp": 2}, "rules": [
        {"match": "blocks.*.up", "place": {"tp": "colwise"}},
        {"match": "blocks.*.down", "place": {"tp": "rowwise"}},
    ]}),
    "auto": (2, {"mesh": {"tp": 2}, "tp_plan": "auto"}),
    "hybrid": (4, {"strategy": "hybrid_shard", "mesh": [2, 2]}),
    "tp_full_shard": (4, {"strategy": "full_shard", "mesh": {"dp_shard": 2, "tp": 2}, "rules": [
        {"match": "blocks.*.up", "place": {"tp": "colwise"}},
        {"match": "blocks.*.down", "place": {"tp": "rowwise"}},
    ]}),
    "tp_ddp": (4, {"mesh": {"dp_replicate": 2, "tp": 2}, "rules": [
        {"match": "blocks.*.up", "place": {"tp": "colwise"}},
        {"match": "blocks.*.down", "place": {"tp": "rowwise"}},
    ]}),
    "pp": (2, {"mesh": {"pp": 2}, "batch": {"accumulate": 2}}),
    "pp_full_shard": (4, {"mesh": {"pp": 2, "dp_shard": 2}, "strategy": "full_shard",
                          "batch": {"accumulate": 2}}),
}  # fmt: skip


class Env:
    """What a loop asks of one process, or of the ranks of a plan."""

    def __init__(self, plan: dict[str, Any] | None) -> None:
        self.plan = plan

    def net(self, **options: Any) -> nn.Module:
        torch.manual_seed(0)
        model = Net(**options).double()
        if self.plan is None:
            return model
        return meshplan.parallelize(model, self.plan, example_inputs=torch.randn(2, 12).double())

    def batches(self, model: nn.Module, steps: int = STEPS) -> Iterator[tuple[Tensor, Tensor]]:
        for step in range(steps):
            generator = torch.Generator().manual_seed(step)
            pair = tuple(
                torch.randn(BATCH, 12, generator=generator, dtype=torch.float64) for _ in range(2)
            )
            yield meshplan.local_batch(model, pair) if self.plan else pair

    def step(self, model: nn.Module, optimizer: optim.Optimizer, x: Tensor, y: Tensor) -> float:
        """A whole step, which `train_step` takes in a pipeline; return the mean loss."""
        if "pp" in (self.plan or {}).get("mesh", ()):
            return meshplan.train_step(model, optimizer, x, y, F.mse_loss)
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        return self.mean(loss)

    def mean(self, value: Any) -> float:
        """The mean of a number over the ranks."""
        value = torch.as_tensor(value, dtype=torch.float64).detach().clone()
        if self.plan is not None:
            dist.all_reduce(value)
            value /= dist.get_world_size()
        return float(value)


Loop = Callable[[Env], tuple[nn.Module, list[float]]]
LOOPS: Final[dict[str, Loop]] = {}


def loop(function: Loop) -> Loop:
    LOOPS[function.__name__] = function
    return function


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def outcome(name: str, plan: str) -> tuple[str, str]:
    """Run a loop under a plan on this rank; return a verdict and what there is to say about it."""
    from tests.helpers import more_own_loops  # noqa: F401

    try:
        model, numbers = LOOPS[name](Env({"version": 1, **PLANS[plan][1]}))
        state = meshplan.full_state_dict(model)
    except MeshplanError as error:
        return "refused", str(error)
    except Exception as error:
        import traceback

        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{last.filename.rpartition('/')[2]}:{last.lineno}"
        return "error", f"{type(error).__name__}: {str(error)[:300]} ({where})"
    alone, expected = LOOPS[name](Env(None))
    apart = [abs(a - b) / max(1, abs(b)) for a, b in zip(numbers, expected, strict=True)]
    if dist.get_rank() == 0:
        apart += [float((state[n] - t).abs().max()) for n, t in alone.state_dict().items()]
    worst = max([0.0, *apart])
    return ("ok" if worst <= TOLERANCE else "WRONG"), f"{worst:.1e}"


# Optimizers.


def trained_by(
    make: Callable[[nn.Module], optim.Optimizer], scheduler: Any = None, **options: Any
) -> Loop:
    """A plain loop around an optimizer, and a scheduler of it."""

    def run(env: Env) -> tuple[nn.Module, list[float]]:
        model = env.net(**options)
        optimizer = make(model)
        schedule = scheduler(optimizer) if scheduler else None
        losses = []
        for x, y in env.batches(model):
            losses.append(env.step(model, optimizer, x, y))
            if isinstance(schedule, lr_scheduler.ReduceLROnPlateau):
                schedule.step(losses[-1])
            elif schedule is not None:
                schedule.step()
        return model, losses

    return run


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """No weight decay, and another rate, for biases and norms."""
    named = list(model.named_parameters())
    return [
        {"params": [p for _, p in named if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.ndim < 2], "lr": 3e-3},
    ]


_EPS: Final = {"eps": 1e-3}
"""Large, so that noise of 1e-16 in gradients of zero is not turned into a step of its own."""

for kind, more in (
    (optim.AdamW, _EPS), (optim.Adam, _EPS), (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (optim.Adagrad, {"eps": 1e-3}),
):  # fmt: skip
    for how in ("default", "foreach", "fused", "one_by_one"):
        said = {"default": {}, "one_by_one": {"foreach": False}}.get(how, {how: True})
        LOOPS[f"{kind.__name__}_{how}"] = trained_by(
            lambda m, kind=kind, said=more | said: kind(m.parameters(), **said)
        )
for name, kind, more in (
    ("NAdam", optim.NAdam, _EPS), ("RAdam", optim.RAdam, _EPS), ("ASGD", optim.ASGD, {}),
    ("Adadelta", optim.Adadelta, _EPS), ("Adamax", optim.Adamax, _EPS),
    ("RMSprop", optim.RMSprop, {"momentum": 0.9, "centered": True, **_EPS}),
    ("Rprop", optim.Rprop, {}), ("Adafactor", optim.Adafactor, {}),
    ("Rprop_foreach", optim.Rprop, {"foreach": True}),
    ("NAdam_foreach", optim.NAdam, {"foreach": True, **_EPS}),
    ("Adafactor_foreach", optim.Adafactor, {"foreach": True}),
    ("maximize", optim.AdamW, {"maximize": True, **_EPS}),
    ("amsgrad_fused", optim.AdamW, {"amsgrad": True, "fused": True, **_EPS}),
    ("tensor_lr", optim.AdamW, {"lr": torch.tensor(1e-3), **_EPS}),
    ("tensor_lr_fused", optim.AdamW, {"lr": torch.tensor(1e-3), "fused": True, **_EPS}),
):  # fmt: skip
    LOOPS[name] = trained_by(lambda m, kind=kind, more=more: kind(m.parameters(), **more))
for how, said in (("", {}), ("_fused", {"fused": True}), ("_foreach", {"foreach": True})):
    LOOPS[f"two_groups{how}"] = trained_by(
        lambda m, said=said: optim.AdamW(two_groups(m), **_EPS, **said)
    )
for name, make in {
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=0.5),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.01, total_steps=8),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-1, 2, 2, cycle_momentum=False),
    "cosine": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
}.items():
    LOOPS[f"schedule_{name}"] = trained_by(
        lambda m: optim.AdamW(m.parameters(), fused=True, **_EPS), make
    )
LOOPS["schedule_momentum"] = trained_by(
    lambda m: optim.SGD(m.parameters(), 0.1, 0.9),
    lambda o: lr_scheduler.CyclicLR(o, 1e-2, 1e-1, 2, 2, cycle_momentum=True),
)
LOOPS["checkpointed"] = trained_by(lambda m: optim.SGD(m.parameters(), 0.1), checkpoints=True)
LOOPS["tied"] = trained_by(lambda m: optim.AdamW(m.parameters(), fused=True, **_EPS), tied=True)


@loop
def lbfgs(env: Env) -> tuple[nn.Module, list[float]]:
    model = env.net()
    optimizer = optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    for x, y in env.batches(model, 2):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward()
            return loss

        optimizer.step(closure)
    return model, []


@loop
def closure(env: Env) -> tuple[nn.Module, list[float]]:
    model = env.net()
    optimizer = optim.AdamW(model.parameters(), fused=True, **_EPS)
    losses = []
    for x, y in env.batches(model):

        def compute(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward()
            return loss

        losses.append(env.mean(optimizer.step(compute)))
    return model, losses


# Clipping.


def clipped(clip: Callable[[nn.Module], Any]) -> Loop:
    """A loop that clips gradients and returns the norms."""

    def run(env: Env) -> tuple[nn.Module, list[float]]:
        model = env.net()
        optimizer = optim.SGD(model.parameters(), 0.1)
        norms = []
        for x, y in env.batches(model):
            loss_of(model, x, y).backward()
            norm = clip(model)
            if norm is not None:
                norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
                norms.append(float(norm))
            optimizer.step()
            optimizer.zero_grad()
        return model, norms

    return run


def _by_hand(model: nn.Module) -> Tensor:
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    norm = get_total_norm(grads)
    clip_grads_with_norm_(model.parameters(), 0.1, norm)
    return norm


def _alone(model: nn.Module) -> None:
    for p in model.parameters():
        clip_grad_norm_(p, 0.01)


def _stacked(model: nn.Module) -> Tensor:
    return torch.norm(torch.stack([p.grad.norm() for p in model.parameters()]))  # type: ignore[union-attr]


def _summed(model: nn.Module) -> Tensor:
    total = 0.0
    for p in model.parameters():
        assert p.grad is not None
        total += p.grad.data.norm(2).item() ** 2
    return torch.tensor(total**0.5)


LOOPS |= {
    "clip_norm": clipped(lambda m: clip_grad_norm_(m.parameters(), 0.1)),
    "clip_norm_inf": clipped(lambda m: clip_grad_norm_(m.parameters(), 0.1, float("inf"))),
    "clip_norm_1": clipped(lambda m: clip_grad_norm_(list(m.parameters()), 0.1, 1.0)),
    "clip_norm_foreach": clipped(lambda m: clip_grad_norm_(m.parameters(), 0.1, foreach=True)),
    "clip_norm_one_by_one": clipped(lambda m: clip_grad_norm_(m.parameters(), 0.1, foreach=False)),
    "clip_value": clipped(lambda m: clip_grad_value_(m.parameters(), 1e-3)),
    "clip_value_foreach": clipped(lambda m: clip_grad_value_(m.parameters(), 1e-3, foreach=True)),
    "clip_total_norm": clipped(_by_hand),
    "clip_each": clipped(_alone),
    "norm_by_stack": clipped(_stacked),
    "norm_by_item": clipped(_summed),
    "clip_ours": clipped(lambda m: meshplan.clip_grad_norm_(m, 0.1) if hasattr(m, "meshplan")
                         else clip_grad_norm_(m.parameters(), 0.1)),
}  # fmt: skip


# Scaling.


def scaled(kind: type[optim.Optimizer], overflow: bool, clip: bool, **said: Any) -> Loop:
    """A loop with torch's GradScaler; with an infinite loss on one rank in one step."""

    def run(env: Env) -> tuple[nn.Module, list[float]]:
        model = env.net()
        optimizer = kind(model.parameters(), lr=1e-2, **said)
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)
        scales = []
        for step, (x, y) in enumerate(env.batches(model)):
            loss = loss_of(model, x, y)
            is_mine = env.plan is None or dist.get_rank() == dist.get_world_size() - 1
            if overflow and step == 1 and is_mine:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            if clip:
                scaler.unscale_(optimizer)
                clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        return model, scales

    return run


for how, said in (("", {}), ("_fused", {"fused": True}), ("_foreach", {"foreach": True})):
    LOOPS[f"scaler{how}"] = scaled(optim.AdamW, False, False, **_EPS, **said)
    LOOPS[f"scaler_overflow{how}"] = scaled(optim.AdamW, True, False, **_EPS, **said)
    LOOPS[f"scaler_clip{how}"] = scaled(optim.SGD, False, True, **said)
