"""Losses of a Trainer under a plan: shifted labels, shares of a mean, rows that do not count."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from meshplan.runtime.apply.loss.loss_weights import zero_of


def shifting_as(model: Any, smoother: Any) -> Any:
    """Return a label smoother that shifts the labels if a model's class is one of a causal LM.

    The Trainer goes by the name of the model's class, which sharding and pipelines change.

    Args:
        model: The model before a plan is applied to it.
        smoother: The Trainer's; None if it has none.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if smoother is None:
        return None
    base = getattr(model, "get_base_model", lambda: model)()
    shifts = type(base).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()

    class Smoother(type(smoother)):  # type: ignore[misc]
        def __call__(self, output: Any, labels: Any, shift_labels: bool = False, **kw: Any) -> Any:
            return super().__call__(output, labels, shift_labels=shifts, **kw)

    made = copy.copy(smoother)
    made.__class__ = Smoother
    return made


def stated_scaling(trainer: Any) -> bool | None:
    """Return whether the user states that a loss is scaled for accumulation; None if not stated.

    A loss that is not scaled, False, is a mean over the samples of a batch.
    """
    stated: bool | None = getattr(trainer, "loss_is_scaled_for_ga", None)
    return stated


def loss_of(output: Any) -> Any:
    """Return the loss in a model's output; None if there is none."""
    if isinstance(output, Mapping):
        return output.get("loss")
    return output[0] if isinstance(output, tuple | list) and output else None


def with_share(output: Any, counted: torch.Tensor, num_items: Any) -> Any:
    """Return an output whose loss is the share of its labels in the mean over all of a step.

    Args:
        output: An output whose loss is the mean over the labels that count.
        counted: Their number.
        num_items: Number of labels that count in all microbatches of the step, on all data ranks.
    """
    loss = loss_of(output)
    if loss is None:
        return output
    # The mean of no losses is NaN, and so are its gradients.
    share = loss * (counted / num_items) if int(counted) else zero_of(output, loss)
    return replaced(output, share)


def replaced(output: Any, loss: torch.Tensor | None) -> Any:
    """Return an output with another loss, or with none."""
    if not isinstance(output, Mapping):
        return type(output)((*(() if loss is None else (loss,)), *output[1:]))
    rest = {key: value for key, value in output.items() if key != "loss"}
    return type(output)(**({} if loss is None else {"loss": loss}), **rest)


def cut_rows(inputs: Mapping[str, Any], size: int, own: int) -> dict[str, Any] | None:
    """Return the first `own` of `size` samples; None if not all values are a row a sample."""
    if not all(isinstance(v, torch.Tensor) and v.ndim and len(v) == size for v in inputs.values()):
        return None
    return {key: value[:own] for key, value in inputs.items()}


def fill_rows(values: Any, own: int, size: int) -> Any:
    """Return tensors of `own` rows with `size` rows: all ranks must gather as many."""
    rows = [*range(own), *[0] * (size - own)]
    return tree_map_only(torch.Tensor, lambda t: t[rows] if t.ndim and len(t) == own else t, values)
