"""Wrapped forwards: a copy of a model runs its own modules, so that stages and traces see them.

Which seeded bug would this catch? A copy whose wrapped forward runs the original's modules: a trace
that finds no module, a stage that trains parameters which no optimizer has.
"""

from __future__ import annotations

import copy
import functools
from functools import partial
from types import MethodType

import pytest
import torch
from torch import nn

import meshplan
from meshplan.runtime.base.model_copy import copy_model


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 8)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def closed_over(forward):
    @functools.wraps(forward)
    def around(*args, **kwargs):
        return forward(*args, **kwargs)

    return around


def call_of(forward, *args):
    return forward(*args)


def patched(kind):
    torch.manual_seed(0)
    net = Net()
    if kind == "layers":
        for layer in net.layers:
            layer.forward = closed_over(layer.forward)
    elif kind == "twice":
        net.forward = closed_over(closed_over(net.forward))
    elif kind == "partial":
        net.forward = partial(call_of, net.forward)
    elif kind == "method":
        original = net.forward
        net.forward = MethodType(lambda self, x: original(x), net)
    elif kind == "itself":

        def forward(x, again=True):
            return forward(x, again=False) if again else Net.forward(net, x)

        net.forward = forward
    return net


KINDS = ("layers", "twice", "partial", "method", "itself")


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_runs_its_own_modules(kind):
    net, x = patched(kind), torch.randn(3, 8)
    expected = net(x)
    copied = copy_model(net, {})
    called = []
    for model in (net, copied):
        model.layers[1].up.register_forward_hook(lambda *_, own=model: called.append(own))
    assert torch.equal(copied(x), expected)
    assert called == [copied]
    with torch.no_grad():
        copied.head.weight.zero_()
    assert not torch.equal(copied(x), expected)
    assert torch.equal(net(x), expected)  # And the original still runs the original's.


def test_what_holds_no_module_stays_the_same_object():
    net = Net()
    net.act = closed_over(torch.tanh)
    assert copy_model(net, {}).act is copy.deepcopy(net).act is net.act


def losses(kind, plan):
    net = patched(kind)
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    if plan is None:
        optimizer, found = torch.optim.SGD(net.parameters(), lr=0.5), []
        for _ in range(3):
            loss = nn.functional.mse_loss(net(x), x.sin())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found
    plan = {"version": 1, "input": {"shape": [2, 8], "dtype": "float32"}, **plan}
    model = meshplan.parallelize(net, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    inputs, targets = meshplan.local_batch(model, (x, x.sin()))
    return [
        meshplan.train_step(model, optimizer, inputs, targets, nn.functional.mse_loss)
        for _ in range(3)
    ]


STAGES = {"mesh": {"pp": 2, "dp_shard": 2}, "pipeline": {"microbatches": 2}}
TP = {"mesh": {"dp_shard": 2, "tp": 2}, "tp_plan": "auto"}


@pytest.mark.parametrize(
    ("kind", "plan"),
    [("layers", STAGES), ("twice", TP),
     *(pytest.param(kind, plan, marks=pytest.mark.wide) for kind, plan in
       (("twice", STAGES), ("method", STAGES), ("partial", STAGES), ("layers", TP)))],
)  # fmt: skip
def test_a_model_with_a_wrapped_forward_trains_as_in_one_process(pool, kind, plan):
    expected = losses(kind, None)
    for found in pool(4).run(losses, kind, plan):
        assert found == pytest.approx(expected, rel=1e-6)
