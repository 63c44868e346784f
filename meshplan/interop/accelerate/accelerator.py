"""`MeshplanAccelerator`: a loop written with accelerate, under a plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils.operations import recursively_apply
from torch import nn

from meshplan.errors import ApplyError, PlanError, Problem
from meshplan.interop.accelerate.prepared import (
    PlannedOptimizer,
    PlannedScheduler,
    ReplacedParameters,
)
from meshplan.interop.accelerate.state import PlannedState, setting_problems
from meshplan.interop.external_step import ExternalStep
from meshplan.interop.own_loop import (
    LoopWords,
    check_axes,
    each_sample_once,
    loop_problems,
    ranks_with_own_samples,
    reduction_of,
)
from meshplan.interop.second_strategy import strategy_problems
from meshplan.layout.mesh import DATA_AXES, Mesh
from meshplan.runtime.apply.wrap import applied, own_module, set_accumulate
from meshplan.runtime.parallelize import PlanLike, parallelize, spec_of
from meshplan.runtime.train.gradient_scale import clip_grad_norm_, clip_grad_value_
from meshplan.runtime.train.state import full_state_dict
from meshplan.runtime.watch.guard import guarded
from meshplan.spec.strategies import resolve_mesh

_WORDS: Final = LoopWords(
    loop="a loop of accelerate",
    instead="meshplan.trainer(Trainer)",
    prepare="accelerator.prepare",
    backward="accelerator.backward",
    clip="accelerator.clip_grad_norm_(model.parameters(), {norm})",
    accumulate="pass gradient_accumulation_steps={count}",
)


class MeshplanAccelerator(Accelerator):
    """An Accelerator whose `prepare` applies a plan: `MeshplanAccelerator(plan="plan.yaml")`.

    `num_processes` and `process_index` count the ranks that read samples of their own, so that
    schedules and samplers of a script which reads them stay right. The main process is rank 0.

    Args:
        plan: A plan, as for `meshplan.parallelize`.
        example_inputs: Inputs of the model, as for `meshplan.parallelize`.
        allow_code: If False, a plan with `apply: "pkg.mod:function"` is rejected.
        **settings: Arguments of `accelerate.Accelerator`.

    Raises:
        SpecError: The plan cannot be read.
        ApplyError: A setting contradicts any plan.
    """

    def __init__(
        self,
        *,
        plan: PlanLike = "plan.yaml",
        example_inputs: Any = None,
        allow_code: bool = True,
        **settings: Any,
    ) -> None:
        self._plan, self._spec = plan, spec_of(plan)
        self._example_inputs, self._allow_code = example_inputs, allow_code
        self._step: ExternalStep | None = None
        self._replaced: ReplacedParameters | None = None
        self._planned_state: PlannedState | None = None
        self._planned_optimizer: PlannedOptimizer | None = None
        # Before accelerate reads them, which fails if DeepSpeed or Megatron-LM is not installed.
        if problems := strategy_problems(settings):
            raise ApplyError(problems)
        super().__init__(**settings)
        if problems := [*setting_problems(self), *self._setting_problems()]:
            raise ApplyError(problems)

    def _setting_problems(self) -> Iterator[Problem]:
        """Yield the settings that a plan decides, or leaves no room for."""
        if self.state.dynamo_plugin.backend.name != "NO":
            what = "the Accelerator was given a dynamo backend, but the plan decides this"
            yield Problem(what, fix="leave it out, and say compile: true in the plan")
        if self.ddp_handler is not None:
            what = "DistributedDataParallelKwargs were given, but the plan decides this"
            fix = "leave them out, and say ddp: {find_unused_parameters: true} in the plan"
            yield Problem(what, fix=fix)
        if self.parallelism_config is not None:
            what = "the Accelerator was given a parallelism_config, but the plan decides this"
            yield Problem(what, fix="leave it out: the plan states how the model is sharded")
        if self.dataloader_config.dispatch_batches:
            what = "dispatch_batches=True was given, but every rank reads its own batches"
            yield Problem(what, fix="leave it out")
        if not self.even_batches:
            what = "even_batches=False lets ranks have unequal numbers of batches, for which the "
            what += "others would wait"
            yield Problem(what, fix="leave it out: gather_for_metrics counts each sample once")
        if self.gradient_state.plugin_kwargs.get("sync_each_batch"):
            what = "sync_each_batch=True was given, but the plan decides when gradients are reduced"
            yield Problem(what, fix="leave it out")

    # The ranks with samples of their own.

    @property
    def _mesh(self) -> Mesh:
        """The plan's mesh, also before the model is prepared."""
        if self._step is not None:
            return applied(self._step.model).plan.mesh
        if self._spec.free_fields:
            what = "the plan leaves its mesh to the planner, which needs the model"
            fix = "prepare the model before loaders, and before num_processes is read; or write "
            fix += "the mesh that meshplan plan chooses into the plan"
            raise PlanError(Problem(what, self._spec.origin("mesh"), fix))
        return resolve_mesh(self._spec, super().num_processes)[0]

    @property
    def num_processes(self) -> int:
        """Number of ranks that read samples of their own."""
        return self._mesh.size(*DATA_AXES)

    @property
    def process_index(self) -> int:
        """Index of this rank among those that read samples of their own."""
        return self._mesh.index(super().process_index, DATA_AXES)

    @property
    def is_last_process(self) -> bool:
        """True on one rank, the last one."""
        return bool(self.state.is_last_process)

    @property
    def dispatch_batches(self) -> bool:
        """False: every rank reads its own batches."""
        return False

    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Any:
        """Return the context of accelerate; raise if ranks share their samples."""
        if self._has_copies:
            what = "split_between_processes takes every rank for a data rank, but ranks of the "
            what += "plan share their samples"
            fix = "take inputs[accelerator.process_index :: accelerator.num_processes]"
            raise ApplyError(Problem(what, fix=fix))
        return super().split_between_processes(inputs, apply_padding)

    @property
    def _has_copies(self) -> bool:
        mesh = self._mesh
        return mesh.size(*DATA_AXES) < mesh.world_size

    # What a script prepares.

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """Apply the plan to the model, then prepare what follows from it, in any order."""
        found: dict[int, Any] = {}
        for number, each in enumerate(args):
            if isinstance(each, nn.Module):
                found[number] = self.prepare_model(each)
        if rest := [number for number in range(len(args)) if number not in found]:
            places = None if device_placement is None else [device_placement[n] for n in rest]
            done = super().prepare(*(args[n] for n in rest), device_placement=places)
            found |= zip(rest, done if len(rest) > 1 else (done,), strict=True)
        return tuple(found[n] for n in range(len(args))) if len(args) != 1 else found[0]

    def prepare_model(
        self, model: nn.Module, device_placement: Any = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Apply the plan.

        Raises:
            ApplyError: Another model was prepared before.
            PlanError: The plan does not fit the model, or states what the loop does itself.
        """
        if self._step is not None and self._step.model is model:
            return model
        if self._step is not None:
            what = "prepare was called for a second model, but a plan describes one"
            fix = "make the models parts of one module, or meshplan.parallelize the second"
            raise ApplyError(Problem(what, self._spec.origin(""), fix))
        check_axes(self._spec, super().num_processes, _WORDS)
        replaced = ReplacedParameters(model)
        wrapped = parallelize(
            model, self._plan, example_inputs=self._example_inputs, allow_code=self._allow_code
        )
        count = self.gradient_accumulation_steps
        if problems := loop_problems(applied(wrapped).given, _WORDS, accumulate=count):
            raise PlanError(problems)
        replaced.see(wrapped)
        set_accumulate(wrapped, count)
        self._replaced, self._step = replaced, ExternalStep(wrapped)
        self._planned_state = PlannedState(wrapped, None)
        self._planned_state.register(self)
        return wrapped

    def prepare_data_loader(self, *args: Any, **kwargs: Any) -> Any:
        """Let each data rank read its part of the batches."""
        self._mesh  # noqa: B018  An open mesh is reported before accelerate reads the ranks.
        return super().prepare_data_loader(*args, **kwargs)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: Any = None
    ) -> Any:
        """Return the optimizer of the plan's parameters, also if it was made before them.

        Raises:
            ApplyError: No model was prepared, or another optimizer was, or it has states already.
        """
        if optimizer is self._planned_optimizer:
            return optimizer
        if self._step is None or self._replaced is None or self._planned_state is None:
            what = "an optimizer was prepared before its model"
            raise ApplyError(Problem(what, fix="pass both to prepare, or the model first"))
        if self._planned_optimizer is not None:
            what = "prepare was called for a second optimizer, but a state has one"
            raise ApplyError(Problem(what, fix="use one optimizer with several parameter groups"))
        self._replaced.follow(optimizer)
        self._planned_state.optimizer = optimizer
        self._planned_optimizer = PlannedOptimizer(optimizer, self._step)
        return self._planned_optimizer

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Return a scheduler that steps as often as accelerate's would with so many data ranks."""
        if isinstance(scheduler, PlannedScheduler):
            return scheduler
        if self._planned_optimizer is None or self._planned_state is None:
            what = "a scheduler was prepared before its optimizer"
            raise ApplyError(Problem(what, fix="pass both to prepare, or the optimizer first"))
        follows, steps = self.step_scheduler_with_optimizer, 1
        if follows and not self.split_batches:
            steps = self.num_processes
        planned = PlannedScheduler(
            scheduler, self._planned_optimizer, num_steps=steps, step_with_optimizer=follows
        )
        self._planned_state.scheduler_steps = steps
        self._schedulers.append(planned)
        return planned

    def free_memory(self, *objects: Any) -> Any:
        """Forget what was prepared, and the plan's model with it."""
        if self._planned_state is not None:
            self._planned_state.remove(self)
        self._step = self._replaced = self._planned_state = self._planned_optimizer = None
        return super().free_memory(*objects)

    # Steps.

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Run a microbatch inside; the last one of a step completes the gradients."""
        step = self._planned("accumulate")
        # accelerate counts the microbatches, and knows the end of the loader.
        with super().accumulate(), step.own_microbatch(is_last=self.sync_gradients):
            yield

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Run a microbatch inside that is not the last one of its step."""
        with self._planned("no_sync").own_microbatch(is_last=False):
            yield

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run backward, of the scaled loss under fp16."""
        with guarded("backward"):
            super().backward(self._planned("backward").scaled(loss), **kwargs)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """True if the last step was left out because a gradient overflowed float16."""
        return self._planned_optimizer is not None and self._planned_optimizer.step_was_skipped

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide the gradients by the fp16 loss scale."""
        if self._planned_optimizer is not None:
            self._planned("unscale_gradients").before_step(self._planned_optimizer.optimizer)

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: int = 2
    ) -> torch.Tensor:
        """Clip by the norm over all meshes; return it."""
        model = self._whole(parameters, "clip_grad_norm_")
        self.unscale_gradients()
        return clip_grad_norm_(model, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clamp each element of the gradients."""
        model = self._whole(parameters, "clip_grad_value_")
        self.unscale_gradients()
        clip_grad_value_(model, clip_value)

    def _planned(self, name: str) -> ExternalStep:
        """Return the steps of the model; raise if there is none yet."""
        if self._step is None:
            what = f"accelerator.{name} was called before a model was prepared"
            raise ApplyError(Problem(what, fix="model = accelerator.prepare(model)"))
        return self._step

    def _whole(self, parameters: Any, name: str) -> nn.Module:
        """Return the model whose parameters these are; raise if they are not all of them."""
        model = self._planned(name).model
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        trained = {id(each) for each in model.parameters() if each.requires_grad}
        if {id(each) for each in given if each.requires_grad} != trained:
            what = f"accelerator.{name} was given other parameters than all of the model's, whose "
            what += "norm is taken over the ranks together"
            raise ApplyError(Problem(what, fix=f"accelerator.{name}(model.parameters(), ...)"))
        return model

    # Values of all ranks.

    def gather(self, tensor: Any) -> Any:
        """Gather tensors of the data ranks along dim 0: what ranks have alike is there once."""
        every, mesh = super().gather(tensor), self._mesh
        if not self._has_copies:
            return every
        return recursively_apply(lambda each: each_sample_once(each, mesh), every)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather tensors or objects of the data ranks, each sample of the loader once."""
        if not self._has_copies:
            return super().gather_for_metrics(input_data, use_gather_object)
        if not (use_gather_object or _has_others(input_data)):
            return super().gather_for_metrics(input_data)  # Which calls `gather`.
        every: list[Any] = [None] * self._mesh.world_size
        dist.all_gather_object(every, input_data)
        found = [each for rank in ranks_with_own_samples(self._mesh) for each in every[rank]]
        state = self.gradient_state
        return (
            found[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else found
        )

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduce tensors over the data ranks: what ranks have alike counts once.

        As in accelerate, `scale` has an effect on TPUs alone, which no plan runs on.
        """
        if not self._has_copies:
            return super().reduce(tensor, reduction, scale)
        reduced = reduction_of(reduction)
        every = self.gather(recursively_apply(lambda each: each[None], tensor))
        return recursively_apply(reduced, every)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Return full tensors on rank 0, and an empty dict on the others. All ranks call it."""
        step = self._step
        if step is None or own_module(model) is not own_module(step.model):
            return super().get_state_dict(model, unwrap)
        return full_state_dict(step.model)


def _has_others(data: Any) -> bool:
    """Return True if there is anything but tensors in nested lists and mappings."""
    try:
        recursively_apply(lambda each: each, data, error_on_other_type=True)
    except TypeError:
        return True
    return False
