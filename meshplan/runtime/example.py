"""Inputs to record a model with: the caller's, the plan's, or what the model says of itself."""

from __future__ import annotations

import inspect
from typing import Any, Final

import torch
from torch import nn

from meshplan.errors import PlanError, Problem
from meshplan.spec import Spec

_SAMPLES: Final = 2
_TOKENS: Final = 16
"""Samples and tokens of an example that nobody gave: small, and not 1, which would broadcast."""


def find_example(model: nn.Module, spec: Spec, given: Any = None) -> Any:
    """A tensor, a tuple of arguments or a mapping of keyword arguments for the model's forward.

    Args:
        given: The caller's; taken as it is.

    Raises:
        PlanError: Nobody says what the model takes.
    """
    if given is not None:
        return given
    if spec.input is not None:
        shape, dtype = spec.input.shape, getattr(torch, spec.input.dtype)
        return torch.zeros(shape, dtype=dtype, device="meta")
    found = _of_transformers(model, spec)
    if found is not None:
        return found
    raise PlanError(
        Problem(
            f"the plan needs the data flow of {type(model).__name__}, and nothing says what the "
            "model takes",
            spec.origin("tp_plan" if spec.tp_plan == "auto" else "mesh"),
            "pass example_inputs to parallelize, or state input: {shape: [2, 16], dtype: int64}",
        )
    )


def _of_transformers(model: nn.Module, spec: Spec) -> dict[str, torch.Tensor] | None:
    """Token ids or pixels, for a model with transformers' `main_input_name` and `config`."""
    name, config = getattr(model, "main_input_name", None), getattr(model, "config", None)
    if not isinstance(name, str) or config is None:
        return None
    if name == "pixel_values":
        size = getattr(config, "image_size", None)
        height, width = size if isinstance(size, tuple | list) else (size, size)
        channels = getattr(config, "num_channels", 3)
        if not isinstance(height, int):
            return None
        return {name: torch.zeros(_SAMPLES, channels, height, width, device="meta")}
    if name != "input_ids":
        return None
    tokens = torch.zeros(_SAMPLES, spec.batch.seq_len or _TOKENS, dtype=torch.int64, device="meta")
    takes = inspect.signature(type(model).forward).parameters
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in takes:
        return {name: tokens, "decoder_input_ids": tokens.clone()}
    return {name: tokens}
