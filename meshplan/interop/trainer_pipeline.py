"""A step of a Trainer on a pipeline, with the Trainer's own way to compute a loss."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from meshplan.errors import ApplyError, Problem
from meshplan.interop.last_stage import on_last_stage
from meshplan.interop.trainer_apart import apart, changes, logs_of, same
from meshplan.interop.trainer_call import drawing_nothing, inputs_of_call
from meshplan.interop.trainer_loss import loss_of, stated_scaling, with_share
from meshplan.runtime.apply.loss.loss_weights import zero_of
from meshplan.runtime.apply.pipeline.answer import as_inputs
from meshplan.runtime.apply.pipeline.module import PipelinedModule
from meshplan.runtime.base.batch_agreement import num_samples
from meshplan.runtime.base.mesh import device


def over_pipelines(base: Any) -> type:
    """Return a Trainer whose own step runs a pipeline; between Trainer and a class, it is last.

    A `training_step` of a subclass, which may do more than the Trainer's, ends in it by `super()`.
    """

    class OverPipelines(base):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            if not isinstance(model, PipelinedModule):
                return super().training_step(model, inputs, num_items_in_batch)
            return pipeline_step(self, model, inputs, num_items_in_batch)

    return OverPipelines


def pipeline_step(
    trainer: Any, model: PipelinedModule, inputs: Any, num_items: Any
) -> torch.Tensor:
    """Run forward and backward of a microbatch through all stages; return its loss.

    `compute_loss` runs on the last stage, once for each part of the microbatch. The model that
    it calls there returns what the last stage computed. If it gathers, logs or keeps something, it
    runs there once more for the whole microbatch, and all ranks get what it kept and logged.
    """
    step, count = trainer._step, trainer.current_gradient_accumulation_steps
    if not model.training:
        model.train()
    if callable(into_training := getattr(trainer.optimizer, "train", None)):
        into_training()
    inputs = dict(trainer._prepare_inputs(inputs))
    # The Trainer does not divide a loss that is scaled for accumulation already.
    is_scaled = stated_scaling(trainer)
    if is_scaled is None:
        accepts = trainer.model_accepts_loss_kwargs and num_items is not None
        is_scaled = accepts or trainer.compute_loss_func is not None
    loss = _LastStageLoss(trainer, model, inputs, num_items)
    with trainer._loss_ranks.alone():
        call = inputs_of_call(trainer, model.skeleton, inputs, num_items)

    def take(output: Any, part: Any) -> torch.Tensor:
        found = loss.of_part(output, *part)
        # `run_pipeline` divides by the number of microbatches in any case.
        return found * count if is_scaled else found

    is_last = trainer.accelerator.gradient_state.sync_gradients
    total = step.run_pipeline(call, (inputs, call), take, count, is_last=is_last)
    step.release()
    if loss.is_own:
        loss.share_effects(call)
    return total / count


class _LastStageLoss:
    """The loss of a microbatch, part by part, and what a Trainer keeps and logs meanwhile.

    Args:
        trainer: The Trainer.
        model: The pipelined model.
        inputs: The microbatch, labels included.
        num_items: As the Trainer counted it, for the step; None if it did not.
    """

    def __init__(
        self, trainer: Any, model: PipelinedModule, inputs: dict[str, Any], num_items: Any
    ) -> None:
        self._trainer, self._model = trainer, model
        self._inputs, self._num_items = inputs, num_items
        self._whole = trainer._count_labels(inputs)
        """Number of labels in the microbatch that count; None if it has no such labels."""
        own = trainer._overrides("compute_loss") or trainer.compute_loss_func is not None
        self.is_own = bool(own)
        """True if the loss is not that of the model or the Trainer."""
        # In the first step, the loss of the parts is compared with that of the whole.
        self._is_kept = self.is_own and not trainer._step.state.is_tested
        self._outputs: list[Any] = []
        self._counts: list[torch.Tensor | None] = []
        self._losses: list[torch.Tensor] = []

    def of_part(self, output: Any, part: dict[str, Any], call: Any) -> torch.Tensor:
        """Return a part's loss, of which the mean over the parts is that of the microbatch.

        Args:
            output: The output of the last stage for this part.
            part: The inputs of the part, labels included.
            call: The inputs of the model among them.
        """
        trainer, copied = self._trainer, apart(self._trainer)
        ranks = trainer._loss_ranks
        with ranks.alone():
            loss = self._computed(copied, output, part, call)
        loss = self._weighted(loss, output, part)
        self._losses.append(loss.detach())
        has_effects = bool(ranks.is_exchanged or changes(copied) or logs_of(copied))
        if has_effects and not self._is_kept and len(self._losses) > 1:
            what = "compute_loss gathers, logs or keeps something for some samples of a batch, but "
            what += "not for the first ones, and a pipeline cuts a batch into parts"
            raise ApplyError(Problem(what, fix="do so for all samples, or use a plan without pp"))
        self._is_kept |= has_effects
        if self._is_kept:
            self._outputs.append(mapped_tensors(torch.Tensor.detach, output))
            self._counts.append(trainer._count_labels(part))
        return loss

    def _computed(self, copied: Any, output: Any, inputs: Any, call: Any) -> torch.Tensor:
        counted = copied._count_labels(inputs)
        answer = LastStage(self._model, output, call, counted)
        given = dict(inputs)
        with on_last_stage("compute_loss"):
            loss: torch.Tensor = copied.compute_loss(
                answer, given, num_items_in_batch=self._num_items
            )
        if loss.is_meta:
            what = "compute_loss returned a loss on the device meta: a pipeline's last stage has "
            what += "the model's output, but not the parameters of the other stages"
            raise ApplyError(Problem(what, fix="use a plan without pp"))
        return loss

    def _weighted(self, loss: torch.Tensor, output: Any, part: dict[str, Any]) -> torch.Tensor:
        trainer, num = self._trainer, self._model.pipeline.microbatches
        if trainer._share == 0.0:
            return zero_of(output, loss).to(
                loss.dtype
            )  # Of samples that only fill up the last batch.
        stated = stated_scaling(trainer)
        if stated or (stated is None and trainer._loss_ranks.is_counted):
            return loss * num  # A share of the mean over the step.
        if stated is None and (trainer._overrides("compute_loss") or trainer.compute_loss_func):
            what = "compute_loss returned a mean over samples or tokens, and a pipeline does not "
            what += "know which of them"
            fix = "set trainer.loss_is_scaled_for_ga = False for a mean over the samples of a "
            fix += "batch, or divide a sum by num_items_in_batch"
            raise ApplyError(Problem(what, fix=fix))
        counted, whole = trainer._count_labels(part), self._whole
        if stated is None and counted is not None and whole is not None and int(whole):
            if not int(counted):
                return zero_of(output, loss).to(loss.dtype)
            return loss * (counted / whole * num)
        return loss

    def share_effects(self, call: Any) -> None:
        """Keep and log on all ranks what the loss of the whole microbatch keeps and logs.

        Args:
            call: The inputs of the model in the microbatch.
        """
        stages, group = self._model.pipeline, self._model.group
        source = dist.get_global_rank(group, stages.rank_of(stages.num - 1))
        box: list[Any] = [None]
        if self._outputs:
            try:
                box = [self._effects(call)]
            except ApplyError as error:
                box = [error]
        dist.broadcast_object_list(box, src=source, group=group)
        self._raise_together(box[0] if isinstance(box[0], ApplyError) else None)
        if box[0] is None:
            return
        kept, logs = box[0]
        vars(self._trainer).update(mapped_tensors(lambda tensor: tensor.to(device()), kept))
        for args, kwargs in logs:
            self._trainer.log(*args, **kwargs)

    def _that_count(self, *values: Any) -> tuple[Any, ...]:
        """Return the microbatch and other values without samples that only fill it up."""
        rest, every = self._trainer._now, (self._inputs, *values)
        if rest is None or self._trainer._share is None or not rest.own:
            return every

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[: rest.own] if tensor.ndim and len(tensor) == rest.size else tensor

        return tuple(mapped_tensors(cut, each) for each in every)

    def _raise_together(self, error: ApplyError | None) -> None:
        """Raise the error of this data rank or of another one on all of them."""
        ranks = self._trainer._loss_ranks
        if not int(ranks.stacked(torch.tensor(int(error is not None), device=device())).sum()):
            return
        raise next(each for each in ranks.objects([error]) if each is not None)

    def _effects(self, call: Any) -> tuple[dict[str, Any], list[Any]]:
        copied = apart(self._trainer)
        output = joined(self._outputs, self._counts, num_samples(self._inputs))
        inputs, call, answer = self._that_count(call, output)
        try:
            with torch.no_grad(), drawing_nothing():
                whole = self._computed(copied, answer, inputs, call)
        except (AttributeError, KeyError) as error:
            if not isinstance(output, Mapping) or len(output) == len(self._outputs[0]):
                raise
            left = [key for key in self._outputs[0] if key not in output]
            what = f"compute_loss failed without {', '.join(left)} of the model's output, which "
            what += "has no row for each sample, so a pipeline cannot put the parts of a batch "
            what += f"together: {type(error).__name__}: {error}"
            raise ApplyError(Problem(what, fix="use a plan without pp")) from error
        mean = torch.stack([each.double() for each in self._losses]).mean()
        own = 0.0 if self._trainer._share == 0.0 else float(whole)
        # Parts are added up in another order. Half precision has 3 digits.
        tolerance = 1e-2 if whole.dtype in (torch.bfloat16, torch.float16) else 1e-4
        if not math.isclose(own, float(mean), rel_tol=tolerance, abs_tol=1e-6):
            what = f"compute_loss returns {own:.6g} for a batch, but {float(mean):.6g} for its "
            what += "parts together, into which a pipeline cuts it"
            fix = "let the loss be a mean or a sum over samples or tokens, that depends on no "
            fix += "gathered values, or use a plan without pp"
            raise ApplyError(Problem(what, fix=fix))
        kept = changes(copied)
        for name, value in kept.items():
            try:
                pickle.dumps(value)
            except (pickle.PicklingError, TypeError, AttributeError) as error:
                what = f"compute_loss keeps {name} on the Trainer, which cannot be sent to the "
                what += f"ranks of other stages: {error}"
                fix = "keep numbers, tensors, and lists or mappings of them"
                raise ApplyError(Problem(what, fix=fix)) from error
        return mapped_tensors(lambda tensor: tensor.cpu(), kept), logs_of(copied)


class LastStage:
    """Called like the model by `compute_loss` on the last stage: returns what the stage computed.

    Args:
        model: The pipelined model, which has the attributes.
        output: The output of the last stage for a part of a microbatch, or for all of it.
        call: The inputs that the model was called with.
        counted: Number of labels among them that count; None if there are no such labels.
    """

    def __init__(
        self,
        model: PipelinedModule,
        output: Any,
        call: Any,
        counted: torch.Tensor | None,
    ) -> None:
        self._model, self._output, self._call, self._counted = model, output, call, counted
        self._is_called = False

    def __call__(self, *args: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        given = as_inputs(self._model.skeleton, args, kwargs)
        if self._is_called or not same(given, self._call):
            what = "compute_loss calls the model twice" if self._is_called else (
                "compute_loss calls the model on a part of a batch in another way than on all of it"
            )  # fmt: skip
            what += ", but a pipeline has run on the samples of the batch before"
            raise ApplyError(Problem(what, fix="use a plan without pp"))
        self._is_called = True
        output = self._output
        if isinstance(output, Mapping) and output.get("aux_loss") is not None:
            what = "the model adds an auxiliary loss of its experts, which is not that of the parts"
            fix = "use a plan without pp, or a config with output_router_logits=False"
            raise ApplyError(Problem(what, fix=fix))
        if num_items_in_batch is None or self._counted is None:
            return output
        return with_share(output, self._counted, num_items_in_batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model.skeleton, name)


def joined(outputs: list[Any], counts: list[torch.Tensor | None], num: int) -> Any:
    """Return the output of a microbatch, of the outputs of its parts.

    Values without a row for each sample that differ between parts are left out of a mapping.

    Args:
        outputs: The outputs of the parts, in their order, of equally many samples.
        counts: Number of labels in each part that count; None if there are no such labels.
        num: Number of samples.

    Raises:
        ApplyError: The output is no mapping, and has such values.
    """
    rows = num // len(outputs)

    def join(values: list[Any]) -> Any:
        first = values[0]
        if all(isinstance(v, torch.Tensor) and v.ndim and len(v) == rows for v in values):
            return torch.cat(values)
        if isinstance(first, tuple | list) and not hasattr(first, "_fields"):
            return type(first)(join(list(each)) for each in zip(*values, strict=True))
        if all(same(value, first) for value in values):
            return first
        raise _NoRows

    first = outputs[0]
    losses = [loss_of(each) for each in outputs] if is_loss(loss_of(first)) else []
    loss = _mean(losses, counts) if losses else None
    if isinstance(first, Mapping):
        found = {} if loss is None else {"loss": loss}
        for key in first:
            with suppress(_NoRows):
                found.setdefault(key, join([each[key] for each in outputs]))
        return type(first)(**found)
    try:
        if loss is None:
            return join(outputs)
        return type(first)((loss, *join([each[1:] for each in outputs])))
    except _NoRows:
        what = "the model returns values that have no row for each sample, so a pipeline cannot "
        what += "put those of the parts of a batch together for compute_loss"
        raise ApplyError(Problem(what, fix="return a mapping of tensors")) from None


def _mean(losses: list[torch.Tensor], counts: list[torch.Tensor | None]) -> torch.Tensor:
    """Return the mean of the parts' losses over what counts in them."""
    every = torch.stack(losses)
    if any(count is None for count in counts):
        return every.mean()
    weights = torch.stack([count for count in counts if count is not None]).to(every.dtype)
    # The mean over no labels is NaN.
    return torch.where(weights > 0, every * weights, 0).sum() / weights.sum()


def is_loss(value: Any) -> bool:
    """Return True if the first item of an output is a loss, and no tensor of logits."""
    return isinstance(value, torch.Tensor) and value.ndim == 0


class _NoRows(Exception):
    """Raised for values of parts that cannot be put together."""


def mapped_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return a pytree with a function of each of its tensors in its place."""
    return tree_map_only(torch.Tensor, function, value)
