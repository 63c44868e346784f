"""A step of a Trainer on a pipeline, with the Trainer's own way to compute a loss."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from meshplan.errors import ApplyError, Problem
from meshplan.interop.last_stage import on_last_stage
from meshplan.interop.trainer_apart import apart, changes, logs_of, same
from meshplan.interop.trainer_batches import (
    Rest,
    warn_of_repeated,
    without_labels,
)
from meshplan.interop.trainer_beside import ForwardBeside, answering
from meshplan.interop.trainer_call import drawing_nothing, inputs_of_call
from meshplan.interop.trainer_cut import BatchCut, find_cut, num_rows
from meshplan.interop.trainer_loss import is_loss, loss_of, replaced, stated_scaling, with_share
from meshplan.runtime.apply.loss.loss_weights import zero_of
from meshplan.runtime.apply.pipeline.answer import as_inputs
from meshplan.runtime.apply.pipeline.module import PipelinedModule
from meshplan.runtime.base.batch import chunked
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
    ranks = trainer._loss_ranks
    if trainer._cut is None:
        with ranks.alone(), trainer._all_samples():
            call = inputs_of_call(trainer, model.skeleton, inputs, num_items)
            tried = _LastStageLoss(trainer, model, inputs, num_items).tried
            is_own, samples = trainer._overrides("compute_loss"), trainer._train_batch_size
            found = find_cut(model, inputs, call, samples, tried) if is_own else BatchCut()
            trainer._cut = found
    inputs = _that_divide(trainer, model, inputs)
    loss = _LastStageLoss(trainer, model, inputs, num_items)
    with ranks.alone():
        call = inputs_of_call(trainer, model.skeleton, inputs, num_items)
    ordered = loss.cut_by(trainer._cut, call)

    def take(output: Any, part: Any) -> torch.Tensor:
        found = loss.of_part(output, *part)
        # `run_pipeline` divides by the number of microbatches in any case.
        return found * count if is_scaled else found

    is_last = trainer.accelerator.gradient_state.sync_gradients
    total = step.run_pipeline(ordered[1], ordered, take, count, is_last=is_last)
    step.release()
    if loss.is_own:
        loss.share_effects(call)
    return total / count


def _that_divide(trainer: Any, model: PipelinedModule, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return a microbatch that divides into parts, and note on the Trainer which samples count.

    The last batch of an epoch may be filled up, by accelerate for several data ranks or here.
    """
    cut, rest, count = trainer._cut, trainer._now, model.pipeline.microbatches
    if rest is None:
        own = trainer._num_smaller
        if own is None or own % count == 0:
            return inputs
        rest = Rest(own, own + count - own % count, 1, 0)
        places = [*range(own), *[0] * (rest.size - own)]
        inputs = cut.samples(inputs, num_rows(inputs), own, places)
        trainer._now, trainer._share = rest, 1.0
    labels = without_labels(inputs, rest.own)
    is_of_labels = stated_scaling(trainer) is not False and all(
        len(each) == rest.size and not each.is_floating_point() for each in labels.values()
    )
    if labels and is_of_labels:
        return {**inputs, **labels}
    if stated_scaling(trainer) is False and cut.is_of_rows:
        trainer._is_of_samples = True
        return inputs
    warn_of_repeated(rest, "the model's own loss is a mean over all of its rows")
    trainer._now = trainer._share = None
    return inputs


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
        rest = trainer._now if trainer._is_of_samples else None
        self._rest = rest
        """The samples that count, if losses are to be computed for them alone."""
        self._whole = trainer._count_labels(inputs)
        """Number of labels in the microbatch that count; None if it has no such labels."""
        own = trainer._overrides("compute_loss") or trainer.compute_loss_func is not None
        self.is_own = bool(own)
        """True if the loss is not that of the model or the Trainer."""
        # In the first step, the loss of the parts is compared with that of the whole.
        self._is_kept = self.is_own and not trainer._step.state.is_tested
        self._cut = BatchCut()
        self._beside: list[list[Any]] = []
        """Outputs of the extra forwards without gradients, for each part."""
        self._outputs: list[Any] = []
        self._counts: list[torch.Tensor | None] = []
        self._losses: list[torch.Tensor] = []

    def cut_by(self, cut: BatchCut, call: Any) -> tuple[dict[str, Any], Any]:
        """Run the forwards beside, and return the microbatch in the order in which it is cut.

        Args:
            cut: How it is cut.
            call: The inputs of the model in the microbatch.
        """
        self._cut, count = cut, self._model.pipeline.microbatches
        ordered: Any = cut.ordered((self._inputs, call), num_rows(self._inputs), count)
        if cut.beside:
            parts = chunked(ordered, count)
            self._beside = [[one.run(self._model, *part) for one in cut.beside] for part in parts]
        return ordered

    def tried(
        self, output: Any, part: dict[str, Any], call: Any, beside: Sequence[ForwardBeside],
        outputs: Sequence[Any], *, is_search: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """Return the loss of a part that no step is taken by, as `of_part` does."""
        copied = apart(self._trainer)
        with self._trainer._loss_ranks.alone():
            loss = self._computed(copied, output, part, call, beside, outputs, is_search=is_search)
        return loss if part is self._inputs else self._weighted(loss, output, part)

    def of_part(self, output: Any, part: dict[str, Any], call: Any) -> torch.Tensor:
        """Return a part's loss, of which the mean over the parts is that of the microbatch.

        Args:
            output: The output of the last stage for this part.
            part: The inputs of the part, labels included.
            call: The inputs of the model among them.
        """
        trainer, copied = self._trainer, apart(self._trainer)
        ranks = trainer._loss_ranks
        number = len(self._losses)
        outputs = self._beside[number] if self._beside else ()
        given, weight = (output, part, call, outputs), 1.0
        if self._rest is not None:
            given, weight = self._that_count_in(number, given)
        out, own, of_call, others = given
        with ranks.alone():
            loss = self._computed(copied, out, own, of_call, self._cut.beside, others)
        if weight:
            loss = self._weighted(loss, output, part) * weight
        else:
            loss = zero_of(output, loss).to(loss.dtype)
        self._losses.append(loss.detach())
        has_effects = bool(weight and (ranks.is_exchanged or changes(copied) or logs_of(copied)))
        if has_effects and not self._is_kept and len(self._losses) > 1:
            what = "compute_loss gathers, logs or keeps something for some samples of a batch, but "
            what += "not for the first ones, and a pipeline cuts a batch into parts"
            raise ApplyError(Problem(what, fix="do so for all samples, or use a plan without pp"))
        self._is_kept |= has_effects
        if self._is_kept:
            self._outputs.append(mapped_tensors(torch.Tensor.detach, output))
            self._counts.append(trainer._count_labels(part))
        return loss

    def _computed(
        self, copied: Any, output: Any, inputs: Any, call: Any, beside: Sequence[ForwardBeside],
        outputs: Sequence[Any], *, is_search: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        counted = copied._count_labels(inputs)
        given = dict(inputs)
        with (
            on_last_stage("compute_loss"),
            answering(self._model, beside, outputs, inputs, call, is_search=is_search) as again,
        ):
            answer = LastStage(self._model, output, call, counted, again)
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
        counted, whole = trainer._count_labels(part), self._whole
        stated = stated_scaling(trainer)
        is_empty = counted is not None and not int(counted)
        # The mean over no labels is NaN. A loss may be zero for them by another way than its own.
        if stated is None and is_empty and bool(loss.isnan() | (loss == 0)):
            return zero_of(output, loss).to(loss.dtype)
        if stated or (stated is None and trainer._loss_ranks.is_counted):
            return loss * num  # A share of the mean over the step.
        if stated is None and (trainer._overrides("compute_loss") or trainer.compute_loss_func):
            what = "compute_loss returned a mean over samples or tokens, and a pipeline does not "
            what += "know which of them"
            fix = "set trainer.loss_is_scaled_for_ga = False for a mean over the samples of a "
            fix += "batch, or divide a sum by num_items_in_batch"
            raise ApplyError(Problem(what, fix=fix))
        if stated is None and counted is not None and whole is not None and int(whole):
            if is_empty:
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
        cut: tuple[Any, ...] = self._cut.samples(
            every, num_rows(self._inputs), rest.size, list(range(rest.own))
        )
        return cut

    def _that_count_in(self, number: int, part: tuple[Any, ...]) -> tuple[tuple[Any, ...], float]:
        """Return what counts in a part, and its weight in the mean over parts; 0.0 if nothing does.

        Args:
            number: Number of the part.
            part: Output, inputs and what else has rows for the samples of the part.
        """
        rest = self._rest
        assert rest is not None
        num = self._model.pipeline.microbatches
        size = rest.size // num
        own = min(size, max(0, rest.own - number * size))
        if own in (0, size):
            return part, own * num / max(rest.own, 1)
        output, inputs, *others = part
        if is_loss(loss_of(output)):
            output = replaced(output, None)  # It is that of all rows.
        cut: tuple[Any, ...] = self._cut.samples(
            (output, inputs, *others), num_rows(inputs), size, list(range(own))
        )
        return cut, own * num / rest.own

    def _raise_together(self, error: ApplyError | None) -> None:
        """Raise the error of this data rank or of another one on all of them."""
        ranks = self._trainer._loss_ranks
        if not int(ranks.stacked(torch.tensor(int(error is not None), device=device())).sum()):
            return
        raise next(each for each in ranks.objects([error]) if each is not None)

    def _joined(self) -> list[Any]:
        """Return the output of the microbatch, and those of the forwards beside."""
        rows, count = num_rows(self._inputs), self._model.pipeline.microbatches
        every = [self._outputs, *(list(each) for each in zip(*self._beside, strict=True))]
        found = [joined(outputs, self._counts, rows) for outputs in every]
        return [self._cut.ordered(each, rows, count, back=True) for each in found]

    def _effects(self, call: Any) -> tuple[dict[str, Any], list[Any]]:
        copied = apart(self._trainer)
        inputs, call, output, *others = self._that_count(call, *self._joined())
        try:
            with torch.no_grad(), drawing_nothing():
                whole = self._computed(copied, output, inputs, call, self._cut.beside, others)
        except (AttributeError, KeyError) as error:
            if not isinstance(output, Mapping) or len(output) == len(self._outputs[0]):
                raise
            left = [key for key in self._outputs[0] if key not in output]
            what = f"compute_loss failed without {', '.join(left)} of the model's output, which "
            what += "has no row for each sample, so a pipeline cannot put the parts of a batch "
            what += f"together: {type(error).__name__}: {error}"
            raise ApplyError(Problem(what, fix="use a plan without pp")) from error
        mean = torch.stack([each.double() for each in self._losses]).mean()
        own = float(whole)  # 0.0 on a data rank without samples.
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
        again: Returns the output of another call without gradients.
    """

    def __init__(
        self,
        model: PipelinedModule,
        output: Any,
        call: Any,
        counted: torch.Tensor | None,
        again: Callable[..., Any],
    ) -> None:
        self._model, self._output, self._call, self._counted = model, output, call, counted
        self._is_called, self._again = False, again

    def __call__(self, *args: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        if self._is_called and not torch.is_grad_enabled():
            if num_items_in_batch is not None:
                kwargs["num_items_in_batch"] = num_items_in_batch
            return self._again(*args, **kwargs)
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


class _NoRows(Exception):
    """Raised for values of parts that cannot be put together."""


def mapped_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return a pytree with a function of each of its tensors in its place."""
    return tree_map_only(torch.Tensor, function, value)
