"""Tensor parallelism on local tensors: the values, gradients and layouts that DTensor gives.

Which seeded bug would this catch? A gradient that is not summed, or summed twice; shards put
together in another order; a bias added once per rank; a module whose weight is computed from other
parameters taken for a plain one; a backward that cannot be differentiated again.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.nn.utils import parametrizations

import meshplan
from meshplan.runtime.torch_private.ops import as_dtensor
from meshplan.runtime.torch_private.redistribution import Redistribution, local_part, redistributed
from tests.helpers import models, parity

S, R, P = Shard, Replicate(), Partial()
REDISTRIBUTIONS = [
    Redistribution(R, R, P, R),  # Into a projection whose output features are sharded.
    Redistribution(P, R, R, R),  # Out of one whose input features are.
    Redistribution(S(1), R, P, S(1)),  # The same two under sequence parallelism.
    Redistribution(P, S(1), S(1), R),
    Redistribution(R, S(1), S(1), R),  # Into a region of sequence parallelism, and out of it.
    Redistribution(S(1), R, R, S(1)),
    Redistribution(S(2), R, R, S(2)),  # Logits that are gathered.
    Redistribution(R, R, P, P),  # An input that an enclosing module has gathered.
]


def compared(change: Redistribution) -> list[float]:
    """Largest differences to DTensor: of the result, its gradient, and the gradient of that."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    rank = mesh.get_local_rank()
    is_uniform = change.old == R  # A replicated input is the same on both ranks.
    torch.manual_seed(0 if is_uniform else rank)
    start = torch.randn(2, 4, 6)
    torch.manual_seed(7 if change.new == R and change.new_gradient == R else 7 + rank)
    weight = torch.randn(2, 8, 12)

    def ours(x: torch.Tensor) -> torch.Tensor:
        return redistributed(x, mesh, change)

    def theirs(x: torch.Tensor) -> torch.Tensor:
        laid = as_dtensor(x, mesh, change.old, change.old_gradient)
        if change.old != change.new:
            laid = laid.redistribute(placements=[change.new])
        return laid.to_local(grad_placements=[change.new_gradient])

    found = []
    for lay in (ours, theirs):
        x = start.clone().requires_grad_()
        y = lay(x)
        factor = weight[tuple(slice(size) for size in y.shape)]
        (first,) = torch.autograd.grad((y * factor).sum(), x, create_graph=True)
        found.append((y.detach(), first.detach()))
    return [float((a - b).abs().max()) for a, b in zip(*found, strict=True)]


@pytest.mark.parametrize("change", REDISTRIBUTIONS, ids=str)
def test_a_redistribution_gives_what_dtensor_gives(pool, change):
    for differences in pool(2).run(compared, change):
        assert max(differences) <= 1e-6


def twice() -> list[float]:
    """The second derivative of a sum over ranks, and what it is."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = torch.full((3,), 2.0, requires_grad=True)
    total = redistributed(
        redistributed(x, mesh, Redistribution(R, R, P, R)) ** 3, mesh, Redistribution(P, R, R, R)
    )
    (first,) = torch.autograd.grad(total.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    return [*first.tolist(), *second.tolist()]


def test_a_second_backward_sums_over_the_ranks_too(pool):
    # Both ranks add x ** 3: 2 * 3 x ** 2, then 2 * 6 x.
    assert pool(2).run(twice) == [[24.0] * 3 + [24.0] * 3] * 2


def parts(where: Placement, gradient: Placement | None) -> list[bool]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    whole = torch.randn(6, 4)
    out = []
    for is_transposed in (False, True):  # A gradient in another memory format than the parameter.
        grads = []
        for see in ("ours", "theirs"):
            given = DTensor.from_local(whole.clone(), mesh, [R], run_check=False)
            parameter = nn.Parameter(given.redistribute(placements=[where]))
            if see == "ours":
                local = local_part(parameter, gradient)
            else:
                local = parameter.to_local(grad_placements=gradient and [gradient])
            factor = torch.arange(local.numel(), dtype=torch.float32).reshape(local.shape)
            if is_transposed:
                factor = factor.t().contiguous().t()
            (local * factor).sum().backward()
            assert isinstance(parameter.grad, DTensor)
            grads.append(parameter.grad)
        ours, theirs = grads
        out.append(
            torch.equal(ours.full_tensor(), theirs.full_tensor())
            and ours.placements == theirs.placements
            and ours.shape == parameter.shape
            and ours.to_local().stride() == parameter.to_local().stride()
        )
    return out


@pytest.mark.parametrize(
    ("where", "gradient"), [(S(0), None), (S(1), None), (R, None), (R, P)], ids=str
)
def test_the_gradient_of_a_part_lies_as_torch_lays_it(pool, where, gradient):
    assert pool(2).run(parts, where, gradient) == [[True, True]] * 2


class Own(nn.Linear):
    """A projection whose code is not torch's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x * 2, self.weight, self.bias)


