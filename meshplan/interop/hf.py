"""`trainer`: the Trainer of transformers, and its subclasses, under a plan.

`meshplan.trainer(Trainer)` returns a subclass that takes `plan=`. The loop that trains, logs, saves
and evaluates stays transformers' business. Which ranks read which samples, how gradients are
reduced and clipped, and what a checkpoint consists of follows from the plan.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from meshplan.errors import ApplyError, MissingStateError, Origin, PlanError, Problem
from meshplan.interop.external_step import ExternalStep
from meshplan.interop.own_loop import each_sample_once
from meshplan.interop.trainer_arguments import argument_problems, check_hooks
from meshplan.interop.trainer_loss import (
    cut_rows,
    fill_rows,
    shifting_as,
    stated_scaling,
    with_share,
)
from meshplan.interop.trainer_pipeline import pipeline_step
from meshplan.runtime.apply.loss.loss_weights import IGNORED
from meshplan.runtime.apply.pipeline.module import PipelinedModule
from meshplan.runtime.apply.wrap import applied, own_module
from meshplan.runtime.parallelize import PlanLike, parallelize, spec_of
from meshplan.runtime.state.load import load
from meshplan.runtime.state.pretrained import save_pretrained
from meshplan.runtime.state.save import save
from meshplan.runtime.torch_private.private import intercept_calls
from meshplan.runtime.train.evaluation import reduce
from meshplan.runtime.train.gradient_scale import clip_grad_norm_
from meshplan.runtime.train.step import data_rank
from meshplan.runtime.watch.guard import guarded

_STATE: Final = "meshplan"
"""Folder of the training state in a checkpoint of the Trainer."""
_DEFAULT_NORM: Final = 1.0
"""`TrainingArguments.max_grad_norm` if it was left out."""


def trainer(base: type) -> type:
    """Return a subclass of transformers' Trainer, or of one of its subclasses, that takes a plan.

    Beside the arguments of `base` it takes `plan`, as for `parallelize`, and `example_inputs`.
    Batch sizes of TrainingArguments are those of one microbatch on one data rank.

    Args:
        base: `transformers.Trainer`, `Seq2SeqTrainer`, or a class derived from them.

    Raises:
        ApplyError: It is no Trainer, or one of another version, or accelerate is missing.

    Example:
        >>> Trainer = meshplan.trainer(transformers.Trainer)
        >>> Trainer(model, args, train_dataset=data, plan="plan.yaml").train()
    """
    try:
        import accelerate  # noqa: F401
        from transformers import Trainer
    except ImportError as error:
        what = f"meshplan.trainer needs the package {error.name}, which is not installed"
        raise ApplyError(Problem(what, fix="pip install accelerate transformers")) from None
    if not (isinstance(base, type) and issubclass(base, Trainer)):
        what = f"{base!r} is not a Trainer of transformers"
        raise ApplyError(Problem(what, fix="pass the class: meshplan.trainer(Trainer)"))
    check_hooks(base)
    return type(f"Planned{base.__name__}", (_Planned, base), {"__doc__": base.__doc__})


class _Planned:
    """The methods of a Trainer that a plan changes. Mixed in before the Trainer's class."""

    # Attributes of the Trainer.
    model: Any
    args: Any
    accelerator: Any
    optimizer: Any
    lr_scheduler: Any
    state: Any
    callback_handler: Any
    model_wrapped: Any
    processing_class: Any
    create_optimizer: Callable[[], Any]
    create_scheduler: Callable[..., Any]
    label_smoother: Any
    compute_loss_func: Any
    model_accepts_loss_kwargs: bool
    _prepare_inputs: Callable[[Any], Any]
    current_gradient_accumulation_steps: int

    def __init__(
        self, *args: Any, plan: PlanLike = "plan.yaml", example_inputs: Any = None, **kwargs: Any
    ) -> None:
        self._plan, self._example_inputs = plan, example_inputs
        self._step: ExternalStep | None = None
        self._is_counted = False
        """True if the loss was last divided by a number of tokens that the caller counted."""
        spec_of(plan)  # An unreadable plan is reported here, not at the first batch.
        super().__init__(*args, **kwargs)
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

    # The model.

    def _planned(self) -> nn.Module:
        """Return the parallelized model; apply the plan when it is needed first."""
        if self._step is None:
            self.label_smoother = shifting_as(self.model, self.label_smoother)
            wrapped = parallelize(self.model, self._plan, example_inputs=self._example_inputs)
            self._check(wrapped)
            self._step = ExternalStep(wrapped)
            # A function, because a copy of the model must not copy this Trainer.
            intercept_calls(wrapped, lambda call, *a, **k: self._called(call, *a, **k))
            # Of a pipeline the whole model without values: it has the config and the forward.
            whole = (
                wrapped.skeleton if isinstance(wrapped, PipelinedModule) else own_module(wrapped)
            )
            self.model, self.model_wrapped = whole, wrapped
            if hasattr(self, "_tp_size"):
                self._tp_size = self.get_tp_size()  # By which TRL divides its count of tokens.
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
        if counted is None or (is_whole and (self._divides or has_more)):
            # A number, because FSDP2 casts tensors to the precision of the computation.
            return call(*args, num_items_in_batch=float(num_items_in_batch), **kwargs)
        return with_share(call(*args, **kwargs), counted, num_items_in_batch)

    @property
    def _divides(self) -> bool:
        """True if the model's loss is that of a causal LM, which divides by the number of items."""
        return getattr(self, "_loss_shifts_labels", False)

    def floating_point_ops(self, inputs: Any) -> int:
        """Return the FLOPs of a batch, of which ranks along tp and pp compute a part each."""
        return super().floating_point_ops(inputs) // self.get_tp_size()  # type: ignore[misc]

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Count the tokens of data ranks alone, by `include_num_input_tokens_seen`."""
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)  # type: ignore[misc]
        copies = self.state.num_input_tokens_seen - before
        self.state.num_input_tokens_seen = before + copies // self.get_tp_size()

    def _check(self, wrapped: nn.Module) -> None:
        """Raise where the arguments contradict the plan; take from it what they leave open."""
        args, plan = self.args, applied(wrapped).given
        spec = plan.spec
        problems = []

        def refuse(what: str, key: str, fix: str) -> None:
            problems.append(Problem(what, spec.origin(key), fix))

        if plan.assignment.stages is not None and getattr(args, "predict_with_generate", False):
            refuse("predict_with_generate=True was given, but a pipeline cannot generate",
                   "mesh.pp", "leave it out, or use a plan without pp")  # fmt: skip
        for name in ("bf16_full_eval", "fp16_full_eval", "torch_empty_cache_steps"):
            if plan.assignment.stages is not None and getattr(args, name, None):
                refuse(f"{name}={getattr(args, name)} was given, which has no effect on a pipeline",
                       "mesh.pp", "leave it out")  # fmt: skip
        if plan.assignment.stages is not None and self._overrides("training_step"):
            refuse("the Trainer has a training_step of its own, which a pipeline would not call",
                   "mesh.pp", "use a plan without pp")  # fmt: skip
        if plan.assignment.context is not None:
            refuse("the Trainer counts tokens of whole sequences, which cp cuts", "mesh.cp",
                   "use a plan without cp, or a loop around meshplan.train_step")  # fmt: skip
        if spec.loss != "mean":
            refuse(f"the plan states loss: {spec.loss}, but the Trainer weights tokens itself",
                   "loss", "leave it out")  # fmt: skip
        if spec.precision.scales_loss:
            refuse("the plan states a float16 loss scale, which the Trainer does not ask for",
                   "precision", "use precision: bf16-mixed")  # fmt: skip
        given = "bf16" if args.bf16 else "fp16" if args.fp16 else ""
        if given:
            own = f"precision: {spec.precision.word}" if spec.precision.word else "no precision"
            refuse(f"{given}=True was given, but the plan states {own}", "precision",
                   f"leave out {given}=, and state the precision in the plan")  # fmt: skip
        if not args.average_tokens_across_devices:
            refuse("average_tokens_across_devices=False weights the tokens of ranks unequally", "",
                   "leave it out")  # fmt: skip
        batch = spec.batch
        if (
            batch.accumulate is not None or batch.global_ is not None
        ) and args.gradient_accumulation_steps != plan.accumulate:
            refuse(f"gradient_accumulation_steps is {args.gradient_accumulation_steps}, but the "
                   f"plan accumulates over {plan.accumulate} microbatches", "batch.accumulate",
                   f"set gradient_accumulation_steps={plan.accumulate}")  # fmt: skip
        if plan.micro is not None and args.per_device_train_batch_size != plan.micro:
            refuse(f"per_device_train_batch_size is {args.per_device_train_batch_size}, but a "
                   f"microbatch of the plan has {plan.micro} samples", "batch.micro",
                   f"set per_device_train_batch_size={plan.micro}")  # fmt: skip
        elif plan.micro is not None and args.auto_find_batch_size:
            refuse("auto_find_batch_size changes the samples of a microbatch, which the plan "
                   "states", "batch.micro", "leave it out")  # fmt: skip
        clip = spec.clip_grad_norm
        if clip is not None and args.max_grad_norm not in (clip, _DEFAULT_NORM):
            refuse(f"max_grad_norm is {args.max_grad_norm}, but the plan clips at {clip}",
                   "clip_grad_norm", "state it in one of them")  # fmt: skip
        if problems:
            raise PlanError(problems)

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
        self.model = whole
        self.create_scheduler(num_training_steps=max_steps)
        if resume is not None:
            folder = os.path.join(resume, _STATE)
            try:
                load(folder, wrapped, self.optimizer, scheduler=self.lr_scheduler)
            except MissingStateError:
                what = "this checkpoint has no training state of meshplan"
                fix = "load its weights into the model, and train without resume_from_checkpoint"
                raise ApplyError(Problem(what, Origin(str(resume)), fix)) from None
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
        from accelerate.data_loader import prepare_data_loader

        ranks, index = self._ranks()
        accelerator = self.accelerator

        def prepare(loader: Any) -> Any:
            return prepare_data_loader(
                loader, accelerator.device, num_processes=ranks, process_index=index,
                split_batches=accelerator.split_batches, put_on_device=True,
                rng_types=accelerator.rng_types.copy(), dispatch_batches=False,
                even_batches=accelerator.even_batches,
                use_seedable_sampler=accelerator.use_seedable_sampler,
                data_seed=accelerator.dataloader_config.data_seed,
            )  # fmt: skip

        accelerator.prepare = prepare
        try:
            return super()._get_dataloader(*args, **kwargs)  # type: ignore[misc]
        finally:
            del accelerator.prepare

    def get_tp_size(self) -> int:
        """Return the number of ranks that have the same samples, by which counts are divided."""
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
        with guarded("training_step"):
            with step.microbatch(self.current_gradient_accumulation_steps, is_last=is_last):
                step.begin(dict(inputs))
                if isinstance(model, PipelinedModule):
                    return pipeline_step(self, step, inputs, num_items_in_batch, is_last=is_last)
                loss = super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
                step.count()
            return loss

    def _overrides(self, name: str) -> bool:
        """Return True if a subclass of the Trainer has a method of its own in place of its."""
        from transformers import Seq2SeqTrainer, Trainer

        kinds = type(self).__mro__
        below = kinds[kinds.index(_Planned) + 1 :]
        return next(k for k in below if name in vars(k)) not in (Trainer, Seq2SeqTrainer)

    def _count_labels(self, inputs: Mapping[str, Any]) -> torch.Tensor | None:
        """Return the number of labels that count, as the Trainer counts; None without labels."""
        labels = inputs.get("shift_labels", inputs.get("labels"))
        if not isinstance(labels, torch.Tensor) or not labels.dim():
            return None
        if getattr(self, "_loss_shifts_labels", False) and "shift_labels" not in inputs:
            labels = labels[..., 1:]
        return (labels != IGNORED).sum()

    def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        assert self._step is not None
        num_items = kwargs.get("num_items_in_batch", args[2] if len(args) > 2 else None)
        self._is_counted = num_items is not None
        with self._step.guarding_loss():
            return super().compute_loss(model, *args, **kwargs)  # type: ignore[misc]

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

    # Evaluation.

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the loss of the batch of all data ranks, as in one process; and this rank's rest.

        The samples that fill up the last batch are repeated ones. They do not count.
        """
        _, index = self._ranks()
        left = self._rest()
        if left is not None and getattr(self, "padding_free", False):
            raise _filled_up("padding_free has its samples in one row, so they cannot be told from "
                             "those that fill it")  # fmt: skip
        size = own = 0
        if left is not None:
            from transformers.trainer_pt_utils import find_batch_size

            size = find_batch_size(inputs) or 0
            own = min(size, max(0, left - index * size))
            cut = cut_rows(inputs, size, own)
            labels = self._labels(inputs)
            if cut is None and any(each.is_floating_point() for each in labels.values()):
                # A loss of classes ignores the label -100; one of numbers does not.
                raise _filled_up("not all of its values have a row for each sample, and no value "
                                 "of float labels says that it does not count")  # fmt: skip
            if cut is None or not own:
                ignored = {name: each.clone() for name, each in labels.items()}
                for each in ignored.values():
                    each[own:] = IGNORED
                inputs, own = {**inputs, **ignored}, size
            else:
                inputs = cut
        counted = self._count_labels(inputs)
        self._is_counted = False
        with guarded("prediction_step"):
            loss, *rest = super().prediction_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
            if own < size:
                rest = fill_rows(rest, own, size)
            if loss is None or counted is None or stated_scaling(self) is False:
                return (loss, *rest)  # Which the Trainer weights by samples.
            if self._is_counted:
                # The Trainer has divided by the tokens of all ranks, and multiplied by the ranks.
                # Subclasses that evaluate by themselves, such as TRL's, may take this rank's mean.
                loss = reduce(loss, "mean", self._planned())
            else:
                count = counted.double()
                total = torch.where(count > 0, loss.double() * count, torch.zeros_like(count))
                both = reduce(torch.stack((total, count)), "sum", self._planned())
                loss = (both[0] / both[1]).to(loss.dtype)
            return (loss, *rest)

    def _labels(self, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return the labels of a batch by name, without those that are one number."""
        found = {name: inputs.get(name) for name in ("labels", "shift_labels")}
        return {k: v for k, v in found.items() if isinstance(v, torch.Tensor) and v.ndim}

    def _rest(self) -> int | None:
        """Return the number of samples in the last batch of all data ranks; None if it is full."""
        state = self.accelerator.gradient_state
        return state.remainder if state.end_of_dataloader and state.remainder > 0 else None

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
        return recursively_apply(lambda tensor: each_sample_once(tensor, mesh)[:rest], every)

    # Checkpoints.

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the weights as a checkpoint of Hugging Face; all ranks call it."""
        folder = output_dir if output_dir is not None else self.args.output_dir
        if self._step is None:
            super().save_model(folder, _internal_call)  # type: ignore[misc]
            return
        save_pretrained(self._step.model, folder)
        if self.processing_class is not None and self.args.should_save:
            self.processing_class.save_pretrained(folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save(
            os.path.join(output_dir, _STATE), self._planned(), self.optimizer,
            step=self.state.global_step, scheduler=self.lr_scheduler,
        )  # fmt: skip

    def _save_scaler(self, output_dir: str) -> None:
        """Do nothing: a state has the loss scale."""

    def _save_rng_state(self, output_dir: str) -> None:
        """Do nothing: a state has the random number generators."""

    def _load_rng_state(self, checkpoint: Any) -> None:
        """Do nothing: `_prepare_for_training` has loaded it."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Do nothing: `_prepare_for_training` loads weights and optimizer together."""

    def _load_best_model(self) -> None:
        load(os.path.join(self.state.best_model_checkpoint, _STATE), self._planned())


def _filled_up(why: str) -> ApplyError:
    """Return the error of a last batch whose samples cannot be told from those that fill it."""
    fix = "choose per_device_eval_batch_size so that all ranks together divide the samples"
    return ApplyError(Problem(f"the last batch of the evaluation is filled up, and {why}", fix=fix))
