"""`model.apply(fn)` reaches the modules of all stages, or says why the function cannot be called.

Which seeded bug would this catch? An initialisation that changes nothing, because a pipelined model
has its stages outside of `children()`; layers of different stages with the same random numbers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import meshplan
from tests.runtime.checks.test_outside import Plain, batch


class Quiet(Plain):
    """Three units and a dropout, which a function can set."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(self.dropout(x))


def quiet(module: nn.Module) -> None:
    if isinstance(module, nn.Dropout):
        module.p = 0.0
    if isinstance(module, nn.Linear):
        nn.init.constant_(module.weight, 0.01 * module.out_features)
        nn.init.zeros_(module.bias)


def drawn(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight)


def applied(mesh: dict[str, int]) -> tuple[dict[str, Any], float, float, str]:
    """Weights after a function was applied, losses of this model and of one process, an error."""
    alone = Quiet()
    alone.apply(quiet)
    plan = {"version": 1, "mesh": mesh, "pipeline": {"schedule": "1F1B", "microbatches": 2}}
    model = meshplan.parallelize(Quiet(), plan, example_inputs=batch()[0])
    assert model.apply(quiet) is model
    x, y = batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loss = meshplan.train_step(model, optimizer, *meshplan.local_batch(model, (x, y)), F.mse_loss)
    full = {name: value.tolist() for name, value in meshplan.full_state_dict(model).items()}
    expected = {name: value.tolist() for name, value in alone.state_dict().items()}
    assert not full or full == expected
    error = ""
    try:
        model.apply(drawn)
    except meshplan.ApplyError as raised:
        error = str(raised)
    return full, float(loss), F.mse_loss(alone(x), y).item(), error


@pytest.mark.parametrize("mesh", [{"pp": 2}, {"pp": 2, "dp_shard": 2}], ids=str)
def test_a_function_reaches_every_stage(pool, mesh):
    found = pool(2 * mesh.get("dp_shard", 1)).run(applied, mesh)
    assert found[0][0]
    for _, loss, expected, error in found:
        assert loss == pytest.approx(expected, abs=1e-6)
        assert "model.apply(drawn) drew random numbers after the model was cut" in error
        assert "model.apply(drawn), then model = meshplan.parallelize" in error
