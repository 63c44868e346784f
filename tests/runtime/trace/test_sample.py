"""Inputs of a model that nobody prepared: of the dtype that its first layer reads.

Which seeded bug would this catch? Tokens for a ViT, and numbers for an embedding.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from meshplan.errors import MeshplanError
from meshplan.runtime.trace.inputs import find_example
from meshplan.runtime.trace.sample import sample_inputs
from meshplan.spec.reader import load_spec
from tests.helpers import models


class Positions(nn.Module):
    """Parameters of its own before its first layer."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(16, 8))
        self.first = first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.first(x)
        return out


@pytest.mark.parametrize(
    ("model", "shape", "dtype"),
    [
        (nn.Linear(8, 8), [2, 8], torch.float32),
        (nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), [2, 3, 16, 16], torch.float32),
        (nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 8)), [2, 16], torch.int64),
        (Positions(nn.Embedding(32, 8)), [2, 16], torch.int64),
        (Positions(nn.Linear(8, 8)), [2, 16, 8], torch.float32),
        (nn.TransformerEncoderLayer(8, 2), [2, 4, 8], torch.float32),
    ],
    ids=["linear", "conv", "embedding", "positions and tokens", "positions", "encoder"],
)
def test_a_dtype_that_nobody_states_is_the_first_layers(
    model: nn.Module, shape: list[int], dtype: torch.dtype
) -> None:
    given: dict[str, Any] = {"version": 1, "input": {"shape": shape}}
    assert sample_inputs(model, load_spec(given), 2, 0).dtype == dtype
    given["input"]["dtype"] = "bf16"
    assert sample_inputs(model, load_spec(given), 2, 0).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("first", "suggested"),
    [
        (nn.Conv2d(3, 8, 3), "input: {shape: [2, 3, 224, 224], dtype: float32}"),
        (nn.Linear(12, 8), "input: {shape: [2, 12], dtype: float32}"),
        (nn.LayerNorm(8), "input: {shape: [2, 16], dtype: int64} for tokens, {shape: [2, 3, 224, "),
    ],
)
def test_an_input_that_nobody_states_is_suggested_by_the_first_layer(
    first: nn.Module, suggested: str
) -> None:
    spec = load_spec({"version": 1, "mesh": {"tp": 2}})
    for ask in (lambda: sample_inputs(first, spec, 2, 0), lambda: find_example(first, spec)):
        with pytest.raises(MeshplanError) as caught:
            ask()
        assert f": {suggested}" in caught.value.problems[0].fix


def test_a_vit_is_shown_pixels() -> None:
    model = models.build("vit")
    size = model.config.image_size  # type: ignore[union-attr]
    spec = load_spec({"version": 1, "input": {"shape": [2, 3, size, size]}})
    assert sample_inputs(model, spec, 2, 0).dtype == torch.float32
