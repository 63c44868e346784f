"""A step of a Trainer on a pipeline, with the Trainer's own way to compute a loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from meshplan.errors import ApplyError, Problem
from meshplan.interop.external_step import ExternalStep
from meshplan.interop.trainer_loss import loss_of, replaced, stated_scaling, with_share
from meshplan.runtime.apply.loss.loss_weights import zero_of
from meshplan.runtime.apply.pipeline.module import PipelinedModule


def pipeline_step(
    trainer: Any, step: ExternalStep, inputs: Any, num_items: Any, *, is_last: bool
) -> torch.Tensor:
    """Run forward and backward of a microbatch through all stages; return its loss.

    `compute_loss` runs on the last stage, once for each part of the microbatch. The model that
    it calls there returns what the last stage computed.
    """
    model, count = step.model, trainer.current_gradient_accumulation_steps
    assert isinstance(model, PipelinedModule)
    if not model.training:
        model.train()
    if callable(into_training := getattr(trainer.optimizer, "train", None)):
        into_training()
    inputs = dict(trainer._prepare_inputs(inputs))
    # Trainer.compute_loss takes the labels away from a model whose loss is not used.
    is_unused = trainer.label_smoother is not None or trainer.compute_loss_func is not None
    given = {k: v for k, v in inputs.items() if not (is_unused and k == "labels")}
    # The Trainer does not divide a loss that is scaled for accumulation already.
    is_scaled = stated_scaling(trainer)
    if is_scaled is None:
        accepts = trainer.model_accepts_loss_kwargs and num_items is not None
        is_scaled = accepts or trainer.compute_loss_func is not None
    whole = trainer._count_labels(inputs)

    def take(output: Any, part: Any) -> torch.Tensor:
        loss = _loss_of_part(trainer, model, output, part, num_items, whole)
        # `run_pipeline` divides by the number of microbatches in any case.
        return loss * count if is_scaled else loss

    with without_gathering(trainer.accelerator):
        loss = step.run_pipeline(given, inputs, take, count, is_last=is_last)
    step.release()
    return loss / count


def _loss_of_part(
    trainer: Any,
    model: PipelinedModule,
    output: Any,
    part: dict[str, Any],
    num_items: Any,
    whole: torch.Tensor | None,
) -> torch.Tensor:
    """Return a part's loss, of which the mean over the parts is that of the microbatch.

    Args:
        output: The output of the last stage for this part.
        part: The inputs of the part, labels included.
        num_items: As the Trainer counted it, for the step; None if it did not.
        whole: Number of labels in the microbatch that count; None if it has no such labels.
    """
    counted = trainer._count_labels(part)
    answer = LastStage(model, output, part, counted)
    loss = trainer.compute_loss(answer, dict(part), num_items_in_batch=num_items)
    if loss.is_meta:
        what = "compute_loss returned a loss on the device meta: a pipeline's last stage has "
        what += "the model's output, but not the parameters of the other stages"
        raise ApplyError(Problem(what, fix="use a plan without pp"))
    if trainer._share == 0.0:
        return zero_of(output, loss)  # Of samples that only fill up the last batch.
    stated = stated_scaling(trainer)
    if stated or (stated is None and trainer._is_counted):
        return loss * model.pipeline.microbatches  # A share of the mean over the step.
    if stated is None and (trainer._overrides("compute_loss") or trainer.compute_loss_func):
        what = "compute_loss returned a mean over samples or tokens, and a pipeline does not "
        what += "know which of them"
        fix = "set trainer.loss_is_scaled_for_ga = False for a mean over the samples of a "
        fix += "batch, or divide a sum by num_items_in_batch"
        raise ApplyError(Problem(what, fix=fix))
    if stated is None and counted is not None and whole is not None and int(whole):
        if not int(counted):
            return zero_of(output, loss)
        return loss * (counted / whole * model.pipeline.microbatches)
    return loss


class LastStage:
    """Called like the model by `compute_loss` on the last stage: returns what the stage computed.

    Args:
        model: The pipelined model, which has the attributes.
        output: The output of the last stage for a part of a microbatch.
        part: The part.
        counted: Number of labels in this part that count; None if it has no such labels.
    """

    def __init__(
        self, model: PipelinedModule, output: Any, part: Any, counted: torch.Tensor | None
    ) -> None:
        self._model, self._output, self._part, self._counted = model, output, part, counted
        self._is_called = False

    def __call__(self, *args: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        changed = [k for k, v in kwargs.items() if v is not self._part.get(k)]
        if args or changed or self._is_called:
            what = "compute_loss calls the model twice" if self._is_called else (
                f"compute_loss calls the model on another {', '.join(changed) or 'batch'}"
            )  # fmt: skip
            what += ", but a pipeline has run on the samples of the batch before"
            raise ApplyError(Problem(what, fix="use a plan without pp"))
        self._is_called = True
        output = self._output
        if isinstance(output, Mapping) and output.get("aux_loss") is not None:
            what = "the model adds an auxiliary loss of its experts, which is not that of the parts"
            fix = "use a plan without pp, or a config with output_router_logits=False"
            raise ApplyError(Problem(what, fix=fix))
        if "labels" not in kwargs:
            has_loss = "labels" in self._part and loss_of(output) is not None
            return replaced(output, None) if has_loss and self._is_own(output) else output
        if num_items_in_batch is None or self._counted is None:
            return output
        return with_share(output, self._counted, num_items_in_batch)

    def _is_own(self, output: Any) -> bool:
        """Return True if the first item is a loss, which a model without labels does not return."""
        loss = loss_of(output)
        return isinstance(loss, torch.Tensor) and loss.ndim == 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model.skeleton, name)


@contextmanager
def without_gathering(accelerator: Any) -> Iterator[None]:
    """Let the Accelerator's collectives raise: the last stage alone computes a pipeline's loss.

    A collective of `torch.distributed` itself is not seen, and would wait for the other stages.
    """

    def refuse(*args: Any, **kwargs: Any) -> Any:
        what = "compute_loss gathers values of all ranks, but only a pipeline's last stage calls it"
        fix = "use a plan without pp, or gather in a callback"
        raise ApplyError(Problem(what, fix=fix))

    names = ("gather", "gather_for_metrics", "reduce", "pad_across_processes", "wait_for_everyone")
    for name in names:
        setattr(accelerator, name, refuse)
    try:
        yield
    finally:
        for name in names:
            delattr(accelerator, name)
