"""`MeshplanFabricStrategy`: a loop written with Lightning Fabric, under a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from lightning.fabric.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.fabric.strategies.parallel import ParallelStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from torch import nn

from meshplan.errors import ApplyError, Origin, PlanError, Problem
from meshplan.interop.external_step import ExternalStep
from meshplan.interop.lightning.parallel import (
    PlannedRanks,
    check_num_ranks,
    find_plan,
    precision_word,
    refuse_two_scaled,
)
from meshplan.interop.lightning.states import find_saved, folder_of, save_over
from meshplan.interop.own_loop import LoopWords, check_axes, loop_problems
from meshplan.layout.mesh import DATA_AXES
from meshplan.runtime.apply.wrap import applied
from meshplan.runtime.base.mesh import JOIN_TIMEOUT
from meshplan.runtime.parallelize import PlanLike, parallelize, spec_of
from meshplan.runtime.state.load import load
from meshplan.runtime.train.gradient_scale import clip_grad_norm_, clip_grad_value_
from meshplan.runtime.watch.guard import guarded
from meshplan.spec.strategies import resolve_mesh

_WORDS: Final = LoopWords(
    loop="a loop of Fabric",
    instead="Trainer(strategy=MeshplanStrategy(...))",
    prepare="fabric.setup and fabric.setup_dataloaders",
    backward="fabric.backward",
    clip="fabric.clip_gradients(model, optimizer, max_norm={norm})",
    accumulate="run the loop's microbatches but the last one inside fabric.no_backward_sync(model)",
)


class MeshplanFabricStrategy(PlannedRanks, ParallelStrategy):
    """Runs a Fabric loop under a plan: `Fabric(strategy=MeshplanFabricStrategy("plan.yaml"))`.

    Set the model up first, then make the optimizer: `model = fabric.setup(model)`, then
    `optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters()))`.

    Args:
        plan: A plan, as for `meshplan.parallelize`; None for the file that the environment variable
            MESHPLAN_PLAN names, else `plan.yaml` in the working directory.
        example_inputs: Inputs of the model, as for `meshplan.parallelize`.
        allow_code: If False, a plan with `apply: "pkg.mod:function"` is rejected.
        timeout: Longest time that a rank waits for others.
        process_group_backend: "nccl" or "gloo"; None for that of the device.

    Raises:
        SpecError: The plan cannot be read.
        PlanError: There is no plan.
    """

    def __init__(
        self,
        plan: PlanLike | None = None,
        *,
        example_inputs: Any = None,
        allow_code: bool = True,
        timeout: timedelta = JOIN_TIMEOUT,
        process_group_backend: str | None = None,
    ) -> None:
        self._plan = find_plan(plan)
        self.spec = spec_of(self._plan)
        self._network: nn.Module | None = None
        self._example_inputs = example_inputs
        self._allow_code = allow_code
        self._timeout = timeout
        self._process_group_backend = process_group_backend
        self._step: ExternalStep | None = None
        self._num_optimizers = 0
        self.num_nodes = 1
        super().__init__()
        self._backward_sync_control = _SyncControl(self)

    @property
    def precision(self) -> Any:
        """A plugin that casts nothing: the dtypes are those of the plan's wrappers."""
        return super().precision

    @precision.setter
    def precision(self, plugin: Any) -> None:
        if plugin is not None:
            precision_word(self.spec, str(plugin.precision))
        self._precision = None

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The ranks that read samples of their own, also before the model is set up."""
        if self._network is not None:
            return super().distributed_sampler_kwargs
        mesh, _ = resolve_mesh(self.spec, dist.get_world_size())
        index = mesh.index(dist.get_rank(), DATA_AXES)
        return {"num_replicas": mesh.size(*DATA_AXES), "rank": index}

    def _configure_launcher(self) -> None:
        environment = self.cluster_environment
        assert environment is not None
        if not environment.creates_processes_externally:
            self._launcher = _SubprocessScriptLauncher(
                environment, self.num_processes, self.num_nodes
            )
        check_num_ranks(self.spec, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        """Join the other ranks."""
        super().setup_environment()
        self._join()

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Return the context in which a model is made: on the CPU, or on meta if it is empty."""
        return torch.device("meta") if empty_init else nullcontext()

    def module_to_device(self, module: nn.Module) -> None:
        """Do nothing: `parallelize` moves the model."""

    def setup_module_and_optimizers(self, *args: Any, **kwargs: Any) -> Any:
        """Raise: an optimizer that was made before the plan is applied has other parameters."""
        raise ApplyError(
            Problem(
                "fabric.setup was given a model and an optimizer, but applying a plan replaces "
                "the parameters that the optimizer was made from",
                fix="model = fabric.setup(model), then optimizer = "
                "fabric.setup_optimizers(torch.optim.AdamW(model.parameters()))",
            )
        )

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Apply the plan."""
        spec = self.spec
        if self._network is not None:
            what = "fabric.setup was called for a second model, but a plan describes one"
            fix = "make the models parts of one module, or meshplan.parallelize the second"
            raise ApplyError(Problem(what, spec.origin(""), fix))
        check_axes(spec, dist.get_world_size(), _WORDS)
        network = parallelize(
            module, self._plan, example_inputs=self._example_inputs, allow_code=self._allow_code
        )
        if problems := loop_problems(applied(network).plan, _WORDS):
            raise PlanError(problems)
        self._network, self._step = network, ExternalStep(network)
        return network

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return the optimizer; raise if a scaled loss would have two."""
        self._num_optimizers += 1
        refuse_two_scaled(self.spec, self._num_optimizers)
        return super().setup_optimizer(optimizer)

    @property
    def step(self) -> ExternalStep:
        """The steps of the network."""
        assert self._step is not None
        return self._step

    def backward(self, tensor: torch.Tensor, module: Any, *args: Any, **kwargs: Any) -> None:
        """Run backward, of the scaled loss under fp16."""
        with guarded("backward"):
            super().backward(self.step.scaled(tensor), module, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Take the optimizer's step, unless a gradient overflowed float16."""
        with guarded("optimizer_step"):
            output = None
            if self.step.before_step(optimizer):
                output = optimizer.step(**kwargs)
            self.step.finish()
        return output

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """Clip by the norm over all meshes; under fp16 a step that overflowed is skipped later."""
        error_if_nonfinite = self.step.before_step(optimizer) and error_if_nonfinite
        return clip_grad_norm_(self.network, max_norm, norm_type, error_if_nonfinite)

    def clip_gradients_value(self, module: nn.Module, optimizer: Any, clip_val: float) -> None:
        """Clamp each element of the gradients."""
        self.step.before_step(optimizer)
        clip_grad_value_(self.network, clip_val)

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Write a state of meshplan: a folder, which loads under any plan."""
        if storage_options is not None or filter is not None:
            word = "filter" if filter is not None else "storage_options"
            what = f"fabric.save was given {word}=, but a state is written as a whole"
            raise ApplyError(Problem(what, fix="leave it out"))
        model, optimizer, rest = self._parts(state)
        folder = folder_of(self.broadcast(path))
        extra = {key: _state_of(value) for key, value in rest.items()}
        save_over(folder, model, optimizer, applied(model).history.steps, extra)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a state that was saved under any plan into the objects of `state`.

        Returns:
            Values that the state has beside them.
        """
        state = {"model": state} if isinstance(state, nn.Module) else state or {}
        model, optimizer, rest = self._parts(state)
        folder = find_saved(self.broadcast(path))
        found = load(folder, model, optimizer, strict=strict)
        left = dict(found.extra or {})
        missing = [key for key in rest if key not in left]
        if missing and strict:
            what = f"the state has no {', '.join(missing)}"
            raise ApplyError(Problem(what, Origin(str(folder)), "pass strict=False to skip it"))
        for key, value in rest.items():
            if key not in left:
                continue
            if hasattr(value, "load_state_dict"):
                value.load_state_dict(left.pop(key))
            else:
                state[key] = left.pop(key)
        return left

    def _parts(self, state: Mapping[str, Any]) -> tuple[nn.Module, Any, dict[str, Any]]:
        """Return the model, the optimizer and the rest of what Fabric saves or loads."""
        optimizers = [v for v in state.values() if isinstance(v, torch.optim.Optimizer)]
        models = [value for value in state.values() if isinstance(value, nn.Module)]
        if models != [self.network] or len(optimizers) > 1:
            what = f"a state has one model and at most one optimizer, not {len(models)} and "
            what += str(len(optimizers))
            fix = "pass {'model': model, 'optimizer': optimizer, ...}, as fabric.setup returned it"
            raise ApplyError(Problem(what, fix=fix))
        known = [*models, *optimizers]
        rest = {k: v for k, v in state.items() if not any(v is each for each in known)}
        return models[0], optimizers[0] if optimizers else None, rest


def _state_of(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "state_dict") else value


class _SyncControl(_BackwardSyncControl):
    """`fabric.no_backward_sync`: gradients are reduced in the last backward of a step only."""

    def __init__(self, strategy: MeshplanFabricStrategy) -> None:
        self._strategy = strategy

    @contextmanager
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> Iterator[None]:
        """Run forward and backward of a microbatch inside; the last one has `enabled=False`."""
        with self._strategy.step.own_microbatch(is_last=not enabled):
            yield