class Odd(nn.Module):
    """A pair of projections, and what is unusual about it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        if kind == "weight norm":
            parametrizations.weight_norm(self.up)
        elif kind == "frozen":
            self.up.requires_grad_(False)
        elif kind == "no weights":
            self.norm = nn.LayerNorm(8, elementwise_affine=False)
        elif kind == "beside code of its own":
            self.gate = Own(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "norm"):
            x = self.norm(x)
        hidden = self.up(x).tanh()
        return self.down(hidden * self.gate(x) if hasattr(self, "gate") else hidden)


def trained(kind: str, rules: list[dict[str, Any]]) -> float:
    plan = {"version": 1, "mesh": {"tp": 2}, "rules": rules}
    torch.manual_seed(11)
    data = torch.randn(4, 5, 8)

    def losses(model: nn.Module) -> list[float]:
        sgd = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        found = []
        for _ in range(3):
            loss = model(data).square().mean()
            loss.backward()
            sgd.step()
            sgd.zero_grad()
            found.append(loss.item())
        return found

    live = meshplan.parallelize(Odd(kind), plan)
    return max(abs(a - b) for a, b in zip(losses(live), losses(Odd(kind)), strict=True))


PAIR = [
    {"match": "up", "place": {"tp": "colwise"}},
    {"match": "down", "place": {"tp": "rowwise"}},
]


@pytest.mark.parametrize("kind", ["plain", "frozen", "no weights", "beside code of its own"])
def test_modules_of_torch_train_as_in_one_process(pool, kind):
    gate = [{"match": "gate", "place": {"tp": "colwise"}}] if kind.startswith("beside") else []
    assert max(pool(2).run(trained, kind, [*PAIR, *gate])) <= parity.TOLERANCE


class Stream(nn.Module):
    """A stream of tokens through every kind of layer of torch that computes on local tensors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(10, 8, padding_idx=7)
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.RMSNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, 10)
        with torch.no_grad():  # Weights of ones and biases of zeros would hide mistakes.
            for parameter in self.parameters():
                parameter += torch.randn_like(parameter) * 0.3
            self.embed.weight[7] = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = x + self.down(self.up(self.norm1(x)).tanh())
        return self.head(self.norm2(x))


STREAM = [
    {"match": "{embed,head}", "place": {"tp": "vocab"}},
    {"match": "norm{1,2}", "place": {"tp": "sequence_parallel"}},
    *PAIR,
]


def streamed(is_split: bool) -> dict[str, float]:
    """Largest differences to one process: of the losses, and of every parameter's gradient."""
    plan = {"version": 1, "mesh": {"tp": 2}, "sequence_parallel": is_split, "rules": STREAM}
    live, alone = meshplan.parallelize(Stream(), plan), Stream()
    tokens = torch.arange(20).remainder(10).reshape(2, 10)  # Every row, those at the ends too.
    losses = []
    for model in (live, alone):
        loss = nn.functional.cross_entropy(model(tokens).transpose(1, 2), tokens.flip(1))
        loss.backward()
        losses.append(loss.item())
    apart = {"loss": abs(losses[0] - losses[1])}
    for name, parameter in live.named_parameters():
        gradient, expected = parameter.grad, alone.get_parameter(name).grad
        assert gradient is not None
        assert expected is not None
        if isinstance(gradient, DTensor):
            assert gradient.placements == parameter.placements
            own = gradient.to_local()  # Of what is replicated, every rank has the whole.
            expected = distribute_tensor(
                expected, gradient.device_mesh, gradient.placements, src_data_rank=None
            ).to_local()
            gradient = own
        apart[name] = float((gradient - expected).abs().max())
    return apart


@pytest.mark.parametrize("is_split", [False, True], ids=["whole", "sequence_parallel"])
def test_every_layer_gives_the_gradients_of_one_process(pool, is_split):
    for apart in pool(2).run(streamed, is_split):
        assert {name: each for name, each in apart.items() if each > parity.TOLERANCE} == {}


def local_forwards_of(kind: str) -> tuple[bool, bool]:
    """True for each projection whose forward runs on local tensors."""
    model = meshplan.parallelize(Odd(kind), {"version": 1, "mesh": {"tp": 2}, "rules": PAIR})
    return tuple(hasattr(vars(each).get("forward"), "__wrapped__") for each in model.children())[:2]


def test_only_plain_modules_compute_on_local_tensors(pool):
    assert pool(2).run(local_forwards_of, "plain") == [(True, True)] * 2


def computed_on() -> list[type]:
    """The types of the tensors that a projection multiplies."""
    seen: list[type] = []
    model = models.build("own_llama")
    live = meshplan.parallelize(
        model, {"version": 1, "mesh": {"tp": 2}, "rules": models.tp_rules("own_llama")}
    )
    linear = nn.functional.linear

    def noting(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.extend((type(x), type(weight)))
        return linear(x, weight, *rest)

    nn.functional.linear = noting
    try:
        models.call(live, models.batch("own_llama", 0)[0])
    finally:
        nn.functional.linear = linear
    return seen


def test_projections_multiply_plain_tensors(pool):
    seen = pool(2).run(computed_on)[0]
    assert len(seen) > 20
    assert DTensor not in seen
