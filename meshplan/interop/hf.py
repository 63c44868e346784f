"""`trainer`: the Trainer of transformers, and its subclasses, under a plan.

`meshplan.trainer(Trainer)` returns a subclass that takes `plan=`. The loop that trains, logs, saves
and evaluates stays transformers' business. Which ranks read which samples, how gradients are
reduced and clipped, and what a checkpoint consists of follows from the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshplan.errors import ApplyError, PlanError, Problem
from meshplan.interop.external_step import ExternalStep
from meshplan.interop.extras import need
from meshplan.interop.own_loop import each_sample_once
from meshplan.interop.trainer_arguments import (
    argument_problems,
    check_base,
    plan_problems,
    recording_problems,
)
from meshplan.interop.trainer_batches import (
    LastBatch,
    Rest,
    collected,
    evaluated,
    in_one_order,
    last_batch,
    prepared,
    rest_of,
    smaller_batch,
    warn_of_repeated,
)
from meshplan.interop.trainer_beside import running, unwrap_to
from meshplan.interop.trainer_call import example_of_call
from meshplan.interop.trainer_cut import BatchCut
from meshplan.interop.trainer_folders import last_whole
from meshplan.interop.trainer_groups import join_split_groups
from meshplan.interop.trainer_loss import (
    NumItems,
    fill_rows,
    mean_over_ranks,
    names_ranks,
    own_methods,
    plain_number,
    shifting_as,
    shifts_labels,
    stated_scaling,
    states_no_scaling,
    times,
    weight_of_labels,
    with_share,
)
from meshplan.interop.trainer_pipeline import over_pipelines
from meshplan.interop.trainer_ranks import LossRanks
from meshplan.interop.trainer_saving import Saving
from meshplan.runtime.apply.loss.loss_weights import IGNORED
from meshplan.runtime.apply.pipeline.module import PipelinedModule
from meshplan.runtime.apply.wrap import applied, own_module
from meshplan.runtime.parallelize import PlanLike, parallelize, spec_of
from meshplan.runtime.torch_private.private import intercept_calls
from meshplan.runtime.train.gradient_scale import clip_grad_norm_
from meshplan.runtime.train.step import data_rank
from meshplan.runtime.watch.guard import guarded


def trainer(base: type) -> type:
    """Return a subclass of transformers' Trainer, or of one of its subclasses, that takes a plan.

    Beside the arguments of `base` it takes `plan`, as for `parallelize`, and `example_inputs`.
    Batch sizes of TrainingArguments are those of one microbatch on one data rank.

    Args:
        base: `transformers.Trainer`, `Seq2SeqTrainer`, or a class derived from them.

    Raises:
        ApplyError: It is no Trainer, or one of another version, or a package is missing.

    Example:
        >>> Trainer = meshplan.trainer(transformers.Trainer)
        >>> Trainer(model, args, train_dataset=data, plan="plan.yaml").train()
    """
    for package in ("accelerate", "transformers"):
        need(package, "meshplan.trainer", "'meshplan[hf]' accelerate")
    from transformers import Trainer

    check_base(base, Trainer, _Planned)
    # `over_pipelines` comes between `base` and the Trainer itself, unless `base` is the Trainer.
    last = over_pipelines(Trainer)
    bases = (_Planned, last) if base is Trainer else (_Planned, base, last)
    return type(f"Planned{base.__name__}", bases, {"__doc__": base.__doc__})


class _Planned(Saving):
    """The methods of a Trainer that a plan changes. Mixed in before the Trainer's class."""

    # Attributes of the Trainer.
    model: Any
    accelerator: Any
    callback_handler: Any
    model_wrapped: Any
    create_optimizer: Callable[[], Any]
    create_scheduler: Callable[..., Any]
    label_smoother: Any
    compute_loss_func: Any
    model_accepts_loss_kwargs: bool
    _prepare_inputs: Callable[[Any], Any]
    current_gradient_accumulation_steps: int
    _tr_loss: torch.Tensor

    def __init__(
        self, *args: Any, plan: PlanLike = "plan.yaml", example_inputs: Any = None, **kwargs: Any
    ) -> None:
        self._plan, self._example_inputs = plan, example_inputs
        self._step: ExternalStep | None = None
        self._last: LastBatch | None = None
        """The last batch of an epoch while it is trained on, if it is filled up."""
        self._smaller: tuple[Any, int | None] = (None, None)
        """The last batch of an epoch of one data rank, and its samples if it is smaller."""
        self._num_smaller: int | None = None
        """Number of samples of the batch that is trained on, if it is this one."""
        self._share: float | None = None
        """The weight of the mean over this rank's samples in such a batch."""
        self._now: Rest | None = None
        """The samples that count in the batch a loss is computed for, if it is filled up."""
        self._of_labels: float | None = None
        """The weight of the mean over this rank's labels, if the loss is one."""
        self._is_of_samples = False
        """True if a pipeline computes losses for those samples alone."""
        self._loss_ranks: LossRanks | None = None
        self._cut: BatchCut | None = None
        """The cut of a pipeline's batches; None before the first one."""
        self._shifts_labels = False
        """True if the model's loss is that of a causal LM, which divides by the number of items."""
        spec_of(plan)  # An unreadable plan is reported here, not at the first batch.
        super().__init__(*args, **kwargs)
        if stated_scaling(self) is None and states_no_scaling(self):
            self.loss_is_scaled_for_ga = False
        if self.optimizer is not None or self.lr_scheduler is not None:
            what = "optimizers= was given, but applying a plan replaces the parameters of the model"
            fix = (
                "pass optimizer_cls_and_kwargs=(torch.optim.AdamW, {'lr': 1e-4}), or optim= and "
                "lr_scheduler_type= in args; for a scheduler of your own override create_scheduler"
            )
            raise ApplyError(Problem(what, fix=fix))

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, of arguments that a plan leaves room for."""
        if problems := argument_problems(self.args):
            raise ApplyError(problems)
        super().create_accelerator_and_postprocess()  # type: ignore[misc]

    def call_model_init(self, trial: Any = None) -> Any:
        """Raise: each call makes another model, but a plan is applied to one."""
        what = "model_init was given, which makes another model in each train(), but a plan is "
        what += "applied to one"
        fix = "pass model=model_init(), and make a new Trainer for each training"
        raise ApplyError(Problem(what, fix=fix))

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train; with True, go on from the newest checkpoint that was written to its end."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_whole(self.args.output_dir) or True
        return super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]

    # The model.

    def _planned(self) -> nn.Module:
        """Return the parallelized model; apply the plan when it is needed first."""
        if self._step is None:
            if problems := recording_problems(self, spec_of(self._plan)):
                raise PlanError(problems)
            self._shifts_labels = shifts_labels(self)
            self.label_smoother = shifting_as(self.model, self.label_smoother)
            example = self._example_inputs
            if (
                example is None
                and self._overrides("compute_loss")
                and spec_of(self._plan).reads_flow
            ):
                example = example_of_call(self)
            wrapped = parallelize(self.model, self._plan, example_inputs=example)
            if problems := plan_problems(self, applied(wrapped).given):
                raise PlanError(problems)
            self._step = ExternalStep(wrapped)
            self._loss_ranks = LossRanks(self.accelerator, wrapped, lambda: self._now)
            # A function, because a copy of the model must not copy this Trainer.
            intercept_calls(wrapped, lambda call, *a, **k: self._called(call, *a, **k))
            # Of a pipeline the whole model without values: it has the config and the forward.
            whole = (
                wrapped.skeleton if isinstance(wrapped, PipelinedModule) else own_module(wrapped)
            )
            self.model, self.model_wrapped = whole, wrapped
            unwrap_to(self.accelerator, wrapped, whole)
        wrapped = self._step.model
        if not any(each is wrapped for each in self.accelerator._models):
            self.accelerator._models.append(wrapped)  # It is prepared.
        return wrapped

    def _called(
        self, call: Callable[..., Any], *args: Any, num_items_in_batch: Any = None, **kwargs: Any
    ) -> Any:
        """Call the model; its loss is that of its labels, of so many that count in the step.

        Not every model that accepts the number divides by it, such as T5 and many of BERT's: the
        Trainer multiplies the mean of such a loss by the number of ranks.
        """
        if num_items_in_batch is None:
            return call(*args, **kwargs)
        counted = self._count_labels(kwargs)
        config = getattr(self.model, "config", None)
        is_whole = not isinstance(self.model_wrapped, PipelinedModule)
        # The loss of its experts is added to the mean as it is.
        has_more = getattr(config, "output_router_logits", False)
        if counted is None or (is_whole and (self._shifts_labels or has_more)):
            # A number, because FSDP2 casts tensors to the precision of the computation.
            number = plain_number(num_items_in_batch, is_used=counted is not None)
            return call(*args, num_items_in_batch=number, **kwargs)
        return with_share(call(*args, **kwargs), counted, num_items_in_batch)

    def floating_point_ops(self, inputs: Any) -> int:
        """Return the FLOPs of a batch, of which ranks along tp and pp compute a part each."""
        inputs = self._counted(inputs)
        return super().floating_point_ops(inputs) // self.get_tp_size()  # type: ignore[misc]

    def _counted(self, inputs: Any) -> Any:
        """Return the samples of a batch that count."""
        return self._last.counted if self._last and inputs is self._last.batch else inputs

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Count the tokens of data ranks alone, by `include_num_input_tokens_seen`."""
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(self._counted(inputs))  # type: ignore[misc]
        copies = self.state.num_input_tokens_seen - before
        self.state.num_input_tokens_seen = before + copies // self.get_tp_size()

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        return self._planned()

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Do nothing: `parallelize` moves the model."""

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume: Any) -> Any:
        wrapped = self._planned()
        self.optimizer = self.lr_scheduler = None
        whole = self.model
        if isinstance(wrapped, PipelinedModule):
            self.model = wrapped  # Whose parameters are those of this rank's stages.
        self.create_optimizer()
        if not self._overrides("create_optimizer"):
            names = set(self.get_decay_parameter_names(self.model))
            decaying = {id(p) for name, p in self.model.named_parameters() if name in names}
            join_split_groups(self.optimizer, decaying, self.args.weight_decay)
        self.model = whole
        self.create_scheduler(num_training_steps=max_steps)
        if resume is not None:
            self._load_state(resume)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        return wrapped, train_dataloader

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Return the parameters that weight decay applies to, by the kinds of their modules."""
        if not isinstance(model, PipelinedModule):
            return super().get_decay_parameter_names(model)  # type: ignore[misc]
        names = set(super().get_decay_parameter_names(model.skeleton))  # type: ignore[misc]
        # The copy that another stage has of a tied weight is the same weight.
        return [name for name, _ in model.named_parameters() if name.split("@")[0] in names]

    # Data.

    def _ranks(self) -> tuple[int, int]:
        """Return the number of data ranks, and the index of this one."""
        return data_rank(self._planned())

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Let accelerate split batches over the data ranks only."""
        ranks, index = self._ranks()
        accelerator = self.accelerator

        def prepare(loader: Any) -> Any:
            return prepared(loader, accelerator, ranks, index)

        accelerator.prepare = prepare
        try:
            return super()._get_dataloader(*args, **kwargs)  # type: ignore[misc]
        finally:
            del accelerator.prepare

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        sampler = super()._get_train_sampler(*args, **kwargs)  # type: ignore[misc]
        return in_one_order(sampler, self._ranks()[0])

    def _get_eval_sampler(self, *args: Any, **kwargs: Any) -> Any:
        sampler = super()._get_eval_sampler(*args, **kwargs)  # type: ignore[misc]
        return in_one_order(sampler, self._ranks()[0])

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Collect the batches of a step; samples that fill up the last one are not counted."""
        batches = []
        state = self.accelerator.gradient_state
        for batch in collected(epoch_iterator, num_batches):
            batches.append(batch)
            self._last = self._last_batch(batch)
            if state.end_of_dataloader and self._ranks()[0] == 1:
                self._smaller = batch, smaller_batch(state.active_dataloader)
        counted = [*batches[:-1], self._last.counted] if self._last is not None else batches
        _, num_items = super().get_batch_samples(  # type: ignore[misc]
            iter(counted), len(counted), device
        )
        return batches, num_items

    def _last_batch(self, batch: Any) -> LastBatch | None:
        """Return the last batch of an epoch, if it is filled up; None for any other batch."""
        rest = self._rest()
        last = None if rest is None else last_batch(batch, rest, self._collated_anew)
        if rest is not None and last is None:
            warn_of_repeated(rest, "a worker reads the dataset, and its rows are no samples")
        return last

    def _collated_anew(self, number: int) -> Any:
        """Return a batch of the first samples of the loader's last one; None if not known."""
        from meshplan.interop.trainer_stream import collated_anew

        batch = collated_anew(self.accelerator.gradient_state.active_dataloader, number)
        return None if batch is None else self._prepare_inputs(batch)

    def get_tp_size(self) -> int:
        """Return the number of ranks that have the same samples, by which counts are divided."""
        if self._loss_ranks is not None and self._loss_ranks.is_inside:
            return 1  # Counts are of the data ranks.
        return dist.get_world_size() // self._ranks()[0] if self._step is not None else 1

    def get_cp_size(self) -> int:
        """Return 1: plans with cp are refused."""
        return 1

    def get_sp_size(self) -> int:
        """Return 1: no plan cuts sequences as DeepSpeed does."""
        return 1

    # A step.

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        step = self._step
        assert step is not None
        is_last = self.accelerator.gradient_state.sync_gradients
        is_cut = isinstance(model, PipelinedModule)
        last = self._last if self._last and inputs is self._last.batch else None
        # A pipeline needs all rows: `pipeline_step` sees to it which of them count.
        own = inputs if last is None or is_cut else last.own
        self._now = None if last is None else last.rest
        self._num_smaller = self._smaller[1] if inputs is self._smaller[0] else None
        with guarded("training_step"):
            with step.microbatch(self.current_gradient_accumulation_steps, is_last=is_last):
                step.begin(dict(inputs))
                self._share = None if last is None else last.share
                self._of_labels = weight_of_labels(self, self._counted(inputs))
                try:
                    loss = super().training_step(model, own, num_items_in_batch)  # type: ignore[misc]
                finally:
                    self._share = self._now = self._of_labels = None
                    self._is_of_samples = False
                if not is_cut:
                    step.count()
            return loss

    @contextmanager
    def _all_samples(self) -> Iterator[None]:
        """Compute losses inside as if all samples of a batch counted that is filled up."""
        before = self._share, self._now
        self._share = self._now = None
        try:
            yield
        finally:
            self._share, self._now = before

    def _overrides(self, name: str) -> bool:
        """Return True if a subclass of the Trainer has a method of its own in place of its."""
        return bool(own_methods(type(self), _Planned, name))

    def _count_labels(self, inputs: Mapping[str, Any]) -> torch.Tensor | None:
        """Return the number of labels that count, as the Trainer counts; None without labels."""
        labels = inputs.get("shift_labels", inputs.get("labels"))
        if not isinstance(labels, torch.Tensor) or not labels.dim():
            return None
        if self._shifts_labels and "shift_labels" not in inputs:
            labels = labels[..., 1:]
        return (labels != IGNORED).sum()

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute a loss whose mean over the data ranks is the loss of one process.

        The number of items is that of all ranks: the Trainer multiplies its own losses by the
        number of ranks, but one that divides by it in a `compute_loss` of its own may not.
        """
        if self._step is None or self._loss_ranks is None:
            return super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]
        names = ("return_outputs", "num_items_in_batch")
        kwargs.update(zip(names, args, strict=False))
        number = kwargs.get("num_items_in_batch")
        items = NumItems(number) if number is not None else None
        if items is not None:
            kwargs["num_items_in_batch"] = items.number
        counted = self._count_labels(inputs) if items is not None else None
        with self._step.guarding_loss(), self._loss_ranks as seen:
            found = super().compute_loss(model, inputs, **kwargs)  # type: ignore[misc]
        is_used = items is not None and items.is_used and stated_scaling(self) is not False
        seen.is_counted = is_used
        is_multiplied = seen.is_read or names_ranks(
            own_methods(type(self), _Planned, "compute_loss")
        )
        factor = 1.0 if self._share is None or (is_used and self._share) else self._share
        if self._of_labels is not None:
            factor = self._of_labels
        if is_used and not is_multiplied:
            factor *= self._ranks()[0]
        elif items is not None and not is_used and self.compute_loss_func is not None:
            factor /= self._ranks()[0]  # The Trainer has multiplied a mean.
        return times(found, factor, counted)

    def _clip_grad_norm(self, model: Any) -> Any:
        clip = applied(self._planned()).plan.spec.clip_grad_norm
        return self._norm(self.args.max_grad_norm if clip is None else clip)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        clip = applied(self._planned()).plan.spec.clip_grad_norm
        return grad_norm if grad_norm is not None else self._norm(clip or float("inf"))

    def _norm(self, largest: float) -> torch.Tensor:
        """Check and clip the gradients of a step; return their norm."""
        step = self._step
        assert step is not None
        step.before_step(self.optimizer)
        norm = clip_grad_norm_(step.model, largest)
        step.finish()
        return norm

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """End the training; of losses after the last log, too, the mean over the ranks counts."""
        self._tr_loss = self.accelerator.gather(self._tr_loss).mean()
        return super()._finalize_training(*args, **kwargs)  # type: ignore[misc]

    # Evaluation.

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the loss of the batch of all data ranks, as in one process; and this rank's rest.

        The samples that fill up the last batch are repeated ones. They do not count.
        """
        self._now = last = self._rest()
        own = rows = 0
        if last is not None:
            inputs, own, rows = evaluated(inputs, last, self._collated_anew)
        counted = self._count_labels(inputs)
        noted = self._loss_ranks
        assert noted is not None
        noted.is_counted = False
        with guarded("prediction_step"), running(self._planned(), self.model):
            loss, *rest = super().prediction_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
            self._now = None
            if own < rows:
                rest = fill_rows(rest, own, rows)
            # A mean over samples is weighted by the Trainer.
            if loss is not None and counted is not None and stated_scaling(self) is not False:
                loss = mean_over_ranks(loss, counted, noted.is_counted, self._planned())
            return (loss, *rest)

    def _rest(self) -> Rest | None:
        """Return what is known of a last batch that is filled up; None for any other batch."""
        state = self.accelerator.gradient_state
        return rest_of(state.active_dataloader, *self._ranks()) if state.end_of_dataloader else None

    @property
    def gather_function(self) -> Callable[[Any], Any]:
        """The function that gathers tensors of an evaluation, each sample once."""
        return self._gather_samples

    @gather_function.setter
    def gather_function(self, function: Any) -> None:
        """Do nothing: the Trainer sets accelerate's, which counts copies along tp."""

    def _gather_samples(self, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        from accelerate.utils.operations import recursively_apply

        every = self.accelerator.gather(tensors)
        mesh, rest = applied(self._planned()).plan.mesh, self._rest()
        left = None if rest is None else rest.left
        return recursively_apply(lambda tensor: each_sample_once(tensor, mesh)[:left], every)
