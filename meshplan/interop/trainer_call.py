"""Find out how the loss of a Trainer calls the model, by a stand-in, before the model runs."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from meshplan.errors import ApplyError, Problem
from meshplan.interop.trainer_apart import apart
from meshplan.runtime.apply.pipeline.answer import as_inputs
from meshplan.runtime.base.mesh import device


class _Called(BaseException):
    """Raised where the model would run. It is no Exception, because a loss may catch those."""

    def __init__(self, inputs: Any) -> None:
        super().__init__()
        self.inputs = inputs


class _StandIn:
    """Called in the place of a model: tells with which inputs.

    Args:
        model: The model, which has the attributes.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, *args: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        raise _Called(as_inputs(self._model, args, kwargs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def inputs_of_call(trainer: Any, model: Any, batch: Any, num_items: Any) -> Any:
    """Return the inputs that `compute_loss` calls the model with, as one value.

    Args:
        trainer: The Trainer, on which this has no effects.
        model: The model; only its attributes are read.
        batch: The batch.
        num_items: Number of items in all batches of the step; None if they are not counted.

    Raises:
        ApplyError: It does not call the model that it is given.
    """
    try:
        with drawing_nothing():
            apart(trainer).compute_loss(_StandIn(model), dict(batch), num_items_in_batch=num_items)
    except _Called as called:
        return called.inputs
    what = "compute_loss does not call the model that it is given, its first argument"
    raise ApplyError(Problem(what, fix="call model(...) there instead of self.model(...)"))


def example_of_call(trainer: Any) -> Any:
    """Return inputs with which `compute_loss` calls the model, for two samples of the data.

    Returns:
        The inputs; None if no data can be read without using them up.

    Raises:
        ApplyError: `compute_loss` fails before it calls the model.
    """
    with drawing_nothing():
        batch = _two_samples(trainer)
        if batch is None:
            return None
        is_counted = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
        try:
            num_items = torch.ones(()) if is_counted else None
            return inputs_of_call(trainer, trainer.model, batch, num_items)
        except Exception as error:  # User code may raise anything.
            what = "compute_loss was called on two samples, to see how it calls the model, and "
            what += f"failed: {type(error).__name__}: {error}"
            fix = "pass example_inputs= to the Trainer: the keyword arguments of that call"
            raise ApplyError(Problem(what, fix=fix)) from error


def _two_samples(trainer: Any) -> Any:
    """Return a batch of two samples; None if there is no dataset with places."""
    data = trainer.train_dataset if trainer.train_dataset is not None else trainer.eval_dataset
    if isinstance(data, dict):
        data = next(iter(data.values()), None)
    if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")) or len(data) < 2:
        return None
    # A copy, because a collator may have a generator of its own.
    collate = trainer._get_collator_with_removed_columns(copy.deepcopy(trainer.data_collator))
    return trainer._prepare_inputs(collate([data[0], data[1]]))


@contextmanager
def drawing_nothing() -> Iterator[None]:
    """Run code inside; random numbers go on afterwards as if it had drawn none."""
    before = random.getstate(), np.random.get_state()
    devices = [torch.get_device_module().current_device()] if device().type != "cpu" else []
    try:
        with torch.random.fork_rng(devices, device_type=device().type if devices else "cuda"):
            yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
