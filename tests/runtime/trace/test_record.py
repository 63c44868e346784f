"""The record of a forward: what ran, on which tensors, inside which module, and nothing changed."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from meshplan.errors import ApplyError
from meshplan.model.flow import UPDATE
from meshplan.runtime.trace.ops import record
from tests.helpers import models


@pytest.mark.parametrize("name", ["own_llama", "hf_llama_tied", "gpt2", "bert", "vit", "t5", "odd"])
def test_record_runs_every_model_as_a_copy_on_meta(name: str) -> None:
    model = models.build(name)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    inputs, _ = models.batch(name, 0, 2)
    flow = record(model, inputs)
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    with torch.device("meta"):
        on_meta = record(models.build(name).to("meta"), inputs)
    assert [op.name for op in flow.ops] == [op.name for op in on_meta.ops]
    assert [v.shape for v in flow.values] == [v.shape for v in on_meta.values]
    named = {v.name for v in flow.values if v.origin == "parameter"}
    assert named == {n for n, _ in model.named_parameters()}
    assert (flow.calls[0].module, flow.calls[0].ops) == ("", (0, len(flow.ops)))


class Writes(nn.Module):
    """Writes into a view, so that the tensor it looks at changes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y[:, 0] = 1.0
        return y + 1


def test_record_gives_what_was_written_into_a_new_value() -> None:
    flow = record(Writes(), torch.randn(2, 3))
    last = flow.ops[-1]
    assert last.name == "aten.add.Tensor"
    (read,) = last.inputs
    made_by = flow.producer(read)
    assert made_by is not None
    assert flow.ops[made_by].name == UPDATE


@pytest.mark.parametrize("mode", [True, False])
def test_record_tells_the_statistics_that_batchnorm_writes(mode: bool) -> None:
    flow = record(nn.BatchNorm1d(3).train(mode), torch.randn(2, 3))
    written = {flow.values[value].name for op in flow.ops for value in op.mutates}
    buffers = {"running_mean", "running_var", "num_batches_tracked"}
    assert written == (buffers if mode else set())


class Reads(nn.Module):
    """Its control flow reads a number."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x


def test_record_runs_for_real_what_reads_numbers() -> None:
    flow = record(Reads(), torch.ones(2))
    assert flow.ops[-1].name == "aten.mul.Tensor"


class Draws(nn.Module):
    """It draws from every generator, from torch's as a number that its control flow reads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (random.random() + np.random.rand() + torch.rand(()).item())


def test_record_draws_no_random_numbers() -> None:
    def numbers() -> tuple[float, ...]:
        return random.random(), np.random.rand(), float(torch.rand(()))

    found = []
    for is_recorded in (False, True):
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        if is_recorded:
            record(Draws(), torch.ones(2))
        found.append(numbers())
    assert found[0] == found[1]


def test_record_tells_inputs_that_do_not_fit() -> None:
    with pytest.raises(ApplyError, match="cannot be recorded on the example inputs"):
        record(nn.Linear(4, 4), torch.ones(2, 3))


class Picks(nn.Module):
    """How many rows its layer gets depends on numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.out = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keep = x[:, 0] > 0
        y = torch.zeros_like(x)
        y[keep] = self.linear(x[keep])
        return self.out(y)


def test_record_leaves_open_the_sizes_that_depend_on_numbers() -> None:
    """Without numbers, as the copy that a pipeline records with."""
    flow = record(Picks().to("meta"), torch.ones(4, 3))
    (picked,) = (dict(c.inputs)["0"] for c in flow.calls if c.module == "linear")
    (output,) = (value for _, value in flow.outputs)
    assert flow.values[picked].shape == (0, 3)
    assert flow.values[output].shape == (4, 2)
