"""What hooks on units keep, code between units finds in every stage, as in one process.

Which seeded bug would this catch? Hooks of a unit that another stage runs are not called: a list of
hidden states is shorter there, and an index into it means another layer.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshplan
from meshplan.errors import MeshplanError
from meshplan.runtime.apply.pipeline.hooks import call_hooks
from tests.helpers.parity import TOLERANCE

DIM, LAYERS, STEPS = 8, 4, 3
COLLECTED: list[list[Tensor]] = []
"""What hooks keep while a forward runs, outside of every module."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, *, gain: float = 1.0) -> Tensor:
        return x + gain * self.inner(self.norm(x)).tanh()


class Features(nn.Module):
    """Adds to its output what a hook kept of the layer at `place`."""

    place, comes_late = 1, True

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(DIM, DIM)
        self.is_hooked = False
        if not self.comes_late:
            self.install()

    def install(self) -> None:
        self.is_hooked = True
        for number, layer in enumerate(self.layers):
            layer.register_forward_hook(self.keep, with_kwargs=number % 2 == 0)

    def keep(self, module: nn.Module, args: Any, *rest: Any) -> Any:
        if not COLLECTED[-1]:
            COLLECTED[-1].append(args[0])
        COLLECTED[-1].append(rest[-1])

    def forward(self, x: Tensor) -> Any:
        if not self.is_hooked:
            self.install()
        COLLECTED.append([])
        try:
            for layer in self.layers:
                x = layer(x, gain=0.5)
        finally:
            states = COLLECTED.pop()
        return self.finish(self.head(x + states[self.place]), states)

    def finish(self, out: Tensor, states: list[Tensor]) -> Any:
        return out


class FromTheStart(Features):
    comes_late = False


class FirstInput(Features):
    place = 0


class ReturnsStates(Features):
    """The output is a list whose places a loss counts on."""

    def finish(self, out: Tensor, states: list[Tensor]) -> Any:
        return out, states


class OfInnerModules(Features):
    """Modules inside of layers are not called in other stages."""

    def install(self) -> None:
        self.is_hooked = True
        for layer in self.layers:
            layer.inner.register_forward_hook(self.keep)


class Changes(Features):
    """The hook's result takes the place of the layer's."""

    comes_late = False

    def keep(self, module: nn.Module, args: Any, *rest: Any) -> Any:
        changed = rest[-1] * 0.9
        super().keep(module, args, changed)
        return changed


class ChangesLate(Changes):
    comes_late = True


class OfTheWhole(Features):
    """Hooks of the whole model change its input, its output and the gradient of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_pre_hook(lambda module, args: (0.5 * args[0],))
        self.register_forward_hook(lambda module, args, output: output[: len(output)] * 1.5)
        self.register_full_backward_pre_hook(lambda module, grads: (0.5 * grads[0],))
        self.register_full_backward_hook(lambda module, of_inputs, of_outputs: None)


class OfAContainer(Features):
    """No stage has both ends of the container."""

    def __init__(self) -> None:
        super().__init__()
        self.is_hooked = True
        self.layers = nn.Sequential(*self.layers)
        self.layers.register_full_backward_hook(lambda module, of_inputs, of_outputs: None)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.layers(x))


class WritesItsInput(Features):
    """Autograd has saved what a microbatch before wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Any:
        x = x if self.training else x.clone()
        return super().forward(x.mul_(0.5) * self.scale) + x


def loss(output: Any, target: Tensor) -> Tensor:
    if isinstance(output, tuple):
        output = output[0] + output[1][1] * output[1][-2]
    return (output - target).square().mean()


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, DIM, generator=generator), torch.randn(8, DIM, generator=generator)


def build(kind: type[Features]) -> Features:
    torch.manual_seed(0)
    return kind()


def train(kind: type[Features], schedule: str) -> float | str:
    """The largest difference of this rank's parameters from one process; or why not."""
    model, sgd = build(kind), None
    alone = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(STEPS):
        loss(model(batch(step)[0]), batch(step)[1]).backward()
        alone.step()
        alone.zero_grad()
    plan = {"version": 1, "mesh": {"pp": 2}}
    plan["pipeline"] = {"schedule": schedule, "microbatches": 2}
    try:
        cut = meshplan.parallelize(build(kind), plan, example_inputs=batch(0)[0][:4])
        sgd = torch.optim.SGD(cut.parameters(), 0.1)
        for step in range(STEPS):
            meshplan.train_step(cut, sgd, *batch(step), loss)
    except MeshplanError as error:
        return str(error)
    expected = dict(model.named_parameters())
    return max(float((p - expected[n]).detach().abs().max()) for n, p in cut.named_parameters())


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
@pytest.mark.parametrize(
    "kind", [Features, FromTheStart, FirstInput, ReturnsStates, OfTheWhole, WritesItsInput]
)
def test_hooks_see_every_layer(pool: Any, kind: type[Features], schedule: str) -> None:
    apart = pool(2).run(train, kind, schedule)
    assert max(apart) <= TOLERANCE, apart


@pytest.mark.parametrize("kind", [OfInnerModules, Changes, ChangesLate, OfAContainer])
def test_what_stages_cannot_know_is_refused(pool: Any, kind: type[Features]) -> None:
    told = pool(2).run(train, kind, "1F1B")
    assert all(isinstance(text, str) and "fix:" in text for text in told), told


class Fewer(Features):
    """Returns a list of tensors that only the recording sees whole."""

    def finish(self, out: Tensor, states: list[Tensor]) -> Any:
        return (out, states) if type(out).__name__ == "FakeTensor" else (out, states[:-1])


def test_hooks_that_prepare_weights_are_left_alone() -> None:
    """Their weights are not here, and their buffers must not move."""
    module = torch.nn.utils.spectral_norm(nn.Linear(DIM, DIM))
    before, seen = module.weight_u.clone(), []
    module.register_forward_pre_hook(lambda module, args: seen.append(args))
    call_hooks(module, "unit", (before,), {}, before)
    assert torch.equal(module.weight_u, before)
    assert seen == [(before,)]


def test_another_output_than_recorded_is_refused(pool: Any) -> None:
    told = pool(2).run(train, Fewer, "1F1B")
    assert all("the model returned different tensors" in str(text) for text in told), told
