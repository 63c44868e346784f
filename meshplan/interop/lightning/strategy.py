"""`MeshplanStrategy`: a LightningModule trained under a plan.

The plan is applied to the network in the LightningModule: the one child with parameters, such as
`self.model`, or the LightningModule itself if its layers are its own. `training_step` and the other
steps run unchanged. With pipeline stages, `training_step` cannot be cut at them: there the
LightningModule defines `meshplan_loss(output, batch)`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from meshplan.errors import ApplyError, Problem
from meshplan.interop.external_step import ExternalStep, pipeline_inputs
from meshplan.interop.last_stage import on_last_stage
from meshplan.interop.lightning.optimizers import WholeModel
from meshplan.interop.lightning.parallel import (
    PlannedRanks,
    check_num_ranks,
    find_plan,
    precision_word,
    refuse_two_scaled,
)
from meshplan.interop.lightning.precision import PlannedPrecision
from meshplan.interop.lightning.settings import check_averaging, check_sync_batchnorm, take_settings
from meshplan.interop.lightning.states import (
    load_checkpoint,
    remove_checkpoint,
    save_checkpoint,
)
from meshplan.interop.lightning.whole import (
    OF_SEVERAL_FORWARDS,
    keep_network,
    network_of,
    several_forwards,
    show_stages,
)
from meshplan.runtime.apply.data.data import Replicated
from meshplan.runtime.apply.pipeline.module import PipelinedModule
from meshplan.runtime.apply.wrap import Applied, applied
from meshplan.runtime.base.mesh import JOIN_TIMEOUT
from meshplan.runtime.parallelize import PlanLike, parallelize, spec_of
from meshplan.runtime.train.dataloader import on_this_rank
from meshplan.runtime.watch.guard import guarded, was_reported


class MeshplanStrategy(PlannedRanks, ParallelStrategy):
    """Trains a LightningModule under a plan: `Trainer(strategy=MeshplanStrategy("plan.yaml"))`.

    Settings that the Trainer leaves at their default are taken from the plan: precision, the norm
    at which gradients are clipped, and the microbatches of a step. What both state must agree.

    Args:
        plan: A plan, as for `meshplan.parallelize`; None for the file that the environment variable
            MESHPLAN_PLAN names, else `plan.yaml` in the working directory.
        module: Name of the module in the LightningModule that the plan describes, "" for the
            LightningModule itself; None for its only child with parameters, if it has no other.
        example_inputs: Inputs of that module, as for `meshplan.parallelize`; None for the
            LightningModule's `example_input_array`.
        allow_code: If False, a plan with `apply: "pkg.mod:function"` is rejected.
        timeout: Longest time that a rank waits for others.
        process_group_backend: "nccl" or "gloo"; None for that of the device.

    Raises:
        SpecError: The plan cannot be read.
        PlanError: There is no plan.
    """

    strategy_name = "meshplan"

    def __init__(
        self,
        plan: PlanLike | None = None,
        *,
        module: str | None = None,
        example_inputs: Any = None,
        allow_code: bool = True,
        timeout: timedelta = JOIN_TIMEOUT,
        process_group_backend: str | None = None,
    ) -> None:
        self._plan = find_plan(plan)
        self.spec = spec_of(self._plan)
        self._given_precision = ""
        self._precision_plugin: Any = None
        self._network: nn.Module | None = None
        self._step: ExternalStep | None = None
        self._wanted = module
        self._path = ""
        self._example_inputs = example_inputs
        self._allow_code = allow_code
        self._timeout = timeout
        self._process_group_backend = process_group_backend
        self._modes: list[tuple[nn.Module, bool]] = []
        self.num_nodes = 1
        super().__init__()

    # What Lightning's connector asks and sets.

    @property
    def is_distributed(self) -> bool:
        """True: the Trainer adds samplers over the data ranks."""
        return True

    @property
    def step(self) -> ExternalStep:
        """The steps of the network."""
        assert self._step is not None
        return self._step

    @property
    def precision_plugin(self) -> Any:
        """The precision of the plan."""
        if self._precision_plugin is None:
            word = precision_word(self.spec, self._given_precision)
            self._precision_plugin = PlannedPrecision(self, word)
        return self._precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        if plugin is not None and not isinstance(plugin, PlannedPrecision):
            self._given_precision = str(plugin.precision)
        self._precision_plugin = None

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: a state is loaded into the shards."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """False: `load_checkpoint` loads the optimizer too."""
        return False

    def _configure_launcher(self) -> None:
        environment = self.cluster_environment
        assert environment is not None
        if not environment.creates_processes_externally:
            self._launcher = _SubprocessScriptLauncher(
                environment, self.num_processes, self.num_nodes
            )
        precision_word(self.spec, self._given_precision)
        check_sync_batchnorm(self.spec, is_asked=self._layer_sync is not None)
        check_num_ranks(self.spec, self.num_processes, self.num_nodes)

    # The life of a run.

    def setup_environment(self) -> None:
        """Join the other ranks."""
        super().setup_environment()
        self._join()

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Make the model's tensors on the CPU, or on meta if they are to be empty."""
        with torch.device("meta") if empty_init else nullcontext():
            yield

    def model_to_device(self) -> None:
        """Do nothing: `parallelize` has moved the network."""

    def setup(self, trainer: Any) -> None:
        """Apply the plan, then make the optimizers."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        with guarded("setup"):
            self._apply(trainer)
            if trainer.state.fn == TrainerFn.FITTING:
                self._reset_optimizers_and_schedulers()
                self._make_optimizers(trainer)
                self._check_optimizers()
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            _optimizers_to_device(self.optimizers, self.root_device)

    def _make_optimizers(self, trainer: Any) -> None:
        if not isinstance(self._network, PipelinedModule):
            self.setup_optimizers(trainer)
            return
        whole = WholeModel(self.lightning_module, self._network, self._path)
        with whole.shown():
            self.setup_optimizers(trainer)
        for each in self.optimizers:
            whole.follow(each)

    def _apply(self, trainer: Any) -> None:
        """Apply the plan to the network, unless an earlier run has; compare the Trainer with it."""
        module = self.lightning_module
        self._path = _path_of(module, self._wanted)
        own = network_of(module) or module.get_submodule(self._path)
        state = getattr(own, "meshplan", None)
        if isinstance(state, Applied) and _is_same(state.given.spec, self.spec):
            network = own
        else:
            inputs = self._example_inputs
            if inputs is None:
                inputs = getattr(module, "example_input_array", None)
            network = parallelize(
                own, self._plan, example_inputs=inputs, allow_code=self._allow_code
            )
        if isinstance(network, Replicated):
            network.shows_model = True  # The LightningModule reads config, layers, and the like.
        if network is not self._network:
            self._network, self._step = network, ExternalStep(network)
        if self._path:
            parent, _, name = self._path.rpartition(".")
            setattr(module.get_submodule(parent), name, network)
        # A LightningModule that is the network itself is whole on the device, or in stages.
        for child in module.children() if self._path else ():
            if child is not network:
                child.to(self.root_device)
        self.model = module if self._path else network
        module._device_mesh = applied(network).mesh
        if not self._path:
            keep_network(module, network)
        if isinstance(network, PipelinedModule):
            self._check_pipeline(trainer)
            self._modes = self._modes or _modes_of(network)
            show_stages(module, network, self._path)
        _give_groups(module, self._values_group())
        if trainer.state.fn == TrainerFn.FITTING:
            check_averaging(trainer, is_sharded=not isinstance(network, Replicated))
            take_settings(trainer, self.spec, applied(network).given.accumulate)

    def _check_pipeline(self, trainer: Any) -> None:
        """Raise if a pipeline cannot train this LightningModule."""
        module, plan = self.lightning_module, applied(self.network).plan
        origin = plan.spec.origin("mesh.pp")
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if not callable(getattr(module, "meshplan_loss", None)):
            raise ApplyError(
                Problem(
                    f"training_step of {type(module).__name__} cannot be cut into pipeline stages: "
                    "only the last stage has the output",
                    origin,
                    "define meshplan_loss(self, output, batch), which returns the loss of a "
                    "microbatch and is called in place of training_step",
                )
            )
        if not module.automatic_optimization:
            what = "a pipeline runs its own backward, which manual optimization would call too"
            fix = "leave automatic_optimization as it is, and define meshplan_loss"
            raise ApplyError(Problem(what, origin, fix))

    def _check_optimizers(self) -> None:
        module = self.lightning_module
        is_whole = not self._path and not module.automatic_optimization
        if is_whole and (len(self.optimizers) > 1 or isinstance(self._network, Replicated)):
            raise ApplyError(several_forwards(module))
        if len(self.optimizers) > 1 and isinstance(self._network, PipelinedModule):
            what = f"configure_optimizers made {len(self.optimizers)} optimizers for one pipeline"
            fix = "return one optimizer with several parameter groups"
            raise ApplyError(Problem(what, fix=fix))
        refuse_two_scaled(self.spec, len(self.optimizers))

    def on_exception(self, exception: BaseException) -> None:
        """End the other ranks too, and raise the cause if it is another rank's."""
        if was_reported(exception) or not torch.distributed.is_initialized():
            return
        try:
            with guarded():
                raise exception
        except BaseException as error:
            if error is not exception:
                raise error from exception

    def teardown(self) -> None:
        """Leave the network as it is: moving shards to the CPU would take it apart."""
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    # Steps.

    @contextmanager
    def microbatch(self, *, is_last: bool) -> Iterator[None]:
        """Run forward and backward of one batch inside."""
        trainer = self.lightning_module.trainer
        count = trainer.accumulate_grad_batches
        if not self.lightning_module.automatic_optimization:
            yield
            return
        self._is_last = is_last
        with self.step.microbatch(count, is_last=is_last):
            yield

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Run a batch inside that is not the last one of its step."""
        if self.lightning_module.automatic_optimization:
            with self.microbatch(is_last=False):
                yield
        else:
            with self.step.microbatch(2, is_last=False):
                yield

    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        """Move a batch to this rank's device, under cp its part of the sequence."""
        batch = super().batch_to_device(batch, device, dataloader_idx)
        plan = applied(self.network).plan
        return on_this_rank(batch, plan) if plan.assignment.context is not None else batch

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run `training_step`, or the schedule of a pipeline."""
        batch = args[0] if args else next(iter(kwargs.values()))
        module = self.lightning_module
        with guarded("training_step"):
            if isinstance(self.network, PipelinedModule):
                self._modes = _modes_of(self.network)
            self.step.begin(batch)
            if self.step.is_pipelined:
                return self._pipeline_step(batch)
            is_guarded = module.automatic_optimization
            with self.step.guarding_loss() if is_guarded else nullcontext():
                return self._run("training_step", *args, **kwargs)

    def _run(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a step of the LightningModule; if it is the network, as its forward.

        Then its own layers have their parameters, and the wrappers see one forward.
        """
        module = self.lightning_module
        if self._path or self.step.is_pipelined:
            return getattr(module, name)(*args, **kwargs)
        try:
            return self._forward_redirection(self.model, module, name, *args, **kwargs)
        except RuntimeError as error:
            is_manual = name == "training_step" and not module.automatic_optimization
            if is_manual and any(words in str(error) for words in OF_SEVERAL_FORWARDS):
                raise ApplyError(several_forwards(module)) from error
            raise

    def _pipeline_step(self, batch: Any) -> torch.Tensor:
        module = self.lightning_module
        inputs = getattr(module, "meshplan_inputs", pipeline_inputs)(batch)
        count = module.trainer.accumulate_grad_batches

        def loss(output: Any, part: Any) -> Any:
            with on_last_stage("meshplan_loss"):
                return module.meshplan_loss(output, part)

        return self.step.run_pipeline(inputs, batch, loss, count, is_last=self._is_last)

    def backward(self, closure_loss: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Run backward of a batch."""
        with guarded("backward"):
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run `validation_step`."""
        with self._evaluating("validation_step"):
            return self._run("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run `test_step`."""
        with self._evaluating("test_step"):
            return self._run("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run `predict_step`."""
        with self._evaluating("predict_step"):
            return self._run("predict_step", *args, **kwargs)

    @contextmanager
    def _evaluating(self, name: str) -> Iterator[None]:
        """Run an evaluation inside; the wrappers' buffers cannot be made in inference mode."""
        with guarded(name), torch.inference_mode(False), torch.no_grad():
            yield

    def on_validation_end(self) -> None:
        """Put a pipeline's stages back into the modes that they had before an evaluation.

        Lightning restores the modes of submodules, which the stages of a pipeline are not.
        """
        for each, mode in self._modes:
            each.training = mode

    def on_test_end(self) -> None:
        """As `on_validation_end`."""
        self.on_validation_end()

    def on_predict_end(self) -> None:
        """As `on_validation_end`."""
        self.on_validation_end()

    # States.

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return nothing: `save_checkpoint` writes the shards."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return nothing: `save_checkpoint` writes the shards."""
        return {}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Do nothing: `load_checkpoint` has loaded the shards."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Do nothing: `load_checkpoint` has loaded the shards."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write a checkpoint as a state of meshplan: a folder, which loads under any plan."""
        if storage_options is not None:
            what = "storage_options were given, but a checkpoint is a folder that all ranks share"
            raise ApplyError(Problem(what, fix="leave them out"))
        optimizers = self.optimizers if "optimizer_states" in checkpoint else []
        save_checkpoint(
            self.broadcast(filepath), checkpoint, self.network, optimizers, self._others()
        )

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """Load a checkpoint that was saved under any plan."""
        module = self.lightning_module
        is_fitting = module.trainer.state.fn == TrainerFn.FITTING
        optimizers = self.optimizers if is_fitting else []
        path = self.broadcast(checkpoint_path)
        return load_checkpoint(path, self.network, optimizers, module, strict=module.strict_loading)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint."""
        if self.is_global_zero:
            remove_checkpoint(filepath)

    def _others(self) -> dict[str, torch.Tensor]:
        """Return the LightningModule's tensors outside of the network."""
        if not self._path:
            return {}
        prefix = f"{self._path}."
        found = self.lightning_module.state_dict()
        return {key: value for key, value in found.items() if not key.startswith(prefix)}


def _is_same(own: Any, other: Any) -> bool:
    """Return True if a plan that was applied is the one that is asked for."""
    return own == other or (own.source == other.source and not own.source.startswith("<"))


def _path_of(module: nn.Module, wanted: str | None) -> str:
    """Return the name of the network in a LightningModule, "" for the module itself.

    Raises:
        ApplyError: It has no module of the wanted name.
    """
    if wanted is not None:
        try:
            module.get_submodule(wanted)
        except AttributeError:
            names = ", ".join(name for name, _ in module.named_children())
            what = f"{type(module).__name__} has no module {wanted!r}; it has {names}"
            raise ApplyError(Problem(what, fix="MeshplanStrategy(plan, module=...)")) from None
        return wanted
    if next(module.parameters(recurse=False), None) is not None:
        return ""
    found = [name for name, child in module.named_children() if _has_parameters(child)]
    return found[0] if len(found) == 1 else ""


def _modes_of(network: PipelinedModule) -> list[tuple[nn.Module, bool]]:
    wholes = (network, network.skeleton, *network.stage_modules)
    return [(each, each.training) for whole in wholes for each in whole.modules()]


def _has_parameters(module: nn.Module) -> bool:
    return isinstance(module, PipelinedModule) or next(module.parameters(), None) is not None


def _give_groups(module: nn.Module, group: Any) -> None:
    """Let metrics of torchmetrics gather over the ranks with different samples only."""
    for each in module.modules():
        if hasattr(each, "dist_sync_on_step") and getattr(each, "process_group", 0) is None:
            each.process_group = group
