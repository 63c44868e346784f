"""What losses of a Trainer need under a plan: labels that shift, the last stage, its rows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from meshplan.errors import ApplyError, Problem
from meshplan.runtime.apply.pipeline.module import PipelinedModule
from meshplan.runtime.base.pytree import tensors_in


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

    def smooth(output: Any, labels: Any, shift_labels: bool = False, **kwargs: Any) -> Any:
        return smoother(output, labels, shift_labels=shifts, **kwargs)

    return smooth


class LastStage:
    """Called like the model by `compute_loss` on the last stage: returns what the stage computed.

    Args:
        model: The pipelined model, which has the attributes.
        output: The output of the last stage for a part of a microbatch.
        counted: Number of labels in this part that count; None if it has no such labels.
    """

    def __init__(self, model: PipelinedModule, output: Any, counted: torch.Tensor | None) -> None:
        self._model, self._output, self._counted = model, output, counted

    def __call__(self, *args: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        output = self._output
        is_mapping = isinstance(output, Mapping)
        loss = output.get("loss") if is_mapping else output[0]
        if num_items_in_batch is None or self._counted is None or "labels" not in kwargs:
            return output
        # A model that is given the number of items divides the sum of its losses by it.
        if int(self._counted):
            loss = loss * (self._counted / num_items_in_batch)
        else:  # The mean of no losses is NaN, and so are its gradients.
            loss = sum(each.sum() * 0.0 for _, each in tensors_in(output) if each is not loss)
        if not is_mapping:
            return (loss, *output[1:])
        output = copy.copy(output)
        output["loss"] = loss
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model.skeleton, name)


@contextmanager
def without_gathering(accelerator: Any) -> Iterator[None]:
    """Let accelerate's collectives raise: the loss of a pipeline is computed on its last stage."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        what = "compute_loss gathers values of all ranks, but only a pipeline's last stage calls it"
        fix = "use a plan without pp, or gather in a callback"
        raise ApplyError(Problem(what, fix=fix))

    names = ("gather", "gather_for_metrics", "reduce", "pad_across_processes")
    for name in names:
        setattr(accelerator, name, refuse)
    try:
        yield
    finally:
        for name in names:
            delattr(accelerator, name)


def change_rows(values: Any, size: int, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return values with `change` applied to the tensors that have so many rows."""
    from accelerate.utils.operations import recursively_apply

    def changed(tensor: torch.Tensor) -> torch.Tensor:
        return change(tensor) if tensor.dim() and len(tensor) == size else tensor

    return recursively_apply(changed, values)
