"""Losses of a Trainer under a plan: shifted labels, shares of a mean, rows that do not count."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from meshplan.runtime.apply.loss.loss_weights import zero_of
from meshplan.runtime.train.evaluation import reduce
from meshplan.runtime.train.step import data_rank


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


def shifts_labels(trainer: Any) -> bool:
    """Return True if the model's own loss shifts the labels, and divides by the number of items.

    The Trainer goes by the model's `loss_type`. Classes without one, such as GPT2LMHeadModel, have
    the same loss, and the Trainer counts one label more in each sequence.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if getattr(trainer, "_loss_shifts_labels", False):
        return True
    base = getattr(trainer.model, "get_base_model", lambda: trainer.model)()
    kind = type(base)
    is_causal = kind.__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    if not is_causal or getattr(base, "loss_type", "") is not None:
        return False
    # Some compute a loss of their own, such as XLNetLMHeadModel.
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return code is not None and "loss_function" in code.co_names


def stated_scaling(trainer: Any) -> bool | None:
    """Return whether the user states that a loss is scaled for accumulation; None if not stated.

    A loss that is not scaled, False, is a mean over the samples of a batch.
    """
    stated: bool | None = getattr(trainer, "loss_is_scaled_for_ga", None)
    return stated


def states_no_scaling(trainer: Any) -> bool:
    """Return True if a subclass states the way of old that its loss is not scaled.

    Before transformers had `loss_is_scaled_for_ga`, subclasses with a loss of their own, such as
    those of TRL 1.14, said so by `model_accepts_loss_kwargs`, of which the Trainer finds another
    value for the model.
    """
    if trainer.model_accepts_loss_kwargs or not trainer._overrides("compute_loss"):
        return False
    base = getattr(trainer.model, "get_base_model", lambda: trainer.model)()
    if hasattr(base, "accepts_loss_kwargs"):
        return bool(base.accepts_loss_kwargs)
    given = inspect.signature(base.forward).parameters.values()
    return any(each.kind == inspect.Parameter.VAR_KEYWORD for each in given)


def loss_of(output: Any) -> Any:
    """Return the loss in a model's output; None if there is none."""
    if isinstance(output, Mapping):
        return output.get("loss")
    return output[0] if isinstance(output, tuple | list) and output else None


def is_loss(value: Any) -> bool:
    """Return True if the first item of an output is a loss, not a tensor of logits."""
    return isinstance(value, torch.Tensor) and value.ndim == 0


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
    # In float32, the weight would round what a model in float64 computes.
    kind = torch.promote_types(loss.dtype, torch.float32)
    weight = (counted.double() / num_items).to(kind)
    # The mean of no losses is NaN, and so are its gradients.
    share = loss * weight if int(counted) else zero_of(output, loss).to(loss.dtype)
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


class NumItems:
    """The number of items in a batch, which notes whether a loss was divided by it."""

    def __init__(self, number: Any) -> None:
        self.is_used = False
        noted = self

        class Noted(torch.Tensor):
            @classmethod
            def __torch_function__(
                cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                noted.is_used = True
                plain, more = tree_map_only(
                    cls, lambda t: t.as_subclass(torch.Tensor), (args, kwargs or {})
                )
                return func(*plain, **more)

        self.plain = torch.as_tensor(number, dtype=torch.float32)
        self.number = self.plain.as_subclass(Noted)
        self.number.items = self


def plain_number(number: Any, *, is_used: bool) -> float:
    """Return a number of items as a number, noted as used if the loss is divided by it."""
    items = getattr(number, "items", None)
    return float(number if is_used or not isinstance(items, NumItems) else items.plain)


def names_ranks(functions: Iterable[Any]) -> bool:
    """Return True if code of a loss asks torch or the arguments for the number of ranks."""
    names = {"get_world_size", "world_size"}
    return any(
        names.intersection(code.co_names)
        for each in functions
        if (code := getattr(each, "__code__", None)) is not None
    )


def own_methods(kind: type, after: type, name: str) -> list[Any]:
    """Return the methods of a name that subclasses of the Trainer have of their own.

    Args:
        kind: The class of the Trainer.
        after: The class of its bases behind which they are.
        name: The name.
    """
    from transformers import Seq2SeqTrainer, Trainer

    kinds = kind.__mro__
    below = kinds[kinds.index(after) + 1 : kinds.index(Trainer)]
    return [vars(each)[name] for each in below if name in vars(each) and each is not Seq2SeqTrainer]


def mean_over_ranks(
    loss: torch.Tensor, counted: torch.Tensor, is_share: bool, model: nn.Module
) -> torch.Tensor:
    """Return the mean loss over the labels of all data ranks.

    Args:
        loss: The loss of this rank.
        counted: Number of its labels that count.
        is_share: True if the loss was divided by the labels of all data ranks, and multiplied by
            the number of these ranks; False if it is the mean over this rank's labels.
        model: The module that `parallelize` returned.
    """
    # Subclasses that evaluate by themselves, such as TRL's, may take this rank's mean.
    count = counted.double()
    total = torch.where(count > 0, loss.double() * count, torch.zeros_like(count))
    is_counted = torch.full_like(count, is_share)
    own_sum = torch.where(is_counted > 0, loss.double(), torch.zeros_like(count))
    every = torch.stack((total, count, own_sum, is_counted))
    total, count, shares, is_counted = reduce(every, "sum", model)
    # Each rank's share has the factor of the number of ranks.
    mean = shares / data_rank(model).num_replicas if int(is_counted) else total / count
    return mean.to(loss.dtype)


def weight_of_labels(trainer: Any, inputs: Any) -> float | None:
    """Return the weight of this rank's loss in the mean of the data ranks' losses.

    It is by their numbers of labels if the model takes no number of items, and so returns the mean
    over the labels of a batch; None for other losses.

    Args:
        trainer: The Trainer.
        inputs: The samples of this rank's batch that count.
    """
    if (
        trainer.model_accepts_loss_kwargs
        or stated_scaling(trainer) is not None
        or trainer._overrides("compute_loss")
        or trainer.compute_loss_func is not None
    ):
        return None
    counted = trainer._count_labels(inputs)
    if counted is None:
        return None
    every = trainer._loss_ranks.stacked(counted.to(trainer.args.device))
    return float(counted / every.double().mean()) if int(every.sum()) else None


def times(found: Any, factor: float, counted: torch.Tensor | None = None) -> Any:
    """Return a loss, or a pair of it and outputs, with the loss multiplied.

    Args:
        found: The loss, or the pair.
        factor: The factor.
        counted: Number of labels that count in the loss; None if not known.
    """
    loss = found[0] if isinstance(found, tuple) else found
    # The mean over no labels is NaN.
    if factor == 0.0:
        loss = torch.nan_to_num(loss)
    elif counted is not None:
        loss = torch.where(counted > 0, loss, torch.nan_to_num(loss))
    loss = loss if factor == 1.0 else loss * factor
    return (loss, *found[1:]) if isinstance(found, tuple) else loss
